"""Functions for writing programs, such as `gen`, `select` and the roles. They return expressions to
add to a state (expressions.py).
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Literal,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypeVar,
    Unpack,
    overload,
)

from typing_extensions import TypeForm

from sglang_lite.constraints.coerce import ConstraintLike, as_constraint, check_syntax
from sglang_lite.constraints.python_types.value_type import ValueType, number_text_type, value_type
from sglang_lite.constraints.schema import json_schema as checked_schema
from sglang_lite.constraints.schema import raise_if_example_document
from sglang_lite.errors import with_article
from sglang_lite.lang.argument_names import explains_wrong_arguments
from sglang_lite.lang.backend.default import BackendLike, as_backend
from sglang_lite.lang.backend.default import flush_cache as flush_cache
from sglang_lite.lang.backend.default import get_server_info as get_server_info
from sglang_lite.lang.backend.default import set_default_backend as set_default_backend
from sglang_lite.lang.checks import (
    check_booleans,
    check_limits,
    check_takes_one_argument,
    check_truncation_policy,
)
from sglang_lite.lang.code_mode.code_tools import CodeTools
from sglang_lite.lang.expressions import (
    DTYPES,
    NO_OPTIONS,
    GenOptions,
    SglAudio,
    SglGen,
    SglImage,
    SglSelect,
    SglVideo,
)
from sglang_lite.lang.expressions import SglSeparateReasoning as SglSeparateReasoning
from sglang_lite.lang.function import SglFunction
from sglang_lite.lang.sampling_keywords import gen_params, with_sampling_signature
from sglang_lite.lang.tools import Toolbox, ToolCall
from sglang_lite.lang.tracebacks import user_location, warn_here
from sglang_lite.program.choosing import (
    ChoicesSamplingMethod,
    ExactChoice,
    builtin_method_name,
    check_choices,
    resolve_method,
    token_length_normalized,
)
from sglang_lite.program.nodes import Expression, Expressions, Gen, Select, TurnBegin, TurnEnd
from sglang_lite.protocol import (
    Choices,
    Constraint,
    JsonSchema,
    Number,
    ParameterError,
    Regex,
    SamplingParams,
    Unset,
)
from sglang_lite.protocol.anything import UserValue
from sglang_lite.protocol.parameter import Deferred
from sglang_lite.protocol.sampling import (
    GenSamplingOptions,
    OneSampleGenOptions,
    OneSampleOptions,
    SamplingOptions,
    parameters_for,
    read_params,
)
from sglang_lite.text.reasoning import ReasoningParser

if TYPE_CHECKING:
    from sglang_lite.lang.function import AsyncFunction

_P = ParamSpec("_P")
_First = TypeVar("_First")  # the state, or `self` of a method
_T = TypeVar("_T")
_Body: TypeAlias = Callable[Concatenate[_First, _P], _T]
_AsyncBody: TypeAlias = Callable[Concatenate[_First, _P], Coroutine[UserValue, UserValue, _T]]


class _ProgramDecorator(Protocol):
    @overload
    def __call__(self, func: _AsyncBody[_First, _P, _T], /) -> AsyncFunction[_P, _T]: ...
    @overload
    def __call__(self, func: _Body[_First, _P, _T], /) -> SglFunction[_P, _T]: ...


@overload
def function(
    func: _AsyncBody[_First, _P, _T],
    num_api_spec_tokens: int | None = None,
    *,
    untrusted_arguments: bool = False,
) -> AsyncFunction[_P, _T]: ...
@overload
def function(
    func: _Body[_First, _P, _T],
    num_api_spec_tokens: int | None = None,
    *,
    untrusted_arguments: bool = False,
) -> SglFunction[_P, _T]: ...
@overload
def function(
    func: None = None, num_api_spec_tokens: int | None = None, *, untrusted_arguments: bool = False
) -> _ProgramDecorator: ...
@explains_wrong_arguments
def function(
    func: Callable[..., UserValue] | None = None,
    num_api_spec_tokens: int | None = None,
    *,
    untrusted_arguments: bool = False,
) -> SglFunction | _ProgramDecorator:
    """Turns a function into a program. Used as a decorator. The function's first parameter is the
    state. The parentheses may be left out. SglFunction describes `num_api_spec_tokens` and
    `untrusted_arguments`.
    """

    def decorate(func: Callable[..., UserValue]) -> UserValue:
        return SglFunction(func, num_api_spec_tokens, untrusted_arguments=untrusted_arguments)

    return decorate if func is None else decorate(func)


_KINDS = ("dtype", "choices", "regex", "json_schema", "type", "tools", "code", "constraint")
_CODE_RETRIES = 2  # of a generated program; each retry shows the model the previous program's error


# SGLang's order
_IN_ORDER = (
    "name",
    *parameters_for("hooks"),
    "dtype",
    "choices",
    "choices_method",
    "regex",
    "json_schema",
)


class _GenOptions(OneSampleGenOptions, total=False):
    """Keywords of `gen` that don't affect the type of the result."""

    timeout: float | None
    retries: int | None
    backend: BackendLike | None
    reasoning: str | None
    repair: bool | None
    shortened: Literal["raise", "warn", "keep"] | None


