"""The scripted backend: rules, cuts, failures."""

import re

import pytest

import sglang_lite as sgl
from sglang_lite.protocol import Regex


def ask(backend, prompt, **options):
    @sgl.function
    def program(s):
        s += prompt + sgl.gen("a", **options)

    return program.run(backend=backend)["a"]


def test_the_rule_nearest_to_the_end_answers():
    backend = sgl.ScriptedBackend({"France": "Paris", re.compile("J[a-z]+n"): "Tokyo"}, default="?")
    assert ask(backend, "France, then Japan") == "Tokyo"
    assert ask(backend, "Japan, then France") == "Paris"
    assert ask(backend, "Spain") == "?"


def test_lists_are_gone_through_and_callables_called():
    backend = sgl.ScriptedBackend({"x": ["1", "2"], "y": lambda call: call.prompt.text * 2})
    assert [ask(backend, "x") for _ in range(3)] == ["1", "2", "2"]
    assert ask(backend, "y") == "yy"


def test_failures_can_be_scripted_and_recovered_from():
    backend = sgl.ScriptedBackend({"x": [TimeoutError("slow"), "fine"]})
    with pytest.raises(sgl.ProgramError, match="slow"):
        ask(backend, "x")
    assert ask(backend, "x") == "fine"


def test_answers_are_cut_as_a_model_would_be():
    backend = sgl.ScriptedBackend({"x": "one two\nthree"})
    assert ask(backend, "x", stop="\n") == "one two"
    assert ask(backend, "x", stop="\n", include_stop=True) == "one two\n"
    assert ask(backend, "x", max_tokens=1) == "one"


def test_an_answer_that_could_not_have_been_generated_is_an_error():
    backend = sgl.ScriptedBackend({"x": "abc"})
    for options in (dict(regex="[0-9]+"), dict(json_schema="{}"), dict(type=bool)):
        with pytest.raises(sgl.BackendError, match="does not satisfy"):
            ask(backend, "x", **options)


def test_constrained_nodes_without_a_rule_are_sampled():
    backend = sgl.ScriptedBackend(seed=1)
    assert re.fullmatch("[a-f]{4}", ask(backend, "x", regex="[a-f]{4}"))


def test_bad_answers_are_refused():
    with pytest.raises(sgl.ParameterError, match="not a mapping or a callable"):
        sgl.ScriptedBackend("text")  # type: ignore[arg-type]  # wrong on purpose
    assert sgl.ScriptedBackend().get_model_name() == "scripted"


def test_a_callable_sees_the_call_and_every_call_is_kept():
    seen = []

    def answer(call):
        seen.append(call)
        return "abc"

    backend = sgl.ScriptedBackend(answer)
    assert ask(backend, "Q: ", regex="[a-z]+", temperature=0.5, max_tokens=9) == "abc"
    assert backend.calls == seen
    (call,) = seen
    assert (call.prompt.text, call.params.temperature, call.params.max_tokens) == ("Q: ", 0.5, 9)
    assert call.constraint == Regex("[a-z]+")
    assert call.choices is None


def test_a_rule_may_be_a_pattern_over_the_whole_prompt():
    backend = sgl.ScriptedBackend({re.compile(r"\d+ \+ \d+"): "sum", re.compile("^Q"): "question"})
    assert ask(backend, "Q: 1 + 2") == "sum"
    assert ask(backend, "Q: why") == "question"


def test_rules_pick_too_and_other_picks_are_random_but_repeatable():
    def pick(seed, prompt="Which?"):
        backend = sgl.ScriptedBackend({"Sky": "blue"}, seed=seed)
        program = sgl.function(
            lambda s: s.__iadd__(prompt + sgl.select("c", ["red", "green", "blue"]))
        )
        return [program.run(backend=backend)["c"] for _ in range(8)]

    assert pick(1, "Sky?") == ["blue"] * 8
    assert pick(1) == pick(1)
    assert pick(1) != pick(2)


def test_samples_go_through_a_list_each():
    backend = sgl.ScriptedBackend({"x": ["1", "2", "3"]})
    assert ask(backend, "x", n=2) == ["1", "2"]
    assert ask(backend, "x", n=2) == ["3", "3"]


def test_lists_of_several_rules_are_gone_through_by_themselves():
    backend = sgl.ScriptedBackend({"x": ["x1", "x2"], "y": ["y1", "y2"]})
    assert [ask(backend, prompt) for prompt in "xyxy"] == ["x1", "y1", "x2", "y2"]


@pytest.mark.parametrize("failure", [ConnectionError("gone"), sgl.OverloadedError("full")])
def test_a_failure_may_be_any_exception(failure):
    backend = sgl.ScriptedBackend({"x": failure})
    with pytest.raises(sgl.SglError) as caught:
        ask(backend, "x")
    assert type(caught.value) is (
        sgl.OverloadedError if isinstance(failure, sgl.SglError) else sgl.ProgramError
    )
    with pytest.raises(sgl.SglError):
        ask(sgl.ScriptedBackend(lambda call: str(1 / 0)), "x")


def test_failures_of_a_selection():
    backend = sgl.ScriptedBackend({"x": ConnectionError("gone")})
    with pytest.raises(sgl.ProgramError, match="ConnectionError: gone"):
        sgl.function(lambda s: s.__iadd__("x" + sgl.select("a", ["b"]))).run(backend=backend)["a"]


