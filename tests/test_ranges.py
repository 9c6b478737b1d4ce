"""The table of what can be installed together, with a resolver that a test plays."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def resolve_with(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    uv = folder / "uv"
    uv.write_text(f"#!/bin/sh\n{script}\n")
    uv.chmod(0o755)
    command = [sys.executable, "-m", "tests.ranges", "--uv", str(uv)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("conflicts", [False, True])
def test_a_conflict_is_named_and_fails(tmp_path, conflicts):
    script = f'text=$(cat); case "$text" in *"[local]"*instructor*) {"echo no solution >&2; exit 1" if conflicts else "exit 0"};; esac'
    done = resolve_with(tmp_path, script)
    assert done.returncode == conflicts
    (rows,) = re.findall(r"(\d+) rows", done.stdout)
    assert int(rows) > 100
    assert ("sglang-lite[local] with instructor" in done.stdout) == conflicts
    assert ("no solution" in done.stdout) == conflicts
