"""Expressions that a user adds to a program. Some are nodes (program/nodes.py) under SGLang's
names. Others hold Python objects of the user, which nodes can't contain. All are immutable. Their
results are variables (concurrency/variables.py).
"""

from __future__ import annotations

import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, Self, TypeAlias

import msgspec
from typing_extensions import TypeVar

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
    JsonSchema,
    Location,
    Media,
    MediaKind,
    Number,
    ParameterError,
    Regex,
    SamplingParams,
)
from sglang_lite.protocol.anything import UserValue
from sglang_lite.protocol.sampling import HookParams, given_as_data, parameters_for

if TYPE_CHECKING:
    from sglang_lite.constraints.python_types.value_type import ValueType
    from sglang_lite.lang.backend.planning import AnswerSource, ApiDrafts
    from sglang_lite.lang.code_mode.code_tools import CodeTools
    from sglang_lite.lang.tools import Toolbox

# Regexes of values that Python can read: for `dtype=bool` and `dtype=str`, and for numbers on
# backends that can't end a number where the model does (`number_as_regex`). The numbers are
# bounded, and a blank or line end may follow, which ends the number (NUMBER_STOPS) and is not part
# of the result: without it, a model that wants to continue with text could only write more digits.
REGEX_INT = r"[-+]?[0-9]{1,16}[ \n]?"
REGEX_FLOAT = r"[-+]?[0-9]{1,16}(?:\.[0-9]{1,16})?[ \n]?"
NUMBER_STOPS = (" ", "\n")
REGEX_BOOL = r"(True|False)"
REGEX_STR = r"\"(?:[^\"\\\x00-\x1f]|\\[\"\\/bfnrt]|\\u[0-9a-fA-F]{4}){0,1024}\""

SglExpr = Expression
SglExprList = Expressions
SglConstantText = Text
SglRoleBegin = TurnBegin
SglRoleEnd = TurnEnd
SglVarScopeBegin = ScopeBegin
SglVarScopeEnd = ScopeEnd
SglFork = Fork
SglConcateAndAppend = Join


T = TypeVar("T", default=Any)


@dataclass(frozen=True, slots=True)
class GenOptions:
    """Options for executing a generation, which don't affect sampling.

    Attributes:
        timeout: seconds for an attempt, or None for no limit.
        retries: number of attempts after the first if the backend fails, the value is invalid or
            `check` rejects it; None for the run's number.
        check: function or coroutine function of the value that returns True if the value is valid.
        backend: backend of this generation, or None for the run's backend.
        reasoning: type of the model, whose reasoning is split off into a separate variable; None to
            keep it in the text.
        repair: whether an attempt after a rejected answer shows the model that answer and the
            error.
        shortened: what happens to an answer that a limit cuts: "raise", "warn" or "keep"; None for
            the run's setting.
        draws_plainly: whether the text is drawn with the model's own probabilities, regardless of
            the run's parameters.
        code: functions that the generated program may call; None if the text is not a program.
    """

    timeout: float | None = None
    retries: int | None = None
    check: Callable[[Any], Any] | None = None
    backend: Any = None
    reasoning: str | None = None
    repair: bool = False
    shortened: str | None = None
    draws_plainly: bool = False
    code: CodeTools | None = None


NO_OPTIONS: Final = GenOptions()


# a Struct, since the constructor took most of the time of `gen`
class SglGen(msgspec.Struct, Expression, Generic[T], frozen=True):
    """Generation that `gen` returns. Holds its node, and Python objects of the user, which a node
    can't contain. `T` is the type of its value.

    Attributes:
        node: generation as data, with the parameters given to `gen`; unset parameters come from the
            run.
        value_type: type that reads the text into a value, or None if the value is the text.
        options: options for executing it; `NO_OPTIONS` if none was given.
        tools: tools that the model may call. The format of a call depends on the model: the node's
            constraint and `value_type` are for a model without its own format.
        source: source of the answer, set by the backend's planner; None if the generation makes its
            own call.
    """

    node: Gen
    value_type: ValueType | None = None
    options: GenOptions = NO_OPTIONS
    tools: Toolbox | None = None
    source: AnswerSource | None = None

    @property
    def is_typed(self) -> bool:
        """True if the value has a type given with `type=`. False for plain text and tool calls."""
        return self.value_type is not None and self.value_type.annotation is not None

    def __post_init__(self) -> None:
        if type(self.node) is not Gen:
            raise ParameterError(
                "SglGen",
                f"{self.node!r:.60} is not a node.",
                hint="Use gen(), which has SGLang's arguments.",
            )

    @property
    def name(self) -> str | None:
        return self.node.name

    @property
    def sampling_params(self) -> SglSamplingParams:
        """Parameters in the form that SGLang's backends read."""
        return SglSamplingParams.from_params(self.node.params, self.node.constraint)

    def __repr__(self) -> str:
        return f"Gen({self.node.name!r})"


