"""The caller's player keeps the rules of `tests/program/play/rules.py`, in whichever order its
backend answers, as the engine's player does (`tests/program/play/test_player.py`).
"""

import asyncio
import random
from collections import deque

import pytest

import sglang_lite as sgl
from sglang_lite.lang.execution import player
from sglang_lite.lang.execution.operations import Removal
from sglang_lite.lang.execution.player import Player
from sglang_lite.lang.execution.transcript import Transcript
from sglang_lite.lang.execution.waits import Waits
from sglang_lite.program.nodes import Fork, Gen, Join, Mark, Rollback, Text
from sglang_lite.protocol import Generation
from tests.lang.fakes import within
from tests.program.play.rules import CALLER, SEQUENCES, Plain, answer, random_steps, verdict

BROKEN = 77  # limit of a generation that fails, in place of a text that can't be appended


class Disordered(sgl.BaseBackend):
    """Answers by the rules, some turns of the event loop later."""

    def __init__(self, draw):
        super().__init__()
        self._draw = draw

    async def agenerate(self, prompt, params, constraint, *, stream):
        for _ in range(self._draw.choice([0, 0, 1, 3, 10])):
            await asyncio.sleep(0)
        found = None if params.max_tokens == BROKEN else answer(prompt.text)
        if found is None:
            raise sgl.BackendError("no answer.")
        yield Generation(found)


class Checks:
    """Checks of a node's answers by the rules. A check can't tell a refusal from a wish for another
    attempt: the player asks again after both. The answer is then the same, and is refused again.
    """

    def __init__(self):
        self._attempt = -1

    def __call__(self, value):
        self._attempt += 1
        return verdict(value, self._attempt) == "accepted"


class Caller:
    """Gives the nodes of a program to the caller's player."""

    def __init__(self, state):
        self.states = {(): state}
        self._places: dict[tuple[int, ...], int] = {}
        self._groups: dict[tuple[int, ...], sgl.ProgramStateGroup] = {}
        self._marks = {}

    def add(self, path, node):
        state = self.states[path]
        place = self._places[path] = self._places.get(path, -1) + 1
        match node:
            case Text(text):
                state += sgl.gen(f"broken{place}", max_tokens=BROKEN) if text == "!" else text
            case Gen(name, judged=True):
                state += sgl.gen(name, check=Checks(), retries=2)
            case Gen(name):
                state += sgl.gen(name)
            case Fork(branches):
                group = self._groups[(*path, place)] = state.fork(len(branches))
                self.states |= {(*path, place, i): child for i, child in enumerate(group)}
            case Join(int(fork), mode=mode):
                self._groups[(*path, fork)].join(mode)
            case Mark():
                self._marks[(*path, place)] = state.checkpoint().__enter__()
            case Rollback(mark):
                self._marks[(*path, mark)].rollback()


def check_sequence(seed, hurry):
    draw = random.Random(f"{hurry} {seed}")
    main = Plain(CALLER)
    tree = {(): main}

    def body(s):
        s += "P"
        caller = Caller(s)
        for path, node in random_steps(random.Random(seed), tree, CALLER):
            removed = tree[path].removed
            tree[path].add(node, tree, {})
            if path not in caller.states:
                continue  # forked from a branch that a rollback has removed
            if removed:
                with pytest.raises(sgl.RequestAbortedError):
                    caller.states[path].__iadd__("text")
                continue
            caller.add(path, node)
            if draw.random() < hurry:
                played = draw.choice([path for path in tree if not tree[path].lost])
                caller.states[played].error()
        return caller.states

    states = sgl.function(body).run(backend=Disordered(draw)).ret_value
    for path, state in states.items():
        branch = tree[path]
        assert (state.error() is not None) == branch.failed, (seed, path)
        if not branch.failed:
            assert state.text() == branch.text, (seed, path)
            check_gathered(state, branch, tree, seed)


def check_gathered(state, branch, tree, seed):
    """What joins of a branch have gathered are the values of the joined branches."""
    for key in {key for keys in branch.gathered.values() for key in keys}:
        child = tree[key[:-1]]
        if child.path[:-2] == branch.path and key in child.values:
            name, value = child.values[key]
            assert state[name][child.path[-1]] == value, (seed, key)


@pytest.mark.parametrize("hurry", [0.0, 0.3, 0.9])
def test_the_order_of_answers_changes_nothing(hurry):
    def run():
        for seed in range(SEQUENCES):
            check_sequence(seed, hurry)

    within(60, run)


def keep_no_claim(player, depth):
    """In place of `Player.claim_for_join`."""


def revive_nothing(waits, mark):
    """In place of `Waits.roll_back_waits`."""
    return False


def remove_everything(mark, ops, claims, depth, waited=-1):
    """In place of `find_removed_range`."""
    return Removal(deque(), [op for op in ops[1:] if op is not None], False)


def append_nothing(transcript, pieces):
    """In place of `Transcript.append_from_join`."""


@pytest.mark.parametrize(
    ("owner", "name", "other"),
    [
        (Player, "claim_for_join", keep_no_claim),
        (Waits, "roll_back_waits", revive_nothing),
        (player, "find_removed_range", remove_everything),
        (Transcript, "append_from_join", append_nothing),
    ],
)
def test_a_rule_that_changes_in_this_player_alone_is_noticed(monkeypatch, owner, name, other):
    monkeypatch.setattr(owner, name, other)

    def run():
        for seed in range(SEQUENCES):
            check_sequence(seed, 0.1)

    with pytest.raises((AssertionError, sgl.SglError)) as found:
        within(60, run)
    assert "not done within" not in str(found.value)
