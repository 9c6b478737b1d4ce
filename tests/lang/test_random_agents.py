"""Random agents that are killed, suspended, saved and resumed do what a plain interpreter says, and
make no call twice.
"""

import asyncio
import random
import shutil
from functools import partial

import pytest

import sglang_lite as sgl
from tests.counts import some
from tests.lang.random_agents import Expected, Killed, World, decide, draw_agent, programs

REPEATED = ("safe", "keyed", "team")  # kinds of calls that may be made again


def kinds_of(agent):
    return {
        number: kind
        for script in agent.scripts.values()
        for turn in script.turns
        for kind, number in turn
    }


class Life:
    """Lives of an agent: it runs until it is killed or suspended, and is resumed, until it ends.

    Args:
        folder: where its journal is.
    """

    def __init__(self, agent, folder, seed):
        self.world = World(agent)
        self.folder = folder
        self.drawn = random.Random(seed)
        self.doubts = {}  # calls that were in doubt, by number
        self.lost = set()  # numbers of calls in which it was killed
        self.lives = 0
        self.path = None
        if agent.kills or self.drawn.random() < 0.5:
            self.path = folder / "0.jsonl"
            self.world.on_kill = self._copy_journal

    def _copy_journal(self):
        """The file as it is when the process is killed: what comes later is not in it."""
        self.lives += 1
        copy = self.folder / f"{self.lives}.jsonl"
        assert self.path is not None
        shutil.copy(self.path, copy)
        lines = copy.read_bytes().splitlines(keepends=True)
        if self.drawn.random() < 0.5:  # a line that was cut short
            with copy.open("ab") as file:
                file.write(lines[-1][: self.drawn.randint(1, len(lines[-1]) - 1)])
        self.next = copy

    def play(self, start):
        """Runs or resumes the agent. Returns its state, or None if it was killed."""
        self.world.begun.clear()
        self.world.ended.clear()
        try:
            state = start()
        except (Killed, sgl.SglError):
            if not self.world.dead:
                raise
        if self.world.dead:
            self.world.dead = False
            self.path = self.next
            return None
        return state

    def run_to_end(self):
        program = programs(self.world)
        backend = sgl.ScriptedBackend(self.world.answer)

        def begin():
            options = {"backend": backend, "journal": self.path}
            if program.is_async:
                return asyncio.run(program.arun(**options))
            return program.run(**options)

        state = None
        while True:
            if state is None:
                self.lost |= self.world.begun - self.world.ended
                state = self.play(begin)
            elif pending := state.pending():
                state = self.play(partial(self.resume, program, state, pending, backend))
            else:
                return state

    def resume(self, program, state, pending, backend):
        chosen = pending if self.drawn.random() < 0.7 else [self.drawn.choice(pending)]
        for call in chosen:
            if call.in_doubt:
                self.doubts[call.arguments["n"]] = call
        decisions = [decide(call) for call in chosen]
        if self.path is None and self.drawn.random() < 0.5:
            file = self.folder / "state.json"
            state.save(file)
            state = sgl.load(file, program, backend=backend)
        if program.is_async:
            return asyncio.run(state.aresume(decisions))
        return state.resume(decisions)


@pytest.mark.parametrize("start", range(0, some(20, 2000), 20))
def test_a_random_agent_does_what_a_plain_interpreter_says(start, tmp_path):
    for seed in range(start, start + 20):
        folder = tmp_path / str(seed)
        folder.mkdir()
        agent = draw_agent(seed)
        life = Life(agent, folder, seed)
        state = life.run_to_end()
        expected = Expected(agent, life.doubts)
        assert state.ret_value == expected.answers(), seed
        kinds = kinds_of(agent)
        for number, count in life.world.effects.items():
            assert count == 1 or kinds[number] in REPEATED, (seed, number)
            assert len(life.world.keys.get(number, {0})) == 1
        lost = {number for number in life.lost if kinds[number] not in REPEATED}
        doubts = set(life.doubts)
        assert lost <= doubts, seed
        # beside a coroutine, others may have been begun
        assert lost == doubts or "later" in kinds.values(), seed
        done = set(life.world.effects)
        assert expected.made <= done, seed
        assert done - expected.made <= doubts, seed
        shutil.rmtree(folder)