# Texts in a selection of several choices: the separator, and the end, which is chosen if it scores
# better.
MULTI_SEPARATOR = ", "
MULTI_END = "\n"


def example_choices(choices: tuple[str, ...], *, multi: bool) -> tuple[str, ...]:
    """Returns the choices used to check that a backend can make a selection. If several choices can
    be selected, returns two examples that begin with the separator, as every selected text after
    the first does.
    """
    return (MULTI_SEPARATOR + "a", MULTI_SEPARATOR + "b") if multi else choices


class SglSelect(msgspec.Struct, Expression, Generic[T], frozen=True):
    """Selection that `select` returns. Holds its node, and Python objects of the user, which a node
    can't contain. `T` is the type of its value.

    Attributes:
        node: selection as data; its method is None if `choices_method` is not one of the built-in
            methods.
        choices_method: method that decides by the scores.
        multi: whether several choices are selected, until MULTI_END scores better or all are taken.
        source: like `SglGen.source`.
    """

    node: Select
    choices_method: ChoicesSamplingMethod = token_length_normalized
    multi: bool = False
    source: AnswerSource | None = None

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


# Ways to refer to a variable: its name, or the generation or selection that was added under it.
Named: TypeAlias = SglGen[T] | SglSelect[T]
VariableName: TypeAlias = str | SglGen | SglSelect


def can_skip_scores(select: SglSelect) -> bool:
    """Returns whether the backend need not report the scores of a selection. This is so if the
    default method picks a single choice at temperature 0.
    """
    return (
        not select.multi
        and select.temperature == 0
        and select.choices_method is token_length_normalized
    )


class _LocatedExpression(Expression):
    """Expression that records where it was made. The location is not part of its value."""

    __slots__ = ("_made",)

    @property
    def made(self) -> Location | None:
        found: Location | None = getattr(self, "_made", None)
        return found

    def set_location(self, made: Location | None) -> Self:
        """Records where the expression was made, and returns the expression itself."""
        object.__setattr__(self, "_made", made)
        return self


@dataclass(frozen=True, slots=True)
class SglImage(_LocatedExpression):
    """Image, given as a path, a URL, encoded bytes, a PIL image or an array."""

    kind: ClassVar[MediaKind] = "image"
    path: Any

    def load_media(self, where: Location | None = None) -> Media:
        from sglang_lite.lang.media import load_image

        return load_image(self.path, where)

    def __repr__(self) -> str:
        return f"Image({self.path!r:.60})"


@dataclass(frozen=True, slots=True)
class SglVideo(SglImage):
    """Video, shown to a model as `num_frames` evenly spaced frames."""

    kind = "video"
    num_frames: int = 16

    def load_media(self, where: Location | None = None) -> Media:
        from sglang_lite.lang.checks import check_whole_number
        from sglang_lite.lang.media import load_file

        check_whole_number("num_frames", self.num_frames, 1, where)
        found = load_file(self.path, "video", where)
        return Media(found.data, found.media_type, found.url, self.num_frames)

    def __repr__(self) -> str:
        return f"Video({self.path!r:.60}, {self.num_frames})"


@dataclass(frozen=True, slots=True)
class SglAudio(SglImage):
    """Sound, given as a path, a URL or encoded bytes."""

    kind = "audio"

    def load_media(self, where: Location | None = None) -> Media:
        from sglang_lite.lang.media import load_file

        return load_file(self.path, "audio", where)

    def __repr__(self) -> str:
        return f"Audio({self.path!r:.60})"


@dataclass(frozen=True, slots=True)
class SglSeparateReasoning(Expression):
    """Expression that separates the reasoning of its generations from their answers. The reasoning
    goes into variables named `<name>_reasoning_content`.
    """

    model_type: str
    expr: Expression

    def with_reasoning_option(self) -> Expressions:
        """Returns the parts of the expression, after setting the option `reasoning` in each
        generation. Raises ParameterError if a generation has no name.
        """
        marked: list[Expression] = []
        for part in self.expr.walk():
            if isinstance(part, SglGen):
                if not part.node.name:
                    raise ParameterError(
                        "separate_reasoning",
                        "a generation in it has no name.",
                        hint='Name it: gen("answer").',
                    )
                options = replace(part.options, reasoning=self.model_type)
                part = msgspec.structs.replace(part, options=options)
            marked.append(part)
        return Expressions(marked)

    def walk(self) -> Iterator[Expression]:
        yield self

    def __repr__(self) -> str:
        return f"SeparateReasoning({self.model_type!r}, {self.expr!r})"


R = TypeVar("R", default=Any)  # what a program's body returns


