"""Statements of docs/programs.md on a run that an engine plays as one program, sentence by
sentence.
"""

import sys
import threading

import pytest

import sglang_lite as sgl
from sglang_lite import Engine
from sglang_lite.lang.backend.local import LocalBackend
from sglang_lite.lang.chat_template import get_chat_template
from sglang_lite.lang.choices import ChoicesDecision, ChoicesSamplingMethod
from sglang_lite.lang.execution.reading import completion_variable
from sglang_lite.protocol import Delta, EngineClosedError, Generation, Played
from sglang_lite.runtime.core import engine_program as programs
from tests.constraints.test_generation import random_model


@pytest.fixture(scope="module")
def tiny():
    with Engine.of(random_model(), max_running=64) as engine:
        yield engine


def run(body, engine, **settings):
    return sgl.function(body).run(
        backend=engine, **{"seed": 1, "temperature": 1.0, "max_new_tokens": 6, **settings}
    )


def counted(engine, body, **settings):
    """The run's state when all of it has been played, and how many programs and requests the engine
    saw.
    """
    before = engine.stats()
    state = run(body, engine, **settings)
    completion_variable(state.branch.player).wait()
    after = engine.stats()
    return state, *(
        after[name] - before[name] for name in ("programs_opened", "requests_submitted")
    )


def tree(s):
    s += "Once " + sgl.gen("a") + " and "
    if len(s["a"]) < 99:
        s += sgl.select("b", ["one", "two", "three"], temperature=1.0)
    forks = s.fork(4)
    forks += lambda i: f" {i}: " + sgl.gen("c") + "; " + sgl.gen("d")
    forks.join("concate_and_append")
    with s.var_scope("tail"):
        s += "." + sgl.gen("e", n=3)


@pytest.mark.parametrize(
    "settings",
    [{}, {"timeout": 600}, {"retries": 2}, {"stream": True}],
    ids=lambda settings: "-".join(settings),
)
def test_a_run_is_one_program_whatever_its_settings(tiny, settings):
    state, opened, submitted = counted(tiny, tree, **settings)
    if "stream" in settings:
        assert "".join(state.text_iter()) == state.text()
    assert (opened, submitted) == (1, 0) or "stream" in settings
    apart, none, many = counted(tiny, tree, push_down=False)
    assert (none, many) == (0, 13)
    assert state.text() == apart.text()
    for name in "abcde":
        assert state[name] == apart[name]


def test_every_node_that_is_handed_over_names_its_line(tiny, monkeypatch):
    handed = []
    extend = programs.EngineProgram.extend
    monkeypatch.setattr(
        programs.EngineProgram, "extend", lambda *given: (handed.extend(given[2]), extend(*given))
    )

    def body(s):
        s += sgl.user("a") + sgl.assistant(sgl.gen("x"))
        with s.var_scope("v"), s.grammar(sgl.Regex("[ab]{1,3}y")):
            s += "a" + sgl.gen("y")
        forks = s.fork(2)
        forks += sgl.select("z", ["1", "2"])
        forks.join("concate_and_append")
        s += sgl.gen("end")

    backend = LocalBackend(tiny)
    backend.chat_template = get_chat_template("chatml")
    run(body, backend)["end"]
    first = body.__code__.co_firstlineno
    lines = {type(node).__name__: node.where.line - first for node in handed}
    assert {node.where.file for node in handed} == {__file__}
    assert lines == {
        "Text": 3, "TurnBegin": 1, "TurnEnd": 1, "ScopeBegin": 2, "GrammarBegin": 2, "GrammarEnd": 2, "ScopeEnd": 2,
        "Fork": 4, "Select": 5, "Join": 6, "Gen": 7,
    }  # fmt: skip


def test_a_check_a_method_of_the_callers_and_another_backend_are_judged(tiny):
    class Last(ChoicesSamplingMethod):
        def __call__(self, *, choices, **scores):
            return ChoicesDecision(choices[-1], {})

    other = sgl.ScriptedBackend({"now ": "here"})
    refused = []

    def body(s):
        s += (
            "x"
            + sgl.gen(
                "a", check=lambda text: bool(refused) or bool(refused.append(text)), retries=3
            )
            + " "
        )
        s += (
            sgl.select("b", ["u", "v"], choices_method=Last())
            + " now "
            + sgl.gen("c", backend=other)
            + "!"
        )
        s += sgl.select("d", ["k", "l", "m"], multi=True) + " " + sgl.gen("e", max_tokens=2)

    state, opened, submitted = counted(tiny, body)
    assert (opened, submitted) == (1, 0)
    assert len(refused) == 1
    assert state["b"] == "v"
    assert state["c"] == "here"
    refused.clear()
    apart = run(body, tiny, push_down=False)
    assert apart.text() == state.text()


