"""Classifications with exact draws, beside masked draws and `select`.

    python benchmarks/exact.py [--model FILE] [--count 256] [--prompt 1000] [--repeat 3]

Each classification has one of eight labels and a short text of its own behind a prompt that all
share. Seconds for all of them at once, the median of some runs after one that warms up; a prompt is
cached from the last run. Also what one exact classification takes: rows, steps and its gap.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import mean, median
from typing import Literal

sys.path.insert(0, str(Path(__file__).parent.parent))

import sglang_lite as sgl

Label = Literal[" anger", " joy", " fear", " surprise", " sadness", " trust", " disgust", " love"]
LABELS = [" anger", " joy", " fear", " surprise", " sadness", " trust", " disgust", " love"]
TEXTS = (
    "I got the job", "They cancelled my flight again", "The dog is waiting at the door",
    "Somebody stood behind the curtain", "We buried her on Monday", "He always pays me back",
    "There was a hair in the soup", "The envelope had a cheque for a million in it",
)  # fmt: skip


@sgl.function
def classify(s: sgl.ProgramState, shared: str, text: str, way: str) -> None:
    s += shared + f"Text: {text}.\nFeeling:"
    if way == "select":
        s += sgl.select("label", LABELS)
    else:
        s += sgl.gen("label", type=Label, temperature=0, exact=way == "exact")


def shared_text(engine: sgl.Engine, tokens: int) -> str:
    """Examples with at least that many tokens."""
    examples = [f"Text: {text}.\nFeeling:{label}\n" for text, label in zip(TEXTS, LABELS[1:])]
    text = "Tell the feeling in one word: " + ",".join(LABELS) + ".\n"
    while len(engine.tokenizer.encode(text)) < tokens:
        text += "".join(examples)
    return text


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a file or folder; the default model without it")
    parser.add_argument("--count", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=1000, help="tokens that all share")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args(arguments)
    with sgl.Engine(options.model, max_running=max(options.count, 256)) as engine:
        shared = shared_text(engine, options.prompt)
        texts = [f"{TEXTS[i % len(TEXTS)]} ({i})" for i in range(options.count)]
        took: dict[str, list[float]] = {"masked": [], "select": [], "exact": []}
        found: dict[str, list[str]] = {}
        for i in range(options.repeat + 1):
            for way, times in took.items():
                asked = [{"shared": shared, "text": text, "way": way} for text in texts]
                begun = time.perf_counter()
                states = classify.run_batch(asked, backend=engine, num_threads=options.count)
                found[way] = [state["label"] for state in states]
                times += [time.perf_counter() - begun] if i else []
                if way == "exact":
                    shares = [state.exact("label") for state in states]
        for way, times in took.items():
            same = mean(a == b for a, b in zip(found[way], found["exact"]))
            print(f"{way:8} {median(times):8.3f} s   same label as exact {same:.3f}")
        print(f"exact over select {median(took['exact']) / median(took['select']):.2f}")
        print(
            f"rows {mean(each.rows for each in shares):.1f}, steps {mean(each.steps for each in shares):.1f}, "
            f"largest gap {max(each.gap for each in shares):.1e}, "
            f"log_mass {mean(each.log_mass for each in shares):.2f}"
        )


if __name__ == "__main__":
    main()
