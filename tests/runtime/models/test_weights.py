"""Checkpoints in every format give the same model; damaged ones an error that names the file."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

import sglang_lite as sgl
from sglang_lite.protocol import SamplingParams
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.loading.load_model import load_model
from sglang_lite.runtime.models.spec import ModelSpec
from sglang_lite.runtime.models.weights.gguf import GgufSource
from sglang_lite.runtime.models.weights.gguf_file import SUPPORTED_TYPES, GgufFile
from tests.counts import some
from tests.runtime.models import small_gguf
from tests.runtime.models.tiny import randomise, tiny_tokenizer

TINY = LlamaConfig(
    vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False, eos_token_id=1, bos_token_id=0,
)  # fmt: skip
PROMPT = [5, 17, 3, 80, 22, 9]


@pytest.fixture(scope="module")
def reference() -> LlamaForCausalLM:
    return randomise(LlamaForCausalLM(TINY))


def write_folder(folder: Path, reference: LlamaForCausalLM) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps(
            reference.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}, default=str
        )
    )
    (folder / "tokenizer.json").write_text(json.dumps(tiny_tokenizer(96)))
    return folder


def weights(reference):
    return {name: tensor.contiguous() for name, tensor in reference.state_dict().items()}


def logits_of(model: Path) -> list[float]:
    with sgl.Engine(
        model=str(model), dtype="float32", max_running=2, context_length=64, in_process=True
    ) as engine:
        params = sgl.protocol.SamplingParams(max_tokens=0, return_logprob=True, logprob_start_len=1)
        return [e.logprob for e in engine.complete(PROMPT, params).prompt_logprobs]


def logprobs(model: LlamaForCausalLM) -> list[float]:
    with torch.no_grad():
        rows = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    return [rows[i, token].item() for i, token in enumerate(PROMPT[1:])]


@pytest.fixture(scope="module")
def expected(reference) -> list[float]:
    return logprobs(reference)


def test_safetensors_in_one_file(tmp_path, reference, expected):
    save_file(weights(reference), write_folder(tmp_path, reference) / "model.safetensors")
    assert logits_of(tmp_path) == pytest.approx(expected, abs=1e-5)


def test_safetensors_in_shards(tmp_path, reference, expected):
    folder = write_folder(tmp_path, reference)
    names = sorted(weights(reference))
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({n: weights(reference)[n] for n in part}, folder / file)
    index = {"weight_map": {n: file for file, part in shards.items() for n in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert logits_of(folder) == pytest.approx(expected, abs=1e-5)
    (folder / "b.safetensors").unlink()
    with pytest.raises(sgl.ModelError, match=r"shard b.safetensors is missing"):
        sgl.Engine(model=str(folder), in_process=True)
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(sgl.ModelError, match="not a weight index"):
        sgl.Engine(model=str(folder), in_process=True)


def test_bin_is_read_without_running_code(tmp_path, reference, expected):
    folder = write_folder(tmp_path, reference)
    torch.save(reference.state_dict(), folder / "pytorch_model.bin")
    assert logits_of(folder) == pytest.approx(expected, abs=1e-5)

    class Hostile:
        def __reduce__(self):
            return (print, ("owned",))

    for content in ({"model.norm.weight": Hostile()}, [torch.ones(1)], {"epoch": 3}):
        torch.save(content, folder / "pytorch_model.bin")
        with pytest.raises(sgl.ModelError, match=r"pytorch_model.bin: can't be read as tensors"):
            sgl.Engine(model=str(folder), in_process=True)


def test_bin_in_shards(tmp_path, reference, expected):
    folder = write_folder(tmp_path, reference)
    for name, tensor in weights(reference).items():
        torch.save({name: tensor}, folder / f"{name}.bin")
    index = {"weight_map": {name: f"{name}.bin" for name in weights(reference)}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert logits_of(folder) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("repeated", [True, False])
def test_a_head_beside_tied_embeddings_is_used_where_it_differs(
    tmp_path, reference, expected, repeated
):
    """As transformers does: `.bin` files repeat the table as the head, and some configs say tied
    and are not.
    """
    tied = LlamaForCausalLM(LlamaConfig(**TINY.to_dict() | {"tie_word_embeddings": True})).eval()
    state = weights(reference)
    if repeated:
        state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
        tied.load_state_dict(state)
        expected = logprobs(tied)
    save_file(state, write_folder(tmp_path, tied) / "model.safetensors")
    assert logits_of(tmp_path) == pytest.approx(expected, abs=1e-5)


def interleaved(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Layout in which llama.cpp's converter stores q and k of Llama models."""
    return rows.view(heads, 2, rows.shape[0] // heads // 2, -1).transpose(1, 2).reshape(rows.shape)


def write_gguf(path: Path, reference, kind: str = "F32", **changes) -> Path:
    writer = gguf.GGUFWriter(path, changes.pop("arch", "llama"))
    c = reference.config
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changes.pop("pre", "gpt-2"))
    writer.add_token_list([*(chr(33 + i) for i in range(c.vocab_size - 1)), '!"'])
    writer.add_token_merges(['! "'])
    writer.add_eos_token_id(1)
    names = {
        "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight",
        "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    quantised = getattr(gguf.GGMLQuantizationType, kind)
    for name, tensor in weights(reference).items():
        if name in names:
            target = names[name]
        else:
            _, _, i, *middle, last = name.split(".")
            target = f"blk.{i}.{names['.'.join(middle)]}.{last}"
        if ".q_proj." in name or ".k_proj." in name:
            tensor = interleaved(
                tensor, c.num_attention_heads if ".q_proj." in name else c.num_key_value_heads
            )
        data = tensor.numpy()
        if data.ndim == 2 and kind != "F32":
            writer.add_tensor(target, gguf.quants.quantize(data, quantised), raw_dtype=quantised)
        else:
            writer.add_tensor(target, data)
    for name, value in changes.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_gguf_gives_the_model_that_the_file_holds(tmp_path, reference, kind):
    """The same file through gguf's own reader and transformers is the oracle."""
    path = write_gguf(tmp_path / "tiny.gguf", reference, kind)
    stored = LlamaForCausalLM(TINY).eval()
    state = {}
    for name, tensor in weights(reference).items():
        data = tensor.numpy()
        if data.ndim == 2 and kind != "F32":
            quantised = getattr(gguf.GGMLQuantizationType, kind)
            data = gguf.quants.dequantize(gguf.quants.quantize(data, quantised), quantised)
        state[name] = torch.from_numpy(np.array(data, dtype=np.float32))
    stored.load_state_dict(state)
    assert logits_of(path) == pytest.approx(logprobs(stored), abs=1e-5)


def test_gguf_carries_the_frequencies_of_llama_3_1_as_a_tensor(tmp_path, reference):
    """llama.cpp's converter writes no scaling into the metadata, but what each frequency is divided
    by.
    """
    rope = dict(rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                original_max_position_embeddings=32)  # fmt: skip
    scaled = LlamaForCausalLM(LlamaConfig(**TINY.to_dict() | {"rope_parameters": rope})).eval()
    scaled.load_state_dict(reference.state_dict())
    divisors = reference.model.rotary_emb.inv_freq / scaled.model.rotary_emb.inv_freq
    path = write_gguf(tmp_path / "tiny.gguf", scaled, **{"rope_freqs.weight": divisors.numpy()})
    assert logits_of(path) == pytest.approx(logprobs(scaled), abs=1e-5)
    assert logprobs(scaled) != pytest.approx(logprobs(reference), abs=1e-2)


@pytest.mark.parametrize("kind", SUPPORTED_TYPES)
def test_every_supported_gguf_type_is_read(tmp_path, kind):
    """Formats that the gguf package can't write are random blocks, against its own dequantisation."""
    quantised = getattr(gguf.GGMLQuantizationType, kind)
    per_block, size = gguf.GGML_QUANT_SIZES[quantised]
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (3, 512 // per_block * size), dtype=np.uint8)
    try:
        blocks = gguf.quants.quantize(
            rng.standard_normal((3, 512)).astype(np.float32), quantised
        ).view(np.uint8)
    except NotImplementedError:
        half = np.float16(0.01).view(np.uint16)
        at = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,),
              "IQ4_XS": (0,)}[kind]  # fmt: skip
        for offset in at:  # scales must be finite
            blocks.reshape(3, -1, size)[:, :, offset : offset + 2] = np.frombuffer(
                half.tobytes(), dtype=np.uint8
            )
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("token_embd.weight", blocks.reshape(3, -1), raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    spec = ModelSpec(
        "llama", vocab_size=3, hidden_size=512, max_positions=8, rms_eps=1e-6, layers=()
    )
    source = GgufSource(GgufFile(tmp_path / "x.gguf"), spec)
    tensor = source.take_tensor("model.embed_tokens.weight", (3, 512))
    value = torch.cat([tensor.decode(0, 2), tensor.decode(2, 3)])
    expected = gguf.quants.dequantize(blocks.reshape(3, -1), quantised)
    assert np.abs(expected).max() > 1e-3
    np.testing.assert_allclose(value.numpy(), expected, atol=1e-6)


def test_a_gguf_header_is_read_as_the_gguf_package_reads_it(model_file, tmp_path):
    file = small_gguf.first_layers(
        tmp_path / "x.gguf", model_file, 2, tokens=some(500, 1_000_000)
    )  # of which it takes seconds
    ours = GgufFile(file)
    theirs = gguf.GGUFReader(file)
    assert {t.name: (tuple(t.shape[::-1]), t.tensor_type.name) for t in theirs.tensors} == {
        name: (t.shape, t.kind) for name, t in ours.tensors.items()
    }
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.metadata[key] == pytest.approx(field.contents()), key


def test_a_gguf_that_cannot_be_used_says_why(tmp_path, reference):
    good = write_gguf(tmp_path / "good.gguf", reference).read_bytes()
    bad = tmp_path / "bad.gguf"
    for content, message in (
        (b"not a model at all", "not a GGUF file"),
        (b"", "can't be read"),
        (good[:100], "damaged or truncated"),
        (good[:-64], "damaged or truncated"),
        (good[:4] + b"\x09" + good[5:], "version 9 is not supported"),
    ):
        bad.write_bytes(content)
        with pytest.raises(sgl.ModelError, match=message):
            sgl.Engine(model=str(bad), in_process=True)
    with pytest.raises(
        sgl.ModelError, match=r"architecture 'mamba' is not supported. Supported: llama"
    ):
        sgl.Engine(model=str(write_gguf(bad, reference, arch="mamba")), in_process=True)
    with pytest.raises(sgl.ModelError, match="pre-tokenizer 'klingon'"):
        sgl.Engine(model=str(write_gguf(bad, reference, pre="klingon")), in_process=True)
    with pytest.raises(
        sgl.ModelError, match=r"stored as I8, which is not supported. Supported: F32"
    ):
        write_gguf(bad, reference, **{"extra.weight": np.zeros(32, dtype=np.int8)})  # type: ignore[arg-type]  # no name of Python
        sgl.Engine(model=str(bad), in_process=True)
    with pytest.raises(sgl.ModelError, match=r"'odd.weight' is of no supported architecture"):
        write_gguf(bad, reference, **{"odd.weight": np.zeros(32, dtype=np.float32)})  # type: ignore[arg-type]  # no name of Python
        sgl.Engine(model=str(bad), in_process=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["BigBirdForCausalLM"]},
            r"names \['BigBirdForCausalLM'\], its model_type is LlamaForCausalLM's",
        ),
        ({"architectures": []}, "architecture not named"),
        ({"hidden_size": None}, "config.json: the field 'hidden_size' is missing"),
        ({"hidden_size": "32"}, "config.json: `hidden_size`: '32' is no whole number"),
        ({"vocab_size": 50}, "the tokenizer has 96 tokens, the model 50"),
        (
            {"intermediate_size": 48},
            r"model.safetensors: model.layers.0.mlp.gate_proj.weight has shape \(64, 32\), the config says \(48, 32\)",
        ),
        ({"hidden_act": "swish9"}, "config.json: the activation 'swish9' is not supported"),
        (
            {"num_key_value_heads": 3},
            "config.json: 4 attention heads can't share 3 key-value heads",
        ),
        (
            {"use_bidirectional_attention": True},
            "config.json: use_bidirectional_attention is not supported",
        ),
        (
            {
                "architectures": ["MistralForCausalLM"],
                "sliding_window": 8,
                "layer_types": ["linear_attention"] * 2,
            },
            "config.json: layer_types .*'linear_attention'",
        ),
        (
            {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1.0}},
            "config.json: rope type 'spiral' is not supported",
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1.0}},
            "config.json: the field 'factor' is missing",
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1.0,
                    "short_factor": [1.0],
                    "long_factor": [1.0],
                }
            },
            r"config.json: rope's short_factor is \[1.0\], not 4 positive numbers",
        ),
        ({"num_hidden_layers": 3}, "the tensor 'model.layers.2.*' is missing"),
        ({"num_hidden_layers": 1}, "model.safetensors: the model has no place for model.layers.1"),
        ({"attention_bias": True}, "the tensor 'model.layers.0.self_attn.q_proj.bias' is missing"),
    ],
)
def test_a_folder_that_cannot_be_used_says_why(tmp_path, reference, change, message):
    folder = write_folder(tmp_path, reference)
    save_file(weights(reference), folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    for name, value in change.items():
        if value is None:
            config.pop(name)
        else:
            config[name] = value
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(sgl.ModelError, match=message):
        sgl.Engine(model=str(folder), in_process=True)


def test_whole_numbers_are_no_weights(tmp_path, reference):
    state = weights(reference) | {
        "model.layers.1.mlp.down_proj.weight": torch.ones(32, 64, dtype=torch.int8)
    }
    save_file(state, write_folder(tmp_path, reference) / "model.safetensors")
    with pytest.raises(
        sgl.ModelError,
        match=r"model.safetensors: model.layers.1.mlp.down_proj.weight is stored as torch.int8",
    ):
        sgl.Engine(model=str(tmp_path), in_process=True)


def test_a_folder_with_damaged_files_names_them(tmp_path, reference):
    folder = write_folder(tmp_path, reference)
    with pytest.raises(sgl.ModelError, match="no weights found"):
        sgl.Engine(model=str(folder), in_process=True)
    save_file(weights(reference), folder / "model.safetensors")
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(sgl.ModelError, match=r"model.safetensors: damaged or truncated"):
        sgl.Engine(model=str(folder), in_process=True)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(sgl.ModelError, match=r"tokenizer.json: not a tokenizer"):
        sgl.Engine(model=str(folder), in_process=True)
    for text, message in (("{", "not JSON"), ("[]", "not a JSON object")):
        (folder / "config.json").write_text(text)
        with pytest.raises(sgl.ModelError, match=f"config.json: {message}"):
            sgl.Engine(model=str(folder), in_process=True)


def test_every_end_of_sequence_counts_wherever_it_is_written(tmp_path, reference):
    folder = write_folder(tmp_path, reference)
    save_file(weights(reference), folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": [1, 7]}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": chr(33 + 4)}))
    assert load_model(EngineConfig(model=str(folder)), folder).eos_ids == {1, 4, 7, 9}


