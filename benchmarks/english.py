"""Counts the habits of names, docstrings and statements that make a reader stop.

    python benchmarks/english.py [FOLDER ...] [--list NAME] [--check]

Prints one figure a line, with its limit. `--list NAME` prints where a habit occurs, `--check` fails
above a limit. Folders default to the package. What is counted:

participles   functions whose name is one participle (`fetched`, `told`), of all but properties and `__names__`
verb first    docstrings of functions that begin with a verb in the third person ("Returns …", "Executes …")
packed        assignments of several values in one statement (`a, b = x, y`) that are no swap
long lines    lines of more than 100 columns
fmt: skip     blocks that the formatter leaves as they are
statements    simple statements a line that isn't blank
common names  methods whose name eight classes or more have
"""

from __future__ import annotations

import argparse
import ast
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

WORDS = {
    name: frozenset(words.split())
    for name, words in tomllib.loads(
        Path(__file__).with_name("english_words.toml").read_text()
    ).items()
}
PACKAGE = Path(__file__).parent.parent / "sglang_lite"
COLUMNS = 100
COMMON = 8  # classes that have a method of the same name


@dataclass
class Habit:
    """How often something occurs, where, and how much is allowed.

    Attributes:
        limit: largest number, or share of `total` if that is counted.
        is_goal: whether the limit is the least share instead.
    """

    limit: float
    is_goal: bool = False
    total: int = 0
    places: list[str] = field(default_factory=list)
    counts_total: bool = True

    @property
    def figure(self) -> float:
        return (
            len(self.places) / max(self.total, 1) if self.counts_total else float(len(self.places))
        )

    @property
    def is_kept(self) -> bool:
        return self.figure >= self.limit if self.is_goal else self.figure <= self.limit


def is_participle(name: str) -> bool:
    """Returns whether a name is a single participle."""
    word = name.strip("_")
    return word in WORDS["irregular_participles"] or (
        word.endswith("ed")
        and "_" not in word
        and len(word) > 3
        and word not in WORDS["not_participles"]
    )


def begins_with_verb(docstring: str) -> bool:
    """Returns whether a docstring begins with a verb in the third person."""
    words = [word.strip("`.,:;").lower() for word in docstring.split()[:2]]
    if not words or not words[0].endswith("s") or not words[0].isalpha():
        return False
    if words[0] in WORDS["either"]:
        return len(words) > 1 and words[1] in WORDS["determiners"]
    return words[0] not in WORDS["nouns"]


def is_packed(node: ast.Assign) -> bool:
    """Returns whether an assignment sets several names to several values, and doesn't swap them."""
    target, value = node.targets[0], node.value
    if not (
        isinstance(target, ast.Tuple)
        and isinstance(value, ast.Tuple)
        and len(target.elts) == len(value.elts)
    ):
        return False
    return sorted(map(ast.unparse, target.elts)) != sorted(map(ast.unparse, value.elts))


def is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    decorators = [ast.unparse(each) for each in node.decorator_list]
    return any("property" in each or each.endswith(".setter") for each in decorators)


def functions_within(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yields functions and methods, without properties and `__names__`."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or is_property(node):
            continue
        if not (node.name.startswith("__") and node.name.endswith("__")):
            yield node


def is_simple_statement(node: ast.AST) -> bool:
    """Returns whether a node is a statement without a body, and no docstring."""
    if not isinstance(node, ast.stmt) or hasattr(node, "body"):
        return False
    return not (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def measure(folders: Iterable[Path]) -> dict[str, Habit]:
    """Counts all habits in the Python files of some folders."""
    habits = {
        "participles": Habit(0.02),
        "verb first": Habit(0.8, is_goal=True),
        "packed": Habit(0.01),
        "long lines": Habit(0.01),
        "fmt: skip": Habit(100, counts_total=False),
        "statements": Habit(0.42),
        "common names": Habit(0.15),
    }
    methods: dict[str, list[str]] = defaultdict(list)
    for file in sorted(path for folder in folders for path in folder.rglob("*.py")):
        source = file.read_text()
        tree = ast.parse(source)
        _measure_lines(habits, file, source.splitlines())
        _measure_statements(habits, file, tree)
        for node in functions_within(tree):
            _measure_function(habits, f"{file}:{node.lineno} {node.name}", node)
        for owner in ast.walk(tree):
            if isinstance(owner, ast.ClassDef):
                for method in functions_within(ast.Module(owner.body, [])):
                    methods[method.name].append(
                        f"{file}:{method.lineno} {owner.name}.{method.name}"
                    )
    habits["common names"].total = sum(map(len, methods.values()))
    for places in methods.values():
        if len(places) >= COMMON:
            habits["common names"].places += places
    return habits


def _measure_lines(habits: dict[str, Habit], file: Path, lines: list[str]) -> None:
    habits["long lines"].total += len(lines)
    habits["statements"].total += sum(bool(line.strip()) for line in lines)
    for number, line in enumerate(lines, 1):
        if len(line) > COLUMNS:
            habits["long lines"].places.append(f"{file}:{number}")
        if "# fmt: skip" in line:
            habits["fmt: skip"].places.append(f"{file}:{number}")


def _measure_statements(habits: dict[str, Habit], file: Path, tree: ast.Module) -> None:
    for node in ast.walk(tree):
        if is_simple_statement(node):
            assert isinstance(node, ast.stmt)
            habits["statements"].places.append(f"{file}:{node.lineno}")
        if isinstance(node, ast.Assign):
            habits["packed"].total += 1
            if is_packed(node):
                habits["packed"].places.append(f"{file}:{node.lineno}")


def _measure_function(
    habits: dict[str, Habit], place: str, node: ast.FunctionDef | ast.AsyncFunctionDef
) -> None:
    habits["participles"].total += 1
    if is_participle(node.name):
        habits["participles"].places.append(place)
    docstring = ast.get_docstring(node)
    if docstring is not None:
        habits["verb first"].total += 1
        if begins_with_verb(docstring):
            habits["verb first"].places.append(place)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="*", type=Path, default=[PACKAGE])
    parser.add_argument("--list", metavar="NAME")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    habits = measure(options.folders)
    if options.list is not None:
        print(*habits[options.list].places, sep="\n")
        return
    for name, habit in habits.items():
        bound = "at least" if habit.is_goal else "at most"
        shown = f"{habit.figure:8.1%}" if habit.counts_total else f"{habit.figure:8.0f}"
        limit = f"{habit.limit:.0%}" if habit.counts_total else f"{habit.limit:.0f}"
        print(f"{name:14}{shown}   {bound} {limit}{'' if habit.is_kept else '   missed'}")
    if options.check and not all(habit.is_kept for habit in habits.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
