"""SGLang's adapter: a server with the methods of an engine, at its module path."""

from typing import Any

import pytest

import sglang_lite as sgl
from sglang_lite.srt.entrypoints.http_server_engine import HttpServerEngineAdapter
from tests.runtime.models.test_new_weights import GREEDY, Q, pair, tensors_of


def test_a_server_is_used_like_an_engine(tmp_path):
    old, new = pair("llama-biases", tmp_path)
    engine = HttpServerEngineAdapter(model_path=str(old), dtype="float32", max_running_requests=4)
    try:
        first = engine.generate("abc", GREEDY)["output_ids"]
        assert [each["output_ids"] for each in engine.generate(["abc"] * 2, GREEDY)] == [first] * 2
        tensors = list(tensors_of(new).items())
        assert engine.update_weights_from_tensor(tensors[:3])["success"]
        with pytest.raises(sgl.SglError, match="weights incomplete"):
            engine.generate("abc", GREEDY)
        engine.update_weights_from_tensor(tensors[3:], flush_cache=True)
        second = engine.generate("abc", GREEDY)["output_ids"]
        engine.release_memory_occupation()
        engine.resume_memory_occupation(["weights"])
        engine.resume_memory_occupation(["kv_cache"])
        engine.flush_cache()
        assert engine.generate("abc", GREEDY)["output_ids"] == second != first
        with pytest.raises(sgl.SglError, match="no place for x"):
            engine.update_weights_from_tensor({"x": tensors_of(new)[Q]})
        with pytest.raises(sgl.ParameterError, match="load_format: 'direct' is not for a server"):
            engine.update_weights_from_tensor({}, "direct")
    finally:
        engine.shutdown()
        engine.shutdown()
    with sgl.Engine(str(new), dtype="float32", max_running=4, in_process=True) as other:
        answer: Any = other.generate("abc", GREEDY)
        assert answer["output_ids"] == second
