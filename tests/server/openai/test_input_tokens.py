"""Tokens of a response's prompt, counted; and what of OpenAI's Responses is not served."""

import openai
import pytest

from tests.server.openai.test_responses import SAID, TIME, WEATHER, ask


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("options", [
    {}, {"instructions": "Be short."}, {"tools": [WEATHER, TIME]}, {"text": {"format": {"type": "text"}}},
])  # fmt: skip
def test_counted_tokens_are_those_that_a_response_has_read(client, options):
    answer = ask(client, **options)
    counted = client.responses.input_tokens.count(model="", input=SAID, **options)
    assert (counted.object, counted.input_tokens) == (
        "response.input_tokens",
        answer.usage.input_tokens,
    )
    options = {**options, "previous_response_id": answer.id}
    counted = client.responses.input_tokens.count(model="", input="more", **options)
    assert counted.input_tokens == ask(client, "more", **options).usage.input_tokens


def test_what_is_not_served_says_so(client):
    with pytest.raises(openai.BadRequestError, match="does not compact"):
        client.responses.compact(model="", input=SAID)
    with pytest.raises(openai.BadRequestError, match="background: is not supported"):
        ask(client, background=True)
    with pytest.raises(openai.BadRequestError, match="conversation: is not supported"):
        client.responses.input_tokens.count(model="", input=SAID, conversation="conv_1")
