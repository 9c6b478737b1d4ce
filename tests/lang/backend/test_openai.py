"""OpenAI as a backend, through its own SDK against a local server: what is refused, failures,
connections.
"""

import asyncio
import traceback

import pytest
from api_server import Drop, Hold, Reply
from openai_answers import PNG, ask, failure, run, said
from pydantic import BaseModel

import sglang_lite as sgl
from sglang_lite.lang.backend.capabilities import Capabilities
from sglang_lite.lang.backend.openai import OpenAI
from sglang_lite.lang.concurrency.loop import executor
from sglang_lite.protocol import Message, Prompt, SamplingParams

pytestmark = pytest.mark.usefixtures("either_client")


class City(BaseModel):
    name: str
    people: int | None = None


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("gpt-4o", "max_completion_tokens"),
        ("o4-mini", "max_completion_tokens"),
        ("Qwen/Qwen3-8B", "max_tokens"),
    ],
)
def test_the_limit_has_the_name_that_the_server_knows(api, openai, model, name):
    api.answers = [said("x")]
    ask(openai(model), max_tokens=3)
    assert api.last[name] == 3


def test_a_compatible_servers_own_parameters_are_sent_once_they_are_declared(api, openai):
    api.answers = [said("x")]
    plain = openai("local")
    with pytest.raises(
        sgl.CapabilityError, match=r"Gen\('a'\): OpenAI\('local'\) can't honour top_k"
    ):
        ask(plain, top_k=5)
    own = Capabilities(
        params=frozenset({"top_k", "stop_token_ids"}), continues=False, prefill=False
    )
    ask(openai("local", capabilities=own), top_k=5, stop_token_ids=[1])
    assert (api.last["top_k"], api.last["stop_token_ids"]) == (5, [1])


@pytest.mark.parametrize("either_client", ["sdk"], indirect=True)
def test_azure_is_reached_through_its_own_client(api):
    api.answers = [said("x")]
    backend = OpenAI(
        "my-deployment",
        is_azure=True,
        api_key="azure-key-012345",
        azure_endpoint=api.url,
        api_version="v",
    )
    assert ask(backend) == "x"
    backend.shutdown()
    assert (
        api.requests[0].path == "/openai/deployments/my-deployment/chat/completions?api-version=v"
    )


# ----------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("model", "options", "feature"),
    [
        ("gpt-4o", dict(top_k=3), "top_k"),
        ("gpt-4o", dict(min_tokens=3), "min_tokens"),
        ("gpt-4o", dict(regex="a+"), "a regex"),
        ("gpt-4o", dict(type=int, stop="x"), "stop together with a constraint"),
        ("gpt-4o", dict(json_schema="{}", stop="x"), "stop together with a constraint"),
        ("gpt-4o", dict(stop=list("abcde")), "5 stop strings"),
        ("o1-preview", dict(type=City), "a JSON schema"),
        ("o1-preview", dict(type=bool), "a list of choices"),
        ("o1-preview", dict(type=int), "a regex"),
        ("o4-mini", dict(temperature=0), "temperature"),
        ("o4-mini", dict(stop="x"), "stop"),
        ("o1-mini", dict(type=City), "a JSON schema"),
        ("gpt-5", dict(top_p=0.5), "top_p"),
        ("gpt-5.6-luna", dict(temperature=0), "temperature"),
        ("gpt-6-astra", dict(return_logprob=True), "return_logprob"),
        ("gpt-5.2", dict(presence_penalty=1), "presence_penalty"),
        ("gpt-5", dict(regex="a", seed=1), "seed together with a regex"),
        ("gpt-5", dict(regex="a", n=2), "n together with a regex"),
    ],
)
def test_what_a_model_cannot_do_is_refused_before_any_call(api, openai, model, options, feature):
    with pytest.raises(sgl.CapabilityError) as caught:
        ask(openai(model), **options)
    text = str(caught.value)
    assert f"Gen('a'): OpenAI('{model}') can't honour {feature}" in text
    assert "Leave" in text or "Give at most" in text or "gen(backend=" in text  # what to do instead
    assert text.endswith("program]")  # where
    assert not api.requests


def test_models_without_reasoning_take_what_those_with_it_do_not(api, openai):
    api.answers = [said("x")]
    for model in (
        "gpt-4.1",
        "gpt-5.2",
        "gpt-5-chat-latest",
        "ft:gpt-4o-2024-08-06:me::1",
        "openai/gpt-4o",
    ):
        assert ask(openai(model), temperature=0, return_logprob=True) == "x"


