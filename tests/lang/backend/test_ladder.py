"""The ladder of constraints: by which strategy a node is served on which profile, and what is then
sent and checked.
"""

import json
import re
from typing import Annotated

import pytest
from api_server import Reply
from openai.types.chat import ChatCompletion
from openai_answers import USAGE, called, run, said
from pydantic import BaseModel

import sglang_lite as sgl
from sglang_lite.lang.backend.anthropic import Anthropic
from sglang_lite.lang.backend.capabilities import Capabilities, Demands
from sglang_lite.lang.backend.ladder.choose import choose_strategy, served_constraint_kinds
from sglang_lite.lang.backend.ladder.strategy import POLICIES, Refusal
from sglang_lite.lang.backend.profiles.prices import price as known_price
from sglang_lite.lang.backend.profiles.profile import profile_by_name, profiles, providers
from sglang_lite.protocol import (
    Choices,
    Constraint,
    Ebnf,
    JsonSchema,
    Lark,
    Number,
    OneOf,
    Regex,
    SamplingParams,
)


class City(BaseModel):
    name: str
    people: int


CITY = JsonSchema(json.dumps(City.model_json_schema()))
OPEN = JsonSchema('{"type": "object"}')
EBNF, LARK = Ebnf('root ::= "a" | "(" root ")"'), Lark('start: "a" | "(" start ")"')
PETS = Choices(("dog", "cat"))


def strategy(profile, constraint=None, policy="strict", kind="gen", **params):
    found = choose_strategy(
        profile_by_name(profile), policy, Demands(kind, SamplingParams(**params), constraint)
    )
    return found if isinstance(found, Refusal) else found.name


@pytest.mark.parametrize(
    ("profile", "constraint", "name"),
    [
        ("openai/gpt-4o", None, "free"),
        ("openai/gpt-4o", CITY, "json_schema"),
        ("openai/gpt-4o", PETS, "json_schema"),
        ("openai/gpt-4o", Number("integer"), "json_schema"),
        ("openai/gpt-4", CITY, "strict_tool"),
        ("openai/gpt-5", CITY, "json_schema"),
        ("openai/gpt-5", Regex("[ab]+"), "regex_tool"),
        ("openai/gpt-5", LARK, "lark_tool"),
        ("openai/gpt-5", EBNF, "lark_tool"),
        ("openai/gpt-5", OneOf((Regex("a+"), EBNF)), "lark_tool"),
        ("anthropic/claude-opus-5", CITY, "json_schema"),
        ("vllm", CITY, "structured_outputs"),
        ("vllm", Regex("a+"), "structured_outputs"),
        ("vllm", PETS, "structured_outputs"),
        ("vllm", EBNF, "structured_outputs"),
        ("vllm", LARK, "structured_outputs"),
        ("vllm", Number("float"), "structured_outputs"),
        ("sglang", CITY, "json_schema"),
        ("sglang", OPEN, "json_schema"),  # its engine's affair
        ("sglang", Regex("a+"), "regex"),
        ("sglang", PETS, "regex"),
        ("sglang", LARK, "ebnf"),
        ("llamacpp", CITY, "json_schema"),
        ("llamacpp", Regex("a+"), "grammar"),
        ("llamacpp", PETS, "grammar"),
        ("sglang_lite", LARK, "ebnf"),
        ("crusoe", PETS, "structured_outputs"),
    ],
)
def test_a_constraint_is_kept_by_the_first_strategy_that_the_model_is_known_to_have(
    profile, constraint, name
):
    assert strategy(profile, constraint) == name


@pytest.mark.parametrize(
    ("profile", "name"),
    [("openai/gpt-6-luna", "decisions"), ("sglang_lite", "decisions"), ("openai/gpt-4o", "token_logprobs"), ("vllm", "structured_outputs")],
)  # fmt: skip
def test_a_selection_prefers_probabilities(profile, name):
    assert strategy(profile, PETS, kind="select") == name


def test_more_choices_than_a_decision_takes_are_picked_from():
    many = Choices(tuple(map(str, range(300))))
    assert strategy("openai/gpt-6-luna", many, kind="select") == "enum"


