"""Claude through Anthropic's own SDK, against a local server that speaks the protocol."""

import traceback

import pytest
from anthropic.types import (
    RefusalStopDetails,
)
from anthropic_answers import calling, ended, piece, said, started
from api_server import Drop, Events, Hold, Reply
from pydantic import BaseModel, Field

import sglang_lite as sgl
from sglang_lite.lang.backend.anthropic import Anthropic, RepeatedWhitespace
from sglang_lite.lang.backend.capabilities import Capabilities
from sglang_lite.protocol import Delta
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("either_client")

# OLD continues a begun turn and takes sampling parameters
NEW, OLD = "claude-opus-5", "claude-haiku-4-5"
PNG = (
    b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00\x00\x01\x00\x00\x00\x01\x08\x00\x00\x00\x00:~\x9bU\x00\x00\x00\n"
    b"IDATx\x9cc\xf8\x0f\x00\x01\x01\x01\x00\x1b\xb6\xeeV\x00\x00\x00\x00IEND\xaeB`\x82"
)


def error_event(kind, message):
    return {"type": "error", "error": {"type": kind, "message": message}}


def failure(status, message, kind="some_error", **headers):
    return Reply(error_event(kind, message), status, {"request-id": "req-9", **headers})


@pytest.fixture
def claude(connected):
    return lambda model=NEW, **options: connected(Anthropic, model, **options)


def run(backend, before="", *, user="Hi", stream=False, **options):
    @sgl.function
    def program(s):
        s += sgl.system("Be brief.")
        s += sgl.user(user)
        s += sgl.assistant(before + sgl.gen("a", **options))

    return program.run(backend=backend, stream=stream)


def ask(backend, before="", **options):
    return run(backend, before, **options)["a"]


# ----------------------------------------------------------------------------------------- requests


def test_a_request_carries_the_turns_and_the_limit_that_the_api_wants(api, claude):
    api.answers = [said("Hel", "lo")]
    state = run(claude())
    assert state["a"] == "Hello"
    assert api.requests[0].path == "/v1/messages"
    assert api.last == {
        "model": NEW,
        "max_tokens": 128,
        "system": "Be brief.",
        "messages": [{"role": "user", "content": "Hi"}],
        "stream": True,
    }


def test_parameters_that_were_set_are_sent_where_the_model_takes_them(api, claude):
    api.answers = [said("x")]
    ask(claude(OLD), max_tokens=9, stop=["END"], temperature=0, top_k=3)
    assert (api.last["max_tokens"], api.last["stop_sequences"]) == (9, ["END"])
    assert (api.last["temperature"], api.last["top_k"]) == (0, 3)
    ask(claude("claude-opus-4-6"), top_p=0.5)
    assert api.last["top_p"] == 0.5


def test_a_limit_of_thoughts_is_one_that_the_api_takes(api, claude):
    api.answers = [said("x")]
    ask(claude(OLD), thinking=1024, max_tokens=1025)
    assert api.last["thinking"] == {"type": "enabled", "budget_tokens": 1024}
    for limits, message in [
        ({"thinking": 1023, "max_tokens": 4000}, "1,024 tokens or more, not 1,023"),
        (
            {"thinking": 2000, "max_tokens": 2000},
            "thoughts of 2,000 tokens need a larger max_tokens",
        ),
        ({"thinking": 2000}, "than 128"),
    ]:
        with pytest.raises(sgl.ParameterError, match=message):
            ask(claude(OLD), **limits)
    for model in ("claude-3-5-haiku", "claude-opus-4-7", NEW, "claude-fable-5", "claude-haiku-5-5"):
        with pytest.raises(sgl.CapabilityError, match="thinking"):
            ask(claude(model), thinking=1024, max_tokens=2000)
    assert len(api.requests) == 1