@overload
def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    *,
    choices: Iterable[str],
    choices_method: ChoicesSamplingMethod | ExactChoice | str | None = None,
    **sampling: Unpack[OneSampleGenOptions],
) -> SglSelect[str]: ...
@overload
def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    *,
    tools: Sequence[Callable[..., UserValue]],
    tool_choice: str | Callable[..., UserValue] | None = None,
    parallel_tool_calls: Literal[False] | None = None,
    check: Callable[[ToolCall | str], object] | None = None,
    **options: Unpack[_GenOptions],
) -> SglGen[ToolCall | str]: ...
@overload
def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    *,
    tools: Sequence[Callable[..., UserValue]],
    tool_choice: str | Callable[..., UserValue] | None = None,
    parallel_tool_calls: Literal[True],
    check: Callable[[list[ToolCall] | str], object] | None = None,
    **options: Unpack[_GenOptions],
) -> SglGen[list[ToolCall] | str]: ...
@overload
def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    *,
    code: CodeTools | Sequence[Callable[..., UserValue]],
    check: Callable[[UserValue], object] | None = None,
    **options: Unpack[_GenOptions],
) -> SglGen[UserValue]: ...
@overload
def gen(  # type: ignore[overload-overlap] # for one sample; the next overload is for several
    name: str | None = None,
    max_tokens: int | None = None,
    *,
    type: TypeForm[_T],
    check: Callable[[_T], object] | None = None,
    n: Literal[1] | None = None,
    **options: Unpack[_GenOptions],
) -> SglGen[_T]: ...
@overload
def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    *,
    type: TypeForm[_T],
    check: Callable[[_T], object] | None = None,
    n: int,
    **options: Unpack[_GenOptions],
) -> SglGen[list[_T]]: ...
@overload
def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    *others: UserValue,
    dtype: type | str | None = None,
    regex: str | None = None,
    json_schema: str | Mapping[str, UserValue] | type | JsonSchema | None = None,
    constraint: ConstraintLike | None = None,
    check: Callable[[str], object] | None = None,
    n: Literal[1] | None = None,
    **options: Unpack[_GenOptions],
) -> SglGen[str]: ...
@overload
def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    *others: UserValue,
    dtype: type | str | None = None,
    regex: str | None = None,
    json_schema: str | Mapping[str, UserValue] | type | JsonSchema | None = None,
    constraint: ConstraintLike | None = None,
    check: Callable[[str], object] | None = None,
    n: int,
    **options: Unpack[_GenOptions],
) -> SglGen[list[str]]: ...
@with_sampling_signature("gen", _IN_ORDER)
def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    *others: UserValue,
    dtype: type | str | None = None,
    choices: Iterable[str] | None = None,
    choices_method: ChoicesSamplingMethod | ExactChoice | str | None = None,
    regex: str | None = None,
    json_schema: str | Mapping[str, UserValue] | type | JsonSchema | None = None,
    type: object = None,
    tools: Sequence[Callable[..., UserValue]] | None = None,
    tool_choice: str | Callable[..., UserValue] | None = None,
    code: CodeTools | Sequence[Callable[..., UserValue]] | None = None,
    constraint: ConstraintLike | None = None,
    timeout: float | None = None,
    retries: int | None = None,
    check: Callable[[UserValue], UserValue] | None = None,
    backend: BackendLike | None = None,
    reasoning: str | None = None,
    repair: bool | None = None,
    shortened: Literal["raise", "warn", "keep"] | None = None,
    parallel_tool_calls: bool | None = None,
    **sampling: Unpack[GenSamplingOptions],
) -> SglGen | SglSelect:
    """Returns a generation by the model, to add to a state. A parameter that is None takes its
    value from the run (`program.run(temperature=…)`). If the run does not set it either, a remote
    model uses its provider's default, and an engine in this process uses the default in
    parentheses, which is followed by the range that an engine accepts. docs/sampling.md has the
    whole table.

    Args:
        name: variable that holds the result.
        max_tokens: maximum number of tokens to generate (128; at least 0).
        min_tokens: no end of sequence and no stop before this many tokens (0; at least 0).
        n: number of independent samples (1; 1 to 256). With more the variable is a list; the first
            sample continues the text and is what streams show.
        stop: text, or a list of texts, that ends the generation and is not part of the result.
        stop_token_ids: token ids that end the generation.
        stop_regex: patterns of Python's `re` that end the generation as soon as its text has a
            match.
        temperature: randomness of the draws; 0 always takes the likeliest token (1.0; 0 to 100).
        top_p: draw from the likeliest tokens whose probabilities add up to this (1.0; above 0, at
            most 1).
        top_k: draw from this many of the likeliest tokens; -1 or 0 for all (-1; at least -1).
        min_p: leave out tokens less likely than this share of the likeliest one's probability (0.0;
            0 to 1).
        frequency_penalty: subtracted from a token's logit for each time that the output has it
            (0.0; -2 to 2).
        presence_penalty: subtracted once from the logit of each token in the output (0.0; -2 to 2).
        ignore_eos: continue after an end-of-sequence token (False).
        return_logprob: report tokens' log-probabilities in the metadata, `s.get_meta_info(name)`
            (False).
        logprob_start_len: with log-probabilities, also of the prompt's from this one on; -1 for
            none (-1; at least -1).
        top_logprobs_num: also log-probabilities of this many likeliest tokens at each position;
            with `max_tokens=0`, at the next one (0; 0 to 256).
        return_text_in_logprobs: with log-probabilities, also each token's text (False).
        return_prompt_token_ids: keep the ids of the prompt's tokens, for `s.trajectory()` (False).
        return_routed_experts: keep each token's experts; needs `enable_return_routed_experts`
            (False).
        return_hidden_states: keep each token's hidden state; needs `enable_return_hidden_states`
            (False).
        lora_path: name of the adapter (LoRA) that an engine generates with.
        confidence: record how likely the model found each token, with and without the constraint,
            for `s.confidence(name)` (False).
        exact: draw texts with the model's own probabilities, for `s.exact(name)`; `"bound"`: with a
            larger `gap` where True fails; `"weighted"`: in one try each, with a weight that makes
            up for it (False).
        heal: tokenise the prompt's last word again, with the text that follows (False).
        seed: draws depend only on it and the token's position; without it, calls differ.
        include_stop: keep the stop that ended the generation in its text (False).
        repetition_penalty: factor for tokens in the prompt or the output; above 1 makes them less
            likely (1.0; above 0, at most 2).
        sampling_order: where `top_p` counts beside `top_k`: "joint" in all tokens, "sequential" in
            those that `top_k` has left; without it joint, but with `min_p` sequential.
        repeats: maximum number of equal items in a row in a list of JSON, but for numbers,
            booleans, null and enums (at least 3).
        thinking: tokens that the model may think, after which its thought ends with the sentence;
            `"30s"`: seconds instead; `"50%"`: share of `max_tokens` (at least 0).
        speculation: let an engine with `speculation` draft tokens; none changes by it (True).
        logit_bias: added to the logits of these token ids (-10,000 to 10,000).
        dtype: int, float, bool or str: text that spells such a value; the result stays text. A
            number ends where the model continues with anything else, which is dropped, or at
            `max_tokens`; commas between groups of thousands are left out of the result.
        choices, choices_method: as in `select`. Texts are scored instead of generated, so
            parameters of the generation are ignored or rejected.
        regex: a pattern that the whole text matches; docs/constraints.md describes the dialect.
        json_schema: a schema that the text, as JSON, is valid under: schema text, a dict, a
            pydantic model (whose objects have only its fields), or the result of
            sgl.grammar.json_schema, which takes options.
        type: a Python type of the variable's value; the text is constrained to spell such a value.
        tools: functions that the model may call; the variable is a ToolCall or the answer's text.
        tool_choice: "auto" (the default); "required", to call any of the tools; "none", to call
            none, although the prompt shows them; or a tool, or its name, to call it.
        parallel_tool_calls: whether one turn may contain several calls (False). If True, the
            variable is a list of ToolCalls, in the model's order, or the answer's text.
        code: functions, or an sgl.CodeTools with limits. The model writes a small program that
            calls the functions, and the program's result is the variable's value. If the program is
            invalid or fails, the model sees the program and the error, and writes another one
            (`retries=2, repair=True`, unless given).
        constraint: any constraint, as in sgl.grammar.check: an sgl.Regex or sgl.Choices, a grammar
            in GBNF or in Lark's syntax (sgl.Grammar), a schema …
        timeout: seconds after which an attempt, its check included, fails with RequestTimeoutError.
            An engine completes a constrained answer before that.
        retries: number of attempts after the first if the backend fails, the value is invalid or
            `check` rejects it (default: the run's number, which is 0 by default). Each starts from
            the text before the node, with a different seed. At temperature 0 the model would repeat
            a rejected answer, so the error is raised immediately, unless `repair` is True.
        check: a function of the value that returns True if it is valid, else False, or raises. With
            several samples, each must be valid.
        backend: the backend of this node, instead of the run's.
        reasoning: the type of the model ("qwen3" …), whose reasoning goes into
            `<name>_reasoning_content` instead of the variable. If the backend can enforce a
            sequence of constraints, the node's constraint applies only to the answer, otherwise to
            the whole text.
        repair: whether `retries` show the model its rejected answer and the error (False), in turns
            that are not part of the text. Possible only in an assistant turn, with one sample.
        shortened: what happens if `max_tokens`, the context or `timeout` cuts a constrained answer:
            "raise" TruncatedError (the default with `type` and `tools`), "warn" and keep it (the
            default otherwise), or "keep" it. The kept answer is a shorter value if closing brackets
            are enough to complete it, otherwise the text as it was cut.

    Raises:
        ParameterError: a parameter can't be honoured, or two parameters exclude each other.
        ConstraintError: a regex, schema or type is invalid.
    """
    if name is not None and not isinstance(name, str):
        raise ParameterError(
            "name", f"{name!r:.60} is not a string.", hint='The name comes first: gen("name").'
        )
    given = (dtype, choices, regex, json_schema, type, tools, code, constraint)
    free = (
        dtype is None and choices is None and regex is None and json_schema is None and type is None
    )
    free = free and tools is None and code is None and constraint is None
    kind = None if free else _single_constraint_kind(given)
    if tool_choice is not None or parallel_tool_calls is not None:
        _check_tool_use(tool_choice, parallel_tool_calls, tools)
    params = gen_params(max_tokens, sampling)
    if choices is not None:
        _reject_options_with_choices(
            timeout=timeout,
            retries=retries,
            check=check,
            backend=backend,
            reasoning=reasoning,
            repair=repair,
            shortened=shortened,
            **{
                key: value
                for key, value in sampling.items()
                if key not in (*_IN_ORDER, "lora_path")
            },
        )
        if max_tokens is not None:
            warn_here(
                "max_tokens has no effect with choices: whole texts are scored. Leave it out."
            )
        temperature = sampling.get("temperature") or 0.0
        method = token_length_normalized if choices_method is None else choices_method
        return select(name, choices, temperature, method, lora_path=sampling.get("lora_path"))
    if choices_method is not None:
        raise ParameterError(
            "choices_method",
            "it is given without choices.",
            hint="Pass choices=[…], or leave choices_method out.",
        )
    code_tools = None if code is None else _as_code_tools(code, sampling.get("n"))
    if code_tools is not None and retries is None and repair is None:
        retries, repair = _CODE_RETRIES, True
    # any() would take seven calls
    plain = timeout is None and retries is None and check is None and backend is None
    plain = plain and reasoning is None and repair is None and shortened is None
    options = (
        NO_OPTIONS
        if plain
        else _check_gen_options(timeout, retries, check, backend, reasoning, repair, shortened)
    )
    if kind is None:
        return SglGen(Gen(name, params, timeout=timeout, where=user_location()), None, options)
    if tools is not None:
        toolbox = Toolbox.for_tools(
            tools,
            "auto" if tool_choice is None else tool_choice,
            parallel=bool(parallel_tool_calls),
        )
        call_type = toolbox.value_type(None)
        node = Gen(name, params, call_type.constraint, timeout=timeout, where=user_location())
        return SglGen(node, call_type, options, toolbox)
    if code_tools is not None:
        code_type = ValueType(None, code_tools.constraint, code_tools.parse)
        options = replace(options, code=code_tools)
        node = Gen(name, params, code_type.constraint, timeout=timeout, where=user_location())
        return SglGen(node, code_type, options)
    constraint, read = _parse_constraint(kind, given[_KINDS.index(kind)])
    return SglGen(
        Gen(name, params, constraint, timeout=timeout, where=user_location()), read, options
    )


