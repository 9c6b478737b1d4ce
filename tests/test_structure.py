"""The structure of the tree: what no linter here looks at."""

import ast
import contextlib
import re
from collections import Counter
from pathlib import Path

import sglang_lite

PACKAGE = Path(sglang_lite.__file__).parent
ROOT = Path(__file__).parent.parent


def imports_of_files():
    """The modules that each module imports when it is loaded or used; not those for annotations alone."""
    files = {
        ".".join(("sglang_lite", *file.relative_to(PACKAGE).with_suffix("").parts)): file
        for file in PACKAGE.rglob("*.py")
    }
    files = {name.removesuffix(".__init__"): file for name, file in files.items()}
    found = {}
    for name, file in files.items():
        tree = ast.parse(file.read_text())
        annotations = {
            inner
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
            for inner in ast.walk(node)
        }
        modules = set()
        for node in set(ast.walk(tree)) - annotations:
            if isinstance(node, ast.Import):
                modules |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                modules |= {
                    inner if (inner := f"{node.module}.{alias.name}") in files else node.module for alias in node.names
                }
        found[name] = modules & files.keys() - {name}
    return found


def test_no_circle_of_imports():
    left = imports_of_files()
    while ready := [name for name, modules in left.items() if not modules & left.keys()]:
        for name in ready:
            del left[name]
    # What is left is circles, and what leads to them.
    while outside := [name for name in left if not any(name in modules for modules in left.values())]:
        for name in outside:
            del left[name]
    assert sorted(left) == []


def test_long_counts_are_in_make_and_in_contributing():
    tests = (file.read_text() for file in (ROOT / "tests").rglob("*.py"))
    used = {found for text in tests for found in re.findall(r'environ\.get\("SGLANG_LITE_(\w+)"', text)}
    used -= {"FIRST", "TEST_GPU"}
    table = re.findall(r"^\| `SGLANG_LITE_(\w+)` .*$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    counts = re.search(r"^LONG := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    assert used == set(table) == {count.partition("=")[0] for count in counts}


# Tests that may wait, or look at a clock: the reason.
MAY_WAIT = {
    "bench/fakes/fake_peer.py": "puts a clock that stands still in the place of the real one",
    "constraints/test_bad_constraints.py": "puts a clock that runs by hours in the place of the real one",
    "constraints/test_fuzz.py": "ends what hangs after 20 s on the CPU",
    "runtime/structured_output/test_compiler.py": "has a worker that waits for longer than it may compute",
    "waiting.py": "looks again after a while, for a condition and not for a time",
    "test_structure.py": "names what the others may not use",
}
CLOCKS = {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time", "setitimer", "thread_time"}


def waits(tree):
    """Lines of a test that sleep, or look at a clock, also in the code of another process."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="sleep") | ast.Name(id="sleep"), args=[ast.Constant(value=0)]):
                pass  # the others' turn
            case ast.Call(func=ast.Attribute(attr="sleep") | ast.Name(id="sleep")):
                yield node.lineno
            case ast.Call(func=ast.Attribute(value=ast.Call(), attr="wait"), args=[_, *_]):  # `Event().wait(1)`
                yield node.lineno
            case ast.Attribute(value=ast.Name(id="time"), attr="time" | "sleep") | ast.alias(name="time" | "timeit"):
                yield node.lineno
            case ast.Attribute(attr=name) | ast.alias(name=name) | ast.Constant(value=name) if name in CLOCKS:
                yield node.lineno
            case ast.Constant(value=str(text)) if "\n" in text or ";" in text:
                with contextlib.suppress(SyntaxError):
                    yield from (node.lineno + line - 1 for line in waits(ast.parse(text)))


def test_no_test_sleeps_or_looks_at_a_clock():
    tests = Path(__file__).parent
    found = {
        str(file.relative_to(tests)): lines
        for file in sorted(tests.rglob("*.py"))
        if (lines := sorted(set(waits(ast.parse(file.read_text())))))
    }
    assert {file: lines for file, lines in found.items() if file not in MAY_WAIT} == {}
    assert found.keys() == MAY_WAIT.keys()


# Docstrings that begin with something else than the noun or verb they are about, by package: no more, and rather fewer.
BEGIN_OTHERWISE = Counter(constraints=5, lang=57)
OTHERWISE = re.compile(
    r"(It|Its|They|Their|This|That|These|Those|There|He|She|We|Our|Who|Whoever|Whatever|Nobody|Nothing|Everything|What|"
    r"Whether|Where|How|When|Which|Why|As)\b"
)


def test_docstrings_begin_with_their_noun_or_verb():
    found = [
        file.relative_to(PACKAGE)
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if OTHERWISE.match(ast.get_docstring(node) or "")
    ]
    too_many = Counter(path.parts[0] for path in found) - BEGIN_OTHERWISE
    assert [str(path) for path in found if path.parts[0] in too_many] == []


def test_folders_of_tests_are_folders_of_the_package():
    tests = Path(__file__).parent
    folders = {file.parent.relative_to(tests) for file in tests.rglob("test_*.py")}
    folders -= {Path("conformance"), Path("lang/backends")}  # programs that mean the same on all; `lang/backend`
    assert sorted(folder for folder in folders if not (PACKAGE / folder).is_dir()) == []
