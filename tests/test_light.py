"""All that needs no model runs without what models need: `pip install sglang-lite`."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import sglang_lite as sgl
from sglang_lite.runtime.structured_output import registry
from sglang_lite.runtime.structured_output.vocabulary import Vocabulary

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BROUGHT = ("tokenizers", "huggingface_hub")  # by transformers


def names(requirements):
    """Modules of requirements, other extras of this package left out."""
    found = (re.match(r"[\w-]+", each) for each in requirements)
    return [
        each[0].replace("-", "_") for each in found if each is not None and each[0] != "sglang-lite"
    ]


EXTRAS = PROJECT["optional-dependencies"]
LOCAL = (
    *names(EXTRAS["grammar"]),
    *names(EXTRAS["cpu"]),
    *names(EXTRAS["local"]),
    *BROUGHT,
    "requests",
)
WITHOUT = f"""
import sys

refused = {set(LOCAL)!r}

class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in refused:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Refusing())
"""
PROGRAM = """
import contextlib
import io

import pydantic
import sglang_lite as sgl
import sglang_lite.cli
import sglang_lite.wire

class Person(pydantic.BaseModel):
    name: str
    age: int

@sgl.function
def about(s, who):
    s += sgl.system("Be brief.") + sgl.user(f"Who is {who}?")
    s += sgl.assistant(sgl.gen("person", type=Person))
    with s.grammar(sgl.Regex("[ab]+")):
        s += "a"
    branches = s.fork(2)
    branches[0] += sgl.select("choice", ["x", "y"])
    branches.join()

for name in sgl.__all__:
    getattr(sgl, name)
state = about.run("Ann", backend=sgl.ScriptedBackend({"Ann": '{"name": "Ann", "age": 3}'}))
assert state["person"] == Person(name="Ann", age=3)
assert sgl.OpenAI("gpt-4o", api_key="none", base_url="http://localhost:1/v1")
assert sgl.Anthropic("claude", api_key="none")
assert about.run_batch([{"who": "Ann"}], backend=sgl.ScriptedBackend({"Ann": '{"name": "Ann", "age": 3}'}))
about.trace()
assert "Ann" in state._repr_html_()
assert sglang_lite.cli.main(["bench"]) == sglang_lite.cli.main(["chat"]) == 1
with contextlib.redirect_stdout(io.StringIO()) as told:
    assert sglang_lite.cli.main(["doctor"]) == 0
assert "pip install 'sglang-lite[local]'" in told.getvalue()
sys.modules["uvicorn"] = None
try:
    sglang_lite.cli.main(["serve"])
except SystemExit as ended:
    assert "pip install 'sglang-lite[server]'" in str(ended)
else:
    raise AssertionError("it serves")
for needs in (sgl.Engine, lambda: sgl.Engine(in_process=True), lambda: sgl.grammar.check(Person, model="smollm2-135m")):
    try:
        needs()
    except sgl.BackendError as error:
        assert "torch, transformers, tokenizers, safetensors, gguf and numpy, which are not installed" in str(error)
        assert "pip install 'sglang-lite[local]', or [cpu] without GPU kernels" in str(error)
    else:
        raise AssertionError(needs)
try:
    sgl.grammar.matches(sgl.Regex("a+"), "aa")
except sgl.BackendError as error:
    assert "pip install 'sglang-lite[grammar]'" in str(error)
else:
    raise AssertionError("it matches")
print("done", [name for name in sys.modules if name.partition(".")[0] in LOCAL])
refused.remove("numpy")
assert sgl.grammar.matches(sgl.Regex("a+"), "aa")
assert sgl.grammar.check(Person).example
"""


def test_what_needs_no_model_runs_without_what_models_need():
    code = WITHOUT + f"LOCAL = {LOCAL!r}\n" + PROGRAM
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("done []\n", 0), done.stderr


def test_the_extra_for_models_is_in_those_that_start_one():
    assert "torch" in LOCAL
    assert set(names(PROJECT["dependencies"])).isdisjoint(LOCAL)
    for extra in ("server", "dev"):
        assert "sglang-lite[local]" in EXTRAS[extra]
    assert "local" in EXTRAS["all"][0]
    assert EXTRAS["local"][0] == "sglang-lite[cpu]"
    assert EXTRAS["cpu"][0] == "sglang-lite[grammar]"
    # xgrammar requires triton, which has 1.0 GB
    assert not {"triton", "xgrammar"} & set(names(EXTRAS["cpu"]))


@pytest.mark.parametrize("name", ["xgrammar", "outlines"])
def test_an_optional_grammar_engine_that_is_not_installed_is_said(name, monkeypatch):
    monkeypatch.setattr(registry, "is_installed", lambda package: False)
    with pytest.raises(
        sgl.ParameterError, match=rf"constraint_backend: '{name}' needs .* 'sglang-lite\[local\]'"
    ):
        registry.make_engine(name, Vocabulary((b"a",), ()))
