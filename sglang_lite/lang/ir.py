"""The nodes of a program. Immutable: a node says what to do; what came of it is elsewhere (futures.Cell)."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sglang_lite.lang.choices import ChoicesSamplingMethod, token_length_normalized
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
from sglang_lite.protocol.sampling import given, named

if TYPE_CHECKING:
    from sglang_lite.constraints.python_types.value_type import ValueType
    from sglang_lite.lang.tools import Toolbox

# Patterns of values that Python reads: what `dtype=bool` and `str` stand for, and numbers on backends that can't end
# them where the model does (`number_as_regex`). Those are bounded, and a blank or line end may come after them, which
# ends them (NUMBER_STOPS) and is not part of the result: else a model that goes on with text could only write digits.
REGEX_INT = r"[-+]?[0-9]{1,16}[ \n]?"
REGEX_FLOAT = r"[-+]?[0-9]{1,16}(?:\.[0-9]{1,16})?[ \n]?"
NUMBER_STOPS = (" ", "\n")
REGEX_BOOL = r"(True|False)"
REGEX_STR = r"\"(?:[^\"\\\x00-\x1f]|\\[\"\\/bfnrt]|\\u[0-9a-fA-F]{4}){0,1024}\""


class SglExpr:
    """Anything that can be added to a state. `+` with text or another expression makes a list."""

    __slots__ = ()

    def __add__(self, other: str | SglExpr) -> SglExprList:
        return SglExprList((*self._parts(), *as_expr(other)._parts()))

    def __radd__(self, other: str | SglExpr) -> SglExprList:
        return SglExprList((*as_expr(other)._parts(), *self._parts()))

    def _parts(self) -> tuple[SglExpr, ...]:
        return (self,)

    def walk(self) -> Iterator[SglExpr]:
        """The nodes in it, in order, without the lists."""
        yield self

    def print_graph_dfs(self) -> None:
        """Prints the nodes in it, one a line."""
        for i, node in enumerate(self.walk()):
            print(f"%{i} = {node!r}")


def as_expr(value: Any) -> SglExpr:
    if isinstance(value, str):
        return SglConstantText(value)
    if isinstance(value, SglExpr):
        return value
    raise not_addable("+", value)


def not_addable(operator: str, value: Any, where: Location | None = None) -> ParameterError:
    """The error for what is neither text nor an expression."""
    hint = "Turn it into text."
    if inspect.isawaitable(value):
        hint = "Await it first: s += await s.get(…)."
        if inspect.iscoroutine(value):
            value.close()  # nobody will await it, and this error says so
    elif hasattr(value, "bind_arguments"):
        hint = "Call it: s += program(…)."
    kind = "None" if value is None else f"a {type(value).__name__}"
    return ParameterError(operator, f"{kind} can't be added to a program.", hint=hint, where=where)


class SglExprList(SglExpr):
    """Expressions, one after another."""

    __slots__ = ("expr_list",)

    def __init__(self, expr_list: Sequence[SglExpr]) -> None:
        self.expr_list = tuple(expr_list)

    def _parts(self) -> tuple[SglExpr, ...]:
        return self.expr_list

    def walk(self) -> Iterator[SglExpr]:
        for expr in self.expr_list:
            yield from as_expr(expr).walk()

    def __repr__(self) -> str:
        return f"ExprList({list(self.expr_list)!r})"


@dataclass(frozen=True, slots=True)
class SglConstantText(SglExpr):
    """Text, as it is."""

    value: str

    def __post_init__(self) -> None:
        if not isinstance(self.value, str):
            raise not_addable("SglConstantText", self.value)

    def __repr__(self) -> str:
        return f"Constant({self.value!r})"


@dataclass(frozen=True, slots=True)
class SglRoleBegin(SglExpr):
    """The start of a turn."""

    role: str

    def __repr__(self) -> str:
        return f"RoleBegin({self.role})"


@dataclass(frozen=True, slots=True)
class SglRoleEnd(SglExpr):
    """The end of a turn; the open turn must be of this role."""

    role: str

    def __repr__(self) -> str:
        return f"RoleEnd({self.role})"


@dataclass(frozen=True, slots=True)
class SglVarScopeBegin(SglExpr):
    """From here on, text is collected into a variable."""

    name: str

    def __repr__(self) -> str:
        return f"VarScopeBegin({self.name!r})"


@dataclass(frozen=True, slots=True)
class SglVarScopeEnd(SglExpr):
    """The variable has its text."""

    name: str

    def __repr__(self) -> str:
        return f"VarScopeEnd({self.name!r})"


@dataclass(frozen=True, slots=True)
class SglGrammarBegin(SglExpr):
    """From here on, all text together is in the language of a constraint."""

    constraint: Constraint

    def __repr__(self) -> str:
        return f"GrammarBegin({self.constraint!r:.60})"


@dataclass(frozen=True, slots=True)
class SglGrammarEnd(SglExpr):
    """The text in the grammar is complete."""

    def __repr__(self) -> str:
        return "GrammarEnd()"


@dataclass(frozen=True, slots=True)
class GenOptions:
    """How a generation is carried out, beside what is sampled.

    Attributes:
        timeout: seconds, None for no limit.
        retries: how often it is tried again when the backend fails or `check` says no; None for the run's number.
        check: whether a value will do (a function or coroutine function of it).
        backend: what to run on instead of the run's backend.
        reasoning: the model type whose reasoning is split off into a variable of its own.
    """

    timeout: float | None = None
    retries: int | None = None
    check: Callable[[Any], Any] | None = None
    backend: Any = None
    reasoning: str | None = None


@dataclass(frozen=True, slots=True)
class SglGen(SglExpr):
    """A generation.

    Attributes:
        name: of the variable that gets the result.
        params: what `gen` was told; the rest comes from the run.
        constraint: what the output must be.
        value_type: reads the text into a typed value; None leaves it text.
        options: None where all are at their defaults.
        tools: that it may call. How it writes that depends on the model: `constraint` and `value_type` are of a model
            without a format of its own.
    """

    name: str | None
    params: SamplingParams = SamplingParams()
    constraint: Constraint | None = None
    value_type: ValueType | None = None
    options: GenOptions | None = None
    tools: Toolbox | None = None

    def __post_init__(self) -> None:
        if type(self.params) is not SamplingParams:
            raise ParameterError(
                "SglGen",
                f"{self.params!r:.60} is no SamplingParams.",
                hint="Use gen(), which takes SGLang's arguments.",
            )

    @property
    def sampling_params(self) -> SglSamplingParams:
        """The parameters as SGLang's backends read them."""
        return SglSamplingParams.of(self.params, self.constraint)

    def __repr__(self) -> str:
        return f"Gen({self.name!r})"


