"""Crusoe: the compatible backend with its address, its key and what vLLM takes."""

import pytest
from openai_answers import said

import sglang_lite as sgl
from sglang_lite.lang.backend.crusoe import BASE_URL

pytestmark = pytest.mark.usefixtures("either_client")


def ask(backend, **options):
    @sgl.function
    def program(s):
        s += sgl.user("Hi")
        s += sgl.assistant(sgl.gen("a", **options))

    return program.run(backend=backend)["a"]


def test_a_request_is_a_chat_with_its_key_and_what_vllm_takes(api, connected, monkeypatch):
    monkeypatch.setenv("CRUSOE_API_KEY", "crusoe-key-0123456789")
    api.answers = [said("ab")]
    backend = connected(sgl.Crusoe, "zai/GLM-5.2", path="/v1", api_key=None)
    assert ask(backend, regex="[ab]+", top_k=3, max_tokens=9) == "ab"
    assert api.requests[0].path == "/v1/chat/completions"
    assert api.requests[0].headers["authorization"] == "Bearer crusoe-key-0123456789"
    assert (api.last["structured_outputs"], api.last["top_k"], api.last["max_tokens"]) == (
        {"regex": "[ab]+"},
        3,
        9,
    )


def test_its_address_is_the_default(monkeypatch):
    assert BASE_URL in str(sgl.Crusoe("zai/GLM-5.2", api_key="k").identity())
    monkeypatch.delenv("CRUSOE_API_KEY", raising=False)
    with pytest.raises(sgl.ParameterError, match="set CRUSOE_API_KEY"):
        sgl.Crusoe("zai/GLM-5.2")


def test_an_error_names_the_provider(api, connected):
    api.answers = [said("", refusal="No.")]
    with pytest.raises(sgl.RefusalError) as caught:
        ask(connected(sgl.Crusoe, "zai/GLM-5.2", path="/v1"))
    assert (caught.value.origin.provider, caught.value.origin.model) == ("crusoe", "zai/GLM-5.2")
