"""Metrics of an evaluation: how often the results of a program are right, according to the labels
of its rows.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

from sglang_lite.protocol import ParameterError
from sglang_lite.protocol.anything import Json

KINDS: Final = ("exact", "accuracy", "calibration", "judge")
_NUMBER: Final = re.compile(r"[+-]?\d+(\.\d+)?(e[+-]?\d{1,3})?", re.ASCII)
_BINS: Final = 10  # of a calibration


@dataclass(frozen=True, slots=True)
class Metric:
    """Metric of an evaluation: its kind, which value of a result it rates, and the column with the
    right value.

    Attributes:
        kind: "exact", "accuracy", "calibration" or "judge".
        value: where the value is in a result: the names of a variable and of members in it, joined
            by dots; for a judge, FILE[:FUNCTION] of its program.
        label: name of the column with the right value; empty for a judge.
    """

    kind: str
    value: str
    label: str

    @property
    def name(self) -> str:
        return f"{self.kind} of {self.value}" if self.label else f"judge {self.value}"


@dataclass(frozen=True, slots=True)
class Score:
    """Value of a metric over rows.

    Attributes:
        metric: the metric's name.
        value: mean of the rows' scores, from 0 to 1; for a calibration, the expected calibration
            error.
        low, high: 95 % interval of a mean; None for a calibration.
        rows: number of rows.
    """

    metric: str
    value: float
    low: float | None
    high: float | None
    rows: int


def parse_metric(text: str) -> Metric:
    """Parses the metric of a flag: `exact:VALUE=COLUMN`, `accuracy:VALUE=COLUMN`,
    `calibration:VALUE=COLUMN`, or `judge:FILE[:FUNCTION]`. Without `=COLUMN`, the column has the
    value's name.

    Raises:
        ParameterError: the text has another form.
    """
    kind, colon, rest = text.partition(":")
    if kind not in KINDS or not colon or not rest:
        raise ParameterError(
            "--metric",
            f"{text!r:.80} is no metric.",
            hint="Give exact:VARIABLE=COLUMN, accuracy:…, calibration:… or judge:FILE[:FUNCTION].",
        )
    if kind == "judge":
        return Metric(kind, rest, "")
    value, equals, label = rest.partition("=")
    if not value or (equals and not label):
        raise ParameterError(
            "--metric", f"{text!r:.80} names no {'column' if value else 'variable'}."
        )
    return Metric(kind, value, label or value)


def value_at(result: Mapping[str, Json], path: str) -> Json:
    """Returns the value at a dotted path in a result, such as `variable.member.0`.

    Raises:
        LookupError: the result has no such value.
    """
    if path in result:
        return result[path]
    found: Json = result
    for name in path.split("."):
        if isinstance(found, list) and name.isdecimal():
            found = found[int(name)]
        elif isinstance(found, Mapping):
            found = found[name]
        else:
            raise LookupError(name)
    return found


def has_right_value(
    metric: Metric, result: Mapping[str, Json], columns: Mapping[str, Json]
) -> bool:
    """Returns True if a result has the right value. "exact" compares as JSON. The others ignore
    case and whitespace in texts, and treat a number like its text.

    Raises:
        LookupError: the result has no such value.
    """
    compared = _sorted_json if metric.kind == "exact" else _normalize_value
    return compared(value_at(result, metric.value)) == compared(columns[metric.label])


def _sorted_json(value: Json) -> str:
    return json.dumps(value, sort_keys=True)


def _normalize_value(value: Json) -> str:
    if isinstance(value, list):
        return _sorted_json([*map(_normalize_value, value)])
    if isinstance(value, Mapping):
        return _sorted_json({name: _normalize_value(each) for name, each in value.items()})
    text = " ".join((value if isinstance(value, str) else _sorted_json(value)).split()).casefold()
    return str(Decimal(text).normalize()) if _NUMBER.fullmatch(text) else text


def mean_score(metric: str, scores: Sequence[float]) -> Score:
    """Computes the mean of scores from 0 to 1, with Wilson's interval (Wilson 1927), which is
    accurate enough for few rows.
    """
    n = len(scores)
    p = math.fsum(scores) / len(scores)
    z = 1.96
    d = 1 + z * z / n
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / d
    middle = (p + z * z / (2 * n)) / d
    return Score(metric, p, max(middle - half, 0), min(middle + half, 1), n)


def calibration_error(metric: str, judged: Iterable[tuple[float, bool]]) -> Score:
    """Computes the expected calibration error (Guo et al. 2017, arXiv:1706.04599) from confidences
    and whether each value was right, in ten bins of equal width.
    """
    bins: list[list[tuple[float, bool]]] = [[] for _ in range(_BINS)]
    for confidence, was_right in judged:
        bins[min(int(confidence * _BINS), _BINS - 1)].append((confidence, was_right))
    rows = sum(map(len, bins))
    error = sum(abs(sum(sure - was_right for sure, was_right in each)) for each in bins) / rows
    return Score(metric, error, None, None, rows)


def format_scores(scores: Sequence[Score]) -> str:
    """Formats scores as a text table."""
    lines = [("metric", "score", "95 % interval", "rows"), *map(format_score_cells, scores)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "".join(
        "  ".join(
            [name.ljust(widths[0]), *(text.rjust(width) for text, width in zip(rest, widths[1:]))]
        )
        + "\n"
        for name, *rest in lines
    )


def format_score_cells(score: Score) -> tuple[str, str, str, str]:
    """Returns the table cells for a score: metric, value, interval and number of rows."""
    if score.low is None or score.high is None:
        return score.metric, f"{score.value:.3f}", "", str(score.rows)
    return (
        score.metric,
        f"{score.value:.1%}",
        f"{score.low:.1%} to {score.high:.1%}",
        str(score.rows),
    )
