"""Constrained generations with limits from the shortest text on: all have to be complete, and valid.

    python benchmarks/closing.py [--model default | small | bytes | qwen] [--generations N] [--schemas N] [--seed N]

Schemas are real-world ones (two thirds), random ones and such with rules that only masks enforce. Each generation
draws its schema, its limit (from the shortest text to 256 tokens, half of them within 16 of the shortest), greedy or
temperature 1, and the way it is run: 64 rows at a time, without forced text appended, with so little memory that rows
are retracted, in four branches of a program, or in a grammar block behind the text's beginning. A value that is not
valid is excused only if its schema has keywords that are left to a check (`sgl.grammar.check`). "default" has real
weights; "small" and "bytes" have random ones, with the default model's tokens and with tokens of which no longer text
is spelled by the tokenizer; "qwen" has random logits and needs VOCAB, a `.tiktoken` file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import machine

import sglang_lite as sgl
from sglang_lite.constraints.json_schema.normal_form import normalise
from sglang_lite.constraints.schema import json_schema, parse_json
from sglang_lite.protocol import ConstraintError, Generation, JsonSchema, SamplingParams
from sglang_lite.runtime.models.resolve import resolve
from tests.constraints.suites import maskbench
from tests.constraints.test_generation import enforced_schemas, random_model
from tests.runtime.models import small_gguf
from tests.runtime.structured_output.test_closing import RULES

LONGEST = 256
ROWS = 64


@dataclass(frozen=True, slots=True)
class Job:
    """A generation to try; `least` is the number of tokens of the schema's shortest text `shortest`."""

    name: str
    constraint: JsonSchema
    least: int
    shortest: str
    limit: int
    seed: int
    temperature: float


