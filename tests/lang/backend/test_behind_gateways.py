"""RuntimeEndpoint behind the gateways that there are: what they don't forward goes in other ways."""

import importlib.util
import os
import socket

import pytest

import sglang_lite as sgl
from sglang_lite.lang.backend.local import LocalBackend
from sglang_lite.server.replicas.gateway import PACKAGES, Gateway
from sglang_lite.server.settings import ReplicaSettings, ServerSettings
from tests.engine.conftest import SETTINGS
from tests.server.conftest import serving


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


@sgl.function
def program(s):
    s += sgl.user("hi <|im_end|>") + sgl.assistant(sgl.gen("a", max_tokens=9, stop="b"))
    s += sgl.gen("n", dtype=int, max_tokens=4) + sgl.gen(
        "l", constraint=sgl.Grammar('start: "a" "b"+'), max_tokens=6
    )
    s += sgl.select("c", ["yes", "no"])


@pytest.mark.parametrize("package", PACKAGES)
def test_a_program_means_the_same_behind_a_gateway(folders, package):
    if importlib.util.find_spec(PACKAGES[package]) is None:
        pytest.skip(f"{package} is not installed")
    with sgl.Engine(folders[0], **SETTINGS, in_process=True) as engine, serving(engine) as url:
        gateway = Gateway(
            ServerSettings(port=0), ReplicaSettings(gateway=package), "127.0.0.1", free_port()
        )
        gateway.add_worker(url)
        try:
            while not gateway.known:
                os.sched_yield()
            remote, local = (
                sgl.RuntimeEndpoint(gateway.url, chat_template_name="chatml"),
                LocalBackend(engine),
            )
            local.chat_template = remote.chat_template
            expected = program.run(backend=local, seed=3, temperature=1.0)
            for stream in (False, True):
                state = program.run(backend=remote, seed=3, temperature=1.0, stream=stream)
                assert "".join(state.text_iter()) == expected.text()
                assert state["c"] == expected["c"]
            remote.shutdown()
        finally:
            gateway.kill()