def _single_constraint_kind(given: Sequence[Any]) -> str:
    """Returns the name of the constraint parameter that is given. Raises ParameterError if several
    are given.

    Args:
        given: values of the parameters in _KINDS, in that order.
    """
    kind, *others = [kind for kind, value in zip(_KINDS, given) if value is not None]
    if others:
        raise ParameterError(
            others[0], f"can't be combined with {kind}.", hint="Give a generation one constraint."
        )
    return kind


def _as_code_tools(code: Any, samples: Any) -> CodeTools:
    """Returns the functions of `gen(code=…)`. Raises ParameterError if they can't be used."""
    if samples not in (None, 1):
        raise ParameterError("n", "code works with one sample only.", hint="Leave n out.")
    return code if isinstance(code, CodeTools) else CodeTools(code)


def _check_tool_use(tool_choice: Any, parallel_tool_calls: Any, tools: Any) -> None:
    if tool_choice is not None and tools is None:
        raise ParameterError(
            "tool_choice",
            f"{tool_choice!r:.60} is given without tools.",
            hint="Pass tools=[…], or leave it out.",
        )
    if parallel_tool_calls is not None and (
        tools is None or not isinstance(parallel_tool_calls, bool)
    ):
        raise ParameterError(
            "parallel_tool_calls",
            f"{parallel_tool_calls!r:.60} is not True or False, or is given without tools.",
            hint="Pass tools=[…], or leave it out.",
        )


