"""Torch's threads are told how to wait before torch is there, and nobody else is."""

import os
import subprocess
import sys

import pytest

from sglang_lite.runtime.host.openmp import SPINS

# Loads the library that torch brings, without torch, which takes seconds.
LIBRARY = (
    "import ctypes, importlib.util, pathlib\n"
    "folder = pathlib.Path(importlib.util.find_spec('torch').origin).parent\n"
    "for file in folder.glob('lib/libgomp*'): ctypes.CDLL(str(file))"
)
PLAIN = {
    k: v
    for k, v in os.environ.items()
    if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
}


def run(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**PLAIN, **environment},
        check=True,
        capture_output=True,
        text=True,
    )


def spins(code, **environment):
    """Times that threads look for work, as the library says where it is loaded; None where torch
    has another library.
    """
    shown = run(code, OMP_DISPLAY_ENV="VERBOSE", **environment).stderr
    lines = [line.split("'")[1] for line in shown.splitlines() if "GOMP_SPINCOUNT" in line]
    assert len(lines) <= 1  # once: torch takes what is there
    return int(lines[0]) if lines else None


@pytest.fixture(scope="module", autouse=True)
def _needs_gnu_openmp():
    if spins(LIBRARY) is None:
        pytest.skip("torch was not built with GNU OpenMP")


def test_threads_of_the_engine_soon_sleep_and_the_environment_stays():
    code = "import os; before = dict(os.environ); import sglang_lite.runtime.loading.load_model; assert dict(os.environ) == before"
    assert spins(code) == SPINS


@pytest.mark.parametrize(
    "users",
    [{"GOMP_SPINCOUNT": "77"}, {"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "passive"}],
)
def test_what_the_user_has_set_stays(users):
    assert spins(f"import sglang_lite.runtime\n{LIBRARY}", **users) == spins(LIBRARY, **users)


def test_where_torch_came_first_that_is_said_once():
    first = "import logging; logging.basicConfig(level='INFO')\n"
    code = (
        "import torch\n"
        "from sglang_lite import Engine\n"
        "from tests.runtime import scripted\n"
        "for _ in range(2): Engine.of(scripted.loaded()).close()"
    )
    assert run(first + code).stderr.count("torch was imported before the engine's modules") == 1
    said = "from sglang_lite.runtime.host import openmp; openmp.log_unbounded_spinning()"
    there = "import sys; sys.modules['torch'] = sys\n"  # as if it was imported, which takes seconds
    assert "torch was imported" in run(first + there + said).stderr
    assert "torch was imported" not in run(first + said).stderr
    assert "torch was imported" not in run(first + there + said, GOMP_SPINCOUNT="1000").stderr
