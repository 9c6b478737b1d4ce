"""Backends that nobody shuts down: their sockets are closed, without a warning, and no process
waits for them.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from api_server import Hold

from tests.waiting import until

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/fd").is_dir(), reason="looks for open sockets in /proc"
)

SCRIPT = """
import asyncio, gc, importlib.metadata, os, sys
if sys.argv[2] == "builtin":
    importlib.metadata.version = lambda package: "0"
import sglang_lite as sgl
from sglang_lite.lang.backend.http import connection_pool
from tests.waiting import until

connection_pool._IDLE_S = 0.05

@sgl.function
def program(s, word="Hi"):
    s += sgl.user(word) + sgl.assistant(sgl.gen("a"))

def sockets():
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
        except OSError:
            pass  # that of the listing
    return found

def none_but(count):
    gc.collect()
    return sockets() == count

def made(**options):
    return sgl.OpenAI("gpt-4o", base_url=sys.argv[1], api_key="k", max_retries=0, **options)

async def asked(backend):
    prompt = sgl.protocol.Prompt((), (sgl.protocol.Message("user", ("Hi",)),), "assistant")
    return [each async for each in backend.agenerate(prompt, sgl.SamplingParams(), None, stream=True)][-1].text

kept = made()  # the executor loop has sockets of its own
assert program.run(backend=kept)["a"] == "ok"
kept.shutdown()
before = sockets()

# nobody has it any more, or it is idle for long enough
backend = made()
assert program.run(backend=backend)["a"] == "ok"
del backend
until(lambda: none_but(before))

connection_pool._IDLE_S = 1e6  # as long as the process

# on loops of one's own, which end
backend = made()
for _ in range(3):
    assert asyncio.run(asked(backend)) == "ok"
    assert none_but(before)

# dropped inside its loop
async def main():
    assert await asked(made()) == "ok"
    gc.collect()
asyncio.run(main())
assert none_but(before)

# on two loops, of which one goes on
assert program.run(backend=backend)["a"] == "ok"
assert asyncio.run(asked(backend)) == "ok"
until(lambda: none_but(before))

# open when the process ends, and with a call under way
assert program.run(backend=backend)["a"] == "ok"
assert not none_but(before)
held = program.run("hold", backend=kept)
until(lambda: sockets() > before + 1)
sys.stdin.read()  # until the server has the call: a socket is there before
"""


@pytest.mark.parametrize("client", ["sdk", "builtin"])
def test_sockets_are_closed_without_a_word_and_nothing_holds_the_process(api, client):
    api.answers = {"Hi": "ok", "hold": Hold()}
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", SCRIPT, f"{api.url}/v1", client],
        stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": os.getcwd()},
    )  # fmt: skip
    until(
        lambda: (
            process.poll() is not None
            or any("hold" in str(request.body) for request in api.requests)
        )
    )
    _, errors = process.communicate(timeout=300)
    told = [
        line
        for line in errors.splitlines()
        if not line.startswith("A program failed and its error was never read")
    ]
    assert (process.returncode, told) == (0, [])  # the one that was under way may be told of
    assert api.hung_up.wait(30)
