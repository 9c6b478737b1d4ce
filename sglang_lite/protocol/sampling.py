"""Sampling parameters: the table of all parameters, and the record of the parameters that a
generation sets.

The table is the single source of SGLang's dictionaries, the checks, the engine's defaults
and limits, the signatures that `help` shows, and the table in docs/sampling.md.
`SamplingOptions`, the docstring of `gen` and records repeat it for readers and type
checkers; tests/protocol/test_sampling_parameters.py verifies that they agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Final, TypeAlias, TypedDict

import msgspec

from sglang_lite.errors import ParameterError
from sglang_lite.protocol.anything import UserValue
from sglang_lite.protocol.parameter import (
    UNSET,
    Exactness,
    Parameter,
    Place,
    Range,
    SamplingOrder,
    Unset,
)
from sglang_lite.protocol.record import Record

# ---------------------------------------------------------------------------------------- the table

if TYPE_CHECKING:
    _OrderField: TypeAlias = SamplingOrder | Unset
    _ExactField: TypeAlias = Exactness | Unset
# msgspec has no union of names and an enumeration of names. UNSET is the default, which records
# leave out.
else:
    _OrderField = SamplingOrder
    _ExactField = Exactness

_COMPLETIONS: tuple[Place, ...] = ("gen", "run", "hooks", "sampling_params", "completions")
_LOGPROB: tuple[Place, ...] = ("gen", "run", "hooks", "request")
_OURS: tuple[Place, ...] = ("gen", "sampling_params")
_EVERYWHERE: tuple[Place, ...] = (*_OURS, "openai")
_HEALED: tuple[Place, ...] = ("gen", "run", "sampling_params", "completions")
_INT = 2**31 - 1
# Where parameters take effect.
_BUILDER = "runtime/core/request_builder.py"
_REQUEST = "runtime/requests/request.py"
_OUTPUT = "runtime/requests/output_builder.py"
_RESOLVED = "runtime/requests/resolved_params.py"
_STEP = "runtime/executor/step_record.py"
_LOGITS = "runtime/executor/logit_adjustments.py"
_SAMPLER = "runtime/executor/sampler.py"
_CORE = "runtime/core/engine_core.py"

PARAMETERS: Final = (
    Parameter(
        "max_tokens", "int", 128, "maximum number of tokens to generate",
        Range(0), engine_range=Range(0, _INT), alias="max_new_tokens", places=_COMPLETIONS, effect_in=(_BUILDER,),
    ),
    Parameter(
        "min_tokens", "int", 0, "no end of sequence and no stop before this many tokens",
        Range(0), engine_range=Range(0, _INT), alias="min_new_tokens",
        places=("gen", "hooks", "sampling_params", "openai"), effect_in=("runtime/core/step_masks.py",),
        changes_draws=True,
    ),
    Parameter(
        "n", "int", 1, "number of independent samples", Range(1), engine_range=Range(1, 256),
        places=_COMPLETIONS, effect_in=(_BUILDER,),
    ),
    Parameter(
        "stop", "strings", (),
        "text, or a list of texts, that ends the generation and is not part of the result", max_entries=64,
        effect_in=(_OUTPUT,),
    ),
    Parameter(
        "stop_token_ids", "token ids", (), "token ids that end the generation", Range(0), max_entries=1024,
        effect_in=(_BUILDER,),
    ),
    Parameter(
        "stop_regex", "strings", (),
        "patterns of Python's `re` that end the generation as soon as its text has a match",
        max_entries=32, effect_in=(_OUTPUT,),
    ),
    Parameter(
        "temperature", "float", 1.0, "randomness of the draws; 0 always takes the likeliest token",
        Range(0), engine_range=Range(0, 100), effect_in=(_STEP, _RESOLVED), changes_draws=True,
    ),
    Parameter(
        "top_p", "float", 1.0, "draw from the likeliest tokens whose probabilities add up to this",
        Range(0, 1), engine_range=Range(0, 1, above=True), hint="0 leaves no token; temperature=0 is greedy decoding.",
        effect_in=(_STEP,), changes_draws=True,
    ),
    Parameter(
        "top_k", "int", -1,
        "draw from this many of the likeliest tokens; -1 or 0 for all", Range(-1), engine_range=Range(-1, _INT),
        effect_in=(_STEP,), changes_draws=True,
    ),
    Parameter(
        "min_p", "float", 0.0,
        "leave out tokens less likely than this share of the likeliest one's probability", Range(0, 1),
        effect_in=(_STEP,), changes_draws=True,
    ),
    Parameter(
        "frequency_penalty", "float", 0.0,
        "subtracted from a token's logit for each time that the output has it", Range(-2, 2), effect_in=(_LOGITS,),
        changes_draws=True,
    ),
    Parameter(
        "presence_penalty", "float", 0.0,
        "subtracted once from the logit of each token in the output", Range(-2, 2), effect_in=(_LOGITS,),
        changes_draws=True,
    ),
    Parameter(
        "ignore_eos", "bool", False, "continue after an end-of-sequence token",
        effect_in=(_BUILDER,), changes_draws=True,
    ),
    Parameter(
        "return_logprob", "bool", False, "report tokens' log-probabilities in the metadata, `s.get_meta_info(name)`",
        places=_LOGPROB, effect_in=(_SAMPLER,),
    ),
    Parameter(
        "logprob_start_len", "int", -1,
        "with log-probabilities, also of the prompt's from this one on; -1 for none",
        Range(-1), engine_range=Range(-1, _INT), places=_LOGPROB, effect_in=(_BUILDER,),
    ),
    Parameter(
        "top_logprobs_num", "int", 0,
        "also log-probabilities of this many likeliest tokens at each position; with `max_tokens=0`, at the next one",
        Range(0), engine_range=Range(0, 256), places=_LOGPROB, effect_in=(_SAMPLER,),
    ),
    Parameter(
        "return_text_in_logprobs", "bool", False,
        "with log-probabilities, also each token's text", places=_LOGPROB, effect_in=(_OUTPUT,),
    ),
    Parameter(
        "return_prompt_token_ids", "bool", False,
        "keep the ids of the prompt's tokens, for `s.trajectory()`", places=("gen", "run", "request"),
        effect_in=(_REQUEST,),
    ),
    Parameter(
        "return_routed_experts", "bool", False,
        "keep each token's experts; needs `enable_return_routed_experts`",
        places=("gen", "run", "request"), effect_in=(_RESOLVED,),
    ),
    Parameter(
        "return_hidden_states", "bool", False,
        "keep each token's hidden state; needs `enable_return_hidden_states`",
        places=("gen", "run", "request"), effect_in=(_RESOLVED,),
    ),
    Parameter(
        "confidence", "bool", False,
        "record how likely the model found each token, with and without the constraint, for `s.confidence(name)`",
        alias="return_confidence", places=("gen", "request"), effect_in=(_REQUEST,),
    ),
    Parameter(
        "exact", "exactness", False,
        "draw texts with the model's own probabilities, for `s.exact(name)`; `\"bound\"`: with a larger `gap` where "
        "True fails; `\"weighted\"`: in one try each, with a weight that makes up for it",
        places=_EVERYWHERE, effect_in=(_CORE,),
    ),
    Parameter(
        "heal", "bool", False,
        "tokenise the prompt's last word again, with the text that follows",
        places=_HEALED, effect_in=(_BUILDER,), changes_draws=True,
    ),
    Parameter(
        "seed", "int", None, "draws depend only on it and the token's position; without it, calls differ",
        engine_range=Range(-(2**63), 2**64 - 1), alias="sampling_seed", places=_EVERYWHERE, effect_in=(_BUILDER,),
    ),
    Parameter(
        "include_stop", "bool", False,
        "keep the stop that ended the generation in its text", alias="no_stop_trim", places=_EVERYWHERE,
        effect_in=(_OUTPUT,),
    ),
    Parameter(
        "repetition_penalty", "float", 1.0,
        "factor for tokens in the prompt or the output; above 1 makes them less likely",
        Range(0, above=True), engine_range=Range(0, 2, above=True), places=_EVERYWHERE, effect_in=(_LOGITS,),
        changes_draws=True,
    ),
    Parameter(
        "sampling_order", "order", None,
        "where `top_p` counts beside `top_k`: \"joint\" in all tokens, \"sequential\" in those that `top_k` has left; "
        "without it joint, but with `min_p` sequential", places=("gen", "run", "sampling_params", "openai"),
        effect_in=(_RESOLVED,), changes_draws=True,
    ),
    Parameter(
        "repeats", "int", None,
        "maximum number of equal items in a row in a list of JSON, but for numbers, booleans, null and enums",
        Range(3), engine_range=Range(3, _INT), places=_OURS, effect_in=(_REQUEST,), changes_draws=True,
    ),
    Parameter(
        "thinking", "budget", None,
        'tokens that the model may think, after which its thought ends with the sentence; `"30s"`: seconds instead; '
        '`"50%"`: share of `max_tokens`',
        Range(0), engine_range=Range(0, _INT), alias="max_think_tokens", places=_OURS, effect_in=(_REQUEST,),
        changes_draws=True,
    ),
    Parameter(
        "speculation", "bool", True,
        "let an engine with `speculation` draft tokens; none changes by it", places=_EVERYWHERE,
        effect_in=("runtime/drafting/drafting.py",),
    ),
    Parameter(
        "logit_bias", "biases", (), "added to the logits of these token ids",
        Range(0), engine_range=Range(-10_000, 10_000), max_entries=4096, places=(*_OURS, "completions"),
        effect_in=(_LOGITS,), changes_draws=True,
    ),
    Parameter(
        "allowed_token_ids", "token ids", (), "draw only these token ids, unless a constraint leaves none of them",
        Range(0), max_entries=16_384, places=("sampling_params", "completions"), effect_in=(_LOGITS,),
        changes_draws=True,
    ),
    Parameter(
        "bad_words", "strings", (),
        "texts whose tokens are never drawn in a row, each with and without a space before it, unless a constraint "
        "leaves nothing else", max_entries=1024, places=("sampling_params", "completions"), effect_in=(_BUILDER,),
        changes_draws=True,
    ),
    Parameter(
        "lora_path", "strings", (), "name of the adapter (LoRA) that an engine generates with",
        max_entries=1, places=("gen", "run", "request"), effect_in=(_BUILDER,),
    ),
    Parameter(
        "skip_special_tokens", "bool", True, "leave special tokens out of the text",
        places=("sampling_params", "openai"), effect_in=(_OUTPUT,),
    ),
    Parameter(
        "reasoning_format", "strings", (),
        "type of the model (`qwen3` …), which tells the marks of its thoughts; without it the chat template does",
        max_entries=1, places=("sampling_params",), effect_in=(_BUILDER,),
    ),
    Parameter(
        "token_ids_logprob", "token ids", (), "with log-probabilities, also of these ids at each position",
        Range(0), max_entries=1024, places=("request",), effect_in=(_SAMPLER,),
    ),
)  # fmt: skip


def parameters_for(place: Place, *, sglang: bool = False) -> dict[str, Parameter]:
    """Returns the parameters that can be given in `place` ("gen" or "run", for example), by name.

    Args:
        sglang: whether the names are SGLang's instead of this package's.
    """
    return {
        each.sglang if sglang else each.name: each for each in PARAMETERS if place in each.places
    }


# Parameters that change which text is drawn, beside the seed and the number of samples.
CHANGE_DRAWS: Final = tuple(each.name for each in PARAMETERS if each.changes_draws)


# ------------------------------------------------------------------------------ keywords and record


class OneSampleOptions(TypedDict, total=False):
    """SamplingOptions without `n`, the number of samples. It is a separate class because the type
    of a variable's value depends on `n`.
    """

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
    heal: bool | None


class SamplingOptions(OneSampleOptions, total=False):
    """Keywords of `gen` and of the functions that run a program. The maximum number of tokens is
    not included, because SGLang has two names for it. None means unset.
    """

    n: int | None


class OneSampleGenOptions(OneSampleOptions, total=False):
    """GenSamplingOptions without the number of samples `n`."""

    min_tokens: int | None
    confidence: bool | None
    exact: Exactness | None
    seed: int | None
    include_stop: bool | None
    repetition_penalty: float | None
    repeats: int | None
    thinking: int | str | None
    speculation: bool | None
    logit_bias: Mapping[int, float] | None


class GenSamplingOptions(SamplingOptions, OneSampleGenOptions, total=False):
    """Keywords of `gen`."""


class SglangOptions(TypedDict, total=False):
    """Keys of SGLang's dictionary `sampling_params`, except the number of samples and constraints.
    None means unset.
    """

    max_new_tokens: int | None
    min_new_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    repetition_penalty: float | None
    sampling_order: SamplingOrder | None
    repeats: int | None
    exact: Exactness | None
    heal: bool | None
    max_think_tokens: int | str | None
    reasoning_format: str | Sequence[str] | None
    speculation: bool | None
    logit_bias: Mapping[str, float] | Mapping[int, float] | None
    allowed_token_ids: Sequence[int] | None
    bad_words: str | Sequence[str] | None
    sampling_seed: int | None
    stop: str | Sequence[str] | None
    stop_regex: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    no_stop_trim: bool | None
    ignore_eos: bool | None
    skip_special_tokens: bool | None


@dataclass
class HookParams:
    """Sampling parameters passed to SGLang's blocking backend hooks, with all defaults filled in."""

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    n: int = 1
    stop: UserValue = ()
    stop_token_ids: UserValue = ()
    stop_regex: UserValue = ()
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


