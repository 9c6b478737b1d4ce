"""What a constraint costs over llguidance alone: compiling with the first mask, and each token's
mask and step.

    python benchmarks/grammar_cost.py [--vocabulary FILE] [--schemas N] [--tools N] [--only schemas
    | tools]

Real schemas that both take, by turns in one process, in processor time of the thread. Alone,
llguidance reads the schema itself, with its own defaults. Ours makes the normal form, the grammar,
the shortest texts, llguidance's parser and the first mask, with what masks watch, and bounds of the
lengths. Reading the schema's JSON is not counted. Tokens are those of valid instances written as
ours are generated, where llguidance takes them too; those of schemas with open objects, whose names
are watched, are told separately. Tools are 500 functions: processor time of a program's first call,
and of another one. FILE is as in constraints_suite.py.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import machine
import numpy as np
from constraints_suite import ThisThread, watched
from llguidance import LLMatcher, LLTokenizer
from vocabulary import PADDED, default_tokenizer, tiktoken_tokenizer

import sglang_lite as sgl
from sglang_lite.constraints.json_schema.write_value import value_text
from sglang_lite.protocol import JsonSchema
from sglang_lite.runtime.structured_output.base import CompiledGrammar, next_mask
from sglang_lite.runtime.structured_output.ruled_grammar import names_are_open
from sglang_lite.runtime.structured_output.vocabulary import hide_special_tokens
from tests.constraints.suites import maskbench

ROUNDS = 3  # measurements of each token, of which the least counts


class Alone:
    """llguidance's matcher."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self.matcher, self.vocab_size = matcher, vocab_size
        self._mask = np.zeros((vocab_size + 31) // 32, np.int32)

    def step(self, token: int | None) -> bool:
        """Takes a token and computes the mask behind it."""
        if self.matcher.is_error() or (token is not None and not self.matcher.consume_token(token)):
            return False
        if not self.matcher.is_stopped():
            self.matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        return True


def read_alone(tokenizer: LLTokenizer, schema: str) -> Alone:
    """llguidance's own reading of a schema."""
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(schema), log_level=0)
    alone = Alone(matcher, tokenizer.vocab_size)
    alone.step(None)
    return alone


class Ours:
    """A grammar's matcher, which makes its masks itself."""

    def __init__(self, grammar: CompiledGrammar) -> None:
        self.matcher = grammar.matcher()
        next_mask(self.matcher)

    def step(self, token: int) -> bool:
        if not self.matcher.accept(token):
            return False
        if not self.matcher.finished:
            next_mask(self.matcher)
        return True


def compiled(engine: ThisThread, schema: JsonSchema) -> CompiledGrammar:
    grammar = watched(engine, schema)
    grammar.lengths()
    next_mask(grammar.matcher())
    return grammar


def timed(function: Any, *args: Any) -> tuple[float, Any]:
    began = time.thread_time()
    made = function(*args)
    return time.thread_time() - began, made


def real(engine: ThisThread, tokenizer: LLTokenizer, stride: int) -> list[str]:
    compiling: list[tuple[float, ...]] = []
    # by whether names are watched
    steps: dict[bool, list[tuple[float, ...]]] = {False: [], True: []}
    for number, (_, schema, tests) in enumerate(maskbench(stride)):
        constraint, text = sgl.grammar.json_schema(schema), json.dumps(schema)
        gc.collect()
        gc.freeze()  # as the process that compiles does between constraints
        try:
            if number % 2:
                (a, alone), (b, grammar) = (
                    timed(read_alone, tokenizer, text),
                    timed(compiled, engine, constraint),
                )
            else:
                (b, grammar), (a, alone) = (
                    timed(compiled, engine, constraint),
                    timed(read_alone, tokenizer, text),
                )
        except (sgl.ConstraintError, ValueError):
            continue
        if alone.matcher.is_error():
            continue
        compiling.append((a, b))
        texts = [value_text(constraint, case["data"]) for case in tests if case["valid"]]
        unwatched = engine.compile(constraint)
        for each in texts:
            if each is not None:
                tokens = engine.encode(each)[:500]
                steps[names_are_open(constraint)] += walked(alone, [unwatched, grammar], tokens)
    unwatched_and_watched = [times[1:] for times in steps[True]]
    return [
        f"compile and first mask, {len(compiling)} schemas: {compared(compiling, 1e3, 'ms')}",
        f"a token, {len(steps[False]):,} of closed schemas: {compared(steps[False], 1e6, 'us')}",
        f"a token, {len(steps[True]):,} of open schemas: {compared(steps[True], 1e6, 'us')}",
        f"the same, over ours without watching names: {compared(unwatched_and_watched, 1e6, 'us')}",
    ]


