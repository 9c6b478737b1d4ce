"""The ten walks of the cookbook: from an empty folder to a working program, as their page says,
command by command.
"""

import contextlib
import io
import re
import runpy
import shlex
import shutil
from pathlib import Path

import pytest

import sglang_lite as sgl
from sglang_lite.cli import main
from tests.docs.test_recipes import default_model_as_folder

PAGE = (Path(__file__).parents[2] / "docs" / "cookbook" / "walks.md").read_text()
WALKS = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))
ANSWERS = {
    "The two-letter code": "FR",
    "Extract name and age": '{"name": "Maria Lopez", "age": 34}',
}


@pytest.fixture
def newcomer(documented, model_file, tmp_path, monkeypatch):
    """An empty folder, the reader's own model in two forms, a server of vLLM's and a key of
    OpenAI's: imitations.
    """
    monkeypatch.chdir(tmp_path)
    with sgl.testing.server_for_tests(ANSWERS, compatible=True) as server:
        monkeypatch.setenv("VLLM_URL", server.openai["base_url"])
        monkeypatch.setenv("OPENAI_BASE_URL", server.openai["base_url"])
        monkeypatch.setenv("OPENAI_API_KEY", "key-for-tests")
        sgl.set_default_backend(documented)
        yield


def typed(command: str) -> str:
    """What a command prints."""
    program, *arguments = shlex.split(command)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        if program == "python":
            runpy.run_path(arguments[0], run_name="__main__")
        else:
            assert program == "sglang-lite"
            assert main(arguments) == 0
    return out.getvalue()


def test_there_are_ten():
    assert len(WALKS) == 10


@pytest.mark.parametrize("walk", WALKS)
def test_a_walk_arrives(walk, newcomer, model_file):
    text = WALKS[walk]
    if "own.gguf" in text:
        shutil.copy(model_file, "own.gguf")
    if "own_folder" in text:
        default_model_as_folder(Path("own_folder"))
    for name, program in re.findall(
        r'^```python title="([^"]+)"\n(.*?)^```$', text, re.DOTALL | re.MULTILINE
    ):
        Path(name).write_text(program)
    commands = re.findall(r"^```console\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert commands
    for command, shown in re.findall(
        r"^\$ ((?:python|sglang-lite) [^\n]*)\n((?:(?!\$ (?:python|sglang)).*\n)*)",
        "".join(commands),
        re.MULTILINE,
    ):
        assert typed(command) == shown
