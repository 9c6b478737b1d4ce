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
    "documents_ray.py": ["Ray"],  # where it is not installed, that it is needed
}
# That the engine sees: one a run.
PROGRAMS = {"quickstart.py": 6, "streaming.py": 2, "batch.py": 8, "documents_ray.py": 0}


def test_every_example_is_tested():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(EXPECTED) == set(PROGRAMS)


@pytest.mark.filterwarnings("ignore:Tip. In future versions of Ray:FutureWarning")
@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_says_what_it_should_and_an_engine_sees_one_program_for_each_of_its_runs(name, engine, capsys):
    before = engine.stats()["programs_opened"]
    sgl.set_default_backend(engine)
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert engine.stats()["programs_opened"] - before == PROGRAMS[name]
    printed = capsys.readouterr().out
    for text in EXPECTED[name]:
        assert text in printed


def test_an_example_needs_no_more_than_its_command(model_file):
    done = subprocess.run([sys.executable, EXAMPLES / "batch.py"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for text in EXPECTED["batch.py"]:
        assert text in done.stdout
