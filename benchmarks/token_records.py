"""Cost of recording each token's experts and hidden states: speed of the same requests with and
without.

    python benchmarks/token_records.py [--shape qwen3-30b-a3b] [--rows 64] [--tokens 128] [--rounds
    3]

Random weights, on a GPU if there is one. Rows of `--tokens` tokens that differ, and as many
generated. Printed are tokens a second (medians of rounds, after one that counts for nothing): of an
engine that records nothing, and of one that records both, in requests that don't ask for them, that
ask for the experts, and that ask for both.
"""

from __future__ import annotations

import argparse
import random
import time
from concurrent.futures import Future
from statistics import median

import sglang_lite as sgl
from sglang_lite.bench.shapes import SHAPES, load_shape
from sglang_lite.protocol import SamplingParams

RECORDS = {"enable_return_routed_experts": True, "enable_return_hidden_states": True}


def speed(
    engine: sgl.Engine, draw: random.Random, params: SamplingParams, given: argparse.Namespace
) -> float:
    """Generated tokens a second."""
    futures: list[Future[object]] = [Future() for _ in range(given.rows)]
    prompts = [[draw.randrange(100, 10_000) for _ in range(given.tokens)] for _ in futures]
    began = time.perf_counter()
    for prompt, future in zip(prompts, futures):
        engine.submit(prompt, params, sink=future.set_result)
    for future in futures:
        future.result()
    return given.rows * given.tokens / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    plain = SamplingParams(max_tokens=given.tokens, temperature=0, ignore_eos=True)
    experts = SamplingParams(
        max_tokens=given.tokens, temperature=0, ignore_eos=True, return_routed_experts=True
    )
    both = SamplingParams(
        max_tokens=given.tokens,
        temperature=0,
        ignore_eos=True,
        return_routed_experts=True,
        return_hidden_states=True,
    )
    first = 0.0
    for settings, cases in (
        ({}, {"records nothing": plain}),
        (RECORDS, {"records both": plain, "and gives experts": experts, "and gives both": both}),
    ):
        loaded = load_shape(given.shape)
        with sgl.Engine.of(
            loaded, max_running=given.rows, max_total_tokens=65_536, **settings
        ) as engine:
            del loaded
            for name, params in cases.items():
                draw = random.Random(0)
                found = [speed(engine, draw, params, given) for _ in range(1 + given.rounds)][1:]
                first = first or median(found)
                print(
                    f"{name:20} {median(found):9.0f} tokens/s  {median(found) / first:6.3f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
