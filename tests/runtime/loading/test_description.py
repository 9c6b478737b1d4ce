"""Descriptions of models before they are loaded: against transformers' own counts, and what is
refused.
"""

import json
import math
import os
import re

import huggingface_hub
import pytest
import torch
import transformers
from huggingface_hub.utils import SafetensorsFileMetadata, SafetensorsRepoMetadata, TensorInfo
from safetensors.torch import load_file, save_file
from transformers import (
    BertForSequenceClassification,
    BertModel,
    GPTBigCodeConfig,
    GPTBigCodeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
)

import sglang_lite as sgl
from sglang_lite.cli import main
from sglang_lite.runtime.loading.description import describe
from sglang_lite.runtime.models.layers.linear import keeps_only_blocks, load_block_library
from tests.runtime.embedding.tiny import saved
from tests.runtime.media.seeing import FAMILIES, save_seeing
from tests.runtime.models.test_families import FAMILIES as DELTA_FAMILIES
from tests.runtime.models.test_families import SHAPE
from tests.runtime.models.tiny import VOCAB, save

SIZES = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, bos_token_id=None, eos_token_id=None,
)  # fmt: skip


def llama(folder, kind=LlamaForCausalLM, **config):
    model = kind(LlamaConfig(**SIZES, **config))
    save(model, folder)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_the_encoder_of_images_is_told_beside_the_weights(tmp_path, family):
    model = save_seeing(family, tmp_path)
    found = describe(str(tmp_path))
    tower = found.tower_bytes // size_of(found.dtype)
    assert found.refused == ()
    assert 0 < tower == model.num_parameters() - found.loaded_bytes // size_of(found.dtype)
    assert "images   read by an encoder of 0." in found.as_text()


def size_of(dtype):
    return getattr(torch, dtype).itemsize


@pytest.mark.parametrize("tied", [True, False])
def test_a_native_model_takes_what_transformers_counts(tmp_path, tied):
    model = llama(tmp_path, tie_word_embeddings=tied)
    found = describe(str(tmp_path))
    item = size_of(found.dtype)
    assert (found.architecture, found.runs, found.refused) == ("LlamaForCausalLM", "native", ())
    assert found.loaded_bytes == model.num_parameters() * item
    assert (found.stored_bytes, found.formats) == (model.num_parameters() * 4, ("F32",))
    assert found.cache_bytes == 3 * 2 * 2 * 8 * item
    assert (found.context_length, found.serves) == (64, ("generate", "score"))
    assert found.tower_bytes is None


def test_experts_count_once_each(tmp_path):
    model = MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2))
    save(model, tmp_path)
    found = describe(str(tmp_path))
    assert found.refused == ()
    assert found.loaded_bytes == model.num_parameters() * size_of(found.dtype)


def test_a_model_by_transformers_code_says_so(tmp_path):
    ends = {"bos_token_id": None, "eos_token_id": None}
    sizes = {"n_positions": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, "multi_query": False}
    model = GPTBigCodeForCausalLM(GPTBigCodeConfig(vocab_size=VOCAB, **sizes, **ends))
    save(model, tmp_path)
    found = describe(str(tmp_path))
    item = size_of(found.dtype)
    assert (found.runs, found.why) == ("transformers", "there is none of our own for it")
    assert found.loaded_bytes == model.num_parameters() * item
    assert (found.cache_bytes, found.context_length, found.refused) == (3 * 2 * 32 * item, 64, ())


@pytest.mark.parametrize(
    ("kind", "config", "serves"),
    [
        (BertModel, {}, ("embed",)),
        (BertForSequenceClassification, {"num_labels": 1}, ("score", "classify", "reward")),
        (BertForSequenceClassification, {"num_labels": 3}, ("classify", "reward")),
    ],
)
def test_an_encoder_keeps_nothing(tmp_path, kind, config, serves):
    model = saved(kind, tmp_path, **config)
    found = describe(str(tmp_path))
    unused = (
        0
        if config
        else sum(p.numel() for name, p in model.named_parameters() if name.startswith("pooler"))
    )
    assert found.loaded_bytes == (model.num_parameters() - unused) * 4
    assert (found.cache_bytes, found.context_length, found.serves, found.refused) == (
        0,
        40,
        serves,
        (),
    )


