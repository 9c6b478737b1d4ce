"""Messages that cross: what has no form as data is refused, what can't be read fails alone."""

import inspect
from typing import Any, get_origin, get_type_hints

import msgspec
import pytest

import sglang_lite as sgl
from sglang_lite.engine import frames, weights
from sglang_lite.engine.frames import HEADER, Abort, AskReply, Command, Extend, Log, RequestEvent
from sglang_lite.errors import Location
from sglang_lite.program.nodes import Fork, Gen, Program, Text
from sglang_lite.protocol import (
    BackendError,
    Constraint,
    Delta,
    Generation,
    JsonSchema,
    ParameterError,
    Prompt,
    RequestAbortedError,
    SamplingParams,
    Usage,
)
from sglang_lite.runtime import calls
from sglang_lite.runtime.calls import CompileGrammar, EngineCall, StartProfile, Stats, WriteTensors
from sglang_lite.runtime.core.submission import OpenRequest, ProgramRequest, SelectRequest
from sglang_lite.server import native
from sglang_lite.server.features import media_features
from sglang_lite.wire.failure import as_error


def crossed(message, read=frames.decode_commands):
    (found,) = read(memoryview(frames.encode_frame([message]))[HEADER:])
    return found


def as_text(message):
    return msgspec.json.encode(message, enc_hook=str)


def aborted():
    error = RequestAbortedError("the request was aborted.")
    error.partial = Generation("a")
    return error


WHERE = Location("prog.py", 7, "program")
COMMANDS = [
    (3, CompileGrammar(JsonSchema('{"type": "integer"}'))),
    (4, SelectRequest("a", ("b", "é"), True, "x")),
    (5, OpenRequest(True)),
    (
        6,
        ProgramRequest(
            "a", Program((Text("b"), Gen("c", SamplingParams(max_tokens=3), where=WHERE)))
        ),
    ),
    (
        7,
        Extend(
            (0, 1),
            (Fork(((Gen("d"),), (Text("e"),))),),
            {0: frames.serializable_failure(ParameterError("n", "bad."))},
        ),
    ),
    (8, StartProfile("folder", with_stack=True, record_shapes=False)),
    (9, Stats()),
    (2**40, Abort()),
]
REPORTS = [
    RequestEvent(1, Delta("a", (1,), (), 2), 5, (0,), "x"),
    RequestEvent(1, Generation("a", (1,), usage=Usage(3, 2, 1), meta={"k": [1]})),
    RequestEvent(1, frames.serializable_failure(aborted())),
    AskReply(2, {"steps": 3, "s": 0.5}),
    Log("sglang_lite", 20, "é"),
]


# What only routes of the server ask for, and what methods of other names do.
DOCUMENTED = {
    "expert_distribution_record": sgl.Engine.dump_expert_distribution_record,
    "encode_media": media_features,
    "end_session": native.close_session,
    "update_weights_from_handles": weights.update_from_handle,
    "offer_weights": weights.offer_weights,
    "send_weights": weights.send_weights,
}


CALLS = [
    kind
    for kind in vars(calls).values()
    if isinstance(kind, type)
    and issubclass(kind, EngineCall)
    and kind not in (EngineCall, WriteTensors)
]
VALUES = {
    str: "a",
    int: 2,
    bool: True,
    bytes: b"a",
    Constraint: JsonSchema("{}"),
    Prompt | str: "a",
}


def some(kind: Any) -> Any:
    """A value for a field of a type."""
    return VALUES.get(kind, () if get_origin(kind) is tuple else None)


@pytest.mark.parametrize("kind", CALLS)
def test_every_call_crosses(kind):
    hints = get_type_hints(kind)
    call = kind(*(some(hints[name]) for name in kind.__struct_fields__))
    assert crossed((1, call)) == (1, call)


def test_every_call_that_crosses_is_a_method_that_is_documented():
    for kind in frames.ASKED:
        tag = str(kind.__struct_config__.tag)
        assert inspect.getdoc(DOCUMENTED.get(tag) or getattr(sgl.Engine, tag))


@pytest.mark.parametrize("message", COMMANDS, ids=lambda m: type(m[1]).__name__)
def test_commands_cross_whole(message):
    assert as_text(crossed(message)) == as_text(message)


@pytest.mark.parametrize("message", REPORTS, ids=lambda m: type(m).__name__)
def test_reports_cross_whole(message):
    assert as_text(crossed(message, frames.decode_reports)) == as_text(message)


@pytest.mark.parametrize("value", [object(), 2**70, {1, object()}, lambda: 0])
def test_what_has_no_form_is_refused_where_it_is_sent(value):
    with pytest.raises(ParameterError, match="in_process=True"):
        frames.encode_frame([AskReply(1, value)])


def test_what_holds_itself_is_refused():
    loop = []
    loop.append(loop)
    with pytest.raises(ParameterError):
        frames.encode_frame([AskReply(1, loop)])


def test_a_message_larger_than_a_frame_is_refused(monkeypatch):
    monkeypatch.setattr(frames, "MAX_BYTES", 1000)
    with pytest.raises(ParameterError, match=r"at most 1,000 fit .* Send fewer texts or nodes"):
        frames.encode_frame([(4, SelectRequest("a" * 1000, ("b",)))])


def test_a_message_of_wrong_types_fails_alone():
    wrong: Any = (7,)
    commands: list[Command] = [(1, OpenRequest(True)), (2, SelectRequest("a", wrong)), (3, Abort())]
    data = frames.encode_frame(commands)
    first, bad, last = frames.decode_commands(memoryview(data)[HEADER:])
    assert [first, last] == [commands[0], commands[2]]
    number, error = bad
    assert number == 2
    assert isinstance(error, ParameterError)
    assert str(error).startswith("choices[0]: expected `str`, got `int`.")


def test_a_wrong_type_is_named_by_its_place_in_the_request():
    for message, parameter in (
        (["extend", [], [{"kind": "Gen", "name": 3}]], "nodes[0].name"),
        (["open", "yes", ""], "stream"),
        (["drop"], "request"),
    ):
        ((number, error),) = frames.decode_commands(
            memoryview(msgspec.msgpack.encode([(1, message)]))
        )
        assert number == 1
        assert isinstance(error, ParameterError)
        assert error.parameter == parameter, error


@pytest.mark.parametrize(
    "content", [b"", b"\xc1", b"\x93\x01", b"\x01", b"\x91\x01", b"\x91\x90", b"\x91\x91\xa1x"]
)
def test_rubbish_is_said_to_be_none(content):
    for read in (frames.decode_commands, frames.decode_reports):
        with pytest.raises(msgspec.MsgspecError):
            read(memoryview(content))


@pytest.mark.parametrize(
    "error",
    [
        ParameterError("top_p", "bad.", hint="Use another."),
        sgl.ConstraintError("no.", pointer="/a/b"),
        sgl.EngineClosedError("closed."),
        aborted(),
    ],
    ids=lambda e: type(e).__name__,
)
def test_errors_cross_with_what_they_have(error):
    error.where = WHERE
    error.add_note("noted")
    found = as_error(frames.serializable_failure(error))
    assert (type(found), str(found), vars(found)) == (type(error), str(error), vars(error))


def test_errors_of_others_cross_as_a_backends():
    found = as_error(frames.serializable_failure(LookupError("gone")))
    assert type(found) is BackendError
    assert str(found) == "LookupError: gone"
