"""Limited answers against the unlimited ones: none may differ from them without saying so.

    python benchmarks/shortened.py [--model default | FILE.gguf] [--generations N] [--ways a,b]
    [--seed N] [--json FILE]

300 schemas (ordinary types, real-world and random ones, a few regexes), greedy and temperature 1,
limits from the shortest text to 256 tokens. Each case runs with 4,096 tokens first, until it ends
or passes `--enough` tokens, and then with up to six limits. A draw is a function of logits, mask,
seed and position, so what a limited answer has to be is read off the draws of the unlimited one
(shortened_oracle.py): an unmarked text equals the unlimited one; a marked value has only scalars
whose end was drawn. A part runs as a stream as well, which has to say the same. Rows do not depend
on their batch by rounding, which would be a difference as well (`deterministic=True`).

Ways: library (rows of the engine), n (three samples), batch (programs), typed (`type=`), and over
HTTP: chat, chat_n, tools, responses, messages, ollama, generate, generate_batch. Counts per way;
exit status 1 if anything is violated.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import httpx2

sys.path.insert(0, str(Path(__file__).parents[1]))

import machine
from serve import serving
from shortened_cases import Case, Source, cases, sources
from shortened_oracle import Draws, Judge, Outcome, Vocabulary
from shortened_ways import CLIENTS, SCHEMA_ONLY, STREAMS, WAIT_S, WAYS, Context

import sglang_lite as sgl
from sglang_lite.runtime.core.request_builder import RequestBuilder
from sglang_lite.runtime.core.step_loop import RequestEnds
from sglang_lite.runtime.core.token_reader import TokenReader
from sglang_lite.runtime.models.resolve import resolve
from sglang_lite.runtime.requests.output_builder import Finish
from sglang_lite.runtime.requests.sample_seed import derive_sample_seed

EXAMPLES = 3
CALL = 30  # tokens of a call around its arguments, at most
UNLIMITED = 4096
LONGEST = 256
LIMITS = 6  # of each source
GROUP = 256  # sources that run together
SHARES = {
    "library": 0.60, "n": 0.06, "batch": 0.05, "typed": 0.03, "chat": 0.04, "chat_n": 0.02, "tools": 0.02,
    "responses": 0.04, "messages": 0.04, "ollama": 0.04, "generate": 0.04, "generate_batch": 0.02,
}  # fmt: skip


class Log:
    """Log of the draws of all requests of the engines of this process, read where they end, before
    any result is made.

    Args:
        enough: number of tokens after which an unlimited request is ended.
        vocabulary: reads the seed from the prompts of requests that set none, as "#123.".
    """

    def __init__(self, enough: int, vocabulary: Vocabulary) -> None:
        self.enough, self.vocabulary, self._lock = enough, vocabulary, threading.Lock()
        self._found: dict[tuple[int, int], list[Draws]] = defaultdict(list)

    def taken(self, seed: int, limit: int) -> list[Draws]:
        """Takes the draws of the requests of a seed and limit out of the log, in the order in which
        they ended.
        """
        with self._lock:
            return self._found.pop((seed, limit), [])

    def note(self, request: Any, table: Any, finish: str) -> None:
        known = int(table.known[request.slot])
        tokens = tuple(table.tokens[request.slot, :known].tolist())
        prompt, ids = tokens[: request.prompt_len], tokens[request.prompt_len :]
        found = Draws(prompt, ids, finish)
        with self._lock:
            self._found[request.seed, request.params.max_tokens].append(found)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Replaces the methods that end a request, read a step's tokens, and give a request its
        seed.
        """
        log, finish, read = self, RequestEnds.end_with_result, TokenReader.read_draws
        give = getattr(RequestBuilder, "_set_prompt")  # noqa: B009, as it is private

        def noted_finish(self: Any, request: Any, end: Any) -> None:
            log.note(request, self._scheduler.store.table, end.reason)
            finish(self, request, end)

        def capped_read(self: Any, batch: Any, *rest: Any) -> Iterator[tuple[Any, Any]]:
            yield from read(self, batch, *rest)
            table = self._scheduler.store.table
            for request in batch.requests:
                if (
                    request.params.max_tokens != UNLIMITED
                    or request.handle is None
                    or request.ended
                ):
                    continue
                if int(table.known[request.slot]) - request.prompt_len > log.enough:
                    yield request, Finish("length", None)

        def seeded_give(self: Any, request: Any, tokens: Any, sample: int) -> None:
            give(self, request, tokens, sample)
            if request.params.seed is None:
                said = re.search(r"#([0-9]+)\.", log.vocabulary.text(tokens.tolist()))
                request.seed = request.seed if said is None else int(said[1])

        with (
            mock.patch.object(RequestEnds, "end_with_result", noted_finish),
            mock.patch.object(TokenReader, "read_draws", capped_read),
            mock.patch.object(RequestBuilder, "_set_prompt", seeded_give),
        ):
            yield


