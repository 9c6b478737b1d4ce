"""Commands from other threads: those that come together are run together."""

import threading

import pytest

from sglang_lite.runtime.core.inbox import Inbox

LONG = 3600.0  # seconds: a test that waited so long would not end


class ReachedError(Exception):
    pass


def last():
    raise ReachedError


def test_nothing_is_waited_for_after_a_lone_command():
    inbox, ran = Inbox(), []
    inbox.post(lambda: ran.append("lone"))
    inbox.wait()
    inbox.run_until_quiet(LONG, LONG)
    assert ran == ["lone"]


def test_what_follows_a_burst_is_waited_for():
    inbox, ran = Inbox(), []
    follower = threading.Thread(target=lambda: inbox.post(last))
    inbox.post(lambda: ran.append("first"))
    inbox.post(lambda: ran.append("second"))
    inbox.post(follower.start)
    inbox.wait()
    with pytest.raises(ReachedError):  # it was run, too
        inbox.run_until_quiet(LONG, LONG)
    assert ran == ["first", "second"]
    follower.join()


def test_a_burst_ends_where_no_more_commands_come():
    inbox, ran = Inbox(), []
    inbox.post(lambda: ran.append("first"))
    inbox.post(lambda: ran.append("second"))
    inbox.run_until_quiet(0.0, LONG)
    assert ran == ["first", "second"]


def test_a_burst_is_waited_for_no_longer_than_it_may_last():
    inbox = Inbox()
    inbox.post(last)
    inbox.run_until_quiet(LONG, 0.0)
    assert not inbox.empty
