"""Ranks with a GPU each: what they answer, and what is left when one is killed."""

import os
import random
import signal
import subprocess
import sys
import uuid

import pytest
import torch

import sglang_lite as sgl
from sglang_lite.protocol import EngineClosedError, ModelError, SamplingParams
from sglang_lite.runtime.kernels.sampling import BLOCK
from tests.children import send
from tests.engine import processes
from tests.engine.collector import Collector
from tests.runtime.parallel.asked import MODELS, answers, compare, saved

GPUS = torch.cuda.device_count()
KILLS = int(os.environ.get("SGLANG_LITE_KILLS", "1"))
SETTINGS = dict(
    device="cuda", dtype="float32", max_running=8, max_total_tokens=4096, mem_fraction=0.5
)
WIDE = dict(hidden_size=256, intermediate_size=512, num_attention_heads=8)

pytestmark = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
SIZES = [tp for tp in (2, 4, 8) if tp <= max(GPUS, 2)]


def model(folder, kind="dense", **more):
    own = {"dense": {"head_dim": 64}, "experts": {"head_dim": 64, "moe_intermediate_size": 128}}
    own["latents"] = {"num_key_value_heads": 8, "moe_intermediate_size": 128}
    return str(saved(folder, kind, vocab_size=7 * BLOCK + 100, **WIDE | own[kind], **more))


@pytest.mark.parametrize(("kind", "cut"), [
    *((kind, "matrices") for kind in MODELS), ("experts", "experts"), ("latents", "experts"), ("dense", "layers"),
    ("latents", "layers"), ("experts", "rows"), ("latents", "rows"),
])  # fmt: skip
def test_ranks_give_the_tokens_of_one_gpu(kind, cut, tmp_path):
    folder = model(tmp_path / "model", kind, num_hidden_layers=SIZES[-1] if cut == "layers" else 1)
    with sgl.Engine(folder, **SETTINGS) as engine:
        expected = answers(engine)
    for count in SIZES:
        layout = {
            "matrices": {"tp_size": count}, "experts": {"tp_size": count, "ep_size": min(count, 4)},
            "layers": {"pp_size": count},
            "rows": {"tp_size": count, "dp_size": count, "ep_size": min(count, 4), "enable_dp_attention": True},
        }[cut]  # fmt: skip
        with sgl.Engine(folder, **SETTINGS, **layout) as engine:
            compare(answers(engine), expected)


def test_a_killed_rank_fails_all_by_name_and_leaves_no_memory(tmp_path, monkeypatch):
    mark = uuid.uuid4().hex
    monkeypatch.setenv(processes.MARK, mark)
    folder, tp = model(tmp_path / "model"), SIZES[-1]
    free = [torch.cuda.mem_get_info(gpu)[0] for gpu in range(tp)]
    for kill in range(KILLS):
        dice = random.Random(kill)
        with sgl.Engine(folder, **SETTINGS, tp_size=tp) as engine:
            sinks = [Collector() for _ in range(8)]
            for sink in sinks:
                engine.submit(
                    "ab",
                    SamplingParams(temperature=0, max_tokens=200, ignore_eos=True),
                    sink=sink,
                    stream=True,
                )
            sinks[dice.randrange(8)].begun()
            victim, started = dice.randrange(tp), processes.marked(mark)
            send(
                {each["rank"]: each["pid"] for each in engine.stats()["ranks"]}[victim],
                signal.SIGKILL,
            )
            named = "SIGKILL" if victim == 0 else f"rank {victim} of {tp} was ended by SIGKILL"
            for sink in sinks:
                error = sink.end()
                assert isinstance(error, EngineClosedError)
                assert named in str(error)
        # by their ids, as a process that ends has no environment before its memory is free
        for pid in started:
            processes.ended(pid)
        processes.gone(mark)
        left = [free[gpu] - torch.cuda.mem_get_info(gpu)[0] for gpu in range(tp)]
        assert max(left) < 1 << 28, f"{left} bytes are left on the GPUs"


def test_ranks_have_a_pool_that_the_fullest_gpu_has_room_for(tmp_path):
    folder, settings = (
        model(tmp_path / "model"),
        SETTINGS | {"max_total_tokens": None, "tp_size": 2},
    )
    _, total = torch.cuda.mem_get_info(1)
    other = torch.empty(int(0.25 * total), dtype=torch.uint8, device="cuda:1")
    with sgl.Engine(folder, **settings) as engine:
        fewer = engine.stats()["total_tokens"]
    del other
    torch.cuda.empty_cache()
    with sgl.Engine(folder, **settings) as engine:
        assert fewer < engine.stats()["total_tokens"]
    most = torch.empty(int(0.6 * total), dtype=torch.uint8, device="cuda:1")
    with pytest.raises(ModelError, match=r"are taken \(the weights and other programs\)"):
        sgl.Engine(folder, **settings)
    del most


@pytest.mark.skipif(GPUS < 4, reason="needs four GPUs")
def test_two_nodes_of_two_gpus_give_the_tokens_of_one_gpu(tmp_path, address):
    folder = model(tmp_path / "model")
    with sgl.Engine(folder, **SETTINGS) as engine:
        expected = answers(engine)
    nodes = {"tp_size": 4, "nnodes": 2, "dist_init_addr": address}
    flags = {"model": folder, "device": "cuda", "dtype": "float32", "node_rank": 1, **nodes}
    words = [
        word
        for name, value in flags.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    own = {"CUDA_VISIBLE_DEVICES": "2,3"}  # so node 1 has them alone, as a machine of its own would
    agent = subprocess.Popen(
        [sys.executable, "-m", "sglang_lite", "serve", *words], env={**os.environ, **own}
    )
    with sgl.Engine(folder, **SETTINGS, **nodes) as engine:
        compare(answers(engine), expected)
        assert [each["node"] for each in engine.stats()["ranks"]] == [0, 0, 1, 1]
    assert agent.wait(60) == 0
