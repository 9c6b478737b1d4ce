"""Messages between an engine's handle and its process, and the frames that they cross in.

A frame is the length of its content (4 bytes, big-endian), then the content: a list of messages in msgpack, at most
`MOST_BYTES`. The records in them are those of `sglang_lite.wire`, and look as they do there. Both ends are one
installation, and one has started the other: the content is typed and bounded, but not scanned as what strangers send
is. Nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import msgspec

from sglang_lite.errors import BackendError, Location, ParameterError, SglError
from sglang_lite.program.nodes import Node, Path, Program
from sglang_lite.protocol import Constraint, Delta, Generation, Prompt, SamplingParams, Selection
from sglang_lite.wire.failure import Failure, as_error, as_failure
from sglang_lite.wire.messages import location_from, location_names

MOST_BYTES: Final = 1 << 28
HEADER: Final = 4  # bytes


class _Message(msgspec.Struct, frozen=True, array_like=True):
    """A message: as data a list, its type's name first."""


# ------------------------------------------------------------------------------------------ to the engine


class Start(_Message, frozen=True, tag="start"):
    """The first message: a config's fields, and where its model is. `id` is 0."""

    id: int
    config: dict[str, Any]
    model_path: str
    handle: int  # the process of the handle


class Submit(_Message, frozen=True, tag="submit"):
    """A generation: `Engine.submit`. `ids` and `output_ids` are int32, `processor` is "module:name"."""

    id: int
    ids: bytes
    params: SamplingParams
    constraint: Constraint | None
    stream: bool
    namespace: str
    priority: int
    processor: str | None
    output_ids: bytes = b""


class Score(_Message, frozen=True, tag="score"):
    """Choices to be scored: `Engine.submit_select`."""

    id: int
    prompt: Prompt | str
    choices: tuple[str, ...]
    unconditional: bool
    namespace: str


class Encode(_Message, frozen=True, tag="encode"):
    """Texts to be read: `Core.encode`. All are int32. It is answered once."""

    id: int
    ids: bytes
    types: bytes
    lengths: bytes


class Open(_Message, frozen=True, tag="open"):
    """A program that will grow: `Engine.open_program`."""

    id: int
    stream: bool
    namespace: str
    priority: int = 0


class Play(_Message, frozen=True, tag="play"):
    """A program that is whole: `Engine.run_program`."""

    id: int
    prompt: Prompt | str
    program: Program
    stream: bool
    namespace: str
    priority: int = 0


class Extend(_Message, frozen=True, tag="extend"):
    """More nodes for a branch of an open program. `refused`: as of `Player.extend`."""

    id: int
    path: Path
    nodes: tuple[Node, ...]
    refused: dict[int, Failure] = {}


class Drop(_Message, frozen=True, tag="drop"):
    """A branch of an open program that its caller has given up."""

    id: int
    path: Path


class Close(_Message, frozen=True, tag="close"):
    """End of what comes for an open program."""

    id: int


class Abort(_Message, frozen=True, tag="abort"):
    """A submission that is to end."""

    id: int


class Ask(_Message, frozen=True, tag="ask"):
    """A call that is answered once."""

    id: int
    what: Literal["stats", "flush_cache", "update_weights", "compile", "start_profile", "stop_profile"]
    path: str = ""
    constraint: Constraint | None = None
    options: dict[str, bool] = {}


Command: TypeAlias = Start | Submit | Score | Encode | Open | Play | Extend | Drop | Close | Abort | Ask


# ---------------------------------------------------------------------------------------- from the engine


class Progress(_Message, frozen=True, tag="progress"):
    """Count of a model's parts that are loaded, and of all."""

    done: int
    total: int


class Ready(_Message, frozen=True, tag="ready"):
    """The engine runs: what the handle has to know of it."""

    model_name: str
    vocab_size: int
    eos_ids: tuple[int, ...]
    description: str
    sizes: tuple[int, int, int]
    context_length: int
    pages: int
    longest: int


