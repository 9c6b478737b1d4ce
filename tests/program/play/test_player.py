"""The player gives the same texts in every order of answers, and does no more than its driver asks
for.
"""

import random

import pytest

from sglang_lite.program.nodes import Fork, Gen, Join, Mark, Pause, Rollback, Text
from sglang_lite.program.play.branch import (
    Ask,
    BranchText,
    Cancel,
    Ended,
    Failed,
    Forked,
    Idle,
    ProgramBranch,
    QueuedNode,
)
from sglang_lite.program.play.player import ProgramPlayer
from sglang_lite.protocol import ProgramError, RequestAbortedError, SglError
from tests.program.play.rules import (
    CALLER,
    ENGINE,
    SEQUENCES,
    Plain,
    answer,
    random_steps,
    verdict,
)


class Words(BranchText[str]):
    """A text of words; what a branch continues is kept apart from what it has added."""

    def __init__(self, before=""):
        self.before, self.added = before, []

    def __str__(self):
        return self.before + "".join(self.added)

    def append(self, node):
        if node.text == "!":
            raise ProgramError("this text can't be appended.")
        self.added.append(node.text)

    def append_pieces(self, pieces):
        self.added += pieces

    def fork(self):
        return Words(str(self))

    def mark(self):
        return tuple(self.added)

    def restore_position(self, mark):
        self.added = list(mark)


class Driver:
    """Answers what the player asks for, in an order that `draw` chooses. Gives verdicts likewise:
    on answers once they have come, on pauses at any time.
    """

    def __init__(self, draw, ways=ENGINE):
        self.draw, self.ways, self.player = draw, ways, ProgramPlayer(Words("P"))
        self.asks, self.prompts, self.errors, self.events = [], {}, {}, []
        self.verdicts, self.attempts, self.counts = [], {}, {}
        self.branches = {(): self.player.main}

    def add(self, path, *nodes):
        for place, node in enumerate(nodes, self.counts.get(path, 0)):
            if isinstance(node, Pause):
                again = queued(Gen("p")) if place % 3 == 0 else None
                self.verdicts.append(
                    lambda place=place, again=again: self.player.judge(path, place, ("p",), again)
                )
            elif isinstance(node, Gen) and node.name == "early":
                self.verdicts.append(lambda place=place: self.player.judge(path, place, ("e",)))
        self.counts[path] = self.counts.get(path, 0) + len(nodes)
        self.player.add_branch_nodes(path, [queued(node) for node in nodes])
        self.take()

    def take(self):
        for effect in self.player.pop_effects():
            self.events.append(effect)
            match effect:
                case Ask(branch, place):
                    self.asks.append(effect)
                    key = (*branch.path, place)
                    attempt = self.attempts[key] = self.attempts.get(key, -1) + 1
                    self.prompts[(*key, *[-1] * attempt)] = str(branch.text)
                case Forked(branch):
                    self.branches[branch.path] = branch
                case Cancel(ask):
                    self.asks.remove(ask)
                case Failed(path, _, error, attempt):
                    assert (path, attempt) not in self.errors
                    self.errors[path, attempt] = error

    @property
    def waits(self):
        return bool(self.asks or self.verdicts)

    def answer_one(self):
        i = self.draw.randrange(len(self.asks) + len(self.verdicts))
        if i >= len(self.asks):
            self.verdicts.pop(i - len(self.asks))()
        else:
            ask = self.asks.pop(i)
            found = answer(str(ask.branch.text))
            if found is None:
                self.player.accept_failure(ask, ProgramError("no answer."))
                if ask.node.judged and ask.node.name != "early":
                    self.verdicts.append(lambda: self.judge(ask, None))
            elif ask.node.judged:
                self.player.accept_answer(ask, None)
                if ask.node.name != "early":
                    self.verdicts.append(lambda: self.judge(ask, found))
            else:
                self.player.accept_answer(ask, (found,))
        self.take()

    def judge(self, ask, found):
        outcome = verdict(found, ask.attempt)
        path = ask.branch.path
        if outcome == "again":
            self.player.judge(path, ask.place, (self.ways.again,), queued(ask.node))
        elif outcome == "accepted":
            self.player.judge(path, ask.place, (found + self.ways.accepted,))
        elif ask.branch.paused == ask.place and ask.branch.attempt == ask.attempt:
            self.player.end_branch_quietly(path)

    def close(self):
        self.player.close()
        self.take()
        while self.waits:
            self.answer_one()
        assert isinstance(self.events[-1], Ended)
        return self.events[-1].error


