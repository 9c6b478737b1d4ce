"""Settings that steer a generation: time limits, retries, other backends, seeds."""

from contextvars import ContextVar, copy_context
from types import SimpleNamespace
from typing import Any

import pytest

import sglang_lite as sgl
from sglang_lite.lang.execution import generation, retries
from sglang_lite.protocol import UNSET, Generation
from tests.lang.fakes import Answers, Drawing, Failing, Gated, Scored, line_here, run, within


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    """Between attempts."""
    monkeypatch.setattr(retries, "_FIRST_PAUSE", 0)


# -------------------------------------------------------------------------------------- time limits


def cancelled_by_a_timeout(run):
    """A backend's call was cancelled, with the first of some timeouts that leaves the time to make
    one.
    """
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
        with pytest.raises(
            sgl.RequestTimeoutError, match=rf"the run took longer than its timeout of {timeout:g} s"
        ):
            within(2 + timeout, lambda: state["a"])

    assert cancelled_by_a_timeout(program)


def test_a_node_that_takes_too_long_fails_with_its_line_and_its_request():
    def one(timeout, backend):
        @sgl.function
        def program(s):
            s += "x"
            s += sgl.gen("a", timeout=timeout)  # here

        state = program.run(backend=backend)
        with pytest.raises(
            sgl.RequestTimeoutError, match=rf"the node's timeout of {timeout:g} s"
        ) as caught:
            within(2 + timeout, lambda: state["a"])
        assert caught.value.where.line == line_here(program)

    assert cancelled_by_a_timeout(one)


def test_what_was_ready_in_time_can_still_be_read():
    state = run(
        "x",
        sgl.gen("a", backend=Answers(lambda text: "1")),
        sgl.gen("b", timeout=0.02),
        backend=Gated(),
    )
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

    for module in (retries, generation):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with pytest.raises(
        sgl.RequestTimeoutError, match="the run took longer than its timeout of 5000 s"
    ):
        program.run(backend=sgl.ScriptedBackend(default="x"), timeout=5000)
    assert reached == ["x"]


def test_a_timeout_of_the_backends_own_is_not_taken_for_the_nodes():
    state = run(sgl.gen("a", timeout=60), backend=Failing(TimeoutError("socket")))
    with pytest.raises(sgl.ProgramError, match="TimeoutError: socket"):
        state["a"]


def test_a_time_limit_holds_across_attempts():
    state = run(
        sgl.gen("a", retries=10**9),
        backend=sgl.ScriptedBackend(lambda call: str(1 / 0)),
        timeout=0.05,
    )
    with pytest.raises(sgl.RequestTimeoutError, match="the run took longer"):
        within(2, lambda: state["a"])


@pytest.mark.parametrize("timeout", [0, -1, "1"])
def test_a_time_limit_is_a_number_above_zero(timeout):
    with pytest.raises(sgl.ParameterError, match="timeout"):
        run(sgl.gen("a"), backend=sgl.ScriptedBackend(), timeout=timeout)
    with pytest.raises(sgl.ParameterError, match="timeout"):
        sgl.gen("a", timeout=timeout)


# ------------------------------------------------------------------------------------------ retries


@pytest.mark.parametrize(
    "options", [(dict(retries=2), {}), ({}, dict(retries=2)), (dict(retries=2), dict(retries=0))]
)
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
    assert (
        run("x", sgl.select("a", ["a", "b"]), backend=Failing(OSError("down")), retries=1)["a"]
        == "a"
    )


def test_several_selections_do_not_write_what_is_already_there_again():
    class Shaky(Scored):
        async def aselect(self, prompt, choices, *, unconditional):
            if len(self.asked) == 1 and not shaken:
                shaken.append(1)
                raise OSError("down")
            return await super().aselect(prompt, choices, unconditional=unconditional)

    shaken = []
    likely = {
        text: [(i, -float(i), None)] for i, text in enumerate(["a", ", b", "b", "\n", ", c", "c"])
    }
    state = run(
        "x: ", sgl.select("a", ["a", "b", "c"], multi=True), backend=Shaky(likely), retries=1
    )
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
    state = run(
        "x ", sgl.gen("a", check=lambda v: v[0] == "y", retries=1), backend=backend, stream=True
    )
    assert "".join(state.text_iter("a")) == "yes yes"
    assert "".join(state.text_iter()) == "x yes yes"


@pytest.mark.parametrize(
    "check", [lambda v: v == "yes", lambda v: {"yes": True}[v]], ids=["refuses", "raises"]
)
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
    assert any(
        "at temperature 0 the answer stays the same: set a temperature" in text for text in said
    )
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


# ----------------------------------------------------------------------------------- other backends


def test_a_node_may_be_answered_by_another_backend_that_sees_the_whole_text():
    judge = sgl.ScriptedBackend(lambda call: f"({call.prompt.text})")
    state = run(
        "draft: ",
        sgl.gen("a"),
        " ",
        sgl.gen("b", backend=judge),
        backend=sgl.ScriptedBackend(default="x"),
    )
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


# -------------------------------------------------------------------------------------------- seeds


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
        states = drawing.run_batch(
            [{"i": i} for i in range(64)], backend=Drawing(shuffle), seed=7, num_threads=16
        )
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
    assert (
        program.run(True, backend=backend, seed=1)["a"]
        == program.run(False, backend=backend, seed=1)["a"]
    )


def test_the_engine_draws_the_same_alone_and_in_a_batch(engine):
    @sgl.function
    def story(s, animal):
        s += f"A {animal}:" + sgl.gen("a", max_tokens=3)

    items: list[dict[str, Any]] = [{"animal": animal} for animal in ("cat", "dog", "cow", "owl")]
    together = [state["a"] for state in story.run_batch(items, backend=engine, seed=3)]
    assert [story.run(**item, backend=engine, seed=3)["a"] for item in items[::2]] == together[::2]