class SamplingParams(Record, frozen=True):
    __doc__ = "\n".join(
        (
            "How a generation is sampled and when it ends. UNSET: the backend's default; in parentheses, an engine's.",
            *("", "Attributes:"),
            *(f"    {each.name}: {each.docstring_entry}" for each in PARAMETERS),
            *("", "Raises:", "    ParameterError: a value that no backend could honour."),
        )
    )

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
    allowed_token_ids: tuple[int, ...] | Unset = UNSET
    bad_words: tuple[str, ...] | Unset = UNSET
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
    exact: _ExactField = UNSET
    heal: bool | Unset = UNSET
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
    """Returns the values of the parameters that are set, by name, in the order of the table."""
    values = zip(PARAMETERS, _values(params))
    return {parameter.name: value for parameter, value in values if value is not UNSET}


def adapter_of(lora_path: tuple[str, ...] | Unset) -> str | None:
    """Returns the name of the adapter in a `lora_path`, or None if there is none."""
    return None if isinstance(lora_path, Unset) or not lora_path else lora_path[0]


def given_as_data(params: SamplingParams) -> dict[str, UserValue]:
    """Returns the values of the parameters that are set, by name. Tuples become lists, as requests
    need them.
    """
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in given_values(params).items()
    }


def read_params(
    values_by_name: Mapping[str, UserValue], names: Mapping[str, Parameter]
) -> SamplingParams:
    """Creates SamplingParams from the values that a user has given.

    Args:
        values_by_name: values by name; None for unset.
        names: parameters by the names used in `values_by_name`.

    Raises:
        ParameterError: a value can't be honoured by any backend. The error has the name from
            `values_by_name`.
    """
    values = {
        names[name].name: names[name].read(value)
        for name, value in values_by_name.items()
        if value is not None
    }
    try:
        return SamplingParams(**values)
    except ParameterError as error:
        name = next(name for name in values_by_name if names[name].name == error.parameter)
        problem = error.message.removeprefix(f"{error.parameter}: ")
        raise ParameterError(name, problem, hint=error.hint) from None


NO_PARAMS: Final = SamplingParams()


def merge(outer: SamplingParams, inner: SamplingParams) -> SamplingParams:
    """Returns the sampling parameters of `outer`, overridden by those that `inner` sets."""
    if outer is NO_PARAMS or inner is NO_PARAMS:
        return inner if outer is NO_PARAMS else outer
    try:
        return _merge_cached(outer, inner)
    except TypeError:  # symbols of a trace are not hashable
        return _merge_cached.__wrapped__(outer, inner)


@lru_cache(maxsize=4096)
def _merge_cached(outer: SamplingParams, inner: SamplingParams) -> SamplingParams:
    changes = {
        name: value
        for name in inner.__struct_fields__
        if (value := getattr(inner, name)) is not UNSET
    }
    return msgspec.structs.replace(outer, **changes)
