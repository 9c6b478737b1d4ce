"""Gemini on Vertex AI through Google's own SDK, against a local server that speaks the protocol."""

import asyncio

import pytest
from api_server import Drop, Events, Hold, Reply
from google.genai import Client, types
from google.oauth2.credentials import Credentials
from pydantic import BaseModel

import sglang_lite as sgl
from sglang_lite.lang.backend.vertexai import GenerateContentReader
from sglang_lite.lang.concurrency.loop import executor
from sglang_lite.testing import ServerForTests

PNG = (
    b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00\x00\x01\x00\x00\x00\x01\x08\x00\x00\x00\x00:~\x9bU\x00\x00\x00\n"
    b"IDATx\x9cc\xf8\x0f\x00\x01\x01\x01\x00\x1b\xb6\xeeV\x00\x00\x00\x00IEND\xaeB`\x82"
)


class City(BaseModel):
    name: str
    people: int


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def answer(*parts, finish="STOP", usage=True, **fields):
    """An answer with these parts; a text is one."""
    content = types.Content(
        role="model", parts=[types.Part(text=p) if isinstance(p, str) else p for p in parts]
    )
    reason = None if finish is None else types.FinishReason(finish)
    counts = types.GenerateContentResponseUsageMetadata(
        prompt_token_count=20,
        candidates_token_count=5,
        thoughts_token_count=3,
        cached_content_token_count=8,
    )
    known = dict(
        candidates=[types.Candidate(content=content, finish_reason=reason, index=0)],
        response_id="resp-1", model_version="gemini-x", usage_metadata=counts if usage else None,
    )  # fmt: skip
    said = types.GenerateContentResponse(**{**known, **fields})
    return said.model_dump(mode="json", by_alias=True, exclude_none=True)


def failure(status, message, kind):
    return Reply({"error": {"code": status, "message": message, "status": kind}}, status)


THOUGHT = types.Part(text="Hm.", thought=True)
CALL = types.Part(
    function_call=types.FunctionCall(name="add", args={"a": 1, "b": 2}, id="call-1"),
    thought_signature=b"sig",
)


class GoogleServer(ServerForTests):
    """A server that gives its answers at any address."""

    def answer_request(self, request):
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@pytest.fixture
def api():
    with GoogleServer([], None, None, 0, compatible=False) as server:
        yield server


@pytest.fixture
def gemini(api):
    made = []

    def make(model="gemini-3.8-flash", *, timeout=60_000, **options):
        http = {"base_url": api.url, "timeout": timeout}
        options = {
            "project": "p-1",
            "location": "l-1",
            "credentials": Credentials(token="token-0123456789"),
            **options,
        }
        made.append(sgl.VertexAI(model, http_options=http, **options))
        return made[-1]

    yield make
    for backend in made:
        backend.shutdown()


def run(backend, *, user="Hi", stream=False, **options):
    @sgl.function
    def program(s):
        s += sgl.system("Be brief.")
        s += sgl.user(user)
        s += sgl.assistant(sgl.gen("a", **options))

    return program.run(backend=backend, stream=stream)


def ask(backend, **options):
    return run(backend, **options)["a"]


def test_a_request_carries_the_turns_and_only_what_was_set(api, gemini):
    api.answers = [Reply(answer("Hello"))]
    state = run(gemini())
    assert state["a"] == "Hello"
    assert api.requests[0].path.endswith(
        "/projects/p-1/locations/l-1/publishers/google/models/gemini-3.8-flash:generateContent"
    )
    assert api.last["contents"] == [{"role": "user", "parts": [{"text": "Hi"}]}]
    assert api.last["systemInstruction"]["parts"] == [{"text": "Be brief."}]
    assert not api.last.get("generationConfig")
    assert api.last.keys() <= {"contents", "systemInstruction", "generationConfig"}
    meta = state.get_meta_info("a")
    assert (meta["id"], meta["provider"], meta["reasoning_tokens"]) == ("resp-1", "vertexai", 3)
    assert (meta["prompt_tokens"], meta["cached_tokens"], meta["completion_tokens"]) == (20, 8, 8)


def test_reasoning_tokens_are_part_of_the_usage(api, gemini):
    api.answers = [Reply(answer("Hello"))]
    state = run(gemini())
    assert state["a"] == "Hello"
    assert state.usage().reasoning_tokens == 3


def test_log_probabilities_keep_the_token_id_0():
    chosen = [
        types.LogprobsResultCandidate(token="a", token_id=0, log_probability=-0.5),
        types.LogprobsResultCandidate(token="b", log_probability=-0.7),
    ]
    top = [types.LogprobsResultTopCandidates(candidates=[each]) for each in chosen]
    result = types.LogprobsResult(chosen_candidates=chosen, top_candidates=top)
    reader = GenerateContentReader()
    reader.read_event(
        types.GenerateContentResponse(candidates=[types.Candidate(logprobs_result=result)])
    )
    first, second = reader.samples[0].logprobs
    assert (first.token_id, first.top) == (0, ((-0.5, 0, "a"),))
    assert (second.token_id, second.top) == (-1, ((-0.7, -1, "b"),))


