"""Responses through OpenAI's own SDK, against a local server that speaks the protocol."""

import pytest
from api_server import Events, Reply
from openai.types.responses import ResponseOutputMessage, ResponseOutputRefusal
from openai.types.responses.response import IncompleteDetails
from openai.types.responses.response_error import ResponseError
from openai_answers import (
    PNG,
    THOUGHT,
    ask,
    called,
    function_call,
    message,
    responded,
    response,
    run,
)
from pydantic import BaseModel

import sglang_lite as sgl

pytestmark = pytest.mark.usefixtures("either_client")


def test_a_regex_is_the_grammar_of_a_tool_that_the_model_must_call(api, openai):
    api.answers = [called("AB-12")]
    state = run(
        openai("gpt-5"),
        regex=r"[A-Z]{2}-\d+",
        max_tokens=99,
        user=sgl.image(PNG) + "What is on it?",
    )
    assert state["a"] == "AB-12"
    assert api.requests[0].path == "/v1/responses"
    (tool,) = api.last["tools"]
    assert tool["format"]["syntax"] == "regex"
    assert tool["format"]["definition"].startswith(r"[A-Z]{2,2}\x{2D}[0-9")
    assert api.last["tool_choice"] == {"type": "custom", "name": "answer"}
    assert (api.last["max_output_tokens"], api.last["parallel_tool_calls"], api.last["store"]) == (
        99,
        False,
        False,
    )
    system, user = api.last["input"]
    assert system == {"role": "system", "content": "Be brief."}
    assert [part["type"] for part in user["content"]] == ["input_image", "input_text"]
    meta = state.get_meta_info("a")
    assert (meta["prompt_tokens"], meta["cached_tokens"], meta["completion_tokens"]) == (20, 8, 9)
    assert meta["reasoning_tokens"] == 6


REFUSED = ResponseOutputMessage(
    id="m",
    role="assistant",
    status="completed",
    type="message",
    content=[ResponseOutputRefusal(refusal="I can't.", type="refusal")],
)


@pytest.mark.parametrize(
    ("reply", "error", "message"),
    [
        (called("nonsense"), sgl.ValueValidationError, "is not what Regex"),
        (called(), sgl.BackendError, "0 samples arrived"),
        (called("12", "34"), sgl.BackendError, r"answered 2 times instead of once, .*\. Try again"),
        (called(output=[REFUSED]), sgl.RefusalError, "I can't"),
        (
            called(incomplete_details=IncompleteDetails(reason="content_filter")),
            sgl.RefusalError,
            "content filter",
        ),
        (
            called(incomplete_details=IncompleteDetails(reason="max_output_tokens")),
            sgl.ValueValidationError,
            "cut short after 9 tokens",
        ),
        (
            called(error=ResponseError(code="server_error", message="went wrong")),
            sgl.BackendError,
            "went wrong",
        ),
        (Reply("[]"), sgl.BackendError, "0 samples arrived"),
    ],
)
def test_a_grammars_answer_is_never_a_wrong_value(api, openai, reply, error, message):
    api.answers = [reply]
    with pytest.raises(error, match=message):
        ask(openai("gpt-5"), regex="[0-9]{2}")


def test_a_regexs_answer_comes_whole(api, openai):
    api.answers = [called("ab")]
    assert list(run(openai("gpt-5"), stream=True, regex="[ab]+").text_iter("a")) == ["ab"]


# ------------------------------------------------------------------------------------ the whole API


class City(BaseModel):
    name: str
    people: int


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@pytest.fixture
def thinker(openai):
    return lambda **options: openai("gpt-5", api="responses", **options)


def test_a_request_carries_the_turns_and_only_what_was_set(api, thinker):
    api.answers = [Reply(response(message("Hello")))]
    assert ask(thinker()) == "Hello"
    assert api.requests[0].path == "/v1/responses"
    assert api.last == {
        "model": "gpt-5",
        "input": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        "store": False,
        "include": ["reasoning.encrypted_content"],
    }
    ask(thinker(reasoning_effort="low"), max_tokens=9)
    assert (api.last["max_output_tokens"], api.last["reasoning"]) == (9, {"effort": "low"})


def test_every_parameter_that_was_set_is_sent(api, openai):
    api.answers = [Reply(response(message("Hello")))]
    options = dict(temperature=0, top_p=0.5, return_logprob=True, top_logprobs_num=2)
    ask(openai("gpt-4.1", api="responses"), **options)
    assert (api.last["temperature"], api.last["top_p"], api.last["top_logprobs"]) == (0, 0.5, 2)
    assert api.last["include"] == ["message.output_text.logprobs"]


def test_a_schema_is_native_and_strict(api, thinker):
    api.answers = [Reply(response(message('{"name": "Paris", "people": 2}')))]
    assert ask(thinker(), type=City) == City(name="Paris", people=2)
    asked = api.last["text"]["format"]
    assert (asked["type"], asked["name"], asked["strict"]) == ("json_schema", "answer", True)
    assert asked["schema"]["required"] == ["name", "people"]


