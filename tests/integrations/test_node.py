"""Clients of Node: openai, Anthropic's, ollama and Vercel's ai, by the server's protocols."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from sglang_lite.integrations.chat import EngineChat
from tests.server.conftest import serving

MODULES = Path(os.environ.get("NODE_CLIENTS", "build/node/node_modules")).absolute()
TEXTS = ("openai", "openai, streamed", "openai, responses", "anthropic", "anthropic, streamed", "ollama",
         "ollama, streamed", "ai", "ai, streamed")  # fmt: skip


@pytest.mark.skipif(
    not MODULES.is_dir(), reason="no packages of Node: `make test-clients` installs them"
)
def test_nodes_clients_are_told_what_the_engine_says(engine):
    messages = [{"role": "user", "content": "Count to three."}]
    expected = EngineChat(engine).answer(messages=messages, max_tokens=6, temperature=0).text
    with serving(engine) as url:
        command = ["node", str(Path(__file__).with_name("clients.cjs")), url, engine.model_name]
        own = {**os.environ, "NODE_PATH": str(MODULES)}
        done = subprocess.run(
            command, env=own, capture_output=True, text=True, timeout=120, check=False
        )
    told = dict(json.loads(line) for line in done.stdout.splitlines())
    others = {"openai, refused": [True, "temperature"], "ai, usage": 6, "ai, object": True}
    assert told == {**dict.fromkeys(TEXTS, expected), **others}, done.stderr
