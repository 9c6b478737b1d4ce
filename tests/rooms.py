"""Test files that have to pass before a change is committed. `make changed` runs them for what
differs from main.

    python -m tests.rooms sglang_lite/runtime/kv_cache/radix.py

They are those of the rooms that a changed file is in (`ROOMS`), those with its name, those that
name its module, and those that name a module that names it, if they are few; or else those of its
folder. Names in strings count, as tests patch and start modules.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Most test files that name a changed module, and that name one that names it: rooms stand for more.
MOST, FEW = 60, 15
REAL = "tests/real/"  # which `make test-real` alone runs
# What tests see of a room without naming its modules, by the beginnings of paths.
ROOMS: dict[str, tuple[str, ...]] = {
    "sglang_lite/": ("tests/test_structure.py", "tests/test_light.py", "tests/test_import.py"),
    "sglang_lite/__main__.py": ("tests/test_cli.py",),
    "sglang_lite/cli.py": ("tests/test_cli.py", "tests/commands"),
    "sglang_lite/commands/": ("tests/test_cli.py", "tests/commands"),
    "sglang_lite/compat/": ("tests/compat", "tests/lang/test_compatibility.py"),
    "sglang_lite/engine/": ("tests/engine/test_core_client.py", "tests/engine/test_process.py"),
    "sglang_lite/lang/": (
        "tests/lang/test_program.py", "tests/lang/test_errors.py", "tests/lang/test_streaming.py",
        "tests/lang/execution/test_push_down.py", "tests/lang/test_compatibility.py", "tests/lint", "tests/conformance/test_rules.py",
        "tests/conformance/test_programs.py",
    ),
    "sglang_lite/lang/backend/": ("tests/lang/test_hooks.py",),
    "sglang_lite/lint/": ("tests/lint",),
    "sglang_lite/page/": ("tests/lang/runs", "tests/playground"),
    "sglang_lite/notebook/": ("tests/notebook/test_notebook.py", "tests/docs/test_notebooks.py"),
    "sglang_lite/program/": ("tests/conformance",),
    "sglang_lite/protocol/": (
        "tests/protocol/test_protocol.py", "tests/wire/test_wire.py", "tests/protocol/test_sampling_parameters.py", "tests/effects",
    ),
    "sglang_lite/runtime/": ("tests/effects",),
    "sglang_lite/runtime/core/": ("tests/runtime/core", "tests/runtime/test_engine.py", "tests/conformance/test_rules.py"),
    "sglang_lite/runtime/exact/": ("tests/runtime/core/test_exact_draws.py", "tests/runtime/structured_output/test_outcomes.py"),
    "sglang_lite/runtime/executor/": (
        "tests/runtime/core", "tests/runtime/test_engine.py", "tests/engine/child/test_stalls.py",
    ),
    "sglang_lite/runtime/executor/kv_pool_size.py": ("tests/runtime/models/test_latent.py",),
    "sglang_lite/runtime/executor/sampler.py": ("tests/docs", "tests/runtime/structured_output"),
    "sglang_lite/runtime/kernels/": (
        "tests/runtime/kernels/test_reference.py", "tests/runtime/kernels/test_compiled.py",
    ),
    "sglang_lite/runtime/kv_cache/": ("tests/runtime/kv_cache", "tests/runtime/scheduler", "tests/runtime/core"),
    "sglang_lite/runtime/loading/": ("tests/runtime/loading",),
    "sglang_lite/runtime/models/": ("tests/runtime/loading",),
    "sglang_lite/runtime/requests/sample_seed.py": ("tests/docs", "tests/runtime/structured_output"),
    "sglang_lite/runtime/scheduler/": (
        "tests/runtime/scheduler", "tests/runtime/core", "tests/runtime/test_engine.py", "tests/conformance/test_rules.py",
    ),
    "sglang_lite/runtime/drafting/": ("tests/runtime/drafting",),
    "sglang_lite/runtime/structured_output/": ("tests/runtime/structured_output",),
    "sglang_lite/server/": ("tests/compat/sglang", "tests/server/test_openapi.py"),
    "sglang_lite/srt/": ("tests/compat",),
    "sglang_lite/version.py": ("tests/test_cli.py",),
    "benchmarks/": ("tests/bench", "tests/test_docs.py"),
    "docs/": ("tests/test_docs.py", "tests/test_coming_from.py", "tests/docs/test_pages.py"),
    "docs/notebooks/": ("tests/docs/test_notebooks.py",),
    "examples/": ("tests/test_examples.py", "tests/test_agent_recipes.py", "tests/test_docs.py", "tests/lint"),
    "tests/conformance/programs/": ("tests/conformance", "tests/lint"),
    "tests/": ("tests/test_structure.py",),
    "tests/real/": ("tests/test_real_files.py",),
    "CHANGELOG.md": ("tests/test_docs.py", "tests/test_changes.py"),
    "changes/": ("tests/test_changes.py",),
    "CONTRIBUTING.md": ("tests/test_docs.py", "tests/test_structure.py"),
    "Makefile": ("tests/test_docs.py", "tests/test_structure.py"),
    "README.md": ("tests/test_docs.py",),
    "mkdocs.yml": ("tests/test_docs.py",),
    "pyproject.toml": ("tests/test_structure.py", "tests/test_light.py", "tests/test_import.py"),
}  # fmt: skip
_NAMED = re.compile(r"\b(?:sglang_lite|tests)(?:\.\w+)+")
_IMPORTED = re.compile(
    r"^ *from ((?:sglang_lite|tests)[\w.]*) import (?:\(([^)]*)\)|(.*))", re.MULTILINE
)


def to_run(changed: Iterable[str]) -> set[str]:
    """Test files and folders for changed files, all by their paths from the root of the repository."""
    found = {test for path in changed for test in _for(path)}
    folders = tuple(f"{test}/" for test in found if not test.endswith(".py"))
    found = {test for test in found if not f"{test}/".startswith(REAL)}
    return {test for test in found if not test.startswith(folders) and (ROOT / test).exists()}


def _for(path: str) -> set[str]:
    found = {test for room, tests in ROOMS.items() if path.startswith(room) for test in tests}
    found.update(_mirrored(path))
    if path.endswith(".py"):
        direct = named_by(_module(path))
        behind = {test for other in direct for test in named_by(_module(other)) if _is_test(test)}
        for tests, most in (({test for test in direct if _is_test(test)}, MOST), (behind, FEW)):
            found.update(tests if len(tests) <= most else ())
    if path.startswith("sglang_lite/") and found <= {*ROOMS["sglang_lite/"]}:
        found.add(_folder(path))
    return found


def _mirrored(path: str) -> Iterator[str]:
    """Tests that have a file's path or its name: test_NAME.py, or test_NAMEs.py."""
    if _is_test(path):
        yield path
    if path.endswith("conftest.py"):
        yield str(Path(path).parent)
    stem = Path(path).stem
    if path.startswith("sglang_lite/"):
        yield from _by_stem().get(f"test_{stem}", ())
        yield from _by_stem().get(f"test_{stem}s", ())


