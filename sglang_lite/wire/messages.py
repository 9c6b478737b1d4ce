"""Encodes and decodes messages. Each message is one record or error."""

from __future__ import annotations

import math
import re
from functools import cache
from typing import Any, Final, TypeAlias, cast

import msgspec

from sglang_lite.errors import ParameterError, SglError, WireError
from sglang_lite.program import graph, nodes
from sglang_lite.protocol import (
    constraints,
    prompt,
    recording,
    results,
    run_log,
    sampling,
    saved,
    trace,
    trajectory,
)
from sglang_lite.protocol.record import Record
from sglang_lite.protocol.results import Delta, Generation, Played, Selection
from sglang_lite.wire.failure import Failure, as_error, as_failure
from sglang_lite.wire.json_lines import one_line
from sglang_lite.wire.limits import LIMITS, Limits, depth_error, size_error
from sglang_lite.wire.plain_data import check_record
from sglang_lite.wire.scan import FLOAT, is_shallow, scan_json

VERSION: Final = 1

Message: TypeAlias = Record | SglError


class PlayedData(Record, frozen=True):
    """A `Played` event with any error converted to a record."""

    path: tuple[int, ...]
    name: str | None
    event: Delta | Generation | Selection | Failure
    attempt: int = 0


# Types that may be sent, by name: all records of these modules.
TYPES: Final[dict[str, type[Record]]] = {
    kind.__name__: kind
    for home in (
        sampling,
        constraints,
        prompt,
        results,
        recording,
        run_log,
        saved,
        trace,
        trajectory,
        graph,
        nodes,
    )
    for kind in vars(home).values()
    if isinstance(kind, type) and issubclass(kind, Record) and kind.__module__ == home.__name__
    if kind not in (nodes.BaseNode, Failure)
}
_READ: Final[dict[str, type[Record]]] = {**TYPES, "Played": PlayedData, "Error": Failure}
_DATA: Final = b',"data":'
_PREFIXES: Final = {
    b'{"version":%d,"type":"%b"%b' % (VERSION, name.encode(), _DATA): kind
    for name, kind in _READ.items()
}
_LONG_DIGITS: Final = re.compile(rb"[0-9]{19}")
_MAYBE_WIDE_INTEGER: Final = re.compile(rb"[0-9]{20}|-[0-9]{19}")  # may have more than 64 bits
_LONGEST_PREFIX: Final = max(map(len, _PREFIXES))
_FLOATS: Final = {repr(value): value for value in (math.inf, -math.inf, math.nan)}
_ENVELOPE: Final = {"version", "type", "data"}


def encode(message: Message, *, limits: Limits = LIMITS) -> bytes:
    """Serialises a record or an error to JSON on one line.

    Raises:
        WireError: a value has no representation, or a limit is exceeded.
    """
    try:
        name, data = _name_and_record(message)
        special = check_record(data, limits)
        content = _encode_special_floats(msgspec.to_builtins(data)) if special else data
        envelope = {"version": VERSION, "type": name, "data": content}
        found = one_line(msgspec.json.encode(envelope))
    except RecursionError:  # the caller is deep in its own recursion
        raise depth_error(["data"], limits) from None
    if len(found) > limits.bytes:
        raise size_error(len(found), limits)
    if len(found) > limits.items:  # only then can it have too many items
        scan_json(found.decode(), limits)
    return found


def decode(data: bytes | bytearray | memoryview, *, limits: Limits = LIMITS) -> Message:
    """Returns the record or error that serialised data contains.

    Raises:
        WireError: the data is not a valid message, or exceeds a limit.
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        raise ParameterError(
            "data",
            f"a {type(data).__name__} is not bytes.",
            hint="Give bytes, as `encode` returns them.",
        )
    if (size := data.nbytes if isinstance(data, memoryview) else len(data)) > limits.bytes:
        raise size_error(size, limits)
    data = bytes(data)
    try:
        found = _read_as_written(data, limits)
        if found is None:
            special = _scan(data, limits)
            found = _decode_content(*_open_envelope(data), special=special)
            if special:
                check_record(found, limits)
    except RecursionError:  # the caller is deep in its own recursion
        raise depth_error(["data"], limits) from None
    if isinstance(found, Failure):
        return as_error(found)
    if isinstance(found, PlayedData):
        event = as_error(found.event) if isinstance(found.event, Failure) else found.event
        return Played(found.path, found.name, event, found.attempt)
    return cast(Record, found)


def _scan(data: bytes, limits: Limits) -> bool:
    try:
        return scan_json(data.decode(), limits)
    except UnicodeDecodeError as error:
        raise WireError(f"byte {error.start} is not UTF-8") from None


def _name_and_record(message: Message) -> tuple[str, Record]:
    """Returns the name of a message's type, and its data as a record."""
    if isinstance(message, SglError):
        return "Error", as_failure(message)
    name = type(message).__name__
    if TYPES.get(name) is not type(message):
        raise WireError(
            f"a {name} can't be sent", hint=f"Send one of {', '.join(TYPES)}, or an SglError."
        )
    if isinstance(message, Played) and isinstance(message.event, SglError):
        return name, PlayedData(
            message.path, message.name, as_failure(message.event), message.attempt
        )
    return name, message


