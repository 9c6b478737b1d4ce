"""What steers a generation: time limits, retries, checks, other backends, seeds, cancelling."""

import asyncio
import re
import threading
from contextvars import ContextVar, copy_context
from types import SimpleNamespace
from typing import Any

import pytest

import sglang_lite as sgl
from sglang_lite.lang.execution import generation
from sglang_lite.protocol import UNSET, Generation
from tests.lang.fakes import Answers, Drawing, Gated, Pieces, Scored, line_here, within


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    """Between attempts."""
    monkeypatch.setattr(generation, "_FIRST_PAUSE", 0)


def run(*exprs, **options):
    @sgl.function
    def program(s):
        for expr in exprs:
            s += expr

    return program.run(**options)


class Failing(sgl.BaseBackend):
    """Fails so many times, then answers."""

    def __init__(self, *errors):
        super().__init__()
        self.errors, self.seeds = list(errors), []

    async def agenerate(self, prompt, params, constraint, *, stream):
        self.seeds.append(params.seed)
        if self.errors:
            raise self.errors.pop(0)
        yield Generation("fine")

    async def aselect(self, prompt, choices, *, unconditional):
        if self.errors:
            raise self.errors.pop(0)
        return await Scored({"a": [(1, -1.0, None)], "b": [(2, -2.0, None)]}).aselect(
            prompt, choices, unconditional=False
        )


# ------------------------------------------------------------------------------------------------- time limits


def cancelled_by_a_timeout(run):
    """A backend's call was cancelled, with the first of some timeouts that leaves the time to make one."""
    for timeout in (0.02, 0.2, 2, 20):
        backend = Gated()
        run(timeout, backend)
        if backend.asked.is_set():
            return backend.cancelled.wait(60)
    return False


@pytest.mark.parametrize("node", [sgl.gen("a"), sgl.select("a", ["x", "y"])])
def test_a_run_that_takes_too_long_fails_its_readers_and_its_request(node):
    def program(timeout, backend):
        state = run("x", node, backend=backend, timeout=timeout)
        with pytest.raises(sgl.RequestTimeoutError, match=rf"the run took longer than its timeout of {timeout:g} s"):
            within(2 + timeout, lambda: state["a"])

    assert cancelled_by_a_timeout(program)


def test_a_node_that_takes_too_long_fails_with_its_line_and_its_request():
    def one(timeout, backend):
        @sgl.function
        def program(s):
            s += "x"
            s += sgl.gen("a", timeout=timeout)  # here

        state = program.run(backend=backend)
        with pytest.raises(sgl.RequestTimeoutError, match=rf"the node's timeout of {timeout:g} s") as caught:
            within(2 + timeout, lambda: state["a"])
        assert caught.value.where.line == line_here(program)

    assert cancelled_by_a_timeout(one)


def test_what_was_ready_in_time_can_still_be_read():
    state = run("x", sgl.gen("a", backend=Answers(lambda text: "1")), sgl.gen("b", timeout=0.02), backend=Gated())
    assert state["a"] == "1"
    with pytest.raises(sgl.RequestTimeoutError):
        state["b"]


