"""Every example runs with one command and says what it should."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
EXPECTED = {
    "quickstart.py": ["Japan: Tokyo", "positive", "Person(name='Maria Lopez', age=34", "Venice:", "prompt tokens"],
    "streaming.py": ["lighthouse", "for coroutines"],
    "batch.py": ["dog", "animal", "came from the cache"],
}


def test_every_example_is_tested():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_example(name, model_file):
    done = subprocess.run([sys.executable, EXAMPLES / name], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for text in EXPECTED[name]:
        assert text in done.stdout
