"""What a constraint does to a distribution: the figures of docs/distribution.md.

    python benchmarks/distribution.py [--draws 250] [--model MODEL]

Prints what the model itself gives to all that a constraint allows, and how often values are drawn
beside the model's own shares of them. Without a model it is the default one, in float32.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from typing import Literal

import sglang_lite as sgl
from sglang_lite.protocol import Choices

ANSWERS = "no", "not at all", "nobody knows"
ANY_ANSWER = Choices(ANSWERS)


@sgl.function
def digit(s):
    s += "The answer is "
    s += sgl.gen("x", regex="[0-9]", confidence=True, temperature=0)


@sgl.function
def flat(s):
    s += sgl.user("Is the Earth flat? Answer with yes or no.")
    s += sgl.assistant(sgl.gen("x", type=Literal["yes", "no"], confidence=True, temperature=0))


@sgl.function
def rain(s, draws):
    s += "Question: will it rain tomorrow? Answer: "
    s += sgl.gen("x", constraint=ANY_ANSWER, confidence=True, n=draws, seed=3)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draws", type=int, default=250, help="from 2 to 256")
    parser.add_argument("--model")
    options = parser.parse_args()
    with sgl.Engine(options.model, dtype="float32", in_process=True) as engine:
        one = digit.run(backend=engine)
        sure = one.confidence("x")
        print(
            f"digit {one['x']}: {sure.prob:.3f} of the digits, which have {math.exp(sure.mass):.4f} together"
        )
        sure = flat.run(backend=engine).confidence("x")
        shares = ", ".join(f"{text} {share:.2f}" for text, share in (sure.probs or {}).items())
        print(f"flat Earth: {shares}; mass {sure.mass:.2f}, which is {math.exp(sure.mass):.4f}")
        several = rain.run(options.draws, backend=engine)
        drawn, shares_of = Counter(several["x"]), several.confidence("x").probs or {}
        for text in ANSWERS:
            print(
                f"{text}: drawn {drawn[text] / options.draws:.3f}, the model's own share {shares_of[text]:.7f}"
            )


if __name__ == "__main__":
    main()
