"""An engine of a small checkpoint in both forms, one child for all tests that leave it as it was;
and addresses.
"""

import random
import socket
from typing import Any

import pytest

import sglang_lite as sgl

SETTINGS: dict[str, Any] = dict(
    dtype="float32",
    max_running=4,
    max_queued=64,
    max_total_tokens=8192,
    threads=1,
    deterministic=True,
)


@pytest.fixture(scope="session")
def own(folders):
    """An engine in a process of its own."""
    with sgl.Engine(folders[0], **SETTINGS) as engine:
        yield engine


@pytest.fixture(scope="session")
def here(folders):
    """The same in this process."""
    with sgl.Engine(folders[0], **SETTINGS, in_process=True) as engine:
        yield engine


@pytest.fixture
def address():
    """An address on this machine whose port and the two behind it are free."""
    while True:
        port = random.randrange(20_000, 30_000)  # none that the system gives to a connection
        try:
            for each in range(port, port + 3):
                socket.create_server(("127.0.0.1", each)).close()
        except OSError:
            continue
        return f"127.0.0.1:{port}"
