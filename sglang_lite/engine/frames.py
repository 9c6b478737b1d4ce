"""Messages between an engine's handle and its process, and the frames that carry them.

A frame is the length of its content (4 bytes, big-endian), then the content: a list of messages in
msgpack, at most `MAX_BYTES`. A message to the engine is a pair: the number of a submission or call,
and a record. Submissions and calls are sent as the records that a core accepts
(runtime/core/submission.py, runtime/calls.py), except for those with arrays and functions. Records
in messages have the form of `sglang_lite.wire`. Both processes run the same installation, and one
has started the other. So the types and size of the content are checked, but the content is not
scanned like untrusted data. Nothing is unpickled.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any, Final, NoReturn, TypeAlias, get_args

import msgspec

from sglang_lite.errors import BackendError, ParameterError, SglError
from sglang_lite.program.nodes import Node, Path, Verdict
from sglang_lite.protocol import Constraint, Delta, Generation, SamplingParams, Selection
from sglang_lite.runtime import calls
from sglang_lite.runtime.calls import EngineCall, WriteTensors
from sglang_lite.runtime.capacity import Capacity
from sglang_lite.runtime.core.submission import OpenRequest, ProgramRequest, SelectRequest
from sglang_lite.runtime.tokens.image_span import MediaItem
from sglang_lite.wire.failure import Failure, as_failure

MAX_BYTES: Final = 1 << 28
HEADER: Final = 4  # bytes


class _Message(msgspec.Struct, frozen=True, array_like=True):
    """Record of a message, encoded as a list that begins with the tag of its type."""


# --------------------------------------------------------------------------- messages to the engine


class Meeting(_Message, frozen=True):
    """Paths of the files through which replicas synchronize. Used only by replicas that share the
    weights of their feed-forward layers.
    """

    replica: int  # number of this replica
    file: str  # path of the file through which collectives meet
    pipes: tuple[str, ...]  # path of each replica's pipe, from which it reads


class Start(_Message, frozen=True, tag="start"):
    """First message to the process: the fields of an EngineConfig and the folder of its model."""

    config: dict[str, Any]
    model_path: str
    handle: int  # process id of the handle
    meeting: Meeting | None = None


class Submit(_Message, frozen=True, tag="submit"):
    """GenerateRequest as a message. `ids` and `output_ids` are int32 token ids. `processor` is
    "module:name", and `processor_args` are its first arguments.
    """

    ids: bytes
    params: SamplingParams
    constraint: Constraint | None
    stream: bool
    namespace: str
    priority: int
    processor: str | None
    output_ids: bytes = b""
    timeout: float | None = None
    session: str | None = None
    media: tuple[MediaItem, ...] = ()
    processor_args: tuple[Any, ...] = ()  # plain data
    winds_down: bool = False
    text_tokens: int | None = None


class Encode(_Message, frozen=True, tag="encode"):
    """EncodeRequest as a message. Its fields of type bytes contain int32 arrays."""

    ids: bytes
    types: bytes
    lengths: bytes
    adapters: tuple[str | None, ...] = ()


class Extend(_Message, frozen=True, tag="extend"):
    """More nodes for a branch of an open program. Some of the nodes may be invalid: `refused` maps
    their indices to the reasons why they fail (see `EngineProgram.extend`).
    """

    path: Path
    nodes: tuple[Node, ...]
    refused: dict[int, Failure] = {}


class Judge(_Message, frozen=True, tag="judge"):
    """The caller's verdict on a node's answer, or at a pause. `place` is the index of the node in
    its branch.
    """

    path: Path
    place: int
    verdict: Verdict


class DropBranch(_Message, frozen=True, tag="drop"):
    """Notice that the caller of an open program has abandoned a branch."""

    path: Path


class ExpectPause(_Message, frozen=True, tag="expect_pause"):
    """Notice that a branch of an open program will receive no nodes for some seconds."""

    path: Path
    seconds: float


class WindDown(_Message, frozen=True, tag="wind_down"):
    """Request to end a submission's generations early. Text ends at the next token, JSON at the
    next position where closing brackets complete it.
    """


class Close(_Message, frozen=True, tag="close"):
    """Notice that an open program will receive no more nodes."""


class Abort(_Message, frozen=True, tag="abort"):
    """Request to abort a submission."""


# Messages about a submission that is open.
Later: TypeAlias = Extend | Judge | DropBranch | ExpectPause | WindDown | Close | Abort
Submitted: TypeAlias = Submit | SelectRequest | ProgramRequest
# Calls with an answer. Those of runtime/calls.py are sent as they are, except one whose tensors
# stay in their process.
ASKED: Final = (
    Encode,
    *(
        each
        for each in EngineCall.__subclasses__()
        if each.__module__ == calls.__name__ and each is not WriteTensors
    ),
)
Request: TypeAlias = Start | Submitted | OpenRequest | Later | Encode | EngineCall[Any]
Command: TypeAlias = tuple[int, Request]


# ------------------------------------------------------------------------- messages from the engine


class Progress(_Message, frozen=True, tag="progress"):
    """Progress of loading: number of loaded parts of the model, and number of all parts."""

    done: int
    total: int


class Loaded(_Message, frozen=True, tag="loaded"):
    """Notice that a rank has loaded its part of the model. `taken` is the number of bytes in use on
    its GPU at that time, by all processes.
    """

    taken: int


class Ready(_Message, frozen=True, tag="ready"):
    """Notice that the engine runs, with the properties that the handle needs. `suggestion` is a
    line of advice.
    """

    model_name: str
    vocab_size: int
    eos_ids: tuple[int, ...]
    description: str
    capacity: Capacity
    takes_media: bool = False
    suggestion: str = ""


class StartFailed(_Message, frozen=True, tag="failed"):
    """Notice that the engine could not be started."""

    failure: Failure


class ProgramEnded(msgspec.Struct, frozen=True, tag_field="kind", tag="Ended"):
    """Event for the end of a program. It has the program's text."""

    text: str