def _reject_options_with_choices(**given: Any) -> None:
    for parameter, value in given.items():
        if value is not None:
            raise ParameterError(
                parameter, f"{value!r:.60} has no effect with choices=.", hint="Leave it out."
            )


def _check_gen_options(
    timeout: Any,
    retries: Any,
    check: Any,
    backend: Any,
    reasoning: Any,
    repair: Any,
    shortened: Any,
) -> GenOptions:
    check_limits(timeout, retries)
    if check is not None:
        check_takes_one_argument(check)
    if reasoning is not None:
        ReasoningParser(reasoning)
    if repair is not None:
        check_booleans(repair=repair)
    if shortened is not None:
        check_truncation_policy(shortened)
    own_backend = None if backend is None else as_backend(backend)
    return GenOptions(timeout, retries, check, own_backend, reasoning, bool(repair), shortened)


def _parse_constraint(kind: str, value: Any) -> tuple[Constraint | None, ValueType | None]:
    """Returns the constraint of a generation, and the type that converts its text to a value. The
    type is None if the text itself is the value.
    """
    if kind == "type":
        read_type = value_type(value)
        return read_type.constraint, read_type
    if kind == "dtype":
        if not isinstance(value, str | builtins.type) or value not in DTYPES:
            raise ParameterError(
                "dtype", f"{value!r} is not int, float, bool or str.", hint="type= takes any type."
            )
        constraint = DTYPES[value]
        return constraint, number_text_type(constraint) if isinstance(constraint, Number) else None
    if kind == "constraint":
        return check_syntax(as_constraint(value)), None
    if kind == "json_schema":
        return _as_json_schema(value), None
    if isinstance(value, Deferred):  # a symbol of a trace, represented in text by its mark
        value = f"{value}"
    if not isinstance(value, str):
        hint = (
            "Give its text: regex=pattern.pattern. Flags are written into it: (?i)."
            if isinstance(value, re.Pattern)
            else ""
        )
        raise ParameterError("regex", f"{value!r} is not a string.", hint=hint)
    return check_syntax(Regex(value)), None


