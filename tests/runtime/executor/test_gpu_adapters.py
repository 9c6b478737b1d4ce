"""The GPU's runner gives peft's logits: adapters mixed in a batch, loaded and evicted between
requests. With a GPU, on it; without one, on the CPU under Triton's interpreter.
"""

import pytest
import torch

from sglang_lite.runtime.executor.cuda_graphs import CudaGraphs, graph_sizes
from sglang_lite.runtime.executor.gpu_adapters import GpuAdapters, pool_bytes
from sglang_lite.runtime.models.gpu_decoder import GpuDecoder
from sglang_lite.runtime.models.lora.adapter import AdapterReader
from sglang_lite.runtime.models.lora.pool import AdapterPool, PoolSize
from tests.runtime.executor.test_gpu_runner import Again
from tests.runtime.kernels import needs_kernels
from tests.runtime.models.test_families import engine, prompts
from tests.runtime.models.test_lora import LATE, adapted, ask, farthest

# that peft reads
pytestmark = [needs_kernels, pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")]
GPU = torch.cuda.is_available()
RANKS = {"one": 4, "two": 12, "three": 8}


@pytest.fixture
def on_gpu(monkeypatch):
    """Runs models by kernels, and decoding steps as graphs, without a GPU, too."""
    if not GPU:
        monkeypatch.setattr("sglang_lite.runtime.loading.load_model.Decoder", GpuDecoder)
        monkeypatch.setattr(
            CudaGraphs,
            "capture_function",
            lambda self, compute: (graph := Again(compute), graph.logits),
        )


def paths_of(reference):
    return [f"{name}={folder}" for name, folder in reference.folders.items()]


@pytest.mark.sampled(20)
@pytest.mark.parametrize(
    "family",
    [
        "llama-biases",
        "qwen3",
        "gemma2",
        "phi3",
        "olmo2",
        "glm4",
        "stablelm-parallel",
        "nemotron",
        "gpt-neox",
        "cohere",
        "lfm2",
        "qwen3.5",
    ],
)
def test_rows_of_all_adapters_and_none_in_one_batch(family, tmp_path, on_gpu):
    base, reference = adapted(family, tmp_path, {name: {"r": rank} for name, rank in RANKS.items()})
    settings = {"page_size": 4, "max_total_tokens": 1000, "step_tokens": 6, "threads": 1}
    with engine(base, lora_paths=paths_of(reference), max_loras_per_batch=2, **settings) as running:
        asked = [*zip(prompts(5, 2, 4, 3), [*RANKS, None])]  # three adapters in two places
        for future, ids, name in [
            (ask(running, ids, name, most=2), ids, name) for ids, name in asked
        ]:
            assert farthest(reference, ids, name, future.result(timeout=300)) <= 1e-4, name


def test_late_adapters_compute_tokens_from_their_invocation_on(tmp_path, on_gpu):
    base, reference = adapted("qwen2", tmp_path, {"late": LATE, "whole": {"r": 4}})
    settings = {"page_size": 4, "max_total_tokens": 400, "threads": 1, "max_running": 3}
    ids = [5, 6, 8, 7, 11, 9]  # two chunks, the second of which the adapter computes
    with engine(base, lora_paths=paths_of(reference), **settings) as running:
        for future, name in [
            (ask(running, ids, name, most=2), name) for name in ("late", "whole", None)
        ]:
            assert farthest(reference, ids, name, future.result(timeout=300)) <= 1e-4, name


@pytest.mark.sampled(1)
def test_captured_steps_serve_rows_with_adapters_of_their_own_and_without(
    tmp_path, on_gpu, monkeypatch
):
    monkeypatch.setattr("sglang_lite.runtime.kernels.lora_own.MIN_ADAPTERS", 2)
    base, reference = adapted("qwen2", tmp_path, {"one": {"r": 8}, "two": {"r": 12}})
    settings = {
        "page_size": 4,
        "max_total_tokens": 400,
        "threads": 1,
        "max_running": 2,
        "attention_backend": "triton",
    }
    with engine(base, lora_paths=paths_of(reference), **settings) as running:
        if not GPU:
            running.core.runner.graphs.sizes = graph_sizes(2)
        (ids,) = prompts(5)
        for names in ((None, None), ("one", None), ("one", "two")):
            futures = [(ask(running, ids, name, most=3), name) for name in names]
            for future, name in futures:
                assert farthest(reference, ids, name, future.result(timeout=300)) <= 1e-4, name
        assert {key[3] for key in running.core.runner.graphs.captured} == {0, 1, 2}


def test_pages_have_each_number_of_an_adapter_once_and_again_when_their_memory_was_lost(tmp_path):
    base, reference = adapted(
        "qwen2", tmp_path, {"one": {"r": 20, "target_modules": ["q_proj", "down_proj"]}}
    )
    with engine(base, lora_paths=paths_of(reference)) as running:
        spec = running.core.runner.model.spec
    size, made = PoolSize(3, 12, 4), list[torch.Tensor]()
    memory = GpuAdapters(
        spec,
        size,
        torch.float32,
        torch.device("cpu"),
        lambda shape, _: made.append(torch.zeros(shape)) or made[0],
    )
    adapter, packed = (
        reader.read_adapter("one", reader.open(reference.folders["one"]))
        for room in (lambda rank: None, memory.allocate_adapter_buffer)
        for reader in [AdapterReader(spec, "base", torch.float32, 32, room)]
    )
    assert packed.pages.nbytes == pool_bytes(spec, 3, torch.float32) == packed.bytes
    pool = AdapterPool(memory, size, 3, "lru")
    slot = pool.assign(packed, ())
    step = memory.build_lora_step(torch.zeros(1, dtype=torch.int32))
    assert step.ranks.tolist() == [24 * (i == slot) for i in range(3)]
    before = made[0].clone()
    made[0].fill_(0.0)
    pool.rewrite_all_slots()
    assert torch.equal(made[0], before)
    assert pool.writes == 1
    for weights, deltas in zip(step.layers, adapter.layers):
        for name, own in weights.items():
            pages = step.pages[slot].long()[:3]
            a, b = own.a[pages].transpose(0, 1).flatten(1, 2), own.b[pages].flatten(0, 1)
            if name in deltas:
                assert torch.equal(a, deltas[name].a)
                assert torch.equal(b, deltas[name].b)
            else:
                assert not a.any()
                assert not b.any()
