"""Definition of a sampling parameter (a row of the table in sampling.py), and the checks of its
values.
"""

from __future__ import annotations

import enum
import numbers
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final, Literal, TypeAlias, get_args

from sglang_lite.errors import ParameterError, TraceError, short_repr


class Unset(enum.Enum):
    """Type of UNSET, the value of a parameter that the caller did not give. UNSET differs from
    every default.
    """

    UNSET = "UNSET"

    def __repr__(self) -> str:
        return "UNSET"

    # faster than Enum's, which is written in Python; most parameters are UNSET
    __hash__ = object.__hash__


UNSET: Final = Unset.UNSET


class Deferred:
    """Base of symbols: placeholders in a trace for values that are only known during a run. They
    are not checked.
    """

    __slots__ = ()


def check_known(name: str, *values: object) -> None:
    """Raises TraceError if one of `values` is a symbol. Called where a trace needs the actual
    value.
    """
    for value in values:
        if isinstance(value, Deferred):
            raise TraceError(
                f"{name} is {value!r:.60}, which only a run knows.", hint="Trace it with arguments."
            )


# A budget is a number of tokens, or a text that records store as a one-tuple: seconds ("30s"), or a
# share of `max_tokens` ("50%").
Kind: TypeAlias = Literal[
    "int", "float", "bool", "strings", "token ids", "biases", "order", "budget", "exactness"
]
# Whether top-p, if combined with top-k, refers to the mass of all tokens or only of those that
# top-k has kept.
SamplingOrder: TypeAlias = Literal["joint", "sequential"]
# Whether texts are drawn with the model's own probabilities. "bound" accepts a larger error if
# reducing it takes too long. "weighted" draws each text in one attempt, and gives it a weight that
# corrects for that.
Exactness: TypeAlias = bool | Literal["bound", "weighted"]
# Places where a parameter can be given. gen: `gen`. run: `run`, `run_batch` …, `gen_int` and
# `gen_string`. hooks: SGLang's blocking hooks of a backend, and `gen` by position. sampling_params:
# a key of the dictionary for `Engine.generate`. request: a keyword of `Engine.generate`. openai: a
# field of OpenAI's routes. completions: a field of OpenAI's routes for chats and texts only.
Place: TypeAlias = Literal[
    "gen", "run", "hooks", "sampling_params", "request", "openai", "completions"
]