def test_images_and_scores_are_refused_where_there_are_none(api, openai):
    with pytest.raises(sgl.CapabilityError, match="can't honour images"):
        ask(openai("o3-mini"), user=sgl.image(PNG))

    @sgl.function
    def program(s, heat):
        s += sgl.user("Which?")
        s += sgl.assistant(sgl.select("pet", ["dog", "cat"], temperature=heat))

    with pytest.raises(sgl.CapabilityError, match="can't honour the choices' probabilities"):
        program.run(0.5, backend=openai("gpt-5"))
    with pytest.raises(sgl.CapabilityError, match="can't honour select"):
        program.run(0.0, backend=openai("o1-mini"))
    assert not api.requests


def test_a_chat_is_not_asked_to_go_on_with_other_text(api, openai):
    backend = openai()

    def refused(body, message):
        with pytest.raises(sgl.CapabilityError, match=message) as caught:
            sgl.function(body).run(backend=backend)["a"]
        assert caught.value.where is not None

    refused(
        lambda s: s.__iadd__("Once upon" + sgl.gen("a")), "outside an assistant's turn. Write turns"
    )
    refused(lambda s: s.__iadd__(sgl.user(sgl.gen("a"))), "outside an assistant's turn")
    refused(
        lambda s: s.__iadd__(sgl.user("x") + sgl.assistant("It is" + sgl.gen("a"))),
        "already in the assistant's turn: 'It is'",
    )

    def intro(s):
        s += "Some introduction."
        s += sgl.user("x")
        s += sgl.assistant(sgl.gen("a"))

    def between(s):
        s += sgl.user("x")
        s += "An aside."
        s += sgl.assistant(sgl.gen("a"))

    refused(intro, "not see the text outside the turns: 'Someintroduction.'")
    refused(between, "'Anaside.'")
    assert not api.requests


# ------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("reply", "error", "message"),
    [
        (said("", refusal="I can't help."), sgl.RefusalError, "I can't help"),
        (said("Well", finish="content_filter"), sgl.RefusalError, "content filter"),
        (
            said("", finish="length"),
            sgl.BackendError,
            "no text after 5 tokens, which reasoning may have used up",
        ),
        (said(None), sgl.BackendError, "returned no text"),
        (said(), sgl.BackendError, "0 samples arrived instead of 1"),
        (Reply({"object": "chat.completion"}), sgl.BackendError, "0 samples arrived"),
        (
            Reply("<html>hello</html>", headers={"Content-Type": "text/html"}),
            sgl.BackendError,
            "a page of HTML",
        ),
        (Reply("{broken"), sgl.BackendError, "not JSON"),
        (Reply([1]), sgl.BackendError, "0 samples arrived"),
        (Reply({"choices": [1]}), sgl.BackendError, "can't be read"),
        (Reply({"choices": [{}]}), sgl.BackendError, "can't be read"),
    ],
)
def test_an_answer_that_is_none_is_an_error(api, openai, reply, error, message):
    api.answers = [reply]
    with pytest.raises(error, match=message) as caught:
        ask(openai())
    assert caught.value.where is not None


def test_nothing_before_a_stop_string_is_an_answer(api, openai):
    api.answers = [said("")]
    assert ask(openai(), stop="\n") == ""


def test_text_may_be_cut_short_and_values_may_not(api, openai):
    api.answers = [said('{"name": "Par', finish="length")]
    state = run(openai())
    assert state["a"] == '{"name": "Par'
    assert state.get_meta_info("a")["finish_reason"]["type"] == "length"
    for options in (dict(type=City), dict(json_schema=City), dict(type=int)):
        with pytest.raises(
            sgl.ValueValidationError, match=r"cut short after 5 tokens\. Raise max_tokens"
        ) as caught:
            ask(openai(), **options)
        assert caught.value.text == '{"name": "Par'


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
            failure(429, "Slow down"),
            sgl.OverloadedError,
            ["Slow down", "num_threads=", "max_retries="],
        ),
        (failure(429, "Pay", "insufficient_quota"), sgl.BackendError, ["Pay", "quota and billing"]),
        (failure(500, "Oops"), sgl.BackendError, ["Oops", "Try again"]),
        (failure(503, "Busy"), sgl.OverloadedError, ["Busy"]),
        (failure(504, "Late"), sgl.RequestTimeoutError, ["Late", "timeout="]),
        (Reply("plain words", 502, {"x-request-id": "req-7"}), sgl.BackendError, ["plain words"]),
    ],
)
def test_failures_say_what_the_provider_said_and_what_to_do(api, openai, reply, error, parts):
    api.answers = [reply]
    with pytest.raises(error) as caught:
        ask(openai())
    text = str(caught.value)
    for part in ("OpenAI('gpt-4o')", f"HTTP {reply.status}", "request req-7", *parts):
        assert part in text
    assert "secret" not in "".join(traceback.format_exception(caught.value))
    assert isinstance(caught.value, sgl.OverloadedError) == (error is sgl.OverloadedError)