def test_what_is_behind_a_node_that_fails_without_an_answer_fails(tiny, monkeypatch):
    """A grammar that the engine does not end: the language has walked it otherwise."""

    def refused(grammar, ended):
        return lambda: ended(sgl.ConstraintError("the grammar is not complete at its end."))

    monkeypatch.setattr(
        "sglang_lite.runtime.core.token_text.OpenGrammar.check_grammar_complete", refused
    )

    def body(s):
        s += "x"
        with s.grammar(sgl.Regex("[ab]+y")):
            s += "ab" + sgl.gen("a")
        s += sgl.gen("b") + sgl.gen("c")

    with pytest.raises(sgl.ConstraintError, match="not complete"):
        run(body, tiny)["c"]


@pytest.mark.parametrize("how", ["fails", "is cancelled", "is late"])
def test_a_branch_that_ends_badly_fails_its_readers_only(tiny, how):
    def body(s):
        s += "x"
        forks = s.fork(3)
        forks[0] += sgl.gen("a")
        if how == "fails":
            forks[1] += sgl.gen("a", json_schema={"type": "integer", "multipleOf": 1234577})
        else:
            forks[1] += sgl.gen(
                "a", max_tokens=4000, ignore_eos=True, timeout=1e-6 if how == "is late" else None
            )
        if how == "is cancelled":
            forks[1].cancel()
        forks[2] += sgl.gen("a")
        s += sgl.gen("main")
        s.forks = forks

    state = run(body, tiny)
    kind = {
        "fails": sgl.ConstraintError,
        "is cancelled": sgl.RequestAbortedError,
        "is late": sgl.RequestTimeoutError,
    }
    assert state["main"]
    assert [type(state.forks[i]["a"]) for i in (0, 2)] == [str, str]
    with pytest.raises(kind[how]):
        state.forks[1]["a"]
    assert tiny.stats()["running"] == tiny.stats()["waiting"] == 0


def test_at_a_hold_the_row_gives_up_its_slot_until_the_verdict_comes(tiny):
    asked, verdict = threading.Event(), threading.Event()

    def check(text):
        asked.set()
        return verdict.wait(60)

    def body(s):
        s += "x" + sgl.gen("a", check=check) + sgl.gen("b")

    state = run(body, tiny)
    assert asked.wait(60)
    assert tiny.stats()["running"] == tiny.stats()["waiting"] == 0
    assert not state.stream_executor.is_finished
    verdict.set()
    assert state["b"]


def test_a_check_that_raises_or_never_ends_fails_its_branch(tiny):
    never = threading.Event()

    def body(s):
        s += "x" + sgl.gen("a", check=lambda text: 1 / 0) + sgl.gen("b")

    with pytest.raises(sgl.ProgramError, match="ZeroDivisionError"):
        run(body, tiny)["b"]

    def late(s):
        s += "x" + sgl.gen("a", check=lambda text: never.wait(60)) + sgl.gen("b")

    with pytest.raises(sgl.RequestTimeoutError):
        run(late, tiny, timeout=0.2)["b"]
    never.set()


def test_going_back_ends_what_is_under_way_after_the_mark(tiny):
    def body(s):
        s += "x"
        with s.checkpoint() as place:
            s += sgl.gen("long", max_tokens=100_000, ignore_eos=True) + sgl.gen("never")
            place.rollback()
        s += "y" + sgl.gen("b")

    state, opened, _ = counted(tiny, body)
    assert opened == 1
    assert state.text() == "xy" + state["b"]
    with pytest.raises(sgl.UnknownVariableError):
        state["never"]


def test_draws_go_by_place_and_attempt_and_not_by_arrival(tiny):
    def branches(order):
        def body(s):
            s += "x"
            forks = s.fork(6)
            for i in order:
                forks[i] += f"{i}" + sgl.gen("a")
            forks.join()

        return run(body, tiny)["a"]

    assert branches(range(6)) == branches([5, 3, 1, 0, 2, 4])


