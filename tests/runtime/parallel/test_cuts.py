"""A model that is cut over ranks gives what the whole one gives."""

import json
import os
from concurrent.futures import Future
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config

from sglang_lite.protocol import ModelError, ParameterError, SamplingParams
from sglang_lite.runtime.loading.save import save_sharded
from sglang_lite.runtime.models.read_config import spec_from_config
from sglang_lite.runtime.models.sharding import rank_spec
from sglang_lite.runtime.parallel.layout import Parallel
from tests.runtime.models import packings, small_gguf, test_fp8
from tests.runtime.models.test_families import FAMILIES, SHAPE, ask, engine, prompts
from tests.runtime.models.tiny import randomise, save
from tests.runtime.parallel.threads import engine_of_ranks

UNLIKE_WINDOWS = {
    "qwen2-window",
    "smollm3",
    "cohere2-moe",
    "lfm3",
    "lfm3-plain",
    "recurrent-gemma",
    "recurrent-gemma-wide",
    "lara-mini",
    "minimax-window",
    "inkling-heads",
}  # in the layers of two stages
LINKED = dict.fromkeys(
    (
        "gemma4-e4b",
        "gemma4-inputs",
        "zamba",
        "zamba-biases",
        "zamba2",
        "zamba2-biases",
        "zaya",
        "zaya-windows",
        "inkling2",
        "inkling2-full",
        "inkling2-loop",
        "inkling2-loop-blocks",
    ),
    "layers read keys of other stages' layers",
)
UNSHARED = {
    **dict.fromkeys(
        ("zaya", "zaya-windows", *(name for name in FAMILIES if name.startswith("inkling"))),
        "attention with convolutions",
    ),
    **dict.fromkeys(("rwkv", "rwkv-plain"), "time mixing"),
}
EXPERTS = [
    "mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "granite-moe", "gpt-oss", "glm4-moe", "deepseek-v2", "deepseek-v3",
    "glm4-moe-lite", "ernie4.5-moe", "afmoe", "phimoe", "lfm2-moe", "llama4",
    "granite-hybrid", "nemotron-h-moe", "jamba", "kimi-linear", "gemma4-moe", "minimax", "lara-mini",
    "bailing-hybrid",
]  # fmt: skip


def folder_of(name, where, **more):
    model, changes = FAMILIES[name]
    if isinstance(model, str):
        model = getattr(transformers, model, None) or pytest.skip(
            f"transformers {transformers.__version__} has none"
        )
    return save(randomise(model(model.config_class(**SHAPE | changes | more))), where)


def answers(running):
    """Log-probabilities of the whole vocabulary, of prompts and answers: of requests that run
    together, and of one that begins with what is in the cache.
    """
    batch = prompts(50, 33, 4)
    found = [each.result() for each in [ask(running, ids) for ids in batch]]
    found.append(ask(running, [*batch[0], 3, 1, 4], prompt=False).result())
    entries = [entry for each in found for entry in (*each.prompt_logprobs, *each.output_logprobs)]
    return torch.tensor(
        [[value for value, _, _ in sorted(entry.top, key=lambda top: top[1])] for entry in entries]
    )


@pytest.mark.sampled(40)
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_ranks_give_the_logits_of_one_process(name, tp, tmp_path):
    folder = folder_of(name, tmp_path / "model")
    if name in UNSHARED:
        with pytest.raises(
            ParameterError, match=f"tp_size: {tp} ranks can't share {UNSHARED[name]}"
        ):
            compare(folder, Parallel(tp=tp), tmp_path / "meeting")
    else:
        compare(folder, Parallel(tp=tp), tmp_path / "meeting")


@pytest.mark.sampled(40)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tp", [1, 2])
def test_ranks_in_a_row_give_the_logits_of_one_process(name, tp, tmp_path):
    folder = folder_of(name, tmp_path / "model")
    problem = "2 stages would have layers with unlike windows" if name in UNLIKE_WINDOWS else ""
    problem = LINKED.get(name, problem)
    problem = problem and f"pp_size: {problem}"
    if name in UNSHARED and tp > 1:
        problem = f"{problem}|tp_size: {tp} ranks can't share {UNSHARED[name]}".strip("|")
    if problem:
        with pytest.raises(ParameterError, match=problem):
            compare(folder, Parallel(tp=tp, pp=2), tmp_path / "meeting")
    else:
        compare(folder, Parallel(tp=tp, pp=2), tmp_path / "meeting")


