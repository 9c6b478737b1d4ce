"""All that needs no model runs without what models need: `pip install sglang-lite`."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BROUGHT = ("tokenizers", "huggingface_hub")  # by transformers


def names(requirements):
    """Modules of requirements."""
    found = (re.match(r"[\w-]+", each) for each in requirements)
    return [each[0].replace("-", "_") for each in found if each is not None]


LOCAL = (*names(PROJECT["optional-dependencies"]["local"]), *BROUGHT)
WITHOUT = f"""
import sys

class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {LOCAL!r}:
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
assert sgl.grammar.matches(sgl.Regex("a+"), "aa")
assert sgl.grammar.check(Person).example
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
        assert "torch, transformers, tokenizers, safetensors, gguf and xgrammar, which are not installed" in str(error)
        assert "pip install 'sglang-lite[local]'" in str(error)
    else:
        raise AssertionError(needs)
print("done", [name for name in sys.modules if name.partition(".")[0] in LOCAL])
"""


def test_what_needs_no_model_runs_without_what_models_need():
    code = WITHOUT + f"LOCAL = {LOCAL!r}\n" + PROGRAM
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "done []\n", done.stderr


def test_the_extra_for_models_is_in_those_that_start_one():
    extras = PROJECT["optional-dependencies"]
    assert "torch" in LOCAL
    assert set(names(PROJECT["dependencies"])).isdisjoint(LOCAL)
    for extra in ("server", "dev"):
        assert "sglang-lite[local]" in extras[extra]
    assert "local" in extras["all"][0]