def schemas(count: int) -> Iterator[tuple[str, JsonSchema]]:
    for order in ("schema", "any"):
        for name, schema in RULES.items():
            yield f"{name}, {order}", json_schema(schema, order=order)
    yield from itertools.islice(((f"random {seed}", each) for seed, each in enforced_schemas(count // 3)), count // 3)
    for name, schema, _ in maskbench(2):
        yield name, json_schema(schema)


def known(engine: sgl.Engine, count: int) -> list[tuple[str, JsonSchema, int, str]]:
    """Schemas that are not refused and have a text of at most LONGEST tokens, with the shortest one."""
    found: list[tuple[str, JsonSchema, int, str]] = []
    for name, constraint in schemas(count):
        if len(found) == count:
            break
        try:
            endings = engine.compile_grammar(constraint).endings()
        except ConstraintError:
            continue
        text = None if endings is None else endings.text(endings.start)
        tokens = None if text is None else endings.spell(text)
        if tokens is None:
            print(f"no text is known of {name}")
        elif 0 < len(tokens) <= LONGEST:
            found.append((name, constraint, len(tokens), text.decode()))
    return found


def jobs(engine: sgl.Engine, generations: int, count: int, seed: int) -> list[Job]:
    dice, found = random.Random(seed), known(engine, count)
    print(f"{len(found)} schemas; shortest texts of {min(f[2] for f in found)} to {max(f[2] for f in found)} tokens")
    drawn = []
    for i in range(generations):
        name, constraint, least, shortest = found[i % len(found)]
        most = min(LONGEST, least + 16) if dice.random() < 0.5 else LONGEST
        limit = dice.randint(least, most)
        drawn.append(Job(name, constraint, least, shortest, limit, dice.randrange(1 << 30), dice.choice([0.0, 1.0])))
    dice.shuffle(drawn)
    return drawn


def rows(engine: sgl.Engine, asked: Sequence[Job]) -> list[Any]:
    events: list[Any] = [None] * len(asked)
    left = threading.Semaphore(0)

    def take(i: int, event: object) -> None:
        events[i] = event
        left.release()

    for i, job in enumerate(asked):
        params = SamplingParams(max_tokens=job.limit, seed=job.seed, temperature=job.temperature)
        engine.submit("A value: ", params, job.constraint, sink=lambda event, i=i: take(i, event))
    for _ in asked:
        left.acquire()
    return [(event.text, event.meta["shortened"]) if isinstance(event, Generation) else event for event in events]


@sgl.function
def branches(s: sgl.ProgramState, asked: Sequence[Job]) -> Any:
    s += "A value: "
    forked = s.fork(len(asked))
    for branch, job in zip(forked, asked):
        branch += sgl.gen(
            "value", constraint=job.constraint, max_tokens=job.limit, seed=job.seed, temperature=job.temperature
        )
    return forked


@sgl.function
def block(s: sgl.ProgramState, job: Job, begin: str) -> None:
    s += "A value: "
    with s.grammar(job.constraint):
        s += begin
        s += sgl.gen("rest", max_tokens=job.limit + len(begin), seed=job.seed, temperature=job.temperature)


def in_branches(engine: sgl.Engine, asked: Sequence[Job]) -> list[Any]:
    groups = [asked[i : i + 4] for i in range(0, len(asked), 4)]
    states = branches.run_batch([{"asked": group} for group in groups], backend=engine, on_error="return")
    found: list[Any] = []
    for group, state in zip(groups, states):
        children = [] if isinstance(state, Exception) else state.ret_value
        for i, _ in enumerate(group):
            try:
                if isinstance(state, Exception):
                    raise state
                found.append((children[i]["value"], children[i].get_meta_info("value")["shortened"]))
            except Exception as error:  # a failed branch is what is looked for
                found.append(error)
    return found


def in_blocks(engine: sgl.Engine, asked: Sequence[Job]) -> list[Any]:
    begins = [job.shortest[: job.seed % min(len(job.shortest), 12)] for job in asked]
    arguments = [{"job": job, "begin": begin} for job, begin in zip(asked, begins)]
    states = block.run_batch(arguments, backend=engine, on_error="return")
    found: list[Any] = []
    for begin, state in zip(begins, states):
        try:
            if isinstance(state, Exception):
                raise state
            found.append((begin + state["rest"], state.get_meta_info("rest")["shortened"]))
        except Exception as error:  # as above
            found.append(error)
    return found


WAYS: dict[tuple[tuple[str, Any], ...], dict[str, Callable[[sgl.Engine, Sequence[Job]], list[Any]]]] = {
    (): {"rows": rows, "branches": in_branches, "grammar block": in_blocks},
    (("jump_forward", "off"),): {"no jumps": rows},
    (("max_total_tokens", 4 * LONGEST),): {"retraction": rows},
}
WAY_NAMES = [name for ways in WAYS.values() for name in ways]


def verdict(job: Job, outcome: Any) -> str:
    if not isinstance(outcome, tuple):
        return f"error {type(outcome).__name__}"
    text, shortened = outcome
    try:
        json.loads(text)
    except ValueError:
        return f"does not parse, shortened {shortened}"
    try:
        parse_json(job.constraint, text)
    except ValueError:
        checked = normalise(job.constraint).checked or sgl.grammar.check(job.constraint).checked
        return "excused" if checked else f"not valid, shortened {shortened}"
    return f"valid, shortened {shortened}"


def engine_of(model: str, settings: dict[str, Any], folder: Path) -> sgl.Engine:
    if model == "bytes":
        return sgl.Engine.of(random_model(), **settings)
    if model == "small":
        path = folder / "small.gguf"
        if not path.exists():
            small_gguf.write(path, resolve("smollm2-135m"))
        return sgl.Engine(path, dtype="float32", device="cpu", in_process=True, **settings)
    if model == "qwen":
        return sgl.Engine.of(_random_qwen(Path(os.environ["VOCAB"])), **settings)
    return sgl.Engine(in_process=True, **{"max_total_tokens": 256 * LONGEST, **settings})  # others may run beside it


def _random_qwen(path: Path) -> Any:
    from dataclasses import replace

    import numpy as np
    import torch
    from tokenizers import AddedToken
    from vocabulary import PADDED, tiktoken_tokenizer

    from tests.runtime.scripted import ScriptedModel

    tokenizer = tiktoken_tokenizer(path)
    eos = tokenizer.vocab_size
    tokenizer.backend.add_special_tokens([AddedToken("<|endoftext|>", special=True)])

    class Random(ScriptedModel):
        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            states = hidden[:, 0].numpy().view(np.uint64)
            rows = [np.random.default_rng(state).normal(0, 2, PADDED) for state in states]
            return torch.from_numpy(np.array(rows, np.float32))

    return replace(random_model(), model=Random(), tokenizer=tokenizer, vocab_size=PADDED, eos_ids=frozenset({eos}))


def told(way: str, job: Job, outcome: Any) -> str:
    """The verdict on an outcome, printed if it is not what it has to be."""
    found = verdict(job, outcome)
    if not found.startswith(("valid, shortened True", "valid, shortened False", "excused")):
        what = f"limit {job.limit}, least {job.least}, seed {job.seed}, temperature {job.temperature}"
        print(f"  {way}: {found}: {job.name}, {what}: {outcome!r:.300}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bytes", choices=["default", "small", "bytes", "qwen"])
    parser.add_argument("--generations", type=int, default=1000)
    parser.add_argument("--schemas", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    print(machine.describe(), flush=True)
    began, total, asked = time.perf_counter(), Counter[str](), list[Job]()
    with tempfile.TemporaryDirectory() as folder:
        for settings, ways in WAYS.items():
            with engine_of(args.model, dict(settings), Path(folder)) as engine:
                asked = asked or jobs(engine, args.generations, args.schemas, args.seed)
                for way, run in ways.items():
                    number = list(WAY_NAMES).index(way)
                    share, counts = asked[number :: len(WAY_NAMES)], Counter[str]()
                    for at in range(0, len(share), ROWS):
                        part = share[at : at + ROWS]
                        counts.update(told(way, job, outcome) for job, outcome in zip(part, run(engine, part)))
                    total += counts
                    print(f"{args.model}, {way}: {dict(counts)}", flush=True)
    print(f"{args.model}: {total.total():,} in {time.perf_counter() - began:,.0f} s: {dict(total)}")
    unsaid = [each for each in total if each.startswith(("does not parse", "not valid")) and "unknown" not in each]
    assert not unsaid, f"values that are cut or wrong, and nothing says so: {unsaid}"


if __name__ == "__main__":
    main()
