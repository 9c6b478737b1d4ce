"""Responses through OpenAI's own SDK, against a local server that speaks the protocol."""

import pytest
from api_server import Reply
from openai.types.responses import ResponseOutputMessage, ResponseOutputRefusal
from openai.types.responses.response import IncompleteDetails
from openai.types.responses.response_error import ResponseError
from openai_answers import PNG, ask, called, run

import sglang_lite as sgl
from sglang_lite.lang.backend.remote import RefusalError


def test_a_regex_is_the_grammar_of_a_tool_that_the_model_must_call(api, openai):
    api.answers = [called("AB-12")]
    state = run(openai("gpt-5"), regex=r"[A-Z]{2}-\d+", max_tokens=99, user=sgl.image(PNG) + "What is on it?")
    assert state["a"] == "AB-12"
    assert api.requests[0].path == "/v1/responses"
    (tool,) = api.last["tools"]
    assert tool["format"]["syntax"] == "regex"
    assert tool["format"]["definition"].startswith(r"[A-Z]{2,2}\x{2D}[0-9")
    assert api.last["tool_choice"] == {"type": "custom", "name": "answer"}
    assert (api.last["max_output_tokens"], api.last["parallel_tool_calls"], api.last["store"]) == (99, False, False)
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
        (called(), sgl.BackendError, "0 answers came"),
        (called("12", "34"), sgl.BackendError, "2 answers came"),
        (called(output=[REFUSED]), RefusalError, "I can't"),
        (called(incomplete_details=IncompleteDetails(reason="content_filter")), RefusalError, "content filter"),
        (
            called(incomplete_details=IncompleteDetails(reason="max_output_tokens")),
            sgl.ValueValidationError,
            "cut short after 9 tokens",
        ),
        (called(error=ResponseError(code="server_error", message="went wrong")), sgl.BackendError, "went wrong"),
        (Reply("[]"), sgl.BackendError, "0 answers came"),
    ],
)
def test_a_grammars_answer_is_never_a_wrong_value(api, openai, reply, error, message):
    api.answers = [reply]
    with pytest.raises(error, match=message):
        ask(openai("gpt-5"), regex="[0-9]{2}")


def test_a_regexs_answer_comes_whole(api, openai):
    api.answers = [called("ab")]
    assert list(run(openai("gpt-5"), stream=True, regex="[ab]+").text_iter("a")) == ["ab"]
