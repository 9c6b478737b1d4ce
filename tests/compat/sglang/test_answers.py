"""Types of `Engine.generate`, beside what it takes and returns. (lang/test_right_types.py has
calls.)
"""

import inspect

from sglang_lite.compat.sglang.answers import Answer, GenerateFields, MetaInfo, OneSample
from sglang_lite.server.sglang.request import SAMPLING_FIELDS, read_request


def test_type_checkers_know_what_a_request_takes():
    assert {*OneSample.__annotations__} == SAMPLING_FIELDS - {"n"}
    # which Generates names
    told = {"prompt", "sampling_params", "input_ids", "stream", "unsupported"}
    assert {*GenerateFields.__annotations__} == inspect.signature(
        read_request
    ).parameters.keys() - told


def test_answers_have_only_what_type_checkers_know(small_engine):
    options = {
        "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2, "token_ids_logprob": [1],
        "return_confidence": True,
    }  # fmt: skip
    params = {"max_new_tokens": 8, "regex": "[ab]{2,4}"}
    *_, last = small_engine.generate(["ab"], params, **options, stream=True)
    assert last.keys() - Answer.__annotations__.keys() == set()
    assert last["meta_info"].keys() - MetaInfo.__annotations__.keys() == set()
    assert {"output_top_logprobs", "output_allowed_logprobs", "constraint_backend"} < last[
        "meta_info"
    ].keys()
