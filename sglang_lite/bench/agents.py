"""Benchmark of agents. An agent is a conversation of many turns that waits for a tool between
turns. The agents run in engines of several memory sizes, which hold all agents or only some.

The shape is that of published traces of coding agents (vLLM's: a median of 43 turns and 142,000
tokens in, 444 out, with subagents in 44 %), with fewer turns and a 30th of the tokens, so that a
run takes seconds: 64 agents of 8 turns, 28 of which start a subagent of 3 turns while they wait.
Lengths and times of tools are log-normal.
"""

from __future__ import annotations

import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sglang_lite import Engine
from sglang_lite.program.nodes import Gen, Text
from sglang_lite.protocol import Generation, Played, ProgramResult, SamplingParams, SglError
from sglang_lite.runtime.loading.load_model import LoadedModel

_TURNS = 8  # of an agent
TOOL_S = 0.7  # median time in a tool, in seconds
TIMES_MEMORY = (0.7, 1.0, 2.0, 4.0)  # tokens of all agents, relative to those that fit


@dataclass(frozen=True, slots=True)
class AgentTurn:
    """One turn of an agent: how many tokens it reads and generates, how many seconds its tool then
    takes, and the turns of a subagent to wait for, if any.
    """

    reads: int
    writes: int
    tool_s: float
    subagent: tuple[AgentTurn, ...] = ()


@dataclass(frozen=True, slots=True)
class AgentsMeasured:
    """Result of running a set of agents.

    Attributes:
        seconds: time until the last agent has ended.
        again: computed prompt tokens, divided by the tokens that must be computed at least once.
        programs: number of agents, subagents included.
    """

    seconds: float
    again: float
    programs: int