def test_every_parameter_that_was_set_is_sent(api, gemini):
    api.answers = [Reply(answer("Hello"))]
    ask(
        gemini(),
        max_tokens=7,
        stop="\n",
        temperature=0,
        top_p=0.5,
        top_k=3,
        seed=2**40 + 5,
        presence_penalty=0.5,
    )
    assert api.last["generationConfig"] == {
        "maxOutputTokens": 7, "stopSequences": ["\n"], "temperature": 0, "topP": 0.5, "topK": 3, "seed": 5,
        "presencePenalty": 0.5,
    }  # fmt: skip


def test_safety_settings_and_effort_go_with_each_request(api, gemini):
    api.answers = [Reply(answer("Hello"))]
    settings = {"HARM_CATEGORY_HARASSMENT": "BLOCK_NONE"}
    ask(gemini(safety_settings=settings, reasoning_effort="low"))
    assert api.last["safetySettings"] == [
        {"category": "HARM_CATEGORY_HARASSMENT", "threshold": "BLOCK_NONE"}
    ]
    assert api.last["generationConfig"]["thinkingConfig"] == {"thinking_level": "LOW"}


def test_several_turns_and_images(api, gemini):
    api.answers = [Reply(answer("one")), Reply(answer("two"))]

    @sgl.function
    def program(s):
        s += sgl.user(sgl.image(PNG) + "What is it?")
        s += sgl.assistant(sgl.gen("a"))
        s += sgl.user(sgl.image("https://x.test/i.png") + "And this?")
        s += sgl.assistant(sgl.gen("b"))

    assert program.run(backend=gemini())["b"] == "two"
    first, said, second = api.last["contents"]
    assert [turn["role"] for turn in (first, said, second)] == ["user", "model", "user"]
    assert first["parts"][0]["inlineData"]["mime_type"] == "image/png"
    assert said["parts"] == [{"text": "one"}]
    assert second["parts"][0]["fileData"] == {
        "file_uri": "https://x.test/i.png",
        "mime_type": "image/png",
    }


def test_a_schema_is_native(api, gemini):
    api.answers = [Reply(answer('{"name": "Paris", "people": 2}'))]
    assert ask(gemini(), type=City) == City(name="Paris", people=2)
    config = api.last["generationConfig"]
    assert config["responseMimeType"] == "application/json"
    assert config["responseJsonSchema"]["required"] == ["name", "people"]
    api.answers = [Reply(answer('{"value": 42}'))]
    assert ask(gemini(), type=int) == 42


def test_select_names_a_choice(api, gemini):
    api.answers = [Reply(answer('{"value": "cat"}'))]

    @sgl.function
    def program(s):
        s += sgl.user("Which?")
        s += sgl.assistant(sgl.select("pet", ["dog", "cat"]))

    assert program.run(backend=gemini())["pet"] == "cat"


def test_tools_are_the_apis_own_and_a_result_answers_the_call(api, gemini):
    api.answers = [Reply(answer(CALL)), Reply(answer("Three."))]

    @sgl.function
    def program(s):
        s += sgl.user("1 + 2?")
        assert sgl.use_tools(s, [add]) == "Three."

    program.run(backend=gemini()).text()
    (declared,) = api.last["tools"][0]["functionDeclarations"]
    assert (declared["name"], declared["description"]) == ("add", "Adds two numbers.")
    assert api.last["toolConfig"]["functionCallingConfig"]["mode"] == "AUTO"
    _, turn, result = api.last["contents"]
    assert turn["parts"][0]["functionCall"]["args"] == {"a": 1, "b": 2}
    assert turn["parts"][0]["thoughtSignature"] == "c2ln"
    (response,) = result["parts"]
    assert response["functionResponse"]["name"] == "add"
    assert response["functionResponse"]["response"] == {"output": "3"}


def test_a_call_may_be_ruled_out(api, gemini):
    api.answers = [Reply(answer("Three."))]
    assert ask(gemini(), tools=[add], tool_choice="none") == "Three."
    (declared,) = api.last["tools"][0]["functionDeclarations"]
    assert declared["name"] == "add"
    assert api.last["toolConfig"]["functionCallingConfig"]["mode"] == "NONE"


def test_pieces_are_shown_as_they_come(api, gemini):
    pieces = [
        answer(THOUGHT, finish=None, usage=False),
        answer("Hel", finish=None, usage=False),
        answer("lo"),
    ]
    api.answers = [Events(pieces)]
    state = run(gemini(), stream=True, reasoning="deepseek-r1")
    assert list(state.text_iter("a_reasoning_content")) == ["Hm."]
    assert list(state.text_iter("a")) == ["Hel", "lo"]
    assert "alt=sse" in api.requests[0].path


