"""The one contract between the language and whatever runs it: plain frozen records and the error family.

Data only. Nothing here knows how a prompt is rendered, how a model is run or how a program is written.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args


class Unset(enum.Enum):
    """The type of UNSET: "the caller said nothing", which is not the same as any default."""

    UNSET = "UNSET"

    def __repr__(self) -> str:
        return "UNSET"


UNSET: Final = Unset.UNSET


# ---------------------------------------------------------------------------------------------------- errors


class Location(NamedTuple):
    """A place in the user's program: a code object and the offset of an instruction in it, so that taking one costs
    nothing; the line is looked up when it is shown."""

    code: CodeType
    instruction: int

    @property
    def file(self) -> str:
        return self.code.co_filename

    @property
    def line(self) -> int:
        lines = (line for start, end, line in self.code.co_lines() if start <= self.instruction < end)
        return next(lines, None) or self.code.co_firstlineno

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.code.co_qualname}"


class SglError(Exception):
    """Base of every error this package raises on purpose.

    Args:
        message: what was wrong, naming the parameter, file, JSON Pointer or variable.
        hint: what the reader can do about it.
        where: the line of the user's program, when one is known.
    """

    retryable: bool = False

    def __init__(self, message: str, *, hint: str = "", where: Location | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.where = where

    def __copy__(self) -> SglError:
        return _restored(type(self), self.args, self.__dict__)

    def __reduce__(self) -> tuple[Any, ...]:
        # By attributes, as constructors differ. The place becomes text: code can't be pickled.
        attributes = {**self.__dict__, "where": None}
        if self.where is not None:
            attributes["message"] = f"{self.message} [{self.where}]"
        return _restored, (type(self), self.args, attributes)

    def __str__(self) -> str:
        text = self.message
        if self.hint:
            text += f" {self.hint}" if text.endswith((".", "!", "?", "^")) else f". {self.hint}"
        if self.where is not None:
            text += f" [{self.where}]"
        return text


def _restored(kind: type[SglError], args: tuple[Any, ...], attributes: dict[str, Any]) -> SglError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error


class ParameterError(SglError, ValueError):
    """A parameter of a public function has a value that can't be honoured. Raised before anything runs."""

    def __init__(self, parameter: str, problem: str, *, hint: str = "", where: Location | None = None) -> None:
        super().__init__(f"{parameter}: {problem}", hint=hint, where=where)
        self.parameter = parameter


class ConstraintError(SglError, ValueError):
    """A regex, schema or grammar is invalid or can't be enforced. `pointer` is a JSON Pointer into a schema."""

    def __init__(
        self, message: str, *, pointer: str | None = None, hint: str = "", where: Location | None = None
    ) -> None:
        if pointer is not None:
            message = f"{message.removesuffix('.')} (at {pointer or '/'})"
        super().__init__(message, hint=hint, where=where)
        self.pointer = pointer


class TemplateError(SglError, ValueError):
    """A chat template is missing, fails to render or can't be rendered turn by turn."""


class ModelError(SglError):
    """A model can't be found, read or run: names the file, what was found and what is supported."""


class DownloadError(ModelError):
    """Fetching a model failed: network, disk or a hash that does not match."""


class CapabilityError(SglError):
    """A program needs what its backend can't do. Raised before the first call that would need it."""


class ProgramError(SglError):
    """A node of a program failed with a foreign exception (the `__cause__`), or the program was misused."""


class UnknownVariableError(ProgramError, KeyError):
    """A program has no variable of this name."""

    __str__ = SglError.__str__  # KeyError would print the repr of the message


class ValueValidationError(SglError, ValueError):
    """Generated text does not make a value of the type asked for.

    Attributes:
        text: what the model wrote.
        value: the parsed value that failed validation, None when the text did not even parse.
    """

    def __init__(
        self, message: str, *, text: str, value: object = None, hint: str = "", where: Location | None = None
    ) -> None:
        super().__init__(message, hint=hint, where=where)
        self.text = text
        self.value = value


class BackendError(SglError):
    """A backend failed to answer."""


class RequestTimeoutError(BackendError, TimeoutError):
    """A node or run took longer than its `timeout`."""

    retryable = True


