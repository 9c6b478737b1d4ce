"""Sampling parameters: the table of all parameters, and the record of the parameters that a generation sets.

The table is the single source of SGLang's dictionaries, the checks, the engine's defaults and limits, the signatures
that `help` shows, and the table in docs/sampling.md. `SamplingOptions`, the docstring of `gen` and records repeat it
for readers and type checkers; tests/test_sampling_parameters.py verifies that they agree.
"""

from __future__ import annotations

import enum
import numbers
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypedDict, get_args

import msgspec

from sglang_lite.errors import ParameterError, TraceError, shown
from sglang_lite.protocol.anything import UserValue
from sglang_lite.protocol.record import Record


class Unset(enum.Enum):
    """Type of UNSET, the value of a parameter that the caller did not give. UNSET differs from every default."""

    UNSET = "UNSET"

    def __repr__(self) -> str:
        return "UNSET"

    __hash__ = object.__hash__  # faster than Enum's, which is Python: most parameters are UNSET


UNSET: Final = Unset.UNSET


class Deferred:
    """Base of symbols: placeholders in a trace for values that only a run knows. They are not checked."""

    __slots__ = ()


def check_known(name: str, *values: object) -> None:
    """Raises TraceError if one of the values is a symbol, where a trace would need the value itself."""
    for value in values:
        if isinstance(value, Deferred):
            raise TraceError(f"{name} is {value!r:.60}, which only a run knows.", hint="Trace it with arguments.")


# ------------------------------------------------------------------------------------------------------- the table

# A budget is a number of tokens, or text, which records have as a tuple of one: seconds ("30s"), or a share of
# `max_tokens` ("50%").
Kind: TypeAlias = Literal["int", "float", "bool", "strings", "token ids", "biases", "order", "budget"]
# Where top-p counts if top-k applies, too: in the mass of all tokens, or in the mass of those that top-k has left.
SamplingOrder: TypeAlias = Literal["joint", "sequential"]
if TYPE_CHECKING:
    _OrderField: TypeAlias = SamplingOrder | Unset
else:  # msgspec has no union of names and an enumeration of names. UNSET is the default, which records leave out.
    _OrderField = SamplingOrder
# Places where a parameter can be given. gen: `gen`. run: `run`, `run_batch` …, `gen_int` and `gen_string`. hooks:
# SGLang's blocking hooks of a backend, and `gen` by position. sampling_params: a key of the dictionary for
# `Engine.generate`. request: a keyword of `Engine.generate`.
Place: TypeAlias = Literal["gen", "run", "hooks", "sampling_params", "request"]

_SGLANG: tuple[Place, ...] = ("gen", "run", "hooks", "sampling_params")
_LOGPROB: tuple[Place, ...] = ("gen", "run", "hooks", "request")
_OURS: tuple[Place, ...] = ("gen", "sampling_params")
_INT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Range:
    """Range of numbers from `low` to `high`, where None is no bound; `above` excludes `low` itself."""

    low: float | None = None
    high: float | None = None
    above: bool = False

    def __contains__(self, value: float) -> bool:
        if self.low is not None and (value <= self.low if self.above else value < self.low):
            return False
        return self.high is None or value <= self.high

    def __str__(self) -> str:
        low, high = (None if bound is None else f"{bound:,}" for bound in (self.low, self.high))
        if high is None:
            return "any" if low is None else f"above {low}" if self.above else f"at least {low}"
        return f"above {low}, at most {high}" if self.above else f"{low} to {high}"


