"""Ranks with the runners of GPUs give what one process gives: their kernels run under Triton's interpreter, and gloo
stands in for NCCL."""

import threading
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from triton.runtime.interpreter import GridExecutor

import sglang_lite as sgl
from sglang_lite.protocol import ParameterError, Regex, SamplingParams
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.kernels.sampling import BLOCK
from sglang_lite.runtime.loading.load_model import load_model
from sglang_lite.runtime.models.gpu_decoder import GpuDecoder
from sglang_lite.runtime.models.gpu_ranks import GpuRanks
from sglang_lite.runtime.parallel.collectives import GlooCollectives
from sglang_lite.runtime.parallel.layout import Parallel
from tests.runtime.kernels import needs_kernels
from tests.runtime.models.tiny import randomise, save
from tests.runtime.parallel import threads

pytestmark = [needs_kernels, pytest.mark.skipif(torch.cuda.is_available(), reason="kernels of threads share a GPU")]
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_running": 4,
    "page_size": 4,
    "max_total_tokens": 400,
    "step_tokens": 16,
}


class GlooAsNccl:
    """NCCL's operations by gloo."""

    def __init__(self, gloo):
        self.gloo = gloo

    def sum(self, x):
        self.gloo.sum(x)

    def gather(self, out, x):
        count = self.gloo.parallel.tp
        out.copy_(self.gloo.gather(x.reshape(1, -1), [x.numel()] * count).view(out.shape))


@pytest.fixture
def on_gpus(monkeypatch):
    """Makes models be loaded as on GPUs."""
    lock, run = threading.Lock(), GridExecutor.__call__

    def alone(self, *arguments, **constants):
        with lock:  # the interpreter has one program for all threads
            return run(self, *arguments, **constants)

    def connected(parallel, meeting, timeout):
        return GpuRanks(parallel, None, GlooAsNccl(GlooCollectives(parallel, meeting, timeout)))

    monkeypatch.setattr(GridExecutor, "__call__", alone)
    monkeypatch.setattr(threads, "GlooCollectives", connected)
    monkeypatch.setattr("sglang_lite.runtime.loading.load_model.Decoder", GpuDecoder)


def saved(folder, **changes):
    config = Qwen3Config(
        **{
            "vocab_size": BLOCK + 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
            "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None, "tie_word_embeddings": True, **changes,
        }
    )  # fmt: skip
    return save(randomise(Qwen3ForCausalLM(config)), folder)


REQUESTS: list[tuple[dict[str, Any], Any]] = [
    ({}, None),
    ({"temperature": 0.8, "seed": 3}, None),
    ({"temperature": 1.0, "seed": 4, "top_k": 20, "top_p": 0.9}, None),
    ({"temperature": 0.9, "seed": 5, "frequency_penalty": 0.7, "logit_bias": ((7, 2.0),)}, None),
    ({"return_logprob": True, "top_logprobs_num": 3, "logprob_start_len": 2}, None),
    ({"temperature": 1.0, "seed": 6, "ignore_eos": False}, Regex("[a-d]{3,9}")),
]


def answers(engine):
    """Ids and log-probabilities of requests of all kinds, that run together, and of one behind a cached prefix."""
    found = []
    asked = [([5 + i, 9, 4100, 17, 30 + i] * (1 + i % 3), *request) for i, request in enumerate(REQUESTS)]
    for batch in (asked, [(asked[0][0] + [3, 1], *REQUESTS[1])]):
        futures = []
        for prompt, given, constraint in batch:
            futures.append(Future())
            params = SamplingParams(**{"temperature": 0, "max_tokens": 3, "ignore_eos": True, **given})
            engine.submit(prompt, params, constraint, sink=futures[-1].set_result)
        found += [future.result(timeout=120) for future in futures]
    return found


def test_ranks_give_the_tokens_of_one_process(tmp_path, on_gpus):
    folder = saved(tmp_path / "model")
    with sgl.Engine(model=str(folder), device="cpu", in_process=True, **SETTINGS) as engine:
        expected = answers(engine)
    with threads.engine_of_ranks(folder, 2, tmp_path / "meeting", device="cpu", **SETTINGS) as engine:
        found = answers(engine)
    for own, one in zip(found, expected, strict=True):
        assert own.token_ids == one.token_ids
        entries = zip([*own.prompt_logprobs, *own.output_logprobs], [*one.prompt_logprobs, *one.output_logprobs])
        for mine, its in entries:
            assert mine.logprob == pytest.approx(its.logprob, abs=1e-4)
            assert [token for _, token, _ in mine.top] == [token for _, token, _ in its.top]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [({"vocab_size": BLOCK}, f"{BLOCK} tokens"), ({"num_attention_heads": 3, "num_key_value_heads": 3}, "3 heads")],
    ids=str,
)
def test_what_gpus_do_not_share_is_refused_by_name(changes, problem, tmp_path, on_gpus):
    config = EngineConfig.make(model=str(saved(tmp_path / "model", **changes)), device="cpu", **SETTINGS)
    with pytest.raises(ParameterError, match=problem):
        load_model(config, tmp_path / "model", iter, ranks=GpuRanks(Parallel(tp=2), None))
