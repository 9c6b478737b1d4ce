"""`sglang-lite verify` finds nothing wrong with any of the real models."""

import json
import subprocess
import sys

import pytest

from sglang_lite.commands.verify.check_names import CHECKS
from tests.real.conftest import file_of
from tests.real.fetch import gguf_models

# The 1.5B runs by the code of the 0.5B. 8,000 tokens in float32, here and in transformers, would be
# most of what its verification computes. A report for docs/verified has them.
LEFT_OUT = {"qwen2.5-coder-1.5b": {"long"}}


@pytest.mark.parametrize("name", gguf_models())
def test_nothing_is_wrong_with_a_model(name):
    """Its report stays beside the models, in `reports`."""
    report = file_of(name).parent / "reports" / f"{name}.json"
    report.parent.mkdir(exist_ok=True)
    checks = [check for check in CHECKS if check not in LEFT_OUT.get(name, ())]
    arguments = [str(file_of(name)), "--only", *checks, "--report", str(report)]
    done = subprocess.run(
        [sys.executable, "-m", "sglang_lite", "verify", *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text())["checks"]
    assert {
        check["name"] for check in found if check["summary"].startswith("not asked")
    } == LEFT_OUT.get(name, set())
