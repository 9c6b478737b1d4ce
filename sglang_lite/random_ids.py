"""Ids of answers and requests, random and without meaning. They are no secrets: who has a key is asked for it."""

from __future__ import annotations

import os
import random
import secrets

# Asked of the system once: that lets go of the interpreter's lock, which another thread may then keep for a while.
_source = random.Random(secrets.randbits(256))


def random_id() -> str:
    """128 random bits as 32 hexadecimal digits."""
    return f"{_source.getrandbits(128):032x}"


def _reseed() -> None:
    _source.seed(secrets.randbits(256))


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_reseed)
