"""Messages between an engine's handle and its process, and the frames that carry them.

A frame is the length of its content (4 bytes, big-endian), then the content: a list of messages in msgpack, at most
`MOST_BYTES`. Records in messages have the form of `sglang_lite.wire`. Both ends belong to one installation, and one has
started the other: the content is checked for types and size, but not scanned like data from strangers. Nothing is
unpickled.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, get_args

import msgspec

from sglang_lite.errors import BackendError, Location, ParameterError, SglError
from sglang_lite.program.nodes import Node, Path, Program
from sglang_lite.protocol import Constraint, Delta, Generation, Prompt, SamplingParams, Selection
from sglang_lite.wire.failure import Failure, as_error, as_failure
from sglang_lite.wire.messages import location_from, location_names

MOST_BYTES: Final = 1 << 28
HEADER: Final = 4  # bytes


class _Message(msgspec.Struct, frozen=True, array_like=True):
    """Message of a frame, encoded as a list that begins with the tag of its type."""


# --------------------------------------------------------------------------------- messages to the engine


class Start(_Message, frozen=True, tag="start"):
    """First message to the process: the fields of an EngineConfig and the folder of its model. `id` is 0."""

    id: int
    config: dict[str, Any]
    model_path: str
    handle: int  # process id of the handle


class Submit(_Message, frozen=True, tag="submit"):
    """Generation: see `Engine.submit`. `ids` and `output_ids` are int32 token ids; `processor` is "module:name"."""

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
    """Choices to score: see `Engine.submit_select`."""

    id: int
    prompt: Prompt | str
    choices: tuple[str, ...]
    unconditional: bool
    namespace: str


class Encode(_Message, frozen=True, tag="encode"):
    """Texts to embed or classify: see `Core.encode`. All fields but `id` are int32 arrays. Answered by one
    `AskReply`."""

    id: int
    ids: bytes
    types: bytes
    lengths: bytes


class Open(_Message, frozen=True, tag="open"):
    """Start of a program that will be extended: see `Engine.open_program`."""

    id: int
    stream: bool
    namespace: str
    priority: int = 0


class Play(_Message, frozen=True, tag="play"):
    """Complete program: see `Engine.run_program`."""

    id: int
    prompt: Prompt | str
    program: Program
    stream: bool
    namespace: str
    priority: int = 0


class Extend(_Message, frozen=True, tag="extend"):
    """More nodes for a branch of an open program. `refused`: failures of nodes by index, see `EngineProgram.extend`."""

    id: int
    path: Path
    nodes: tuple[Node, ...]
    refused: dict[int, Failure] = {}


class Drop(_Message, frozen=True, tag="drop"):
    """Branch of an open program that its caller has abandoned."""

    id: int
    path: Path


class Close(_Message, frozen=True, tag="close"):
    """Notice that an open program receives no more nodes."""

    id: int


class Abort(_Message, frozen=True, tag="abort"):
    """Request to abort a submission."""

    id: int


class Ask(_Message, frozen=True, tag="ask"):
    """Call with exactly one answer, an `AskReply`."""

    id: int
    what: Literal["stats", "flush_cache", "update_weights", "compile", "start_profile", "stop_profile"]
    path: str = ""
    constraint: Constraint | None = None
    options: dict[str, bool] = {}


Command: TypeAlias = Start | Submit | Score | Encode | Open | Play | Extend | Drop | Close | Abort | Ask


# ------------------------------------------------------------------------------- messages from the engine


class Progress(_Message, frozen=True, tag="progress"):
    """Progress of loading: number of the model's parts that are loaded, and number of all parts."""

    done: int
    total: int


class Ready(_Message, frozen=True, tag="ready"):
    """Notice that the engine runs, with the properties that the handle needs."""

    model_name: str
    vocab_size: int
    eos_ids: tuple[int, ...]
    description: str
    sizes: tuple[int, int, int]
    context_length: int
    pages: int
    longest: int


class Failed(_Message, frozen=True, tag="failed"):
    """Notice that the engine could not be started."""

    failure: Failure


class Ended(msgspec.Struct, frozen=True, tag_field="kind", tag="Ended"):
    """End of a program, with its text."""

    text: str


