"""A turn as one text of a grammar, where its generations have no JSON schemas; and `explain` of
turns, by statements.
"""

import pytest
from openai_answers import called, said

import sglang_lite as sgl
from sglang_lite.lang.backend.remote.turn_plan import turn_text_constraint
from sglang_lite.protocol import Choices, Lark, Regex

WORD = sgl.grammar.Lark("start: /[a-z]+/")


@sgl.function
def poem(s):
    s += sgl.user("A poem.")
    s += sgl.assistant(
        "Title: " + sgl.gen("title", constraint=WORD) + "\nYear: " + sgl.gen("year", regex="[0-9]{4}")
        + "\nMood: " + sgl.select("mood", ["glad", "sad"]) + "."
    )  # fmt: skip


def test_one_call_brings_the_text_of_a_turn_in_a_grammar(api, openai):
    api.answers = [called("Title: spring\nYear: 1920\nMood: sad")]
    state = poem.run(backend=openai("gpt-5"))
    assert (state["title"], state["year"], state["mood"]) == ("spring", "1920", "sad")
    assert state.messages()[-1]["content"] == "Title: spring\nYear: 1920\nMood: sad."
    (request,) = api.requests
    assert request.body["tools"][0]["format"]["syntax"] == "lark"
    assert request.body["input"] == [{"role": "user", "content": "A poem."}]
    metas = [state.get_meta_info(name) or {} for name in ("title", "year", "mood")]
    assert [meta["turn"]["by"] for meta in metas] == ["text", "found", "found"]
    assert [meta["calls"] for meta in metas] == [1, 0, 0]
    nodes = openai("gpt-5").explain(poem).nodes
    assert [(node.strategy, node.calls) for node in nodes] == [
        ("turn", (1, 1)),
        ("turn", (0, 0)),
        ("turn", (0, 0)),
    ]


def test_a_recorded_run_is_planned_the_same_in_its_replay(api, openai, tmp_path):
    api.answers = [called("Title: spring\nYear: 1920\nMood: sad")]
    with sgl.record(tmp_path / "run.jsonl", openai("gpt-5")) as recorded:
        text = poem.run(backend=recorded).text()
    assert poem.run(backend=sgl.Replay(tmp_path / "run.jsonl")).text() == text


def test_so_is_a_turn_that_a_server_continues_under_a_constraint(api, openai, tmp_path):
    @sgl.function
    def begun(s):
        s += sgl.user("How many?")
        s += sgl.assistant("There are " + sgl.gen("n", json_schema='{"type": "integer"}'))

    api.answers = [said("3")]
    with sgl.record(tmp_path / "run.jsonl", openai("local", profile="sglang")) as recorded:
        text = begun.run(backend=recorded).text()
    assert api.last["continue_final_message"] is True
    assert begun.run(backend=sgl.Replay(tmp_path / "run.jsonl")).text() == text


def test_a_text_that_breaks_the_turn_is_an_error(api, openai):
    api.answers = [called("Title: spring\nMood: sad")]
    with pytest.raises(sgl.ValueValidationError):
        poem.run(backend=openai("gpt-5"))["title"]


def test_a_value_that_is_refused_is_asked_for_again_with_what_is_behind_it(api, openai):
    @sgl.function
    def program(s):
        s += sgl.user("Who?")
        s += sgl.assistant(
            "Year: " + sgl.gen("year", type=int, check=lambda year: year > 1900, retries=1)
            + ", kind: " + sgl.gen("kind", choices=["cook", "poet"])
        )  # fmt: skip

    api.answers = [called("Year: 1810, kind: cook"), called("Year: 1910, kind: poet")]
    state = program.run(backend=openai("gpt-5"))
    assert (state["year"], state["kind"]) == (1910, "poet")
    assert len(api.requests) == 2


def test_a_model_without_grammars_refuses_the_turn_as_before(openai):
    with pytest.raises(sgl.CapabilityError):
        poem.run(backend=openai("gpt-4o"))
    assert all(
        node.mode == "refused"
        for node in openai("gpt-4o").explain(poem).nodes
        if node.kind == "gen"
    )


def test_generations_have_to_be_told_apart_by_something_between_them():
    a, b = Regex("[a-z]+"), Lark('start: "b"')
    assert turn_text_constraint(["x", a, "; ", b]) is not None
    assert turn_text_constraint([a, b]) is None
    assert turn_text_constraint([a, " ", b]) is None
    assert turn_text_constraint(["x", None]) is None
    assert turn_text_constraint([Choices(("x", "y")), "."]) is not None


# --------------------------------------------------------------------------- explain, by statements


def test_explain_plans_a_turn_by_its_statements_as_a_run_does(openai):
    @sgl.function
    def together(s):
        s += sgl.user("x")
        s += sgl.assistant("A: " + sgl.gen("a", type=int) + " B: " + sgl.gen("b", type=int))

    @sgl.function
    def apart(s):
        s += sgl.user("x")
        s += sgl.assistant_begin()
        s += sgl.gen("a", type=int)
        s += " B: " + sgl.gen("b", type=int)
        s += sgl.assistant_end()

    backend = openai("gpt-5")
    assert [(node.strategy, node.calls) for node in backend.explain(together).nodes] == [
        ("turn", (1, 1)),
        ("turn", (0, 0)),
    ]
    first, second = backend.explain(apart).nodes
    assert (first.strategy, second.strategy) == ("json_schema", "turn")


def test_explain_counts_the_attempts_that_retries_allow(openai):
    @sgl.function
    def tried(s):
        s += sgl.user("x")
        s += sgl.assistant(sgl.gen("a", regex="[ab]+", retries=2, check=bool))
        s += sgl.user("y")
        s += sgl.assistant(sgl.gen("b"))

    backend = openai("gpt-4o", policy="emulate")
    assert [node.calls for node in backend.explain(tried).nodes] == [(1, 9), (1, 1)]
    assert [node.calls for node in backend.explain(tried, retries=1).nodes] == [(1, 9), (1, 2)]
