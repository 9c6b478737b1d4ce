"""Records of a recording file: a backend's requests and their answers, one record per line."""

from __future__ import annotations

from typing import Literal

from sglang_lite.protocol.constraints import Constraint
from sglang_lite.protocol.prompt import Prompt
from sglang_lite.protocol.record import Record
from sglang_lite.protocol.results import Delta, Failure, Generation, Selection
from sglang_lite.protocol.sampling import SamplingParams


class RecordedTemplate(Record, frozen=True):
    """Chat template of a recorded backend: a Jinja template, or fixed texts around turns.

    Attributes:
        name: name of the template.
        source: source of a Jinja template, or "" for a template with fixed texts.
        special_tokens: special tokens that a Jinja template uses, as (name, token).
        turns: each role's name and the text before and after its turns.
        default_system_prompt, stop_str, image_token: see `ChatTemplate`.
        llama2: whether the style of the `ChatTemplate` is LLAMA2.
    """

    name: str
    source: str = ""
    special_tokens: tuple[tuple[str, str], ...] = ()
    turns: tuple[tuple[str, str, str], ...] = ()
    default_system_prompt: str | None = None
    stop_str: tuple[str, ...] = ()
    image_token: str = ""
    llama2: bool = False


class RecordingHead(Record, frozen=True):
    """First line of a recording: properties of the recorded backend.

    Attributes:
        backend: name of the backend's class.
        model: name of the model.
        enforces: whether answers are guaranteed to satisfy their constraints.
        template: chat template, or None if the backend has none.
        tool_family: name of the model's tool call format, or None.
        started: start of the recording, in seconds since 1970.
        constraints: names of the kinds of constraint that the backend supports. Some requests
            depend on them.
        begun: treatment of a turn that already has text: "continued" by the model; "asked":
            shown to the model as a separate message with a request to continue; or "refused".
            None if the backend has no rules for turns.
        begun_constrained: like `begun`, for a turn whose existing text is followed by a constrained
            generation.
        texts: whether the backend enforces grammars, so that a turn can be requested as one
            text.
    """

    backend: str
    model: str
    enforces: bool = False
    template: RecordedTemplate | None = None
    tool_family: str | None = None
    started: float = 0.0
    constraints: tuple[str, ...] = ()
    begun: Literal["continued", "asked", "refused"] | None = None
    begun_constrained: Literal["continued", "asked", "refused"] | None = None
    texts: bool = False


class RecordedRequest(Record, frozen=True):
    """A request to a backend.

    Attributes:
        prompt: prompt without token ids. Images are digests of their bytes, or URLs without
            their queries.
        params, constraint: parameters and constraint of a generation. For a selection,
            `params` only has its `lora_path`.
        choices: choices of a selection; None for a generation.
        unconditional: whether a selection's scores without the prompt were also requested.
    """

    prompt: Prompt
    params: SamplingParams = SamplingParams()
    constraint: Constraint | None = None
    choices: tuple[str, ...] | None = None
    unconditional: bool = False


class RecordedEvent(Record, frozen=True):
    """A part of an answer, or a whole answer. It was received `at` seconds after the request."""

    at: float
    event: Delta | Generation | Selection


class RecordedCall(Record, frozen=True):
    """A request with its answer.

    Attributes:
        number: number of the request, in the order of the requests.
        after: digest of the previous line.
        request: the request.
        program, place, name: program of the node that made the request, the node's place in
            it, and its variable.
        stream: whether deltas were requested.
        at: time of the request, in seconds after the start of the recording.
        events: parts of the answer, in order.
        error: error that the request ended with, or None.
        ended: time of the end, in seconds after the request.
    """

    number: int
    after: str
    request: RecordedRequest
    program: str = ""
    place: str = ""
    name: str | None = None
    stream: bool = False
    at: float = 0.0
    events: tuple[RecordedEvent, ...] = ()
    error: Failure | None = None
    ended: float = 0.0


class RecordingEnd(Record, frozen=True):
    """Last line of a recording.

    Attributes:
        calls: number of recorded calls.
        after: digest of the previous line.
    """

    calls: int
    after: str
