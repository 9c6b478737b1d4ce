"""`sglang-lite verify` finds nothing wrong with any of the real models."""

import json
import subprocess
import sys

import pytest

from tests.real.conftest import file_of
from tests.real.fetch import gguf_models


@pytest.mark.parametrize("name", gguf_models())
def test_nothing_is_wrong_with_a_model(name):
    """Its report stays beside the models, in `reports`."""
    report = file_of(name).parent / "reports" / f"{name}.json"
    report.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "sglang_lite", "verify", str(file_of(name)), "--report", str(report)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(report.read_text())