@pytest.mark.parametrize(
    ("profile", "asked"),
    [
        ("compatible", dict(constraint=CITY)),  # unknown is refused
        ("openai", dict(constraint=CITY)),
        ("openai/gpt-4o", dict(constraint=OPEN)),
        ("openai/gpt-4o", dict(constraint=Regex("a+"))),
        ("anthropic/claude-opus-5", dict(constraint=Regex("a+"))),
        ("openai/davinci-002", dict(constraint=CITY)),
        ("openai/gpt-5.5", dict(temperature=0.0)),  # unknown
        ("openai/gpt-5", dict(temperature=0.0)),
        ("anthropic/claude-opus-5", dict(n=2)),
        ("openai/gpt-4o", dict(stop=tuple("abcde"))),
        ("openai/gpt-5", dict(constraint=Regex("a"), n=2)),
    ],
)
def test_strict_refuses_and_emulate_does_what_can_be_done(profile, asked):
    refused = strategy(profile, **asked)
    assert isinstance(refused, Refusal)
    assert refused.instead
    emulated = strategy(profile, **asked, policy="emulate")
    if "temperature" in asked or profile == "openai/davinci-002":
        assert isinstance(emulated, Refusal)  # nothing does it
    else:
        assert not isinstance(emulated, Refusal)
    if "temperature" in asked:
        assert strategy(profile, **asked, policy="warn") == "free"


def test_a_schema_that_does_not_fit_is_refused_with_its_pointers():
    found = strategy("openai/gpt-4o", OPEN)
    assert [pointer for pointer, _ in found.reasons] == [""]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_kind_of_constraint_is_served_or_refused_on_every_profile(policy):
    """No profile makes the ladder fail, and what a backend says that it enforces has a strategy."""
    samples: list[Constraint] = [
        CITY,
        PETS,
        Number("integer"),
        Regex("a+"),
        EBNF,
        LARK,
        OneOf((EBNF,)),
    ]
    for provider in providers():
        for profile in profiles(provider):
            kinds = served_constraint_kinds(profile, policy)
            for constraint in samples:
                found = choose_strategy(profile, policy, Demands(constraint=constraint))
                assert isinstance(found, Refusal) == (type(constraint) not in kinds), (
                    profile.name,
                    constraint,
                )


# ------------------------------------------------------------------------------------- what is sent


def asked_with(openai, api, profile, answer, **options):
    """The body of the one request for a generation on a profile; None: the answer is whatever
    comes.
    """
    api.answers = [said(answer)]
    state = run(openai("local", profile=profile), **options)
    return state["a"], api.last, state.get_meta_info("a")


@pytest.mark.parametrize(
    ("profile", "options", "answer", "fields"),
    [
        ("vllm", dict(regex="[ab]+"), "ab", {"structured_outputs": {"regex": "[ab]+"}}),
        (
            "vllm",
            dict(constraint=Choices(("x", "y"))),
            "y",
            {"structured_outputs": {"choice": ["x", "y"]}},
        ),
        (
            "vllm",
            dict(constraint=sgl.Grammar('root ::= "a"')),
            "a",
            {"structured_outputs": {"grammar": 'root ::= "a"'}},
        ),
        (
            "vllm",
            dict(json_schema='{"type": "null"}'),
            "null",
            {"structured_outputs": {"json": {"type": "null"}}},
        ),
        ("sglang", dict(regex="[ab]+"), "ab", {"regex": "[ab]+"}),
        ("sglang", dict(constraint=sgl.Grammar('root ::= "a"')), "a", {"ebnf": 'root ::= "a"'}),
        (
            "llamacpp",
            dict(constraint=sgl.Grammar('root ::= "a"')),
            "a",
            {"grammar": 'root ::= "a"'},
        ),
    ],
)
def test_a_dialects_own_field_is_sent(api, openai, profile, options, answer, fields):
    value, body, meta = asked_with(openai, api, profile, answer, **options)
    assert value == answer
    assert meta["cost"] is None  # nobody knows what it costs
    assert {name: body[name] for name in fields} == fields
    assert body.keys() - {"model", "messages", "max_tokens"} == fields.keys()
    assert (meta["calls"], "warnings" in meta) == (1, False)
    assert [meta["strategy"]] == list(fields)


def test_choices_are_a_regex_that_matches_them_alone(api, openai):
    texts = ("a.b", "c|d", "(e)", "f\ng", "é h")
    for text in texts:
        api.answers = [said(text)]
        assert run(openai("local", profile="sglang"), constraint=Choices(texts))["a"] == text
        assert re.fullmatch(api.last["regex"], text)
    assert re.fullmatch(api.last["regex"], "axb") is None


