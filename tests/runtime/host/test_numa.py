"""A thread runs on the cores near a device, if it may."""

import os
import threading

import pytest

from sglang_lite.runtime.host.numa import bind_to_cores_near

ADDRESS = "0000:3b:00.0"
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []

pytestmark = pytest.mark.skipif(not CORES, reason="only Linux binds threads to cores")


def bound(folder):
    """Cores of a thread that is bound near the device that a folder describes."""
    found = []

    def run():
        bind_to_cores_near(ADDRESS.upper(), folder)
        found.append(sorted(os.sched_getaffinity(0)))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize(("text", "near"), [
    (f"{CORES[0]}\n", CORES[:1]), (f"{CORES[0]}-{CORES[-1]},9000-9001\n", CORES), ("9000\n", CORES), ("\n", CORES),
    (None, CORES),
])  # fmt: skip
def test_a_thread_runs_near_a_device_where_that_is_known(text, near, tmp_path):
    if text is not None:
        (tmp_path / ADDRESS).mkdir()
        (tmp_path / ADDRESS / "local_cpulist").write_text(text)
    assert bound(tmp_path) == near
