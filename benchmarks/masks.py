"""Cost of masks on the host in a step, by engine and threads: masks are filled, and matchers take a
token. A row whose mask takes too long is late, as in the step loop: it takes its token in a later
step, and the others continue.

    python benchmarks/masks.py [--vocabulary FILE] [--rows N] [--steps N] [--threads 1,2,4]

All rows are of one constraint and each spells another text of it: a schema (an object with an array
of at least 64 objects of six fields), a regex, a grammar, and tool calls in free text. FILE is a
`.tiktoken` file (Qwen's is in the PyPI package `dashscope`), padded to 151,936 tokens; without it
the default model's 49,152 are used. The floor is writing the masks' memory once.
All rows begin at once, so they are in the same field at the same time: the worst case for a step.
`--spread` starts each somewhere else in its text.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import machine
from tokenizers import AddedToken
from vocabulary import PADDED, default_tokenizer, tiktoken_tokenizer

from sglang_lite.constraints.random_texts import sample
from sglang_lite.protocol import (
    Constraint,
    ConstraintError,
    Ebnf,
    JsonSchema,
    Regex,
    StructuralTag,
    Tag,
)
from sglang_lite.runtime.structured_output.base import GrammarEngine
from sglang_lite.runtime.structured_output.llguidance import LlguidanceEngine
from sglang_lite.runtime.structured_output.mask_filler import MaskFiller
from sglang_lite.runtime.structured_output.vocabulary import Vocabulary

PATIENCE = 0.0025  # seconds, as in the step loop
FIELDS = {
    "id": {"type": "integer", "minimum": 0, "maximum": 99999},
    "name": {"type": "string", "maxLength": 16},
    "kind": {"enum": ["alpha", "beta", "gamma"]},
    "score": {"type": "number"},
    "ok": {"type": "boolean"},
    "day": {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"},
}
ITEM = {
    "type": "object",
    "properties": FIELDS,
    "required": list(FIELDS),
    "additionalProperties": False,
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"items": {"type": "array", "items": ITEM, "minItems": 64}},
    "required": ["items"],
    "additionalProperties": False,
}
CALL = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "days", "unit"],
    "additionalProperties": False,
}
CONSTRAINTS: dict[str, Constraint] = {
    "schema": JsonSchema(json.dumps(SCHEMA)),
    "regex": Regex("[a-z]+( [a-z]+)*"),
    "calls": StructuralTag((Tag("<call>", JsonSchema(json.dumps(CALL)), "</call>"),), ("<call>",)),
    "grammar": Ebnf('root ::= term (("+" | "-") term)*\nterm ::= [0-9]+ | "(" root ")"'),
}
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "lazy",
    "dogs",
    "while",
    "nobody",
    "looks",
    "at",
    "them",
]


def text(name: str, dice: Random) -> str:
    """A text of a constraint, long enough."""
    if name == "schema":
        item = lambda: {  # noqa: E731
            "id": dice.randrange(100000), "name": " ".join(dice.sample(WORDS, 2))[:16],
            "kind": dice.choice(FIELDS["kind"]["enum"]), "score": round(dice.uniform(-100, 100), dice.randrange(4)),
            "ok": dice.random() < 0.5,
            "day": f"{dice.randrange(1900, 2100)}-{dice.randrange(1, 13):02}-{dice.randrange(1, 29):02}",
        }  # fmt: skip
        return json.dumps({"items": [item() for _ in range(64)]})
    if name == "regex":
        return " ".join(dice.choice(WORDS) for _ in range(2000))
    if name == "calls":
        words = lambda: " ".join(dice.sample(WORDS, 5))  # noqa: E731
        call = lambda: {"city": words(), "days": dice.randrange(20), "unit": dice.choice("CF")}  # noqa: E731
        return "".join(f"{words()}.<call>{json.dumps(call())}</call>" for _ in range(40))
    return "+".join(sample(CONSTRAINTS[name], dice) for _ in range(400))


def measure(
    engine: GrammarEngine,
    filler: MaskFiller,
    constraint: Constraint,
    texts: list[list[int]],
    starts: list[int],
    steps: int,
    words: int,
) -> str:
    began = time.perf_counter()
    grammar = engine.compile(constraint)
    compiled = time.perf_counter() - began
    matchers = [grammar.matcher() for _ in texts]
    for matcher, text, start in zip(matchers, texts, starts):
        assert all(map(matcher.accept, text[:start]))
    waiting = [iter(text[start:]) for text, start in zip(texts, starts)]
    masks = np.empty((len(texts), words), np.int32)
    fills, accepts, late_rows = [], [], 0
    filler.fill(matchers, masks.__setitem__)  # in the step loop the first masks are known
    for _ in range(min(steps, *map(len, texts))):
        began = time.perf_counter()
        late = set(filler.fill(matchers, masks.__setitem__, patience=PATIENCE))
        filled = time.perf_counter()
        late_rows += len(late)
        for row, (matcher, tokens) in enumerate(zip(matchers, waiting)):
            if row not in late and not matcher.accept(next(tokens)):
                raise AssertionError(f"{engine.name} does not allow a valid text: {matcher.error}")
        accepts.append(time.perf_counter() - filled)
        fills.append(filled - began)
    both = [a + b for a, b in zip(fills, accepts)]
    per_row = 1e6 / len(texts)
    return (
        f"{median(both) * per_row:6.1f} us a row "
        f"(mask {median(fills) * per_row:5.1f}, accept {median(accepts) * per_row:4.1f}), "
        f"step p50 {median(both) * 1e3:6.2f} ms, p99 {sorted(both)[len(both) * 99 // 100] * 1e3:6.2f}, "
        f"worst {max(both) * 1e3:6.2f}; "
        f"late {late_rows / len(fills) / len(texts):6.3%}; compile {compiled * 1e3:7.1f} ms"
    )


def main() -> None:
    # Here, as constrained_gpu.py takes its schema from this file where neither is installed.
    from sglang_lite.runtime.structured_output.outlines import OutlinesEngine
    from sglang_lite.runtime.structured_output.xgrammar import XgrammarEngine

    parser = argparse.ArgumentParser()
    parser.add_argument("--vocabulary", type=Path)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument(
        "--threads", default=",".join(str(n) for n in (1, 2, 4, 8) if n <= (os.cpu_count() or 1))
    )
    parser.add_argument("--spread", action="store_true")
    parser.add_argument("--constraints", default=",".join(CONSTRAINTS))
    options = parser.parse_args()
    tokenizer = (
        tiktoken_tokenizer(options.vocabulary) if options.vocabulary else default_tokenizer()
    )
    size, eos = tokenizer.vocab_size, sorted(tokenizer.eos_ids)
    if options.vocabulary:
        tokenizer.backend.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
        size, eos = PADDED, [size]
    vocabulary = Vocabulary.from_tokenizer(tokenizer, size, eos)
    words = -(-len(vocabulary.tokens) // 32)
    masks = np.empty((options.rows, words), np.int32)
    print(machine.describe())
    floor = machine.seconds(lambda: masks.fill(0)) * 1e6 / options.rows
    print(
        f"{options.rows} rows of {size:,} tokens, {options.steps} steps; floor {floor:.1f} us a row"
    )
    gc.collect()
    gc.freeze()  # the collector's passes over the tokenizer's tables are not the masks'
    made: list[tuple[int, GrammarEngine]] = []
    for threads in map(int, options.threads.split(",")):
        made.append((threads, LlguidanceEngine(tokenizer, size, eos, threads)))
        made.append((threads, XgrammarEngine(vocabulary)))
    made.append((1, OutlinesEngine(vocabulary)))
    for name in options.constraints.split(","):
        constraint = CONSTRAINTS[name]
        print(f"\n{name}")
        encoder: Any = made[0][1]
        texts = [encoder.encode(text(name, Random(row))) for row in range(options.rows)]
        starts = [
            Random(row).randrange(300) if options.spread else 0 for row in range(options.rows)
        ]
        for threads, engine in made:
            if engine.name == "xgrammar" and name == "schema":
                continue  # milliseconds a row, as docs/constraints.md says
            try:
                figures = measure(
                    engine, MaskFiller(threads), constraint, texts, starts, options.steps, words
                )
            except ConstraintError as error:
                figures = f"refused: {error.message}"
            print(f"  {f'{engine.name}, {threads} threads':24}{figures}", flush=True)


if __name__ == "__main__":
    main()