def test_a_key_is_not_shown_with_the_line_end_that_it_was_read_with(openai):
    with pytest.raises(sgl.SglError) as caught:
        ask(openai(api_key="sk-secret-0123456789\n"))
    shown = "".join(traceback.format_exception(caught.value))
    assert "sk-secret" not in shown.replace('api_key="sk-secret-0123456789', "")


def test_failed_requests_are_tried_again(api, openai):
    soon = {"Retry-After": "0.01"}
    api.answers = [
        Drop(),
        failure(429, "Slow down", **soon),
        failure(500, "x", **soon),
        said("done"),
    ]
    assert ask(openai(max_retries=3)) == "done"
    assert len(api.requests) == 4


def test_a_server_that_is_silent_or_gone_is_an_error(api, openai):
    api.answers = [Hold()]
    with pytest.raises(sgl.RequestTimeoutError, match=r"did not answer in time\. Raise timeout="):
        ask(openai(timeout=0.1))
    api.answers = [Drop()]
    with pytest.raises(sgl.BackendError, match=r"the connection failed \(.*Check base_url"):
        ask(openai())


def test_one_failing_program_fails_alone(api, openai):
    def answer(request):
        return failure(400, "no") if "bad" in str(request.body) else said("fine")

    api.answers = answer

    @sgl.function
    def program(s, q):
        s += sgl.user(q)
        s += sgl.assistant(sgl.gen("a"))

    states = program.run_batch(
        [{"q": q} for q in ("one", "bad", "two")], backend=openai(), on_error="return"
    )
    assert [isinstance(s, sgl.BackendError) for s in states] == [False, True, False]
    assert states[2]["a"] == "fine"


def test_a_missing_key_is_told_at_once(monkeypatch):
    for name in ("OPENAI_API_KEY", "OPENAI_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(sgl.ParameterError, match="OPENAI_API_KEY"):
        OpenAI("gpt-4o")


def test_a_backend_that_was_shut_down_connects_again(api, openai):
    api.answers = [said("x")]
    backend = openai()
    assert ask(backend) == "x"
    backend.shutdown()
    assert ask(backend) == "x"


def test_an_event_loop_is_not_given_the_connections_of_another(api, openai):
    api.answers = [said("x")]
    backend = openai()
    prompt = Prompt((), (Message("user", ("Hi",)),), "assistant")

    async def generate():
        async for event in backend.agenerate(prompt, SamplingParams(), None, stream=False):
            assert event.text == "x"
        return backend.client()

    loops = [asyncio.new_event_loop(), asyncio.new_event_loop()]
    clients = [loop.run_until_complete(generate()) for loop in loops]
    for loop, client in zip(loops, clients):
        loop.run_until_complete(client.close())
        loop.close()
    assert clients[0] is not clients[1]


@pytest.mark.parametrize("either_client", ["sdk"], indirect=True)
def test_a_ready_client_is_used_as_it_is_and_left_open(api):
    import openai

    api.answers = [said("x")]
    client = openai.AsyncOpenAI(
        api_key="sk-ready-0123456789", base_url=api.url + "/v1", max_retries=0
    )
    backend = OpenAI("gpt-4o", client=client)
    assert ask(backend) == "x"
    assert api.requests[0].headers["authorization"] == "Bearer sk-ready-0123456789"
    backend.shutdown()
    assert not client.is_closed()
    assert ask(backend) == "x"
    asyncio.run_coroutine_threadsafe(client.close(), executor().loop).result()


@pytest.mark.parametrize("either_client", ["sdk"], indirect=True)
def test_a_ready_client_has_no_arguments_and_is_asynchronous():
    import openai

    with pytest.raises(sgl.ParameterError, match="client: other arguments"):
        OpenAI("gpt-4o", client=openai.AsyncOpenAI(api_key="k"), base_url="http://x")
    with pytest.raises(sgl.ParameterError, match="client: OpenAI is not AsyncOpenAI"):
        OpenAI("gpt-4o", client=openai.OpenAI(api_key="k"))
    with pytest.raises(sgl.ParameterError, match="api: 'grpc' is not one of"):
        OpenAI("gpt-4o", api="grpc", api_key="k")  # type: ignore[arg-type] # what is refused


def test_an_error_names_the_call_that_it_comes_from(api, openai):
    api.answers = [failure(500, "Oops")]
    with pytest.raises(sgl.BackendError) as caught:
        ask(openai())
    origin = caught.value.origin
    assert (origin.provider, origin.model, origin.request_id, origin.node) == (
        "openai",
        "gpt-4o",
        "req-7",
        "a",
    )
    api.answers = [said("", refusal="No.")]
    with pytest.raises(sgl.RefusalError) as refused:
        ask(openai())
    assert refused.value.origin.request_id == "chat-1"
    api.answers = [said('{"name": 1}')]
    with pytest.raises(sgl.ValueValidationError) as wrong:
        ask(openai(), type=City)
    assert (wrong.value.origin.request_id, wrong.value.origin.node) == ("chat-1", "a")