def test_a_decoder_that_gives_rewards_is_told_from_one_that_generates(tmp_path):
    model = llama(tmp_path, LlamaForSequenceClassification, num_labels=1, pad_token_id=0)
    found = describe(str(tmp_path))
    assert (found.serves, found.refused) == (("score", "classify", "reward"), ())
    assert found.loaded_bytes == model.num_parameters() * 4


def test_a_gguf_file(model_file):
    found = describe(str(model_file))
    assert (found.architecture, found.runs, found.refused) == ("llama", "native", ())
    assert found.cache_bytes == 30 * 2 * 3 * 64 * size_of(found.dtype)
    has_copy = found.dtype != "float32" and not keeps_only_blocks()
    in_blocks = not has_copy and load_block_library() is not None  # they stay as stored
    norms = 61 * 576  # stored in float32
    as_stored = found.stored_bytes - norms * (4 - size_of(found.dtype))
    assert found.loaded_bytes == (as_stored if in_blocks else 134_515_008 * size_of(found.dtype))
    assert found.stored_bytes is not None
    assert found.stored_bytes < os.path.getsize(model_file)


def test_no_weight_is_read(tmp_path):
    """19 GB of weights in a file that has none."""
    llama(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {
        "hidden_size": 8192,
        "intermediate_size": 65_536,
        "head_dim": 128,
        "num_hidden_layers": 3,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    big = {"[32]": [8192], "[96, 32]": [VOCAB, 8192], "[32, 32]": [512, 8192], "[16, 32]": [256, 8192],
           "[48, 32]": [65_536, 8192], "[32, 48]": [8192, 65_536]}  # fmt: skip
    header, at = {}, 0
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        shape = [8192, 512] if name.endswith("o_proj.weight") else big[str(list(tensor.shape))]
        header[name] = {
            "dtype": "F32",
            "shape": shape,
            "data_offsets": [at, at + 4 * math.prod(shape)],
        }
        at += 4 * math.prod(shape)
    content = json.dumps(header).encode()
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(len(content).to_bytes(8, "little") + content)
        file.truncate(8 + len(content) + at)
    found = describe(str(tmp_path))
    assert (found.stored_bytes, found.refused) == (at, ())
    assert at > 19e9


def test_bin_files_are_described_too(tmp_path):
    model = llama(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    found = describe(str(tmp_path))
    assert (found.stored_bytes, found.formats, found.refused) == (
        model.num_parameters() * 4,
        ("float32",),
        (),
    )


def changed(folder, **fields):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"hidden_act": "relu"}, "the activation 'relu' is not supported"),
        ({"num_hidden_layers": 4}, "'model.layers.3.input_layernorm.weight' is missing"),
        ({"num_hidden_layers": 2}, "the model has no place for model.layers.2"),
        (
            {"intermediate_size": 47},
            r"mlp.gate_proj.weight has shape \(48, 32\), the config says \(47, 32\)",
        ),
        (
            {"quantization_config": {"quant_method": "quip"}},
            "weights quantised with 'quip' are not supported",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, "no tensor has a scale"),
        (
            {"architectures": ["MadeUpForCausalLM"], "model_type": "made_up"},
            "'made_up', for which neither sglang_lite nor transformers",
        ),
    ],
)
def test_what_is_refused_is_named_with_its_part(tmp_path, fields, reason, capsys):
    llama(tmp_path)
    changed(tmp_path, **fields)
    assert main(["models", str(tmp_path)]) == 1
    refused = [line for line in capsys.readouterr().out.splitlines() if line.startswith("refused")]
    assert len(refused) == 1
    assert re.search(reason, refused[0])
    assert describe(str(tmp_path)).serves == ()