def test_the_system_prompt_stays_for_every_generation_and_in_the_state(api, claude):
    api.answers = [said("one"), said("two")]

    @sgl.function
    def program(s):
        s += sgl.system("Be brief.")
        for name in ("a", "b"):
            s += sgl.user(f"ask {name}")
            s += sgl.assistant(sgl.gen(name))

    messages = program.run(backend=claude()).messages()
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert [r.body["system"] for r in api.requests] == ["Be brief.", "Be brief."]
    user, answered, again = api.last["messages"]
    assert [user, again] == [messages[1], messages[3]]
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "sig"}
    assert answered == {"role": "assistant", "content": [thought, {"type": "text", "text": "one"}]}


def test_a_begun_turn_is_gone_on_with(api, claude):
    api.answers = [said(" 42", ".")]
    state = run(claude(OLD), "The answer is ", max_tokens=5)
    assert state["a"] == "42."
    assert state.messages()[-1]["content"] == "The answer is 42."
    # the API takes no blank
    assert api.last["messages"][-1] == {"role": "assistant", "content": "The answer is"}


@pytest.mark.parametrize(
    "pieces", [("\n", " 42"), ("\n 4", "2"), ("\n", " ", "42"), ("42",), ("4", "2")]
)
def test_blanks_that_the_api_was_not_given_are_not_doubled(api, claude, pieces):
    api.answers = [said(*pieces)]
    state = run(claude(OLD), "It is\n ", stream=True)
    assert "".join(state.text_iter("a")) == "42"
    assert state["a"] == "42"


def test_reasoning_before_held_blanks_is_kept():
    repeated = RepeatedWhitespace("It is\n ")
    pieces = [Delta("", reasoning="Hm"), Delta("\n", reasoning="."), Delta(" 42")]
    told = [event for event in map(repeated.trim, pieces) if event is not None]
    assert [(event.text, event.reasoning) for event in told] == [("", "Hm"), ("", "."), ("42", "")]


def test_images_are_blocks(api, claude):
    api.answers = [said("a dot")]
    ask(claude(), user=sgl.image("https://x.test/i.png") + "and" + sgl.image(PNG))
    address, text, data = api.last["messages"][0]["content"]
    assert address == {"type": "image", "source": {"type": "url", "url": "https://x.test/i.png"}}
    assert text == {"type": "text", "text": "and"}
    assert data["source"]["type"] == "base64"
    assert data["source"]["media_type"] == "image/png"
    ask(claude(), user=sgl.image("data:image/gif;base64,R0lG"))
    (data,) = api.last["messages"][0]["content"]
    assert data["source"] == {"type": "base64", "media_type": "image/gif", "data": "R0lG"}


# -------------------------------------------------------------------------------------- constraints


class City(BaseModel):
    name: str = Field(max_length=20)
    people: int | None = Field(None, ge=0)


def schema_of(api):
    assert api.last["output_config"]["format"]["type"] == "json_schema"
    return api.last["output_config"]["format"]["schema"]


def test_a_schema_is_native_and_what_the_api_cannot_keep_is_checked(api, claude):
    api.answers = [said('{"name": "Par', 'is", "people": 2}')]
    assert ask(claude(), type=City) == City(name="Paris", people=2)
    schema = schema_of(api)
    assert schema["additionalProperties"] is False
    assert schema["required"] == ["name"]  # the API takes optional ones
    assert "minimum: 0" in schema["properties"]["people"]["anyOf"][0]["description"]
    api.answers = [said('{"name": "Paris", "people": -2}')]
    with pytest.raises(sgl.ValueValidationError, match="greater than or equal to 0"):
        ask(claude(), type=City)


@pytest.mark.parametrize(
    ("type_", "answer", "value"),
    [(int, "42", 42), (bool, '"true"', True), (list[int], "[1, 2]", [1, 2])],
)
def test_values_that_are_no_objects_are_wrapped_and_unwrapped(api, claude, type_, answer, value):
    api.answers = [said(f'{{"value": {answer}}}')]
    assert ask(claude(), type=type_) == value
    assert list(schema_of(api)["properties"]) == ["value"]
    assert "stop_sequences" not in api.last