def _open_envelope(data: bytes) -> tuple[str, msgspec.Raw]:
    """Returns the type name and undecoded content of a message of this version."""
    try:
        envelope = _decoder(dict[str, msgspec.Raw]).decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise WireError(f"no message: {error}") from None
    version = _envelope_member(envelope, "version", int)
    if version != VERSION:
        hint = (
            "Upgrade sglang_lite here."
            if version > VERSION
            else "Upgrade sglang_lite where it was sent."
        )
        raise WireError(
            f"version {version} of the format is not {VERSION}", pointer="/version", hint=hint
        )
    name = _envelope_member(envelope, "type", str)
    if name not in _READ:
        raise WireError(
            f"{name!r:.80} is not a type of message",
            pointer="/type",
            hint=f"Use {', '.join(_READ)}.",
        )
    if envelope.keys() != _ENVELOPE:
        member = min(envelope.keys() ^ _ENVELOPE)
        problem = "is missing" if member in _ENVELOPE else "is not a member of a message"
        raise WireError(
            f"`{member:.80}` {problem}", hint=f"A message has {', '.join(sorted(_ENVELOPE))}."
        )
    return name, envelope["data"]


def _envelope_member(envelope: dict[str, msgspec.Raw], name: str, kind: Any) -> Any:
    if name not in envelope:
        raise WireError(f"`{name}` is missing")
    try:
        return _decoder(kind).decode(envelope[name])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _translate_error(error, f"/{name}") from None


def _read_as_written(data: bytes, limits: Limits) -> Any:
    """Decodes JSON that equals, byte for byte, what `encode` would write for the record. Returns
    None for any other JSON, and for JSON that may exceed a limit.

    Valid data of this form needs no scan: a duplicate name, or half of a surrogate pair,
    would not be written again.
    """
    end = data.find(_DATA, 0, _LONGEST_PREFIX) + len(_DATA)
    kind = _PREFIXES.get(data[:end])
    if kind is None or len(data) > limits.items or FLOAT.encode() in data:
        return None
    if _LONG_DIGITS.search(data) and _MAYBE_WIDE_INTEGER.search(data):
        return None
    content = data[end:-1]
    try:
        found = _decoder(kind).decode(content)
        again = one_line(msgspec.json.encode(found))
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None  # the scan reports the fault
    if again != content or not data.endswith(b"}") or not is_shallow(data, limits.depth):
        return None
    return found


def _decode_content(name: str, content: msgspec.Raw, *, special: bool) -> Any:
    kind = _READ[name]
    try:
        if special:
            return msgspec.convert(_decode_special_floats(msgspec.json.decode(content)), kind)
        return _decoder(kind).decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _translate_error(error, "/data") from None


@cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def _translate_error(error: Exception, above: str) -> WireError:
    """Converts an error of msgspec to a WireError; its path (`$.a[0]`) becomes a JSON Pointer."""
    message, _, path = str(error).partition(" - at `")
    path = path.rpartition("$")[2].rstrip("`")
    return WireError(
        message, pointer=above + path.replace(".", "/").replace("[", "/").replace("]", "")
    )


def _encode_special_floats(value: Any) -> Any:
    if type(value) is float:
        return value if math.isfinite(value) else {FLOAT: repr(value)}
    if isinstance(value, list | tuple):
        return [_encode_special_floats(item) for item in value]
    if isinstance(value, dict):
        return {name: _encode_special_floats(item) for name, item in value.items()}
    return value


def _decode_special_floats(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode_special_floats(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {FLOAT} and isinstance(value[FLOAT], str) and value[FLOAT] in _FLOATS:
        return _FLOATS[value[FLOAT]]
    return {name: _decode_special_floats(item) for name, item in value.items()}
