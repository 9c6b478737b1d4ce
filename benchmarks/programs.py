"""Programs on an engine that knows what is to come of them: how much is computed, counted and not
timed.

    python benchmarks/programs.py [--only shared,crowded] [--size 1.0]

shared   tree of thought (depth 3, fork 4), judge with votes, few-shot batch: tokens computed over the different tokens
         of the program's tree, in a pool of 1.5 times those and of half of them; and where the
         engine does not use what it knows (policy "lpm" alone)
crowded  32 programs of four generations after 2,000 tokens of their own, in a pool for 8 of them:
tokens computed over
         different ones, how often one was computed at most, steps, and the step at which the last
         program ended over that of the first. As programs; as programs whose generations are each
         checked by their caller, whose verdict comes a step later; with and without what the engine
         knows; and by calls one after another, each a step after the answer before it (as
         `push_down=False` does)

The model is scripted, so that the counts depend on nothing else; `--size` shortens texts.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from sglang_lite.program.nodes import Fork, Gen, Join, Node, Select, Text, Verdict
from sglang_lite.protocol import Generation, Played, ProgramResult, SamplingParams, Span
from tests.runtime.scripted import SteppedEngine, hashes, loaded

SECTIONS = ("shared", "crowded")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Counting(SteppedEngine):
    """An engine that counts how often it computes what, and does not check its cache at every step."""

    def __init__(self, *, knows: bool, **config: Any) -> None:
        super().__init__(model=loaded(4096), max_running=64, context_length=4096, **config)
        self.computed: Counter[int] = Counter()  # by position and all tokens up to it, as a number
        self.longest = 0  # tokens of a sequence
        # of callers, who have them after the next step
        self.answers: list[Callable[[], object]] = []
        record_launch = self.scheduler.record_launch

        def counted(batch: Any) -> list[int]:
            table = self.store.table
            for slot, start, end in zip(
                batch.slots.tolist(), batch.starts.tolist(), batch.ends.tolist()
            ):
                self.computed.update(hashes(table.tokens[slot, :end])[start:].tolist())
            self.longest = max(self.longest, int(table.limit[batch.slots].max()))
            return record_launch(batch)

        self.scheduler.record_launch = counted  # type: ignore[method-assign]  # to count
        if not knows:
            self.scheduler.pauses.pause_at_next_step = _nothing  # type: ignore[method-assign]  # to switch it off
            self.scheduler.pauses.begin_pause = _nothing  # type: ignore[method-assign]  # as above
            self.scheduler.pauses.growth_ahead = _no_tokens  # type: ignore[method-assign]  # as above

    def check(self) -> None:
        pass

    def step(self) -> bool:
        answers, self.answers = self.answers, []
        goes_on = super().step()
        for answer in answers:
            answer()
        return goes_on or bool(answers or self.answers)

    @property
    def again(self) -> float:
        """Tokens computed, over different ones."""
        return sum(self.computed.values()) / max(len(self.computed), 1)


def _nothing(branch: object, tokens: object, space: object) -> None:
    """Holds nothing."""


def _no_tokens(branch: object, length: int) -> int:
    return 0


def text(seed: int, length: int) -> Text:
    chosen = np.random.default_rng(seed).integers(0, 26, max(length, 1))
    return Text("".join(_LETTERS[i] for i in chosen))


def gen(tokens: int, seed: int = 0) -> Gen:
    return Gen("x", SamplingParams(max_tokens=tokens, temperature=1.0, seed=seed, ignore_eos=True))


def tree_of_thought(size: float, depth: int = 3, seed: int = 0) -> tuple[Node, ...]:
    """A thought, and four continuations of it."""
    own = (text(seed, round(160 * size)), gen(round(32 * size) or 1, seed))
    if depth == 0:
        return own
    return (*own, Fork(tuple(tree_of_thought(size, depth - 1, 4 * seed + i + 1) for i in range(4))))


def judge(size: float) -> tuple[Node, ...]:
    """An essay, judged in eight ways, and a verdict from all of them."""
    votes = tuple(
        (
            text(i + 1, round(120 * size)),
            gen(round(24 * size) or 1),
            Select("vote", ("good", "bad", "so so")),
        )
        for i in range(8)
    )
    return text(0, round(1500 * size)), Fork(votes), Join(1), text(99, round(80 * size)), gen(16)


def few_shot(size: float) -> list[tuple[Node, ...]]:
    """Forty rows, and the examples that they share."""
    shots = text(0, round(1200 * size))
    return [(shots, text(i + 1, round(80 * size)), gen(8)) for i in range(40)]


def played(engine: Counting, programs: Sequence[tuple[Node, ...]]) -> list[int]:
    """Plays programs that come at the same time; returns the steps at which they ended."""
    ends: list[int] = []

    def sink(event: object) -> None:
        if isinstance(event, ProgramResult):
            ends.append(engine.loop.steps)
        elif isinstance(event, Exception):
            raise event

    for nodes in programs:
        program = engine.open_program(sink=sink)
        program.extend((), nodes)
        program.close()
    engine.drain()
    assert len(ends) == len(programs)
    return ends


def checked(engine: Counting, programs: Sequence[tuple[Node, ...]]) -> list[int]:
    """The same, with a verdict on each generation before what follows it."""
    ends: list[int] = []

    def play(nodes: Sequence[Node]) -> None:
        def sink(event: object) -> None:
            if isinstance(event, Played) and isinstance(event.event, Generation):
                verdict = Verdict((Span(event.event.text),))
                engine.answers.append(partial(program.judge, (), event.path[-1], verdict))
            elif isinstance(event, ProgramResult):
                ends.append(engine.loop.steps)
            elif isinstance(event, Exception):
                raise event

        program = engine.open_program(sink=sink)
        judged = [
            msgspec.structs.replace(node, judged=True) if isinstance(node, Gen) else node
            for node in nodes
        ]
        program.extend((), judged)
        program.close()

    for nodes in programs:
        play(nodes)
    engine.drain()
    assert len(ends) == len(programs)
    return ends


def called(engine: Counting, programs: Sequence[tuple[Node, ...]]) -> list[int]:
    """The same, of texts and generations, by calls: each when the one before it has been answered."""
    ends: list[int] = []

    def start(written: str, nodes: Sequence[Node]) -> None:
        for i, node in enumerate(nodes):
            if isinstance(node, Text):
                written += node.text
            elif isinstance(node, Gen):
                engine.submit(written, node.params, sink=following(written, nodes[i + 1 :]))
                return
        ends.append(engine.loop.steps)

    def following(written: str, nodes: Sequence[Node]) -> Callable[[object], None]:
        def sink(event: object) -> None:
            assert isinstance(event, Generation)
            engine.answers.append(lambda: start(written + event.text, nodes))

        return sink

    for nodes in programs:
        start("", nodes)
    engine.drain()
    assert len(ends) == len(programs)
    return ends


def shared(size: float) -> None:
    cases = {
        "tree of thought": [tree_of_thought(size)],
        "judge": [judge(size)],
        "few-shot batch": few_shot(size),
    }
    print(
        f"{'shared':18}{'different tokens':>17}{'1.5x pool':>11}{'without':>10}{'0.5x pool':>11}{'without':>10}"
    )
    for name, programs in cases.items():
        roomy = Counting(knows=True, max_total_tokens=100_000)
        played(roomy, programs)
        ratios = []
        for share, knows in ((1.5, True), (1.5, False), (0.5, True), (0.5, False)):
            engine = Counting(
                knows=knows,
                max_total_tokens=max(round(share * len(roomy.computed)), roomy.longest + 32),
            )
            played(engine, programs)
            ratios.append(engine.again)
        columns = "".join(f"{ratio:{width}.3f}x" for ratio, width in zip(ratios, (10, 9, 10, 9)))
        print(f"{name:18}{len(roomy.computed):17,}{columns}", flush=True)


def crowded(size: float) -> None:
    own, between, tokens = round(2000 * size), round(40 * size), round(24 * size) or 1
    programs = [
        (
            text(i, own),
            *(node for j in range(4) for node in (text(100 + 4 * i + j, between), gen(tokens, j))),
        )
        for i in range(32)
    ]
    pool = 8 * (own + 4 * (between + tokens) + 8)
    print(f"\n{'crowded':18}{'computed':>11}{'most often':>12}{'steps':>8}{'last/first':>12}")
    for label, play, knows in (
        ("programs", played, True), ("  without", played, False), ("checked programs", checked, True),
        ("  without", checked, False), ("calls", called, False),
    ):  # fmt: skip
        engine = Counting(knows=knows, max_total_tokens=pool)
        ends = play(engine, programs)
        print(f"{label:18}{engine.again:10.3f}x{max(engine.computed.values()):12}{engine.loop.steps:8}"
              f"{max(ends) / min(ends):12.1f}", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, separated by commas")
    parser.add_argument("--size", type=float, default=1.0, help="of the texts")
    options = parser.parse_args()
    only = options.only.split(",")
    if unknown := set(only) - set(SECTIONS):
        parser.error(f"no section: {', '.join(unknown)}")
    if "shared" in only:
        shared(options.size)
    if "crowded" in only:
        crowded(options.size)


if __name__ == "__main__":
    main()
