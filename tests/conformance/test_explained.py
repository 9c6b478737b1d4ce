"""Conformance programs on remote backends: no node is served otherwise than `explain` said."""

from pathlib import Path

import pytest

import sglang_lite as sgl
from sglang_lite.protocol import SamplingParams
from sglang_lite.protocol.sampling import PARAMETERS
from tests.conformance.case import cases
from tests.conformance.matrix import rows

# whose threads' errors nobody catches
CASES = {name: case for name, case in cases().items() if name != "threads"}
BACKENDS = {
    "gpt-4o": lambda server: sgl.OpenAI("gpt-4o", policy="warn", max_retries=0, **server.openai),
    "claude-opus-5": lambda server: sgl.Anthropic(
        "claude-opus-5", policy="emulate", max_retries=0, **server.anthropic
    ),
    "davinci-002": lambda server: sgl.OpenAI("davinci-002", max_retries=0, **server.openai),
    "vllm": lambda server: sgl.OpenAI("local", profile="vllm", max_retries=0, **server.openai),
}
# Bodies that decide by what only a run knows, in a way that a trace can't follow.
UNTRACED = {
    "coroutine_fork", "error_in_branch", "fork_best", "gen_logprobs", "gen_seeds", "gen_usage", "read_messages", "read_text",
    "scope_select", "select_probabilities", "sglang_react", "tools_call", "tools_in_branches",
}  # fmt: skip
# Bodies and checks that run other programs by themselves: those are asked about by themselves.
RUNNING_OTHERS = {"check_runs_a_program", "nested_run", "sglang_judge"}


@pytest.fixture(scope="module")
def server():
    with sgl.server_for_tests(None, compatible=True) as running:
        yield running


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request, server):
    made = BACKENDS[request.param](server)
    yield made
    made.shutdown()


def lines(location):
    return location.file, location.line


def explained(case, backend):
    """Strategies, and the calls at best and worst, by lines; and the lines of what is refused."""
    known = {parameter.name: parameter for parameter in PARAMETERS} | {
        each.sglang: each for each in PARAMETERS
    }
    given = {
        known[key]: value
        for key, value in case.settings.items()
        if key in known and value is not False
    }
    params = {parameter.name: parameter.read(value) for parameter, value in given.items()}
    retries = case.settings.get("retries", 0)
    found = backend.explain(
        case.program, params=SamplingParams(**params), retries=retries, **case.arguments
    )
    strategies: dict = {}
    for node in found.nodes:
        strategies.setdefault(lines(node.where), []).append(
            ({node.strategy, node.otherwise}, node.calls)
        )
    return strategies, {lines(node.where) for node in found.refused}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", CASES)
def test_no_node_is_served_otherwise_than_explained(backend, name):
    case = CASES[name]
    if name in UNTRACED:
        with pytest.raises(sgl.TraceError):
            explained(case, backend)
        return
    strategies, refused = explained(case, backend)
    state = None
    error = None
    try:
        state = case.program.run(backend=backend, **case.arguments, **case.settings)
        state.sync()
    except Exception as raised:
        error = raised
    if isinstance(error, sgl.CapabilityError) and name not in RUNNING_OTHERS:
        assert lines(error.where) in refused, error
    played = (
        []
        if state is None
        else [node for node in state.trace().nodes if node.kind in ("gen", "select")]
    )
    for node in played:
        for meta in (result.meta for result in node.results):
            if "strategy" in meta:  # another backend's has none
                served = (
                    "turn" if meta.get("turn", {}).get("by", "own") != "own" else meta["strategy"]
                )
                said = strategies[node.where[:2]]
                assert any(served in each and meta["calls"] <= most for each, (_, most) in said), (
                    meta,
                    said,
                )


def test_the_matrix_of_the_docs_is_what_explain_says():
    page = (Path(__file__).parents[2] / "docs" / "backends.md").read_text()
    assert "\n".join(rows()) in page
