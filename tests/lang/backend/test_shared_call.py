"""Equal branches of a fork: one call with a sample for each, where nothing tells them apart."""

import pytest

import sglang_lite as sgl
from sglang_lite.lang.backend.capabilities import Capabilities, TurnRules
from sglang_lite.lang.backend.remote.planner import CallPlanner
from sglang_lite.testing import Fail


def forked(add, size=3):
    @sgl.function
    def program(s):
        s += sgl.user("A name.")
        forks = s.fork(size)
        add(forks)
        forks.join()

    return program


def one_statement(forks):
    forks += sgl.assistant(sgl.gen("name", max_tokens=5))


@pytest.fixture
def server():
    with sgl.server_for_tests([f"name{i}" for i in range(9)]) as running:
        yield running


@pytest.fixture
def backend(server):
    made = sgl.OpenAI("gpt-4o", max_retries=0, **server.openai)
    yield made
    made.shutdown()


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_has_a_sample_for_each_branch(server, backend, stream):
    state = forked(one_statement).run(backend=backend, stream=stream)
    assert sorted(state["name"]) == ["name0", "name1", "name2"]
    (request,) = server.requests
    assert request.body["n"] == 3
    nodes = [node for node in state.trace().nodes if node.kind == "gen"]
    metas = [result.meta for node in nodes for result in node.results]
    assert sorted(meta["calls"] for meta in metas) == [0, 0, 1]
    assert {meta["branches"] for meta in metas} == {3}
    assert state.usage().completion_tokens == 3
    assert state.usage().prompt_tokens == 2


def test_a_call_without_an_answer_is_an_error_of_the_program():
    class Silent(sgl.BaseBackend):
        capabilities = Capabilities(turns=TurnRules("continued", "continued"))

        def planner(self, run):
            return CallPlanner(self, run, lambda params, constraint, count: True)

        async def agenerate(self, prompt, params, constraint, *, stream):
            for event in ():
                yield event

    @sgl.function
    def program(s):
        forks = s.fork(3)
        forks += sgl.gen("name")
        forks.join()

    with pytest.raises(
        sgl.ProgramError, match=r"Silent ended without an answer\. .*must yield a Generation"
    ):
        program.run(backend=Silent())["name"]


def test_branches_that_wait_for_the_first_token_of_one_share_its_call(server, backend):
    @sgl.function
    def program(s):
        s += sgl.user("A name. " * 600)  # so long that the provider's cache is worth a wait
        forks = s.fork(4)
        one_statement(forks)
        forks.join()

    assert sorted(program.run(backend=backend)["name"]) == ["name0", "name1", "name2", "name3"]
    assert [request.body["n"] for request in server.requests] == [4]


def test_text_that_all_branches_are_added_does_not_tell_them_apart(server, backend):
    def add(forks):
        forks += sgl.assistant("Which?")
        forks += sgl.user("Any.")
        one_statement(forks)

    assert len(forked(add).run(backend=backend)["name"]) == 3
    assert [request.body["n"] for request in server.requests] == [3]


def by_index(forks):
    forks += lambda i: sgl.assistant(sgl.gen("name", max_tokens=5))


def one_by_one(forks):
    for fork in forks:
        fork += sgl.assistant(sgl.gen("name", max_tokens=5))


def one_first(forks):
    forks[1] += sgl.user("You alone.")
    one_statement(forks)


def seeded(forks):
    forks += sgl.assistant(sgl.gen("name", max_tokens=5, seed=1))


def sampled(forks):
    forks += sgl.assistant(sgl.gen("name", max_tokens=5, n=2))


@pytest.mark.parametrize("add", [by_index, one_by_one, one_first, seeded, sampled])
def test_branches_that_may_differ_have_calls_of_their_own(server, backend, add):
    assert len(forked(add).run(backend=backend)["name"]) == 3
    assert len(server.requests) == 3
    nodes = [node for node in backend.explain(forked(add)).nodes if node.kind == "gen"]
    assert [node.calls for node in nodes] == [(1, 1)] * 3


def test_what_comes_after_the_first_generation_is_asked_for_by_each(server, backend):
    def add(forks):
        one_statement(forks)
        forks += sgl.user("And?") + sgl.assistant(sgl.gen("more", max_tokens=5))

    state = forked(add).run(backend=backend)
    assert len(state["more"]) == 3
    assert [request.body.get("n") for request in server.requests] == [3, None, None, None]


@pytest.mark.parametrize("settings", [{"seed": 3}, {"max_total_tokens": 10_000}])
def test_a_run_with_a_seed_or_a_budget_asks_branch_by_branch(server, backend, settings):
    assert len(forked(one_statement).run(backend=backend, **settings)["name"]) == 3
    assert len(server.requests) == 3


def test_a_call_that_fails_leaves_each_other_branch_its_own(server, backend):
    server.answers = [Fail(500), "name1", "name2"]

    @sgl.function
    def program(s):
        s += sgl.user("A name.")
        forks = s.fork(3)
        one_statement(forks)
        names = []
        for fork in forks:
            try:
                names.append(fork["name"])
            except sgl.BackendError:
                names.append(None)
        s.set_var("names", names)

    state = program.run(backend=backend)
    assert sorted(state["names"], key=str) == [None, "name1", "name2"]
    assert [request.body.get("n") for request in server.requests] == [3, None, None]


def test_an_attempt_after_a_refusal_is_the_branchs_own(server, backend):
    def add(forks):
        forks += sgl.assistant(
            sgl.gen("name", max_tokens=5, retries=1, check=lambda name: name != "name1")
        )

    state = forked(add).run(backend=backend)
    assert sorted(state["name"]) == ["name0", "name2", "name3"]
    assert [request.body.get("n") for request in server.requests] == [3, None]


@pytest.mark.parametrize("model", ["gpt-4o", "claude-opus-5"])
def test_explain_counts_one_call(server, model):
    made = (
        sgl.OpenAI(model, **server.openai)
        if "gpt" in model
        else sgl.Anthropic(model, **server.anthropic)
    )
    nodes = made.explain(forked(one_statement)).nodes
    shared = [(1, 1), (0, 1), (0, 1)] if "gpt" in model else [(1, 1)] * 3
    assert [node.calls for node in nodes] == shared
    assert len(forked(one_statement).run(backend=made)["name"]) == 3
    assert len(server.requests) == (1 if "gpt" in model else 3)
    made.shutdown()