@dataclass(frozen=True, slots=True)
class Parameter:
    """Definition of a sampling parameter.

    Attributes:
        name: name in `gen` and in SamplingParams.
        kind: kind of its values.
        default: default of an engine of this process, or None if it has none. Remote models have their provider's.
        text: description for docstrings and docs/sampling.md.
        range: range of a number, or of the numbers in a list, for all backends. Checked when a SamplingParams is made.
        engine_range: narrower range that an engine of this process accepts, or None. Checked by the engine.
        max_entries: maximum number of entries that an engine accepts in a list, or None.
        hint: hint for a value outside the engine's range.
        alias: SGLang's name, if it differs.
        places: places where the parameter can be given.
    """

    name: str
    kind: Kind
    default: Any
    text: str
    range: Range = Range()
    engine_range: Range | None = None
    max_entries: int | None = None
    hint: str = ""
    alias: str = ""
    places: tuple[Place, ...] = _SGLANG

    @property
    def sglang(self) -> str:
        """Name of the parameter in SGLang."""
        return self.alias or self.name

    @property
    def limits(self) -> str:
        """Range in words, the engine's if it is narrower in practice; empty if the parameter has no range."""
        if self.kind == "token ids":
            return ""
        inner = self.engine_range
        words = str(self.range if inner is None or inner.high is None or inner.high >= _INT else inner)
        return "" if words == "any" else words

    @property
    def docstring_entry(self) -> str:
        """Entry of the parameter in a docstring: its description, default and range."""
        facts = [] if self.default in (None, ()) else [str(self.default)]
        facts += [self.limits] if self.limits else []
        return self.text + (f" ({'; '.join(facts)})." if facts else ".")

    def read(self, value: Any) -> Any:  # any value that a user gives
        """Converts a user's value to the form that SamplingParams has: a single string or any iterable to a tuple, a
        mapping of biases to pairs, numbers of other packages to Python's. Returns other values unchanged, for `check`
        to refuse."""
        if self.kind == "strings":
            if isinstance(value, str):
                return (value,)
            return tuple(value) if isinstance(value, Iterable) and not isinstance(value, bytes | Mapping) else value
        if isinstance(value, Deferred):
            return value
        if self.kind == "token ids":
            listed = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
            return tuple(map(_whole, value)) if listed else value
        if self.kind == "biases":
            return tuple(map(_bias, value.items())) if isinstance(value, Mapping) else value
        if self.kind in ("bool", "order"):
            return value
        if self.kind == "budget" and isinstance(value, str | list):
            return (value,) if isinstance(value, str) else tuple(value)
        return _real(value) if self.kind == "float" else _whole(value)

    def check(self, value: object) -> None:
        """Checks a value against its kind and range. Deferred values are not checked.

        Raises:
            ParameterError: no backend could honour the value.
        """
        if isinstance(value, Deferred):
            return
        if self.kind in ("int", "float"):
            self._number(value, self.kind)
        elif self.kind == "bool":
            if not isinstance(value, bool):
                raise ParameterError(self.name, f"{shown(value)} is neither True nor False.")
        elif self.kind == "order":
            if value not in ORDERS:
                raise ParameterError(self.name, f"{shown(value)} is neither {' nor '.join(map(repr, ORDERS))}.")
        elif self.kind == "budget":
            self._budget(value)
        elif not isinstance(value, tuple | list):
            raise ParameterError(self.name, f"{shown(value)} is not a tuple or list of {_ENTRIES[self.kind]}.")
        elif self.kind == "strings":
            for entry in value:
                if not isinstance(entry, str) or not entry:
                    raise ParameterError(self.name, f"{shown(entry)} is not a non-empty string.")
                if not entry.isascii() and any("\ud800" <= char <= "\udfff" for char in entry):
                    raise ParameterError(self.name, f"{shown(entry)} has unpaired surrogates, which can't be encoded.")
        elif self.kind == "token ids":
            for entry in value:
                self._number(entry, "int")
        else:
            for entry in value:
                if not isinstance(entry, tuple | list) or len(entry) != 2:
                    raise ParameterError(self.name, f"{shown(entry)} is not a pair of a token id and a number.")
                self._number(entry[0], "int")
                _finite(self.name, entry[1])

    def check_engine(self, value: Any) -> None:  # of the type that `kind` names
        """Checks a value, which has passed `check`, against the limits of an engine of this process.

        Raises:
            ParameterError: an engine of this process does not accept the value, although another backend may.
        """
        if isinstance(value, Deferred):
            raise ParameterError(self.name, f"{value!r} is only known when the program runs.")
        if self.max_entries is not None and len(value) > self.max_entries:
            raise ParameterError(self.name, f"{len(value):,} entries, the limit is {self.max_entries:,}.")
        if self.engine_range is not None:
            for number in (bias for _, bias in value) if self.kind == "biases" else (value,):
                if not isinstance(number, tuple) and number not in self.engine_range:
                    problem = f"{shown(number)} is outside an engine's range: {self.engine_range}."
                    raise ParameterError(self.name, problem, hint=self.hint)

    def _budget(self, value: object) -> None:
        if not isinstance(value, tuple):
            self._number(value, "int")
            return
        text = value[0] if len(value) == 1 else value  # a record's
        found = _BUDGET.fullmatch(text) if isinstance(text, str) else None
        if found is None or (found[2] == "%" and float(found[1]) > 100):
            problem = f"{shown(text)} is neither seconds, such as '30s', nor a share of max_tokens, such as '50%'."
            raise ParameterError(self.name, problem, hint="A number of tokens is a whole number.")

    def _number(self, value: Any, kind: Kind) -> None:
        if isinstance(value, bool) or not isinstance(value, int if kind == "int" else int | float):
            raise ParameterError(self.name, f"{shown(value)} is not a {'whole ' * (kind == 'int')}number.")
        if kind == "float":
            _finite(self.name, value)
        if value not in self.range:
            raise ParameterError(self.name, f"{shown(value)} is outside its range: {self.range}.")


