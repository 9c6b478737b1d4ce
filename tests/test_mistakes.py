"""Mistakes on purpose: the message of each names the thing, the place and the cure, and the cure
works.
"""

import contextlib
import gc
import io
import json
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
import traceback
import warnings
from pathlib import Path
from signal import SIGTERM

import pytest

import sglang_lite as sgl
from sglang_lite.cli import main
from tests.children import send
from tests.server.conftest import serving

MISTAKES = tomllib.loads(Path(__file__).with_name("mistakes.toml").read_text(encoding="utf-8"))[
    "mistake"
]
CASES = [pytest.param(each, id=each["title"]) for each in MISTAKES]
IMPORTS = "import sglang_lite as sgl\n\n\n"


def test_there_are_80_mistakes():
    assert len({each["title"] for each in MISTAKES}) == len(MISTAKES) == 80


@pytest.mark.parametrize("mistake", CASES)
def test_a_message_names_the_thing_the_place_and_a_cure_that_works(
    mistake, place, monkeypatch, capsys
):
    message = of_program(mistake["code"]) if "code" in mistake else of_command(mistake, capsys)
    for part in (*mistake["says"], mistake["cure"]):
        assert part in message
    if "code" in mistake:
        check_program(mistake, place, capsys)
    else:
        check_commands(mistake, monkeypatch, capsys)


@pytest.mark.parametrize("mistake", CASES)
def test_what_is_corrected_has_what_the_cure_advises(mistake):
    text = str(corrected(mistake) if "code" in mistake else mistake["corrected"])
    if not mistake["cure"].startswith("Leave"):
        advised = re.findall(
            r"(?<![\w.])([a-z_]\w*)=(?!=)|(--[a-z]+)|sgl\.([a-z]\w*)\(", mistake["cure"]
        )
        assert [name for names in advised for name in names if name and name not in text] == []


def of_program(code):
    """Message of a program, an error or a warning, which has to point at the line that is wrong."""
    text = IMPORTS + code
    Path("prog.py").write_text(text, encoding="utf-8")
    here = 1 + next(number for number, line in enumerate(text.splitlines()) if "# here" in line)
    sgl.set_default_backend(sgl.ScriptedBackend(default="fine"))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            runpy.run_path("prog.py")
        except Exception as error:
            where = getattr(error, "where", None)
            frames = [
                each.lineno
                for each in traceback.extract_tb(error.__traceback__)
                if each.filename == "prog.py"
            ]
            assert here in ([*frames, where.line] if where else frames)
            return "\n".join([str(error), *getattr(error, "__notes__", ())])
    (found,) = (each for each in warned if each.filename.endswith("prog.py"))
    assert found.lineno == here
    return str(found.message)


def of_command(mistake, capsys):
    """What a command prints, which is one line, and the last thing that it does."""
    write(mistake.get("files", {}))
    status: object
    try:
        status = main(shlex.split(mistake["command"])[1:])
    except SystemExit as ended:
        status = ended.code
    said = capsys.readouterr().err
    assert status in (1, 2)
    assert said.startswith("sglang-lite")
    assert said.count("\n") == 1
    return said


# -------------------------------------------------------------------------------------------- cures


@pytest.fixture
def place(tmp_path, monkeypatch, small_file):
    """Folder in which Python is started, with a small model. The environment names a server of
    APIs.
    """
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "small.gguf").symlink_to(small_file)
    monkeypatch.chdir(tmp_path)
    with contextlib.ExitStack() as stack:
        yield Place(stack, monkeypatch)
    sgl.set_default_backend(sgl.ScriptedBackend())
    gc.collect()  # engines that a program has started


class Place:
    """What a corrected program finds around it.

    Args:
        stack: closes the servers.
        patch: changes the environment.
    """

    def __init__(self, stack, patch):
        self._stack, self._patch = stack, patch

    def api(self):
        """Server of OpenAI's and Anthropic's protocols, which the environment names."""
        server = self._stack.enter_context(sgl.server_for_tests())
        server.answers = "fine"
        self._patch.setenv("OPENAI_BASE_URL", server.openai["base_url"])
        self._patch.setenv("OPENAI_API_KEY", "a key of yours")
        self._patch.setenv("ANTHROPIC_BASE_URL", server.url)
        self._patch.setenv("ANTHROPIC_API_KEY", "")
        return server

    def running(self):
        """Address of a server of this package."""
        engine = self._stack.enter_context(sgl.Engine("models/small.gguf", in_process=True))
        return self._stack.enter_context(serving(engine))


def corrected(mistake):
    """Program that follows the advice: the line that the message points at is replaced, unless it
    is given whole.
    """
    if "corrected" in mistake:
        return mistake["corrected"]
    lines = mistake["code"].splitlines()
    return "\n".join(mistake["instead"] if "# here" in line else line for line in lines)


def check_program(mistake, place, capsys):
    """Runs a corrected program, and checks what it is to show."""
    code = corrected(mistake)
    backend = sgl.ScriptedBackend(default=mistake.get("answer", "fine"))
    sgl.set_default_backend(backend)
    names = {"backend": backend, "json": json, "Path": Path, "times_out": times_out}
    if "server." in str(mistake["shows"]) or "ADDRESS" in code:
        names["server"] = place.api()
        names["ADDRESS"] = names["server"].url.removeprefix("http://")
    if "RUNNING" in code:
        names["RUNNING"] = place.running()
    folder = Path("program")  # Python is started elsewhere
    folder.mkdir()
    (folder / "prog.py").write_text(IMPORTS + code, encoding="utf-8")
    if "cat.png" in code:
        from tests.runtime.media.seeing import png

        (folder / "cat.png").write_bytes(png(8, 8))
    capsys.readouterr()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = runpy.run_path(str(folder / "prog.py"), names)
    names["printed"] = capsys.readouterr().out
    for each in mistake["shows"]:
        assert eval(each, {**found, **names}), each  # of this repository


def check_commands(mistake, monkeypatch, capsys):
    """Runs corrected commands, and checks that one prints what it is to print."""
    write(mistake.get("corrected_files", {}))
    printed = ""
    for command in mistake["corrected"]:
        arguments = shlex.split(command)[1:]
        if arguments[0] == "serve":
            printed += first_line_of_server(arguments)
        else:
            monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n"))
            assert main(arguments) == 0
            printed += capsys.readouterr().out
    assert mistake["prints"] in printed


def first_line_of_server(arguments):
    """What a server prints when it listens. It is ended then."""
    with subprocess.Popen(
        [sys.executable, "-m", "sglang_lite", *arguments], stdout=subprocess.PIPE, text=True
    ) as server:
        line = server.stdout.readline()
        send(server.pid, SIGTERM)
    return line


def write(files):
    for name, text in files.items():
        Path(name).write_text(text, encoding="utf-8")


def times_out(program):
    """Whether a program gives up on an answer that takes a minute."""
    with pytest.raises(sgl.RequestTimeoutError):
        _ = program.run("rain", backend=sgl.ScriptedBackend(default="fine", latency=60))["text"]
    return True
