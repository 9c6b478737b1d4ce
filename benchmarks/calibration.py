"""Calibration of `state.confidence`: how often the fields of an extraction are right that the model
is so sure of.

    python benchmarks/calibration.py [--texts 5] [--model MODEL] [--show]

The texts are those of extraction.py with plain types, whose right values are here. Greedy; without
a model it is the default one, in float32. The expected calibration error (ECE) is the mean
difference, over five bins of equal width and weighted by their fields, between the confidence and
the share of right fields.
"""

from __future__ import annotations

import argparse
import json
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from extraction import PLAIN, Event, Person, Product, Review, Ticket, Weather

import sglang_lite as sgl
from sglang_lite.lang.confidence import Confidence

BINS = 5
RIGHT: dict[Any, tuple[tuple[str, ...], list[tuple[object, ...]]]] = {
    Person: (("name", "age", "city"), [
        ("Clara Bauer", 34, "Graz"), ("Tom", 61, "Whitby"), ("Aisha Khan", 27, "Leeds"), ("Marco Rossi", 19, "Turin"),
        ("Jean Petit", 45, "Lyon"),
    ]),
    Event: (("date", "place"), [
        ("2024-06-12", "Rose Cottage"), ("2025-03-03", "town hall of Bath"), ("2026-07-01", None),
        ("2025-09-20", "Verona"), ("2024-11-05", "Emma's"),
    ]),
    Product: (("name", "price", "currency", "in_stock"), [
        ("Oak desk", 249.0, "EUR", True), ("red bicycle", 399.99, "USD", False), ("Kettle Pro", 35.5, "GBP", True),
        ("garden chairs", 24.9, "EUR", True), ("lamp", 19.0, "USD", False),
    ]),
    Review: (("product", "mood", "stars"), [
        ("headphones", "good", 5), ("kettle", "bad", 1), ("tent", "mixed", 3), ("coffee grinder", "good", 4),
        ("phone case", "bad", 2),
    ]),
    Weather: (("place", "temperature", "wind_kmh"), [
        ("Oslo", -3.5, 15), ("Cairo", 38.0, 10), ("Singapore", 27.2, 60), ("Reykjavik", 4.0, 5), ("Denver", 12.0, 20),
    ]),
    Ticket: (("urgent", "room", "contact"), [
        (False, "312", None), (True, None, None), (False, None, None), (True, "server room", None),
        (False, "hall", "Mr Lee"),
    ]),
}  # fmt: skip


@sgl.function
def extract(s: Any, kind: Any, text: str) -> None:
    fields = ", ".join(typing.get_type_hints(kind))
    s += sgl.user(f"Extract {fields} as JSON from this text:\n{text}")
    s += sgl.assistant(sgl.gen("value", type=kind, max_tokens=160, temperature=0, confidence=True))


def is_right(value: object, expected: object) -> bool:
    """Texts may differ in case, in "the" before them, and in a point at the end."""
    if isinstance(value, str) and isinstance(expected, str):
        value, expected = (
            text.lower().rstrip(".").removeprefix("the ") for text in (value, expected)
        )
    return value == expected


def calibration_error(fields: Sequence[tuple[float, bool]]) -> float:
    """ECE of fields, each with the confidence in it and whether it is right."""
    bins: list[list[tuple[float, bool]]] = [[] for _ in range(BINS)]
    for prob, right in fields:
        bins[min(int(prob * BINS), BINS - 1)].append((prob, right))
    gaps = (abs(sum(prob for prob, _ in each) - sum(right for _, right in each)) for each in bins)
    return sum(gaps) / len(fields)


def row(title: str, fields: Sequence[tuple[float, bool]]) -> str:
    groups = (
        [prob for prob, right in fields if right in wanted]
        for wanted in ((True, False), (True,), (False,))
    )
    means = " | ".join(f"{sum(each) / len(each):.2f}" if each else "–" for each in groups)
    right = sum(right for _, right in fields)
    return f"| {title} | {right} of {len(fields)} | {means} | {calibration_error(fields):.2f} |"


def fields_of(
    kind: Any, state: Any, expected: Sequence[object]
) -> Iterator[tuple[str, Any, Confidence, bool]]:
    """Yields the fields of an answer whose right values are known, but for optional ones that were
    left out: each with its value, the confidence in it, and whether it is right.
    """
    sure, value = state.confidence("value"), json.loads(state.raw("value"))
    for name, each in zip(RIGHT[kind][0], expected):
        if name in sure.parts:
            yield name, value[name], sure[name], is_right(value[name], each)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", type=int, default=5, help="how many of each type")
    parser.add_argument("--model")
    parser.add_argument("--show", action="store_true", help="each field")
    options = parser.parse_args()
    choices: list[tuple[float, bool]] = []
    others: list[tuple[float, bool]] = []
    given = [(kind, text) for kind in RIGHT for text in PLAIN[kind][: options.texts]]
    expected = [each for _, values in RIGHT.values() for each in values[: options.texts]]
    with sgl.Engine(options.model, dtype="float32", in_process=True) as engine:
        states = extract.run_batch(
            [{"kind": kind, "text": text} for kind, text in given], backend=engine
        )
        for (kind, _), state, values in zip(given, states, expected):
            for name, value, leaf, right in fields_of(kind, state, values):
                (others if leaf.probs is None else choices).append((leaf.prob, right))
                if options.show:
                    print(
                        f"{kind.__name__}.{name}: {value!r} {leaf.prob:.3f} {'right' if right else 'wrong'}"
                    )
    print(
        "| fields | right | mean confidence | of right ones | of wrong ones | ECE |\n|---|---|---|---|---|---|"
    )
    for title, fields in (
        ("enums and booleans", choices),
        ("texts and numbers", others),
        ("all", choices + others),
    ):
        print(row(title, fields))


if __name__ == "__main__":
    main()