def test_a_generation_that_starts_after_the_deadline_fails_even_if_its_answer_is_there(monkeypatch):
    now, reached = [0.0], []

    @sgl.function
    def program(s):
        s += sgl.gen("a")
        reached.append(s["a"])
        now[0] = s.branch.run.deadline
        s += sgl.gen("b")
        return s["b"]

    monkeypatch.setattr(generation, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with pytest.raises(sgl.RequestTimeoutError, match="the run took longer than its timeout of 5000 s"):
        program.run(backend=sgl.ScriptedBackend(default="x"), timeout=5000)
    assert reached == ["x"]


def test_a_timeout_of_the_backends_own_is_not_taken_for_the_nodes():
    state = run(sgl.gen("a", timeout=60), backend=Failing(TimeoutError("socket")))
    with pytest.raises(sgl.ProgramError, match="TimeoutError: socket"):
        state["a"]


def test_a_time_limit_holds_across_attempts():
    state = run(sgl.gen("a", retries=10**9), backend=sgl.ScriptedBackend(lambda call: str(1 / 0)), timeout=0.05)
    with pytest.raises(sgl.RequestTimeoutError, match="the run took longer"):
        within(2, lambda: state["a"])


@pytest.mark.parametrize("timeout", [0, -1, "1"])
def test_a_time_limit_is_a_number_above_zero(timeout):
    with pytest.raises(sgl.ParameterError, match="timeout"):
        run(sgl.gen("a"), backend=sgl.ScriptedBackend(), timeout=timeout)
    with pytest.raises(sgl.ParameterError, match="timeout"):
        sgl.gen("a", timeout=timeout)


# ----------------------------------------------------------------------------------------------------- retries


@pytest.mark.parametrize("options", [(dict(retries=2), {}), ({}, dict(retries=2)), (dict(retries=2), dict(retries=0))])
def test_a_generation_whose_backend_fails_is_tried_again(options):
    node, run_ = options
    backend = Failing(OSError("1"), OSError("2"))
    assert run("x", sgl.gen("a", **node), backend=backend, **run_)["a"] == "fine"
    assert len(backend.seeds) == 3


def test_a_backend_that_answers_at_once_is_tried_again_too():
    backend = sgl.ScriptedBackend({"x": [OSError("down"), "fine"]})
    assert run("x", sgl.gen("a"), backend=backend, retries=1)["a"] == "fine"


def test_a_node_says_how_often_for_itself():
    backend = Failing(OSError("1"))
    with pytest.raises(sgl.ProgramError, match="OSError: 1"):
        run(sgl.gen("a", retries=0), backend=backend, retries=5)["a"]


def test_a_selection_is_tried_again_too():
    assert run("x", sgl.select("a", ["a", "b"]), backend=Failing(OSError("down")), retries=1)["a"] == "a"


def test_several_selections_do_not_write_what_is_already_there_again():
    class Shaky(Scored):
        async def aselect(self, prompt, choices, *, unconditional):
            if len(self.asked) == 1 and not shaken:
                shaken.append(1)
                raise OSError("down")
            return await super().aselect(prompt, choices, unconditional=unconditional)

    shaken = []
    likely = {text: [(i, -float(i), None)] for i, text in enumerate(["a", ", b", "b", "\n", ", c", "c"])}
    state = run("x: ", sgl.select("a", ["a", "b", "c"], multi=True), backend=Shaky(likely), retries=1)
    assert state["a"] == ["a", "b"]
    assert state.text() == "x: a, b"
    assert shaken


def test_the_last_error_is_raised_when_all_attempts_fail():
    backend = Failing(OSError("1"), OSError("2"), OSError("3"))
    with pytest.raises(sgl.ProgramError, match="OSError: 3"):
        run(sgl.gen("a", retries=2), backend=backend)["a"]


def test_what_can_not_get_better_is_not_tried_again():
    backend = Failing(sgl.ParameterError("temperature", "too hot."), OSError("never"))
    with pytest.raises(sgl.ParameterError, match="too hot"):
        run(sgl.gen("a", retries=5), backend=backend)["a"]
    assert len(backend.errors) == 1


def test_with_a_seed_every_attempt_draws_anew_and_the_same_each_time():
    def seeds(seed):
        backend = Failing(OSError("1"), OSError("2"))
        run("x", sgl.gen("a", retries=2), backend=backend, seed=seed).sync()
        return backend.seeds

    assert len(set(seeds(1))) == 3
    assert seeds(1) == seeds(1) != seeds(2)


def test_without_a_seed_every_attempt_is_the_backends_to_draw():
    backend = Failing(OSError("1"))
    run("x", sgl.gen("a", retries=1), backend=backend).sync()
    assert backend.seeds == [UNSET, UNSET]


def test_text_of_an_attempt_that_failed_is_nowhere():
    backend = sgl.ScriptedBackend({"x": ["no", "yes"]})
    state = run("x ", sgl.gen("a", check=lambda v: v == "yes", retries=1), backend=backend)
    assert state.text() == "x yes"
    assert [call.prompt.text for call in backend.calls] == ["x ", "x "]


def test_a_stream_shows_nothing_of_an_attempt_that_was_refused():
    backend = sgl.ScriptedBackend({"x": ["no no", "yes yes"]})
    state = run("x ", sgl.gen("a", check=lambda v: v[0] == "y", retries=1), backend=backend, stream=True)
    assert "".join(state.text_iter("a")) == "yes yes"
    assert "".join(state.text_iter()) == "x yes yes"


@pytest.mark.parametrize("check", [lambda v: v == "yes", lambda v: {"yes": True}[v]], ids=["refuses", "raises"])
@pytest.mark.parametrize("greedy", [dict(temperature=0), dict(top_k=1)], ids=str)
@pytest.mark.parametrize("of_run", [False, True])
def test_what_is_refused_at_temperature_0_is_not_generated_again_and_says_so(check, greedy, of_run):
    @sgl.function
    def program(s):
        s += "x" + sgl.gen("a", check=check, retries=3, **({} if of_run else greedy))  # here

    backend = sgl.ScriptedBackend(default="no")
    state = program.run(backend=backend, **(greedy if of_run else {}))
    with pytest.raises(sgl.SglError) as caught:
        state["a"]
    said = [str(caught.value), *getattr(caught.value.__cause__, "__notes__", [])]
    assert any("`retries` at temperature 0 give the same answer: set a temperature" in text for text in said)
    assert caught.value.where.line == line_here(program)
    assert len(backend.calls) == 1


def test_at_temperature_0_what_the_backend_failed_at_is_tried_again():
    backend = Failing(OSError("1"), sgl.OverloadedError("2"))
    assert run("x", sgl.gen("a", retries=2, temperature=0), backend=backend)["a"] == "fine"


@pytest.mark.parametrize("retries", [-1, True, 1.5])
def test_retries_are_a_whole_number(retries):
    with pytest.raises(sgl.ParameterError, match="retries"):
        sgl.gen("a", retries=retries)
    with pytest.raises(sgl.ParameterError, match="retries"):
        run(sgl.gen("a"), backend=sgl.ScriptedBackend(), retries=retries)


# ------------------------------------------------------------------------------------------------------ checks


class Judge:
    async def __call__(self, value):
        return value == "yes"


async def judged(value):
    await asyncio.sleep(0)
    return value == "yes"


@pytest.mark.parametrize("check", [lambda v: v == "yes", judged, Judge(), lambda v: judged(v)])
def test_a_check_decides_whatever_kind_of_function_it_is(check):
    backend = sgl.ScriptedBackend({"x": ["no", "yes"]})
    assert run("x", sgl.gen("a", check=check, retries=1), backend=backend)["a"] == "yes"
    with pytest.raises(sgl.ValueValidationError, match="refused the value 'no'"):
        run("x", sgl.gen("a", check=check), backend=sgl.ScriptedBackend(default="no"))["a"]


def test_a_refusal_carries_value_text_name_and_line():
    def is_even(value):
        return value % 2 == 0

    @sgl.function
    def program(s):
        s += sgl.gen("a", type=int, check=is_even)  # here

    state = program.run(backend=sgl.ScriptedBackend(default="0", answers=lambda call: "3"))
    with pytest.raises(sgl.ValueValidationError, match="is_even refused the value 3") as caught:
        state["a"]
    assert (caught.value.value, caught.value.text) == (3, "3")
    assert caught.value.where.line == line_here(program)


def test_of_several_samples_each_is_checked():
    backend = sgl.ScriptedBackend({"x": ["1", "2", "3", "5"]})
    state = run("x", sgl.gen("a", n=2, type=int, check=lambda value: value % 2 == 1, retries=1), backend=backend)
    assert state["a"] == [3, 5]


def test_a_check_that_raises_fails_the_node_with_its_cause():
    state = run(sgl.gen("a", check=lambda value: {}[value]), backend=sgl.ScriptedBackend(default="x"))
    with pytest.raises(sgl.ProgramError, match="KeyError: 'x'") as caught:
        state["a"]
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("verdict", [None, 1, "yes", [], re.match("a", "a")], ids=repr)
def test_a_check_that_returns_no_bool_is_an_error_and_no_refusal(verdict):
    def judge_it(value):
        return verdict

    @sgl.function
    def program(s):
        s += "x" + sgl.gen("a", check=judge_it, retries=3)  # here

    backend = sgl.ScriptedBackend(default="x")
    state = program.run(backend=backend)
    with pytest.raises(sgl.ParameterError, match=r"check: judge_it returned .*, not True or False") as caught:
        state["a"]
    assert caught.value.where.line == line_here(program)
    assert len(backend.calls) == 1


def test_a_check_that_never_ends_is_ended_by_the_runs_time_limit():
    async def forever(value):
        await asyncio.Event().wait()

    state = run(sgl.gen("a", check=forever), backend=sgl.ScriptedBackend(default="x"), timeout=0.02)
    with pytest.raises(sgl.RequestTimeoutError):
        within(2, lambda: state["a"])


def test_a_check_that_never_ends_is_ended_by_its_nodes_time_limit():
    async def forever(value):
        asked.append(value)
        await asyncio.Event().wait()

    asked = []
    state = run(sgl.gen("a", check=forever, timeout=0.02, retries=1), backend=sgl.ScriptedBackend(default="x"))
    with pytest.raises(sgl.RequestTimeoutError, match=r"the check did not end within the node's timeout of 0.02 s"):
        within(10, lambda: state["a"])
    assert len(asked) == 2


def test_an_attempt_that_is_late_is_followed_by_the_next():
    class Stalled(Failing):
        async def agenerate(self, prompt, params, constraint, *, stream):
            self.seeds.append(params.seed)
            if len(self.seeds) == 1:
                await asyncio.Event().wait()
            yield Generation("fine")

    backend = Stalled()
    state = run(sgl.gen("a", timeout=0.05, retries=20), backend=backend)
    assert within(20, lambda: state["a"]) == "fine"
    assert len(backend.seeds) > 1


def test_an_answer_and_its_check_share_the_time_of_an_attempt(monkeypatch):
    now, asked = [100.0], []

    class Slow(Failing):
        async def agenerate(self, prompt, params, constraint, *, stream):
            now[0] += 3000
            yield Generation("fine")

    def check(value):
        asked.append(value)
        return True

    monkeypatch.setattr(generation, "time", SimpleNamespace(monotonic=lambda: now[0]))
    assert run(sgl.gen("a", check=check, timeout=5000), backend=Slow())["a"] == "fine"
    with pytest.raises(sgl.RequestTimeoutError, match="the check did not end within the node's timeout of 2000 s"):
        run(sgl.gen("a", check=check, timeout=2000), backend=Slow())["a"]
    assert asked == ["fine"]


@sgl.function
def judge(s, value):
    s += f"judge {value} " + sgl.gen("verdict")


def test_a_check_may_run_a_program_which_runs_on_its_own_programs_backend():
    def check(value):
        verdicts.append(judge.run(value)["verdict"])
        return True

    def start(i):
        return run("x", sgl.gen("a", check=check), backend=sgl.ScriptedBackend(default=f"by {i}", latency=0.001))

    verdicts = []
    for state in [start(i) for i in range(10)]:
        state.sync()
    assert sorted(verdicts) == [f"by {i}" for i in range(10)]


def test_checks_that_wait_for_one_another_do_not_stop_each_other():
    meeting = threading.Barrier(40, timeout=5)
    program = sgl.function(lambda s, i: s.__iadd__(sgl.gen("a", check=lambda value: meeting.wait() >= 0)))
    states = within(10, lambda: program.run_batch([(i,) for i in range(40)], backend=sgl.ScriptedBackend(default="x")))
    assert len(states) == 40


def test_an_async_check_that_would_stop_what_it_waits_for_is_an_error():
    async def blocking(value):
        return judge.run(value)["verdict"] == "x"

    async def awaiting(value):
        return (await judge.arun(value))["verdict"] == "x"

    script = sgl.ScriptedBackend(default="x", latency=0.001)
    with pytest.raises(sgl.ProgramError, match="would stop what it waits for"):
        within(5, lambda: run(sgl.gen("a", check=blocking), backend=script)["a"])
    assert within(5, lambda: run(sgl.gen("a", check=awaiting), backend=script)["a"]) == "x"


# ---------------------------------------------------------------------------------------------- other backends


def test_a_node_may_be_answered_by_another_backend_that_sees_the_whole_text():
    judge = sgl.ScriptedBackend(lambda call: f"({call.prompt.text})")
    state = run("draft: ", sgl.gen("a"), " ", sgl.gen("b", backend=judge), backend=sgl.ScriptedBackend(default="x"))
    assert state["b"] == "(draft: x )"
    assert state.text() == "draft: x (draft: x )"


def test_another_backends_tokens_are_not_the_runs_own():
    """So the runs' backend tokenises what the other one wrote by itself."""
    from sglang_lite.protocol import Span

    class Tokens(sgl.BaseBackend):
        async def agenerate(self, prompt, params, constraint, *, stream):
            prompts.append(prompt.spans)
            yield Generation("ab", (1, 2), (Span("ab", (1, 2)),))

    prompts = []
    run("x", sgl.gen("a", backend=Tokens()), sgl.gen("b"), sgl.gen("c"), backend=Tokens()).sync()
    assert prompts[1] == (Span("x"), Span("ab", special=False))
    assert prompts[2] == (*prompts[1], Span("ab", (1, 2)))


def test_what_the_other_backend_can_not_do_is_refused_at_the_line():
    from sglang_lite.lang.backend.base_backend import Capabilities

    class Small(sgl.ScriptedBackend):
        capabilities = Capabilities(constraints=frozenset())

    @sgl.function
    def program(s):
        s += sgl.gen("a", regex="x", backend=Small())  # here

    with pytest.raises(sgl.CapabilityError, match=r"Small.*a regex") as caught:
        program.run(backend=sgl.ScriptedBackend())
    assert caught.value.where.line == line_here(program)


class Told(sgl.BaseBackend):
    async def agenerate(self, prompt, params, constraint, *, stream):
        yield Generation(request.get())


class ToldByHooks(sgl.BaseBackend):
    def generate(self, s, sampling_params):
        return request.get(), {}


request = ContextVar("request", default="nobody's")


@pytest.mark.parametrize("backend", [Told(), ToldByHooks()])
def test_a_backend_sees_the_context_variables_of_its_program(backend):
    """A tracer or a request id that the caller has set, and never those of another program."""

    def start(name):
        request.set(name)
        return run("x", sgl.gen("a"), sgl.gen("b", timeout=5), backend=backend)

    names = [f"{i}" for i in range(20)]
    states = [copy_context().run(start, name) for name in names]
    assert [(state["a"], state["b"]) for state in states] == [(name, name) for name in names]


# ------------------------------------------------------------------------------------------------------- seeds


@sgl.function
def drawing(s, i):
    s += f"{i}: " + sgl.gen("a") + sgl.gen("b")
    fork = s.fork(3)
    fork += sgl.gen("c")
    fork.join()
    s += sgl.gen("d")


def draws(state):
    return [state[name] for name in "abcd"]


def test_a_seed_gives_the_same_draws_alone_or_in_a_batch_of_any_timing():
    alone = [draws(drawing.run(i=i, backend=Drawing(), seed=7)) for i in range(64)]
    for shuffle in range(3):
        states = drawing.run_batch([{"i": i} for i in range(64)], backend=Drawing(shuffle), seed=7, num_threads=16)
        assert [draws(state) for state in states] == alone
    assert draws(drawing.run(i=0, backend=Drawing(), seed=8)) != alone[0]


def test_every_generation_of_a_seeded_run_has_its_own_seed():
    backend = Drawing()
    draws(drawing.run(i=0, backend=backend, seed=7))
    assert len(set(backend.seeds)) == len(backend.seeds) == 6


def test_text_and_names_do_not_change_the_draws_that_follow():
    @sgl.function
    def program(s, extra):
        if extra:
            s += "some text"
            s["x"] = 1
        s += sgl.gen("a")

    backend = Drawing()
    assert program.run(True, backend=backend, seed=1)["a"] == program.run(False, backend=backend, seed=1)["a"]


@pytest.mark.slow
def test_the_engine_draws_the_same_alone_and_in_a_batch(engine):
    @sgl.function
    def story(s, animal):
        s += f"A {animal}:" + sgl.gen("a", max_tokens=3)

    items: list[dict[str, Any]] = [{"animal": animal} for animal in ("cat", "dog", "cow", "owl")]
    together = [state["a"] for state in story.run_batch(items, backend=engine, seed=3)]
    assert [story.run(**item, backend=engine, seed=3)["a"] for item in items[::2]] == together[::2]


# -------------------------------------------------------------------------------------------------- cancelling


def test_cancelling_stops_the_backend_and_tells_the_readers_where():
    backend = Gated()

    @sgl.function
    def program(s):
        s += "x" + sgl.gen("a") + sgl.gen("b")
        backend.asked.wait(5)
        s.cancel()  # here

    state = program.run(backend=backend)
    assert backend.cancelled.wait(60)
    for name in "ab":
        with pytest.raises(sgl.RequestAbortedError, match="cancelled") as caught:
            within(1, lambda n=name: state[n])
        assert caught.value.where.line == line_here(program)


def test_cancelling_keeps_what_was_finished():
    backend = Gated()
    state = run("x", sgl.gen("a", backend=Answers(lambda text: "done")), sgl.gen("b"), backend=backend)
    assert backend.asked.wait(60)
    state.cancel()
    assert state["a"] == "done"


def test_cancelling_reaches_the_branches_of_branches():
    backends = [Gated(), Gated()]

    @sgl.function
    def program(s):
        fork = s.fork(2)
        fork[0] += sgl.gen("a", backend=backends[0])
        inner = fork[1].fork(1)
        inner += sgl.gen("a", backend=backends[1])
        inner.join()
        fork.join()

    state = program.run(backend=Gated())
    assert all(backend.asked.wait(60) for backend in backends)
    state.cancel()
    assert all(backend.cancelled.wait(60) for backend in backends)
    with pytest.raises(sgl.RequestAbortedError):
        within(1, lambda: state["a"])


def test_cancelling_a_finished_program_does_nothing():
    state = run("x", sgl.gen("a"), backend=sgl.ScriptedBackend(default="y"))
    state.cancel()
    assert state["a"] == "y"
    assert state.error() is None


def test_cancelling_ends_the_streams():
    backend = Pieces("one ", "two", stepped=True)
    state = run("x ", sgl.gen("a"), backend=backend, stream=True)
    backend.step()
    pieces = state.text_iter("a")
    assert next(pieces) == "one "
    state.cancel()
    with pytest.raises(sgl.RequestAbortedError):
        within(1, lambda: next(pieces))


def test_a_body_that_is_cancelled_between_its_generations_makes_no_more_of_them():
    between, cancelled, ended = threading.Event(), threading.Event(), threading.Event()

    class Backend(sgl.ScriptedBackend):
        def end_program(self, s):
            ended.set()

    backend = Backend(default="y")

    @sgl.function
    def program(s):
        s += "x" + sgl.gen("a")
        assert s["a"] == "y"
        between.set()
        assert cancelled.wait(60)
        s += sgl.gen("b")

    async def main():
        awaiting = asyncio.ensure_future(program.arun(backend=backend))
        await asyncio.to_thread(between.wait, 5)
        awaiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await awaiting

    asyncio.run(main())
    cancelled.set()
    assert ended.wait(60)
    assert len(backend.calls) == 1


@pytest.mark.parametrize("stopped_by", ["cancel", "timeout"])
def test_a_body_that_tries_until_it_succeeds_ends_when_it_is_stopped(stopped_by):
    backend = Gated()
    states = []

    @sgl.function
    def program(s):
        states.append(s)
        while True:
            with s.checkpoint() as c:
                s += sgl.gen("a")
                try:
                    return s["a"]
                except sgl.SglError:
                    c.rollback()

    def run():
        return program.run(backend=backend, timeout=0.1 if stopped_by == "timeout" else None)

    def stop():
        assert backend.asked.wait(60)
        states[0].cancel()

    if stopped_by == "cancel":
        threading.Thread(target=stop).start()
    with pytest.raises(sgl.RequestAbortedError if stopped_by == "cancel" else sgl.RequestTimeoutError):
        within(5, run)


def test_a_blocking_hook_can_not_be_stopped_but_its_readers_do_not_wait_for_it():
    entered, leave = threading.Event(), threading.Event()

    class Slow(sgl.BaseBackend):
        def generate(self, s, sampling_params):
            entered.set()
            leave.wait(5)
            return "late", {}

    state = run("x", sgl.gen("a"), backend=Slow())
    assert entered.wait(60)
    state.cancel()
    with pytest.raises(sgl.RequestAbortedError):
        within(1, lambda: state["a"])
    leave.set()
    assert state.stream_executor.text_ == "x"


def test_a_cancelled_program_on_the_engine_frees_it(engine):
    state = run("Tell me everything:", sgl.gen("a", max_tokens=4000, ignore_eos=True), backend=engine, stream=True)
    next(state.text_iter("a"))  # it is under way
    state.cancel()
    run("x", sgl.gen("a", max_tokens=2), backend=engine).sync()  # comes after the abort
    assert engine.stats()["running"] == engine.stats()["waiting"] == 0
    with pytest.raises(sgl.RequestAbortedError):
        state["a"]


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_cancelling_the_task_that_awaits_a_program_stops_it(kind):
    backend = Gated()

    def plain(s):
        s += "x" + sgl.gen("a")

    async def coroutine(s):
        s += "x" + sgl.gen("a")

    async def main():
        awaiting = asyncio.ensure_future(sgl.function(plain if kind == "plain" else coroutine).arun(backend=backend))
        await asyncio.to_thread(backend.asked.wait, 5)
        awaiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await awaiting

    asyncio.run(main())
    assert backend.cancelled.wait(60)


def test_cancelling_the_task_that_awaits_a_batch_stops_its_programs():
    backend = Gated()

    @sgl.function
    async def program(s, i):
        s += "x" + sgl.gen("a")

    async def main():
        awaiting = asyncio.ensure_future(program.arun_batch([{"i": 0}, {"i": 1}], backend=backend))
        await asyncio.to_thread(backend.asked.wait, 5)
        awaiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await awaiting

    asyncio.run(main())
    assert backend.cancelled.wait(60)