def _folder(path: str) -> str:
    """Nearest folder of tests for a module that nothing else names tests for."""
    folder = Path("tests", *Path(path).parts[1:-1])
    return str(next(each for each in (folder, *folder.parents) if (ROOT / each).exists()))


def named_by(module: str) -> set[str]:
    """Files of the package and of the tests that name a module."""
    return _naming().get(module, set())


@cache
def _naming() -> dict[str, set[str]]:
    modules = {_module(path) for path in _texts()}
    found: dict[str, set[str]] = {}
    for path, text in _texts().items():
        for name in _names(text):
            while name not in modules and "." in name:
                name = name.rpartition(".")[0]
            found.setdefault(name, set()).add(path)
    return found


def _names(text: str) -> Iterator[str]:
    yield from _NAMED.findall(text)
    for package, several, one in _IMPORTED.findall(text):
        yield from (f"{package}.{name}" for name in re.findall(r"\w+", several or one))


@cache
def _by_stem() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path in _texts():
        found.setdefault(Path(path).stem, []).append(path)
    return found


@cache
def _texts() -> dict[str, str]:
    return {
        str(path.relative_to(ROOT)): path.read_text()
        for top in ("sglang_lite", "tests")
        for path in (ROOT / top).rglob("*.py")
    }


def _module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _is_test(path: str) -> bool:
    return (
        path.startswith("tests/") and Path(path).name.startswith("test_") and path.endswith(".py")
    )


def changed() -> list[str]:
    """Files that differ from where this branch left main, or are new."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout

    base = git("merge-base", "main", "HEAD").strip()
    return [
        *git("diff", "--name-only", base).split(),
        *git("ls-files", "--others", "--exclude-standard").split(),
    ]


if __name__ == "__main__":
    print(*sorted(to_run(sys.argv[1:] or changed())) or sys.exit("Nothing differs from main."))