def test_added_tokens_beyond_the_model_are_text(tmp_path, reference):
    """As the image token of Gemma 3's text models."""
    folder = write_folder(tmp_path / "model", reference)
    save_file(weights(reference), folder / "model.safetensors")
    tokenizer = tiny_tokenizer(96)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"] = [{"id": 96, "content": "<img>", "special": True, **flags}]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with sgl.Engine(model=str(folder), dtype="float32", in_process=True) as engine:
        assert engine.tokenizer.encode("<img>") == [ord(c) - 33 for c in "<img>"]
        assert (
            engine.complete(
                "a<img>b", SamplingParams(max_tokens=3, ignore_eos=True)
            ).usage.prompt_tokens
            == 7
        )


def test_dummy_weights_need_no_checkpoint(tmp_path, reference):
    with sgl.Engine(
        model=str(write_folder(tmp_path, reference)),
        load_format="dummy",
        dtype="float32",
        in_process=True,
    ) as engine:
        params = sgl.protocol.SamplingParams(
            max_tokens=4, ignore_eos=True, return_logprob=True, seed=0
        )
        generation = engine.complete(PROMPT, params)
    assert len(generation.token_ids) == 4
    assert all(np.isfinite(e.logprob) for e in generation.output_logprobs)  # type: ignore[arg-type]  # all have one
