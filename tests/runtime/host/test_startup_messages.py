"""Messages of an engine while it starts, and who gets them."""

import contextlib
import logging
import sys
from typing import Any

import pytest

import sglang_lite as sgl
from sglang_lite.runtime.host import startup_messages

SMALL: dict[str, Any] = {"max_total_tokens": 256, "context_length": 128}


@contextlib.contextmanager
def no_logging():
    """As in a program that has set up none; pytest has."""
    logger, root = logging.getLogger("sglang_lite"), logging.getLogger()
    level, ours, theirs = logger.level, list(logger.handlers), list(root.handlers)
    logger.handlers, root.handlers = [], []
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.handlers, root.handlers = ours, theirs


def test_messages_of_a_level_in_any_letters_are_shown_without_a_logging_set_up(capsys):
    with (
        no_logging(),
        sgl.Engine("smollm2-135m", log_level="Info", dtype="float32", **SMALL, in_process=True),  # type: ignore[call-overload]  # in any letters
    ):
        pass
    said = capsys.readouterr().err
    assert "smollm2-135m on cpu, float32, room for 256 tokens; ready after" in said
    assert said.count("ready after") == 1


def test_who_sets_up_logging_later_hears_nothing_twice(capsys):
    with no_logging():
        startup_messages.set_up_logging("INFO")
        logging.getLogger().addHandler(logging.NullHandler())
        startup_messages.announce_line("a line", "info")
    assert capsys.readouterr().err == ""


def test_a_terminal_is_told_and_a_file_is_not(capsys, monkeypatch):
    with no_logging():
        startup_messages.announce_line("a line", None)
        assert capsys.readouterr().err == ""
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
        startup_messages.announce_line("a line", None)
        assert capsys.readouterr().err == "a line\n"
        startup_messages.announce_line("a line", "error")
        assert capsys.readouterr().err == ""


def test_all_parts_come_whether_a_bar_is_shown_or_not(monkeypatch):
    assert list(startup_messages.show_loading_progress(range(3), None)) == [0, 1, 2]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert list(startup_messages.show_loading_progress(range(3), None)) == [0, 1, 2]


def test_a_level_that_is_none_is_refused():
    with pytest.raises(sgl.ParameterError, match="log_level: 'loud'"):
        sgl.Engine(log_level="LOUD", in_process=True)  # type: ignore[call-overload]  # wrong on purpose


def test_a_model_by_position_is_the_model(tmp_path):
    with pytest.raises(sgl.ModelError, match=r"no config\.json"):
        sgl.Engine(tmp_path, in_process=True)
    with pytest.raises(sgl.ParameterError, match="two names"):
        sgl.Engine("a", model_path="b", in_process=True)  # type: ignore[call-overload]  # wrong on purpose
