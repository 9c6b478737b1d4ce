"""Rules of programs in the engine: joins, rollbacks and failures, whatever has been played when a
node arrives.
"""

import pytest

import sglang_lite as sgl
import sglang_lite.runtime.core.engine_program as module
from sglang_lite.program.nodes import (
    Fork,
    Gen,
    ImagePart,
    Join,
    Mark,
    Node,
    Program,
    Rollback,
    Text,
    Verdict,
)
from sglang_lite.protocol import Generation, Media, Played, ProgramResult, Span
from tests.runtime.core.test_engine_program import Opened, greedy, stepped

LONG = Gen("long", greedy(40, ignore_eos=True))
SHORT = Gen("x", greedy(3))
FAILS = ImagePart(Media(b"no engine takes images"))


class Rules(Opened):
    """An open program whose nodes are played as they arrive (`eager`), or only when all of them
    have arrived.
    """

    def __init__(self, *, eager: bool = True, **options):
        super().__init__(stepped(), **options)
        self.eager = eager

    def add(self, *nodes: Node, path=()):
        self.program.extend(path, nodes)
        if self.eager:
            self.engine.drain()
            self.engine.check()

    def close(self):
        self.program.close()
        self.engine.drain()
        self.engine.check_empty()
        return self.events[-1]

    def errors(self):
        """Path and type of each error that was told of a node."""
        return [
            (e.path, type(e.event)) for e in self.events[:-1] if isinstance(e.event, sgl.SglError)
        ]


both = pytest.mark.parametrize(
    "eager", [True, False], ids=["played as they come", "played at the end"]
)


@both
def test_a_join_appends_what_its_branches_had_at_its_own_place(eager):
    program = Rules(eager=eager)
    program.add(Text("p"), SHORT, Fork(((), ())))
    program.add(Text("a"), Mark(), Text("b"), path=(2, 0))
    program.add(Text("z"), path=(2, 1))
    program.add(Join(2, (3, 1)))
    program.add(Rollback(1), Text("c"), path=(2, 0))
    program.add(Join(2, (5, 1)))
    (x,) = program.at(1) if eager else (None,)
    result = program.close()
    (x,) = program.at(1)
    assert result.text == f"p{x.text}abzacz"


def test_a_whole_program_joins_what_stands_before_a_rollback():
    engine = stepped()
    events = []
    branch = (Text("a"), Mark(), SHORT, Text("b"), Rollback(1), Text("c"))
    engine.run_program(
        "", Program((Text("p"), Fork((branch,)), Join(1, (4,)), Join(1, (6,)))), sink=events.append
    )
    engine.drain()
    assert events[-1].text == f"pa{events[0].event.text}bac"
    engine.check_empty()


@both
def test_a_rollback_waits_for_the_nodes_that_a_join_has_claimed_and_for_no_others(eager):
    program = Rules(eager=eager)
    program.add(Text("p"), Fork(((),)))
    program.program.extend((1, 0), (Mark(), SHORT, LONG))
    program.program.extend((), (Join(1, (2,)),))
    program.add(Rollback(0), Gen("y", greedy(3)), path=(1, 0))
    result = program.close()
    (x,), (y,) = program.at(1, 0, 1), program.at(1, 0, 4)
    assert result.text == f"p{x.text}"
    assert not program.at(1, 0, 2)
    alone = Rules()
    alone.add(Text("p"), Gen("y", greedy(3)))
    assert alone.at(1)[0].token_ids == y.token_ids


@both
def test_a_claimed_node_that_fails_fails_the_join_and_not_what_comes_after_the_rollback(eager):
    program = Rules(eager=eager)
    program.add(Text("p"), Fork(((),)))
    program.program.extend((1, 0), (Mark(), SHORT, FAILS, Text("b")))
    program.program.extend((), (Join(1, (4,)),))
    program.add(Rollback(0), Gen("y", greedy(3)), path=(1, 0))
    result = program.close()
    assert isinstance(result, sgl.CapabilityError)
    assert isinstance(program.at(1, 0, 5)[0], Generation)
    assert program.errors() == [((1, 0, 2), sgl.CapabilityError), ((2,), sgl.CapabilityError)]


@both
@pytest.mark.parametrize("played", [True, False])
def test_a_rollback_ends_the_branches_of_forks_behind_its_mark(eager, played):
    program = Rules(eager=eager)
    before = () if played else (LONG,)
    program.program.extend(
        (), (Text("p"), Fork(((),)), Mark(), *before, Fork(((Fork(((),)),), ())))
    )
    place = 3 if played else 4
    program.program.extend((place, 0), (LONG,))
    program.program.extend((place, 0, 0, 0), (LONG,))
    program.add(Rollback(2), SHORT)
    program.add(Text("q"), SHORT, path=(place, 1))
    program.add(SHORT, path=(place, 1))
    program.add(SHORT, path=(1, 0))
    result = program.close()
    assert isinstance(result, ProgramResult)
    # only what is added later is told of it
    assert program.errors() == [((place, 1, 0), sgl.RequestAbortedError)]
    assert [e.name for e in program.events[:-1] if isinstance(e.event, Generation)] == ["x", "x"]


