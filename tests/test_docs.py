"""The snippets of the README and the docs compile and name what there is, and tables are complete.
`make docs` runs the snippets (tests/docs).
"""

import ast
import inspect
import re
from pathlib import Path

import pytest

import sglang_lite as sgl
from sglang_lite.commands.chat import HELP
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.embedding import spec as embedding_spec
from sglang_lite.runtime.models import families, read_gguf
from sglang_lite.runtime.models.aliases import ALIASES
from sglang_lite.runtime.models.transformers_config import WHISPER

ROOT = Path(__file__).parent.parent
SNIPPETS = [
    pytest.param(text, id=f"{path.name}-{i}")
    for path in (
        ROOT / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
        ROOT / "CONTRIBUTING.md",
    )
    for i, text in enumerate(re.findall(r"```python[^\n]*\n(.*?)```", path.read_text(), re.DOTALL))
]


def test_there_are_snippets():
    assert len(SNIPPETS) >= 4


@pytest.mark.parametrize("text", SNIPPETS)
def test_a_snippet_compiles_and_names_what_there_is(text):
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "sgl"
        ):
            assert hasattr(sgl, node.attr)
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("sgl."):
            accepts(getattr(sgl, node.func.attr), node)


def accepts(callee, call):
    given = {keyword.arg: None for keyword in call.keywords if keyword.arg}
    signature = inspect.signature(callee)
    # `**client` has the rest
    bind = signature.bind if len(given) == len(call.keywords) else signature.bind_partial
    bind(*call.args, **given)
    if callee is sgl.Engine:
        EngineConfig.make(**{k.arg: ast.literal_eval(k.value) for k in call.keywords})


def test_the_page_on_commands_has_the_help_of_chat():
    assert HELP in (ROOT / "docs" / "commands.md").read_text()


def test_help_of_an_engine_and_of_gen_has_every_parameter_with_its_default():
    for callee in (sgl.Engine, sgl.gen):
        for name in inspect.signature(callee).parameters:
            assert re.search(
                rf"^ +([\w, ]+, )?{name}(, [\w, ]+)?: ", callee.__doc__ or "", re.MULTILINE
            ), name
    shown = inspect.signature(sgl.Engine).parameters
    assert {name: p.default for name, p in shown.items()} == {
        name: field.default for name, field in EngineConfig.__dataclass_fields__.items()
    }
    assert "(128; at least 0)" in (sgl.gen.__doc__ or "")


def test_the_page_on_models_names_every_architecture_and_no_other():
    text = (ROOT / "docs" / "models.md").read_text()
    written = set(re.findall(r"`(x?[A-Z]\w+(?:For[A-Z]\w+|Model))`", text))
    assert written == {
        *families.ARCHITECTURES,
        *families.WITH_ENCODER,
        WHISPER,
        *embedding_spec.ENCODERS,
    }
    assert re.findall(r"^\| `([\w.-]+)` \| (?:\[[\w-]+/|PyPI)", text, re.MULTILINE) == list(ALIASES)
    first = text.partition("## Models that generate text")[2].partition("###")[0]
    rows = [
        line.split("|")[1:-1] for line in first.splitlines() if "`" in line and line.startswith("|")
    ]
    in_gguf = {
        (name, file)
        for _, names, files in rows
        for name in re.findall(r"`(\w+)`", names)
        for file in re.findall(r"`([\w-]+)`", files)
    }
    known = {(family.architecture, file) for file, family in read_gguf.FAMILIES.items()}
    assert known <= in_gguf
    assert {file for _, file in in_gguf} == set(read_gguf.FAMILIES)
    assert (
        f"{len(families.FAMILIES)} families of language models"
        in (ROOT / "docs" / "overview.md").read_text()
    )


def test_the_reference_has_every_public_name_that_is_not_described_elsewhere():
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    shown = {path.rpartition(".")[2] for path in re.findall(r"^::: ([\w.]+)$", pages, re.MULTILINE)}
    elsewhere = {"__version__", "global_config", "EngineConfig", "ServerArgs"}  # compatibility.md
    renamed = {"Backend": "BaseBackend"}
    assert set(dir(sgl)) - elsewhere <= {renamed.get(name, name) for name in shown} | set(
        sgl.errors.__dict__
    )
