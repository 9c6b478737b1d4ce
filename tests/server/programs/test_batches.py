"""Batches of programs on a server, and how they end before their end."""

import threading

import pytest

import sglang_lite as sgl
from sglang_lite import Engine
from tests.children import in_a_child
from tests.constraints.test_generation import random_model
from tests.server.conftest import serving
from tests.server.programs.writing import LONG, endpoint, interrupted_batch, write
from tests.waiting import until


@pytest.fixture(scope="module")
def small():
    with Engine.of(random_model(), max_running=8) as engine:
        yield engine


@pytest.fixture(scope="module")
def small_url(small):
    with serving(small) as url:
        yield url


@pytest.fixture(scope="module")
def remote(small_url):
    remote = endpoint(small_url)
    yield remote
    remote.shutdown()


def when_running(engine, call):
    """Calls, on a thread, when the engine has something to do."""

    def wait():
        until(lambda: engine.stats()["running"])
        call()

    threading.Thread(target=wait).start()


def test_an_interrupt_ends_a_batch_there(small_url, small):
    assert in_a_child(interrupted_batch, small_url)
    until(lambda: not small.stats()["running"])


@sgl.function
def around(s, found):
    found += write.run_batch(LONG, on_error="return", max_new_tokens=400)


def test_a_batch_inside_a_body_ends_with_the_run(remote, small):
    found = []
    state = around.run(found, backend=remote, stream=True)
    when_running(small, state.cancel)
    until(lambda: len(found) == len(LONG))
    assert sgl.RequestAbortedError in {type(each) for each in found}
    until(lambda: not small.stats()["running"])
    late = []
    around.run(late, backend=remote, timeout=0.01)
    assert {type(each) for each in late} == {sgl.RequestTimeoutError}
    until(lambda: not small.stats()["running"])


def test_more_programs_than_connections_are_allowed_are_told_what_to_do(small):
    with serving(small, max_connections_per_client=6) as url:
        remote = endpoint(url)
        with pytest.raises(
            sgl.SglError, match=r"6 connections of this client are open.*num_threads="
        ):
            write.run_batch(LONG[:40], backend=remote, num_threads=40, max_new_tokens=2)
        remote.shutdown()


def test_a_batch_of_as_many_programs_as_are_run_by_default_is_not_refused(small_url):
    """On a machine with 16 processors or more."""
    remote = endpoint(small_url)
    states = write.run_batch(LONG[:256], backend=remote, num_threads=256, max_new_tokens=1)
    assert all(state["a"] is not None for state in states)
    remote.shutdown()
