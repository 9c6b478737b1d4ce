"""The pages of the docs: their code blocks run, in the order of the page, and print what the page
shows below them.

A page's blocks are one program. A block with a title is also a file of that name. What a block
prints stands in a block `text` right behind it; an error that ends a block is printed as in a
traceback's last line. Two comments may stand before a block: `not run:` with the reason, and
`trace:` with a state, whose trace the site shows below the block.
"""

import ast
import contextlib
import io
import json
import re
import runpy
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import sglang_lite as sgl
from sglang_lite.cli import main
from tests.runtime.media.seeing import CHAT, save_seeing

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# The others have tests of their own: test_recipes.py, test_mistakes_page.py.
PAGES = [page for page in PAGES if page.parent.name != "cookbook" and page.name != "mistakes.md"]


TRACES = ROOT / "build" / "traces"  # which docs/site/hooks.py puts into the pages


@dataclass(frozen=True)
class Block:
    note: str | None
    about: str
    language: str
    title: str | None
    text: str
    shown: str | None  # what the page says that it prints
    line: int


FENCE = re.compile(
    r'(?:^<!-- (not run|trace): ([^\n]*) -->\n)?^```(\w*)(?: title="([^"]+)")?\n(.*?)^```\n',
    re.DOTALL | re.MULTILINE,
)


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    found = list(FENCE.finditer(text))
    for match, after in zip(found, [*found[1:], None]):
        follows = (
            after is not None
            and after[3] == "text"
            and not text[match.end() : after.start()].strip()
        )
        shown = after[5] if follows and after is not None else None
        note, about, language, title, code = match.groups()
        yield Block(
            note, about, language, title, code, shown, text.count("\n", 0, match.start()) + 1
        )


def printed(block: Block, names: dict[str, object], file: str) -> str:
    """What a block of Python prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            exec(compile(block.text, file, "exec"), names)
        except Exception as error:
            if block.shown is None:
                raise
            print(f"{type(error).__name__}: {error}")
    return out.getvalue()


def answers(block: Block, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, str, str]]:
    """Commands of a console, what they print, and what the page says that they print."""
    for match in re.finditer(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block.text, re.MULTILINE):
        command, shown = match.groups()
        piped, _, told = command.rpartition(" | ")
        if piped:
            (typed,) = shlex.split(piped)[1:]  # printf TEXT
            monkeypatch.setattr("sys.stdin", io.StringIO(typed.replace("\\n", "\n")))
        program, *arguments = shlex.split(told)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            if program == "cd":
                monkeypatch.chdir(arguments[0])
            elif program == "python":
                runpy.run_path(arguments[0], run_name="__main__")
            else:
                assert program == "sglang-lite"
                main(arguments)
        yield command, out.getvalue().replace(f"{Path.cwd()}/", ""), shown


def flags_there_are(command: str) -> None:
    """Commands that are not run have the flags that they name."""
    program, name, *arguments = shlex.split(command, comments=True)
    assert program == "sglang-lite"
    with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit):
        main([name, "--help"])
    flags = {flag.partition("=")[0] for flag in arguments if flag.startswith("--")}
    assert flags <= set(re.findall(r"--[\w-]+", out.getvalue())), command


@pytest.fixture
def reader(documented, provider, tmp_path, monkeypatch):
    """What a reader has: an empty folder, the default engine, keys. `sgl.Engine()` is the engine
    that all pages share, and the hub's model that reads images is a random one.
    """
    real = sgl.Engine

    def seeing():
        save_seeing("smolvlm", tmp_path / "smolvlm-random", CHAT)
        return real("smolvlm-random")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("webbrowser.open", lambda url: True)
    monkeypatch.setattr(documented, "close", lambda: None)
    shared = {
        "smollm2-135m": lambda: documented, "all-minilm-l6-v2": lambda: real("all-minilm-l6-v2"),
        "HuggingFaceTB/SmolVLM-256M-Instruct": seeing,
    }  # fmt: skip

    def engine(model="smollm2-135m", **settings):
        return real(model, dtype="float32", **settings) if settings else shared[model]()

    monkeypatch.setattr(sgl, "Engine", engine)
    sgl.set_default_backend(documented)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_prints_what_it_shows(page, reader, address, monkeypatch):
    module = ModuleType(f"page_{page.stem}")  # not `typing`
    # where saved values find their classes
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for block in blocks(page):
        where = f"{page}:{block.line}"
        text = re.sub(r"http://(localhost|127\.0\.0\.1):(8000|30000)", address, block.text)
        if block.title:
            Path(block.title).write_text(text)
        if block.note == "not run":
            compile(text, where, "exec")
        elif block.language == "python":
            shown = printed(
                replace(block, text=text), vars(module), block.title or f"{page.stem}.py"
            )
            assert shown == (block.shown or ""), where
        elif block.language == "console":
            for command, out, expected in answers(block, monkeypatch):
                assert out == expected, f"{where}: {command}"
        elif block.language == "sh":
            for command in re.findall(r"^sglang-lite .*", text, re.MULTILINE):
                flags_there_are(command)
        elif block.language == "yaml":  # a file of `serve --config`
            for name in yaml.safe_load(text):
                flags_there_are(f"sglang-lite serve --{name.replace('_', '-')}")
        elif block.language == "json":
            for line in text.splitlines() if (block.title or "").endswith(".jsonl") else [text]:
                json.loads(line)
        else:
            assert block.language == "text", f"{where}: a block has a language"
        if block.note == "trace":
            TRACES.mkdir(parents=True, exist_ok=True)
            eval(block.about, vars(module)).trace().save(TRACES / f"{page.stem}.html")


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_a_page_with_a_program_shows_a_trace_of_it(page):
    found = list(blocks(page))
    assert any(block.note == "trace" for block in found) or not any(
        block.language == "python" for block in found
    )


def test_the_tests_of_the_page_on_testing_pass(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # a reader has none of ours
    texts = [
        block.text for block in blocks(ROOT / "docs" / "testing.md") if "def test_" in block.text
    ]
    files = [tmp_path / f"test_page{i}.py" for i in range(len(texts))]
    for file, text in zip(files, texts):
        file.write_text(text)
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout
    assert len(files) == 3


def test_programs_in_docstrings_run_and_print_what_they_say(reader, provider):
    found = [
        block
        for file in (ROOT / "sglang_lite").rglob("*.py")
        for block in programs_in(ast.parse(file.read_text()))
    ]
    assert len(found) >= 2
    names = {
        "sgl": sgl,
        "program": sgl.function(
            lambda s: s.__iadd__("Paris is the capital of" + sgl.gen("country"))
        ),
    }
    for text in found:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(text, "docstring", "exec"), names)
        assert out.getvalue().splitlines() == re.findall(
            r"^print\(.*\)  # (.*)$", text, re.MULTILINE
        )


def programs_in(tree: ast.Module) -> Iterator[str]:
    """Blocks of docstrings that are indented and name the package as users do."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for block in re.findall(r"\n\n((?: {4}.*\n+)+)", f"{ast.get_docstring(node) or ''}\n"):
                if "sgl." in block and not re.search(r"^ {4}[\w, *…]+: ", block):
                    yield textwrap.dedent(block)