def test_select_names_a_choice(api, claude):
    api.answers = [said('{"value": "cat"}')]

    @sgl.function
    def program(s):
        s += sgl.user("Which?")
        s += sgl.assistant(sgl.select("pet", ["dog", "cat"]))

    assert program.run(backend=claude())["pet"] == "cat"
    assert schema_of(api)["properties"]["value"]["enum"] == ["dog", "cat"]
    assert api.last["max_tokens"] == 4096


# ----------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("model", "options", "feature"),
    [
        (NEW, dict(temperature=0), "temperature"),
        (NEW, dict(top_p=0.5), "top_p"),
        (NEW, dict(top_k=3), "top_k"),
        (NEW, dict(n=2), "n"),
        (NEW, dict(seed=1), "seed"),
        (NEW, dict(min_tokens=1), "min_tokens"),
        (NEW, dict(frequency_penalty=1), "frequency_penalty"),
        (NEW, dict(logit_bias={1: 1}), "logit_bias"),
        (NEW, dict(return_logprob=True), "return_logprob"),
        (NEW, dict(stop="\n"), "a stop string of whitespace only"),
        (NEW, dict(regex="a+"), "a regex"),
        (NEW, dict(type=int, stop="x"), "stop together with a constraint"),
        (NEW, dict(type=dict[str, int]), "this JSON schema"),
        (NEW, dict(json_schema={"type": ["string", "null"]}), "this JSON schema"),
        (OLD, dict(temperature=0, top_p=0.5), "temperature and top_p together"),
        ("claude-sonnet-4-6", dict(temperature=0, top_p=0.5), "temperature and top_p together"),
        ("claude-3-haiku-20240307", dict(type=City), "a JSON schema"),
        ("claude-3-haiku-20240307", dict(type=bool), "a list of choices"),
    ],
)
def test_what_a_model_cannot_do_is_refused_before_any_call(api, claude, model, options, feature):
    with pytest.raises(sgl.CapabilityError) as caught:
        ask(claude(model), **options)
    text = str(caught.value)
    assert f"Gen('a'): Anthropic('{model}') can't honour {feature}." in text
    assert len(text.split(". ")) > 1  # what to do instead
    assert text.endswith("program]")  # where
    assert not api.requests


def test_older_models_take_both_samplers(api, claude):
    api.answers = [said("x")]
    ask(claude("claude-3-haiku-20240307"), temperature=0.5, top_p=0.5)
    assert (api.last["temperature"], api.last["top_p"]) == (0.5, 0.5)


def test_capabilities_can_be_declared_for_models_that_the_table_does_not_know(api, claude):
    api.answers = [said("x")]
    own = Capabilities(params=frozenset({"temperature"}), continues=False, prefill=True)
    assert ask(claude("deepseek-chat", capabilities=own), "So", temperature=0) == "x"
    assert api.last["temperature"] == 0


def test_a_chat_is_not_asked_to_go_on_with_other_text(api, claude):
    def refused(body, message, model=NEW):
        with pytest.raises(sgl.CapabilityError, match=message) as caught:
            sgl.function(body).run(backend=claude(model))["a"]
        assert caught.value.where is not None
        assert model in str(caught.value)

    def twice(s):
        s += sgl.user("x")
        s += sgl.assistant("Before.")
        s += sgl.assistant(sgl.gen("a"))

    def intro(s):
        s += "Some introduction."
        s += sgl.system("Be brief.")
        s += sgl.user("x")
        s += sgl.assistant(sgl.gen("a"))

    def shown(s):
        s += sgl.system(sgl.image(PNG))
        s += sgl.user("x")
        s += sgl.assistant(sgl.gen("a"))

    refused(
        lambda s: s.__iadd__("Once upon" + sgl.gen("a")), "outside an assistant's turn. Write turns"
    )
    refused(
        lambda s: s.__iadd__(sgl.user("x") + sgl.assistant("It is" + sgl.gen("a"))),
        "already in the assistant's turn: 'It is'",
    )
    refused(
        lambda s: s.__iadd__(sgl.system("x") + sgl.assistant(sgl.gen("a"))),
        "last turn is not one. Add sgl.user",
    )
    refused(twice, "the last turn is not one")
    refused(intro, "not see the text outside the turns: 'Someintroduction.'")
    refused(shown, "no images in a system turn")
    bitmap = b"BM" + bytes(60)
    refused(
        lambda s: s.__iadd__(sgl.user(sgl.image(bitmap)) + sgl.assistant(sgl.gen("a"))),
        "no images of type image/bmp",
    )
    assert not api.requests


