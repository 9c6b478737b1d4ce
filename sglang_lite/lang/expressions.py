"""Expressions that a user adds to a program: its nodes (program/nodes.py) by SGLang's names, and those with something
of the caller's own, which no node has. Immutable: what came of them is elsewhere (concurrency/variables.py)."""

from __future__ import annotations

import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sglang_lite.program.choosing import ChoicesSamplingMethod, token_length_normalized
from sglang_lite.program.nodes import (
    Expression,
    Expressions,
    Fork,
    Gen,
    Join,
    ScopeBegin,
    ScopeEnd,
    Select,
    Text,
    TurnBegin,
    TurnEnd,
)
from sglang_lite.protocol import (
    Choices,
    Constraint,
    Image,
    JsonSchema,
    Location,
    Number,
    ParameterError,
    Regex,
    SamplingParams,
)
from sglang_lite.protocol.anything import UserValue
from sglang_lite.protocol.sampling import given_as_data, named

if TYPE_CHECKING:
    from sglang_lite.constraints.python_types.value_type import ValueType
    from sglang_lite.lang.execution.api_speculation import ApiSpeculation
    from sglang_lite.lang.execution.branch import Branch
    from sglang_lite.lang.tools import Toolbox

# Patterns of values that Python reads: what `dtype=bool` and `str` stand for, and numbers on backends that can't end
# them where the model does (`number_as_regex`). Those are bounded, and a blank or line end may come after them, which
# ends them (NUMBER_STOPS) and is not part of the result: else a model that continues with text could only write digits.
REGEX_INT = r"[-+]?[0-9]{1,16}[ \n]?"
REGEX_FLOAT = r"[-+]?[0-9]{1,16}(?:\.[0-9]{1,16})?[ \n]?"
NUMBER_STOPS = (" ", "\n")
REGEX_BOOL = r"(True|False)"
REGEX_STR = r"\"(?:[^\"\\\x00-\x1f]|\\[\"\\/bfnrt]|\\u[0-9a-fA-F]{4}){0,1024}\""

SglExpr, SglExprList = Expression, Expressions
SglConstantText = Text
SglRoleBegin, SglRoleEnd = TurnBegin, TurnEnd
SglVarScopeBegin, SglVarScopeEnd = ScopeBegin, ScopeEnd
SglFork, SglConcateAndAppend = Fork, Join


@dataclass(frozen=True, slots=True)
class GenOptions:
    """Options of how a generation is carried out, beside what is sampled.

    Attributes:
        timeout: seconds, None for no limit.
        retries: how often it is tried again when the backend fails or `check` says no; None for the run's number.
        check: whether a value will do (a function or coroutine function of it).
        backend: what to run on instead of the run's backend.
        reasoning: the model type whose reasoning is split off into a variable of its own.
        repair: an attempt after one whose answer was refused shows the model that answer, and what was wrong.
    """

    timeout: float | None = None
    retries: int | None = None
    check: Callable[[Any], Any] | None = None
    backend: Any = None
    reasoning: str | None = None
    repair: bool = False


@dataclass(frozen=True, slots=True)
class SglGen(Expression):
    """A generation that is asked for: its node, and what is the caller's own of it.

    Attributes:
        node: what `gen` was told; the rest comes from the run.
        value_type: reads the text into a typed value; None leaves it text.
        options: None where all are at their defaults.
        tools: that it may call. How it writes that depends on the model: the constraint and `value_type` are of a model
            without a format of its own.
    """

    node: Gen
    value_type: ValueType | None = None
    options: GenOptions | None = None
    tools: Toolbox | None = None

    def __post_init__(self) -> None:
        if type(self.node) is not Gen:
            raise ParameterError(
                "SglGen", f"{self.node!r:.60} is not a node.", hint="Use gen(), which has SGLang's arguments."
            )

    @property
    def name(self) -> str | None:
        return self.node.name

    @property
    def sampling_params(self) -> SglSamplingParams:
        """The parameters as SGLang's backends read them."""
        return SglSamplingParams.of(self.node.params, self.node.constraint)

    def __repr__(self) -> str:
        return f"Gen({self.node.name!r})"


@dataclass(frozen=True, slots=True)
class Multi:
    """Several answers: choices are added, `separator` between them, until `end` scores better or all are taken."""

    separator: str = ", "
    end: str = "\n"

    def __post_init__(self) -> None:
        for name in ("separator", "end"):
            if not isinstance(text := getattr(self, name), str) or not text:
                raise ParameterError(name, f"{text!r} is not a non-empty string.")


def shown_choices(choices: tuple[str, ...], multi: Multi | None) -> tuple[str, ...]:
    """Choices as a backend is shown them: of several answers, all but the first begin alike."""
    return choices if multi is None else (multi.separator + "a", multi.separator + "b")


@dataclass(frozen=True, slots=True)
class SglSelect(Expression):
    """A choice that is asked for: its node, and what is the caller's own of it.

    Attributes:
        node: its method is None where that is the caller's.
        choices_method: how it is chosen.
        multi: several are.
    """

    node: Select
    choices_method: ChoicesSamplingMethod = token_length_normalized
    multi: Multi | None = None

    @property
    def name(self) -> str | None:
        return self.node.name

    @property
    def choices(self) -> tuple[str, ...]:
        return self.node.choices

    @property
    def temperature(self) -> float:
        return self.node.temperature

    def __repr__(self) -> str:
        return f"Select({self.node.name!r}, choices={list(self.node.choices)!r})"


def only_picks(select: SglSelect) -> bool:
    """Tells whether a selection takes the best choice as a model has it, so that no scores are needed."""
    return select.multi is None and select.temperature == 0 and select.choices_method is token_length_normalized


