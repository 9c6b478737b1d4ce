"""Scores of lm-evaluation-harness by an engine, beside lm_eval's own model `hf`, on a CPU.

    python benchmarks/lm_eval_scores.py [--tasks sums letters endings] [--rows 40] [--batch 8]
    [--seed 0]

Three tasks whose texts are generated, in the forms of public ones: `sums` (arithmetic_2da with five
examples, one answer a row), `letters` (MMLU: five examples, a question with four answers, of which
a letter is scored) and `endings` (HellaSwag: no examples, a context with four endings of several
words). Each is scored by `hf` in float32, by an engine, and by an engine without a prefix cache:
seconds of processor time of all threads, after a first row. Needs lm-eval, and the default model.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import sglang_lite as sgl
from sglang_lite.runtime.config import DEFAULT_MODEL
from sglang_lite.runtime.models.resolve import resolve

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM

WORDS = (
    *(
        "river",
        "stone",
        "market",
        "teacher",
        "window",
        "summer",
        "letter",
        "engine",
        "garden",
        "doctor",
        "bridge",
    ),
    *(
        "winter",
        "paper",
        "kitchen",
        "soldier",
        "music",
        "village",
        "picture",
        "morning",
        "ship",
        "forest",
        "island",
    ),
)


def sentence(draw: random.Random, words: int) -> str:
    return " ".join(draw.choices(WORDS, k=words)).capitalize() + "."


def sums(draw: random.Random, rows: int) -> list[tuple[str, list[str]]]:
    pairs = [(draw.randrange(10, 100), draw.randrange(10, 100)) for _ in range(rows + 5)]
    texts = [f"Question: What is {a} plus {b}?\nAnswer:" for a, b in pairs]
    shots = "".join(f"{text} {a + b}\n\n" for text, (a, b) in zip(texts, pairs[:5]))
    return [(shots + text, [f" {a + b}"]) for text, (a, b) in zip(texts[5:], pairs[5:])]


def letters(draw: random.Random, rows: int) -> list[tuple[str, list[str]]]:
    def question() -> str:
        answers = "\n".join(f"{letter}. {sentence(draw, 4)}" for letter in "ABCD")
        return f"{sentence(draw, 25)}\n{answers}\nAnswer:"

    shots = "".join(f"{question()} {draw.choice('ABCD')}\n\n" for _ in range(5))
    return [(shots + question(), [f" {letter}" for letter in "ABCD"]) for _ in range(rows)]


def endings(draw: random.Random, rows: int) -> list[tuple[str, list[str]]]:
    return [(sentence(draw, 60), [f" {sentence(draw, 10)}" for _ in range(4)]) for _ in range(rows)]


TASKS: dict[str, Callable[[random.Random, int], list[tuple[str, list[str]]]]] = {
    "sums": sums, "letters": letters, "endings": endings,
}  # fmt: skip


def asked(rows: Iterable[tuple[str, list[str]]]) -> list[Instance]:
    from lm_eval.api.instance import Instance

    pairs = [(context, answer) for context, answers in rows for answer in answers]
    return [Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=0) for pair in pairs]


def scored(model: LM, rows: list[tuple[str, list[str]]]) -> tuple[float, list[float]]:
    """Seconds, and the log-probability of each answer."""
    model.loglikelihood(asked([("A first row", [" alone"])]), disable_tqdm=True)
    began = time.process_time()
    found = model.loglikelihood(asked(rows), disable_tqdm=True)
    return time.process_time() - began, [value for value, _ in found]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--rows", type=int, default=40)
    parser.add_argument("--batch", type=int, default=8, help="batch size of hf")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    from lm_eval.models.huggingface import HFLM

    from sglang_lite.integrations.lm_eval import SglangLiteLM

    file = resolve(DEFAULT_MODEL)
    hf = HFLM(
        str(file.parent), gguf_file=file.name, dtype="float32", device="cpu", batch_size=given.batch
    )
    print(
        f"{'task':10} {'hf s':>8} {'engine s':>9} {'no cache s':>11} {'of hf':>6} {'of no cache':>12} {'differs':>9}"
    )
    for name in given.tasks:
        rows = TASKS[name](random.Random(given.seed), given.rows)
        theirs, expected = scored(hf, rows)
        found = []
        for cached in (True, False):
            with sgl.Engine(dtype="float32", in_process=True, prefix_cache=cached) as engine:
                found.append(scored(SglangLiteLM(engine), rows))
        (ours, values), (uncached, _) = found
        worst = max(abs(one - other) for one, other in zip(values, expected, strict=True))
        times = f"{theirs:8.1f} {ours:9.1f} {uncached:11.1f} {ours / theirs:6.2f} {ours / uncached:12.2f}"
        print(f"{name:10} {times} {worst:9.1e}", flush=True)


if __name__ == "__main__":
    main()
