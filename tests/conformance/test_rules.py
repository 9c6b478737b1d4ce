"""Rules of joins, rollbacks and failures: the same on every backend, however a program is handed
over, and whatever has been played when a rollback comes.
"""

import threading
from functools import partial
from typing import Any

import pytest

import sglang_lite as sgl
from sglang_lite.lang.backend.local import LocalBackend
from sglang_lite.lang.choices import ChoicesDecision, ChoicesSamplingMethod
from tests.counts import some
from tests.lang.fakes import Answers, within
from tests.server.conftest import serving

PATIENCE = 60  # seconds for a run
SETTINGS: dict[str, Any] = {"seed": 1, "temperature": 1.0, "max_new_tokens": 4}
ENGINE: dict[str, Any] = dict(
    dtype="float32", max_running=8, max_total_tokens=4096, threads=1, deterministic=True
)


def nothing(state):
    """Waits for nothing."""


def played(state):
    """Waits until everything is played that was added to a state."""
    state.error()


def error_of(read, *args):
    """Type of the error that a read raises."""
    with pytest.raises(sgl.SglError) as caught:
        read(*args)
    return type(caught.value).__name__


# Bodies, one a rule. `wait` waits until all that was added to a state is played, or does nothing.


def text_of_a_join(s, wait):
    s += "p:"
    fork = s.fork(2)
    fork[0] += "a"
    fork[1] += "z"
    with fork[0].checkpoint() as place:
        fork[0] += "b"
        fork.join("concate_and_append")
        wait(s)
        place.rollback()
    fork[0] += "c"
    s += sgl.gen("x")
    return s["x"]


def generation_of_a_join(s, wait):
    s += "p:"
    fork = s.fork(2)
    fork[1] += "z"
    with fork[0].checkpoint() as place:
        fork[0] += "b" + sgl.gen("g")
        fork.join("concate_and_append")
        wait(s)
        place.rollback()
    fork[0] += "c" + sgl.gen("h")
    s += sgl.gen("x")
    return [s["x"], fork[0]["h"]]


def values_of_a_join(s, wait):
    s += "p:"
    fork = s.fork(2)
    with fork[0].checkpoint() as place:
        fork[0] += "b" + sgl.gen("g")
        fork.join()
        wait(fork[0])
        place.rollback()
    fork[0] += "c"
    s += sgl.gen("x")
    return [s["g"], fork[0].text().removeprefix("p:"), s["x"]]


def values_of_a_join_inside_another_one(s, wait):
    s += "p:"
    outer = s.fork(1)
    with outer[0].checkpoint() as place:
        inner = outer[0].fork(2)
        inner += "b" + sgl.gen("g")
        inner.join()
        outer.join()
        wait(outer[0])
        place.rollback()
    outer[0] += "d" + sgl.gen("h")
    return [s["g"], outer[0]["h"]]


def text_of_a_join_inside_another_one(s, wait):
    s += "p:"
    outer = s.fork(1)
    with outer[0].checkpoint() as place:
        inner = outer[0].fork(1)
        inner += "b" + sgl.gen("g")
        inner.join("concate_and_append")
        outer.join("concate_and_append")
        wait(outer[0])
        place.rollback()
    outer[0] += "d" + sgl.gen("h")
    s += sgl.gen("x")
    return [s["x"], outer[0]["h"]]


def empty_branch_of_a_join_inside_another_one(s, wait):
    s += "p:" + sgl.gen("w")
    outer = s.fork(1)
    with outer[0].checkpoint() as place:
        inner = outer[0].fork(2)
        inner[0] += "b"
        inner.join("concate_and_append")
        outer.join("concate_and_append")
        wait(outer[0])
        place.rollback()
    outer[0] += "d" + sgl.gen("h")
    s += sgl.gen("x")
    return [s["x"], outer[0]["h"]]


def join_after_the_rollback_of_a_join(s, wait):
    s += "p:"
    fork = s.fork(1)
    fork += "b" + sgl.gen("g")
    with s.checkpoint() as place:
        fork.join("concate_and_append")
        wait(s)
        place.rollback()
    fork.join("concate_and_append")
    s += sgl.gen("x")
    return s["x"]


