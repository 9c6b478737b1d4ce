"""Continued outputs in a process of its own as in this one."""

import json

import pytest

import sglang_lite as sgl
from tests.engine import processors

SCHEMA = json.dumps({"enum": ["abcdxyzabcd", "abcexyzabcd", 12345]})  # the tokenizer has no blank
BASE = {"sampling_seed": 3, "temperature": 1.0, "max_new_tokens": 40}
CASES = {
    "plain": BASE | {"ignore_eos": True},
    "stops": BASE | {"stop": ["ab", "c"], "stop_regex": ["[d-g]{3}"], "ignore_eos": True},
    "penalties": BASE | {"frequency_penalty": 1.1, "repetition_penalty": 1.2, "min_new_tokens": 8},
    "schema": BASE | {"json_schema": SCHEMA},
    "regex": BASE | {"regex": "[a-c]{3}and[a-z]{5,20}"},
}  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("form", ["own", "here"])
@pytest.mark.parametrize("case", CASES)
def test_a_stream_that_is_cut_continues(form, case, request):
    engine = request.getfixturevalue(form)
    asked = {"prompt": "Say abc", "sampling_params": CASES[case], "return_logprob": case == "stops"}
    pieces = [answer["output_ids"] for answer in engine.generate(**asked, stream=True)]
    whole = engine.generate(**asked)
    assert pieces[-1] == whole["output_ids"]
    assert len(pieces[-1]) > 3
    for ids in (*pieces[:: max(len(pieces) // 4, 1)], pieces[-1][:3]):
        again = engine.generate(**asked, output_ids=ids)
        assert (again["text"], again["output_ids"]) == (whole["text"], whole["output_ids"])
        for name in ("finish_reason", "completion_tokens", "prompt_tokens"):
            assert again["meta_info"][name] == whole["meta_info"][name]
        logprobs = again["meta_info"].get("output_token_logprobs", [])
        assert logprobs == whole["meta_info"].get("output_token_logprobs", [])[len(ids) :]
        *_, last = engine.generate(**asked, output_ids=ids, stream=True)
        assert last["text"] == whole["text"]


def test_a_processor_sees_what_was_given(own, here):
    for engine in (own, here):
        answer = engine.generate(
            "ab",
            {"max_new_tokens": 5},
            output_ids=[40, 41],
            custom_logit_processor=processors.only_e,
        )
        assert answer["output_ids"][:2] == [40, 41]
        assert answer["text"][2:] == "EEE"


@pytest.mark.parametrize(
    ("sampling", "ids", "said"),
    [
        ({}, [1, 96], "output_ids: 96 is no token id"),
        ({"max_new_tokens": 2}, [5, 5, 5], "output_ids: 3 ids; the output has at most 2"),
        ({"n": 2}, [5], "output_ids: can continue one output only, and n is 2"),
        ({"regex": "a+"}, [64, 64, 65], "output_ids: 65 at index 2 can't be"),
        ({"stop": "a"}, [64, 65], "output_ids: the output ends with index 0"),
        ({}, {"5": 5}, "output_ids: dict is no list of token ids"),
    ],
)
def test_ids_of_no_output_are_refused_alike(own, here, sampling, ids, said):
    told = []
    for engine in (own, here):
        with pytest.raises(sgl.ParameterError) as caught:
            engine.generate("ab", BASE | sampling, output_ids=ids)
        told.append(str(caught.value))
    assert told[0] == told[1]
    assert told[0].startswith(said)
