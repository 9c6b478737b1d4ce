"""Conformance programs on a server: handed over whole, and node by node."""

import dataclasses

import pytest

import sglang_lite as sgl
from sglang_lite.engine.engine import Engine
from sglang_lite.lang.backend.local import LocalBackend
from sglang_lite.lang.chat_template import get_chat_template
from tests.conformance.case import cases, outcome, read, some_slow
from tests.conformance.test_compiled import COMPILED
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


@pytest.mark.slow
@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", some_slow(list(CASES)))
@pytest.mark.parametrize("form", ["whole", "node by node"])
def test_a_program_means_the_same_on_a_server(backends, name, form):
    case, (local, remote) = CASES[name], backends
    assert remote.plays_programs
    how = {} if form == "whole" else {"push_down": False}
    assert outcome(case, remote, **SETTINGS, **how) == outcome(case, local, **SETTINGS, **how)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["read_loop", "rollback_until", "fork_best", "sglang_hellaswag"])
def test_a_compiled_program_that_decides_is_one_request(backends, name):
    case, (local, remote) = CASES[name], backends
    assert remote.plays_decisions
    found = []
    for backend in (remote, local):
        before = local.engine.stats()
        compiled = case.program.compile(backend)
        found.append(outcome(dataclasses.replace(case, program=compiled), backend, **SETTINGS))
        after = local.engine.stats()
        assert after["programs_opened"] - before["programs_opened"] == 1
        assert after["programs_extended"] - before["programs_extended"] == 1
    assert found[0] == found[1]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", some_slow(COMPILED))
def test_a_compiled_batch_means_the_same_on_a_server(backends, name):
    case, (local, remote) = CASES[name], backends
    settings = {key: value for key, value in {**case.settings, **SETTINGS}.items() if key != "use_thread"}

    def all_of(backend):
        rows = [case.arguments] * 3
        compiled = case.program.compile(backend)
        return [told(each) for each in compiled.run_batch(rows, backend=backend, on_error="return", **settings)]

    def told(state):
        if isinstance(state, Exception):
            return type(state)
        return read(state.text), [read(state.__getitem__, name) for name in case.variables]

    assert remote.plays_rows
    assert all_of(remote) == all_of(local)
