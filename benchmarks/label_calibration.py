"""Calibration of labels: how sure a model is of the label that it takes, and how often it is right.

    python benchmarks/label_calibration.py [--model FILE]

The cases are the 200 of the quality set (`benchmarks/answers`), of six tasks with labels of their
own. Ways: masked (the product of the probabilities from which the greedy tokens were drawn), select
(the softmax of its scores) and exact. For each, the right labels, the expected calibration error
(ECE: the mean difference between confidence and share of right labels, over ten bins of equal width,
weighted by their cases), and the log loss of the label taken. Scaled: with the confidences of all
labels raised to a power that was fitted on 40 cases of the open half, for the other 160; masked
draws have none of the labels that were not taken.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).parent.parent))

import sglang_lite as sgl
from benchmarks.answers.ways import LIMITS, PROMPTS

BINS = 10
FITTED = 40
WAYS = ("masked", "select", "exact")
DATA = Path(__file__).parent / "answers" / "data"


@dataclass(frozen=True)
class Answer:
    """What a way says about a case.

    Attributes:
        task: the labels of its task.
        right: whether the label that was taken is right.
        confidence: how sure the model is of that label.
        logs: log of the confidence in each label; none if only one is known.
    """

    task: str
    right: bool
    confidence: float
    logs: tuple[float, ...] = ()

    def scaled(self, power: float) -> Answer:
        weights = [math.exp(power * (log - max(self.logs))) for log in self.logs]
        return Answer(self.task, self.right, max(weights) / sum(weights))


@sgl.function
def classify(s: sgl.ProgramState, labels: Sequence[str], text: str, way: str) -> None:
    s += sgl.user(PROMPTS["labels"].format(labels=", ".join(labels), text=text))
    if way == "select":
        s += sgl.assistant(sgl.select("value", labels))
        return
    kind: Any = Literal[tuple(labels)]
    masked = way == "masked"
    options: dict[str, Any] = {"confidence": True} if masked else {"exact": True}
    limit = LIMITS["labels"]
    s += sgl.assistant(sgl.gen("value", type=kind, max_tokens=limit, temperature=0, **options))


def read_answer(case: dict[str, Any], way: str, state: sgl.ProgramState) -> Answer:
    task = ", ".join(case["labels"])
    right = state["value"] == case["answer"]
    if way == "masked":
        meta = state.get_meta_info("value") or {}
        pairs = zip(meta["output_model_logprobs"], meta["output_allowed_logprobs"])
        return Answer(task, right, math.exp(math.fsum(own - allowed for own, allowed in pairs)))
    probs = state.selection("value").probs if way == "select" else state.exact("value").probs
    logs = tuple(math.log(max(share, 1e-30)) for share in probs.values())
    # The label that was taken, which select doesn't take by these probabilities alone.
    return Answer(task, right, probs[str(state["value"])], logs)


def calibration_error(answers: Sequence[Answer]) -> float:
    bins: dict[int, list[Answer]] = defaultdict(list)
    for each in answers:
        bins[min(int(each.confidence * BINS), BINS - 1)].append(each)
    gaps = (abs(sum(each.confidence - each.right for each in those)) for those in bins.values())
    return sum(gaps) / len(answers)


def log_loss(answers: Sequence[Answer]) -> float:
    sure = [each.confidence if each.right else 1 - each.confidence for each in answers]
    return -sum(math.log(max(share, 1e-12)) for share in sure) / len(sure)


def fit_power(answers: Sequence[Answer]) -> float:
    powers = [2 ** (step / 8) for step in range(-48, 17)]
    return min(powers, key=lambda power: log_loss([each.scaled(power) for each in answers]))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a file or folder; the default model without it")
    parser.add_argument("--cases", type=int, default=200)
    options = parser.parse_args(arguments)
    lines = [
        line
        for half in ("open", "held_out")
        for line in (DATA / f"labels.{half}.jsonl").read_text().splitlines()
    ]
    cases = [json.loads(line) for line in lines[: options.cases]]
    found: dict[str, list[Answer]] = {}
    with sgl.Engine(options.model) as engine:
        for way in WAYS:
            asked = [{"labels": c["labels"], "text": c["text"], "way": way} for c in cases]
            states = classify.run_batch(asked, backend=engine, num_threads=32)
            found[way] = [read_answer(*each) for each in zip(cases, [way] * len(cases), states)]
    print("| task | " + " | ".join(f"{way}: right, ECE, log loss" for way in WAYS) + " |")
    print("|---" * (len(WAYS) + 1) + "|")
    tasks = list(dict.fromkeys(each.task for each in found["exact"]))
    for task in [*tasks, "all"]:
        cells = []
        for way in WAYS:
            own = [each for each in found[way] if task in (each.task, "all")]
            right = sum(each.right for each in own)
            cells.append(
                f"{right} of {len(own)}, {calibration_error(own):.3f}, {log_loss(own):.3f}"
            )
        print(f"| {task} | " + " | ".join(cells) + " |")
    if len(cases) <= FITTED:
        return
    for way in ("select", "exact"):
        power = fit_power(found[way][:FITTED])
        rest = found[way][FITTED:]
        scaled = [each.scaled(power) for each in rest]
        print(
            f"{way}, power {power:.3f} from {FITTED} cases: the other {len(rest)} "
            f"ECE {calibration_error(rest):.3f} -> {calibration_error(scaled):.3f}, "
            f"log loss {log_loss(rest):.3f} -> {log_loss(scaled):.3f}"
        )


if __name__ == "__main__":
    main()
