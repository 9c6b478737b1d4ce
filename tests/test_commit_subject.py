"""The hook for messages of commits, which `.pre-commit-config.yaml` has."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(("length", "status"), [(72, 0), (73, 1)])
def test_a_subject_has_at_most_72_characters(tmp_path, length, status):
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    (entry,) = (hook["entry"] for hook in hooks if hook.get("stages") == ["commit-msg"])
    (message := tmp_path / "message").write_text("é" * length + "\n\n" + "a line of the body " * 8)
    done = subprocess.run(
        [sys.executable, *shlex.split(entry)[1:], message], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == status
    assert (f"The subject has {length} characters" in done.stderr) == bool(status)