def test_what_was_thought_is_given_back_in_later_turns_of_its_program_alone(api, thinker):
    api.answers = lambda request: Reply(
        response(THOUGHT, message(f"said {len(request.body['input'])}"))
    )
    backend = thinker()

    @sgl.function
    def program(s, topic):
        for name in ("a", "b"):
            s += sgl.user(f"{topic}: ask {name}")
            s += sgl.assistant(sgl.gen(name))

    program.run("x", backend=backend).text()
    user, thought, answer, again = api.last["input"]
    assert (user["content"], again["content"]) == ("x: ask a", "x: ask b")
    assert (thought["type"], thought["encrypted_content"]) == ("reasoning", "c2VjcmV0")
    assert (answer["type"], answer["content"][0]["text"]) == ("message", "said 1")

    @sgl.function
    def other(s):
        s += sgl.user("y: ask a")
        s += sgl.assistant("said 1")
        s += sgl.user("y: ask b")
        s += sgl.assistant(sgl.gen("b"))

    other.run(backend=backend).text()
    assert api.last["input"][1] == {"role": "assistant", "content": "said 1"}


def test_forks_are_given_back_what_each_of_them_has_thought(api, thinker):
    def answer(request):
        last = request.body["input"][-1]["content"]
        thought = THOUGHT.model_copy(update={"encrypted_content": f"of {last}"})
        return Reply(response(thought, message(f"to {last}")))

    api.answers = answer

    @sgl.function
    def program(s):
        s += sgl.user("start")
        s += sgl.assistant(sgl.gen("a"))
        forks = s.fork(3)
        for i, fork in enumerate(forks):
            for name in "bc":
                fork += sgl.user(f"{name}{i}")
                fork += sgl.assistant(sgl.gen(name))
        assert len([fork["c"] for fork in forks]) == 3

    program.run(backend=thinker()).text()
    ends = [
        r.body["input"] for r in api.requests if str(r.body["input"][-1]["content"]).startswith("c")
    ]
    assert len(ends) == 3
    for items in ends:
        i = items[-1]["content"][1]
        assert [item["encrypted_content"] for item in items if item.get("type") == "reasoning"] == [
            "of start",
            f"of b{i}",
        ]


def test_tools_are_the_apis_own_and_a_result_answers_the_call(api, thinker):
    api.answers = [
        Reply(response(THOUGHT, function_call("add", '{"a": 1, "b": 2}'))),
        Reply(response(message("Three."))),
    ]

    @sgl.function
    def program(s):
        s += sgl.user("1 + 2?")
        assert sgl.use_tools(s, [add]) == "Three."

    program.run(backend=thinker())
    (tool,) = api.last["tools"]
    assert (tool["type"], tool["name"], tool["strict"]) == ("function", "add", True)
    assert (api.last["tool_choice"], api.last["parallel_tool_calls"]) == ("auto", False)
    _, thought, call, result = api.last["input"]
    assert (thought["type"], call["type"], call["call_id"]) == (
        "reasoning",
        "function_call",
        "call-1",
    )
    assert result == {"type": "function_call_output", "call_id": "call-1", "output": "3"}


def test_pieces_are_shown_as_they_come(api, thinker):
    api.answers = [Events(responded("Hel", "lo"))]
    state = run(thinker(), stream=True, reasoning="deepseek-r1")
    assert list(state.text_iter("a_reasoning_content")) == ["Hm."]
    assert list(state.text_iter("a")) == ["Hel", "lo"]
    meta = state.get_meta_info("a")
    assert (meta["id"], meta["provider"], meta["reasoning_tokens"]) == ("resp-1", "openai", 6)
    assert (meta["prompt_tokens"], meta["cached_tokens"], meta["completion_tokens"]) == (20, 8, 9)


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        (
            response(status="failed", error=ResponseError(code="server_error", message="Oops")),
            sgl.BackendError,
            "Oops",
        ),
        (
            response(
                message("Well"), incomplete_details=IncompleteDetails(reason="content_filter")
            ),
            sgl.RefusalError,
            "filter",
        ),
        (response(REFUSED), sgl.RefusalError, "I can't"),
        (
            response(THOUGHT, incomplete_details=IncompleteDetails(reason="max_output_tokens")),
            sgl.BackendError,
            "reasoning",
        ),
        (response(THOUGHT), sgl.BackendError, "no text"),
        (response(), sgl.BackendError, "0 samples arrived"),
    ],
)
def test_an_answer_that_is_none_is_an_error(api, thinker, answer, error, text):
    api.answers = [Reply(answer)]
    with pytest.raises(error, match=text) as caught:
        ask(thinker())
    assert caught.value.origin.request_id == "resp-1"


def test_a_cut_inside_json_says_so(api, thinker):
    api.answers = [
        Reply(
            response(
                message('{"name": "Par'),
                incomplete_details=IncompleteDetails(reason="max_output_tokens"),
            )
        )
    ]
    assert run(thinker()).get_meta_info("a")["finish_reason"]["type"] == "length"
    with pytest.raises(
        sgl.ValueValidationError, match=r"cut short after 9 tokens\. Raise max_tokens"
    ):
        ask(thinker(), type=City)


@pytest.mark.parametrize("name", ["n", "seed", "stop", "presence_penalty"])
def test_what_the_api_has_not_is_refused(openai, name):
    with pytest.raises(sgl.CapabilityError, match=f"can't honour {name}"):
        ask(openai("gpt-4.1", api="responses"), **{name: "x" if name == "stop" else 2})
