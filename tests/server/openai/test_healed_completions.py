"""Completions of healed prompts."""

import json

import httpx2
import pytest

from tests.server.conftest import serving


@pytest.fixture(scope="module")
def url(small_engine):
    with serving(small_engine) as url:
        yield url


def complete(url, **options):
    body = {"prompt": "The river ru", "heal": True, "max_tokens": 3} | options
    answer = httpx2.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.text


def test_offsets_count_what_the_prompts_last_token_has_begun(url):
    for seed in range(8):
        asked = {"logprobs": 1, "seed": seed}
        (choice,) = json.loads(complete(url, return_meta_info=True, **asked))["choices"]
        begun = choice["meta_info"]["healed"]["begun"]
        offsets = choice["logprobs"]["text_offset"]
        tokens = choice["logprobs"]["tokens"]
        assert offsets[0] == len(begun)
        assert begun + "".join(tokens) == choice["text"]
        lines = complete(url, stream=True, **asked).split("\n\n")
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        told = [each["choices"][0]["logprobs"] for each in chunks if each["choices"]]
        assert [at for each in told if each for at in each["text_offset"]] == offsets


def test_logprobs_of_a_healed_prompt_are_refused(url):
    body = {"prompt": "The ri", "heal": True, "echo": True, "logprobs": 1}
    answer = httpx2.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 400
    assert "heal: can't be combined with log-probabilities of the prompt" in answer.text
