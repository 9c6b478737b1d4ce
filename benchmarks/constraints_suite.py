"""The official JSON Schema suite and real-world schemas: right and wrong, and what compiling and
masks cost.

    python benchmarks/constraints_suite.py [--only official | real] [--vocabulary FILE] [--schemas
    N] [--groups N]

An instance is judged three times: "byte level", exactly as `json.dumps` writes it, by masks of the
schema's order and of any order (`order="any", integers="decimal"`), and "rewritten", its value as
our constraints would write it, which is what they are made for. A real-world schema passes if it
judges all of its instances right. The official suite's cases are judged with formats as annotations
and its remotes as resources, those of its optional parts with formats demanded; a refused schema's
cases count as wrong. What of the optional parts is wrongly accepted is named by
docs/constraints.md.

Times are processor time of the thread that does all of the work: the schema's normal form, its
grammar's text, llguidance's parser and the first mask; then the masks before every token of every
valid instance, written as it is generated, with what Python watches in them. (An engine's masks are
made by a thread of llguidance's, which waits actively for more: counted with it, each mask would
take longer than it does.) Reading a schema's text, which is done where the constraint is written,
is not counted. FILE is a `.tiktoken` file (Qwen's is in the PyPI package `dashscope`), padded to
151,936 tokens; without it the default model's 49,152 are used.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Sequence
from itertools import islice, product
from pathlib import Path
from statistics import quantiles
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).parents[1]))

import machine
import msgspec
import numpy as np
from numpy.typing import NDArray
from vocabulary import PADDED, default_tokenizer, tiktoken_tokenizer

import sglang_lite as sgl
from sglang_lite.constraints.json_schema.write_value import value_text
from sglang_lite.protocol import JsonSchema
from sglang_lite.runtime.structured_output.base import (
    CompiledGrammar,
    masks_allow_tokens,
    next_mask,
)
from sglang_lite.runtime.structured_output.llguidance import LlguidanceEngine, LlguidanceMatcher
from sglang_lite.runtime.structured_output.ruled_grammar import extract_mask_rules, with_mask_rules
from tests.constraints.suites import DRAFTS, maskbench, official_groups


class ThisThread(LlguidanceEngine):
    """llguidance with its masks made by the thread that asks for them, whose time is measured."""

    def masks(self, matchers: Sequence[LlguidanceMatcher]) -> NDArray[np.int32]:
        masks = np.empty((len(matchers), (self.vocab_size + 31) // 32), np.int32)
        for matcher, mask in zip(matchers, masks):
            matcher.inner.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        return masks


def official(draft: str, groups: int | None) -> list[str]:
    """The suite, or so many of its groups, in a line for each way to judge."""
    lines = [f"official suite, {draft}:"]
    by_bytes = LlguidanceEngine(None)
    for part, level in (
        *product(["drafts"], _LEVELS),
        *product(["optional"], ("byte level", "rewritten")),
    ):
        right = wrong = refused = cases = 0
        formats: Literal["annotate", "assert"] = "annotate" if part == "drafts" else "assert"
        for _, schema, resources, tests in islice(official_groups(draft, part), groups):
            cases += len(tests)
            try:
                known = sgl.grammar.json_schema(
                    schema, format=formats, resources=resources, **STYLES[level]
                )
                grammar = watched(by_bytes, known)
            except sgl.ConstraintError as error:
                contradicts = "contradicts itself" in str(error)
                refused += 0 if contradicts else len(tests)
                right += sum(contradicts and not case["valid"] for case in tests)
                continue
            for case in tests:
                text = json.dumps(case["data"], ensure_ascii=False)
                rewriting = level == "rewritten"
                verdict = (
                    rewritten(known, text)
                    if rewriting
                    else masks_allow_tokens(grammar, by_bytes.encode(text))
                )
                right += verdict == case["valid"]
                wrong += bool(verdict) and not case["valid"]
        share = f"{cases} cases, {100 * right / cases:.1f} % right"
        title = level if part == "drafts" else f"optional parts and formats, {level}"
        lines.append(f"  {title}: {share}, {wrong} wrongly accepted, {refused} refused")
    return lines


def watched(engine: LlguidanceEngine, constraint: JsonSchema) -> CompiledGrammar:
    """A grammar with what its masks watch."""
    return with_mask_rules(
        engine.compile(constraint), engine.ending_tokens, extract_mask_rules(constraint)
    )


def in_any_order(engine: LlguidanceEngine, constraint: JsonSchema) -> CompiledGrammar | None:
    """The grammar of a schema's members in any order; None where that is refused."""
    try:
        return watched(engine, msgspec.structs.replace(constraint, order="any", integers="decimal"))
    except sgl.ConstraintError:
        return None