_INT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Range:
    """Range of numbers from `low` to `high`; None means unbounded. `above` excludes `low` itself."""

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
        default: default of an in-process engine, or None if it has none. Remote models have
            their provider's.
        text: description for docstrings and docs/sampling.md.
        range: range of a number, or of the numbers in a list, for all backends. Checked when
            a SamplingParams is created.
        engine_range: narrower range that an in-process engine accepts, or None. Checked by
            the engine.
        max_entries: maximum number of entries that an engine accepts in a list, or None.
        hint: hint for a value outside the engine's range.
        alias: SGLang's name, if it differs.
        places: places where the parameter can be given.
        effect_in: files of the package that read it and implement its effect. tests/effects
            hides the value from each of them in turn and checks that the effect disappears.
        changes_draws: whether it changes the distribution that texts are drawn from, or where they
            end.
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
    places: tuple[Place, ...] = ("gen", "run", "hooks", "sampling_params", "openai")
    _: KW_ONLY
    effect_in: tuple[str, ...]
    changes_draws: bool = False

    @property
    def sglang(self) -> str:
        """Name of the parameter in SGLang."""
        return self.alias or self.name

    @property
    def limits(self) -> str:
        """The parameter's range in words: the engine's range if it is narrower in practice,
        otherwise the range for all backends. Empty if the parameter has no range.
        """
        if self.kind == "token ids":
            return ""
        inner = self.engine_range
        words = str(
            self.range if inner is None or inner.high is None or inner.high >= _INT else inner
        )
        return "" if words == "any" else words

    @property
    def docstring_entry(self) -> str:
        """Entry of the parameter in a docstring: its description, default and range."""
        facts = [] if self.default in (None, ()) else [str(self.default)]
        facts += [self.limits] if self.limits else []
        return self.text + (f" ({'; '.join(facts)})." if facts else ".")

    def read(self, value: Any) -> Any:  # any value that a user gives
        """Converts a user's value to the form used in SamplingParams. For example, a single string
        becomes a tuple of strings, and a NumPy number becomes a Python number. Returns values that
        it can't convert unchanged, for `check` to reject.
        """
        if self.kind == "strings":
            if isinstance(value, str):
                return (value,)
            return (
                tuple(value)
                if isinstance(value, Iterable) and not isinstance(value, bytes | Mapping)
                else value
            )
        if isinstance(value, Deferred):
            return value
        if self.kind == "token ids":
            listed = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
            return tuple(map(_to_int, value)) if listed else value
        if self.kind == "biases":
            return tuple(map(_to_bias, value.items())) if isinstance(value, Mapping) else value
        if self.kind in ("bool", "order", "exactness"):
            return value
        if self.kind == "budget" and isinstance(value, str | list):
            return (value,) if isinstance(value, str) else tuple(value)
        return _to_float(value) if self.kind == "float" else _to_int(value)

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
                raise ParameterError(self.name, f"{short_repr(value)} is neither True nor False.")
        elif self.kind == "order":
            if value not in ORDERS:
                raise ParameterError(
                    self.name, f"{short_repr(value)} is neither {' nor '.join(map(repr, ORDERS))}."
                )
        elif self.kind == "exactness":
            if not isinstance(value, bool) and value not in ("bound", "weighted"):
                raise ParameterError(
                    self.name,
                    f"{short_repr(value)} is neither True, False, 'bound' nor 'weighted'.",
                )
        elif self.kind == "budget":
            self._budget(value)
        elif not isinstance(value, tuple | list):
            raise ParameterError(
                self.name, f"{short_repr(value)} is not a tuple or list of {_ENTRIES[self.kind]}."
            )
        elif self.kind == "strings":
            for entry in value:
                if not isinstance(entry, str) or not entry:
                    raise ParameterError(
                        self.name, f"{short_repr(entry)} is not a non-empty string."
                    )
                if not entry.isascii() and any("\ud800" <= char <= "\udfff" for char in entry):
                    raise ParameterError(
                        self.name,
                        f"{short_repr(entry)} has unpaired surrogates, which can't be encoded.",
                    )
        elif self.kind == "token ids":
            for entry in value:
                self._number(entry, "int")
        else:
            for entry in value:
                if not isinstance(entry, tuple | list) or len(entry) != 2:
                    raise ParameterError(
                        self.name, f"{short_repr(entry)} is not a pair of a token id and a number."
                    )
                self._number(entry[0], "int")
                _finite(self.name, entry[1])

    def check_engine(self, value: Any) -> None:  # a value of this parameter's kind
        """Checks a value that has passed `check` against the limits of an in-process engine.

        Raises:
            ParameterError: an in-process engine does not accept the value, although another
                backend may.
        """
        if isinstance(value, Deferred):
            raise ParameterError(self.name, f"{value!r} is only known when the program runs.")
        if self.max_entries is not None and len(value) > self.max_entries:
            raise ParameterError(
                self.name, f"{len(value):,} entries, the limit is {self.max_entries:,}."
            )
        if self.engine_range is not None:
            for number in (bias for _, bias in value) if self.kind == "biases" else (value,):
                if not isinstance(number, tuple) and number not in self.engine_range:
                    problem = (
                        f"{short_repr(number)} is outside an engine's range: {self.engine_range}."
                    )
                    raise ParameterError(self.name, problem, hint=self.hint)

    def _budget(self, value: object) -> None:
        if not isinstance(value, tuple):
            self._number(value, "int")
            return
        text = value[0] if len(value) == 1 else value  # a record's
        found = _BUDGET.fullmatch(text) if isinstance(text, str) else None
        if found is None or (found[2] == "%" and float(found[1]) > 100):
            problem = f"{short_repr(text)} is neither seconds, such as '30s', nor a share of max_tokens, such as '50%'."
            raise ParameterError(self.name, problem, hint="A number of tokens is a whole number.")

    def _number(self, value: Any, kind: Kind) -> None:
        if isinstance(value, bool) or not isinstance(value, int if kind == "int" else int | float):
            problem = f"{short_repr(value)} is not a {'whole ' * (kind == 'int')}number."
            raise ParameterError(self.name, problem, hint=_hint_without_quotes(self.name, value))
        if kind == "float":
            _finite(self.name, value)
        if value not in self.range:
            raise ParameterError(
                self.name, f"{short_repr(value)} is outside its range: {self.range}."
            )


ORDERS: Final = get_args(SamplingOrder)
_BUDGET = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(s|%)", re.ASCII)
_NUMBER = re.compile(r"-?\d{1,9}(?:\.\d{1,9})?", re.ASCII)
_ENTRIES = {
    "strings": "strings",
    "token ids": "token ids",
    "biases": "pairs of a token id and a number",
}


def _hint_without_quotes(name: str, value: Any) -> str:
    """Returns a hint to write a number without quotes, or "" if `value` is not a number in a
    string.
    """
    text = value.strip() if isinstance(value, str) else ""
    return f"Write it without quotes: {name}={text}." if _NUMBER.fullmatch(text) else ""


def _finite(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ParameterError(name, f"{short_repr(value)} is not a number.")
    if not -sys.float_info.max <= value <= sys.float_info.max:  # also false for NaN
        raise ParameterError(name, f"{short_repr(value)} is not a finite number.")


def _to_int(value: Any) -> Any:
    """Converts an integer of another package (numpy, torch) to `int`. Returns other values
    unchanged.
    """
    return (
        value if isinstance(value, bool) or not isinstance(value, numbers.Integral) else int(value)
    )


def _to_float(value: Any) -> Any:
    """Converts a number to `float`. Returns other values, and numbers that are too large,
    unchanged.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return value
    try:
        return float(value)
    except OverflowError:
        return value


def _to_bias(entry: tuple[Any, Any]) -> tuple[Any, Any]:
    """Converts an entry of `logit_bias` to a pair of numbers. Token ids may be strings, because
    they are object keys in JSON.
    """
    token, bias = entry
    return int(token) if isinstance(token, str) and token.isdecimal() else _to_int(
        token
    ), _to_float(bias)