def _as_json_schema(value: Any) -> JsonSchema:
    if isinstance(value, JsonSchema):
        return value
    if isinstance(value, str | Mapping):
        schema = checked_schema(value)
        raise_if_example_document(schema)
        return schema
    if isinstance(value, bool):
        hint = (
            'Leave it out for free text; for any JSON give {}, for any object {"type": "object"}.'
        )
        raise ParameterError("json_schema", f"{value!r} is not a schema.", hint=hint)
    if isinstance(value, list | tuple | set | int | float | bytes):
        problem = f"{with_article(type(value).__name__)} is not a schema."
        raise ParameterError("json_schema", problem, hint="Give a dict, a JSON string or a type.")
    constraint = value_type(value).constraint
    if not isinstance(constraint, JsonSchema):
        raise ParameterError(
            "json_schema", f"values of {value!r} are not written as JSON.", hint="Use type=."
        )
    return constraint


_SHORT_IN_ORDER = ("name", *(name for name in _IN_ORDER if name in parameters_for("run")))


class _GenText(Protocol):
    """Signature of the functions that generate a value as text. With one sample, the variable is a
    string; with several, a list of strings.
    """

    @overload
    def __call__(
        self,
        name: str | None = None,
        max_tokens: int | None = None,
        *others: UserValue,
        n: Literal[1] | None = None,
        **sampling: Unpack[OneSampleOptions],
    ) -> SglGen[str]: ...
    @overload
    def __call__(
        self,
        name: str | None = None,
        max_tokens: int | None = None,
        *others: UserValue,
        n: int,
        **sampling: Unpack[OneSampleOptions],
    ) -> SglGen[list[str]]: ...