def test_what_a_body_did_before_it_raised_is_as_it_would_have_been(tiny):
    seen = []

    def body(s):
        s += "x" + sgl.gen("a")
        seen.append(s["a"])
        s += sgl.gen("b", max_tokens=100_000, ignore_eos=True)
        raise LookupError

    with pytest.raises(LookupError):
        run(body, tiny)
    assert seen == [run(lambda s: s.__iadd__("x" + sgl.gen("a")), tiny)["a"]]
    run(lambda s: s.__iadd__("x" + sgl.gen("a")), tiny).sync()  # comes after what was stopped
    assert tiny.stats()["running"] == 0


def test_branches_that_nobody_reads_are_played(tiny):
    def body(s):
        s += "x"
        forks = s.fork(3)
        forks += sgl.gen("a", ignore_eos=True)

    state, opened, _ = counted(tiny, body)
    assert opened == 1
    assert state.usage().completion_tokens == 18


def test_threads_that_add_to_branches_keep_the_order_of_each(tiny):
    def body(threads):
        def inner(s):
            s += "x"
            forks = s.fork(8)

            def add(i):
                for j in range(5):
                    forks[i] += f" {i}.{j} " + sgl.gen(f"a{j}", max_tokens=3)

            if threads:
                crew = [threading.Thread(target=add, args=(i,)) for i in range(8)]
                for each in crew:
                    each.start()
                for each in crew:
                    each.join()
            else:
                for i in range(8):
                    add(i)
            forks.join("concate_and_append")

        return inner

    together, opened, _ = counted(tiny, body(threads=True))
    assert opened == 1
    assert together.text() == run(body(threads=False), tiny).text()


def test_queued_nodes_have_a_bound(tiny, monkeypatch):
    monkeypatch.setattr(programs, "MAX_QUEUED", 50)
    go_on = threading.Event()

    def body(s):
        s += "x" + sgl.gen("first", max_tokens=300, ignore_eos=True)
        for i in range(60):
            s += "a" + sgl.gen(f"g{i}", max_tokens=1)
        go_on.set()

    state = run(body, tiny)
    with pytest.raises(sgl.OverloadedError, match="nodes of the program wait") as caught:
        state["g59"]
    assert caught.value.where is not None


def test_a_rollback_revives_a_branch_that_had_too_many_nodes(tiny, monkeypatch):
    monkeypatch.setattr(programs, "MAX_QUEUED", 20)

    def body(s):
        s += "x"
        with s.checkpoint() as c:
            s += sgl.gen("first", max_tokens=300, ignore_eos=True)
            for i in range(40):
                s += "a" + sgl.gen(f"g{i}", max_tokens=1)
            with pytest.raises(sgl.OverloadedError):
                s["g39"]
            c.rollback()
        s += "y" + sgl.gen("after", max_tokens=3)

    state = run(body, tiny)
    assert state.text() == "xy" + state["after"]


def test_what_is_added_when_the_engine_has_ended_fails_once():
    engine = Engine.of(random_model(), max_running=4)
    state = run(lambda s: s.__iadd__("x" + sgl.gen("a")), engine)
    assert state["a"]
    engine.close()

    def more(s):
        s += "x" + sgl.gen("b") + sgl.gen("c")

    with pytest.raises(sgl.EngineClosedError):
        run(more, engine)["c"]
    state += sgl.gen("late")
    with pytest.raises(sgl.EngineClosedError):
        state["late"]


def test_what_is_added_after_the_body_has_ended_is_a_program_of_its_own(tiny):
    left_open = tiny.stats()["programs_open"]
    state, _, _ = counted(tiny, lambda s: s.__iadd__("x" + sgl.gen("a")))
    before = tiny.stats()["programs_opened"]
    state += " and " + sgl.gen("b")
    whole = run(lambda s: s.__iadd__("x" + sgl.gen("a") + " and " + sgl.gen("b")), tiny)
    assert state["b"] == whole["b"]
    assert tiny.stats()["programs_opened"] == before + 2
    with pytest.raises(sgl.ParameterError):
        state += sgl.gen("c") + sgl.image("/no/such.png")
    completion_variable(state.branch.player).wait()
    assert tiny.stats()["programs_open"] <= left_open