CONSTRAINTS = [
    dict(regex=r"(ab|cd){2}-\d{3}"),
    dict(dtype=int),
    dict(dtype=float),
    dict(dtype=bool),
    dict(dtype=str),
    dict(type=int),
    dict(type=float),
    dict(type=bool),
    dict(type=list[int]),
    dict(json_schema={"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}),
]


@pytest.mark.parametrize("options", CONSTRAINTS, ids=str)
def test_random_answers_satisfy_the_constraint_and_repeat_with_the_seed(options):
    def answers(random, **settings):
        backend = sgl.ScriptedBackend(seed=random)
        program = sgl.function(lambda s: s.__iadd__(sgl.gen("a", **options)))
        return [program.run(backend=backend, **settings)["a"] for _ in range(10)]

    first = answers(3)
    assert first == answers(3)
    assert len(set(map(str, first))) > 1
    if "regex" in options:
        assert all(re.fullmatch(options["regex"], text) for text in first)
    if isinstance(options.get("type"), type):
        assert {type(value) for value in first} == {options["type"]}
    assert len(set(map(str, answers(3, seed=5)))) == 1  # the call's own seed decides


def test_how_long_an_answer_takes_may_depend_on_the_call():
    timed = []

    def latency(call):
        timed.append(call.choices or call.prompt.text)
        return 0.001

    backend = sgl.ScriptedBackend(default="x", latency=latency)
    program = sgl.function(lambda s: s.__iadd__("q" + sgl.gen("a") + sgl.select("b", ["c", "d"])))
    state = program.run(backend=backend)
    assert state["a"] == "x"
    assert state["b"] in ("c", "d")
    assert timed == ["q", ("c", "d")]


def test_a_stream_comes_word_by_word():
    state = sgl.function(lambda s: s.__iadd__(sgl.gen("a"))).run(
        stream=True, backend=sgl.ScriptedBackend(default="one  two\nthree ")
    )
    assert list(state.text_iter("a")) == ["one", "  two", "\nthree", " "]


def test_usage_counts_words():
    state = sgl.function(lambda s: s.__iadd__("a b c" + sgl.gen("a"))).run(
        backend=sgl.ScriptedBackend(default="d e")
    )
    assert (state.usage("a").prompt_tokens, state.usage("a").completion_tokens) == (3, 2)


def test_it_sees_images_and_has_a_template():
    backend = sgl.ScriptedBackend()
    assert backend.capabilities.images
    assert backend.get_chat_template().name == "chatml"


@pytest.mark.parametrize("answers", ["text", ["a list"], 3])
def test_answers_of_another_kind_are_refused(answers):
    with pytest.raises(sgl.ParameterError, match="not a mapping or a callable"):
        sgl.ScriptedBackend(answers)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"top_p": 0},
            "^top_p: 0.0 is outside an engine's range: above 0, at most 1. 0 leaves no token",
        ),
        ({"stop_regex": "("}, r"^stop_regex: '\(' is no regular expression"),
        ({"n": 1000}, "^n: 1000 is outside an engine's range"),
    ],
)
def test_what_no_engine_takes_is_refused_as_engines_do(options, said):
    with pytest.raises(sgl.ParameterError, match=said) as caught:
        ask(sgl.ScriptedBackend(default="x"), "", **options)
    assert caught.value.where is not None


def test_patterns_end_an_answer():
    backend = sgl.ScriptedBackend(default="one 2 three")
    assert ask(backend, "", stop_regex=r"\d") == "one "
    assert ask(backend, "", stop_regex=r"\d", include_stop=True) == "one 2"


def test_prompts_share_what_they_have_in_common():
    backend = sgl.ScriptedBackend(default="x")

    @sgl.function
    def program(s):
        for i in range(3):
            s += f"{i} " + sgl.gen(f"a{i}")
        with s.checkpoint() as place:
            s += "wrong " + sgl.gen("b")
            s["b"]
            place.rollback()
        s += "right " + sgl.gen("c")

    program.run(backend=backend)["c"]
    spans = [call.prompt.spans for call in backend.calls]
    assert all(
        a is b for i, early in enumerate(spans[1:4], 1) for a, b in zip(early, spans[min(i + 1, 3)])
    )
    assert [call.prompt.text for call in backend.calls][-2:] == [
        "0 x1 x2 xwrong ",
        "0 x1 x2 xright ",
    ]


def test_a_cut_answer_has_no_stop_string():
    backend = sgl.ScriptedBackend({"x": "one two three. four"})
    assert ask(backend, "x", stop=".", include_stop=True) == "one two three."
    assert ask(backend, "x", stop=".", include_stop=True, max_tokens=2) == "one two"


def test_the_default_answers_a_constrained_node_that_it_fits():
    backend = sgl.ScriptedBackend(default="42")
    assert ask(backend, "x", regex="[0-9]+") == "42"
    assert ask(backend, "x", type=int) == 42
    assert ask(backend, "x", choices=["41", "42"]) == "42"
    assert re.fullmatch("[a-z]+", ask(backend, "x", regex="[a-z]+"))
    assert ask(sgl.ScriptedBackend(default=""), "x", regex="a*") == ""
    assert {ask(sgl.ScriptedBackend(seed=i), "x", regex="a*") for i in range(9)} != {""}


def test_the_default_is_selected_if_it_is_a_choice():
    @sgl.function
    def choose(s):
        s += "x" + sgl.select("a", ["yes", "no"])

    assert {
        choose.run(backend=sgl.ScriptedBackend(default="no", seed=i))["a"] for i in range(9)
    } == {"no"}