_gen_text: Callable[[Callable[..., SglGen]], _GenText] = with_sampling_signature(
    "run", _SHORT_IN_ORDER
)


@_gen_text
def gen_int(
    name: str | None = None,
    max_tokens: int | None = None,
    *others: UserValue,
    **sampling: Unpack[SamplingOptions],
) -> SglGen:
    """Returns a generation of a whole number. The result is the number's text, as with
    `gen(dtype=int)`.
    """
    return _gen_of_dtype(int, name, max_tokens, sampling)


@_gen_text
def gen_string(
    name: str | None = None,
    max_tokens: int | None = None,
    *others: UserValue,
    **sampling: Unpack[SamplingOptions],
) -> SglGen:
    """Returns a generation of a string in double quotes, as with `gen(dtype=str)`. The quotes are
    part of the result.
    """
    return _gen_of_dtype(str, name, max_tokens, sampling)


def _gen_of_dtype(
    dtype: type, name: str | None, max_tokens: int | None, sampling: SamplingOptions
) -> SglGen:
    constraint, read = _parse_constraint("dtype", dtype)
    return SglGen(Gen(name, gen_params(max_tokens, sampling), constraint), read)


@overload
def select(
    name: str | None,
    choices: Iterable[str],
    temperature: float,
    choices_method: ExactChoice,
    *,
    multi: Literal[False] = False,
    lora_path: str | Sequence[str] | None = None,
) -> SglGen[str]: ...
@overload
def select(
    name: str | None = None,
    *,
    choices: Iterable[str],
    temperature: float = 0.0,
    choices_method: ExactChoice,
    multi: Literal[False] = False,
    lora_path: str | Sequence[str] | None = None,
) -> SglGen[str]: ...
@overload
def select(
    name: str | None,
    choices: Iterable[str],
    temperature: float = 0.0,
    *,
    choices_method: ExactChoice,
    multi: Literal[False] = False,
    lora_path: str | Sequence[str] | None = None,
) -> SglGen[str]: ...
@overload
def select(
    name: str | None,
    choices: Iterable[str],
    temperature: float = 0.0,
    choices_method: ChoicesSamplingMethod | str = token_length_normalized,
    *,
    multi: Literal[False] = False,
    lora_path: str | Sequence[str] | None = None,
) -> SglSelect[str]: ...
@overload
def select(
    name: str | None,
    choices: Iterable[str],
    temperature: float = 0.0,
    choices_method: ChoicesSamplingMethod | str = token_length_normalized,
    *,
    multi: Literal[True],
    lora_path: str | Sequence[str] | None = None,
) -> SglSelect[list[str]]: ...
@overload
def select(
    name: str | None = None,
    *,
    choices: Iterable[str],
    temperature: float = 0.0,
    choices_method: ChoicesSamplingMethod | str = token_length_normalized,
    multi: bool = False,
    lora_path: str | Sequence[str] | None = None,
) -> SglSelect[str | list[str]]: ...
@explains_wrong_arguments
def select(
    name: str | None = None,
    choices: Iterable[str] | None = None,
    temperature: float = 0.0,
    choices_method: ChoicesSamplingMethod | ExactChoice | str = token_length_normalized,
    *,
    multi: bool = False,
    lora_path: str | Sequence[str] | None = None,
) -> SglSelect | SglGen:
    """Returns a choice among texts. The model scores each text as the continuation of the state's
    text.

    Args:
        name: variable that holds the choice.
        choices: at least one text; duplicates count once. If a choice is empty, all are scored
            together with the last token of the text before them, which then can't be empty.
        temperature: 0 (the default) takes the best choice by the method; above 0, the choice is
            drawn from the softmax of the scores.
        choices_method: method that compares the scores, as a ChoicesSamplingMethod or its name
            ("greedy_token_selection" …). With `sgl.exact`, a generation with `exact=True` and
            `heal=True` makes the choice: at temperature 0, the text that the model would most
            likely write; at a temperature of up to 1, a draw. `s.exact(name)` has the
            probabilities.
        multi: whether to select several choices; the variable is then a list. Choices are added one
            by one, with ", " between them, until a line end scores better.
        lora_path: name of the adapter (LoRA) that an engine scores with, or [] for none; by default
            the run's adapter.

    Raises:
        ParameterError: `choices` is empty or not a list of strings, or another parameter has an
            invalid value.
    """
    if name is not None and not isinstance(name, str):
        raise ParameterError(
            "name",
            f"{name!r:.60} is not a string.",
            hint='The name comes first: select("name", ["a", "b"]).',
        )
    texts: Any = choices if isinstance(choices, Deferred) else check_choices(choices)
    real = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    if not real or not 0 <= temperature < float("inf"):
        raise ParameterError("temperature", f"{temperature!r} is not a number of at least 0.")
    check_booleans(multi=multi)
    if (
        multi
        and not isinstance(texts, Deferred)
        and (not all(texts) or len(set(texts)) < len(texts))
    ):
        raise ParameterError(
            "choices",
            "one is empty or given twice, but multi= takes each at most once.",
            hint="Remove it.",
        )
    if not multi and not isinstance(texts, Deferred) and len(set(texts)) < len(texts):
        twice = next(text for i, text in enumerate(texts) if text in texts[:i])
        warn_here(f"choices: {twice!r:.60} is given twice, and counts once. Remove it.")
    method = resolve_method(choices_method)
    adapter = read_params({"lora_path": lora_path}, parameters_for("gen")).lora_path
    if isinstance(method, ExactChoice):
        return _select_exactly(name, texts, float(temperature), adapter, multi=multi)
    node = Select(
        name,
        texts,
        builtin_method_name(method),
        float(temperature),
        lora_path=adapter,
        where=user_location(),
    )
    return SglSelect(node, method, multi)