# ---------------------------------------------------------------------------------------- streaming


def test_pieces_are_shown_as_they_come(api, claude):
    api.answers = [said("Hel", "lo")]
    state = run(claude(), stream=True)
    assert list(state.text_iter("a")) == ["Hel", "lo"]
    api.answers = [said('{"value":', " 42}")]
    assert list(run(claude(), stream=True, type=int).text_iter("a")) == ["42"]


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (
            Events([started(), piece("Hel")], end="drop"),
            sgl.BackendError,
            "failed in the middle of the answer",
        ),
        (
            Events([started(), piece("Hel")]),
            sgl.BackendError,
            "stream ended before the answer was complete",
        ),
        (
            Events([started(), ended(None)]),
            sgl.BackendError,
            "stream ended before the answer was complete",
        ),
        (Events([]), sgl.BackendError, "stream ended before the answer was complete"),
        (
            Events([started(), error_event("overloaded_error", "Overloaded")]),
            sgl.OverloadedError,
            "Overloaded.*Run fewer",
        ),
        (
            Events([started(), error_event("api_error", "Broken")]),
            sgl.BackendError,
            "Broken.*Try again",
        ),
    ],
)
def test_a_stream_that_breaks_is_an_error(api, claude, answer, error, message):
    api.answers = [answer]
    with pytest.raises(error, match=message):
        "".join(run(claude(), stream=True).text_iter("a"))
    with pytest.raises(error, match=message):
        ask(claude())


def test_an_event_that_is_not_json_is_an_error(api, claude):
    api.answers = [
        Reply(
            "event: message_start\ndata: {broken\n\n", headers={"Content-Type": "text/event-stream"}
        )
    ]
    with pytest.raises(sgl.BackendError, match="not JSON"):
        ask(claude())


@pytest.mark.parametrize("answer", [Hold(), Events([started(), piece("Hel")], end="hold")])
def test_a_time_limit_closes_the_connection(api, claude, time_limits, answer):
    api.answers = [answer]
    streams = isinstance(answer, Events)
    state = run(claude(), stream=streams, timeout=1000)
    until(lambda: api.requests)
    assert not streams or next(state.text_iter("a")) == "Hel"
    time_limits.expire()
    with pytest.raises(sgl.RequestTimeoutError, match=r"within the node's timeout of 1000 s"):
        state["a"]
    assert api.hung_up.wait(60)


# --------------------------------------------------------------------------- usage and stop reasons


def test_usage_counts_what_was_cached(api, claude):
    api.answers = [said("x")]
    backend = claude()
    meta = run(backend).get_meta_info("a")
    assert (meta["prompt_tokens"], meta["cached_tokens"], meta["completion_tokens"]) == (13, 4, 5)
    assert (meta["id"], meta["model"]) == ("msg-1", "claude-x")
    assert (backend.token_usage.prompt_tokens, backend.token_usage.completion_tokens) == (13, 5)
    backend.token_usage.reset()
    assert backend.token_usage.prompt_tokens == 0


