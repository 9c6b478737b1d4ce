"""The structure of the tree: what no linter here looks at."""

import ast
from pathlib import Path

import sglang_lite

PACKAGE = Path(sglang_lite.__file__).parent


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
