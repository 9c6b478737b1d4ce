"""A calibrated classifier: 40 labelled rows teach it how far to trust the model's probabilities.
Run: python examples/calibrated.py"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import sglang_lite as sgl

DATA = Path(__file__).with_name("data") / "requests.jsonl"
ROWS = [json.loads(line) for line in DATA.read_text().splitlines()]
KINDS = sorted({row["kind"] for row in ROWS})
kind = sgl.select("kind", [f" {each}" for each in KINDS], choices_method=sgl.exact)


@sgl.function
def classify(s: sgl.ProgramState, text: str) -> None:
    s += "The kinds of requests are billing, bug and delivery.\n"
    s += "Request: How do I pay?\nKind: billing\nRequest: It fails to start.\nKind: bug\n"
    s += f"Request: Where is my box?\nKind: delivery\nRequest: {text}\nKind:" + kind


def log_probs(texts: Sequence[str]) -> np.ndarray:
    """The log of each kind's probability, as the model has it, [texts, kinds]."""
    states = classify.run_batch([{"text": text} for text in texts])
    probs = [[state.exact(kind).probs[f" {each}"] for each in KINDS] for state in states]
    return np.log(np.array(probs) + 1e-9)


def calibrate(logs: np.ndarray, slope: float, offsets: np.ndarray) -> np.ndarray:
    weights = np.exp(slope * logs + offsets)
    return weights / weights.sum(1, keepdims=True)


def fit(logs: np.ndarray, right: np.ndarray) -> tuple[float, np.ndarray]:
    """The slope and the offsets with the least log loss, by gradient descent."""
    slope = 1.0
    offsets = np.zeros(len(KINDS))
    for _ in range(2000):
        errors = calibrate(logs, slope, offsets) - right
        offsets -= 0.5 * errors.mean(0)
        slope -= 0.02 * (errors * logs).sum(1).mean()
    return slope, offsets


def main() -> None:
    logs = log_probs([row["text"] for row in ROWS])
    right = np.array([[row["kind"] == each for each in KINDS] for row in ROWS])
    fitted = fit(logs[:40], right[:40])
    for name, ways in {"before": (1.0, np.zeros(len(KINDS))), "calibrated": fitted}.items():
        shares = calibrate(logs[40:], *ways)
        count = right[40:][np.arange(20), shares.argmax(1)].sum()
        print(f"{name:10} {count} of 20 right, {shares.max(1).mean():.0%} sure")
    for text in ("The invoice came with the wrong parcel.", "It crashes when I pay."):
        (shares,) = calibrate(log_probs([text]), *fitted)
        print({each: round(float(share), 2) for each, share in zip(KINDS, shares)}, text)


if __name__ == "__main__":
    main()