def test_each_part_is_refused_by_itself(tmp_path):
    llama(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    found = describe(str(tmp_path))
    assert [reason.partition(": ")[2][:20] for reason in found.refused] == [
        "damaged or truncated",
        "not a tokenizer: EOF",
    ]
    assert found.cache_bytes is not None


def test_a_model_with_other_state_is_refused(tmp_path):
    config = RwkvConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32
    )
    save(RwkvForCausalLM(config), tmp_path)
    assert not describe(str(tmp_path)).refused
    changed(tmp_path, architectures=["LaterForCausalLM"])
    assert "LaterForCausalLM keeps the state of RWKV's layers" in describe(str(tmp_path)).refused[0]


def test_a_model_without_attention_has_a_cache_of_states_alone(tmp_path):
    config = MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4)
    save(MambaForCausalLM(config), tmp_path)
    found = describe(str(tmp_path), dtype="float32")
    # two layers of 64 channels, with three inputs and four sums in 32 bits each
    assert (found.refused, found.cache_bytes, found.state_bytes) == (
        (),
        0,
        2 * 64 * (3 + 4) * 4,
    )
    assert f"cache    {found.state_bytes:,} bytes a sequence\n" in found.as_text()


def test_scales_of_8_bits_belong_to_their_matrices(tmp_path):
    llama(tmp_path, tie_word_embeddings=False)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = torch.ones(1)
    save_file(tensors, tmp_path / "model.safetensors")
    changed(tmp_path, quantization_config={"quant_method": "fp8"})
    found = describe(str(tmp_path))
    assert (found.refused, sorted(found.formats)) == ((), ["F32", "F8_E4M3"])
    del tensors["model.layers.1.mlp.up_proj.weight_scale"]
    save_file(tensors, tmp_path / "model.safetensors")
    assert "layers.1.mlp.up_proj.weight_scale or" in describe(str(tmp_path)).refused[0]


def test_of_a_hubs_model_no_weight_is_fetched(tmp_path, monkeypatch):
    model = llama(tmp_path)
    tensors = {
        name: TensorInfo(dtype="F32", shape=list(tensor.shape), data_offsets=(0, tensor.nbytes))
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    (tmp_path / "model.safetensors").unlink()
    file = SafetensorsFileMetadata(metadata={}, tensors=tensors)
    there = SafetensorsRepoMetadata(
        metadata=None, sharded=False, weight_map={}, files_metadata={"a.safetensors": file}
    )
    asked = []

    def snapshot_download(name, *, revision, allow_patterns):
        asked.append((name, revision, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(
        huggingface_hub.HfApi, "get_safetensors_metadata", lambda self, name, revision: there
    )
    found = describe("owner/model", "main")
    assert (found.stored_bytes, found.refused) == (model.num_parameters() * 4, ())
    assert asked == [("owner/model", "main", ["*.json", "*.jinja", "*.model", "*.txt"])]


def test_the_command_line(tmp_path, capsys):
    llama(tmp_path)
    assert main(["models", str(tmp_path)]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == ["path", "model", "runs", "serves", "weights", "cache", "context"]
    assert main(["models", "--json", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["path"], found["context_length"], found["refused"]) == (str(tmp_path), 64, [])
    assert main(["models", "nope"]) == 1
    assert "sglang-lite: model 'nope' is not an alias" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["models", "pull"])
    assert "give the name of a model, list, or pull NAME" in capsys.readouterr().err


def test_a_model_that_is_described_loads(tmp_path):
    llama(tmp_path)
    found = describe(str(tmp_path))
    with sgl.Engine(tmp_path, in_process=True, threads=1, device="cpu") as engine:
        assert engine.context_length == found.context_length
        assert engine.core.loop.runner.model.token_bytes == found.cache_bytes


def test_states_are_told_by_the_sequence(tmp_path):
    """As much as an engine keeps of one."""
    _, changes = DELTA_FAMILIES["qwen3.5"]
    model = transformers.Qwen3_5ForCausalLM
    folder = save(model(model.config_class(**SHAPE | changes)), tmp_path)
    found = describe(str(folder), dtype="float32")
    with sgl.Engine(str(folder), dtype="float32", in_process=True) as engine:
        assert found.state_bytes == engine.core.runner.model.state_bytes > 0
    assert f"; {found.state_bytes:,} bytes a sequence" in found.as_text()