def test_what_is_added_before_the_body_is_played_goes_on_in_its_program(tiny):
    def run_and_add(**settings):
        gates, asked = [threading.Event(), threading.Event()], threading.Event()

        def waits(text, i):
            asked.set() if i else None
            return gates[i].wait()

        state = run(
            lambda s: s.__iadd__("x" + sgl.gen("a", check=lambda text: waits(text, 0))),
            tiny,
            **settings,
        )
        state += sgl.gen("b", check=lambda text: waits(text, 1))
        state += " and "
        gates[0].set()
        asked.wait()
        state += sgl.gen("c")
        gates[1].set()
        return state["c"], state.usage("c").prompt_tokens

    before = tiny.stats()["programs_opened"]
    assert run_and_add() == run_and_add(push_down=False)
    assert tiny.stats()["programs_opened"] == before + 1


def test_a_rollback_that_waits_for_what_a_join_gathers_stays_in_its_program(tiny):
    def body(s):
        s += "x"
        fork = s.fork(2)
        with fork[0].checkpoint() as place:
            fork[0] += sgl.gen("a")
            inner = fork[0].fork(2)
            inner += "i" + sgl.gen("b")
            fork[0] += sgl.gen("a2")
            inner.join()
            fork.join()
            place.rollback()
        fork[0] += "c" + sgl.gen("d")
        s += sgl.gen("e")
        return fork[0]["d"]

    state, opened, submitted = counted(tiny, body)
    apart, none, _ = counted(tiny, body, push_down=False)
    assert (opened, submitted, none) == (1, 0, 0)
    assert (state.ret_value, state.text()) == (apart.ret_value, apart.text())
    assert [state[name] for name in ("a", "a2", "b", "e")] == [
        apart[name] for name in ("a", "a2", "b", "e")
    ]


def test_a_join_of_a_branch_that_has_failed_keeps_what_it_gathers(tiny):
    def body(s):
        s += "x"
        fork = s.fork(1)
        s += sgl.gen("bad", check=lambda _: False)
        with pytest.raises(sgl.ValueValidationError):
            s["bad"]
        with fork[0].checkpoint() as place:
            fork[0] += sgl.gen("a") + sgl.gen("b", check=lambda _: True)
            fork.join()
            place.rollback()

    found, wanted = run(body, tiny), run(body, tiny, push_down=False)
    assert (found["a"], found["b"]) == (wanted["a"], wanted["b"])


def test_a_rollback_goes_back_to_before_its_program(tiny):
    def run_and_go_back(**settings):
        gate = threading.Event()
        state = run(
            lambda s: s.__iadd__("x" + sgl.gen("a", check=lambda text: gate.wait())),
            tiny,
            **settings,
        )
        with state.checkpoint() as place:
            gate.set()
            for _ in range(2):  # the mark has put off the end of the first program once
                completion_variable(state.branch.player).wait()
            state += "y" + sgl.gen("b")
            state += "y" + sgl.gen("c")
            place.rollback()
        state += "z" + sgl.gen("d")
        return state.text(), state.usage("d").prompt_tokens

    before = tiny.stats()["programs_opened"]
    assert run_and_go_back() == run_and_go_back(push_down=False)
    # "c" and "d" have programs of their own if they come when what is before them has been played.
    assert tiny.stats()["programs_opened"] >= before + 2


def test_the_branches_of_a_fork_share_their_steps(tiny):
    def body(s):
        s += "x"
        forks = s.fork(16)
        forks += sgl.gen("a", max_tokens=20, ignore_eos=True)

    before = tiny.stats()["steps"]
    counted(tiny, body)
    assert tiny.stats()["steps"] - before < 16 * 20 / 2


def test_a_thousand_open_programs_hold_nothing(tiny):
    held = [run(lambda s: s.__iadd__("x" + sgl.gen("a", max_tokens=1)), tiny) for _ in range(20)]
    for state in held:
        state.sync()
    stats = tiny.stats()
    assert stats["running"] == stats["waiting"] == 0


class Outbox(sgl.BaseBackend):
    """Keeps what is sent."""

    def __init__(self):
        super().__init__()
        self.sent, self.sink = [], None

    def open_program(self, sink, *, stream, priority=0):
        self.sink = sink
        return self

    def extend(self, path, nodes):
        self.sent.append((path, [type(node).__name__ for node in nodes]))

    def drop_branch(self, path):
        pass

    def expect_pause(self, path, seconds):
        self.sent.append((path, seconds))

    def close(self):
        pass


