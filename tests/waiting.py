"""Waiting for what another thread or process does, where nothing tells of it."""

import threading


def until(condition, looks=6000):
    """Looks again, 10 ms apart, until `condition()` is true; gives what it gave.

    Counts its looks, so it never ends sooner because a machine is fast. Raises AssertionError after
    `looks` of them.
    """
    for _ in range(looks):
        if found := condition():
            return found
        threading.Event().wait(0.01)
    raise AssertionError(f"{condition} has not come true in {looks:,} looks")
