"""Cuts texts at every character, and asks how they go on, with healed ends and without.

    python benchmarks/heal.py [--model FILE] [--cuts 33] [--misses]

The model continues six texts greedily. Each of the continuations is cut after each of its first
characters: 6 x 33 prompts whose end is often inside a word, or a blank. A cut is right if the next 10
bytes are those of the uncut continuation. Also the distributions that healing has computed, beside
the one after the prompt, and the seconds that all cuts took at once.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

import sglang_lite as sgl

TEXTS = (
    "The capital of France is",
    "Once upon a time, there was a little girl who lived in a",
    "def fibonacci(n):\n    if n <= 1:\n        return",
    "Here are three facts about the Sun:\n\n1.",
    '{"name": "Alice Johnson", "age": 31, "city":',
    "A recipe for pancakes. First, mix the flour, the eggs and the",
)
BYTES = 10


class Cut(NamedTuple):
    """A cut text.

    Attributes:
        prompt: the text up to the cut.
        expected: what followed before it was cut.
    """

    prompt: str
    expected: bytes


@sgl.function
def go_on(s: sgl.ProgramState, text: str, tokens: int, heal: bool) -> None:
    s += text + sgl.gen("more", max_tokens=tokens, temperature=0, ignore_eos=True, heal=heal)


def cut_texts(engine: sgl.Engine, count: int) -> list[Cut]:
    """Returns the texts, continued and cut."""
    cuts = []
    for text in TEXTS:
        more = go_on.run(text, 2 * (count + BYTES), False, backend=engine)["more"]
        cuts += [Cut(text + more[:at], more[at:].encode()[:BYTES]) for at in range(1, count + 1)]
    return cuts


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a file or folder; the default model without it")
    parser.add_argument("--cuts", type=int, default=33, help="of each text")
    parser.add_argument("--misses", action="store_true", help="show the cuts that are not right")
    options = parser.parse_args(arguments)
    with sgl.Engine(options.model) as engine:
        cuts = cut_texts(engine, options.cuts)
        print(f"{engine.model_name}, {len(cuts)} cuts\n")
        print(f"{'':8}{'right':>14}{'rows beside':>13}{'seconds':>9}")
        for heal in (False, True):
            began = time.perf_counter()
            states = go_on.run_batch(
                [(cut.prompt, BYTES + 2, heal) for cut in cuts], backend=engine
            )
            spent = time.perf_counter() - began
            answers = [state["more"].encode()[:BYTES] for state in states]
            misses = [i for i, cut in enumerate(cuts) if answers[i] != cut.expected]
            found = [state.get_meta_info("more").get("healed", {"rows": 1}) for state in states]
            rows = sum(each["rows"] - 1 for each in found) / len(cuts)
            share = 1 - len(misses) / len(cuts)
            name = "healed" if heal else "as it is"
            print(f"{name:8}{len(cuts) - len(misses):6} {share:7.1%}{rows:13.2f}{spent:9.2f}")
            for i in misses if options.misses and heal else ():
                cut = cuts[i]
                print(f"  {cut.prompt[-30:]!r} {cut.expected!r} {answers[i]!r} {found[i]}")


if __name__ == "__main__":
    main()
