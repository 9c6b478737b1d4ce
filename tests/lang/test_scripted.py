"""The scripted backend: rules, cuts, failures."""

import re

import pytest

import sglang_lite as sgl


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
    with pytest.raises(sgl.ParameterError, match="neither a mapping nor a callable"):
        sgl.ScriptedBackend("text")
    assert sgl.ScriptedBackend().get_model_name() == "scripted"
