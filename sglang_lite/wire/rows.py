"""Frames of row results: results of a compiled program's rows, sent between two processes that run this package.

A frame is the length of its content (4 bytes, big-endian), followed by the content: a list of rows in msgpack. A frame
without rows is the last one. Decoding is typed and bounded in size. Contents are not scanned value by value, as
messages are, because that would take longer than all other work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import msgspec

from sglang_lite.errors import SglError, WireError
from sglang_lite.protocol.results import Delta, Generation, Played, ProgramResult, Selection
from sglang_lite.wire.failure import Failure, as_error, as_failure

MAX_FRAME_BYTES: Final = 1 << 28
HEADER_BYTES: Final = 4  # bytes
ROWS_MEDIA_TYPE: Final = "application/x-sglang-lite-rows"  # media type of a stream of frames
RowEvent: TypeAlias = "Played | ProgramResult | SglError"
Row: TypeAlias = "tuple[int, Sequence[RowEvent]]"  # number of the row, and its events: the last one is its end


class _Row(msgspec.Struct, array_like=True, frozen=True):
    """Row as data: events of its nodes, and its text or error."""

    number: int
    played: list[tuple[tuple[int, ...], str | None, Delta | Generation | Selection | Failure]]
    end: str | Failure


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[_Row])
END_FRAME: Final = b"\0\0\0\1\x90"


def encode_frame(rows: Sequence[Row]) -> bytes:
    """Serialises rows to a frame. A row that can't be serialised is replaced by that error, in a frame of its own."""
    try:
        return _framed([_as_data(*row) for row in rows])
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        if len(rows) > 1:
            return b"".join([encode_frame([row]) for row in rows])
        ((number, _),) = rows
        return _framed([_Row(number, [], as_failure(WireError(f"the row can't be sent: {error}")))])


def _framed(rows: list[_Row]) -> bytes:
    data = bytearray(HEADER_BYTES)
    _encoder.encode_into(rows, data, HEADER_BYTES)
    size = len(data) - HEADER_BYTES
    if size > MAX_FRAME_BYTES:
        raise ValueError(f"{size:,} bytes are more than {MAX_FRAME_BYTES:,}")
    data[:HEADER_BYTES] = size.to_bytes(HEADER_BYTES, "big")
    return bytes(data)


def _as_data(number: int, events: Sequence[RowEvent]) -> _Row:
    played = [
        (each.path, each.name, as_failure(each.event) if isinstance(each.event, SglError) else each.event)
        for each in events
        if isinstance(each, Played)
    ]
    end = events[-1]
    assert not isinstance(end, Played)
    return _Row(number, played, as_failure(end) if isinstance(end, SglError) else end.text)


class FrameReader:
    """Parser of frames in bytes that are cut anywhere.

    Attributes:
        ended: True once the last frame has arrived.
    """

    def __init__(self) -> None:
        self._data = bytearray()
        self.ended = False

    def feed(self, chunk: bytes) -> list[Row]:
        """Rows that these bytes complete.

        Raises:
            WireError: the bytes are not frames of rows.
        """
        self._data += chunk
        found: list[Row] = []
        at = 0
        while len(self._data) - at >= HEADER_BYTES:
            end = at + HEADER_BYTES + int.from_bytes(self._data[at : at + HEADER_BYTES], "big")
            if end - at > HEADER_BYTES + MAX_FRAME_BYTES:
                raise WireError(f"no frame of rows: {bytes(self._data[at : at + 80])!r}")
            if end > len(self._data):
                break
            found += self._rows(bytes(self._data[at + HEADER_BYTES : end]))
            at = end
        del self._data[:at]
        return found

    def _rows(self, content: bytes) -> list[Row]:
        try:
            rows = _decoder.decode(content)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise WireError(f"no frame of rows: {error}") from None
        self.ended = self.ended or not rows
        return [_from_data(row) for row in rows]


def _from_data(row: _Row) -> Row:
    events: list[RowEvent] = [
        Played(path, name, as_error(event) if isinstance(event, Failure) else event) for path, name, event in row.played
    ]
    events.append(as_error(row.end) if isinstance(row.end, Failure) else ProgramResult(row.end))
    return row.number, events
