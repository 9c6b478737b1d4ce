"""Random ids of requests and answers. The ids are not secrets: only API keys control access."""

from __future__ import annotations

import os
import random
import secrets

# Seeded from the system only once: each such call releases the GIL, which another thread may then
# hold for a while.
_source = random.Random(secrets.randbits(256))


def random_id() -> str:
    """Returns a random id: 128 bits as 32 hexadecimal digits."""
    return f"{_source.getrandbits(128):032x}"


def _reseed() -> None:
    _source.seed(secrets.randbits(256))


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_reseed)