def test_a_rollback_revives_no_branch_that_another_one_has_ended():
    program = Rules()
    program.add(Mark(), Fork(((Mark(),),)), Rollback(0))
    program.add(Rollback(0), SHORT, path=(1, 0))
    assert isinstance(program.close(), ProgramResult)
    assert program.errors() == [((1, 0, 2), sgl.RequestAbortedError)]


@both
def test_the_branches_of_forks_behind_a_failed_node_fail_too(eager):
    program = Rules(eager=eager)
    inner = (Text("i"), Fork(((SHORT,),)))
    program.program.extend((), (Text("p"), FAILS, Fork((inner, ()))))
    program.program.extend((2, 1), (Text("j"), Fork(((),))))
    program.add(SHORT, path=(2, 1, 1, 0))
    program.add(Fork(((),)))
    program.add(SHORT, path=(3, 0))
    assert isinstance(program.close(), sgl.CapabilityError)
    lost = [(1,), (2, 0, 0), (2, 0, 1, 0, 0), (2, 1, 0), (2, 1, 1, 0, 0), (3, 0, 0)]
    assert sorted(program.errors()) == [(path, sgl.CapabilityError) for path in lost]


def test_the_branches_of_forks_that_were_refused_fail_too(monkeypatch):
    monkeypatch.setattr(module, "MAX_QUEUED", 2)
    program = Rules(eager=False)
    program.program.extend((), (Text("p"), LONG))
    program.program.extend((), (Text("a"), Fork(((),)), Text("b")))
    program.program.extend((3, 0), (SHORT,))
    assert isinstance(program.close(), sgl.OverloadedError)
    assert sorted(program.errors()) == [
        ((2,), sgl.OverloadedError),
        ((3, 0, 0), sgl.OverloadedError),
    ]


@both
def test_a_rollback_behind_a_failure_before_its_mark_changes_nothing(eager):
    program = Rules(eager=eager)
    program.program.extend((), (Text("p"), FAILS, Mark()))
    program.add(Rollback(2), SHORT)
    assert isinstance(program.close(), sgl.CapabilityError)
    assert program.errors() == [((1,), sgl.CapabilityError)]


@pytest.mark.parametrize("path", [(5, 0), (0, 0), (1, 1), (1, 0, 3, 0), (1,)])
def test_nodes_of_a_branch_that_was_not_forked_are_an_error_at_once(path):
    program = Rules()
    program.add(Text("a"), Fork(((),)))
    program.add(Text("b"), path=(1, 0))
    program.add(SHORT, path=path)
    program.program.drop_branch((*path, 0, 0))  # nothing to drop: ignored
    assert isinstance(program.at(*path, 0)[0], sgl.ProgramError)
    program.add(SHORT, path=path)
    assert "not forked" in str(program.close())
    assert program.errors() == [((*path, 0), sgl.ProgramError)]


@both
def test_nodes_behind_a_judged_one_wait_for_the_verdict(eager):
    program = Rules(eager=eager)
    program.add(Text("abc"), Gen("x", greedy(4), judged=True), Text("d"), Gen("y", greedy(4)))
    program.program.judge((), 1, Verdict((Span("e"),)))
    result = program.close()
    alone = Rules()
    alone.add(Text("abced"), Gen("y", greedy(4)))
    assert program.at(3)[0].token_ids == alone.at(1)[0].token_ids
    assert result.text == f"abced{program.at(3)[0].text}"


def test_a_rollback_to_a_mark_that_the_engine_comes_to_after_the_drop_revives_the_branch():
    """The caller plays all but answers by itself, and may be ahead of the engine when it gives the
    branch up.
    """
    program = Rules(eager=False)
    program.program.extend(
        (), (Text("p"), Fork(((SHORT,),)), Join(1, (1,)), Mark(), Text("q"), LONG)
    )
    program.program.drop_branch(())
    program.add(Rollback(3), Gen("y", greedy(3)))
    result = program.close()
    (x,), (y,) = program.at(1, 0, 0), program.at(7)
    assert result.text == f"p{x.text}{y.text}"
    assert program.errors() == []


def test_nothing_behind_an_answer_is_played_in_a_branch_that_was_dropped():
    program = Rules(eager=False)
    program.program.extend(
        (), (Text("p"), Fork(((SHORT,),)), Join(1, (1,)), LONG, Fork(((SHORT,),)))
    )
    program.program.drop_branch(())
    program.add(SHORT)
    program.add(SHORT, path=(4, 0))
    assert isinstance(program.close(), sgl.RequestAbortedError)
    assert [e.path for e in program.events[:-1] if isinstance(e.event, Generation)] == [(1, 0, 0)]


def test_a_program_whose_sink_has_raised_can_still_end():
    """As it must when that crashes the engine's loop: nobody would ever be told."""
    engine, events = stepped(), []

    def sink(event):
        events.append(event)
        if isinstance(event, Played) and isinstance(event.event, sgl.CapabilityError):
            raise RuntimeError("the sink fails")

    program = engine.open_program(sink=sink)
    program.extend((), (Text("p"), Fork(((LONG,), (FAILS,)))))
    with pytest.raises(RuntimeError, match="the sink fails"):
        engine.drain()
    program.abort()
    engine.drain()
    assert isinstance(events[-1], sgl.RequestAbortedError)