class BaseProgram(ABC, Generic[R]):
    """Interface of the programs that `@function` makes. Used by modules that can't import
    function.py because it imports them.

    Attributes:
        func: body of the program.
        name: name of the body.
        is_async: whether the body is a coroutine function.
        signature: signature of the body, without the state.
        names: names of the parameters that can be given by keyword.
        bind_arguments: arguments given with `bind`.
        arg_names: names of the positional parameters.
        untrusted_arguments: whether control tokens that arguments spell are plain text.
        options: names of the parameters of `run` that are not also parameters of the program.
        api_drafts: drafts on API calls: their setting, and their results in all runs of the program
            so far.
    """

    func: Callable[..., Any]
    name: str
    is_async: bool
    signature: inspect.Signature
    names: frozenset[str]
    bind_arguments: dict[str, Any]
    arg_names: list[str]
    untrusted_arguments: bool
    options: AbstractSet[str]
    api_drafts: ApiDrafts

    @abstractmethod
    def run(self, *args: UserValue, **kwargs: UserValue) -> UserValue:
        """Runs the program and returns its state."""

    @abstractmethod
    async def arun(self, *args: UserValue, **kwargs: UserValue) -> UserValue:
        """Runs the program, for coroutines, and returns its state."""

    @abstractmethod
    def prepare_run(
        self,
        args: Sequence[UserValue],
        kwargs: dict[str, UserValue],
        options: Mapping[str, UserValue],
        settings: UserValue = None,
        kept: UserValue = None,
        log: UserValue = None,
        *,
        is_item: bool = False,
    ) -> UserValue:
        """Creates a BodyRun of the program without starting it."""

    @abstractmethod
    def bind_call(
        self, args: Sequence[UserValue], kwargs: dict[str, UserValue], what: str
    ) -> dict[str, UserValue]:
        """Returns the keyword arguments of a call, including those given with `bind`. Raises
        ParameterError with the name `what` if the arguments don't fit the program.
        """

    @abstractmethod
    def trace(self, **kwargs: UserValue) -> UserValue:
        """Runs the body once without executing its nodes, and records them."""


class AsyncProgram(BaseProgram[R]):
    """Program whose body is a coroutine function. Type checkers then know that the result of
    `s.call` must be awaited in a coroutine.
    """


class SglCall(Expression, ABC):
    """Call of a program inside another program's body. If it is added to a state, the called
    program continues that state's text (program_call.py).
    """

    __slots__ = ()

    @abstractmethod
    def play_on(self, state: UserValue) -> None:
        """Runs the body of the called program on a state of the branch that the call was added to."""


# expressions whose results differ from branch to branch
_MAKERS = (SglGen, SglSelect, SglCall, SglSeparateReasoning)


def is_constant(expression: Expression) -> bool:
    """Returns whether an expression contains no generation, selection or call. Branches with equal
    texts remain equal when such an expression is added to all of them.
    """
    return not any(isinstance(part, _MAKERS) for part in expression.walk())


@dataclass(frozen=True, slots=True)
class SglGetForkItem(Expression):
    """First entry of a forked branch in a trace. `index` is the branch's position in its fork."""

    index: int

    def __repr__(self) -> str:
        return f"GetForkItem({self.index})"


@dataclass(frozen=True, slots=True)
class SglCommitLazy(Expression):
    """SGLang's hint before a fork. Forks need no hint here, so this class only lets imports
    succeed.
    """

    def __repr__(self) -> str:
        return "CommitLazy()"


# -------------------------------------------------------- parameters as SGLang's backends read them


_OF_HOOKS = parameters_for("hooks")


@dataclass
class SglSamplingParams(HookParams):
    """Sampling parameters with all defaults filled in, for backends with SGLang's blocking hooks."""

    json_schema: str | None = None
    dtype: str | None = None
    regex: str | None = None

    @staticmethod
    def from_params(
        params: SamplingParams, constraint: Constraint | None = None
    ) -> SglSamplingParams:
        """Builds the record from the parameters that were set. A regex or schema goes into the
        field of that name; a number or choices become a regex.
        """
        values = given_as_data(params).items()
        found: dict[str, Any] = {
            _OF_HOOKS[name].sglang: value for name, value in values if name in _OF_HOOKS
        }
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
    """Returns a regex for a number. It is for backends where the model can't end a number by
    continuing with other text.

    Args:
        ends: characters, any one of which may follow the number. Without them, NUMBER_STOPS should
            be stop strings.
    """
    return Regex(
        (REGEX_INT if number.kind == "integer" else REGEX_FLOAT) + (f"[{ends}]?" if ends else "")
    )


DTYPES: dict[Any, Constraint] = {
    int: Number("integer"),
    float: Number("float"),
    bool: Regex(REGEX_BOOL),
    str: Regex(REGEX_STR),
}
DTYPES.update(
    {"int": DTYPES[int], "float": DTYPES[float], "bool": DTYPES[bool], "str": DTYPES[str]}
)
DTYPES["string"] = DTYPES[str]