@pytest.mark.parametrize("cut", range(3))
@pytest.mark.parametrize("end", ["drop", "done"])
def test_a_stream_that_is_cut_is_an_error(api, gemini, cut, end):
    pieces = [answer("a", finish=None), answer("b", finish=None), answer("c")]
    api.answers = [Events(pieces[:cut], end=end)]
    with pytest.raises(sgl.BackendError) as caught:
        run(gemini(), stream=True)["a"]
    assert caught.value.origin.provider == "vertexai"
    assert caught.value.origin.node == "a"


@pytest.mark.parametrize(
    ("said", "error", "text"),
    [
        (answer("I", finish="SAFETY"), sgl.RefusalError, "SAFETY"),
        (answer(finish="MAX_TOKENS"), sgl.BackendError, "reasoning may have used up"),
        (answer(finish="MALFORMED_FUNCTION_CALL"), sgl.BackendError, "MALFORMED_FUNCTION_CALL"),
        (answer(candidates=None), sgl.BackendError, "0 samples arrived"),
        (
            answer(
                candidates=None,
                prompt_feedback=types.GenerateContentResponsePromptFeedback(
                    block_reason=types.BlockedReason.SAFETY
                ),
            ),
            sgl.RefusalError,
            "the prompt was blocked",
        ),
    ],
)
def test_an_answer_that_is_none_is_an_error(api, gemini, said, error, text):
    api.answers = [Reply(said)]
    with pytest.raises(error, match=text) as caught:
        ask(gemini())
    assert caught.value.origin.request_id == "resp-1"


def test_a_cut_inside_json_says_so(api, gemini):
    api.answers = [Reply(answer('{"name": "Par', finish="MAX_TOKENS"))]
    with pytest.raises(sgl.ValueValidationError, match="cut short after 8 tokens"):
        ask(gemini(), type=City)


@pytest.mark.parametrize(
    ("reply", "error", "text"),
    [
        (failure(400, "Bad thing", "INVALID_ARGUMENT"), sgl.BackendError, "Bad thing"),
        (failure(403, "No", "PERMISSION_DENIED"), sgl.BackendError, "permissions of the API key"),
        (failure(429, "Slow down", "RESOURCE_EXHAUSTED"), sgl.OverloadedError, "Slow down"),
        (failure(500, "Oops", "INTERNAL"), sgl.BackendError, "Try again"),
        (failure(503, "Busy", "UNAVAILABLE"), sgl.OverloadedError, "Busy"),
        (Reply("<html><title>Bad gateway</title></html>", 502), sgl.BackendError, "VertexAI"),
        (Drop(), sgl.BackendError, "the connection failed"),
    ],
)
def test_failures_say_what_the_provider_said_and_what_to_do(api, gemini, reply, error, text):
    api.answers = [reply]
    with pytest.raises(error, match=text) as caught:
        ask(gemini())
    assert (caught.value.origin.provider, caught.value.origin.node) == ("vertexai", "a")


def test_a_server_that_is_silent_is_an_error(api, gemini):
    api.answers = [Hold()]
    with pytest.raises(sgl.RequestTimeoutError, match="did not answer in time"):
        ask(gemini(timeout=100))


def test_the_project_comes_from_the_environment_or_is_asked_for(monkeypatch):
    for name in ("GCP_PROJECT_ID", "GCP_LOCATION"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(sgl.ParameterError, match="Give project=, or set GCP_PROJECT_ID"):
        sgl.VertexAI("gemini-3.8-flash")
    monkeypatch.setenv("GCP_PROJECT_ID", "p-2")
    monkeypatch.setenv("GCP_LOCATION", "europe-west1")
    backend = sgl.VertexAI("gemini-3.8-flash", credentials=Credentials(token="token-0123456789"))
    assert backend.get_model_name() == "gemini-3.8-flash"


def test_a_ready_client_is_used(api):
    client = Client(
        vertexai=True, project="p-3", location="l-3", credentials=Credentials(token="token-0123456789"),
        http_options={"base_url": api.url},
    )  # fmt: skip
    api.answers = [Reply(answer("x"))]
    assert ask(sgl.VertexAI("gemini-3.8-flash", client=client)) == "x"
    assert "/projects/p-3/" in api.requests[0].path
    with pytest.raises(sgl.ParameterError, match="client: other arguments"):
        sgl.VertexAI("gemini-3.8-flash", client=client, project="x")
    asyncio.run_coroutine_threadsafe(client.aio.aclose(), executor().loop).result()
    client.close()


def test_what_the_api_has_not_is_refused(gemini):
    with pytest.raises(sgl.CapabilityError, match="can't honour min_tokens"):
        ask(gemini(), min_tokens=3)