def real(engine: LlguidanceEngine, stride: int) -> list[str]:
    """The real-world schemas, and the times of their grammars."""
    schemas = refused = 0
    passed, wrong = dict.fromkeys(_LEVELS, 0), dict.fromkeys(_LEVELS, 0)
    first, masks = [], []
    by_bytes = LlguidanceEngine(None)
    for _, schema, tests in maskbench(stride):
        schemas += 1
        constraint = sgl.grammar.json_schema(schema)
        gc.collect()
        gc.freeze()  # as the process that compiles does between constraints
        began = time.thread_time()
        try:
            grammar = watched(engine, constraint)
            next_mask(grammar.matcher())
        except sgl.ConstraintError as error:
            contradicts = "contradicts itself" in str(error)
            refused += not contradicts
            for level in _LEVELS:
                passed[level] += contradicts and not any(case["valid"] for case in tests)
            continue
        first.append(time.thread_time() - began)
        bytewise, unordered = watched(by_bytes, constraint), in_any_order(by_bytes, constraint)
        texts = [json.dumps(case["data"], ensure_ascii=False) for case in tests]
        judged: dict[str, list[Any]] = {  # truth, as each level has it
            "byte level": [masks_allow_tokens(bytewise, by_bytes.encode(text)) for text in texts],
            "any order": [
                unordered and masks_allow_tokens(unordered, by_bytes.encode(text)) for text in texts
            ],
            "rewritten": [rewritten(constraint, text) for text in texts],
        }
        for level, verdicts in judged.items():
            passed[level] += all(verdict == case["valid"] for verdict, case in zip(verdicts, tests))
            wrong[level] += any(
                verdict and not case["valid"] for verdict, case in zip(verdicts, tests)
            )
        for case in tests:
            styled = (
                value_text(constraint, case["data"])
                if case["valid"] and judged["rewritten"][0] is not None
                else None
            )
            masks += mask_times(engine, grammar.matcher(), engine.encode(styled)) if styled else []
    return [
        f"real-world schemas: {schemas}, {refused} refused",
        *(
            f"  {level}: {100 * passed[level] / schemas:.1f} % pass, {wrong[level]} with an invalid instance accepted"
            for level in _LEVELS
        ),
        f"compile + first mask: {spread(first, 1e3, 'ms')}",
        f"mask ({len(masks):,} at {engine.vocab_size:,} tokens): {spread(masks, 1e6, 'us')}",
    ]


def rewritten(constraint: JsonSchema, text: str) -> bool | None:
    """True where a text's value is allowed; None where that can't be told, which is never right."""
    try:
        return sgl.grammar.matches(constraint, text)
    except sgl.ConstraintError:
        return None


_LEVELS = ("byte level", "any order", "rewritten")
STYLES: dict[str, dict[str, Any]] = {
    "byte level": {}, "any order": {"order": "any", "integers": "decimal"}, "rewritten": {},
}  # fmt: skip


def mask_times(engine: LlguidanceEngine, matcher: Any, tokens: list[int]) -> list[float]:
    times = []
    for token in tokens[:1000]:
        began = time.thread_time()
        next_mask(matcher)
        times.append(time.thread_time() - began)
        if not matcher.accept(token):
            raise AssertionError(f"a valid text is not accepted: {matcher.error}")
    return times


def spread(times: list[float], unit: float, name: str) -> str:
    cuts = quantiles(times, n=100)
    return f"p50 {cuts[49] * unit:.2f} {name}, p99 {cuts[98] * unit:.2f}, longest {max(times) * unit:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=("official", "real"))
    parser.add_argument("--vocabulary", type=Path)
    parser.add_argument("--schemas", type=int, default=700, help="of the sample of 700")
    parser.add_argument("--groups", type=int, help="of each official suite; all without it")
    options = parser.parse_args()
    print(machine.describe())
    for draft in DRAFTS if options.only != "real" else ():
        print(*official(draft, options.groups), sep="\n", flush=True)
    if options.only == "official":
        return
    tokenizer = (
        tiktoken_tokenizer(options.vocabulary) if options.vocabulary else default_tokenizer()
    )
    engine = ThisThread(
        tokenizer, PADDED if options.vocabulary else None, sorted(tokenizer.eos_ids)
    )
    watched(engine, sgl.grammar.json_schema(True))  # tables that are made once
    for line in real(engine, max(1, 700 // options.schemas)):
        print(line)


if __name__ == "__main__":
    main()
