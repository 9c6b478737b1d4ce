"""Settings of engines and servers: each has a test that fails where the setting is hidden, or is
listed as without one.
"""

import ast
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from tests.counts import some
from tests.effects.settings_effects import ON_GPU, SEEN, TABLES, UNSEEN

ROOT = Path(__file__).parents[2]
ROWS = {f"{table}.{each.name}" for table, settings in TABLES.items() for each in fields(settings)}


def test_every_setting_has_a_test_or_is_listed():
    listed = [*SEEN, *ON_GPU, *UNSEEN]
    assert sorted(ROWS - set(listed)) == [], (
        "python -m tests.effects.hidden --find NAME looks for a test"
    )
    assert set(listed) <= ROWS
    assert len(set(listed)) == len(listed)
    assert len(UNSEEN) <= 3


def test_the_tests_are_there():
    for test in {*SEEN.values(), *ON_GPU.values()}:
        path, _, name = test.partition("::")
        assert name in {
            getattr(each, "name", "") for each in ast.parse((ROOT / path).read_text()).body
        }, test


@pytest.mark.slow
def test_a_hidden_setting_is_missed():
    count, names = some(2, len(SEEN)), sorted(SEEN)
    first = int(_commit(), 16) % len(names)
    chosen = (
        [names[(first + i * 7) % len(names)] for i in range(count)] if count < len(names) else names
    )
    command = [sys.executable, "-m", "tests.effects.hidden", *chosen]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def _commit():
    asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return asked.stdout[:8] if asked.returncode == 0 else "0"
