"""Processes that tests look for: engines' and their workers, by a mark in the environment that they
were started with.
"""

import contextlib
import os
import select
from pathlib import Path

from tests.waiting import until

MARK = "SGLANG_LITE_MARK"


def children(module="sglang_lite.engine.child.main", *, of="self"):
    """Children of this process, or of the one with the id `of`, that run a module."""
    found = []
    for task in Path(f"/proc/{of}/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has ended
            pids = (task / "children").read_text().split()
            found += [int(pid) for pid in pids if runs(pid, module)]
    return found


def runs(pid, module):
    """True where a process runs a module."""
    return module in Path(f"/proc/{pid}/cmdline").read_text()


def marked(mark):
    """All processes that were started with a mark, and that are alive."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                environment = (folder / "environ").read_bytes()
            except OSError:
                continue
            if f"{MARK}={mark}\0".encode() in environment + b"\0":
                found.append(int(folder.name))
    return found


def gone(mark):
    """Waits until no process with a mark is there."""
    while pids := marked(mark):
        for pid in pids:
            ended(pid)


def ended(pid):
    """Waits until a process has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    try:
        assert poll.poll(60_000), f"process {pid} does not end"
    finally:
        os.close(descriptor)


def descriptors():
    """What this process has open, by descriptor, without what a GPU's driver keeps for good."""
    opened = {each.name: str(each.resolve()) for each in Path("/proc/self/fd").iterdir()}
    return {name: path for name, path in opened.items() if "nvidia" not in path}


def idle(pid):
    """Waits until all threads of a process wait, and have computed nothing for ten looks."""
    looks = []

    def still():
        stats = [
            file.read_text().rpartition(")")[2].split()
            for file in Path(f"/proc/{pid}/task").glob("*/stat")
        ]
        looks.append([stat[:1] + stat[11:13] for stat in stats])
        return all(stat[0] == "S" for stat in stats) and looks[-10:] == looks[-1:] * 10

    until(still)


def resident(pid):
    """Bytes of memory that a process has."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
