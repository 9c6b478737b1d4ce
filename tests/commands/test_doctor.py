"""What `sglang-lite doctor` tells of a machine, and of one that lacks something."""

import io
import logging
import sys

import pytest

from sglang_lite.cli import main
from sglang_lite.commands.doctor import diagnose_all


@pytest.fixture(autouse=True)
def _level():
    """The level of messages, which an engine sets for its whole process."""
    logger = logging.getLogger("sglang_lite")
    before = logger.level
    yield
    logger.setLevel(before)


@pytest.fixture
def no_model(monkeypatch, tmp_path):
    monkeypatch.setenv("SGLANG_LITE_CACHE", str(tmp_path / "cache"))


def found():
    return {each.about: each for each in diagnose_all()}


def test_this_machine_is_told_with_the_speed_of_the_default_model(model_file, capsys):
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for about in (
        "package",
        "[local]",
        "processor",
        "compiler",
        "GPU",
        "cache",
        "keys",
        "terminal",
    ):
        assert f"{about:12} " in printed
    assert "tokens/s in one generation" in printed


def test_a_machine_without_a_model_is_told_how_to_fetch_it(no_model):
    assert found()["speed"].advice == "sglang-lite models pull smollm2-135m"


def test_a_machine_without_an_engines_packages_is_told_what_to_install(monkeypatch):
    for name in ("torch", "openai"):
        monkeypatch.setitem(sys.modules, name, None)
    told = found()
    assert told["[local]"].found == "missing: torch"
    assert "pip install 'sglang-lite[openai]'" in told["[openai]"].advice
    assert told["engine"].found == "none without torch"
    assert "speed" not in told


@pytest.mark.parametrize(
    ("platform", "advice"), [("win32", "wsl --install"), ("darwin", "is not tested"), ("linux", "")]
)
def test_a_platform_is_told_what_is_known_of_it(monkeypatch, platform, advice):
    monkeypatch.setattr("sglang_lite.commands.doctor.sys.platform", platform)
    told = next(iter(diagnose_all())).advice
    assert advice in told
    assert bool(told) == bool(advice)


def test_a_cache_that_can_not_be_made_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("SGLANG_LITE_CACHE", "/proc/nowhere")
    assert found()["cache"].found == "/proc/nowhere can't be written"


def test_keys_are_named_and_not_shown(monkeypatch, no_model):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    told = found()["keys"]
    assert told.found == "set: OPENAI_API_KEY"
    assert "secret" not in told.as_text()


def test_a_terminal_without_utf8_is_told(monkeypatch, no_model):
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding="latin-1"))
    told = found()["terminal"]
    assert told.found == "latin-1"
    assert "PYTHONIOENCODING=utf-8" in told.advice