def draw_agents(count: int = 64, *, scale: float = 1.0) -> list[tuple[AgentTurn, ...]]:
    """Draws random turns for each agent, the same ones in every call.

    Args:
        count: number of agents.
        scale: factor of all token counts.
    """
    draw = random.Random(0)

    def about(middle: float) -> float:
        return middle * min(draw.lognormvariate(0, 0.5), 3.0)

    def turn(reads: int) -> AgentTurn:
        return AgentTurn(
            max(round(scale * about(reads)), 1), max(round(scale * about(56)), 1), about(TOOL_S)
        )

    made = []
    for i in range(count):
        own = [turn(1200), *(turn(400) for _ in range(_TURNS - 1))]
        if i % 16 < 7:
            own[_TURNS // 2] = replace(own[_TURNS // 2], subagent=(turn(600), turn(300), turn(300)))
        made.append(tuple(own))
    return made


def iterate_agent_turns(turns: tuple[AgentTurn, ...]) -> Iterator[tuple[AgentTurn, ...]]:
    """Yields the turns of an agent as a tuple, then the turns of each subagent as a tuple."""
    yield turns
    for turn in turns:
        if turn.subagent:
            yield from iterate_agent_turns(turn.subagent)


def total_tokens_at_end(all_turns: Sequence[tuple[AgentTurn, ...]]) -> int:
    """Returns the number of tokens that all agents and subagents together read and generate."""
    return sum(
        turn.reads + turn.writes
        for each in all_turns
        for own in iterate_agent_turns(each)
        for turn in own
    )


def run_agents(
    engine: Engine, all_turns: Sequence[tuple[AgentTurn, ...]], *, as_program: bool
) -> AgentsMeasured:
    """Empties the engine's cache, then runs all agents at the same time and measures the run.

    Args:
        all_turns: turns of each agent.
        as_program: whether each agent is one open program; otherwise each turn is a request that
            starts with all earlier text.

    Raises:
        RuntimeError: an agent failed.
    """
    engine.flush_cache()
    before = engine.stats()
    done = threading.Event()
    failed: list[object] = []
    remaining = len(all_turns)
    lock = threading.Lock()

    def count_down(error: object = None) -> None:
        nonlocal remaining
        with lock:
            remaining -= 1
            if error is not None:
                failed.append(error)
            if not remaining:
                done.set()

    kind = _ProgramAgent if as_program else _RequestAgent
    began = time.perf_counter()
    for number, turns in enumerate(all_turns):
        kind(engine, turns, number, count_down).start_first_turn()
    done.wait()
    seconds = time.perf_counter() - began
    if failed:
        raise RuntimeError(f"{len(failed)} agents failed: {failed[0]!r}")
    after = engine.stats()
    told, cached = (after[key] - before[key] for key in ("prompt_tokens", "prompt_tokens_cached"))
    programs = [own for turns in all_turns for own in iterate_agent_turns(turns)]
    needed = sum(turn.reads + 1 for own in programs for turn in own)
    return AgentsMeasured(seconds, (told - cached) / needed, len(programs))


def measure_agents(loaded: LoadedModel, *, scale: float = 1.0, count: int = 64) -> Iterator[str]:
    """Compares agents run as programs with agents run as requests, in engines of several memory
    sizes. Yields the lines of a table. If the memory is too small for all agents, they also run as
    programs in an engine that uses host memory, too ("tiers").

    Args:
        scale: factor of all token counts.
        count: number of agents.
    """
    turns = draw_agents(count, scale=scale)
    total = total_tokens_at_end(turns)
    yield f"{count} agents of {_TURNS} turns, {total:,} tokens at their ends"
    yield f"{'of memory':>10}{'as':>10}{'s':>9}{'programs/min':>14}{'computed/needed':>17}"
    for times in TIMES_MEMORY:
        host = {"enable_hierarchical_cache": True, "hicache_ratio": times}
        engines: list[tuple[dict[str, Any], dict[str, bool]]] = [
            ({}, {"programs": True, "requests": False})
        ]
        if times > 1:
            engines.append((host, {"tiers": True}))
        for tiers, kinds in engines:
            with Engine.of(loaded, max_total_tokens=round(total / times), **tiers) as engine:
                for name, as_program in kinds.items():
                    run_agents(engine, turns[: -(-count // 8)], as_program=as_program)  # warms up
                    got = run_agents(engine, turns, as_program=as_program)
                    rate = 60 * got.programs / got.seconds
                    yield f"{times:9.1f}x{name:>10}{got.seconds:9.2f}{rate:14.0f}{got.again:17.2f}"


class _Agent(ABC):
    """An agent that runs its turns in order. A turn begins when the tool and the subagent of the
    previous turn have finished.
    """

    def __init__(
        self, engine: Engine, turns: tuple[AgentTurn, ...], number: int, ended: Callable[..., None]
    ) -> None:
        self.engine = engine
        self.turns = turns
        self.number = number
        self.ended = ended
        self.at = 0
        self._draw = random.Random(number)

    def start_first_turn(self) -> None:
        self.play_turn(self.turns[0])

    @abstractmethod
    def play_turn(self, turn: AgentTurn) -> None:
        """Starts a turn, and calls `finish_turn` when it ends."""

    def close(self) -> None:
        """Reports that the agent has ended."""
        self.ended()

    def tokens_to_read(self, turn: AgentTurn) -> list[int]:
        return [self._draw.randint(0, 10000) for _ in range(turn.reads)]

    def turn_params(self, turn: AgentTurn) -> SamplingParams:
        return SamplingParams(max_tokens=turn.writes, temperature=0, ignore_eos=True)

    def finish_turn(self) -> None:
        turn = self.turns[self.at]
        self.at += 1
        timer = threading.Timer(turn.tool_s, self._continue_after_tool, (turn,))
        timer.daemon = True
        timer.start()

    def _continue_after_tool(self, turn: AgentTurn) -> None:
        if turn.subagent:
            type(self)(
                self.engine, turn.subagent, 1000 + self.number, self._play_next_turn
            ).start_first_turn()
        else:
            self._play_next_turn()

    def _play_next_turn(self, error: object = None) -> None:
        if error is not None:
            self.ended(error)
        elif self.at == len(self.turns):
            self.close()
        else:
            try:
                self.play_turn(self.turns[self.at])
            except SglError as refused:  # on a timer's thread, where nobody would see the error
                self.ended(refused)


class _ProgramAgent(_Agent):
    def start_first_turn(self) -> None:
        self._program = self.engine.open_program(sink=self._handle_event)
        super().start_first_turn()

    def play_turn(self, turn: AgentTurn) -> None:
        self._program.extend(
            (), (Text("", tuple(self.tokens_to_read(turn))), Gen("step", self.turn_params(turn)))
        )

    def close(self) -> None:
        self._program.close()

    def _handle_event(self, event: object) -> None:
        if isinstance(event, ProgramResult):
            self.ended()
        elif not isinstance(event, Played):
            self.ended(event)
        elif isinstance(event.event, Generation):
            self.finish_turn()


class _RequestAgent(_Agent):
    def start_first_turn(self) -> None:
        self._text: list[int] = []
        super().start_first_turn()

    def play_turn(self, turn: AgentTurn) -> None:
        self._text += self.tokens_to_read(turn)
        self.engine.submit(list(self._text), self.turn_params(turn), sink=self._handle_event)

    def _handle_event(self, event: object) -> None:
        if isinstance(event, Generation):
            self._text += event.token_ids
            self.finish_turn()
        else:
            self.ended(event)
