"""Whatever happens to programs that pause, and to the tiers below them, their answers are those of
a cache that never forgets, and every page has one owner after each action.
"""

import errno
import random
from dataclasses import dataclass, field

import pytest

from sglang_lite.program.nodes import Fork, Gen, Text
from sglang_lite.protocol import (
    Generation,
    Played,
    ProgramResult,
    RequestAbortedError,
    SamplingParams,
)
from sglang_lite.runtime.kv_cache.disk_tier import DiskTier
from sglang_lite.runtime.kv_cache.page_store import Folder
from tests.counts import some
from tests.runtime.scripted import Late, SteppedEngine, loaded

ACTIONS = some(150, 25_000)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SIZES = {"max_running": 4, "context_length": 800, "page_size": 16}


class FailingFolder(Folder):
    """Folder whose disk is full, or whose writers are killed, now and then."""

    def __init__(self, folder, draw):
        super().__init__(folder, 20_000)
        self._place, self._draw = folder, draw

    def store_pages(self, name, rows, slots, following):
        what = self._draw.random()
        if what < 0.05:
            raise OSError(errno.ENOSPC, "No space left on device")
        if what < 0.1:  # a writer that is killed leaves a part
            (self._place / f".{name.hex()}.kv.1.tmp").write_bytes(b"sglkv")
            return
        super().store_pages(name, rows, slots, following)


@dataclass
class Told:
    """A program: what it was given, and what it has told."""

    program: object
    nodes: list = field(default_factory=list)
    answers: dict = field(default_factory=dict)  # token ids by the place of a generation
    end: object = None
    asked: int = 0  # generations that it was given
    closed: bool = False

    def tell(self, event):
        if isinstance(event, Played):
            if isinstance(event.event, Generation):
                self.answers[event.path] = tuple(event.event.token_ids)
        else:
            assert self.end is None
            self.end = event

    def extend(self, nodes, generations):
        self.nodes += nodes
        self.asked += generations
        self.program.extend((), nodes)

    @property
    def waits_for_caller(self):
        return self.end is None and not self.closed and len(self.answers) == self.asked


def begun(engine):
    told = Told(None)
    told.program = engine.open_program(sink=told.tell)
    return told


def turn(draw):
    """Nodes of a turn, and the number of their generations."""
    text = Text("".join(draw.choices(LETTERS, k=draw.randrange(1, 40))))
    gen = Gen(
        "tool", SamplingParams(max_tokens=draw.randrange(1, 6), temperature=0, ignore_eos=True)
    )
    if draw.random() < 0.2:
        width = draw.randrange(1, 4)
        return (text, gen, Fork(((Text("xy"), gen),) * width)), 1 + width
    return (text, gen), 1


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_random_actions_on_programs_that_pause(tmp_path, policy):
    draw = random.Random(policy)
    engine = SteppedEngine(
        model=loaded(1024), max_total_tokens=1280, enable_hierarchical_cache=True, hicache_ratio=0.5,
        hicache_write_policy=policy, hicache_storage_backend="file", hicache_storage_dir=str(tmp_path),
        late=lambda: draw.random() < 0.4, **SIZES,
    )  # fmt: skip
    tiers, store = engine.store.source, FailingFolder(tmp_path, draw)
    threads = Late(draw)
    tiers.disk = DiskTier(store, threads)
    stems = ["".join(draw.choices(LETTERS, k=560)) for _ in range(4)]
    programs, open_ones, failures = [], [], 0
    for _ in range(ACTIONS):
        what = draw.random()
        idle = [each for each in open_ones if each.waits_for_caller]
        if what < 0.08 and len(open_ones) < 8:
            told = begun(engine)
            stem = Text(draw.choice(stems)[: draw.randrange(20, 560)])
            nodes, count = turn(draw)
            told.extend((stem, *nodes), count)
            programs.append(told)
            open_ones.append(told)
        elif what < 0.3 and idle:  # a tool has ended
            min(idle, key=lambda each: each.asked).extend(*turn(draw))
        elif what < 0.36 and idle:
            told = max(idle, key=lambda each: each.asked)
            told.closed = True
            told.program.close()
        elif what < 0.4 and open_ones:  # a tool has failed
            draw.choice(open_ones).program.abort()
        elif what < 0.45 and idle:
            draw.choice(idle).program.expect_pause((), draw.choice([0.0, 0.5, 30.0]))
        elif what < 0.55:
            engine.time += draw.choice([0.1, 2.0, 20.0])
        elif what < 0.56:
            engine.scheduler.end_pauses_and_flush()
        elif what < 0.7:
            threads.run(draw.randrange(4))
        engine.step()
        tiers.host.check_slots()
        open_ones = [each for each in open_ones if each.end is None]
        failures += tiers.disk.off
        if tiers.disk.off:  # somebody has made room, and starts an engine on the folder again
            threads.run(100)
            tiers.disk = DiskTier(store, threads)
    for told in open_ones:
        told.program.close()
    while engine.step() or any(told.end is None for told in programs):
        threads.run(3)
    engine.check_empty()
    forgets_nothing = SteppedEngine(model=loaded(1 << 16), max_total_tokens=1 << 16, **SIZES)
    forgets_nothing.check = lambda: None  # type: ignore[method-assign]  # recounting costs more than the rest
    for told in programs:
        assert isinstance(told.end, ProgramResult | RequestAbortedError), told.end
        again = begun(forgets_nothing)
        again.extend(told.nodes, told.asked)
        again.program.close()
        forgets_nothing.drain()
        assert told.answers.items() <= again.answers.items()
        assert told.answers.keys() == again.answers.keys() or isinstance(
            told.end, RequestAbortedError
        )
    assert any(told.answers for told in programs)
    assert (tiers.fetched_pages and tiers.read_pages and failures) or ACTIONS < 1000