class RequestEvent(_Message, frozen=True, tag="told"):
    """Event of a submission. If the submission is a program, the event also has the path and name
    of a node, and the number of the attempt.

    Attributes:
        cached: number of tokens of the prompt that were found in the cache; -1 while unknown.
        ends: True if no more events follow, even if last events of other samples were expected.
    """

    id: int
    event: Delta | Generation | Selection | Failure | ProgramEnded
    cached: int = -1
    path: Path | None = None
    name: str | None = None
    ends: bool = False
    attempt: int = 0


class AskReply(_Message, frozen=True, tag="answer"):
    """Answer to a call."""

    id: int
    value: Any = None
    failure: Failure | None = None


class Prefixes(_Message, frozen=True, tag="prefixes"):
    """Changes of one replica's radix tree. The fields are those of a TreeChange, with digests as
    arrays of little-endian uint64.
    """

    gained: bytes
    lost: bytes
    forgotten: bool


class Log(_Message, frozen=True, tag="log"):
    """Log record of the engine's process."""

    logger: str
    level: int
    line: str


Report: TypeAlias = (
    Progress | Loaded | Ready | StartFailed | RequestEvent | AskReply | Prefixes | Log
)


# ------------------------------------------------------------------------------------------- frames


def _reject_unserializable_value(value: object) -> NoReturn:
    raise TypeError(f"a {type(value).__name__} can't be sent to the engine's process")


_encoder = msgspec.msgpack.Encoder(enc_hook=_reject_unserializable_value)
_KINDS = (Start, *get_args(Submitted), OpenRequest, *get_args(Later), *ASKED)
_FIELDS = {str(kind.__struct_config__.tag): kind.__struct_fields__ for kind in _KINDS}
_Kind: Any = reduce(or_, _KINDS)
# path of a value in a message: index of its field, and the rest
_PLACE = re.compile(r"\[1\]\[(\d+)\](.*)`")
_commands = msgspec.msgpack.Decoder(list[tuple[int, _Kind]])
_reports = msgspec.msgpack.Decoder(list[Report])


def encode_frame(messages: Sequence[Command] | Sequence[Report]) -> bytes:
    """Encodes messages into a frame.

    Raises:
        ParameterError: the messages can't be serialised, or are larger than a frame may be.
    """
    data = bytearray(HEADER)
    try:
        _encoder.encode_into(messages, data, HEADER)
    except UnicodeEncodeError:
        sent = messages[0]
        as_text = isinstance(sent, tuple) and isinstance(
            sent[1], SelectRequest | ProgramRequest | Extend
        )
        parameter = "prompt" if as_text else "request"
        raise ParameterError(
            parameter, "is no valid Unicode: it has unpaired surrogates."
        ) from None
    except (TypeError, OverflowError, RecursionError) as error:
        raise ParameterError(
            "request", f"{error}.", hint="Use plain data, or run the engine with in_process=True."
        ) from None
    size = len(data) - HEADER
    if size > MAX_BYTES:
        raise ParameterError(
            "request",
            f"has {size:,} bytes; at most {MAX_BYTES:,} fit into one message of the engine's process.",
            hint="Send fewer texts or nodes at once, or run the engine with in_process=True.",
        )
    data[:HEADER] = size.to_bytes(HEADER, "big")
    return bytes(data)


def decode_commands(content: memoryview) -> Sequence[Command | tuple[int, ParameterError]]:
    """Decodes the messages of a frame to the engine. A message with a value of the wrong type is
    replaced by an error, because such a value comes from the user's call. Raises
    msgspec.MsgspecError if the content can't be decoded at all.
    """
    try:
        return _commands.decode(content)
    except msgspec.ValidationError:
        return [
            _decode_command(message) for message in msgspec.msgpack.decode(content, type=list[Any])
        ]


def _decode_command(message: Any) -> Command | tuple[int, ParameterError]:  # a list of any values
    try:
        found: Command = msgspec.convert(message, tuple[int, _Kind])
        return found
    except msgspec.ValidationError as error:
        match message:
            case [int(number), [str(tag), *_]]:
                return number, _type_error(tag, error)
        raise  # without a number there is no caller to report the error to


def _type_error(tag: str, error: msgspec.ValidationError) -> ParameterError:
    """Creates the error for a value of the wrong type. It names the record's field and the path
    within it.
    """
    problem, _, path = str(error).partition(" - at `$")
    place = _PLACE.match(path)
    fields = ("tag", *_FIELDS.get(tag, ()))
    if place is None or int(place[1]) >= len(fields):
        return ParameterError("request", f"{problem}.")
    return ParameterError(fields[int(place[1])] + place[2], f"{problem[:1].lower()}{problem[1:]}.")


def decode_reports(content: memoryview) -> list[Report]:
    """Decodes the messages of a frame from the engine. Raises msgspec.MsgspecError if the content
    can't be decoded.
    """
    return _reports.decode(content)


def serializable_failure(error: BaseException) -> Failure:
    """Converts an error to its serializable form. An error that isn't an SglError becomes a
    BackendError.
    """
    return as_failure(
        error if isinstance(error, SglError) else BackendError(f"{type(error).__name__}: {error}")
    )
