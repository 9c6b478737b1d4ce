"""Speculation on a GPU: output tokens a second with drafts over those without, with a simulated
drafter.

    python benchmarks/speculation_gpu.py --tokenizer FOLDER [--shape llama-3.1-8b] [--rows 1 16 256]
    [--constrained 64]

Random weights, but for an embedding that outweighs the layers and a head that is the embedding,
moved by one token: so each token's successor is known, and a drafter can be right with 0.8 a
position, whatever bfloat16 rounds. Free rows write 256 tokens each; constrained ones, under one
schema, what the same rows wrote without drafts. Temperature 0; prompts of 500 tokens, which are in
the cache. Medians of three runs. FOLDER has a `tokenizer.json`, for the schema.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import machine
import torch
from speculation import PERSON

import sglang_lite as sgl
from sglang_lite.bench.shapes import SHAPES, load_shape
from sglang_lite.protocol import Constraint, Generation, SamplingParams
from sglang_lite.runtime.drafting.drafting import TAIL
from sglang_lite.runtime.drafting.guess import Guess, Guesser
from sglang_lite.runtime.drafting.registry import DRAFTERS
from sglang_lite.runtime.loading.load_model import LoadedModel
from sglang_lite.runtime.tokens.from_folder import tokenizer_from_folder

PROMPT, RIGHT = 500, 0.8


class Simulated:
    """Drafter that is right with 0.8 a position. It knows the answers of constrained rows by their
    seed, and of other texts that one token follows another by its number.
    """

    name = "prompt"

    def __init__(self) -> None:
        self.answers: dict[int, Sequence[int]] = {}
        self._dice = random.Random(0)

    def can_draft(self, request: object) -> bool:
        return True

    def make_guesser(self, request: Any, known: Any, *_: object) -> Guesser:  # as of Drafter
        answer = self.answers.get(request.seed, ())
        begun = len(known) - request.prompt_len - min(len(known), TAIL)

        def guess(text: Sequence[int], state: Hashable) -> Guess:
            at = begun + len(text)
            token = (
                answer[at] if 0 < at < len(answer) and answer[at - 1] == text[-1] else text[-1] + 1
            )
            return Guess(token if self._dice.random() < RIGHT else token + 7, 0)

        return guess

    def learn_tokens(self, *_: object) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Run:
    answers: list[Generation]
    seconds: float
    steps: int


def loaded_shape(name: str, folder: Path) -> LoadedModel:
    loaded = load_shape(name)
    model: Any = loaded.model
    with torch.inference_mode():
        model.head.weight.copy_(model.embedding.roll(1, 0))
        model.embedding.mul_(5000)
    return replace(loaded, tokenizer=tokenizer_from_folder(folder))


def run(engine: sgl.Engine, rows: int, tokens: int, constraint: Constraint | None) -> Run:
    dice = random.Random(rows)
    prompts = [[dice.randrange(1000, 40_000) for _ in range(PROMPT)] for _ in range(rows)]
    futures: list[Future[Any]] = [Future() for _ in prompts]
    before, began = engine.stats()["steps"], time.perf_counter()
    for i, (prompt, future) in enumerate(zip(prompts, futures)):
        params = SamplingParams(
            temperature=0, seed=i if constraint else 10_000, max_tokens=tokens, ignore_eos=True
        )
        engine.submit(prompt, params, constraint, sink=future.set_result)
    answers = [future.result() for future in futures]
    seconds = time.perf_counter() - began
    return Run(answers, seconds, engine.stats()["steps"] - before)


def measured(engine: sgl.Engine, rows: int, tokens: int, constraint: Constraint | None) -> Run:
    """Run of median time, after two that warm up."""
    gc.collect()
    gc.freeze()  # as the process of an engine does
    gc.set_threshold(10_000)
    runs = [run(engine, rows, tokens, constraint) for _ in range(5)][2:]
    return next(each for each in runs if each.seconds == median(one.seconds for one in runs))


def rate(found: Run) -> float:
    return sum(each.usage.completion_tokens for each in found.answers) / found.seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--shape", default="llama-3.1-8b", choices=SHAPES)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16, 64, 256])
    parser.add_argument("--constrained", type=int, nargs="*", default=[64])
    parser.add_argument("--draft-tokens", type=int, default=4)
    options = parser.parse_args()
    print(machine.describe(), torch.cuda.get_device_name(), sep="\n", end="\n\n", flush=True)
    loaded, drafter = loaded_shape(options.shape, options.tokenizer), Simulated()
    work = [(rows, None) for rows in options.rows] + [
        (rows, PERSON) for rows in options.constrained
    ]
    plain = []
    with sgl.Engine.of(loaded) as engine:
        for rows, constraint in work:
            plain.append(measured(engine, rows, 256, constraint))
            if constraint is not None:
                drafter.answers |= {i: each.token_ids for i, each in enumerate(plain[-1].answers)}
    print(
        "| rows | tokens/s | with drafts | ratio | tokens a row and step | right / drafted | equal |\n"
        + "|---" * 7
        + "|"
    )
    with (
        mock.patch.dict(DRAFTERS, prompt=lambda _: drafter),
        sgl.Engine.of(loaded, speculation="prompt", draft_tokens=options.draft_tokens) as engine,
    ):
        for (rows, constraint), off in zip(work, plain):
            before = engine.stats()["drafters"]["prompt"]
            on = measured(engine, rows, 256, constraint)
            after = engine.stats()["drafters"]["prompt"]
            right, drafted = (after[name] - before[name] for name in ("accepted", "drafted"))
            equal = sum(a.token_ids == b.token_ids for a, b in zip(off.answers, on.answers))
            tokens = sum(each.usage.completion_tokens for each in on.answers) / rows / on.steps
            print(
                f"| {rows}{' under a schema' * (constraint is not None)} | {rate(off):,.0f} | {rate(on):,.0f} | "
                f"{rate(on) / rate(off):.2f} | {tokens:.2f} | {right} / {drafted} | {equal} |", flush=True,
            )  # fmt: skip


if __name__ == "__main__":
    main()