def test_ranks_have_whole_groups_of_channels(tmp_path):
    folder = folder_of("zamba", tmp_path, n_mamba_heads=2)
    spec = spec_from_config(json.loads((folder / "config.json").read_text()), "config.json")
    with pytest.raises(ParameterError, match="4 ranks can't share 2 groups of channels"):
        rank_spec(spec, Parallel(tp=4), even=False)


def test_a_gpu_needs_a_layer_with_attention(tmp_path):
    folder = folder_of("lfm2", tmp_path)
    spec = spec_from_config(json.loads((folder / "config.json").read_text()), "config.json")
    with pytest.raises(ParameterError, match="one of 2 stages would have no layer with attention"):
        rank_spec(spec, Parallel(pp=2), even=True)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("tp", [2, 3, 5])
@pytest.mark.parametrize("name", ["smollm2", "qwen2-moe", "youtu"])
def test_on_a_cpu_heads_feed_forwards_and_tokens_need_not_divide(name, tp, tmp_path):
    odd = dict(hidden_size=40, num_attention_heads=5, num_key_value_heads=5, intermediate_size=49)
    compare(folder_of(name, tmp_path / "model", **odd), Parallel(tp=tp), tmp_path / "meeting")


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("tp", "ep"), [(2, 2), (4, 2), (4, 4)])
@pytest.mark.parametrize("name", EXPERTS)
def test_experts_by_number_give_the_logits_of_one_process(name, tp, ep, tmp_path):
    """Those of Mixtral, of which there are six, also where four groups have one or two each."""
    compare(folder_of(name, tmp_path / "model"), Parallel(tp=tp, ep=ep), tmp_path / "meeting")