def test_expected_pauses_are_told_behind_what_was_added_before():
    def body(s):
        s.expect_pause(1)  # nothing was asked for, so nothing is kept
        s += "a" + sgl.gen("x")
        forks = s.fork(2)
        forks[1] += "b"
        forks[1].expect_pause(2.5)
        s.cancel()

    sgl.function(body).run(backend=(outbox := Outbox()), stream=True).error()
    assert outbox.sent == [((), ["Text", "Gen"]), ((), ["Fork"]), ((2, 1), ["Text"]), ((2, 1), 2.5)]


def test_other_backends_are_told_no_pauses():
    @sgl.function
    def body(s):
        s += "a" + sgl.gen("x")
        s.expect_pause(20)
        s += "b"

    state = body.run(backend=sgl.ScriptedBackend(default="x"))
    assert state.text() == "axb"


@pytest.mark.parametrize("seconds", [-1, float("inf"), float("nan"), "3", None, True])
def test_a_pause_is_a_number_of_seconds(seconds):
    @sgl.function
    def body(s):
        s.expect_pause(seconds)

    with pytest.raises(sgl.ParameterError, match="no number of seconds") as info:
        body.run(backend=sgl.ScriptedBackend(default="x"))
    assert info.value.where is not None


def test_nodes_are_sent_in_the_order_in_which_they_were_added():
    def body(s):
        s += "a"
        fork = s.fork(2)
        fork[1] += "z"
        with fork[0].checkpoint() as place:
            fork[0] += "b"
            fork.join("concate_and_append")
            place.rollback()
        fork[0] += "c"
        s += "d" + sgl.gen("x")
        fork[0] += sgl.gen("y")
        s.cancel()

    backend = Outbox()
    run(body, backend)
    assert backend.sent == [
        ((), ["Text", "Fork"]), ((1, 1), ["Text"]), ((1, 0), ["Mark", "Text"]),
        ((), ["Join", "Text", "Gen"]), ((1, 0), ["Rollback", "Text"]), ((1, 0), ["Gen"]),
    ]  # fmt: skip


def test_what_a_backend_refuses_fails_its_branch_and_those_forked_from_it():
    class Refusing(Outbox):
        def extend(self, path, nodes):
            super().extend(path, nodes)
            if path == (1, 0):
                raise sgl.ParameterError("nodes", "are refused.")

    def body(s):
        s += "a"
        left, right = s.fork(2)
        left += "b"
        inner = left.fork(1)
        inner += sgl.gen("x")
        with pytest.raises(sgl.ParameterError, match="refused"):
            inner[0]["x"]
        with pytest.raises(sgl.ParameterError, match="refused"):
            left += sgl.gen("y")
            left["y"]
        right += sgl.gen("z")
        s.cancel()

    backend = Refusing()
    run(body, backend)
    assert backend.sent[-1] == ((1, 1), ["Gen"])


def test_a_program_is_played_on_behind_an_answer_on_the_thread_that_brings_it():
    def body(s):
        s += "a" + sgl.gen("x") + "b" + sgl.gen("y")
        s.fork(2).__iadd__("c" + sgl.gen("z"))
        s += "d" + sgl.gen("end")

    outbox = Outbox()
    executor = run(body, outbox).stream_executor
    for place, name in ((1, "x"), (3, "y"), (6, "end")):
        assert name not in executor.variables
        outbox.sink(Played((place,), name, Generation(f"<{name}>")))
        assert executor.variables[name] == f"<{name}>"
    assert executor.text_ == "a<x>b<y>d<end>"


def test_a_program_may_end_within_a_call_of_it():
    class Ending(Outbox):
        def extend(self, path, nodes):
            super().extend(path, nodes)
            if len(self.sent) > 1:
                self.sink(EngineClosedError("closed."))

    def body(s):
        s += "a" + sgl.gen("x")
        s += "b" + sgl.gen("y")

    state = run(body, Ending())
    for name in "xy":
        with pytest.raises(EngineClosedError, match=r"closed\."):
            state[name]


def test_events_that_come_after_a_timeout_are_dropped():
    """Else they would stay until the branch goes."""

    def body(s):
        s += "a" + sgl.gen("x", timeout=1e-6)

    outbox = Outbox()
    state = run(body, outbox, stream=True)
    with pytest.raises(sgl.RequestTimeoutError):
        state["x"]
    late = Delta("late")
    before = sys.getrefcount(late)
    outbox.sink(Played((1,), "x", late))
    assert sys.getrefcount(late) == before
