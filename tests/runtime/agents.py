"""Agents on a stepped engine: programs that pause between generations, on a simulated clock, and
what the best cache could do for the order in which they come back.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from sglang_lite.program.nodes import Gen, Text
from sglang_lite.protocol import Generation, Played, ProgramResult, SamplingParams, Usage
from tests.runtime.scripted import SteppedEngine

LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Turn:
    """A turn of an agent: tokens that it reads, tokens that it generates, and seconds in a tool
    after it.
    """

    reads: int
    writes: int
    pause: float
    name: str = "step"


class Agent:
    """An agent, which is begun `at` a time."""

    def __init__(
        self, number: int, turns: Sequence[Turn], at: float = 0.0, shared: str = ""
    ) -> None:
        self.turns, self.at = turns, at
        self._draw, self._shared = random.Random(number), shared
        self.done = self.length = 0
        self.result: object = None
        self.ended = 0.0
        self.usages: list[Usage] = []

    def begin(self, engine: Simulated) -> None:
        self._engine = engine
        self._program = engine.open_program(sink=self._told)
        self._next(self._shared)

    def _next(self, shared: str = "") -> None:
        turn = self.turns[self.done]
        text = shared + "".join(self._draw.choices(LETTERS, k=turn.reads))
        params = SamplingParams(max_tokens=turn.writes, temperature=0, ignore_eos=True)
        self._program.extend((), (Text(text), Gen(turn.name, params)))

    def _told(self, event: object) -> None:
        if isinstance(event, Played) and isinstance(event.event, Generation):
            turn = self.turns[self.done]
            self.done += 1
            usage = event.event.usage
            self.usages.append(usage)
            self.length = usage.prompt_tokens + usage.completion_tokens
            self._engine.accesses.append((self, self.length))
            last = self.done == len(self.turns)
            self._engine.at(
                self._engine.time + turn.pause, self._program.close if last else self._next
            )
        elif not isinstance(event, Played):
            self.result, self.ended = event, self._engine.time


class Simulated(SteppedEngine):
    """An engine with a calendar, which counts the tokens that it computes."""

    def __init__(self, *, checks: bool = False, **config: object) -> None:
        super().__init__(**config)  # type: ignore[arg-type]  # of EngineConfig
        self._calendar: list[tuple[float, int, Callable[[], object]]] = []
        self._number = count()
        self._checks = checks
        self.accesses: list[tuple[Agent, int]] = []  # who had how many tokens after a generation
        self.computed = 0
        record_launch = self.scheduler.record_launch

        def launch(batch):
            self.computed += batch.tokens
            return record_launch(batch)

        self.scheduler.record_launch = launch  # type: ignore[method-assign]  # to count

    def check(self) -> None:
        if self._checks:
            super().check()

    def at(self, time: float, call: Callable[[], object]) -> None:
        heapq.heappush(self._calendar, (time, next(self._number), call))

    def simulate(self, agents: Sequence[Agent], limit: int = 200_000) -> None:
        """Steps until all agents have ended."""
        for agent in agents:
            self.at(self.time + agent.at, lambda agent=agent: agent.begin(self))
        for _ in range(limit):
            while self._calendar and self._calendar[0][0] <= self.time:
                heapq.heappop(self._calendar)[2]()
            goes_on = self.step()
            if goes_on and (not self.scheduler.may_wait or self.scheduler.fetches.are_pending):
                continue  # without a batch a step takes time, too
            if not goes_on and not self._calendar:
                break
            next_time = self._calendar[0][0] if self._calendar else self.time
            self.time = max(self.time, min(next_time, self.time + 0.05) if goes_on else next_time)
        assert all(isinstance(agent.result, ProgramResult) for agent in agents), [
            a.result for a in agents
        ]


def furthest(accesses: Sequence[tuple[object, int]], room: int) -> int:
    """Tokens that a cache of this size must compute for these accesses, in this order, if it always
    gives up the tokens of whom comes back last (Belady's MIN, over the ends of prefixes).
    """
    following: dict[int, float] = {}
    nearest: dict[object, int] = {}
    for i in reversed(range(len(accesses))):
        following[i] = nearest.get(accesses[i][0], float("inf"))
        nearest[accesses[i][0]] = i
    kept: Counter[object] = Counter()
    when: dict[object, float] = {}
    computed = 0
    for i, (who, length) in enumerate(accesses):
        computed += length - kept[who]
        kept[who], when[who] = length, following[i]
        for other in sorted(kept, key=lambda each: -when[each]):  # those that have ended first
            over = sum(kept.values()) - room
            if over <= 0:
                break
            if other is not who:
                kept[other] -= min(kept[other], over)
    return computed
