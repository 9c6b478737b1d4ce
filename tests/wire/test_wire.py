"""Records and errors travel as data and come back the same; data that is wrong is refused, and
nothing else happens.
"""

import contextlib
import functools
import json
import math
import os
import random
import re
import subprocess
import sys
import types
import typing

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sglang_lite as sgl
from sglang_lite import errors, protocol, wire
from sglang_lite.program import graph, nodes
from sglang_lite.protocol.parameter import ORDERS, Deferred
from sglang_lite.protocol.record import Record, Variant
from sglang_lite.protocol.recording import RecordedCall, RecordedEvent, RecordedRequest
from sglang_lite.protocol.sampling import PARAMETERS
from sglang_lite.wire import failure, messages
from sglang_lite.wire.scan import scan_json

RECORDS = int(os.environ.get("SGLANG_LITE_WIRE_RECORDS", "8"))  # of each kind
FUZZED = int(os.environ.get("SGLANG_LITE_WIRE_FUZZ", "500"))

# --------------------------------------------------------------------------------------- any record

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
names = texts.filter(lambda text: text != "$float")
integers = st.integers(-(2**63), 2**64 - 1)
floats = st.floats(allow_nan=False)
plain = st.recursive(
    st.none() | st.booleans() | integers | floats | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)
places = st.builds(errors.Location, texts, st.integers(0, 10**6), texts)


