"""Settings whose effect only a GPU shows: each test fails while its setting is hidden."""

import subprocess

import pytest
import torch
from transformers import LlamaConfig

import sglang_lite as sgl
from sglang_lite.errors import SglError
from sglang_lite.runtime.models import weight_memory

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

GIB = 1 << 30
LAYER_BYTES = 4 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 8192)  # 544 MiB of float32


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Function that starts an engine on a model of five large layers without weights in files."""
    folder = tmp_path_factory.mktemp("large")
    LlamaConfig(
        vocab_size=96,
        hidden_size=4096,
        intermediate_size=8192,
        num_hidden_layers=5,
        num_attention_heads=32,
        num_key_value_heads=8,
        bos_token_id=0,
        eos_token_id=1,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)

    def make(**settings):
        return sgl.Engine(
            **{
                "model": str(folder),
                "load_format": "dummy",
                "skip_tokenizer_init": True,
                "dtype": "float32",
                "max_total_tokens": 4096,
                "max_running": 4,
                "step_tokens": 256,
                "in_process": True,
                **settings,
            }
        )

    return make


def memory_of(engine):
    """Returns the bytes that torch has on the GPU after an answer, then closes the engine."""
    with engine:
        engine.generate(
            input_ids=[5, 6, 7], sampling_params={"max_new_tokens": 4, "ignore_eos": True}
        )
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()


def replays_of(engine, monkeypatch):
    """Returns how many captured graphs an answer of eight tokens replays."""
    count = [0]
    replay = torch.cuda.CUDAGraph.replay

    def counted(graph):
        count[0] += 1
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted)
    with engine:
        engine.generate(
            input_ids=[5, 6, 7], sampling_params={"max_new_tokens": 8, "ignore_eos": True}
        )
    monkeypatch.undo()
    return count[0]


def test_steps_replay_graphs_only_if_they_are_captured(start, monkeypatch):
    assert replays_of(start(), monkeypatch) >= 7
    assert replays_of(start(cuda_graphs=False), monkeypatch) == 0


def test_offloaded_layers_leave_the_gpu_and_groups_take_a_place_each(start):
    whole = memory_of(start())
    single = memory_of(start(cpu_offload_gb=2))
    pairs = memory_of(start(cpu_offload_gb=2, offload_group_size=2))
    # Four of five layers are on the host; two places of one layer, or of two, stay.
    assert whole - single > 1.5 * LAYER_BYTES
    assert pairs - single > 0.5 * LAYER_BYTES


def test_the_pool_takes_a_share_of_the_gpu(start):
    def pool_tokens(fraction):
        with start(max_total_tokens=None, mem_fraction=fraction) as engine:
            return engine.stats()["total_tokens"]

    free, total = torch.cuda.mem_get_info()
    fraction = 1 - free / total + 6 * GIB / total
    more = pool_tokens(fraction + 4 * GIB / total)
    token_bytes = 2 * 5 * 8 * 128 * 4
    assert more - pool_tokens(fraction) == pytest.approx(4 * GIB / token_bytes, rel=0.1)


def test_no_process_compiles_kernels_if_none_is_wanted(start, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    commands = []
    popen = subprocess.Popen

    def noted(command, *args, **kwargs):
        commands.append(str(command))
        return popen(command, *args, **kwargs)

    monkeypatch.setattr(subprocess, "Popen", noted)
    start(compile_processes=0).close()
    assert not [each for each in commands if "compile_ahead" in each]


def test_weights_are_given_back_only_by_an_engine_that_may(start):
    with start() as engine, pytest.raises(SglError, match="enable_memory_saver"):
        engine.release_memory_occupation()
    with start(enable_memory_saver=True) as engine:
        before, _ = torch.cuda.mem_get_info()
        engine.release_memory_occupation()
        after, _ = torch.cuda.mem_get_info()
        assert after - before > 4 * LAYER_BYTES
        engine.resume_memory_occupation()


def test_a_backup_is_allocated_before_the_first_sleep(start, monkeypatch):
    sizes = []
    pin_memory = weight_memory.pin_memory

    def noted(size):
        sizes.append(size)
        return pin_memory(size)

    monkeypatch.setattr(weight_memory, "pin_memory", noted)
    start(enable_memory_saver=True).close()
    assert sizes == []
    start(enable_memory_saver=True, enable_weights_cpu_backup=True).close()
    assert sum(sizes) > 5 * LAYER_BYTES