ORDERS: Final = get_args(SamplingOrder)
_BUDGET = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(s|%)", re.ASCII)
_ENTRIES = {"strings": "strings", "token ids": "token ids", "biases": "pairs of a token id and a number"}


def _finite(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ParameterError(name, f"{shown(value)} is not a number.")
    if not -sys.float_info.max <= value <= sys.float_info.max:  # false for NaN, too
        raise ParameterError(name, f"{shown(value)} is not a finite number.")


def _whole(value: Any) -> Any:
    """Converts an integer of another package (numpy, torch) to `int`; returns other values unchanged."""
    return value if isinstance(value, bool) or not isinstance(value, numbers.Integral) else int(value)


def _real(value: Any) -> Any:
    """Converts a number to `float`; returns other values, and numbers that are too large, unchanged."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return value
    try:
        return float(value)
    except OverflowError:
        return value


def _bias(entry: tuple[Any, Any]) -> tuple[Any, Any]:
    """Entry of `logit_bias` as a pair of numbers. Token ids may be strings, as they are keys of an object in JSON."""
    token, bias = entry
    return int(token) if isinstance(token, str) and token.isdecimal() else _whole(token), _real(bias)


PARAMETERS: Final = (
    Parameter(
        "max_tokens", "int", 128, "maximum number of tokens to generate",
        Range(0), engine_range=Range(0, _INT), alias="max_new_tokens",
    ),
    Parameter(
        "min_tokens", "int", 0, "no end of sequence and no stop before this many tokens",
        Range(0), engine_range=Range(0, _INT), alias="min_new_tokens", places=("gen", "hooks", "sampling_params"),
    ),
    Parameter("n", "int", 1, "number of independent samples", Range(1), engine_range=Range(1, 256)),
    Parameter(
        "stop", "strings", (),
        "text, or a list of texts, that ends the generation and is not part of the result", max_entries=64,
    ),
    Parameter("stop_token_ids", "token ids", (), "token ids that end the generation", Range(0), max_entries=1024),
    Parameter(
        "stop_regex", "strings", (),
        "patterns of Python's `re` that end the generation as soon as its text has a match",
        max_entries=32,
    ),
    Parameter(
        "temperature", "float", 1.0, "randomness of the draws; 0 always takes the likeliest token",
        Range(0), engine_range=Range(0, 100),
    ),
    Parameter(
        "top_p", "float", 1.0, "draw from the likeliest tokens whose probabilities add up to this",
        Range(0, 1), engine_range=Range(0, 1, above=True), hint="0 leaves no token; temperature=0 is greedy decoding.",
    ),
    Parameter(
        "top_k", "int", -1,
        "draw from this many of the likeliest tokens; -1 or 0 for all", Range(-1), engine_range=Range(-1, _INT),
    ),
    Parameter(
        "min_p", "float", 0.0,
        "leave out tokens less likely than this share of the likeliest one's probability", Range(0, 1),
    ),
    Parameter(
        "frequency_penalty", "float", 0.0,
        "subtracted from a token's logit for each time that the output has it", Range(-2, 2),
    ),
    Parameter(
        "presence_penalty", "float", 0.0,
        "subtracted once from the logit of each token in the output", Range(-2, 2),
    ),
    Parameter("ignore_eos", "bool", False, "continue after an end-of-sequence token"),
    Parameter(
        "return_logprob", "bool", False, "report tokens' log-probabilities in the metadata, `s.get_meta_info(name)`",
        places=_LOGPROB,
    ),
    Parameter(
        "logprob_start_len", "int", -1,
        "with log-probabilities, also of the prompt's from this one on; -1 for none",
        Range(-1), engine_range=Range(-1, _INT), places=_LOGPROB,
    ),
    Parameter(
        "top_logprobs_num", "int", 0,
        "also log-probabilities of this many likeliest tokens at each position; with `max_tokens=0`, at the next one",
        Range(0), engine_range=Range(0, 256), places=_LOGPROB,
    ),
    Parameter(
        "return_text_in_logprobs", "bool", False,
        "with log-probabilities, also each token's text", places=_LOGPROB,
    ),
    Parameter(
        "return_prompt_token_ids", "bool", False,
        "keep the ids of the prompt's tokens, for `s.trajectory()`", places=("gen", "run", "request"),
    ),
    Parameter(
        "return_routed_experts", "bool", False,
        "keep each token's experts; needs `enable_return_routed_experts`",
        places=("gen", "run", "request"),
    ),
    Parameter(
        "return_hidden_states", "bool", False,
        "keep each token's hidden state; needs `enable_return_hidden_states`",
        places=("gen", "run", "request"),
    ),
    Parameter(
        "confidence", "bool", False,
        "record how likely the model found each token, with and without the constraint, for `s.confidence(name)`",
        alias="return_confidence", places=("gen", "request"),
    ),
    Parameter(
        "seed", "int", None, "draws depend only on it and the token's position; without it each call draws anew",
        engine_range=Range(-(2**63), 2**64 - 1), alias="sampling_seed", places=_OURS,
    ),
    Parameter(
        "include_stop", "bool", False,
        "keep the stop that ended the generation in its text", alias="no_stop_trim", places=_OURS,
    ),
    Parameter(
        "repetition_penalty", "float", 1.0,
        "factor for tokens in the prompt or the output; above 1 makes them less likely",
        Range(0, above=True), engine_range=Range(0, 2, above=True), places=_OURS,
    ),
    Parameter(
        "sampling_order", "order", None,
        "where `top_p` counts beside `top_k`: \"joint\" in all tokens, \"sequential\" in those that `top_k` has left; "
        "without it joint, but with `min_p` sequential", places=("gen", "run", "sampling_params"),
    ),
    Parameter(
        "repeats", "int", None,
        "maximum number of equal items in a row in a list of JSON, but for numbers, booleans, null and enums",
        Range(3), engine_range=Range(3, _INT), places=_OURS,
    ),
    Parameter(
        "thinking", "budget", None,
        'tokens that the model may think, after which its thought ends with the sentence; `"30s"`: seconds instead; '
        '`"50%"`: share of `max_tokens`',
        Range(0), engine_range=Range(0, _INT), alias="max_think_tokens", places=_OURS,
    ),
    Parameter(
        "speculation", "bool", True,
        "let an engine with `speculation` draft tokens; none changes by it", places=_OURS,
    ),
    Parameter(
        "logit_bias", "biases", (), "added to the logits of these token ids",
        Range(0), engine_range=Range(-10_000, 10_000), max_entries=4096, places=_OURS,
    ),
    Parameter(
        "lora_path", "strings", (), "name of the adapter (LoRA) that an engine generates with",
        max_entries=1, places=("gen", "run", "request"),
    ),
    Parameter(
        "skip_special_tokens", "bool", True, "leave special tokens out of the text", places=("sampling_params",)
    ),
    Parameter(
        "reasoning_format", "strings", (),
        "type of the model (`qwen3` …), which tells the marks of its thoughts; without it the chat template does",
        max_entries=1, places=("sampling_params",),
    ),
    Parameter(
        "token_ids_logprob", "token ids", (), "with log-probabilities, also of these ids at each position",
        Range(0), max_entries=1024, places=("request",),
    ),
)  # fmt: skip


def named(place: Place, *, sglang: bool = False) -> dict[str, Parameter]:
    """Parameters that can be given in a place, by name.

    Args:
        sglang: whether the names are SGLang's instead of this package's.
    """
    return {each.sglang if sglang else each.name: each for each in PARAMETERS if place in each.places}


# ---------------------------------------------------------------------------------------------- keywords and record


class OneSampleOptions(TypedDict, total=False):
    """SamplingOptions without the number of samples, on which the type of a value depends."""

    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    stop_regex: str | Sequence[str] | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    ignore_eos: bool | None
    return_logprob: bool | None
    logprob_start_len: int | None
    top_logprobs_num: int | None
    return_text_in_logprobs: bool | None
    return_prompt_token_ids: bool | None
    return_routed_experts: bool | None
    return_hidden_states: bool | None
    sampling_order: SamplingOrder | None
    lora_path: str | Sequence[str] | None


class SamplingOptions(OneSampleOptions, total=False):
    """Keywords of `gen` and of the ways to run a program, besides the maximum number of tokens, which SGLang gives two
    names. None is unset."""

    n: int | None


class OneSampleGenOptions(OneSampleOptions, total=False):
    """GenSamplingOptions without the number of samples."""

    min_tokens: int | None
    confidence: bool | None
    seed: int | None
    include_stop: bool | None
    repetition_penalty: float | None
    repeats: int | None
    thinking: int | str | None
    speculation: bool | None
    logit_bias: Mapping[int, float] | None


class GenSamplingOptions(SamplingOptions, OneSampleGenOptions, total=False):
    """Keywords of `gen`."""


class SamplingParams(Record, frozen=True):
    __doc__ = "\n".join((
        "How a generation is sampled and when it ends. UNSET: the backend's default; in parentheses, an engine's.",
        *("", "Attributes:"), *(f"    {each.name}: {each.docstring_entry}" for each in PARAMETERS),
        *("", "Raises:", "    ParameterError: a value that no backend could honour."),
    ))  # fmt: skip

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
    sampling_order: _OrderField = UNSET
    repeats: int | Unset = UNSET
    thinking: int | tuple[str, ...] | Unset = UNSET
    reasoning_format: tuple[str, ...] | Unset = UNSET
    speculation: bool | Unset = UNSET
    logit_bias: tuple[tuple[int, float], ...] | Unset = UNSET
    seed: int | Unset = UNSET
    return_logprob: bool | Unset = UNSET
    logprob_start_len: int | Unset = UNSET
    top_logprobs_num: int | Unset = UNSET
    token_ids_logprob: tuple[int, ...] | Unset = UNSET
    return_text_in_logprobs: bool | Unset = UNSET
    return_prompt_token_ids: bool | Unset = UNSET
    return_routed_experts: bool | Unset = UNSET
    return_hidden_states: bool | Unset = UNSET
    confidence: bool | Unset = UNSET
    lora_path: tuple[str, ...] | Unset = UNSET

    def __post_init__(self) -> None:
        for parameter, value in zip(PARAMETERS, _values(self)):
            if value is not UNSET:
                parameter.check(value)

    @property
    def samples(self) -> int:
        """Number of samples, which is 1 if `n` is not set."""
        return 1 if isinstance(self.n, Unset) else self.n


_values = attrgetter(*(each.name for each in PARAMETERS))


def given_values(params: SamplingParams) -> dict[str, UserValue]:
    """Values of the parameters that are set, by name, in the order of the table."""
    values = zip(PARAMETERS, _values(params))
    return {parameter.name: value for parameter, value in values if value is not UNSET}


def adapter_of(lora_path: tuple[str, ...] | Unset) -> str | None:
    """Name of the adapter in a `lora_path`, or None if that names none or is not set."""
    return None if isinstance(lora_path, Unset) or not lora_path else lora_path[0]


def given_as_data(params: SamplingParams) -> dict[str, UserValue]:
    """Values of the parameters that are set, by name, for requests: with lists instead of tuples."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in given_values(params).items()}


def read_params(values_by_name: Mapping[str, UserValue], names: Mapping[str, Parameter]) -> SamplingParams:
    """SamplingParams with the values that a user has given.

    Args:
        values_by_name: values by name; None for unset.
        names: parameters by the names that `values_by_name` uses for them.

    Raises:
        ParameterError: a value can't be honoured by any backend; the error has the name from `values_by_name`.
    """
    values = {names[name].name: names[name].read(value) for name, value in values_by_name.items() if value is not None}
    try:
        return SamplingParams(**values)
    except ParameterError as error:
        name = next(name for name in values_by_name if names[name].name == error.parameter)
        problem = error.message.removeprefix(f"{error.parameter}: ")
        raise ParameterError(name, problem, hint=error.hint) from None


NO_PARAMS: Final = SamplingParams()


def merge(outer: SamplingParams, inner: SamplingParams) -> SamplingParams:
    """Sampling parameters of `outer`, overridden by those that `inner` sets."""
    if outer is NO_PARAMS or inner is NO_PARAMS:
        return inner if outer is NO_PARAMS else outer
    try:
        return _merged(outer, inner)
    except TypeError:  # symbols of a trace are not hashable
        return _merged.__wrapped__(outer, inner)


@lru_cache(maxsize=4096)
def _merged(outer: SamplingParams, inner: SamplingParams) -> SamplingParams:
    changes = {name: value for name in inner.__struct_fields__ if (value := getattr(inner, name)) is not UNSET}
    return msgspec.structs.replace(outer, **changes)
