"""Recordings of what a backend was asked and what came of it, one record a line."""

from __future__ import annotations

from typing import Literal

from sglang_lite.errors import SglError
from sglang_lite.protocol.constraints import Constraint
from sglang_lite.protocol.prompt import Prompt
from sglang_lite.protocol.record import Record
from sglang_lite.protocol.results import Delta, Generation, Selection
from sglang_lite.protocol.sampling import SamplingParams


class RecordedTemplate(Record, frozen=True):
    """A chat template.

    Attributes:
        name: of it.
        source: in Jinja; "": it puts fixed texts around turns.
        special_tokens: that a Jinja template uses, by name.
        turns: of each role: its name, and the text before and after its turns.
        default_system_prompt, stop_str, image_token, llama2: as `ChatTemplate` has them.
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
    """The first line: what was recorded.

    Attributes:
        backend: class of the backend.
        model: its name.
        enforces: its answers keep their constraints.
        template: how roles became text: the name of a template, with the texts around each role's turns; or the text of
            a template in Jinja with its special tokens. None: there was none.
        tool_family: format of the model's calls of tools.
        started: seconds since 1970.
        constraints: kinds of constraint that it enforces: some requests are made with a view to them.
        begun: what it does with a turn that has begun; None: each generation is asked for as if it were alone.
        objects: values of a turn can come as one object.
        constrained: it continues a begun turn under a constraint, too.
        texts: it enforces grammars, so that a turn can come as one text.
    """

    backend: str
    model: str
    enforces: bool = False
    template: RecordedTemplate | None = None
    tool_family: str | None = None
    started: float = 0.0
    constraints: tuple[str, ...] = ()
    begun: Literal["continued", "asked", "refused"] | None = None
    objects: bool = False
    constrained: bool = False
    texts: bool = False


class RecordedRequest(Record, frozen=True):
    """A question to a backend.

    Attributes:
        prompt: without token ids; an image is a digest of its bytes, an address without its query.
        params, constraint: of a generation.
        choices: of a selection; None: it is a generation.
        unconditional: a selection's scores were asked for without the prompt, too.
    """

    prompt: Prompt
    params: SamplingParams = SamplingParams()
    constraint: Constraint | None = None
    choices: tuple[str, ...] | None = None
    unconditional: bool = False


class RecordedEvent(Record, frozen=True):
    """A piece of an answer, or a whole one. `at`: seconds after the request."""

    at: float
    event: Delta | Generation | Selection


class RecordedCall(Record, frozen=True):
    """A request with all that came of it.

    Attributes:
        number: in the order in which requests were made.
        after: digest of the line before.
        request: the question.
        program, place, name: of the node that asked: the program, the node's place in it, its variable.
        stream: deltas were asked for.
        at: seconds after the start of the recording.
        events: in order.
        error: that it ended with, and `ended` how many seconds after the request.
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
    error: SglError | None = None
    ended: float = 0.0


class RecordingEnd(Record, frozen=True):
    """The last line.

    Attributes:
        calls: how many there are.
        after: digest of the line before.
    """

    calls: int
    after: str
