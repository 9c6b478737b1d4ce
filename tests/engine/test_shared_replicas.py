"""Replicas that share feed-forwards, in processes: their answers, and the end of all with one."""

import signal
from typing import Any

import pytest

import sglang_lite as sgl
from sglang_lite.protocol import EngineClosedError, SamplingParams
from tests.children import send
from tests.engine import processes
from tests.engine.collector import Collector
from tests.runtime.parallel.test_cuts import folder_of
from tests.waiting import until

SETTINGS: dict[str, Any] = dict(
    device="cpu", dtype="float32", max_running=4, max_total_tokens=4096, context_length=256
)
SHARED: dict[str, Any] = dict(dp_size=2, tp_size=2, ep_size=2, enable_dp_attention=True)
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
def test_replicas_that_share_experts_answer_like_one_engine_and_end_together(number, tmp_path):
    folder = folder_of("qwen3-moe", tmp_path / "model")
    prompts = [[5 + i, 9, 17, 3] * (i + 1) for i in range(4)]
    with sgl.Engine(str(folder), **SETTINGS, in_process=True) as whole:
        expected = [whole.complete(prompt, GREEDY).token_ids for prompt in prompts]
    before = processes.children()
    with sgl.Engine(str(folder), **SETTINGS, **SHARED) as engine:
        pids = [pid for pid in processes.children() if pid not in before]
        assert [engine.complete(prompt, GREEDY).token_ids for prompt in prompts] == expected
        assert all(each["requests_submitted"] for each in engine.stats()["replicas"])
        with pytest.raises(
            sgl.CapabilityError, match="update_weights: is not here with tp_size above 1"
        ):
            engine.update_weights(str(folder))
        running = [Collector() for _ in range(4)]
        for sink in running:
            engine.submit(prompts[0], LONG, sink=sink, stream=True)
        running[0].begun()
        send(pids[1], number)
        for sink in running:
            error = sink.end()
            assert isinstance(error, EngineClosedError)
            assert "the process of replica 1 was ended by SIGKILL" in str(error)
        with pytest.raises(EngineClosedError, match="replica 1 was ended"):
            until(lambda: engine.complete("ab", GREEDY).text is None)
    for pid in pids:
        processes.ended(pid)
