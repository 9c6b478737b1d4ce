"""Every conformance program gives the same when its nodes go to the engine as data, and its events
come back so.
"""

from functools import partial

import pytest

import sglang_lite as sgl
from sglang_lite import Engine, wire
from sglang_lite.errors import WireError
from sglang_lite.lang.backend.local import LocalBackend
from sglang_lite.lang.chat_template import get_chat_template
from sglang_lite.program.nodes import Program
from sglang_lite.protocol import Played
from tests.conformance.case import cases, outcome, read
from tests.constraints.test_generation import random_model

CASES = {name: case for name, case in cases().items() if case.engine}


class OverTheWire(LocalBackend):
    """Between it and the engine there is nothing but data.

    Attributes:
        messages: what came, each with what was sent.
    """

    def __init__(self, engine):
        super().__init__(engine)
        self.messages = []

    def open_program(self, sink, *, stream, priority=0):
        def carried(event):
            try:
                sink(self.carry(event))
            except WireError as error:
                self.messages.append((error, None))
                sink(error)

        return Carried(super().open_program(carried, stream=stream), self.carry)

    def carry(self, message):
        found = wire.decode(wire.encode(message))
        self.messages.append((message, found))
        return found


class Carried:
    def __init__(self, program, carry):
        self._program, self._carry = program, carry
        self.drop_branch, self.close = program.drop_branch, program.close

    def extend(self, path, nodes):
        self._program.extend(path, self._carry(Program(tuple(nodes))).nodes)

    def judge(self, path, place, verdict):
        self._program.judge(path, place, self._carry(verdict))


@pytest.fixture(scope="module")
def engine():
    with Engine.of(random_model(), max_running=64) as engine:
        yield engine


def said(message):
    """All of a message that has to come."""
    if isinstance(message, sgl.SglError):
        return type(message), str(message), message.hint
    if isinstance(message, Played):
        return message.path, message.name, said(message.event), message.attempt
    if isinstance(message, Program):
        return message, [node.where for node in message.nodes]
    return message


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", CASES)
def test_a_program_means_the_same_over_the_wire(engine, name):
    here, there = LocalBackend(engine), OverTheWire(engine)
    here.chat_template = there.chat_template = get_chat_template("chatml")
    run = partial(outcome, CASES[name], seed=3, max_new_tokens=24)
    assert run(there) == run(here)
    assert [said(found) for _, found in there.messages] == [
        said(sent) for sent, _ in there.messages
    ]
    assert len(there.messages) >= CASES[name].programs


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if case.streams and not case.raises]
)
def test_a_stream_comes_over_the_wire(engine, name):
    case = CASES[name]
    there = OverTheWire(engine)
    there.chat_template = get_chat_template("chatml")
    settings = {**case.settings, "seed": 3, "max_new_tokens": 8}
    state = case.program.run(backend=there, stream=True, **case.arguments, **settings)
    pieces = read(lambda: list(state.text_iter()))
    if isinstance(pieces, list):
        assert "".join(pieces) == state.text()
    assert [said(found) for _, found in there.messages] == [
        said(sent) for sent, _ in there.messages
    ]
    assert not any(isinstance(found, WireError) for _, found in there.messages)
