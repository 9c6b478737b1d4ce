"""Cost of quotes from a long document, and whether they are exact.

    python benchmarks/quotes.py [--tokens N] [--quotes N] [--min-words N]

The document is the first N tokens of this project's documentation, of the default model's. Random
spans are spelled in tokens, with a mask before each, and a model with random logits writes quotes
under the masks. Times are of the processor. Compiling is all that a type takes until its first mask
is there, in one process whose engine has compiled another quote before.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Annotated

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from vocabulary import default_tokenizer

import sglang_lite as sgl
from sglang_lite.constraints.json_schema.allowed_values import list_quotes
from sglang_lite.constraints.memo import native_bytes
from sglang_lite.constraints.python_types.value_type import value_type
from sglang_lite.protocol import JsonSchema
from sglang_lite.runtime.structured_output.base import Matcher, next_mask
from sglang_lite.runtime.structured_output.llguidance import LlguidanceEngine
from sglang_lite.runtime.structured_output.vocabulary import list_allowed_tokens
from sglang_lite.runtime.tokens.tokenizer import Tokenizer


def document(tokenizer: Tokenizer, tokens: int) -> str:
    """First tokens of the documentation."""
    root = Path(__file__).parents[1]
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md")), root / "CHANGELOG.md"]
    return tokenizer.decode(tokenizer.encode("".join(page.read_text() for page in pages))[:tokens])


def spans(text: str, dice: Random, count: int) -> Iterator[str]:
    """Spans by words of 20 to 300 characters."""
    edges = [found.start() for found in re.finditer(r"\b(?=\w)|(?<=\w)\b", text)]
    for _ in range(count):
        start = dice.choice(edges[:-100])
        end = edges[bisect_left(edges, start + dice.randrange(20, 300), hi=len(edges) - 1)]
        yield text[start:end].strip()


def by_chance(matcher: Matcher, dice: Random, tokenizer: Tokenizer) -> Iterator[int]:
    """Tokens that a model with random logits writes."""
    while not matcher.finished:
        allowed = [
            each
            for each in list_allowed_tokens(next_mask(matcher))
            if each not in tokenizer.special_ids
        ]
        if not allowed and matcher.complete:
            return
        yield (token := dice.choice(allowed))
        assert matcher.accept(token), matcher.error


def spell(matcher: Matcher, text: bytes, ids: Mapping[bytes, int]) -> Iterator[float]:
    """Seconds of each mask while a text is spelled in the longest tokens that are allowed."""
    while text:
        began = time.process_time()
        mask = next_mask(matcher)
        yield time.process_time() - began
        found = (
            (end, ids[text[:end]]) for end in range(min(len(text), 40), 0, -1) if text[:end] in ids
        )
        end, token = next(
            (end, token) for end, token in found if mask[token // 32] >> (token % 32) & 1
        )
        assert matcher.accept(token), matcher.error
        text = text[end:]
    assert matcher.complete


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--quotes", type=int, default=2_000)
    parser.add_argument("--min-words", type=int, default=0)
    options = parser.parse_args()
    tokenizer, dice = default_tokenizer(), Random(0)
    engine = LlguidanceEngine(tokenizer, tokenizer.vocab_size, sorted(tokenizer.eos_ids))
    text = document(tokenizer, options.tokens)

    warm = value_type(Annotated[str, sgl.quote("imports all that is needed " * 1_000)]).constraint
    assert isinstance(warm, JsonSchema)
    engine.compile(warm)
    began = time.process_time()
    constraint = value_type(Annotated[str, sgl.quote(text, min_words=options.min_words)]).constraint
    assert isinstance(constraint, JsonSchema)
    made = engine.compile(constraint)
    compiled = time.process_time() - began
    print(f"{len(text):,} characters, {options.tokens:,} tokens")
    print(f"compile: {1e3 * compiled:.0f} ms")

    before = native_bytes()
    ids = {
        each: token
        for token, each in enumerate(tokenizer.token_bytes)
        if token not in tokenizer.special_ids
    }
    spelled = (
        json.dumps(each, ensure_ascii=False).encode() for each in spans(text, dice, options.quotes)
    )
    times, memory = list[float](), list[int]()
    for each in spelled:
        times += spell(made.matcher(), each, ids)
        memory.append(native_bytes() - before)
    p50, p99, longest = (1e6 * float(x) for x in np.quantile(times, (0.5, 0.99, 1)))
    print(f"{len(times):,} masks: p50 {p50:.0f} us, p99 {p99:.0f} us, longest {longest:,.0f} us")
    print(
        f"memory: {memory[0] / 1e6:,.0f} MB after the first quote, {max(memory) / 1e6:,.0f} MB at most"
    )

    outside, misplaced = 0, 0
    for _ in range(options.quotes):
        value = json.loads(tokenizer.decode(list(by_chance(made.matcher(), dice, tokenizer))))
        (found,) = list_quotes(constraint, value)
        outside += value not in text
        misplaced += text[found["start"] : found["end"]] != value
    print(f"{options.quotes:,} quotes by chance: {outside} outside, {misplaced} offsets wrong")


if __name__ == "__main__":
    main()
