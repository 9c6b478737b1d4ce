"""Conformance programs on a server: handed over whole, and node by node."""

import pytest

import sglang_lite as sgl
from sglang_lite import Engine
from sglang_lite.lang.backend.local import LocalBackend
from sglang_lite.lang.chat_template import get_chat_template
from tests.conformance.case import cases, outcome
from tests.constraints.test_generation import random_model
from tests.server.conftest import serving

CASES = {name: case for name, case in cases().items() if case.engine}
SETTINGS = {"seed": 3, "max_new_tokens": 24}


@pytest.fixture(scope="module")
def backends():
    """The engine, and a server with it."""
    with Engine.of(random_model(), max_running=64) as engine, serving(engine) as url:
        local, remote = LocalBackend(engine), sgl.RuntimeEndpoint(url, retries=0)
        local.chat_template = remote.chat_template = get_chat_template("chatml")
        yield local, remote
        remote.shutdown()


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("form", ["whole", "node by node"])
def test_a_program_means_the_same_on_a_server(backends, name, form):
    case, (local, remote) = CASES[name], backends
    assert remote.plays_programs
    how = {} if form == "whole" else {"push_down": False}
    assert outcome(case, remote, **SETTINGS, **how) == outcome(case, local, **SETTINGS, **how)
