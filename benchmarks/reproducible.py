"""How often answers are the same tokens: alone and in a batch, on an empty cache and a warm one.

    python benchmarks/reproducible.py [--prompts 200] [--seed 0] [--new 64] [--rows 16] [--alone]
    [--device cpu]
                                      [--dtype auto] [--threads 4] [--deterministic] [--temperature
                                      0]

Each prompt, a piece of 50 to 400 tokens of this project's documents, is answered four times: alone
on an empty cache, which the others are compared with; alone again, found in the cache; with others
in one batch on an empty cache; and in that batch again. At the first token that differs the gap of
the two is given, the difference of their logits in the first answer. With a temperature each prompt
has a seed, and gaps say nothing.

Each line is printed as soon as it is known; Ctrl-C prints what is known by then, too. Another
`--seed` has other prompts, so that processes of a few threads each can share the work.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import machine

import sglang_lite as sgl

DOCUMENTS = Path(__file__).parents[1]
LENGTHS = 50, 400
# by position the token, and the log-probabilities of the likely ones
Answer = list[tuple[int, dict[int, float]]]


def prompts(
    encode: Callable[[str], list[int]], count: int, lengths: tuple[int, int], seed: int
) -> list[list[int]]:
    files = [
        DOCUMENTS / "README.md",
        DOCUMENTS / "CONTRIBUTING.md",
        *sorted((DOCUMENTS / "docs").glob("*.md")),
    ]
    ids = [token for file in files for token in encode(file.read_text())]
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        length = draw.randint(*lengths)
        at = draw.randrange(max(1, len(ids) - length))
        found.append(ids[at : at + length])
    return found


def answer(
    engine: sgl.Engine, asked: list[list[int]], new: int, temperature: float
) -> list[Answer]:
    """Submits them together."""
    params = {"temperature": temperature, "max_new_tokens": new, "ignore_eos": True}
    results = engine.generate(
        input_ids=asked,
        sampling_params=[{**params, "sampling_seed": sum(ids)} for ids in asked],
        return_logprob=True,
        top_logprobs_num=10,
    )
    return [
        [
            (token, {i: value for value, i, _ in top})
            for token, top in zip(each["output_ids"], each["meta_info"]["output_top_logprobs"])
        ]
        for each in results
    ]


def gap(first: Answer, other: Answer) -> float | None:
    """Of the tokens that differ first, how far the other one lies behind in the first answer; None:
    none differs.
    """
    for (ours, logprobs), (theirs, _) in zip(first, other):
        if ours != theirs:
            return (
                logprobs[ours] - logprobs[theirs]
                if {ours, theirs} <= logprobs.keys()
                else float("inf")
            )
    return None


def report(name: str, first: list[Answer], others: list[Answer]) -> None:
    gaps = [gap(*pair) for pair in zip(first, others)]
    if not gaps:
        return
    different = sorted(each for each in gaps if each is not None)
    same = len(gaps) - len(different)
    line = f"{name:24}{same:5} of {len(gaps)} equal ({same / len(gaps):.1%})"
    if different:
        line += f"; gaps at the first difference: median {median(different):.2g}, largest {different[-1]:.2g}"
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the draw of prompts")
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rows", type=int, default=16, help="prompts in a batch")
    parser.add_argument("--alone", action="store_true", help="no batches")
    parser.add_argument("--most", type=int, default=LENGTHS[1], help="tokens in the longest prompt")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--model")
    options = parser.parse_args()
    settings: dict[str, Any] = {} if options.model is None else {"model": options.model}
    settings |= {
        "device": options.device,
        "dtype": options.dtype,
        "deterministic": options.deterministic,
    }
    settings |= {"threads": options.threads}
    began = time.perf_counter()
    with sgl.Engine(**settings) as engine:
        print(f"{machine.describe(options.threads)}; {engine.core.description}", flush=True)
        lengths = min(LENGTHS[0], options.most), options.most
        asked = prompts(engine.tokenizer.encode, options.prompts, lengths, options.seed)

        def twice(rows: list[list[int]], empty: list[Answer], warm: list[Answer]) -> None:
            engine.flush_cache()
            empty += answer(engine, rows, options.new, options.temperature)
            warm += answer(engine, rows, options.new, options.temperature)

        alone, again, batch, cached = list[Answer](), list[Answer](), list[Answer](), list[Answer]()
        try:
            for prompt in asked:
                twice([prompt], alone, again)
        finally:
            report("alone, cached", alone, again)
        try:
            for start in range(0, 0 if options.alone else len(asked), options.rows):
                twice(asked[start : start + options.rows], batch, cached)
        finally:
            report(f"{options.rows} rows", alone, batch)
            report(f"{options.rows} rows, cached", alone, cached)
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