@functools.cache  # a strategy learns its shape once
def values(kind):
    """Values of an annotation."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple and inner[-1] is ...:
        return tuples(st.deferred(lambda: values(inner[0])))
    if origin is tuple:
        return st.tuples(*map(values, inner))
    if origin is typing.Literal:
        return st.sampled_from(inner)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([st.deferred(lambda each=each: values(each)) for each in inner])
    if origin is not None:
        return st.dictionaries(names, plain, max_size=3)  # meta
    if kind is protocol.SglError:
        return problems()
    if kind is typing.Any:  # of a parameter's default
        return plain
    if isinstance(kind, type) and issubclass(kind, Record):
        return records(kind)
    return {
        str: texts, int: integers, float: floats, bool: st.booleans(), bytes: st.binary(max_size=8),
        type(None): st.none(), protocol.Unset: st.just(protocol.UNSET), errors.Location: places,
    }[kind]  # fmt: skip


@functools.cache
def records(kind):
    members = {name: values(annotation) for name, annotation in typing.get_type_hints(kind).items()}
    if kind is protocol.JsonSchema:
        separators = st.sampled_from([(", ", ": "), (",", ":"), (" ,\n", ":")])
        said = (
            {"separators": separators, "whitespace": st.just("json")},
            {"separators": st.just((", ", ": "))},
        )
        # in one of the two ways
        return st.one_of([st.builds(kind, **{**members, **each}) for each in said])
    if kind is protocol.SamplingParams:
        members = {each.name: st.just(protocol.UNSET) | within(each) for each in PARAMETERS}
    if kind is nodes.Select:
        members["lora_path"] = st.just(protocol.UNSET) | st.just(()) | st.tuples(texts)
    if kind is graph.GraphRecord:
        members |= {
            "nodes": tuples(plain_nodes()),
            "ways": st.just((graph.Way(()),)),
            "read": st.just(()),
            "changes": st.just(()),
        }
    return st.builds(kind, **members)


def plain_nodes():
    """Nodes of a graph that refer to no others."""
    members = {name: values(kind) for name, kind in typing.get_type_hints(graph.GraphNode).items()}
    use = st.builds(graph.Use, texts, source=st.none())
    return st.builds(
        graph.GraphNode,
        **{**members, "path": st.just(()), "joins": st.just(()), "uses": tuples(use)},
    )


def within(parameter):
    """Values that a parameter takes."""
    low, high, above = parameter.range.low, parameter.range.high, parameter.range.above
    whole = st.integers(
        -(2**63) if low is None else int(low), 2**64 - 1 if high is None else int(high)
    )
    real = st.floats(low, high, exclude_min=above, allow_nan=False, allow_infinity=False)
    return {
        "int": whole, "float": real, "bool": st.booleans(), "strings": tuples(texts.filter(bool)),
        "token ids": tuples(whole), "biases": tuples(st.tuples(whole, st.floats(allow_nan=False, allow_infinity=False))),
        "order": st.sampled_from(ORDERS),
        "budget": st.one_of(st.integers(0, 100), st.sampled_from([("30s",), ("50%",)])),
        "exactness": st.sampled_from([True, False, "bound", "weighted"]),
    }[parameter.kind]  # fmt: skip


def tuples(items):
    return st.lists(items, max_size=3).map(tuple)


def problems():
    """Errors of any class."""
    common = {"hint": texts, "where": st.none() | places}
    own = {
        sgl.ParameterError: st.builds(sgl.ParameterError, texts, texts, **common),
        sgl.ConstraintError: st.builds(
            sgl.ConstraintError, texts, pointer=st.none() | texts, **common
        ),
        protocol.WireError: st.builds(protocol.WireError, texts, pointer=texts, hint=texts),
        sgl.ValueValidationError: st.builds(
            sgl.ValueValidationError, texts, text=texts, value=plain, **common
        ),
        sgl.RequestAbortedError: st.builds(
            aborted, texts, st.none() | records(protocol.Generation)
        ),
        sgl.BatchError: st.builds(
            sgl.BatchError, texts, st.lists(st.none() | st.builds(sgl.SglError, texts))
        ),
    }
    return st.one_of(
        [own.get(kind, st.builds(kind, texts, **common)) for kind in failure.ERRORS.values()]
    )


def aborted(message, partial):
    error = sgl.RequestAbortedError(message)
    error.partial = partial
    return error


def content(message):
    """Fields of a message that are compared."""
    if isinstance(message, sgl.SglError):
        return (
            type(message),
            str(message),
            {name: content(value) for name, value in vars(message).items()},
        )
    if isinstance(message, protocol.Played):
        return message.path, message.name, content(message.event)
    return [content(each) for each in message] if isinstance(message, list) else message


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", wire.TYPES.values(), ids=wire.TYPES)
def test_any_record_comes_back_the_same(kind):
    @settings(max_examples=RECORDS, deadline=None)
    @given(records(kind))
    def check(record):
        again = wire.decode(wire.encode(record))
        assert type(again) is kind
        assert content(again) == content(record)

    check()


@settings(max_examples=200, deadline=None)
@given(error=problems())
def test_any_error_comes_back_the_same(error):
    again = wire.decode(wire.encode(error))
    assert content(again) == content(error)
    assert again.args == error.args


def test_the_table_has_every_record_and_every_error():
    def below(kind):
        return {kind}.union(*map(below, kind.__subclasses__()))

    homes = ("sglang_lite.protocol", "sglang_lite.program")
    ours = {kind for kind in below(Record) if kind.__module__.startswith(homes)} - {
        Record,
        Variant,
        nodes.BaseNode,
        failure.Failure,
    }
    assert set(wire.TYPES.values()) == ours
    assert set(failure.ERRORS.values()) == {
        kind for kind in below(sgl.SglError) if kind.__module__ == errors.__name__
    }
    assert messages.PlayedData.__struct_fields__ == protocol.Played.__struct_fields__


def test_only_meta_and_value_hold_what_no_type_says():
    free = {
        name
        for kind in (*wire.TYPES.values(), failure.Failure)
        for name, annotation in typing.get_type_hints(kind).items()
        if typing.Any in (annotation, *typing.get_args(annotation))
    }
    assert free == {"meta", "value"}


# ------------------------------------------------------------------------------- forms of their own


def test_a_message_says_its_version_and_type():
    data = wire.encode(protocol.Delta("a", (1,)))
    assert json.loads(data) == {
        "version": 1, "type": "Delta", "data": {"kind": "Delta", "text": "a", "token_ids": [1]},
    }  # fmt: skip


def test_log_probabilities_of_minus_infinity_survive():
    scores = protocol.Selection(
        (protocol.ChoiceScore("a", (1,), (-math.inf,), (None,)),), meta={"x": [math.inf]}
    )
    assert wire.decode(wire.encode(scores)) == scores
    token = wire.decode(wire.encode(protocol.TokenLogprob(math.nan, 1)))
    assert math.isnan(token.logprob)


def test_an_error_travels_with_its_place_and_what_caused_it():
    def fail():
        raise sgl.ProgramError("no", hint="Do this.") from ValueError("half \ud800")

    with pytest.raises(sgl.ProgramError) as caught:
        fail()
    code = fail.__code__
    caught.value.where = errors.Location(code.co_filename, code.co_firstlineno, code.co_qualname)
    caught.value.add_note("in the third item")
    again = wire.decode(wire.encode(caught.value))
    assert str(again) == str(caught.value)
    assert again.where == errors.Location(code.co_filename, code.co_firstlineno, code.co_qualname)
    assert again.__notes__ == ["in the third item", "Caused by ValueError: half \\ud800"]


def test_every_error_travels_whatever_is_in_it():
    class OwnError(sgl.CapabilityError):
        pass

    def through(error):
        return wire.decode(wire.encode(error))

    assert type(through(OwnError("m"))) is sgl.CapabilityError
    assert str(through(sgl.SglError("half \ud800"))) == "half \\ud800"
    assert through(sgl.CapabilityError("m", parameter="tools")).parameter == "tools"
    assert through(sgl.ValueValidationError("m", text="t", value=print)).value == repr(print)
    results = through(sgl.BatchError("m", [object(), OwnError("a"), ValueError("b")])).results
    assert [(type(each), str(each)) for each in results] == [
        (type(None), "None"), (sgl.CapabilityError, "a"), (sgl.ProgramError, "ValueError: b"),
    ]  # fmt: skip


# -------------------------------------------------------------------------------- refused when sent

G = protocol.Generation
UNSENDABLE = {
    "a function": (G("x", meta={"a": [1, print]}), "/data/meta/a/1", "can't be sent"),
    "an object": (protocol.Delta(object()), "/data/text", "a object can't be sent"),  # type: ignore[arg-type]  # wrong on purpose
    "a set": (G("x", meta={"a": {1}}), "/data/meta/a", "a set"),
    "what is only known in the run": (protocol.SamplingParams(seed=Deferred()), "/data/seed", "a Deferred"),  # type: ignore[arg-type]  # wrong on purpose
    "bytes in meta": (G("x", meta={"a": b"x"}), "/data/meta/a", "bytes"),
    "a tuple in meta": (G("x", meta={"a": (1,)}), "/data/meta/a", "tuple"),
    "a record in meta": (G("x", meta={"a": protocol.Usage()}), "/data/meta/a", "Usage"),
    "a name that is no text": (G("x", meta={1: 2}), "/data/meta", "1 can't be the name of a member"),  # type: ignore[dict-item]  # wrong on purpose
    "the reserved name": (G("x", meta={"a": {"$float": "inf"}}), "/data/meta/a", "can't be the name"),
    "a wide integer": (protocol.SamplingParams(seed=2**64), "/data/seed", "64 bits"),
    "a wide token": (protocol.Span("x", (1, -(2**63) - 1)), "/data/ids/1", "64 bits"),
    "half a pair": (protocol.Prompt((protocol.Span("a"), protocol.Span("\udc00"))), "/data/spans/1/text", "surrogate"),
    "half a pair in a name": (G("x", meta={"\ud800": 1}), "/data/meta", "surrogate"),
    "an error in a record": (G("x", meta={"~/": ValueError()}), "/data/meta/~0~1", "ValueError"),
}  # fmt: skip


@pytest.mark.parametrize(("record", "pointer", "problem"), UNSENDABLE.values(), ids=UNSENDABLE)
def test_what_has_no_form_is_refused_where_it_is_sent(record, pointer, problem):
    with pytest.raises(protocol.WireError, match=problem) as caught:
        wire.encode(record)
    assert caught.value.pointer.startswith(pointer)


def nested(depth):
    constraint: protocol.Constraint = protocol.Regex("a")
    for _ in range(depth):
        constraint = protocol.Repeated(constraint)
    return constraint


def test_what_is_sent_can_be_read_up_to_the_limit_of_depth():
    for depth in (1, 120, 126):
        assert wire.decode(wire.encode(nested(depth))) == nested(depth)
    for depth in (127, 5000):
        with pytest.raises(protocol.WireError, match="nested"):
            wire.encode(nested(depth))
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(protocol.WireError, match="nested"):
        wire.encode(G("x", meta={"a": deep}))


def test_what_is_too_large_is_not_sent():
    with pytest.raises(protocol.WireError, match="5"):
        wire.encode(protocol.Delta("x" * 100), limits=wire.Limits(bytes=50))
    with pytest.raises(protocol.WireError, match="more than 50 values"):
        wire.encode(protocol.Delta("x", tuple(range(60))), limits=wire.Limits(items=50))


def test_what_is_no_message_is_refused():
    for other in ({"a": 1}, "text", None, ValueError("x"), wire.Limits()):
        with pytest.raises(protocol.WireError, match="can't be sent"):
            wire.encode(other)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(sgl.ParameterError, match="data"):
        wire.decode("{}")  # type: ignore[arg-type]  # wrong on purpose


# -------------------------------------------------------------------------------- refused when read


def message(**members):
    return {"version": 1, "type": "Delta", "data": {"kind": "Delta", "text": "a"}, **members}


def without(name):
    return {key: value for key, value in message().items() if key != name}


WRONG = {
    "a newer version": (message(version=2), "/version", "version 2 .*Upgrade sglang_lite here"),
    "an older version": (message(version=0), "/version", "Upgrade sglang_lite where"),
    "a version as text": (message(version="1"), "/version", "int"),
    "no version": (without("version"), "", "`version` is missing"),
    "no data": (without("data"), "", "`data` is missing"),
    "a member too many": (message(more=1), "", "`more`"),
    "an unknown type": (message(type="os.system"), "/type", "'os.system' is not a type of message"),
    "an unknown member": (message(data={"kind": "Delta", "text": "a", "more": 1}), "/data", "more"),
    "a member missing": (message(data={"kind": "Delta"}), "/data", "text"),
    "a wrong type": (message(data={"kind": "Delta", "text": "a", "token_ids": [1, "2"]}), "/data/token_ids/1", "int"),
    "another kind": (message(data={"kind": "Generation", "text": "a"}), "/data/kind", "Generation"),
    "an unknown kind": (message(type="Tag", data={"begin": "", "content": {"kind": "X"}, "end": ""}),
                        "/data/content/kind", "X"),
    "a constraint that is none": (message(type="JsonSchema", data={"kind": "JsonSchema", "schema": "", "separators": ["", ""]}),
                                  "/data", "separators"),
    "an unknown error": (message(type="Error", data={"kind": "Error", "type": "KeyError", "message": ""}),
                         "/data/type", "'KeyError' is not the name of an error"),
    "an error with another's member": (
        message(type="Error", data={"kind": "Error", "type": "SglError", "message": "", "pointer": ""}),
        "/data/pointer", "has no `pointer`"),
    "an error without its member": (
        message(type="Error", data={"kind": "Error", "type": "ParameterError", "message": ""}),
        "/data", "`parameter` is missing: a ParameterError requires it"),
    "a list": ([1], "", "object"),
    "nothing": (None, "", "object"),
}  # fmt: skip


@pytest.mark.parametrize(("data", "pointer", "problem"), WRONG.values(), ids=WRONG)
def test_what_is_no_message_of_this_version_is_refused(data, pointer, problem):
    with pytest.raises(protocol.WireError, match=problem) as caught:
        wire.decode(msgspec.json.encode(data))
    assert caught.value.pointer == pointer


def delta(inner):
    return b'{"version":1,"type":"Delta","data":{"kind":"Delta",' + inner + b"}}"


WRONG_JSON = {
    "a name twice": (delta(b'"text":"a","text":"b"'), "/data/text", "occurs twice .* Give each name once"),
    "a name twice, escaped": (delta(b'"text":"a","t\\u0065xt":"b"'), "/data/text", "twice"),
    "a name twice in the envelope": (b'{"version":1,"version" :1}', "/version", "twice"),
    "a wide integer": (delta(b'"text":"a","token_ids":[1, 2,[],3,123456789012345678901]'), "/data/token_ids/4", "64 bits"),
    "a wider integer": (delta(b'"text":"a","index":' + b"1" * 10_000), "/data/index", "64 bits"),
    "too deep": (delta(b'"text":' + b"[" * 10_000), "/data/text" + "/0" * 126, "nested deeper than 128"),
    "half a pair": (delta(b'"text":"\\ud800"'), "", "no message"),
    "half a pair, then text": (delta(b'"text":"\\ud800 and"'), "", "no message"),
    "the other half": (delta(b'"text":"\\udc00"'), "", "no message"),
    "no UTF-8": (delta(b'"text":"\xff"'), "", "UTF-8"),
    "NaN": (delta(b'"text":NaN'), "", "no message"),
    "text without an end": (b'{"version":1,"type":"' + b'\\"' * 10, "/type", "cut short .* Send the whole message"),
    "an odd float of no number": (
        b'{"version":1,"type":"TokenLogprob","data":{"token_id":1,"logprob":{"$float":"1"}}}', "/data/logprob", "float"),
    "an odd float in meta": (
        b'{"version":1,"type":"Selection","data":{"kind":"Selection","scores":[],"meta":{"a":{"$float":"1"}}}}',
        "/data/meta/a", "can't be the name"),
}  # fmt: skip


@pytest.mark.parametrize(("data", "pointer", "problem"), WRONG_JSON.values(), ids=WRONG_JSON)
def test_json_that_a_library_would_take_is_refused(data, pointer, problem):
    with pytest.raises(protocol.WireError, match=problem) as caught:
        wire.decode(data)
    assert caught.value.pointer.startswith(pointer)


def test_what_is_too_large_is_not_read():
    data = wire.encode(protocol.Delta("x", tuple(range(60))))
    with pytest.raises(protocol.WireError, match="bytes are more than 50"):
        wire.decode(data, limits=wire.Limits(bytes=50))
    with pytest.raises(protocol.WireError, match="more than 50 values"):
        wire.decode(data, limits=wire.Limits(items=50))
    assert wire.decode(memoryview(data)) == wire.decode(bytearray(data))
    many = msgspec.json.encode(message(data={"kind": "Delta", "text": [[]] * 2**20}))
    with pytest.raises(protocol.WireError, match="more than 1048576 values"):
        wire.decode(many)


def test_numbers_and_texts_of_json_are_not_taken_for_others():
    data = b' {"version" : 1, "type":"TokenLogprob","data": {"token_id": 5, "logprob":-0.12345678901234567890123,\n"text":"\\"[{,:1234567890123456789012"}} '
    assert wire.decode(data) == protocol.TokenLogprob(
        -0.12345678901234567890123, 5, '"[{,:1234567890123456789012'
    )
    same = b'{"version":1,"type":"Delta","data":{"kind":"Delta","text":"a","token_ids":[18446744073709551615 , -9223372036854775808]}}'
    assert wire.decode(same).token_ids == (2**64 - 1, -(2**63))


def test_a_caller_that_is_deep_in_a_recursion_gets_no_other_error():
    data = wire.encode(nested(100))

    def deeper():
        with contextlib.suppress(RecursionError):
            deeper()
        with contextlib.suppress(protocol.WireError, RecursionError):
            assert wire.decode(data) == nested(100)

    deeper()


# ------------------------------------------------------------------------------------------ fuzzing

SENT = [
    protocol.SamplingParams(stop=("a", "ü"), seed=2**64 - 1, temperature=0.5, logit_bias=((1, -1.5),)),
    protocol.StructuralTag((protocol.Tag("<", protocol.JsonSchema("{}", separators=(",", ":")), ">"),), ("<",)),
    protocol.Prompt((protocol.Span("a" * 40, (1, 2, 70_000)),), (protocol.Message("user", ("x", protocol.Media(b"\x00" * 20))),)),
    G("text", tuple(range(200)), matched=3, usage=protocol.Usage(3, total_s=0.5), meta={"a": [None, {"b": 1.5}]}),
    protocol.Selection((protocol.ChoiceScore("a", (1,), (-math.inf,)),)),
    protocol.Played((1, 0), "name", sgl.ParameterError("a", "bad", where=errors.Location("f.py", 3, "f"))),
    aborted("gone", G("so far")),
    nodes.Program((
        nodes.Text("a", (1,)),
        nodes.Fork(((nodes.Gen("x", protocol.SamplingParams(stop=(".",)), protocol.Regex("a+")), nodes.Mark()),) * 2),
        nodes.Select("y", ("a", "b"), seed=3),
        nodes.Rollback(1),
        nodes.Join(1, (2, 2), "gather_variable"),
    )),
    sgl.BatchError("m", [None, sgl.ConstraintError("no", pointer="/x")]),
]  # fmt: skip


def altered(data, draw):
    """Data with a few bytes or pieces changed, doubled, moved or cut."""
    data = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at, end = sorted(draw.randrange(len(data) + 1) for _ in range(2))
        match draw.randrange(6):
            case 0:
                del data[at:]
            case 1:
                data[at : at + 1] = bytes([draw.randrange(256)])
            case 2:
                del data[at : at + draw.randint(1, 8)]
            case 3:
                data[at:at] = data[end : end + draw.randint(1, 40)]
            case 4:
                data[at:at] = draw.choice(
                    [
                        b"[",
                        b"{",
                        b'"',
                        b",",
                        b":",
                        b"\\",
                        b"1e999",
                        b"null",
                        b"\x91",
                        b"\x81",
                        b"\xc0",
                        b"\xcb",
                    ]
                )
            case 5:
                data[at : at + 1] = bytes(
                    [(data[at] if at < len(data) else 0) ^ 1 << draw.randrange(8)]
                )
    return bytes(data)


def read(data):
    """A message, or None if the data is refused."""
    try:
        return wire.decode(data)
    except protocol.WireError as error:
        place = error.pointer
        text = str(error)
    assert len(text) < 1100
    assert place == "" or place.startswith("/")
    return None


def test_altered_data_is_a_wire_error_or_another_message():
    draw = random.Random(3)
    sent = [wire.encode(each) for each in SENT]
    refused = 0
    for i in range(FUZZED):
        data = altered(sent[i % len(sent)], draw)
        found = read(data)
        if found is None:
            refused += 1
        else:
            again = wire.encode(found)
            assert wire.encode(wire.decode(again)) == again
    assert refused > FUZZED / 2


@pytest.mark.parametrize("sent", SENT, ids=lambda each: type(each).__name__)
def test_data_that_is_cut_anywhere_is_refused(sent):
    data = wire.encode(sent)
    for end in range(len(data)):
        with pytest.raises(protocol.WireError):
            wire.decode(data[:end])


def test_random_bytes_are_refused():
    draw = random.Random(5)
    for _ in range(FUZZED):
        with pytest.raises(protocol.WireError):
            wire.decode(draw.randbytes(draw.randrange(60)))


def outcome(data):
    """The message that JSON is, or the error that refuses it."""
    try:
        found = wire.decode(data)
    except protocol.WireError as error:
        return re.sub(r"byte \d+", "byte", str(error)), error.pointer
    return type(found), content(found)


def test_json_that_was_written_here_is_read_as_any_other(monkeypatch):
    """Data that is taken without a scan is what a scan lets through: a blank before it brings the
    scan.
    """
    draw, taken = random.Random(11), 0
    scanned = []
    monkeypatch.setattr(messages, "scan_json", lambda *args: scanned.append(1) or scan_json(*args))
    meant = [wire.encode(sent) for sent in SENT]
    for data in [
        *meant,
        *(altered(draw.choice(meant), draw) for _ in range(4 * FUZZED)),
        *WRONG_BYTES,
    ]:
        scanned.clear()
        found = outcome(data)
        taken += not scanned
        assert outcome(b" " + data) == found, data
    assert taken >= len(meant) - 1  # all but minus infinity


WRONG_BYTES = [data for data, _, _ in WRONG_JSON.values()] + [
    b'{"version":1,"type":"Generation","data":{"kind":"Generation","text":"a","meta":%b}}' % meta
    for meta in (
        b'{"a":1,"a":2}', b'{"a":18446744073709551616}', b'{"a":-9223372036854775809}', b'{"a":1e400}', b'{"a":-0}',
        b'{"a":' + b"[" * 125 + b"]" * 125 + b"}", b'{"a":' + b"[" * 126 + b"]" * 126 + b"}",
        b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}", b'{"a":"' + b"[" * 5000 + b'"}', b'{"a":"\\"","a":"\\""}',
        b'{"$float":"inf"}', b'{"a":{"$float":"inf"}}', b'{"\\u0024float":"inf"}', b'{"a":"\xff"}', b'{"a":"\\ud800"}',
    )
]  # fmt: skip


def test_as_many_values_as_the_limit_allows_are_read_and_no_more():
    deltas = [RecordedEvent(0.0, protocol.Delta("x"))] * 200
    call = RecordedCall(0, "", RecordedRequest(protocol.Prompt(())), events=tuple(deltas))
    data = wire.encode(call)
    assert content(wire.decode(data)) == content(call)
    with pytest.raises(protocol.WireError, match="more than 300 values"):
        wire.decode(data, limits=wire.Limits(items=300))
    with pytest.raises(protocol.WireError, match="deeper than 4"):
        wire.decode(data, limits=wire.Limits(depth=4))


FIRST_RECORD = """
import sys, threading
from sglang_lite import wire
data = sys.argv[1].encode()
start = threading.Barrier(8)
found = []
def decode():
    start.wait()
    found.append(wire.encode(wire.decode(data)))
sys.setswitchinterval(1e-6)
threads = [threading.Thread(target=decode) for _ in range(8)]
for each in threads:
    each.start()
for each in threads:
    each.join()
assert found == [data] * 8, found
"""


@sgl.function
def answering(s):
    s += sgl.user("hi") + sgl.assistant(sgl.gen("answer", max_tokens=4))


@pytest.mark.parametrize("_", range(3))
def test_several_threads_may_decode_the_first_record_of_a_process(_, tmp_path):
    answering.run(backend=sgl.ScriptedBackend(lambda *_: "x")).save(tmp_path / "run")
    saved = (tmp_path / "run").read_text()
    done = subprocess.run(
        [sys.executable, "-c", FIRST_RECORD, saved], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