def queued(node):
    branches = (
        [[queued(each) for each in nodes] for nodes in node.branches]
        if isinstance(node, Fork)
        else ()
    )
    return QueuedNode(node, branches)


def check_sequence(seed, ways, hurry):
    """Plays a random program while answers and verdicts come in a random order."""
    draw = random.Random(f"{hurry} {seed}")
    main = Plain(ways)
    tree, prompts, driver = {(): main}, {}, Driver(draw, ways)
    for path, node in random_steps(random.Random(seed), tree, ways):
        tree[path].add(node, tree, prompts)
        driver.add(path, node)
        while driver.waits and draw.random() < hurry:
            driver.answer_one()
    error = driver.close()
    assert (error is not None) == main.failed, seed
    for path, branch in tree.items():
        if not branch.lost:
            assert (driver.branches[path].error is not None) == branch.failed, (seed, path)
        if not branch.failed:
            assert str(driver.branches[path].text) == branch.text, (seed, path)
    assert driver.prompts.items() <= prompts.items(), seed
    for branch in tree.values():
        played = {key for keys in branch.gathered.values() for key in keys}
        if not branch.failed:
            played |= set(branch.asked)
        assert played <= driver.prompts.keys(), (seed, branch.path)
    assert driver.player.totals.queued == driver.player.totals.asked == 0


@pytest.mark.parametrize("hurry", [0.0, 0.3, 0.9])
def test_the_order_of_answers_changes_no_text(hurry):
    for seed in range(1000):
        check_sequence(seed, ENGINE, hurry)


@pytest.mark.parametrize("hurry", [0.0, 0.3, 0.9])
def test_this_player_keeps_the_rules_in_the_callers_programs(hurry):
    for seed in range(SEQUENCES):
        check_sequence(seed, CALLER, hurry)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("count_nodes_claimed_above", lambda branch, below, at: 0),
        ("next_rollback", lambda branch: None),
        ("undo_forks", lambda branch, mark, at: (mark + 1, [])),
        ("has_mark", lambda branch, mark: False),
    ],
)
def test_a_rule_that_changes_in_this_player_alone_is_noticed(monkeypatch, name, other):
    monkeypatch.setattr(ProgramBranch, name, other)
    with pytest.raises(AssertionError):
        for seed in range(SEQUENCES):
            check_sequence(seed, CALLER, 0.1)


def asked(driver):
    return [(*ask.branch.path, ask.place) for ask in driver.asks]


def test_the_next_ask_of_an_answered_branch_comes_first():
    driver = Driver(random.Random(0))
    driver.add((), Fork(((Gen("a"), Gen("b")), (Gen("c"),))), Join(0, (1, 0)), Gen("d"))
    assert asked(driver) == [(0, 0, 0), (0, 1, 0)]
    driver.player.accept_answer(driver.asks[0], ("A",))
    effects = driver.player.pop_effects()
    assert [(*each.branch.path, each.place) for each in effects if isinstance(each, Ask)] == [
        (0, 0, 1),
        (2,),
    ]


def test_a_join_claims_also_if_its_branch_has_failed():
    driver = Driver(random.Random(0))
    driver.add((), Fork(((),)), Text("!"))
    driver.add((0, 0), Mark(), Gen("a"), Gen("b"))
    driver.add((), Join(0, (3,), "gather_variable"))
    driver.add((0, 0), Rollback(0))
    driver.player.accept_answer(driver.asks.pop(), ("A",))
    driver.take()
    assert asked(driver) == [(0, 0, 2)]


