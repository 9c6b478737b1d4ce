"""The plugin that runs tests which depend on threads again and again."""

import os
import subprocess
import sys
from pathlib import Path

ONE = """
import threading
import pytest

@pytest.fixture
def begun():
    yield threading.Event()

def test_each_time_has_fixtures_of_its_own(begun):
    assert not begun.is_set()
    begun.set()

def test_of_something_else():
    assert False
"""


def test_a_single_test_is_set_up_each_time(tmp_path):
    (tmp_path / "test_one.py").write_text(ONE)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.loops",
        "--loops",
        "3",
        "--noconftest",
        "test_one.py",
    ]
    root = str(Path(__file__).parents[1])
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": root}, capture_output=True, text=True
    )
    assert "3 passed, 1 deselected" in done.stdout
