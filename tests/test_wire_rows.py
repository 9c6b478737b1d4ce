"""Frames of rows: what two ends of this package send each other of a compiled batch."""

import math
import random

import msgspec
import pytest

import sglang_lite as sgl
from sglang_lite.protocol import (
    ChoiceScore,
    Generation,
    Played,
    ProgramResult,
    Selection,
    Span,
    TokenLogprob,
    Usage,
    WireError,
)
from sglang_lite.wire.rows import END_FRAME, FrameReader, Row, encode_frame

GENERATION = Generation(
    "a ü", (7, 8), (Span("a ü", (7, 8)),), "length", None, Usage(3, 1, 2), 0, (TokenLogprob(-math.inf, 7, "a"),),
    meta={"forced_text": [[0, 1]], "cache_miss": {"reason": "page", "at": 3}},
)  # fmt: skip
SELECTION = Selection((ChoiceScore("yes", (1,), (-0.5,)), ChoiceScore("no", (2,), (-math.inf,))), Usage(1))
ROWS: list[Row] = [
    (4, [Played((0,), "a", GENERATION), Played((3, 0, 1), None, SELECTION), ProgramResult("text")]),
    (0, [Played((1,), "b", sgl.ConstraintError("no.", pointer="/a")), sgl.ParameterError("x", "is bad.")]),
    (2, [sgl.RequestTimeoutError("late.")]),
]


def plain(rows):
    """Rows, with errors as what they say."""
    return [
        (number, [(e.path, e.name, e.event if not isinstance(e.event, sgl.SglError) else (type(e.event), str(e.event)))
                  if isinstance(e, Played) else (type(e), str(e)) for e in events])
        for number, events in rows
    ]  # fmt: skip


@pytest.mark.parametrize("most", [1, 7, 10_000])
def test_rows_come_back_whatever_pieces_their_frames_come_in(most):
    data = encode_frame(ROWS[:1]) + encode_frame(ROWS[1:]) + END_FRAME
    reader, found, at, rng = FrameReader(), [], 0, random.Random(1)
    while at < len(data):
        assert not reader.ended
        size = rng.randint(1, most)
        found += reader.feed(data[at : at + size])
        at += size
    assert reader.ended
    assert plain(found) == plain(ROWS)


def test_a_row_that_has_no_form_fails_alone():
    odd: Row = (1, [Played((0,), "a", Generation("x", meta={"f": object()})), ProgramResult("x")])
    found = FrameReader().feed(encode_frame([ROWS[0], odd, ROWS[2]]))
    assert [number for number, _ in found] == [4, 1, 2]
    assert plain(found[:1]) == plain(ROWS[:1])
    ((error,),) = [events for number, events in found if number == 1]
    assert isinstance(error, WireError)
    assert "can't be sent" in str(error)


def content(value):
    data = msgspec.msgpack.encode(value)
    return len(data).to_bytes(4, "big") + data


@pytest.mark.parametrize(
    "data",
    [
        b'data: {"error": {"message": "lost"}}\n\n', b"HTTP/1.1 500", b"\xff" * 20, content(3), content([[1, [], 3]]),
        content([["a", [], "x"]]), content([[1, [], "x", 4, 5], "y"]), content([[1, [[[0], None, {"kind": "Popen"}]], "x"]]),
        content([[1, [], {"kind": "Error", "type": "SystemExit", "message": "x"}]]), b"\0\0\0\3\x91\x93\x01",
        (200_000).to_bytes(4, "big") + b"\x91" * 200_000,
    ],
    ids=range(11),
)  # fmt: skip
def test_bytes_that_are_no_frames_are_refused(data):
    with pytest.raises(WireError):
        FrameReader().feed(data)
