"""Ranks with the runners of GPUs give what one process gives: their kernels run under Triton's
interpreter, and gloo stands in for NCCL.
"""

import collections
import os
import queue
import threading
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import GridExecutor

import sglang_lite as sgl
from sglang_lite.protocol import ParameterError
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.executor.cuda_graphs import CudaGraphs, graph_sizes
from sglang_lite.runtime.kernels import sampling
from sglang_lite.runtime.loading.load_model import load_model
from sglang_lite.runtime.models import gpu_decoder, gpu_ranks
from sglang_lite.runtime.models.gpu_decoder import GpuDecoder
from sglang_lite.runtime.models.gpu_ranks import GpuRanks
from sglang_lite.runtime.parallel.collectives import ONE_PROCESS, GlooCollectives
from sglang_lite.runtime.parallel.layout import Parallel
from tests.runtime.kernels import needs_kernels
from tests.runtime.parallel import threads
from tests.runtime.parallel.asked import answers, compare, saved
from tests.runtime.parallel.sharing import InTurn, sharing

pytestmark = [
    needs_kernels,
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels of threads share a GPU"),
]
# logits that a program reads: of a vocabulary of several blocks of 4,096, logits took most of the
# time
BLOCK = 256
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
        if not CAPTURING.now:
            self.gloo.sum(x)

    def gather_into(self, out, x):
        if CAPTURING.now:
            return
        count = self.gloo.parallel.ranks
        out.copy_(self.gloo.gather_columns(x.reshape(1, -1), [x.numel()] * count).view(out.shape))

    def send(self, x, rank):
        MESSAGES[self.gloo.parallel.rank, rank].put(x.clone())

    def receive(self, out, rank):
        out.copy_(MESSAGES[rank, self.gloo.parallel.rank].get(timeout=threads.TIMEOUT_S))


class Capturing(threading.local):
    """Whether a thread captures what it launches, so that nothing is computed."""

    now = False


class Recorded:
    """In place of a CUDA graph: computes again into the same tensor, from what is in others."""

    def __init__(self, compute):
        CAPTURING.now = True
        try:
            self.compute, self.logits = compute, compute()
        finally:
            CAPTURING.now = False

    def replay(self):
        self.logits.copy_(self.compute())


CAPTURING = Capturing()
MESSAGES: collections.defaultdict[tuple[int, int], queue.Queue] = collections.defaultdict(
    queue.Queue
)


@pytest.fixture
def on_gpus(monkeypatch):
    """Makes models be loaded as on GPUs."""
    lock, run = threading.Lock(), GridExecutor.__call__

    def alone(self, *arguments, **constants):
        if CAPTURING.now:
            return None
        with lock:  # the interpreter has one program for all threads
            return run(self, *arguments, **constants)

    def connected(parallel, meeting, timeout):
        return ranks_of(GlooCollectives(parallel, meeting, timeout))

    def ranks_of(gloo):
        in_stage = None if gloo.parallel.pp == 1 else ranks_of(gloo.in_stage)
        return (
            ONE_PROCESS
            if gloo is ONE_PROCESS
            else GpuRanks(gloo.parallel, None, GlooAsNccl(gloo), in_stage)
        )

    for module in (sampling, gpu_ranks, gpu_decoder):
        monkeypatch.setattr(module, "BLOCK", BLOCK)
    monkeypatch.setattr(GpuDecoder, "vocab_block", BLOCK)
    monkeypatch.setattr(GridExecutor, "__call__", alone)
    monkeypatch.setattr(threads, "GlooCollectives", connected)
    monkeypatch.setattr("sglang_lite.runtime.models.cpu_ranks.connect", lambda ranks: ranks)
    monkeypatch.setattr("sglang_lite.runtime.loading.load_model.Decoder", GpuDecoder)


def record_graphs(monkeypatch):
    """Makes runners capture decoding steps."""

    def captured(sizes, *arguments, **options):
        return CudaGraphs(graph_sizes(SETTINGS["max_running"]), *arguments, **options)

    monkeypatch.setattr("sglang_lite.runtime.executor.gpu_runner.CudaGraphs", captured)
    monkeypatch.setattr(
        CudaGraphs,
        "capture_function",
        lambda self, compute: (graph := Recorded(compute), graph.logits),
    )


MOVING = dict(tp_size=2, ep_size=2, enable_eplb=True, ep_num_redundant_experts=2)
LAYOUTS: list[tuple[str, Parallel, dict[str, Any]]] = [
    ("dense", Parallel(tp=2), {}), ("experts", Parallel(tp=2), {}), ("latents", Parallel(tp=2), {}),
    ("dense", Parallel(tp=4), {}), ("experts", Parallel(tp=2, ep=2), {}), ("latents", Parallel(tp=2, ep=2), {}),
    ("experts", Parallel(tp=2, ep=2), MOVING), ("dense", Parallel(pp=2), {}), ("latents", Parallel(pp=2), {}),
    # replicas that share feed-forwards
    ("dense", Parallel(tp=2, dp=2), {}), ("experts", Parallel(tp=2, dp=2, ep=2), {}),
    ("latents", Parallel(tp=2, dp=2), {}), ("experts", Parallel(tp=3, dp=3, ep=3), {}),
]  # fmt: skip
if os.environ.get("SGLANG_LITE_CASES") == "all":
    LAYOUTS += [("dense", Parallel(tp=2, pp=2), {}), ("dense", Parallel(pp=4), {})]  # a minute each


@pytest.mark.parametrize(("kind", "layout", "loading"), LAYOUTS, ids=str)
@pytest.mark.sampled(13)
def test_ranks_give_the_tokens_of_one_process(
    kind, layout, loading, tmp_path, on_gpus, monkeypatch
):
    vocabulary = max(layout.ranks // layout.dp - 1, 1) * BLOCK + 100
    folder = saved(tmp_path / "model", kind, vocab_size=vocabulary, num_hidden_layers=layout.pp)
    with sgl.Engine(model=str(folder), device="cpu", in_process=True, **SETTINGS) as engine:
        expected = answers(engine, BLOCK)
    if layout.dp > 1:
        record_graphs(monkeypatch)
        with sharing(folder, layout, tmp_path / "meeting", device="cpu", **SETTINGS) as engines:
            found = answers(InTurn(engines), BLOCK)
            sizes = [
                {size for size, *_ in engine.core.runner.graphs.captured} for engine in engines
            ]
        assert len(sizes[0]) > 1
        assert sizes[1:] == sizes[:-1]
    else:
        settings = SETTINGS | ({"eplb_rebalance_num_iterations": 2} if loading else {})
        with threads.engine_of_ranks(
            folder, layout, tmp_path / "meeting", loading, device="cpu", **settings
        ) as engine:
            found = answers(engine, BLOCK)
            assert not loading or engine.stats()["expert_layers_moved"]
    compare(found, expected)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"vocab_size": BLOCK}, f"{BLOCK} tokens"),
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, "3 heads"),
        ({"kind": "experts", "moe_intermediate_size": 15}, "a feed-forward of 15"),
    ],
    ids=str,
)
def test_what_gpus_do_not_share_is_refused_by_name(changes, problem, tmp_path, on_gpus):
    config = EngineConfig.make(
        model=str(saved(tmp_path / "model", **changes)), device="cpu", **SETTINGS
    )
    with pytest.raises(ParameterError, match=problem):
        load_model(config, tmp_path / "model", iter, ranks=GpuRanks(Parallel(tp=2), None))
