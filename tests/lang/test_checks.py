"""`check=`: verdicts on what was generated, and the attempts that follow a refusal."""

import asyncio
import re
import threading
from types import SimpleNamespace

import pytest

import sglang_lite as sgl
from sglang_lite.lang.execution import generation, retries
from sglang_lite.protocol import Generation
from tests.lang.fakes import Failing, line_here, run, within


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    """Between attempts."""
    monkeypatch.setattr(retries, "_FIRST_PAUSE", 0)


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
    with pytest.raises(sgl.ValueValidationError, match=r"refused the value 'no'\. Raise retries="):
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
    state = run(
        "x",
        sgl.gen("a", n=2, type=int, check=lambda value: value % 2 == 1, retries=1),
        backend=backend,
    )
    assert state["a"] == [3, 5]


def test_a_check_that_raises_fails_the_node_with_its_cause():
    state = run(
        sgl.gen("a", check=lambda value: {}[value]), backend=sgl.ScriptedBackend(default="x")
    )
    with pytest.raises(sgl.ProgramError, match="KeyError: 'x'") as caught:
        state["a"]
    assert isinstance(caught.value.__cause__, KeyError)


def interrupt(value):
    raise KeyboardInterrupt(value)


async def interrupt_later(value):
    raise KeyboardInterrupt(value)


@pytest.mark.parametrize("check", [interrupt, interrupt_later])
def test_an_interrupt_of_a_check_is_one_of_the_program(check):
    backend = sgl.ScriptedBackend(default="x")

    @sgl.function
    def body(s):
        s += sgl.gen("a", check=check)
        return s["a"]

    @sgl.function
    async def async_body(s):
        s += sgl.gen("a", check=check)
        return await s.get("a")

    for program in (body, async_body):
        with pytest.raises(KeyboardInterrupt, match="x"):
            program.run(backend=backend)
    state = run(sgl.gen("a"), backend=backend)
    assert state["a"] == "x", "the next run is untouched"


@pytest.mark.parametrize("verdict", [None, 1, "yes", [], re.match("a", "a")], ids=repr)
def test_a_check_that_returns_no_bool_is_an_error_and_no_refusal(verdict):
    def judge_it(value):
        return verdict

    @sgl.function
    def program(s):
        s += "x" + sgl.gen("a", check=judge_it, retries=3)  # here

    backend = sgl.ScriptedBackend(default="x")
    state = program.run(backend=backend)
    with pytest.raises(
        sgl.ParameterError, match=r"check: judge_it returned .*, not True or False"
    ) as caught:
        state["a"]
    assert caught.value.where.line == line_here(program)
    assert len(backend.calls) == 1


def test_a_check_that_never_ends_is_ended_by_the_runs_time_limit():
    async def forever(value):
        await asyncio.Event().wait()

    state = run(sgl.gen("a", check=forever), backend=sgl.ScriptedBackend(default="x"), timeout=0.02)
    with pytest.raises(sgl.RequestTimeoutError):
        within(2, lambda: state["a"])


def test_a_check_that_never_ends_is_ended_by_its_nodes_time_limit(time_limits):
    async def forever(value):
        asked.append(value)
        time_limits.expire()
        await asyncio.Event().wait()

    asked = []
    state = run(
        sgl.gen("a", check=forever, timeout=1000, retries=1),
        backend=sgl.ScriptedBackend(default="x"),
    )
    with pytest.raises(
        sgl.RequestTimeoutError, match=r"the check did not end within the node's timeout of 1000 s"
    ):
        within(10, lambda: state["a"])
    assert len(asked) == 2


def test_an_attempt_that_is_late_is_followed_by_the_next(time_limits):
    class Stalled(Failing):
        async def agenerate(self, prompt, params, constraint, *, stream):
            self.seeds.append(params.seed)
            if len(self.seeds) == 1:
                time_limits.expire()
                await asyncio.Event().wait()
            yield Generation("fine")

    backend = Stalled()
    state = run(sgl.gen("a", timeout=1000, retries=1), backend=backend)
    assert within(20, lambda: state["a"]) == "fine"
    assert len(backend.seeds) == 2


def test_an_answer_and_its_check_share_the_time_of_an_attempt(monkeypatch):
    now, asked = [100.0], []

    class Slow(Failing):
        async def agenerate(self, prompt, params, constraint, *, stream):
            now[0] += 3000
            yield Generation("fine")

    def check(value):
        asked.append(value)
        return True

    for module in (retries, generation):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    assert run(sgl.gen("a", check=check, timeout=5000), backend=Slow())["a"] == "fine"
    with pytest.raises(
        sgl.RequestTimeoutError, match="the check did not end within the node's timeout of 2000 s"
    ):
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
        return run(
            "x",
            sgl.gen("a", check=check),
            backend=sgl.ScriptedBackend(default=f"by {i}", latency=0.001),
        )

    verdicts = []
    for state in [start(i) for i in range(10)]:
        state.sync()
    assert sorted(verdicts) == [f"by {i}" for i in range(10)]


def test_checks_that_wait_for_one_another_do_not_stop_each_other():
    meeting = threading.Barrier(40)
    program = sgl.function(
        lambda s, i: s.__iadd__(sgl.gen("a", check=lambda value: meeting.wait() >= 0))
    )
    states = within(
        10,
        lambda: program.run_batch(
            [(i,) for i in range(40)], backend=sgl.ScriptedBackend(default="x")
        ),
    )
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
