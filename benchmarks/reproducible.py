"""How often answers are the same tokens: alone and in a batch, on an empty cache and a warm one.

    python benchmarks/reproducible.py [--prompts 200] [--new 64] [--rows 16] [--device cpu] [--dtype auto]
                                      [--deterministic] [--temperature 0]

Each prompt, a piece of 50 to 400 tokens of this project's documents, is answered four times: alone on an empty cache,
which the others are compared with; alone again, found in the cache; with others in one batch on an empty cache; and in
that batch again. At the first token that differs the gap of the two is given, the difference of their logits in the
first answer. With a temperature each prompt has a seed, and gaps say nothing.
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
Answer = list[tuple[int, dict[int, float]]]  # by position the token, and the log-probabilities of the likely ones


def prompts(encode: Callable[[str], list[int]], count: int, lengths: tuple[int, int]) -> list[list[int]]:
    files = [DOCUMENTS / "README.md", DOCUMENTS / "CONTRIBUTING.md", *sorted((DOCUMENTS / "docs").glob("*.md"))]
    ids = [token for file in files for token in encode(file.read_text())]
    draw = random.Random(0)
    found = []
    for _ in range(count):
        length = draw.randint(*lengths)
        at = draw.randrange(max(1, len(ids) - length))
        found.append(ids[at : at + length])
    return found


def answer(engine: sgl.Engine, asked: list[list[int]], new: int, temperature: float) -> list[Answer]:
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
    """Of the tokens that differ first, how far the other one lies behind in the first answer; None: none differs."""
    for (ours, logprobs), (theirs, _) in zip(first, other):
        if ours != theirs:
            return logprobs[ours] - logprobs[theirs] if {ours, theirs} <= logprobs.keys() else float("inf")
    return None


def report(name: str, gaps: list[float | None]) -> None:
    different = sorted(each for each in gaps if each is not None)
    same = len(gaps) - len(different)
    line = f"{name:24}{same:5} of {len(gaps)} equal ({same / len(gaps):.1%})"
    if different:
        line += f"; gaps at the first difference: median {median(different):.2g}, largest {different[-1]:.2g}"
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rows", type=int, default=16, help="prompts in a batch")
    parser.add_argument("--most", type=int, default=LENGTHS[1], help="tokens in the longest prompt")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--model")
    options = parser.parse_args()
    settings: dict[str, Any] = {} if options.model is None else {"model": options.model}
    settings |= {"device": options.device, "dtype": options.dtype, "deterministic": options.deterministic}
    began = time.perf_counter()
    with sgl.Engine(**settings) as engine:
        asked = prompts(engine.tokenizer.encode, options.prompts, (min(LENGTHS[0], options.most), options.most))
        alone, again, batch, cached = [], [], [], []
        for prompt in asked:
            engine.flush_cache()
            alone += answer(engine, [prompt], options.new, options.temperature)
            again += answer(engine, [prompt], options.new, options.temperature)
        for start in range(0, len(asked), options.rows):
            rows = asked[start : start + options.rows]
            engine.flush_cache()
            batch += answer(engine, rows, options.new, options.temperature)
            cached += answer(engine, rows, options.new, options.temperature)
        print(f"{machine.describe()}; {engine.model_name}")
    beside = f"{options.rows} rows"
    for name, others in (("alone, cached", again), (beside, batch), (f"{beside}, cached", cached)):
        report(name, [gap(*pair) for pair in zip(alone, others)])
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