@dataclass(frozen=True, slots=True)
class SglImage(Expression):
    """An image: a path, an address, bytes, a PIL image or an array."""

    path: Any

    def load(self, where: Location | None = None) -> list[Image]:
        from sglang_lite.lang.media import load_image

        return [load_image(self.path, where)]

    def __repr__(self) -> str:
        return f"Image({self.path!r:.60})"


@dataclass(frozen=True, slots=True)
class SglVideo(SglImage):
    """A video, as `num_frames` of its frames, evenly spread."""

    num_frames: int = 16

    def load(self, where: Location | None = None) -> list[Image]:
        from sglang_lite.lang.media import load_video

        return load_video(self.path, self.num_frames, where)

    def __repr__(self) -> str:
        return f"Video({self.path!r:.60}, {self.num_frames})"


@dataclass(frozen=True, slots=True)
class SglSeparateReasoning(Expression):
    """Generations whose reasoning goes into variables of its own, `<name>_reasoning_content`."""

    model_type: str
    expr: Expression

    def marked(self) -> Expressions:
        """Parts of the expression, each generation told to split its reasoning off."""
        marked: list[Expression] = []
        for part in self.expr.walk():
            if isinstance(part, SglGen):
                if not part.node.name:
                    raise ParameterError(
                        "separate_reasoning", "a generation in it has no name.", hint='Name it: gen("answer").'
                    )
                part = replace(part, options=replace(part.options or GenOptions(), reasoning=self.model_type))
            marked.append(part)
        return Expressions(marked)

    def walk(self) -> Iterator[Expression]:
        yield self

    def __repr__(self) -> str:
        return f"SeparateReasoning({self.model_type!r}, {self.expr!r})"


class BaseProgram(ABC):
    """Program that `@function` makes (function.py), as far as others look at it.

    Attributes:
        func: the body.
        is_async: it is a coroutine function.
        signature: of the body, without the state.
        names: of its parameters that can be given by name.
        bind_arguments: arguments given already.
        options: names of the parameters of `run` that are none of its own.
        speculation: on the calls of an API, and what it has brought so far.
    """

    func: Callable[..., Any]
    name: str
    is_async: bool
    signature: inspect.Signature
    names: frozenset[str]
    bind_arguments: dict[str, Any]
    options: AbstractSet[str]
    speculation: ApiSpeculation

    @abstractmethod
    def run(self, *args: UserValue, **kwargs: UserValue) -> UserValue:
        """Runs it. Returns its state."""

    @abstractmethod
    async def arun(self, *args: UserValue, **kwargs: UserValue) -> UserValue:
        """`run` for coroutines."""

    @abstractmethod
    def run_again(self, called: Any, backend: Any, settings: Any) -> UserValue:  # of modules that import this one
        """Runs it once more, as it was called, on another backend. Returns its state."""


class SglCall(Expression, ABC):
    """A program added to another: it continues that one's text (function.py)."""

    __slots__ = ()

    @abstractmethod
    def play_on(self, branch: Branch) -> None:
        """Runs the program's body on a branch."""


@dataclass(frozen=True, slots=True)
class SglGetForkItem(Expression):
    """The start of a branch, in a trace."""

    index: int

    def __repr__(self) -> str:
        return f"GetForkItem({self.index})"


@dataclass(frozen=True, slots=True)
class SglCommitLazy(Expression):
    """SGLang's hint before a fork. Here the fork itself is the hint, and nothing makes or takes this."""

    def __repr__(self) -> str:
        return "CommitLazy()"


# ---------------------------------------------------------- parameters as SGLang's backends read them


_OF_HOOKS = named("hooks")


@dataclass
class SglSamplingParams:
    """Sampling parameters with every default filled in: what backends with SGLang's blocking hooks are given."""

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    n: int = 1
    stop: Any = ()
    stop_token_ids: Any = ()
    stop_regex: Any = ()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    ignore_eos: bool = False
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None
    json_schema: str | None = None
    dtype: str | None = None
    regex: str | None = None

    @staticmethod
    def of(params: SamplingParams, constraint: Constraint | None = None) -> SglSamplingParams:
        """Makes it from the parameters that were set; a regex or schema under its own name, choices as a regex."""
        values = given_as_data(params).items()
        found: dict[str, Any] = {_OF_HOOKS[name].sglang: value for name, value in values if name in _OF_HOOKS}
        if isinstance(constraint, Number):
            constraint = number_as_regex(constraint)
        if isinstance(constraint, Regex):
            found["regex"] = constraint.pattern
        elif isinstance(constraint, JsonSchema):
            found["json_schema"] = constraint.schema
        elif isinstance(constraint, Choices):
            found["regex"] = "|".join(map(re.escape, constraint.options))
        return SglSamplingParams(**found)

    def clone(self) -> SglSamplingParams:
        return replace(self)


def number_as_regex(number: Number, ends: str = "") -> Regex:
    """Regex for who can't end a number where the model does. Goes with NUMBER_STOPS, or has one of `ends` behind it."""
    return Regex((REGEX_INT if number.kind == "integer" else REGEX_FLOAT) + (f"[{ends}]?" if ends else ""))


DTYPES: dict[Any, Constraint] = {
    int: Number("integer"),
    float: Number("float"),
    bool: Regex(REGEX_BOOL),
    str: Regex(REGEX_STR),
}
DTYPES.update({"int": DTYPES[int], "float": DTYPES[float], "bool": DTYPES[bool], "str": DTYPES[str]})
DTYPES["string"] = DTYPES[str]
