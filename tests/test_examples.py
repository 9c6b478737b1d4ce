"""Every example runs with one command and says what it should."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import sglang_lite as sgl

EXAMPLES = Path(__file__).parent.parent / "examples"
EXPECTED = {
    "quickstart.py": ["Japan: Tokyo", "positive", "Person(name='Maria Lopez', age=34", "Venice:", "prompt tokens"],
    "streaming.py": ["lighthouse", "for coroutines"],
    "batch.py": ["dog", "animal", "came from the cache"],
}
PROGRAMS = {"quickstart.py": 6, "streaming.py": 2, "batch.py": 8}  # that the engine sees: one a run


def test_every_example_is_tested():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(EXPECTED) == set(PROGRAMS)


@pytest.mark.parametrize("name", EXPECTED)
def test_example(name, model_file):
    done = subprocess.run([sys.executable, EXAMPLES / name], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for text in EXPECTED[name]:
        assert text in done.stdout


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_engine_sees_one_program_for_each_run_of_an_example(name, engine):
    before = engine.stats()["programs_opened"]
    sgl.set_default_backend(engine)
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert engine.stats()["programs_opened"] - before == PROGRAMS[name]