def test_a_stale_answer_is_ignored():
    driver = Driver(random.Random(0))
    driver.add((), Mark(), Gen("a"))
    (ask,) = driver.asks
    driver.add((), Rollback(0), Gen("b"))
    driver.player.accept_answer(ask, ("A",))
    driver.player.accept_failure(ask, ProgramError("late"))
    assert driver.player.pop_effects() == []
    assert asked(driver) == [(3,)]
    assert driver.prompts[3,] == "P"


def test_a_branch_waits_for_the_verdict_on_a_judged_answer():
    driver = Driver(random.Random(0))
    driver.add((), Gen("a", judged=True), Text("x"), Gen("b"))
    driver.player.accept_answer(driver.asks.pop(), None)
    driver.take()
    assert driver.player.main.will_return
    assert not driver.asks
    driver.player.judge((), 0, ("A",))
    driver.take()
    assert driver.prompts[2,] == "PAx"


def test_a_verdict_on_a_node_that_was_not_added_is_an_error():
    driver = Driver(random.Random(0))
    driver.player.judge((), 0, ("A",))
    with pytest.raises(ProgramError, match="a verdict was given on a node that was not added"):
        raise driver.close()


def test_a_program_ends_when_its_verdicts_have_come():
    driver = Driver(random.Random(0))
    driver.add((), Pause(), Text("x"))
    driver.verdicts.clear()
    driver.player.close()
    assert not driver.player.ended
    driver.player.judge((), 0, ("A",))
    assert driver.player.ended
    assert str(driver.player.main.text) == "PAx"


def test_a_program_that_fails_as_a_whole_gives_up_what_it_asked_for():
    driver = Driver(random.Random(0))
    driver.add((), Fork(((Gen("a"),), (Gen("b"),))), Gen("c"))
    driver.player.fail_program(RequestAbortedError("enough."))
    driver.take()
    assert not driver.asks
    assert [type(each) for each in driver.events[-4:]] == [Idle, Idle, Idle, Ended]
    assert isinstance(driver.events[-1].error, SglError)
    driver.add((), Text("late"))
    assert driver.player.pop_effects() == []


def test_a_branch_is_told_to_begin_before_its_first_ask():
    driver = Driver(random.Random(0))
    driver.add((), Gen("a"), Fork(((Gen("b"),),)))
    driver.answer_one()
    kinds = [type(each) for each in driver.events if not isinstance(each, Idle)]
    assert kinds == [Ask, Forked, Ask]


def test_a_rollback_leaves_what_a_join_above_it_gathers_from_the_branches_that_it_ends():
    driver = Driver(random.Random(0))
    driver.add((), Fork(((),)))
    driver.add((0, 0), Mark(), Fork(((Gen("a"),), (Gen("b"),))))
    driver.add((0, 0, 1, 1), Gen("c"))
    driver.add((0, 0), Join(1, (1, 1), "gather_variable"))  # goes with what it claims
    driver.add((), Join(0, (3,), "gather_variable"), Text("x"))
    driver.add((0, 0, 1, 0), Gen("late"))
    driver.add((0, 0), Rollback(0), Gen("d"))
    driver.close()
    assert driver.prompts[0, 0, 4] == "P"
    assert driver.prompts.keys() == {(0, 0, 1, 0, 0), (0, 0, 1, 1, 0), (0, 0, 1, 1, 1), (0, 0, 4)}
    assert not driver.errors


def test_a_rollback_leaves_nothing_that_only_a_join_which_it_removes_gathers():
    driver = Driver(random.Random(0))
    driver.add((), Mark(), Fork(((Gen("a"),),)), Join(1, mode="gather_variable"))
    driver.add((), Rollback(0), Gen("b"))
    assert asked(driver) == [(4,)]


def test_a_rollback_to_a_mark_that_an_earlier_one_has_removed_fails():
    driver = Driver(random.Random(0))
    driver.add((), Fork(((),)))
    driver.add((0, 0), Mark(), Gen("a"), Mark())
    driver.add((), Join(0, (3,)))
    driver.add((0, 0), Rollback(0), Rollback(2), Text("x"))
    error = driver.close()
    assert error is None
    assert isinstance(driver.errors[(0, 0, 4), 0], ProgramError)