def test_the_stop_string_that_ended_an_answer_is_told(api, claude):
    api.answers = [said("x", reason="stop_sequence", stop_sequence="END")]
    meta = run(claude(), stop="END").get_meta_info("a")
    assert meta["finish_reason"] == {"type": "stop", "matched": "END"}


def test_text_may_be_cut_short_and_values_may_not(api, claude):
    api.answers = [said('{"name": "Par', reason="max_tokens")]
    assert run(claude()).get_meta_info("a")["finish_reason"]["type"] == "length"
    for options in (dict(type=City), dict(json_schema=City), dict(type=int)):
        with pytest.raises(
            sgl.ValueValidationError, match=r"cut short after 5 tokens\. Raise max_tokens"
        ):
            ask(claude(), **options)


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (said("I", reason="refusal"), sgl.RefusalError, "refused to answer: no reason is given"),
        (
            said(reason="refusal", stop_details=RefusalStopDetails(type="refusal", category="bio")),
            sgl.RefusalError,
            "refused to answer: bio",
        ),
        (
            said(reason="max_tokens"),
            sgl.BackendError,
            "no text after 5 tokens, which reasoning may have used up",
        ),
        (said(reason="model_context_window_exceeded"), sgl.BackendError, "no text after 5 tokens"),
        (said(), sgl.BackendError, "returned no text"),
        (said("x", reason="pause_turn"), sgl.BackendError, "the model paused 16 times"),
    ],
)
def test_an_answer_that_is_none_is_an_error(api, claude, answer, error, message):
    api.answers = [answer]
    with pytest.raises(error, match=message):
        ask(claude())


# ------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("reply", "error", "parts"),
    [
        (
            failure(400, "Bad thing"),
            sgl.BackendError,
            ["Bad thing", "Correct the part of the request that the message names"],
        ),
        (
            failure(401, "No key sk-secret-0123456789 here"),
            sgl.BackendError,
            ["No key … here", "Check api_key="],
        ),
        (failure(404, "No model"), sgl.BackendError, ["Check model_name= and base_url="]),
        (
            failure(429, "Slow down", "rate_limit_error"),
            sgl.OverloadedError,
            ["num_threads=", "max_retries="],
        ),
        (failure(500, "Oops", "api_error"), sgl.BackendError, ["Oops", "Try again"]),
        (failure(529, "Overloaded", "overloaded_error"), sgl.OverloadedError, ["Overloaded"]),
        (failure(504, "Late", "timeout_error"), sgl.RequestTimeoutError, ["Late", "timeout="]),
    ],
)
def test_failures_say_what_the_provider_said_and_what_to_do(api, claude, reply, error, parts):
    api.answers = [reply]
    with pytest.raises(error) as caught:
        ask(claude())
    text = str(caught.value)
    for part in (f"Anthropic('{NEW}')", f"HTTP {reply.status}", "request req-9", *parts):
        assert part in text
    assert "secret" not in "".join(traceback.format_exception(caught.value))


def test_parameters_that_later_versions_of_the_api_refuse_go_to_the_earlier_one(api, claude):
    api.answers = [said("x")]
    ask(claude("claude-haiku-4-5"), temperature=0.5)
    assert api.last["temperature"] == 0.5
    assert api.requests[-1].headers["anthropic-version"] == "2023-06-01"
    ask(claude("claude-haiku-4-5"))
    assert api.requests[-1].headers["anthropic-version"] == "2026-10-21"


def test_failed_requests_are_tried_again(api, claude):
    soon = {"Retry-After": "0.01"}
    api.answers = [failure(429, "Slow down", **soon), failure(529, "Busy", **soon), said("done")]
    assert ask(claude(max_retries=2)) == "done"
    assert len(api.requests) == 3


