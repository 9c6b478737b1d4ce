"""Processes of a test's own: what runs in one, and all signals that tests send.

A worker of pytest that got a signal would end, and its run with it.
"""

import contextlib
import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from pathlib import Path

import pytest

from tests.waiting import until

ROOT = Path(__file__).parent.parent
# the functions that wait: for a value or a future, a batch, a stream
WAITING = {"wait", "iterate", "answers"}
_in_a_child = False


def send(pid, number):
    """Sends a signal to a process that this one has started, or that such a one has."""
    above = pid
    while (above := _parent(above)) != os.getpid():
        assert above > 1, f"process {pid} is not below this one"
    os.kill(pid, number)


@contextlib.contextmanager
def stopped(*pids):
    """Has children of this process stand still."""
    try:
        for pid in pids:
            send(pid, signal.SIGSTOP)
            os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
        yield
    finally:
        for pid in pids:
            send(pid, signal.SIGCONT)


def _parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def in_a_child(function, *arguments):
    """Result of a function of a test's module in a process of its own. Arguments and result are
    JSON.
    """
    command = [
        sys.executable,
        "-c",
        "from tests.children import main; main()",
        _module(function),
        function.__name__,
    ]
    done = subprocess.run(
        [*command, json.dumps(arguments)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}status {done.returncode}"
    return json.loads(done.stdout.splitlines()[-1])


def _module(function):
    """Name of its module from the root; in pytest a file in a folder without `__init__.py` has a
    short one.
    """
    return ".".join(Path(inspect.getfile(function)).relative_to(ROOT).with_suffix("").parts)


def main():
    """What the child runs."""
    global _in_a_child
    _in_a_child = True
    module, name, arguments = sys.argv[1:]
    print(json.dumps(getattr(importlib.import_module(module), name)(*json.loads(arguments))))


def interrupted(call, when=lambda: True):
    """Checks that `call()` ends with KeyboardInterrupt when Ctrl-C is pressed: when `when()` is
    true and the main thread, which calls, waits. Only in a child.
    """
    assert _in_a_child
    begun, seen = threading.Event(), threading.Event()

    def handler(*_):
        if not seen.is_set():
            seen.set()
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handler)
    presser = threading.Thread(target=_press, args=(begun, when, seen), daemon=True)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        begun.set()
        call()
    presser.join()
    signal.signal(signal.SIGINT, before)


def _press(begun, when, seen):
    main = threading.main_thread().ident or 0
    try:
        begun.wait()
        until(lambda: when() and _waits(main))
        # Again and again: what comes just before the thread waits does not wake it.
        until(lambda: seen.is_set() or signal.pthread_kill(main, signal.SIGINT))
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _waits(thread):
    """True while a thread waits, other than for a thread that it starts."""
    frame = sys._current_frames()[thread]  # noqa: SLF001 # its documented name
    names = [each.f_code.co_name for each, _ in traceback.walk_stack(frame)]
    return names[0] in WAITING and "start" not in names