@dataclass(frozen=True, slots=True)
class Multi:
    """Several answers: choices are added, `separator` between them, until `end` scores better or all are taken."""

    separator: str = ", "
    end: str = "\n"

    def __post_init__(self) -> None:
        for name in ("separator", "end"):
            if not isinstance(text := getattr(self, name), str) or not text:
                raise ParameterError(name, f"{text!r} is not a non-empty text.")


@dataclass(frozen=True, slots=True)
class SglSelect(SglExpr):
    """A choice among texts; several of them with `multi`."""

    name: str | None
    choices: tuple[str, ...]
    temperature: float = 0.0
    choices_method: ChoicesSamplingMethod = token_length_normalized
    multi: Multi | None = None

    def __repr__(self) -> str:
        return f"Select({self.name!r}, choices={list(self.choices)!r})"


@dataclass(frozen=True, slots=True)
class SglImage(SglExpr):
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
class SglSeparateReasoning(SglExpr):
    """Generations whose reasoning goes into variables of its own, `<name>_reasoning_content`."""

    model_type: str
    expr: SglExpr

    def marked(self) -> SglExprList:
        """The same nodes, each generation told to split its reasoning off."""
        marked: list[SglExpr] = []
        for node in self.expr.walk():
            if isinstance(node, SglGen):
                if not node.name:
                    raise ParameterError("separate_reasoning", "the generation in it needs a name.")
                options = replace(node.options or GenOptions(), reasoning=self.model_type)
                node = replace(node, options=options)
            marked.append(node)
        return SglExprList(marked)

    def walk(self) -> Iterator[SglExpr]:
        yield self

    def __repr__(self) -> str:
        return f"SeparateReasoning({self.model_type!r}, {self.expr!r})"


class SglCall(SglExpr):
    """A program added to another: it goes on with that one's text (function.py)."""

    __slots__ = ()

    def play_on(self, branch: Any) -> None:
        """Runs the program's body on a branch."""
        raise NotImplementedError


# ------------------------------------------------------------- what tracing records, beside the nodes above


@dataclass(frozen=True, slots=True)
class SglFork(SglExpr):
    """A fork into `number` branches."""

    number: int
    position_ids_offset: Any = None

    def __repr__(self) -> str:
        return f"Fork({self.number})"


@dataclass(frozen=True, slots=True)
class SglGetForkItem(SglExpr):
    """The start of a branch."""

    index: int

    def __repr__(self) -> str:
        return f"GetForkItem({self.index})"


@dataclass(frozen=True, slots=True)
class SglConcateAndAppend(SglExpr):
    """The texts of branches, appended."""

    states: Any

    def __repr__(self) -> str:
        return "ConcatenateAndAppend()"


@dataclass(frozen=True, slots=True)
class SglCommitLazy(SglExpr):
    """SGLang's hint before a fork; here the fork itself is the hint."""

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
        """From the parameters that were set; a regex or schema under its own name, choices as a regex."""
        found: dict[str, Any] = {}
        for name, value in given(params).items():
            if name in _OF_HOOKS:
                found[_OF_HOOKS[name].sglang] = list(value) if isinstance(value, tuple) else value
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
    """For who can't end a number where the model does. Goes with NUMBER_STOPS, or has one of `ends` behind it."""
    return Regex((REGEX_INT if number.kind == "integer" else REGEX_FLOAT) + (f"[{ends}]?" if ends else ""))


DTYPES: dict[Any, Constraint] = {
    int: Number("integer"),
    float: Number("float"),
    bool: Regex(REGEX_BOOL),
    str: Regex(REGEX_STR),
}
DTYPES.update({"int": DTYPES[int], "float": DTYPES[float], "bool": DTYPES[bool], "str": DTYPES[str]})
DTYPES["string"] = DTYPES[str]


def __getattr__(name: str) -> Any:
    if name in ("SglFunction", "SglArgument", "SglVariable"):  # where SGLang's users import them from
        from sglang_lite.lang import function, tracer

        return getattr(function if name == "SglFunction" else tracer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