def branches_of_a_fork_behind_the_mark(s, wait):
    s += "p:" + sgl.gen("before")
    with s.checkpoint() as place:
        s += sgl.gen("x")
        fork = s.fork(2)
        fork += " and" + sgl.gen("y")
        deeper = fork[1].fork(1)
        wait(s)
        place.rollback()

    def uses(branch):
        yield partial(branch.__iadd__, "text")
        yield partial(branch.__iadd__, sgl.gen("z"))
        yield branch.user().__enter__
        for name in ("before", "y", "z"):
            yield partial(branch.__getitem__, name)
        yield from (branch.text, branch.messages, branch.sync, branch.fork, branch.copy().__enter__)
        yield from (
            branch.checkpoint().__enter__,
            partial(branch.set_var, "z", 1),
            lambda: list(branch.text_iter()),
        )

    found = {error_of(use) for branch in (fork[0], fork[1], deeper[0]) for use in uses(branch)}
    found |= {error_of(fork.join), error_of(fork.__iadd__, "text"), type(fork[0].error()).__name__}
    s += sgl.gen("x")
    return [*found, s["x"]]


def rollback_in_a_branch_that_a_rollback_has_ended(s, wait):
    s += "p:"
    with s.checkpoint() as place:
        fork = s.fork(1)
        inner = fork[0].checkpoint()
        with inner as at:
            wait(s)
            place.rollback()
            found = error_of(at.rollback)
    s += sgl.gen("x")
    return [found, s["x"]]


def branches_of_a_fork_behind_a_failed_node(s, wait):
    s += "p:" + sgl.gen("bad", check=lambda text: False)
    wait(s)
    fork = s.fork(2)
    fork += sgl.gen("y")
    return error_of(fork[1].__getitem__, "y")


def rollback_behind_a_failed_node(s, wait):
    s += "p:" + sgl.gen("bad", check=lambda text: False)
    wait(s)
    with s.checkpoint() as place:
        s += "t"
        place.rollback()
    s += sgl.gen("x")
    return error_of(s.__getitem__, "x")


def claimed_node_that_fails(s, wait):
    s += "p:"
    fork = s.fork(1)
    with fork[0].checkpoint() as place:
        fork[0] += sgl.gen("bad", check=lambda text: False)
        fork.join("concate_and_append")
        wait(fork[0])
        place.rollback()
    fork[0] += "c" + sgl.gen("h")
    s += sgl.gen("x")
    return [error_of(s.__getitem__, "x"), fork[0]["h"]]


def text_of_a_held_node(s, wait):
    s += "p:" + sgl.gen("a", check=lambda text: True) + "t" + sgl.gen("x")
    wait(s)
    return s["x"]


# What each body returns if an answer shows its prompt.
RULES = {
    text_of_a_join: "<p:abz>",
    generation_of_a_join: ["<p:b<p:b>z>", "<p:c>"],
    values_of_a_join: [["<p:b>", None], "c", "<p:>"],
    values_of_a_join_inside_another_one: [[["<p:b>", "<p:b>"]], "<p:d>"],
    text_of_a_join_inside_another_one: ["<p:b<p:b>>", "<p:d>"],
    empty_branch_of_a_join_inside_another_one: ["<p:<p:>b>", "<p:<p:>d>"],
    join_after_the_rollback_of_a_join: "<p:b<p:b>>",
    branches_of_a_fork_behind_the_mark: ["RequestAbortedError", "<p:<p:>>"],
    rollback_in_a_branch_that_a_rollback_has_ended: ["RequestAbortedError", "<p:>"],
    branches_of_a_fork_behind_a_failed_node: "ValueValidationError",
    rollback_behind_a_failed_node: "ValueValidationError",
    claimed_node_that_fails: ["ValueValidationError", "<p:c>"],
    text_of_a_held_node: "<p:<p:>t>",
}


@pytest.fixture(scope="module")
def backends(folders):
    """Backends that play or take whole programs, by how they do it."""
    with (
        sgl.Engine(folders[0], **ENGINE, in_process=True) as here,
        # the rules hold for replicas, too
        sgl.Engine(folders[0], **ENGINE, dp_size=some(1, 2)) as own,
        serving(here) as url,
    ):
        remote = sgl.RuntimeEndpoint(url, retries=0)
        yield {
            "in this process": LocalBackend(here),
            "in a child": LocalBackend(own),
            "over HTTP": remote,
        }
        remote.shutdown()