class Failed(_Message, frozen=True, tag="failed"):
    """The engine could not be started."""

    failure: Failure


class Ended(msgspec.Struct, frozen=True, tag_field="kind", tag="Ended"):
    """End of a program, with its text."""

    text: str


class RequestEvent(_Message, frozen=True, tag="told"):
    """An event of a submission. Of a program: with the path and name of its node.

    Attributes:
        cached: tokens of the prompt that were found in the cache, -1 where that is not known yet.
        ends: it is the last one, whatever was to come.
    """

    id: int
    event: Delta | Generation | Selection | Failure | Ended
    cached: int = -1
    path: Path | None = None
    name: str | None = None
    ends: bool = False


class AskReply(_Message, frozen=True, tag="answer"):
    """The answer to an `Ask`."""

    id: int
    value: Any = None
    failure: Failure | None = None


class Log(_Message, frozen=True, tag="log"):
    """A log record of the engine's process."""

    logger: str
    level: int
    line: str


Report: TypeAlias = Progress | Ready | Failed | RequestEvent | AskReply | Log


# -------------------------------------------------------------------------------------------------- frames


def _hook(value: object) -> Any:
    if isinstance(value, Location):
        return location_names(value)
    raise TypeError(f"a {type(value).__name__} can't be sent to the engine's process")


_encoder = msgspec.msgpack.Encoder(enc_hook=_hook)
_commands = msgspec.msgpack.Decoder(list[Command], dec_hook=location_from)
_reports = msgspec.msgpack.Decoder(list[Report], dec_hook=location_from)


def frame(messages: Sequence[Command] | Sequence[Report]) -> bytes:
    """A frame of some messages.

    Raises:
        ParameterError: what the caller gave has no form as data, or is too large.
    """
    data = bytearray(HEADER)
    try:
        _encoder.encode_into(messages, data, HEADER)
    except UnicodeEncodeError:
        what = "request" if isinstance(messages[0], Submit | Ask) else "prompt"  # those are ids, or there is none
        raise ParameterError(what, "is no valid Unicode: it has unpaired surrogates.") from None
    except (TypeError, OverflowError, RecursionError) as error:
        raise ParameterError(
            "request", f"{error}.", hint="Use plain data, or run the engine with in_process=True."
        ) from None
    size = len(data) - HEADER
    if size > MOST_BYTES:
        raise ParameterError("request", f"{size:,} bytes; {MOST_BYTES:,} may cross to the engine's process at a time.")
    data[:HEADER] = size.to_bytes(HEADER, "big")
    return bytes(data)


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A message that is none, as what its sender's caller gave has other types than it should."""

    id: int
    error: ParameterError


def commands(content: memoryview) -> Sequence[Command | Unreadable]:
    """The messages of a frame to the engine. Raises msgspec.MsgspecError: it is none."""
    try:
        return _commands.decode(content)
    except msgspec.ValidationError:
        return [_command(message) for message in msgspec.msgpack.decode(content, type=list[Any])]


def _command(message: Any) -> Command | Unreadable:  # a list, whatever is in it
    try:
        found: Command = msgspec.convert(message, Command, dec_hook=location_from)
        return found
    except msgspec.ValidationError as error:
        match message:
            case [str(), int(number), *_]:
                return Unreadable(number, ParameterError("request", f"{error}."))
        raise  # nobody can be told


def reports(content: memoryview) -> list[Report]:
    """The messages of a frame from the engine. Raises msgspec.MsgspecError: it is none."""
    return _reports.decode(content)


def failure_of(error: BaseException) -> Failure:
    """An error as data; one that is not of this package's family as a BackendError."""
    return as_failure(error if isinstance(error, SglError) else BackendError(f"{type(error).__name__}: {error}"))


def error_of(failure: Failure) -> SglError:
    """The error that data tells of."""
    return as_error(failure)