def _select_exactly(
    name: str | None,
    choices: Sequence[str] | Deferred,
    temperature: float,
    adapter: tuple[str, ...] | Unset,
    *,
    multi: bool,
) -> SglGen:
    """Returns a generation that chooses by `sgl.exact`, regardless of the run's parameters."""
    if multi:
        raise ParameterError(
            "choices_method",
            "exact chooses one text, not several.",
            hint="Leave multi out, or use another method.",
        )
    if isinstance(choices, Deferred):
        raise ParameterError(
            "choices_method",
            "exact needs choices that are known when the program is traced.",
            hint="Write them in the program, or use another method.",
        )
    longest = max(len(choice.encode()) for choice in choices)
    params = SamplingParams(
        temperature=temperature, max_tokens=longest + 1, lora_path=adapter, exact=True, heal=True
    )
    constraint = Choices(tuple(dict.fromkeys(choices)))
    return SglGen(Gen(name, params, constraint, where=user_location()), options=_PLAIN_OPTIONS)


_PLAIN_OPTIONS = GenOptions(draws_plainly=True)


@explains_wrong_arguments
def image(expr: object) -> SglImage:
    """Returns an image to add to a prompt, given as a path, a URL, encoded bytes, a PIL image, or a
    uint8 array or tensor.
    """
    return SglImage(expr).set_location(user_location())


