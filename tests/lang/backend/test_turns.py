"""Several generations in one turn, on models behind APIs: calls, values, and what is told of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from api_server import Reply
from openai.types import Completion, CompletionChoice, CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice

import sglang_lite as sgl
from sglang_lite.lang.backend.openai import OpenAI
from sglang_lite.lang.backend.remote.turn import strip_repetition
from sglang_lite.lang.backend.rendering import CONTINUE_PROMPT

TURN = "Name: Ann\nYear: 1910\nCity: Rome"
PLAIN = "gpt-4-turbo"  # a chat model without structured outputs


def usage(prompt: str, answer: str) -> CompletionUsage:
    asked, told = len(prompt.split()), len(answer.split())
    return CompletionUsage(prompt_tokens=asked, completion_tokens=told, total_tokens=asked + told)


def chat(body: Any, text: str, finish: Any = "stop") -> Reply:
    shown = json.dumps(body["messages"])
    choice = Choice(
        index=0, finish_reason=finish, message=ChatCompletionMessage(role="assistant", content=text)
    )
    said = ChatCompletion(
        id="c",
        choices=[choice],
        created=1,
        model="m",
        object="chat.completion",
        usage=usage(shown, text),
    )
    return Reply(said)


def completion(body: Any, text: str, finish: Any = "stop") -> Reply:
    choice = CompletionChoice(index=0, finish_reason=finish, text=text)
    said = Completion(
        id="c",
        choices=[choice],
        created=1,
        model="m",
        object="text_completion",
        usage=usage(body["prompt"], text),
    )
    return Reply(said)


@pytest.fixture
def model(api, connected):
    """Makes a model that answers by a function of the request's body: text, or text and why it
    ended.
    """

    def make(answer: Callable[[Any], Any], name: str = PLAIN, **options: Any) -> OpenAI:
        def reply(request):
            said = answer(request.body)
            said = said if isinstance(said, tuple) else (said,)
            return (chat if "messages" in request.body else completion)(request.body, *said)

        api.answers = reply
        return connected(OpenAI, name, path="/v1", **options)

    return make


def begun(body: Any) -> str | None:
    """The turn that a request wants to be continued; None: it asks for one from its start."""
    messages = body["messages"]
    return messages[-2]["content"] if messages[-1]["content"] == CONTINUE_PROMPT else None


def stopped(text: str, body: Any) -> str:
    for stop in body.get("stop", ()):
        text = text.split(stop)[0]
    return text


def fields(s, **options):
    s += sgl.user("Who?")
    s += sgl.assistant(
        "Name:" + sgl.gen("name", stop="\n", **options)
        + "\nYear:" + sgl.gen("year", stop="\n") + "\nCity:" + sgl.gen("city", stop=["\n", "."])
    )  # fmt: skip


def program(tokens: int | None = 64, body: Any = fields) -> Any:
    return sgl.function(num_api_spec_tokens=tokens)(body)


def values(state) -> list[Any]:
    return [state[name] for name in ("name", "year", "city")]


def told(state, name) -> Any:
    return state.get_meta_info(name)["turn"]


# -------------------------------------------------------------------------------- found in one call


def test_one_call_brings_the_turn(api, model):
    fast = program()
    state = fast.run(backend=model(lambda body: TURN))
    assert values(state) == [" Ann", " 1910", " Rome"]
    assert state.messages()[-1] == {"role": "assistant", "content": TURN}
    assert len(api.requests) == 1
    assert api.last["max_completion_tokens"] == 64
    assert "stop" not in api.last
    assert api.last["messages"] == [{"role": "user", "content": "Who?"}]
    asked = state.usage("name").prompt_tokens
    assert told(state, "name") == {"by": "ahead", "found": 2, "thrown_tokens": 0}
    assert told(state, "year") == told(state, "city") == {"by": "found", "saved_tokens": asked}
    assert (state.usage().prompt_tokens, state.usage().completion_tokens) == (
        asked,
        len(TURN.split()),
    )
    counted = fast.api_drafts
    assert (counted.found, counted.missed, counted.saved_tokens, counted.thrown_tokens) == (
        2,
        0,
        2 * asked,
        0,
    )


@pytest.mark.parametrize("way", ["stream", "async", "batch", "thread"])
def test_it_does_so_however_it_is_run(api, model, way):
    fast, backend = program(), model(lambda body: TURN)
    if way == "stream":
        state = fast.run(backend=backend, stream=True)
        assert "".join(state.text_iter()) == state.text()
        assert "".join(state.text_iter("year")) == " 1910"
        states = [state]
    elif way == "async":
        states = [asyncio.run(fast.arun(backend=backend))]
    elif way == "batch":
        states = fast.run_batch([{}] * 5, backend=backend)
    else:
        states = [fast.run(backend=backend, use_thread=False)]
    assert [values(state) for state in states] == [[" Ann", " 1910", " Rome"]] * len(states)
    assert len(api.requests) == len(states)


def test_branches_have_their_own(api, model):
    def body(s):
        s += sgl.user("Who?")
        for i, branch in enumerate(s.fork(3)):
            branch += sgl.user(f"Number {i}.")
            branch += sgl.assistant(
                "A:" + sgl.gen("a", stop="\n") + "\nB:" + sgl.gen("b", stop="\n")
            )
            s[f"of_{i}"] = branch["a"] + branch["b"]

    state = program(body=body).run(
        backend=model(lambda b: f"A: {b['messages'][-1]['content']}\nB: x")
    )
    assert [state[f"of_{i}"] for i in range(3)] == [f" Number {i}. x" for i in range(3)]
    assert len(api.requests) == 3


def test_a_completion_model_continues_from_where_it_is(api, model):
    def body(s):
        s += (
            "Who?\nName:"
            + sgl.gen("name", stop="\n")
            + "\nYear:"
            + sgl.gen("year", stop="\n")
            + "\n"
        )
        s += "City:" + sgl.gen("city", stop="\n")

    answers = {"Name:": " Ann\nYear: 1910\nCity: Oslo", "City:": " Rome\nAnd"}
    backend = model(lambda b: stopped(answers[b["prompt"][-5:]], b), "davinci-002")
    state = program(body=body).run(backend=backend)
    assert state.text() == "Who?\nName: Ann\nYear: 1910\nCity: Rome"
    # a statement knows only its own
    assert [request.body.get("stop") for request in api.requests] == [None, ["\n"]]


def test_a_server_whose_model_continues_a_turn_is_shown_it(api, model):
    answers = {
        "Name:": " Ann",
        "Name: Ann\nYear:": " 1910",
        "Name: Ann\nYear: 1910\nCity:": " Rome",
    }
    backend = model(
        lambda b: stopped(answers[b["messages"][-1]["content"]], b), "llama", profile="vllm"
    )
    assert values(program(None).run(backend=backend)) == [" Ann", " 1910", " Rome"]
    assert api.last["messages"][-1] == {
        "role": "assistant",
        "content": "Name: Ann\nYear: 1910\nCity:",
    }
    assert (api.last["continue_final_message"], api.last["add_generation_prompt"]) == (True, False)


def test_such_a_server_too_is_asked_once_for_a_turn(api, model):
    backend = model(lambda b: " Ann\nYear: 1910\nCity: Rome", "llama", profile="vllm")
    assert values(program().run(backend=backend)) == [" Ann", " 1910", " Rome"]
    assert [request.body["messages"][-1]["content"] for request in api.requests] == ["Name:"]


# ------------------------------------------------------------------------------------------- misses


def test_a_miss_costs_a_call_that_goes_on_from_there(api, model):
    answers = {None: "Name: Ann\nBorn: 1910", "Name: Ann\nYear:": " 1910\nCity: Rome"}
    fast = program()
    state = fast.run(backend=model(lambda body: answers[begun(body)]))
    assert values(state) == [" Ann", " 1910", " Rome"]
    assert len(api.requests) == 2
    assert state.text().count("Year: 1910\nCity: Rome")
    assert [told(state, name)["by"] for name in ("name", "year", "city")] == [
        "ahead",
        "ahead",
        "found",
    ]
    assert state.usage("name").thrown_away_tokens == told(state, "name")["thrown_tokens"] > 0
    assert (fast.api_drafts.found, fast.api_drafts.missed) == (1, 2)


def test_nothing_found_is_asked_for_by_itself(api, model):
    """At most one call more than a call a generation, and no value is ever empty or partial."""

    def answer(body):
        shown = begun(body)
        if shown is None or "stop" not in body:
            return "no such thing", "length"
        return {
            "Name:": " Ann",
            "Name: Ann\nYear:": " 1910",
            "Name: Ann\nYear: 1910\nCity:": " Rome",
        }[shown]

    state = program().run(backend=model(answer))
    assert values(state) == [" Ann", " 1910", " Rome"]
    assert len(api.requests) == 5
    assert state.usage().completion_tokens == 3 + 3 + 3
    assert state.usage().thrown_away_tokens == 3 + 3
    assert told(state, "name") == {"by": "asked", "thrown_tokens": 6}


def test_an_answer_that_was_cut_leaves_its_last_value_out(api, model):
    answers = {
        None: ("Name: Ann\nYear: 19", "length"),
        "Name: Ann\nYear:": ("1910\nCity: Rome", "stop"),
    }
    state = program(4).run(backend=model(lambda body: answers[begun(body)]))
    assert values(state) == [" Ann", "1910", " Rome"]


def test_a_completion_model_goes_on_behind_the_mismatch(api, model):
    def body(s):
        s += "Name:" + sgl.gen("name", stop="\n") + "\nYear:" + sgl.gen("year", stop="\n")

    answers = {"Name:": " Ann\n(a cook)", "Name: Ann\nYear:": " 1910"}
    state = program(body=body).run(
        backend=model(lambda b: stopped(answers[b["prompt"]], b), "davinci-002")
    )
    assert state.text() == "Name: Ann\nYear: 1910"
    assert [request.body["prompt"] for request in api.requests] == list(answers)
    assert told(state, "name") == {"by": "ahead", "found": 0, "thrown_tokens": 2}


def test_a_value_that_a_check_refuses_is_asked_for_by_itself(api, model):
    def body(s):
        s += sgl.user("Who?")
        s += sgl.assistant(
            "Name:" + sgl.gen("name", stop="\n", check=lambda value: "Ann" not in value, retries=2)
            + "\nYear:" + sgl.gen("year", stop="\n")
        )  # fmt: skip

    answers = {None: "Name: Ann\nYear: 1910", "Name:": " Bob", "Name: Bob\nYear:": " 1920"}
    state = program(body=body).run(backend=model(lambda b: answers[begun(b)]))
    # what stood behind the refused value counts no more
    assert (state["name"], state["year"]) == (" Bob", " 1920")


@pytest.mark.parametrize(
    ("first", "second", "calls"),
    [
        ("Year: 1910\nCity: Rome", "", 1),
        ("Year: long ago\nCity: Rome", "1910\nCity: Rome", 2),
        ("Year: long ago\nCity: Rome", "?", 4),
    ],
)
def test_typed_values_are_checked_in_the_answer(api, model, first, second, calls):
    def body(s):
        s += sgl.user("Who?")
        s += sgl.assistant(
            "Year: " + sgl.gen("year", type=int) + "\nCity: " + sgl.gen("city", stop="\n")
        )

    def answer(body):
        if "response_format" in body:
            return '{"value": 1910}'
        return {None: first, "Year:": second, "Year: 1910\nCity:": "Rome"}[begun(body)]

    state = program(body=body).run(backend=model(answer, "gpt-4o"))
    assert (state["year"], state["city"]) == (1910, "Rome")
    assert len(api.requests) == calls


def test_a_model_that_says_the_turn_again_is_understood(api, model):
    answers = {None: "?", "Name:": "Name: Ann\nYear: 1910\nCity: Rome"}
    state = program().run(backend=model(lambda body: answers[begun(body)]))
    assert values(state) == [" Ann", " 1910", " Rome"]


@pytest.mark.parametrize(
    ("said", "added"),
    [
        (" 1910", " 1910"),
        ("Name: Ann\nYear: 1910", " 1910"),
        ("Year: 1910", " 1910"),
        ("  Year: 1910", " 1910"),
        ("Year: 1910\nYear: 1911", " 1910\nYear: 1911"),
        ("Ann", "Ann"),
    ],
)
def test_what_is_said_again_is_left_out(said, added):
    assert strip_repetition("Name: Ann\nYear:", said) == added


def test_a_word_is_not_taken_for_one_that_is_said_again():
    assert strip_repetition("A", "Apple") == "Apple"
    assert strip_repetition("An a", "n apple") == "n apple"


# ------------------------------------------------------------------------------- when, and when not


def test_without_drafts_a_begun_turn_is_refused_before_the_first_call(api, model):
    with pytest.raises(
        sgl.CapabilityError, match=r"'name'.*already in the assistant's turn: 'Name:'"
    ) as error:
        program(None).run(backend=model(lambda body: TURN))
    assert "num_api_spec_tokens" in str(error.value)
    assert api.requests == []


def test_text_behind_a_generation_does_not_make_its_turn_a_begun_one(api, model):
    @sgl.function
    def plain(s):
        s += sgl.user("Who?")
        s += sgl.assistant(sgl.gen("name") + "!")

    state = plain.run(backend=model(lambda body: "Ann"))
    assert state.messages()[-1] == {"role": "assistant", "content": "Ann!"}

    @sgl.function
    def number(s):
        s += sgl.user("When?")
        s += sgl.assistant(sgl.gen("year", type=int) + ".")

    for policy in ("strict", "emulate"):
        state = number.run(backend=model(lambda body: '{"value": 1910}', "gpt-4o", policy=policy))
        assert state["year"] == 1910
        meta = state.get_meta_info("year")
        assert meta is not None
        assert "turn" not in meta


def test_to_emulate_is_to_ask_for_the_rest(api, model):
    answers = {
        "Name:": " Ann",
        "Name: Ann\nYear:": " 1910",
        "Name: Ann\nYear: 1910\nCity:": " Rome.",
    }
    backend = model(
        lambda body: stopped(answers[begun(body)], body),
        "any",
        profile="compatible",
        policy="emulate",
    )
    state = program(None).run(backend=backend)
    assert values(state) == [" Ann", " 1910", " Rome"]
    assert [told(state, name) for name in ("name", "city")] == [{"by": "asked"}] * 2
    assert [request.body["stop"] for request in api.requests] == [["\n"], ["\n"], ["\n", "."]]


def test_drafts_end_where_they_do_not_pay(api, model):
    fast = program()
    backend = model(lambda body: stopped(" x\ny", body) if begun(body) else "no such thing")
    runs = 0
    while fast.api_drafts.enabled:
        assert values(fast.run(backend=backend)) == [" x"] * 3
        runs += 1
    seen = fast.api_drafts.found + fast.api_drafts.missed
    assert 32 <= seen < 32 + 8
    assert fast.api_drafts.found < seen / 2
    api.requests.clear()
    assert values(fast.run(backend=backend)) == [" x"] * 3
    assert len(api.requests) == 3  # a call a generation
    assert fast.api_drafts.found + fast.api_drafts.missed == seen


@pytest.mark.parametrize("tokens", [0, -1, True, 1.5, "64"])
def test_a_number_of_tokens_is_checked(tokens):
    with pytest.raises(sgl.ParameterError, match=r"num_api_spec_tokens: .*Give one, or None"):
        program(tokens)


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.5}, {"n": 2}, {"return_logprob": True}, {"tools": [lambda x: x]}],
    ids=lambda o: next(iter(o)),
)
def test_generations_of_different_kinds_do_not_share_a_call(api, model, options):
    if "tools" in options:

        def look_up(name: str) -> str:
            """Looks a name up."""
            return name

        options = {"tools": [look_up]}
    backend = model(lambda body: "x", "davinci-002")

    def body(s):
        s += "Name:" + sgl.gen("name", **options) + "\nYear:" + sgl.gen("year", stop="\n")

    # an answer that is no call of a tool, or only one of two samples
    with contextlib.suppress(sgl.SglError):
        program(body=body).run(backend=backend).text()
    assert all("max_tokens" not in request.body for request in api.requests)


# ------------------------------------------------------------------------------- under a constraint


def typed(s):
    s += sgl.user("Who?")
    s += sgl.assistant(
        "Year: " + sgl.gen("year", type=int) + ", alive: " + sgl.gen("alive", type=bool) + "."
    )


@pytest.mark.parametrize(("profile", "name"), [(None, "gpt-4o"), ("compatible", "any")])
def test_constrained_generations_behind_text_are_asked_for_one_by_one(api, model, profile, name):
    answers = {"Year:": 1910, "Year: 1910, alive:": "true"}
    wrapped = name == "gpt-4o"

    def answer(body):
        value = answers[body["messages"][1]["content"]]
        return json.dumps({"value": value}) if wrapped else str(value)

    backend = model(answer, name, profile=profile, policy="emulate")
    state = program(None, typed).run(backend=backend)
    assert state.messages()[-1]["content"] == "Year: 1910, alive: true."
    assert (state["year"], state["alive"]) == (1910, True)
    assert len(api.requests) == 2
    assert ("response_format" in api.last) == wrapped
    assert told(state, "year") == {"by": "asked"}


def test_they_are_refused_before_the_first_call_without_emulation(api, model):
    with pytest.raises(
        sgl.CapabilityError, match=r"'year'.*already in the assistant's turn: 'Year: '"
    ):
        program(None, typed).run(backend=model(lambda body: "{}", "gpt-4o"))
    assert api.requests == []


def test_a_selection_in_text_is_found_in_it(api, model):
    def body(s):
        s += sgl.user("Who?")
        s += sgl.assistant(
            "Name:" + sgl.gen("name", stop="\n") + "\nKind: " + sgl.select("kind", ["cook", "poet"])
        )

    answers = {None: "Name: Ann\nKind: poet", "Name: Bob\nKind:": '{"value": "cook"}'}
    state = program(64, body).run(backend=model(lambda body: answers[begun(body)], "gpt-4o"))
    assert (state["name"], state["kind"], len(api.requests)) == (" Ann", "poet", 1)
    answers[None] = "Name: Bob\nKind: a poet"
    state = program(64, body).run(backend=model(lambda body: answers[begun(body)], "gpt-4o"))
    # one told no alternatives
    assert (state["name"], state["kind"], len(api.requests)) == (" Bob", "cook", 4)


# ---------------------------------------------------------------------------------------- once more


def test_a_run_again_asks_only_for_what_has_changed(api, model):
    state = program().run(backend=model(lambda body: TURN))
    values(state)
    answers = {"Name: Bob\nYear:": " 1920\nCity: Oslo"}
    api.requests.clear()
    api.answers = lambda request: chat(request.body, answers[begun(request.body)])
    again = state.rerun("name", " Bob")
    assert values(again) == [" Bob", " 1920", " Oslo"]
    assert len(api.requests) == 1