def walked(
    alone: Alone, grammars: Sequence[CompiledGrammar], tokens: Sequence[int]
) -> list[tuple[float, ...]]:
    """Seconds of each token, alone and of each grammar; empty if llguidance alone does not take
    them.
    """
    found = [(float("inf"),) * (1 + len(grammars))] * len(tokens)
    for _ in range(ROUNDS):
        theirs, ours = (
            Alone(alone.matcher.deep_copy(), alone.vocab_size),
            [Ours(each) for each in grammars],
        )
        for at, token in enumerate(tokens):
            (first, taken), *others = (
                timed(theirs.step, token),
                *(timed(each.step, token) for each in ours),
            )
            assert all(accepted for _, accepted in others)
            if not taken:
                return []
            found[at] = tuple(map(min, found[at], (first, *(seconds for seconds, _ in others))))
    return found


def compared(times: Sequence[tuple[float, ...]], unit: float, name: str) -> str:
    """Quantiles of the last time over those of the first."""
    if len(times) < 2:
        return "none"
    alone, ours = (
        quantiles([each[0] for each in times], n=100),
        quantiles([each[-1] for each in times], n=100),
    )
    parts = [
        f"p{p} {ours[p - 1] * unit:.2f} {name} over {alone[p - 1] * unit:.2f}: {ours[p - 1] / alone[p - 1]:.2f}x"
        for p in (50, 90, 99)
    ]
    ratios = quantiles([each[-1] / each[0] for each in times], n=100)
    return f"{'; '.join(parts)}; of the ratios p50 {ratios[49]:.2f}x, p90 {ratios[89]:.2f}x"


def tools(count: int) -> str:
    """Processor time of calls in which a model may use one of many functions."""
    functions = [function(number) for number in range(count)]

    @sgl.function
    def ask(s: Any) -> None:
        s += sgl.user("Which?") + sgl.assistant(
            sgl.gen("call", tools=functions, tool_choice="required")
        )

    backend = sgl.ScriptedBackend(
        lambda _: '{"tool": "tool_7", "arguments": {"place": "Oslo", "days": 3}}'
    )
    times = []
    for _ in range(6):
        began = time.process_time()
        assert ask.run(backend=backend)["call"].name == "tool_7"
        times.append(time.process_time() - began)
    return f"{count} tools: first call {times[0] * 1e3:.1f} ms, another {median(times[1:]) * 1e3:.1f} ms"


def function(number: int) -> Any:
    def tool(place: str, days: int = 1, unit: str = "C") -> str:
        return f"{place} {days} {unit}"

    tool.__name__ = f"tool_{number}"
    tool.__doc__ = f"Tells the weather of kind {number}."
    return tool


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=("schemas", "tools"))
    parser.add_argument("--vocabulary", type=Path)
    parser.add_argument("--schemas", type=int, default=140, help="of the sample of 700")
    parser.add_argument("--tools", type=int, default=500)
    options = parser.parse_args()
    print(machine.describe())
    if options.only != "schemas":
        print(tools(options.tools), flush=True)
    if options.only == "tools":
        return
    tokenizer = (
        tiktoken_tokenizer(options.vocabulary) if options.vocabulary else default_tokenizer()
    )
    size, eos = PADDED if options.vocabulary else tokenizer.vocab_size, sorted(tokenizer.eos_ids)
    engine = ThisThread(tokenizer, size, eos)
    alone = LLTokenizer(
        hide_special_tokens(json.loads(tokenizer.backend.to_str())),
        n_vocab=size,
        eos_token=eos or None,
    )
    compiled(engine, sgl.grammar.json_schema(True))  # tables that are made once
    print(*real(engine, alone, max(1, 700 // options.schemas)), sep="\n")


if __name__ == "__main__":
    main()