@explains_wrong_arguments
def video(path: object, num_frames: int) -> SglVideo:
    """Returns a video to add to a prompt as `num_frames` evenly spaced frames. The video is given
    as a path, a URL or encoded bytes.
    """
    return SglVideo(path, num_frames).set_location(user_location())


@explains_wrong_arguments
def audio(expr: object) -> SglAudio:
    """Returns a sound to add to a prompt, given as a path, a URL or encoded bytes."""
    return SglAudio(expr).set_location(user_location())


def separate_reasoning(
    expr: Expression | None = None, model_type: str | None = None
) -> Expressions:
    """Returns an expression that separates reasoning from answers. Its generations put their
    reasoning into `<name>_reasoning_content`, and only the answer into `<name>`.

    Args:
        expr: expression with the generations.
        model_type: type of the model, which determines how reasoning is marked: a key of
            text.reasoning.FORMATS ("deepseek-r1", "qwen3" …).

    Raises:
        ParameterError: an argument is missing, `expr` is not an expression, or the model type is
            unknown.
    """
    if expr is None or model_type is None:
        raise ParameterError("separate_reasoning", "needs an expression and a model_type.")
    if not isinstance(expr, Expression):
        raise ParameterError(
            "separate_reasoning", f"a {builtins.type(expr).__name__} is not an expression."
        )
    ReasoningParser(model_type)
    return Expressions((SglSeparateReasoning(model_type, expr),))


def _wrap_in_turn(role: str, expr: str | Expression | None) -> Expressions:
    begin = TurnBegin(role)
    end = TurnEnd(role)
    return Expressions((begin, end) if expr is None else (begin, expr, end))


@explains_wrong_arguments
def system(expr: str | Expression | None = None) -> Expressions:
    """Returns a system turn with `expr` as its content, or an empty turn if `expr` is None."""
    return _wrap_in_turn("system", expr)


@explains_wrong_arguments
def user(expr: str | Expression | None = None) -> Expressions:
    """Returns a user turn with `expr` as its content, or an empty turn if `expr` is None."""
    return _wrap_in_turn("user", expr)


@explains_wrong_arguments
def assistant(expr: str | Expression | None = None) -> Expressions:
    """Returns an assistant turn with `expr` as its content, or an empty turn if `expr` is None."""
    return _wrap_in_turn("assistant", expr)


def system_begin() -> TurnBegin:
    return TurnBegin("system")


def system_end() -> TurnEnd:
    return TurnEnd("system")


def user_begin() -> TurnBegin:
    return TurnBegin("user")


def user_end() -> TurnEnd:
    return TurnEnd("user")


def assistant_begin() -> TurnBegin:
    return TurnBegin("assistant")


def assistant_end() -> TurnEnd:
    return TurnEnd("assistant")