def test_a_server_that_is_silent_or_gone_is_an_error(api, claude):
    api.answers = [Hold()]
    with pytest.raises(sgl.RequestTimeoutError, match=r"did not answer in time\. Raise timeout="):
        ask(claude(timeout=0.1))
    api.answers = [Drop()]
    with pytest.raises(sgl.BackendError, match=r"the connection failed \(.*Check base_url"):
        ask(claude())


def test_one_failing_program_fails_alone(api, claude):
    api.answers = lambda request: failure(400, "no") if "bad" in str(request.body) else said("fine")

    @sgl.function
    def program(s, q):
        s += sgl.user(q)
        s += sgl.assistant(sgl.gen("a"))

    states = program.run_batch(
        [{"q": q} for q in ("one", "bad", "two")], backend=claude(), on_error="return"
    )
    assert [isinstance(s, sgl.BackendError) for s in states] == [False, True, False]
    assert states[2]["a"] == "fine"


def test_a_missing_key_is_told_at_once(monkeypatch):
    for name in ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        sgl.ParameterError,
        match=r"api_key: no key is given\. Give api_key=, or set ANTHROPIC_API_KEY",
    ):
        Anthropic(NEW)


# -------------------------------------------------------------------------- tools, thoughts, pauses


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def test_tools_are_the_apis_own_and_a_result_answers_the_call(api, claude):
    api.answers = [calling(("c-1", "add", '{"a": 1, "b": 2}')), said("Three.")]

    @sgl.function
    def program(s):
        s += sgl.user("1 + 2?")
        assert sgl.use_tools(s, [add]) == "Three."

    program.run(backend=claude())
    (tool,) = api.last["tools"]
    assert (tool["name"], tool["description"], tool["strict"]) == ("add", "Adds two numbers.", True)
    assert api.last["tool_choice"] == {"type": "auto", "disable_parallel_tool_use": True}
    assert "output_config" not in api.last
    _, turn, result = api.last["messages"]
    assert turn["content"] == [
        {"type": "tool_use", "id": "c-1", "name": "add", "input": {"a": 1, "b": 2}}
    ]
    assert result["content"] == [{"type": "tool_result", "tool_use_id": "c-1", "content": "3"}]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (calling(("c", "add", '{"a": 1')), "."),
        (calling(("c", "sub", "{}")), "."),
        (
            calling(("c", "add", '{"a": 1, "b": 2}'), ("d", "add", '{"a": 3, "b": 4}')),
            "called 2 tools at once",
        ),
        (calling(("c", "add", '{"a": 1'), reason="max_tokens"), "cut short"),
    ],
)
def test_a_malformed_call_is_a_value_that_will_not_do(api, claude, answer, message):
    api.answers = [answer]
    with pytest.raises(sgl.ValueValidationError, match=message) as caught:
        ask(claude(), tools=[add])
    assert caught.value.origin.request_id == "msg-1"


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_are_told_apart(api, claude, stream):
    api.answers = [said("Hel", "lo")]
    state = run(claude(), reasoning="deepseek-r1", stream=stream)
    assert (state["a"], state["a_reasoning_content"]) == ("Hello", "Hm.")
    if stream:
        assert list(state.text_iter("a_reasoning_content")) == ["Hm."]
        assert list(state.text_iter("a")) == ["Hel", "lo"]


def test_effort_is_asked_for_beside_a_schema(api, claude):
    api.answers = [said('{"value": 42}')]
    ask(claude(reasoning_effort="low"), type=int)
    assert api.last["output_config"]["effort"] == "low"
    assert "value" in schema_of(api)["properties"]


def test_a_model_that_pauses_is_asked_to_continue(api, claude):
    api.answers = [said("Hel", reason="pause_turn"), said("lo")]
    state = run(claude(), stream=True)
    assert list(state.text_iter("a")) == ["Hel", "lo"]
    meta = state.get_meta_info("a")
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (26, 10)  # of both calls
    assert api.last["messages"][-1]["role"] == "assistant"
    assert api.last["messages"][-1]["content"][-1] == {"type": "text", "text": "Hel"}