class RequestAbortedError(BackendError):
    """The request was aborted before it finished.

    Attributes:
        partial: the result up to there, its `finish_reason` "abort"; None where no single generation was aborted.
    """

    partial: Generation | None = None


class OverloadedError(BackendError):
    """A queue or memory limit refused the request; trying again later may work."""

    retryable = True


class RefusalError(BackendError):
    """The model, or a filter of its provider, declined to answer."""


class EngineClosedError(BackendError):
    """The engine was closed, or its loop stopped after a crash (the `__cause__`)."""


class BatchError(ProgramError):
    """Some programs of a batch failed.

    Attributes:
        results: one entry per item, in input order: the state, or the exception that ended it.
    """

    def __init__(self, message: str, results: Sequence[object], *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.results = list(results)


# ----------------------------------------------------------------------------------------------- constraints


def _must_be_text(record: object, *names: str) -> None:
    for name in names:
        value = getattr(record, name)
        if not isinstance(value, str):
            raise ConstraintError(f"{type(record).__name__}: `{name}` is a text, not {value!r:.60}.")


def _must_be_constraint(record: object, name: str, value: object) -> None:
    if not isinstance(value, get_args(Constraint)):
        raise ConstraintError(
            f"{type(record).__name__}: `{name}` is {value!r:.60}, which is no constraint.",
            hint="A text is one as Choices((text,)), a schema as sgl.grammar.json_schema(schema).",
        )


def _make_tuple(record: object, name: str, kind: type) -> None:
    """Takes any list or tuple: only a tuple can be a key."""
    value = getattr(record, name)
    if not isinstance(value, list | tuple) or not all(isinstance(each, kind) for each in value):
        raise ConstraintError(f"{type(record).__name__}: `{name}` is {value!r:.60}, no list of {kind.__name__}.")
    object.__setattr__(record, name, tuple(value))


def _make_constraints(record: object, name: str) -> None:
    _make_tuple(record, name, object)
    for each in getattr(record, name):
        _must_be_constraint(record, name, each)


@dataclass(frozen=True, slots=True)
class Regex:
    """Text that matches `pattern` from its first to its last character. docs/constraints.md has the dialect."""

    pattern: str

    def __post_init__(self) -> None:
        _must_be_text(self, "pattern")


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """Text that is one JSON document valid under `schema`.

    Attributes:
        schema: JSON text of a schema of draft 2020-12, or an older one.
        enforce: "strict" refuses a schema with a keyword that can't be enforced; "best_effort" leaves such keywords
            to the check of the finished value, which is always made.
        format: "assert" demands the formats that are known, "annotate" none.
        separators: between items and after names in generated text, as json.dumps takes them.
    """

    schema: str
    enforce: Literal["strict", "best_effort"] = "strict"
    format: Literal["assert", "annotate"] = "assert"
    separators: tuple[str, str] = (", ", ": ")

    def __post_init__(self) -> None:
        _must_be_text(self, "schema")
        for name, possible in (("enforce", ("strict", "best_effort")), ("format", ("assert", "annotate"))):
            value = getattr(self, name)
            if value not in possible:
                raise ConstraintError(f"json_schema: {name} is {' or '.join(map(repr, possible))}, not {value!r}.")
        _make_tuple(self, "separators", str)
        if [each.strip(" \t\r\n") for each in self.separators] != [",", ":"]:
            raise ConstraintError(
                f"json_schema: separators are a comma and a colon with blanks, not {self.separators!r}."
            )


@dataclass(frozen=True, slots=True)
class Tags:
    """How a family of models writes the members of an object one after the other: each value between tags, a string as
    it is and any other value as JSON.

    Attributes:
        before, after: what stands around a value; in it `{name}` is the member's name, `{type}` what `types` says.
        mark: what the end of a value begins with, and no string has in it.
        types: what null, booleans, numbers, strings, arrays and objects are called.
        item: what stands around the items of arrays. Then arrays and objects have tags inside as well.
    """

    before: str
    after: str
    mark: str
    types: tuple[str, str, str, str, str, str] = ("", "", "", "", "", "")
    item: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class TaggedObject:
    """Text that is one JSON object valid under `schema`, its members written between tags. Members that the schema says
    nothing of are left out."""

    schema: JsonSchema
    tags: Tags

    def __post_init__(self) -> None:
        if not isinstance(self.schema, JsonSchema) or not isinstance(self.tags, Tags):
            raise ConstraintError("TaggedObject: it needs a JsonSchema and Tags.")


@dataclass(frozen=True, slots=True)
class Number:
    """A number as it is written in free text, which ends where the text goes on with anything else. That is no part of
    it. The digits may be grouped by commas in threes.

    Attributes:
        kind: "integer", or "float" for one that may have a fraction and an exponent.
    """

    kind: Literal["integer", "float"]


@dataclass(frozen=True, slots=True)
class Choices:
    """Exactly one of `options`, which may be given as any sequence."""

    options: tuple[str, ...]

    def __post_init__(self) -> None:
        given: Any = self.options
        options = (None,) if isinstance(given, str) or not isinstance(given, Iterable) else tuple(given)
        if not all(isinstance(option, str) for option in options):
            raise ConstraintError(f"choices: {given!r:.80} is not a list of texts.")
        object.__setattr__(self, "options", options)  # a list is no key of a cache


@dataclass(frozen=True, slots=True)
class Ebnf:
    """Text of a grammar in llama.cpp's GBNF. Its first rule, or the one called `root`, is the whole text."""

    grammar: str

    def __post_init__(self) -> None:
        _must_be_text(self, "grammar")


@dataclass(frozen=True, slots=True)
class Lark:
    """Text of a grammar in Lark's syntax. The rule `start` is the whole text."""

    grammar: str

    def __post_init__(self) -> None:
        _must_be_text(self, "grammar")


@dataclass(frozen=True, slots=True)
class Tag:
    """`begin`, then what `content` allows, then `end`."""

    begin: str
    content: Constraint
    end: str

    def __post_init__(self) -> None:
        _must_be_text(self, "begin", "end")
        _must_be_constraint(self, "content", self.content)


@dataclass(frozen=True, slots=True)
class StructuralTag:
    """Free text in which a trigger begins one of the tags, every one of which begins with a trigger.

    Attributes:
        at_least_one: there is a tag.
        stop_after_first: the first one ends the text.
        excludes: what free text does not have in it.
    """

    tags: tuple[Tag, ...]
    triggers: tuple[str, ...]
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _make_tuple(self, "tags", Tag)
        for name in ("triggers", "excludes"):
            _make_tuple(self, name, str)


@dataclass(frozen=True, slots=True)
class InOrder:
    """One constraint's text after the other's."""

    parts: tuple[Constraint, ...]

    def __post_init__(self) -> None:
        _make_constraints(self, "parts")


@dataclass(frozen=True, slots=True)
class OneOf:
    """Text of any of the constraints."""

    options: tuple[Constraint, ...]

    def __post_init__(self) -> None:
        _make_constraints(self, "options")


@dataclass(frozen=True, slots=True)
class Repeated:
    """From `least` to `most` times (None: any number) a text of the constraint, one after the other."""

    item: Constraint
    least: int = 0
    most: int | None = None

    def __post_init__(self) -> None:
        _must_be_constraint(self, "item", self.item)
        for name in ("least", "most"):
            count = getattr(self, name)
            if (count is not None or name == "least") and (isinstance(count, bool) or not isinstance(count, int)):
                raise ConstraintError(f"Repeated: `{name}` is a whole number, not {count!r:.60}.")


@dataclass(frozen=True, slots=True)
class Continuation:
    """Text that goes on from `text` in a grammar that spans several nodes. It is no part of another constraint.

    Attributes:
        whole: what `text`, this generation and what follows it are together.
        text: what is there of it.
        part: what this generation is by itself; then `whole` may be complete later. None: it completes `whole`.
    """

    whole: Constraint
    text: str = ""
    part: Constraint | None = None

    def __post_init__(self) -> None:
        _must_be_text(self, "text")
        _must_be_constraint(self, "whole", self.whole)
        if self.part is not None:
            _must_be_constraint(self, "part", self.part)


Constraint: TypeAlias = (
    Regex
    | JsonSchema
    | TaggedObject
    | Number
    | Choices
    | Ebnf
    | Lark
    | StructuralTag
    | InOrder
    | OneOf
    | Repeated
    | Continuation
)


# ------------------------------------------------------------------------------------------------- sampling


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a generation is sampled and when it ends. UNSET means "the backend's documented default".

    Attributes:
        max_tokens: most tokens to generate, ≥ 0 (local default 128).
        min_tokens: no end-of-sequence and no stop before this many tokens (0).
        n: how many independent samples, ≥ 1 (1).
        stop: strings that end the generation; matched on text and not part of the result.
        stop_token_ids: token ids that end it.
        stop_regex: patterns of Python's `re` that end it, like `stop`: as soon as the text contains a match.
        include_stop: keep what was matched, be it text or a token's, in the text (False).
        ignore_eos: go on after an end-of-sequence token (False).
        skip_special_tokens: leave special tokens out of the text (True).
        temperature: 0 is greedy (1.0).
        top_p: in (0, 1] (1.0).
        top_k: -1 or 0 for all (-1).
        min_p: drop tokens under min_p x the largest probability, in [0, 1] (0.0).
        frequency_penalty: in [-2, 2], per occurrence in the output (0.0).
        presence_penalty: in [-2, 2], once for tokens in the output (0.0).
        repetition_penalty: in (0, 2], for tokens in prompt or output (1.0).
        logit_bias: (token id, what is added to its logit) pairs.
        seed: draws depend on (seed, position) alone. UNSET: a fresh seed per request.
        return_logprob: report log-probabilities of generated tokens (False).
        logprob_start_len: also report those of prompt tokens from this position on (-1: none).
        top_logprobs_num: with `return_logprob`, the k most likely tokens at each position (0).
        token_ids_logprob: with `return_logprob`, the log-probabilities of these ids at each position.
        return_text_in_logprobs: add each token's text (False).
    """

    max_tokens: int | Unset = UNSET
    min_tokens: int | Unset = UNSET
    n: int | Unset = UNSET
    stop: tuple[str, ...] | Unset = UNSET
    stop_token_ids: tuple[int, ...] | Unset = UNSET
    stop_regex: tuple[str, ...] | Unset = UNSET
    include_stop: bool | Unset = UNSET
    ignore_eos: bool | Unset = UNSET
    skip_special_tokens: bool | Unset = UNSET
    temperature: float | Unset = UNSET
    top_p: float | Unset = UNSET
    top_k: int | Unset = UNSET
    min_p: float | Unset = UNSET
    frequency_penalty: float | Unset = UNSET
    presence_penalty: float | Unset = UNSET
    repetition_penalty: float | Unset = UNSET
    logit_bias: tuple[tuple[int, float], ...] | Unset = UNSET
    seed: int | Unset = UNSET
    return_logprob: bool | Unset = UNSET
    logprob_start_len: int | Unset = UNSET
    top_logprobs_num: int | Unset = UNSET
    token_ids_logprob: tuple[int, ...] | Unset = UNSET
    return_text_in_logprobs: bool | Unset = UNSET


# -------------------------------------------------------------------------------------------------- prompts


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of a prompt. Neighbouring spans without ids are tokenised as one text.

    Attributes:
        ids: tokens that are final (a model wrote them) and are never retokenised.
        special: a special token that is written out in the text is that token. False for what users and tools say: it
            is its characters and nothing else, together with the text around it too.
    """

    text: str
    ids: tuple[int, ...] | None = None
    special: bool = True


@dataclass(frozen=True, slots=True)
class Image:
    """An image: encoded bytes and their media type (`image/png` …), or an address to fetch it from (no bytes)."""

    data: bytes = b""
    media_type: str = ""
    url: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """One finished turn of a conversation. A content item is text or an image."""

    role: str
    content: tuple[str | Image, ...]


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a backend continues.

    Attributes:
        spans: the rendered text, in order; their texts concatenated are the whole prompt.
        messages: the finished turns, for chat APIs.
        role: the open turn's role, None outside a turn.
        partial: text already written in the open turn.
        images: images in the order of their placeholders in the text.
    """

    spans: tuple[Span, ...]
    messages: tuple[Message, ...] = ()
    role: str | None = None
    partial: str = ""
    images: tuple[Image, ...] = ()

    @property
    def text(self) -> str:
        return "".join(span.text for span in self.spans)


# ------------------------------------------------------------------------------------------------- programs


@dataclass(frozen=True, slots=True)
class TextSegment:
    """Text, as it is; `special` as in Span."""

    text: str
    special: bool = True


@dataclass(frozen=True, slots=True)
class GenSegment:
    """A generation: one sample, which goes into the text."""

    name: str | None = None
    params: SamplingParams = SamplingParams()
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class SelectSegment:
    """A choice among texts. `pick` says which one goes into the text, from the scores of all; None takes the one with
    the largest mean log-probability per token. `special` as in Span, of the choices."""

    name: str | None
    choices: tuple[str, ...]
    pick: Callable[[Selection], str] | None = None
    unconditional: bool = False
    special: bool = True


@dataclass(frozen=True, slots=True)
class GrammarSegment:
    """From here on all text, `text` before it, is in the language of `whole`; None: up to here it is. Choices that
    can't go on there are left out of a selection; a fork's branches need not complete it."""

    whole: Constraint | None
    text: str = ""


@dataclass(frozen=True, slots=True)
class ForkSegment:
    """Branches that go on from here, each with segments of its own, beside what follows."""

    branches: tuple[tuple[Segment, ...], ...]


@dataclass(frozen=True, slots=True)
class JoinSegment:
    """Waits for the branches of every fork before it since the last join, and appends the texts they added."""


Segment: TypeAlias = "TextSegment | GenSegment | SelectSegment | GrammarSegment | ForkSegment | JoinSegment"


@dataclass(frozen=True, slots=True)
class Program:
    """Segments that a runtime plays by itself."""

    segments: tuple[Segment, ...]


# -------------------------------------------------------------------------------------------------- results


@dataclass(frozen=True, slots=True)
class Usage:
    """What a node cost. Token counts; times are in seconds, 0.0 where the backend does not tell.

    Attributes:
        prompt_tokens: tokens the model was conditioned on, cached ones included.
        cached_tokens: those of them that were not computed again.
        completion_tokens: tokens generated, forced ones included.
        forced_tokens: those the grammar left no choice about and that took no decode step.
        queue_s: waiting before the first computation.
        first_token_s: submission to the first token.
        total_s: submission to the end.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    forced_tokens: int = 0
    queue_s: float = 0.0
    first_token_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One position: the token's log-probability (None where nothing precedes it), its id, and on request its text
    and the alternatives as (log-probability, id, text) from most to least likely."""

    logprob: float | None
    token_id: int
    text: str | None = None
    top: tuple[tuple[float, int, str | None], ...] = ()
    ids: tuple[tuple[float, int, str | None], ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of a running generation (`index` tells the sample when n > 1)."""

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    index: int = 0


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished generation.

    Attributes:
        text: the result, stop string trimmed.
        token_ids: every id the model wrote, the stop's included.
        kept_ids: how many of `token_ids` lie wholly within `text`; `spans` are those and what is left.
        finish_reason: "stop" (end of sequence, stop string or token, complete grammar), "length", or "abort" (of a
            partial result: see RequestAbortedError).
        matched: the stop string, regex or token id that ended it; None for end of grammar or length.
        usage: tokens and times.
        index: which sample it is, when n > 1.
        output_logprobs, prompt_logprobs: when asked for.
        meta: anything else the backend reports.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    spans: tuple[Span, ...] = ()
    finish_reason: Literal["stop", "length", "abort"] = "stop"
    matched: str | int | None = None
    usage: Usage = Usage()
    index: int = 0
    output_logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ChoiceScore:
    """One choice as the model sees it after the prompt.

    Attributes:
        text: the choice.
        token_ids: the tokens that were scored.
        logprobs: log P(token | everything before), one per id, in nats.
        unconditional: the same without the prompt, where the method asked; None where nothing precedes the token.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    unconditional: tuple[float | None, ...] | None = None


@dataclass(frozen=True, slots=True)
class Selection:
    """All choices scored. `scores` is in the order of the choices and empty where a backend only picks (`picked`)."""

    scores: tuple[ChoiceScore, ...]
    usage: Usage = Usage()
    picked: str | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Played:
    """Something that a running program has brought.

    Attributes:
        path: of the segment: its index, and inside a fork the index of the branch and of the segment there.
        name: of the segment.
        event: text of a running generation, or the segment's result.
    """

    path: tuple[int, ...]
    name: str | None
    event: Delta | Generation | Selection


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """A program that has been played to its end. `text` is what it added to its prompt, joined branches included."""

    text: str