@dataclass(slots=True)
class Run:
    """One run of the benchmark: what it judges with, and the sources that were refused."""

    context: Context
    log: Log
    judge: Judge
    found: list[Case]
    dice: random.Random
    refused: Counter[str] = field(default_factory=Counter)

    def way(self, name: str, count: int) -> None:
        """Judges about `count` limited answers of one way, in groups of sources."""
        usable = [case for case in self.found if name not in SCHEMA_ONLY or case.schema is not None]
        usable = [case for case in usable if name != "typed" or case.type is not None]
        usable = [case for case in usable if name != "tools" or case.schema.get("type") == "object"]
        samples = {"n": 3, "chat_n": 2}.get(name, 1)
        drawn = sources(usable, -(-count // (LIMITS * samples)), self.dice, samples=samples)
        for at in range(0, len(drawn), GROUP):
            self._group(name, drawn[at : at + GROUP])

    def _group(self, name: str, drawn: list[Source]) -> None:
        began = time.perf_counter()
        free: list[tuple[Source, list[Draws], list[Outcome]]] = []
        for source, outcomes in zip(
            drawn, WAYS[name](self.context, [(source, UNLIMITED) for source in drawn], False)
        ):
            draws = [
                self.log.taken(derive_sample_seed(source.seed, i), UNLIMITED)
                for i in range(source.samples)
            ]
            if not all(draws):
                self.refused[f"{name}: {outcomes[0].error or outcomes[0]!r:.100}"[:160]] += 1
            else:
                free.append((source, [each[-1] for each in draws], outcomes))
        middle = time.perf_counter()
        calls = [
            (i, limit)
            for i, (source, draws, _) in enumerate(free)
            for limit in self._limits(name, source, draws)
        ]
        asked = [(free[i][0], limit) for i, limit in calls]
        answers = WAYS[name](self.context, asked, False)
        drawn_of = [
            [self._drawn(source, k, limit) for k in range(source.samples)]
            for source, limit in asked
        ]
        for at, ((i, limit), outcomes) in enumerate(zip(calls, answers)):
            source, draws, whole = free[i]
            self._judge(name, source, limit, draws, drawn_of[at], outcomes, whole)
        if name in STREAMS:
            again = [at for at in range(len(asked)) if at % 6 == 0]
            streams = WAYS[name](self.context, [asked[at] for at in again], True)
            for at, outcomes in zip(again, streams):
                self._compare(name, asked[at], answers[at], outcomes)
        ended = time.perf_counter()
        print(f"  {name}: {len(free)} unlimited in {middle - began:.1f} s, {len(calls)} limited in "
              f"{ended - middle:.1f} s", flush=True)  # fmt: skip

    def _limits(self, name: str, source: Source, draws: list[Draws]) -> list[int]:
        """Limits of a source: most of them below the length of its unlimited answer."""
        least, length = (
            source.case.least + (CALL if name == "tools" else 0),
            max(len(each.ids) for each in draws),
        )
        least = min(least, LONGEST)
        found: set[int] = set()
        for i in range(LIMITS if length > least else 1):
            most = min(length - 1, LONGEST) if i < LIMITS * 0.8 else LONGEST
            near = self.dice.random() < 0.25
            found.add(self.dice.randint(least, max(least, min(most, least + 16) if near else most)))
        return sorted(found)

    def _drawn(self, source: Source, sample: int, limit: int) -> Draws | None:
        found = self.log.taken(derive_sample_seed(source.seed, sample), limit)
        return found[-1] if found else None

    def _judge(
        self, name: str, source: Source, limit: int, free: list[Draws], drawn: list[Draws | None], got: list[Outcome],
        whole: list[Outcome],
    ) -> None:  # fmt: skip
        for i, (unlimited, one, outcome) in enumerate(zip(free, drawn, got)):
            what = f"{source.case.name}, seed {source.seed}, sample {i}, t {source.temperature}"
            if one is None:
                self.judge.case(name, "cases")
                self.judge.violation(name, "error", f"{what}, limit {limit}: {outcome!r:.300}")
                continue
            try:
                if name == "tools":
                    self.judge.judge_call(name, limit, unlimited, one, outcome, whole[i], what)
                else:
                    self.judge.judge(name, source.case.schema, limit, unlimited, one, outcome, what)
            except Exception as error:  # a text that this scanner can't read is looked at
                self.judge.violation(
                    name, "the oracle failed", f"{error!r}: {what}, limit {limit}: {outcome!r:.300}"
                )

    def _compare(
        self, name: str, call: tuple[Source, int], whole: list[Outcome], stream: list[Outcome]
    ) -> None:
        """A stream has to say what the whole answer says."""
        source, limit = call
        for i, (one, other) in enumerate(zip(whole, stream)):
            self.log.taken(derive_sample_seed(source.seed, i), limit)
            self.judge.case(name, "streams")
            if (one.text, one.finish, one.calls) != (
                other.text,
                other.finish,
                other.calls,
            ) or other.error:
                what = f"{source.case.name}, seed {source.seed}, limit {limit}: {other!r:.300}; whole {one!r:.300}"
                self.judge.violation(name, "a stream differs from the whole answer", what)
            elif isinstance(other.shortened, list) and one.shortened != other.shortened:
                self.judge.violation(
                    name, "a stream's `shortened` differs", f"{source.case.name}: {other!r:.300}"
                )


def report(run: Run, seconds: float) -> dict[str, Any]:
    """Prints the counts of each way and the violations with examples; returns them as data."""
    judge = run.judge
    names = [
        "cases",
        "reached limit",
        "unmarked",
        "marked with value",
        "marked without value",
        "streams",
    ]
    print(f"{'way':15s}" + "".join(f"{name:>22s}" for name in names) + f"{'violations':>12s}")
    total = Counter[str]()
    for way, counts in judge.counts.items():
        broken = judge.violations.get(way, Counter[str]())
        print(
            f"{way:15s}"
            + "".join(f"{counts[name]:22,d}" for name in names)
            + f"{broken.total():12,d}"
        )
        total += counts
    broken = sum(judge.violations.values(), Counter[str]())
    notes = sum(judge.notes.values(), Counter[str]())
    print(
        f"{'all':15s}" + "".join(f"{total[name]:22,d}" for name in names) + f"{broken.total():12,d}"
    )
    marked = total["marked with value"] + total["marked without value"]
    print(f"marked: {marked / max(total['cases'], 1):.1%}; reached their limit: "
          f"{total['reached limit'] / max(total['cases'], 1):.1%}; {seconds:,.0f} s")  # fmt: skip
    for title, counter in (
        ("violations", broken),
        ("notes", notes),
        ("refused by a way", run.refused),
    ):
        print(f"{title}: {dict(counter.most_common())}")
    for kind in [*broken, *notes]:
        for example in judge.examples.get(kind, ())[:EXAMPLES]:
            print(f"  {kind}: {example}")
    return {
        "counts": {way: dict(counts) for way, counts in judge.counts.items()},
        "violations": {way: dict(counts) for way, counts in judge.violations.items()},
        "notes": {way: dict(counts) for way, counts in judge.notes.items()},
        "examples": judge.examples, "refused": dict(run.refused), "seconds": seconds,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="default", help="default, or a GGUF file with a byte-level vocabulary"
    )
    parser.add_argument("--generations", type=int, default=8000)
    parser.add_argument("--schemas", type=int, default=300)
    parser.add_argument("--ways", "--wires", default=",".join(SHARES))
    parser.add_argument(
        "--enough", type=int, default=320, help="tokens after which an unlimited answer is ended"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(machine.describe(), flush=True)
    began, ways = time.perf_counter(), args.ways.split(",")
    path = resolve("smollm2-135m") if args.model == "default" else Path(args.model)
    vocabulary = Vocabulary(path)
    log = Log(max(args.enough, LONGEST), vocabulary)
    with (
        log.installed(),
        sgl.Engine(path, deterministic=True, in_process=True) as engine,
        serving(engine) as url,
    ):
        found = cases(engine, min(args.schemas, max(args.generations, 26)), LONGEST)
        print(f"{len(found)} schemas after {time.perf_counter() - began:.0f} s", flush=True)
        with httpx2.Client(
            base_url=url, timeout=WAIT_S, limits=httpx2.Limits(max_connections=CLIENTS)
        ) as http:
            name = http.get("/v1/models").json()["data"][0]["id"]
            run = Run(
                Context(engine, http, name), log, Judge(vocabulary), found, random.Random(args.seed)
            )
            shares = sum(SHARES[way] for way in ways)
            for way in ways:
                run.way(way, max(int(args.generations * SHARES[way] / shares), LIMITS))
    data = report(run, time.perf_counter() - began)
    if args.json is not None:
        args.json.write_text(json.dumps(data, indent=1), encoding="utf-8")
    sys.exit(1 if data["violations"] else 0)


if __name__ == "__main__":
    main()
