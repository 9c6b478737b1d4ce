"""OpenAI's SDK on our own server: it is asked what it is, and its own fields keep every constraint."""

import pytest

import sglang_lite as sgl


@pytest.fixture(scope="module")
def backend(url, engine):
    made = sgl.OpenAI(engine.config.model, base_url=f"{url}/v1", api_key="key", max_retries=0)
    yield made
    made.shutdown()


def test_the_server_says_that_it_is_ours(backend):
    assert backend.profile.provider == "sglang_lite"


@pytest.mark.parametrize(
    ("options", "strategy"),
    [
        ({"regex": "[ab]{3}"}, "regex"),
        ({"type": int}, "regex"),
        ({"constraint": sgl.grammar.Choices(("dog", "cat"))}, "regex"),
        ({"constraint": sgl.grammar.Ebnf('root ::= "a" | "b"')}, "ebnf"),
        ({"constraint": sgl.grammar.Lark('start: "a" | "b"')}, "ebnf"),
        ({"type": bool}, "regex"),
        ({"json_schema": '{"enum": ["x", 2]}'}, "json_schema"),
    ],
)
def test_its_own_fields_keep_a_constraint(backend, options, strategy):
    @sgl.function
    def program(s):
        s += sgl.user("Hello.")
        s += sgl.assistant(sgl.gen("a", max_tokens=40, temperature=0, **options))

    (node,) = backend.explain(program).nodes
    state = program.run(backend=backend)
    assert state["a"] is not None
    assert state.get_meta_info("a")["strategy"] == node.strategy == strategy


def test_a_selection_has_probabilities(backend):
    @sgl.function
    def program(s):
        s += sgl.user("Which?")
        s += sgl.assistant(sgl.select("pet", ["dog", "cat"], temperature=1.0))

    state = program.run(backend=backend, seed=1)
    assert sum(state.selection("pet").probs.values()) == pytest.approx(1)
    assert state["pet"] in ("dog", "cat")
    assert state.get_meta_info("pet")["strategy"] == "decisions"