def test_schemas_go_to_engines_as_they_are(api, openai):
    schema = {"type": "object", "additionalProperties": {"type": "integer"}}
    _, body, _ = asked_with(openai, api, "sglang", '{"a": 1}', json_schema=schema)
    assert body["response_format"]["json_schema"] == {
        "name": "answer",
        "schema": schema,
        "strict": True,
    }


@pytest.mark.parametrize("profile", ["vllm", "sglang", "llamacpp"])
def test_what_an_engine_says_it_keeps_is_checked(api, openai, profile):
    with pytest.raises(sgl.ValueValidationError):
        asked_with(openai, api, profile, "c", regex="[ab]+")


def test_a_strict_tool_answers_with_its_arguments(api, openai):
    function = {"name": "answer", "arguments": '{"name": "Paris", "people": 2}'}
    call = {"id": "c", "type": "function", "function": function}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    choice = {"index": 0, "finish_reason": "tool_calls", "message": message}
    body = dict(
        id="x", choices=[choice], created=1, model="m", object="chat.completion", usage=USAGE
    )
    api.answers = [Reply(ChatCompletion.model_validate(body))]
    state = run(openai("gpt-4"), type=City)
    assert state["a"] == City(name="Paris", people=2)
    (tool,) = api.last["tools"]
    assert tool["function"]["strict"] is True
    assert tool["function"]["parameters"]["required"] == ["name", "people"]
    assert api.last["tool_choice"] == {"type": "function", "function": {"name": "answer"}}
    assert "response_format" not in api.last
    assert state.get_meta_info("a")["strategy"] == "strict_tool"


def test_a_grammar_is_the_input_of_a_tool(api, openai):
    api.answers = [called("(a)")]
    assert run(openai("gpt-5"), constraint=LARK)["a"] == "(a)"
    assert api.last["tools"][0]["format"] == {
        "type": "grammar",
        "syntax": "lark",
        "definition": LARK.grammar,
    }
    api.answers = [called("(b)")]
    with pytest.raises(sgl.ValueValidationError):
        run(openai("gpt-5"), constraint=LARK)["a"]


# ---------------------------------------------------------------------------------------- emulation


def test_a_broken_answer_is_shown_with_what_was_wrong(api, openai):
    api.answers = [said("It is c."), said("```text\nab\n```")]
    state = run(openai("gpt-4o", policy="emulate"), regex="[ab]+")
    assert state["a"] == "ab"
    first, second = (request.body["messages"] for request in api.requests)
    assert first[-1]["role"] == "user"
    assert first[-1]["content"].startswith(
        "Hi\n\nAnswer with a text that matches this regular expression"
    )
    assert second[: len(first)] == first
    assert second[-2] == {"role": "assistant", "content": "It is c."}
    assert second[-1]["content"].startswith("That is not valid: 'It is c.' is not what Regex")
    meta = state.get_meta_info("a")
    assert (meta["strategy"], meta["calls"], meta["prompt_tokens"]) == ("repair", 2, 20)
    assert meta["cost"] == known_price(state.usage("a"), "gpt-4o")
    assert meta["cost"] > 0
    assert "is stated in the prompt, checked" in meta["warnings"][0]
    assert state.messages()[-2]["content"] == "Hi"


QUOTE = Annotated[str, sgl.quote("It was a dark night.", min_words=2)]


def test_an_invented_quote_is_shown_with_what_was_wrong(api, openai):
    api.answers = [said('{"w": "a bright night"}'), said('{"w": "dark night"}')]
    state = run(openai("gpt-4o", policy="emulate"), type=dict[str, QUOTE])
    assert state["a"] == {"w": "dark night"}
    meta = state.get_meta_info("a")
    assert (meta["strategy"], meta["calls"]) == ("repair", 2)
    assert meta["quotes"] == [{"pointer": "/w", "source": 0, "start": 9, "end": 19}]
    first, second = (request.body for request in api.requests)
    assert "It was a dark night" not in json.dumps(first), "the prompt has it already"
    assert "copied from the text" in first["messages"][-1]["content"]
    wrong = "$.w: 'a bright night' is not a quote of at least 2 words from the document"
    assert wrong in second["messages"][-1]["content"]


