"""Exact draws beside what Python's `re` reads from the model's free text.

    python benchmarks/exact_reading.py [--model FILE] [--free 20000] [--drawn 2000] [--dtype float32]

For each of 30 languages: free texts are generated and read, and as many texts as given are drawn
exactly and under masks. A text is read if free text begins with it: the longest one, in whole
words. Printed are the share of free texts from which something was read, the total variation
distance of exact and masked draws from what was read, and the p-value of a chi-square test that
exact draws have the same distribution. The noise of that many perfect draws is not subtracted.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import sglang_lite as sgl

_WORD = "0-9A-Za-z\u00c0-\u053f"


@dataclass(frozen=True)
class Case:
    prompt: str
    pattern: str
    tokens: int = 8  # of free text that are read


PRODUCTS = "6 * 4 = 24\n3 * 9 = 27\n5 * 5 = 25\n7 * 8 ="
DATES = "Born: 1984-03-12\nBorn: 1990-11-02\nBorn: 1978-06-30\nBorn:"
JSON = 'Tom: {"pet": "cat"}\nAnn: {"pet": "dog"}\nBob: {"pet": "cat"}\nEva:'
MOODS = "I won: happy\nI lost: sad\nHe hit me: angry\nThe dog died: sad\nIt is my birthday:"
ANSWERS = "Is snow white? yes\nIs fire cold? no\nIs it Monday? maybe\nIs the sea deep?"
COLOURS = "grass: green\nsky: blue\nblood: red\nsnow: white\nnight: black\ncoal:"
CAPITALS = "Italy: Rome\nSpain: Madrid\nGreece: Athens\nFrance:"
PRICES = "tea: 2.50\ncoffee: 3.20\nwater: 1\nmilk:"
GREEK = "alpha: α\nbeta: β\ngamma: γ\nbeta:"
FRENCH = "Monday: lundi\nTuesday: mardi\nsummer: été\nwinter: hiver\nsummer:"
SHAPES = "o: circle\n#: square\n^: triangle\n#:"
TIMES = "lunch: 12:30\nbreakfast: 07:15\ndinner:"
CASES = [
    Case(PRODUCTS, r" \d{1,3}"),
    Case(PRODUCTS, r" (5|56|54|15|48|4)"),
    Case(PRODUCTS, r" \d+"),
    Case(PRODUCTS, r" [1-9]\d?"),
    Case(DATES, r" \d{4}-\d{2}-\d{2}", 16),
    Case(DATES, r" (19|20)\d\d"),
    Case(DATES, r" \d{4}"),
    Case(JSON, r' \{"pet": "(cat|dog|bird|fish)"\}', 14),
    Case(JSON, r' \{"pet": "[a-z]+"\}', 16),
    Case(MOODS, " (happy|sad|angry|good|great)"),
    Case(MOODS, " [a-z]{2,4}"),
    Case(MOODS, " [a-z]+"),
    Case(MOODS, " (happy|happy and sad|sad|so happy)"),
    Case(ANSWERS, " (yes|no|maybe)"),
    Case(ANSWERS, " (no|not|not at all|nobody knows|yes)"),
    Case(ANSWERS, " [ymn][a-z]*"),
    Case(ANSWERS, "( yes)?"),
    Case(COLOURS, " (black|red|blue|green|white|gray|brown)"),
    Case(COLOURS, " [a-z]{3,5}"),
    Case(COLOURS, " b[a-z]+"),
    Case(CAPITALS, " (Paris|Lyon|Nice|Rome)"),
    Case(CAPITALS, " [A-Z][a-z]+"),
    Case(CAPITALS, " [A-Z][a-z]+( [A-Z][a-z]+)?"),
    Case(PRICES, r" \d(\.\d\d)?"),
    Case(PRICES, r" \d+\.\d{2}"),
    Case(GREEK, " [α-ω]"),
    Case(FRENCH, " (été|hiver|lundi|mardi|printemps)"),
    Case(FRENCH, " [a-zé]{3,6}"),
    Case(SHAPES, " (circle|square|triangle|square and circle|line)"),
    Case(TIMES, r" \d\d:\d\d"),
]


def read(pattern: str, text: str) -> str | None:
    """The longest text of a regex with which free text begins."""
    for end in range(len(text), -1, -1):
        in_word = end and re.match(f"[{_WORD}]{{2}}", text[end - 1 : end + 1])
        if not in_word and re.fullmatch(pattern, text[:end]):
            return text[:end]
    return None


def distance(one: Counter[str], other: Counter[str]) -> float:
    """Total variation distance of two distributions, given by counts."""
    totals = one.total() or 1, other.total() or 1
    return 0.5 * sum(
        abs(one[text] / totals[0] - other[text] / totals[1]) for text in {*one, *other}
    )


def chi_square_p(one: Counter[str], other: Counter[str]) -> float:
    """The p-value of the hypothesis that counts have the same distribution. Cells in which fewer
    than five are expected are put together; Wilson and Hilferty's approximation.
    """
    totals = one.total(), other.total()
    share = totals[0] / sum(totals)
    cells: list[list[int]] = []
    rest = [0, 0]
    for text in {*one, *other}:
        both = one[text] + other[text]
        if both * min(share, 1 - share) < 5:
            rest[0] += one[text]
            rest[1] += other[text]
        else:
            cells.append([one[text], other[text]])
    cells += [rest] if sum(rest) * min(share, 1 - share) >= 5 else []
    freedom = len(cells) - 1
    if freedom < 1:
        return 1.0
    statistic = sum(
        (count - both * part) ** 2 / (both * part)
        for cell in cells
        for both in [sum(cell)]
        for count, part in zip(cell, (share, 1 - share))
    )
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5
    return 0.5 * math.erfc(z / 2**0.5)


@sgl.function
def generate(s: sgl.ProgramState, case: Case, count: int, way: str, seed: int) -> None:
    if way == "free":
        s += case.prompt + sgl.gen("texts", max_tokens=case.tokens, n=count, seed=seed)
    else:
        s += case.prompt + sgl.gen(
            "texts",
            regex=case.pattern,
            max_tokens=case.tokens,
            n=count,
            exact=way == "exact",
            seed=seed,
        )


def generate_texts(engine: sgl.Engine, case: Case, count: int, way: str) -> list[str]:
    each = min(count, 250)
    first = {"free": 0, "exact": 5_000_000, "masked": 9_000_000}[way]
    asked = [(case, each, way, first + i) for i in range(math.ceil(count / each))]
    states = generate.run_batch(asked, backend=engine)
    return [text for state in states for text in state["texts"]][:count]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a file or folder; the default model without it")
    parser.add_argument("--free", type=int, default=20_000, help="free texts of each language")
    parser.add_argument("--drawn", type=int, default=2_000, help="texts that are drawn")
    parser.add_argument("--cases", type=int, default=len(CASES))
    parser.add_argument("--dtype", default="auto", help="of the computation")
    options = parser.parse_args(arguments)
    lines = ["  read  exact TV  masked TV       p   language"]
    started = time.perf_counter()
    with sgl.Engine(options.model, max_running=512, dtype=options.dtype) as engine:
        for case in CASES[: options.cases]:
            free = generate_texts(engine, case, options.free, "free")
            found = Counter(text for each in free if (text := read(case.pattern, each)) is not None)
            drawn = Counter(generate_texts(engine, case, options.drawn, "exact"))
            masked = Counter(generate_texts(engine, case, options.drawn, "masked"))
            lines.append(
                f"{found.total() / options.free:6.3f}  {distance(drawn, found):8.3f}  {distance(masked, found):9.3f}  "
                f"{chi_square_p(drawn, found):6.4f}   {case.pattern}"
            )
            print(lines[-1], flush=True)
    print("\n".join(lines))
    print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
