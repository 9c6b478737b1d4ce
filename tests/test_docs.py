"""The snippets of the README and the docs: they compile, name what there is, and run where they need no network."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import sglang_lite as sgl
from sglang_lite.cli import main
from sglang_lite.commands.chat import HELP
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.embedding import spec as embedding_spec
from sglang_lite.runtime.models import families, read_gguf
from sglang_lite.runtime.models.aliases import ALIASES
from tests.server.conftest import serving

ROOT = Path(__file__).parent.parent
SNIPPETS = [
    pytest.param(text, id=f"{path.name}-{i}")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md")
    for i, text in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL))
]


def test_there_are_snippets():
    assert len(SNIPPETS) >= 4


@pytest.mark.parametrize("text", SNIPPETS)
def test_a_snippet_compiles_and_names_what_there_is(text):
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "sgl":
            assert hasattr(sgl, node.attr)
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("sgl."):
            accepts(getattr(sgl, node.func.attr), node)


def accepts(callee, call):
    given = {keyword.arg: None for keyword in call.keywords if keyword.arg}
    signature = inspect.signature(callee)
    bind = signature.bind if len(given) == len(call.keywords) else signature.bind_partial  # `**client` has the rest
    bind(*call.args, **given)
    if callee is sgl.Engine:
        EngineConfig.make(**{k.arg: ast.literal_eval(k.value) for k in call.keywords})


def test_the_first_program_of_the_readme_prints_what_it_shows(model_file, capsys):
    text = str(SNIPPETS[0].values[0])
    with sgl.Engine(deterministic=True, dtype="float32", in_process=True) as engine:
        sgl.set_default_backend(engine)
        exec(compile(text, "README.md", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out.splitlines() == re.findall(r"^print\(.*\)  # (.*)$", text, re.MULTILINE)


def test_the_program_of_quotes_prints_what_it_shows(model_file, capsys):
    page = (ROOT / "docs" / "constraints.md").read_text()
    text, shown = re.search(r"(from typing import Annotated\n.*?)```.*?```\n(.*?)```", page, re.DOTALL).groups()
    with sgl.Engine(deterministic=True, dtype="float32", in_process=True) as engine:
        sgl.set_default_backend(engine)
        exec(compile(text, "constraints.md", "exec"), {"__name__": "constraints", "sgl": sgl})
    assert capsys.readouterr().out == shown


def test_the_program_of_the_page_on_notebooks_prints_what_it_shows(capsys):
    page = (ROOT / "docs" / "notebooks.md").read_text()
    text, shown = re.search(r"```python\n(.*?)```\n```\n(.*?)```", page, re.DOTALL).groups()
    executed(text, {})
    assert capsys.readouterr().out == shown


def test_the_project_of_the_page_on_commands_prints_what_it_shows(capsys, tmp_path, monkeypatch, engine):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "commands.md").read_text()
    assert HELP in page
    for command, shown in re.findall(r"\$ sglang-lite ((?:init|run) [^\n]*)\n(.*?)```", page, re.DOTALL):
        sgl.set_default_backend(engine)
        assert main(command.split()) == 0
        assert capsys.readouterr().out == shown
        monkeypatch.chdir(tmp_path / "extraction")


def test_the_program_of_coroutines_in_the_readme_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    backend = sgl.ScriptedBackend({"Rate the plan.": "3", "Do better": "a better plan"}, default="a plan")
    sgl.set_default_backend(backend)
    text = next(p.values[0] for p in SNIPPETS if "async def answer" in str(p.values[0]))
    names: dict[str, Any] = {"sgl": sgl}
    exec(compile(str(text), "README.md", "exec"), names)
    assert [state["better"] for state in names["states"]] == ["a better plan"] * 2


def test_the_grammar_over_several_nodes_runs(engine):
    text = next(p.values[0] for p in SNIPPETS if "s.grammar(Person)" in str(p.values[0]))
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str
        age: int

    def program(s):
        s += "A person: "
        exec(compile(str(text), "constraints.md", "exec"), {"sgl": sgl, "Person": Person, "s": s})

    state = sgl.function(program).run(backend=engine, temperature=0, max_new_tokens=12)
    assert isinstance(state["age"], int)


# ------------------------------------------------------------------------- what needs a key asks a server of the tests

KEYS = {
    "OPENAI_API_KEY": "key-for-tests",
    "ANTHROPIC_API_KEY": "key-for-tests",
    "AZURE_OPENAI_API_KEY": "key-for-tests",
}
ANSWERS = {
    "Extract name and age": '{"name": "Maria Lopez", "age": 34}', "Adult or child?": "adult", "a code of": "fr",
    "capital": "Paris",
}  # fmt: skip


@pytest.fixture
def provider(monkeypatch):
    """Server with OpenAI's and Anthropic's APIs, to which their SDKs send what has no other address."""
    with sgl.server_for_tests(ANSWERS) as server:
        addresses = {"OPENAI_BASE_URL": f"{server.url}/v1", "ANTHROPIC_BASE_URL": server.url}
        for name, value in {**KEYS, **addresses}.items():
            monkeypatch.setenv(name, value)
        yield server


def snippet(page, part, *replaced):
    """The snippet of a page that has a part, with an address or key of the text replaced by another."""
    (text,) = (str(p.values[0]) for p in SNIPPETS if str(p.id).startswith(page) and part in str(p.values[0]))
    for old, new in replaced:
        assert old in text
        text = text.replace(old, new)
    return text


def executed(text, names):
    exec(compile(text, "page", "exec"), names)
    return names


def test_the_backends_of_the_readme_run_its_program(provider, small_engine):
    first, _, shown = snippet("README.md", "class Person").partition("state = ")
    with serving(small_engine, served_model_name="qwen3") as url:
        text = snippet("README.md", "sgl.OpenAI(", ("http://localhost:8000", url))
        names = executed(first, {"__name__": "readme"})
        calls = [line for line in text.splitlines() if "profile.run" in line]
        states = [executed(f"state = {call}", names)["state"] for call in calls]
        values = [f"{state['person']} {state['group']}" for state in states]
    assert len(values) == 3
    assert f"# {values[0]}\n" in shown
    assert values[2] == values[0]
    asked = {request.body["model"] for request in provider.requests if request.body}
    assert asked == {"gpt-4o-mini", "claude-haiku-4-5"}


def test_the_default_backend_of_the_page_on_backends_runs_a_program(provider):
    names = executed(snippet("backends.md", "or OPENAI_API_KEY", ("…", "key-for-tests")), {})
    executed(snippet("backends.md", "sgl.Price(input=2.50").partition("backend = ")[0], names)
    assert names["capital"].run("France")["answer"] == "Paris"
    assert provider.requests[-1].headers["authorization"] == "Bearer key-for-tests"


def test_backends_with_addresses_of_their_own_are_made(provider):
    local = [("http://localhost:8000", provider.url), ("…", "https://azure.test")]
    executed(snippet("backends.md", "is_azure=True", *local), {"sgl": sgl})


def test_explain_prints_how_a_program_then_runs(provider, capsys):
    names = executed(snippet("backends.md", "backend.explain(city)", ("…", "key-for-tests")), {})
    printed = capsys.readouterr().out
    assert "code" in printed
    assert not provider.requests
    assert names["city"].run("France", backend=names["backend"])["code"] == "fr"


@pytest.mark.parametrize(("part", "printed"), [("sgl.Price(", r"\d\.\d+e-05"), ("sgl.Replay(", "Paris")])
def test_snippets_with_scripted_backends_print(part, printed, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    executed(snippet("backends.md", part), {})
    assert re.fullmatch(printed, capsys.readouterr().out.strip())


def test_the_program_of_the_tutorial_runs_elsewhere(provider, small_engine):
    with serving(small_engine) as url:
        text = snippet("tutorial.md", "def elsewhere", ("http://localhost:30000", url))
        names = executed(
            snippet("tutorial.md", "def extract(").partition("person = ")[0], {"sgl": sgl, "__name__": "page"}
        )
        executed(text, names)["elsewhere"]("Maria Lopez is 34 years old.")
    asked = {request.body["model"] for request in provider.requests if request.body}
    assert asked == {"gpt-4o-mini", "claude-haiku-4-5"}


def test_a_client_of_openai_asks_our_server(small_engine):
    import openai

    with serving(small_engine) as url:
        text = snippet(
            "server.md", "openai.OpenAI(", ("http://127.0.0.1:30000", url), ('"Hello"}]', '"Hello"}], max_tokens=2')
        )
        answer = executed(text, {"openai": openai})["answer"]
    assert answer.choices[0].message.role == "assistant"


def test_the_tests_of_the_page_on_testing_pass(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # a reader has none of ours
    texts = [str(part.values[0]) for part in SNIPPETS if str(part.id).startswith("testing.md")]
    files = [tmp_path / f"test_page{i}.py" for i, text in enumerate(texts) if "def test_" in text]
    for file, text in zip(files, (text for text in texts if "def test_" in text), strict=True):
        file.write_text(text)
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    ran = subprocess.run([sys.executable, "-m", "pytest", *options, *files], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout
    assert len(files) == 3


def test_help_of_an_engine_and_of_gen_has_every_parameter_with_its_default():
    for callee in (sgl.Engine, sgl.gen):
        for name in inspect.signature(callee).parameters:
            assert re.search(rf"^ +([\w, ]+, )?{name}(, [\w, ]+)?: ", callee.__doc__ or "", re.MULTILINE), name
    shown = inspect.signature(sgl.Engine).parameters
    assert {name: p.default for name, p in shown.items()} == {
        name: field.default for name, field in EngineConfig.__dataclass_fields__.items()
    }
    assert "(128; at least 0)" in (sgl.gen.__doc__ or "")


def test_the_page_on_models_names_every_architecture_and_no_other():
    text = (ROOT / "docs" / "models.md").read_text()
    written = set(re.findall(r"`([A-Z]\w+(?:For[A-Z]\w+|Model))`", text))
    assert written == {*families.ARCHITECTURES, *embedding_spec.ENCODERS}
    assert re.findall(r"^\| `([\w.-]+)` \| (?:\[|PyPI)", text, re.MULTILINE) == list(ALIASES)
    first = text.partition("## Models that generate text")[2].partition("###")[0]
    rows = [line.split("|")[1:-1] for line in first.splitlines() if "`" in line and line.startswith("|")]
    in_gguf = {
        (name, file)
        for _, names, files in rows
        for name in re.findall(r"`(\w+)`", names)
        for file in re.findall(r"`([\w-]+)`", files)
    }
    known = {(family.architecture, file) for file, family in read_gguf.FAMILIES.items()}
    assert known <= in_gguf
    assert {file for _, file in in_gguf} == set(read_gguf.FAMILIES)
    assert f"{len(families.FAMILIES)} families of language models" in (ROOT / "README.md").read_text()


def test_the_reference_has_every_public_name_that_is_not_described_elsewhere():
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    shown = {path.rpartition(".")[2] for path in re.findall(r"^::: ([\w.]+)$", pages, re.MULTILINE)}
    elsewhere = {"__version__", "global_config", "EngineConfig", "ServerArgs"}  # compatibility.md
    renamed = {"Backend": "BaseBackend"}
    assert set(dir(sgl)) - elsewhere <= {renamed.get(name, name) for name in shown} | set(sgl.errors.__dict__)