class RequestEvent(_Message, frozen=True, tag="told"):
    """Event of a submission; an event of a program has the path and name of its node.

    Attributes:
        cached: number of tokens of the prompt that were found in the cache; -1 while unknown.
        ends: True if no more events follow, even if last events of other samples were expected.
    """

    id: int
    event: Delta | Generation | Selection | Failure | Ended
    cached: int = -1
    path: Path | None = None
    name: str | None = None
    ends: bool = False


class AskReply(_Message, frozen=True, tag="answer"):
    """Answer to an `Ask` or `Encode`."""

    id: int
    value: Any = None
    failure: Failure | None = None


class Log(_Message, frozen=True, tag="log"):
    """Log record of the engine's process."""

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
_FIELDS = {str(kind.__struct_config__.tag): kind.__struct_fields__ for kind in get_args(Command)}
_PLACE = re.compile(r"\[(\d+)\](.*)`")  # path of a value in a message: index of its field, and the rest
_commands = msgspec.msgpack.Decoder(list[Command], dec_hook=location_from)
_reports = msgspec.msgpack.Decoder(list[Report], dec_hook=location_from)


def frame(messages: Sequence[Command] | Sequence[Report]) -> bytes:
    """Frame of some messages.

    Raises:
        ParameterError: the messages can't be serialised, or are larger than a frame may be.
    """
    data = bytearray(HEADER)
    try:
        _encoder.encode_into(messages, data, HEADER)
    except UnicodeEncodeError:
        parameter = "request" if isinstance(messages[0], Submit | Ask) else "prompt"  # neither has a prompt as text
        raise ParameterError(parameter, "is no valid Unicode: it has unpaired surrogates.") from None
    except (TypeError, OverflowError, RecursionError) as error:
        raise ParameterError(
            "request", f"{error}.", hint="Use plain data, or run the engine with in_process=True."
        ) from None
    size = len(data) - HEADER
    if size > MOST_BYTES:
        raise ParameterError(
            "request", f"has {size:,} bytes; at most {MOST_BYTES:,} fit into one message of the engine's process.",
            hint="Send fewer texts or nodes at once, or run the engine with in_process=True.",
        )  # fmt: skip
    data[:HEADER] = size.to_bytes(HEADER, "big")
    return bytes(data)


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Message that could not be decoded, because its sender's caller passed values of wrong types."""

    id: int
    error: ParameterError


def commands(content: memoryview) -> Sequence[Command | Unreadable]:
    """Messages of a frame to the engine. Raises msgspec.MsgspecError if the content can't be decoded."""
    try:
        return _commands.decode(content)
    except msgspec.ValidationError:
        return [_command(message) for message in msgspec.msgpack.decode(content, type=list[Any])]


def _command(message: Any) -> Command | Unreadable:  # a list of any values
    try:
        found: Command = msgspec.convert(message, Command, dec_hook=location_from)
        return found
    except msgspec.ValidationError as error:
        match message:
            case [str(tag), int(number), *_]:
                return Unreadable(number, _type_error(tag, error))
        raise  # without an id there is no caller to report the error to


def _type_error(tag: str, error: msgspec.ValidationError) -> ParameterError:
    """Error for a value of a wrong type, with the field of the message and the path in it."""
    problem, _, path = str(error).partition(" - at `$")
    place = _PLACE.match(path)
    fields = ("tag", *_FIELDS.get(tag, ()))
    if place is None or int(place[1]) >= len(fields):
        return ParameterError("request", f"{problem}.")
    return ParameterError(fields[int(place[1])] + place[2], f"{problem[:1].lower()}{problem[1:]}.")


def reports(content: memoryview) -> list[Report]:
    """Messages of a frame from the engine. Raises msgspec.MsgspecError if the content can't be decoded."""
    return _reports.decode(content)


def failure_of(error: BaseException) -> Failure:
    """Serialisable form of an error; an error that isn't an SglError becomes a BackendError."""
    return as_failure(error if isinstance(error, SglError) else BackendError(f"{type(error).__name__}: {error}"))


def error_of(failure: Failure) -> SglError:
    """Error that its serialised form describes."""
    return as_error(failure)