def outcome(body, wait, backend, **settings):
    """Result, text and number of prompt tokens of the last generation."""

    def run():
        state = sgl.function(partial(body, wait=wait)).run(backend=backend, **SETTINGS, **settings)
        known = state.error() is None and "x" in state
        return state.ret_value, known and (state.text(), state.usage("x").prompt_tokens)

    return within(PATIENCE, run)


@pytest.mark.parametrize("wait", [nothing, played])
@pytest.mark.parametrize("body", RULES)
def test_a_rule_holds_on_a_backend_that_only_answers(body, wait):
    assert outcome(body, wait, Answers(lambda text: f"<{text}>"))[0] == RULES[body]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("how", ["in this process", "in a child", "over HTTP"])
@pytest.mark.parametrize("body", RULES)
def test_a_rule_holds_on_an_engine(backends, body, how):
    backend = backends[how]
    expected = outcome(body, nothing, backends["in this process"], push_down=False)
    for wait in (nothing, played):
        assert outcome(body, wait, backend) == expected
        assert outcome(body, wait, backend, retries=1) == expected
    assert outcome(body, played, backend, push_down=False) == expected


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("how", ["in this process", "in a child", "over HTTP"])
def test_a_parameter_out_of_range_fails_its_branch_alone(backends, how, early):
    def body(s):
        s += "p:" + sgl.gen("w")
        if not early:
            s.sync()
        fork = s.fork(2)
        fork[0] += sgl.gen("x", temperature=5000)
        fork[1] += sgl.gen("y")
        s += sgl.gen("z")
        return fork

    def run():
        state = sgl.function(body).run(backend=backends[how], **SETTINGS)
        return [state["z"], state.ret_value[1]["y"], error_of(state.ret_value[0].__getitem__, "x")]

    assert within(PATIENCE, run)[2] == "ParameterError"


class Stalling(ChoicesSamplingMethod):
    """Takes the first choice, when it is told to."""

    def __init__(self):
        self.asked, self.gate = threading.Event(), threading.Event()

    def __call__(
        self,
        *,
        choices,
        normalized_prompt_logprobs,
        input_token_logprobs,
        output_token_logprobs,
        **more,
    ):
        self.asked.set()
        self.gate.wait()
        return ChoicesDecision(choices[0], {})


@pytest.mark.parametrize("how", ["in this process", "in a child", "over HTTP"])
def test_nothing_of_a_selection_follows_the_rollback_that_removes_it(backends, how):
    def body(s, method):
        s += "p:"
        with s.checkpoint() as place:
            s += sgl.select("a", ["one", "two"], choices_method=method, multi=True)
            method.asked.wait()
            place.rollback()
            method.gate.set()
        s.sync()
        s += sgl.gen("x")

    def run(**settings):
        method = Stalling()
        state = sgl.function(body).run(method, backend=backends[how], **SETTINGS, **settings)
        return state.text(), state.usage("x").prompt_tokens

    assert within(PATIENCE, run) == within(PATIENCE, partial(run, push_down=False))


@pytest.mark.parametrize("how", ["in this process", "in a child", "over HTTP"])
def test_a_failure_that_a_rollback_took_back_stays_taken_back_after_another_one(backends, how):
    @sgl.function
    def body(s):
        s += "a"
        fork = s.fork(2)
        with fork[0].checkpoint() as place:
            fork[0] += sgl.gen(
                "x",
                json_schema={
                    "type": "array",
                    "items": {"const": 1},
                    "uniqueItems": True,
                    "minItems": 2,
                },
            )
            assert error_of(fork[0].__getitem__, "x") == "ConstraintError"
            place.rollback()
        fork[0] += sgl.gen("y")
        with fork[0].checkpoint() as place:
            fork.join()
            place.rollback()
        return len(s["y"])

    assert within(PATIENCE, partial(body.run, backend=backends[how], **SETTINGS)).ret_value == 2