@pytest.mark.parametrize("answer", ['{"value": ["dark night"]}', '{"value": ["a bright night"]}'])
def test_a_quote_that_no_provider_enforces_is_checked(api, openai, answer):
    api.answers = [said(answer)]
    state = run(openai("gpt-4o"), type=list[QUOTE])
    if "bright" in answer:
        with pytest.raises(sgl.ValueValidationError, match="is not a quote of at least 2 words"):
            state.sync()
    else:
        assert state.get_meta_info("a")["quotes"] == [
            {"pointer": "/0", "source": 0, "start": 9, "end": 19}
        ]
    assert "It was a dark night" not in json.dumps(api.last)


def test_two_repairs_are_tried_and_no_more(api, openai):
    api.answers = [said("c")]
    with pytest.raises(sgl.ValueValidationError, match="3 answers broke the constraint") as caught:
        run(openai("gpt-4o", policy="emulate"), regex="[ab]+")["a"]
    assert caught.value.text == "c"
    assert len(api.requests) == 3


@pytest.mark.parametrize("begun", ["abab", "abc"])  # one that is valid so far is cut as well
def test_an_answer_that_max_tokens_cut_is_asked_for_again(api, openai, begun):
    api.answers = [said(begun, finish="length"), said("ac")]
    assert run(openai("gpt-4o", policy="emulate"), regex="[ab]+c+")["a"] == "ac"
    wrong = "That is not valid: it was cut after 5 tokens. It has to be shorter."
    assert api.last["messages"][-1]["content"].startswith(wrong)
    api.answers = [said(begun, finish="length")]
    with pytest.raises(sgl.ValueValidationError, match="3 answers broke the constraint") as caught:
        run(openai("gpt-4o", policy="emulate"), regex="[ab]+c+")["a"]
    assert caught.value.hint == "Raise max_tokens, or ask for less."


def test_samples_are_calls_where_an_api_makes_one(api, openai):
    api.answers = [called("a"), called("b")]
    state = run(openai("gpt-5", policy="emulate"), regex="[ab]", n=2)
    assert sorted(state["a"]) == ["a", "b"]
    assert len(api.requests) == 2
    assert "n" not in api.last


def test_an_answer_is_cut_here_where_an_api_has_no_stop(api, openai):
    api.answers = [said("one. two")]
    state = run(openai("o4-mini", policy="emulate"), stop=".")
    assert state["a"] == "one"
    assert "stop" not in api.last
    assert state.get_meta_info("a")["finish_reason"] == {"type": "stop", "matched": "."}


def test_warn_leaves_out_what_nothing_does_and_says_so(api, openai):
    api.answers = [said("x")]
    state = run(openai("gpt-5", policy="warn"), temperature=0)
    assert state["a"] == "x"
    assert "temperature" not in api.last
    assert state.get_meta_info("a")["warnings"] == [
        "temperature is left out: the model does not accept it"
    ]


def test_emulation_is_the_same_on_the_messages_api(connected):
    backend = connected(Anthropic, "claude-opus-5", policy="emulate")
    assert backend.strategy(Demands(constraint=Regex("a+"))).name == "repair"
    assert Regex in backend.capabilities.constraints


def test_what_the_user_says_of_a_model_wins(api, openai):
    api.answers = [called("ab")]
    own = Capabilities(params=frozenset({"max_tokens"}), continues=False, prefill=False)
    assert run(openai("local", capabilities=own), regex="[ab]+")["a"] == "ab"
    with pytest.raises(sgl.CapabilityError, match="can't honour temperature"):
        run(openai("gpt-4o", capabilities=own), temperature=0)


@pytest.mark.parametrize(
    ("argument", "value"), [("policy", "lax"), ("profile", "nobody"), ("profile", 3)]
)
def test_a_wrong_policy_or_profile_is_refused_at_once(openai, argument, value):
    with pytest.raises(sgl.ParameterError, match=argument):
        openai(**{argument: value})


class Hooks(sgl.BaseBackend):
    """SGLang's blocking hooks, which ignore the regex."""

    def generate(self, s, sampling_params):
        return "c", {}


def test_a_blocking_hook_that_ignores_its_regex_is_caught():
    @sgl.function
    def program(s):
        s += "Say: " + sgl.gen("a", regex="[ab]+")

    with pytest.raises(sgl.ValueValidationError):
        program.run(backend=Hooks())["a"]