def test_experts_in_8_bits_are_taken_with_their_scales(tmp_path):
    folder = folder_of("qwen3-moe", tmp_path / "model")
    state = load_file(folder / "model.safetensors")
    for name in [name for name in state if ".experts." in name]:
        scales = state[name].abs().amax(1, keepdim=True) / 448
        state |= {name: (state[name] / scales).to(torch.float8_e4m3fn), f"{name}_scale": scales}
    save_file(state, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
    (folder / "config.json").write_text(json.dumps(config))
    compare(folder, Parallel(tp=2, ep=2), tmp_path / "meeting")


def compare(folder, parallel, meeting):
    with engine(folder, step_tokens=16) as whole:
        expected = answers(whole)
    with engine_of_ranks(
        folder, parallel, meeting, dtype="float32", max_running=4, step_tokens=16
    ) as ranks:
        torch.testing.assert_close(answers(ranks), expected, rtol=3e-5, atol=3e-5)


def logprobs(running):
    future: Future = Future()
    ids = [5, 9, 31, 7, 80, 44, 12, 5, 9]
    running.submit(
        ids,
        SamplingParams(max_tokens=0, return_logprob=True, logprob_start_len=1),
        sink=future.set_result,
    )
    return [entry.logprob for entry in future.result(timeout=60).prompt_logprobs]


def compare_logprobs(folder, parallel, meeting, **settings):
    settings = {"dtype": "float32", "max_running": 2, **settings}
    with engine(folder, **settings) as whole:
        expected = logprobs(whole)
    with engine_of_ranks(folder, parallel, meeting, **settings) as ranks:
        assert logprobs(ranks) == pytest.approx(expected, abs=1e-4)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", packings.FORMATS)
def test_packed_matrices_are_cut_in_their_own_encoding(name, tmp_path):
    wide = Qwen3Config(**packings.TINY.to_dict() | {"intermediate_size": 256, "head_dim": 32})
    folder, _ = packings.write(tmp_path / "model", packings.FORMATS[name], wide)
    if "reordered" in name:
        with pytest.raises(
            ModelError, match="can't be cut for a rank: its columns are in an order of their own"
        ):
            compare_logprobs(folder, Parallel(tp=2), tmp_path / "meeting")
        compare_logprobs(folder, Parallel(pp=2), tmp_path / "row")  # no layer is cut
    else:
        compare_logprobs(folder, Parallel(tp=2), tmp_path / "meeting")


@pytest.mark.parametrize("kind", test_fp8.CONFIGS)
def test_matrices_in_8_bits_are_cut_with_their_scales(kind, tmp_path, monkeypatch):
    # whose blocks 40 inputs cut
    refused, _ = test_fp8.write(tmp_path / "refused", test_fp8.CONFIGS[kind][0], kind)
    if kind == "block":
        with pytest.raises(
            ModelError,
            match=r"down_proj.weight can't be cut for a rank: columns 0 to 40 cut through",
        ):
            compare_logprobs(refused, Parallel(tp=2), tmp_path / "first")
    monkeypatch.setattr(
        test_fp8, "TINY", Qwen3Config(**test_fp8.TINY.to_dict() | {"intermediate_size": 128})
    )
    folder, _ = test_fp8.write(tmp_path / "model", test_fp8.CONFIGS[kind][0], kind)
    compare_logprobs(folder, Parallel(tp=2), tmp_path / "meeting")


def test_blocks_of_a_gguf_file_are_cut_between_them(model_file, tmp_path):
    """Of a model whose 9 heads, with 3 of keys and values, two ranks share unevenly."""
    file = small_gguf.first_layers(tmp_path / "model.gguf", model_file, 2)
    compare_logprobs(file, Parallel(tp=2), tmp_path / "meeting")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("settings", [
    {"dtype": "int8"}, *({"dtype": "bfloat16", "quantization": each} for each in ("int4", "int8", "nf4")),
], ids=str)  # fmt: skip
def test_each_rank_rounds_its_part(settings, tmp_path):
    if settings["dtype"] == "int8" and not torch.cpu._is_vnni_supported():  # noqa: SLF001 # torch has no other name for it
        pytest.skip("no VNNI")
    folder = folder_of(
        "qwen3", tmp_path / "model", hidden_size=256, intermediate_size=512, head_dim=64
    )
    settings |= {"max_running": 2}
    with engine(folder, **settings) as whole:
        expected = torch.tensor(logprobs(whole))
    with engine_of_ranks(folder, Parallel(tp=2), tmp_path / "meeting", **settings) as ranks:
        found = torch.tensor(logprobs(ranks))
    assert (found - expected).abs().mean() < 0.1 * expected.std()


@pytest.mark.parametrize(
    ("name", "saved", "tp"), [("qwen3", 2, 2), ("qwen3", 4, 2), ("deepseek-v2", 2, 4)]
)
@pytest.mark.sampled(2)
def test_ranks_load_files_that_were_saved_for_as_many_and_for_others(name, saved, tp, tmp_path):
    folder = folder_of(name, tmp_path / "model")
    settings: dict[str, Any] = dict(device="cpu", dtype="float32")
    with engine(folder, **settings) as whole:
        expected = answers(whole)
    save_sharded(str(folder), tmp_path / "saved", saved)
    settings["load_format"] = "sharded_state"
    with engine_of_ranks(
        tmp_path / "saved", Parallel(tp=tp), tmp_path / "meeting", **settings
    ) as ranks:
        assert torch.allclose(answers(ranks), expected, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3", "deepseek-v2"])
def test_ranks_read_little_more_than_the_files_have(name, tmp_path, monkeypatch):
    read, preadv = list[int](), os.preadv
    folder = folder_of(name, tmp_path / "model", hidden_size=64, intermediate_size=512)

    def counting(*arguments):
        count = preadv(*arguments)
        read.append(count)
        return count

    monkeypatch.setattr(os, "preadv", counting)
    with engine(folder, device="cpu"):
        whole = sum(read)
    with engine_of_ranks(folder, Parallel(tp=4), tmp_path / "meeting", device="cpu") as running:
        ask(running, [5, 9], most=1).result()  # all have loaded
        assert whole < sum(read) - whole < 1.25 * whole
