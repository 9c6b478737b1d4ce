"""Model files of strangers: whatever they say, an error of ours, before anything is allocated, and
never a hang.
"""

import json
import os
import random
import struct
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

import sglang_lite as sgl
from sglang_lite.protocol import ModelError, SamplingParams, SglError
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.loading.load_model import load_model
from sglang_lite.runtime.models import config_fields
from sglang_lite.runtime.models.weights.ranges import LocalRanges, read_header
from tests.damage import HUGE, STRANGE, strangely
from tests.runtime.models.tiny import randomise, tiny_tokenizer

EXAMPLES = int(os.environ.get("SGLANG_LITE_HOSTILE_FILES", "40"))
TINY = dict(
    vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False, eos_token_id=1, bos_token_id=0,
)  # fmt: skip
CONFIG = {**LlamaConfig(**TINY).to_dict(), "architectures": ["LlamaForCausalLM"]}
SETTINGS = {
    "bos_token": "!",
    "eos_token": {"content": '"'},
    "chat_template": "{{ messages }}",
    "add_bos_token": False,
}
DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture(scope="module")
def tensors():
    return {
        name: t.contiguous()
        for name, t in randomise(LlamaForCausalLM(LlamaConfig(**TINY))).state_dict().items()
    }


@pytest.fixture
def folder(tmp_path, tensors):
    save_file(tensors, tmp_path / "model.safetensors")
    for name, content in {
        "config.json": CONFIG, "tokenizer.json": tiny_tokenizer(96), "tokenizer_config.json": SETTINGS,
        "generation_config.json": {"eos_token_id": [1]},
    }.items():  # fmt: skip
        write(tmp_path / name, content)
    return tmp_path


def write(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content, default=str))


def load(path, **options):
    return load_model(
        EngineConfig.make(model=str(path), device="cpu", in_process=True, **options), path
    )


def test_a_context_beyond_the_model_is_refused_before_weights_are_read(folder):
    write(folder / "model.safetensors", "no weights")
    with pytest.raises(
        sgl.ParameterError, match="context_length: 129 is more than the model's 128"
    ):
        load(folder, context_length=129)


def test_the_folder_itself_is_fine(folder):
    assert load(folder).eos_ids == {1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"eos_token_id": 96}, "`eos_token_id`: 96 is no id of the 96 tokens"),
        ({"eos_token_id": -1}, "`eos_token_id`: -1 is not between 0"),
        ({"eos_token_id": "</s>"}, "`eos_token_id`: '</s>' is no whole number"),
        ({"eos_token_id": [1, "x"]}, r"`eos_token_id`: \[1, 'x'\] has 'x', which is no whole number"),
        ({"eos_token_id": [[1]]}, "is no whole number"),
        ({"eos_token_id": True}, "is no whole number"),
        ({"bos_token_id": 1.5}, "`bos_token_id`: 1.5 is no whole number"),
        ({"head_dim": -8}, "`head_dim`: -8 is not between 1"),
        ({"head_dim": 7}, "7 elements of a head can't be rotated in pairs"),
        ({"num_hidden_layers": 10**9}, "`num_hidden_layers`: 1000000000 is not between"),
        ({"num_hidden_layers": HUGE}, "`num_hidden_layers`: a huge number is not between"),
        ({"max_position_embeddings": 2**31 - 1, "head_dim": 65_536}, r"needs .* GiB .*2,147,483,647 positions .* GiB\); .* GiB are free"),
        ({"max_position_embeddings": 10**12}, "`max_position_embeddings`: 1000000000000 is not between"),
        ({"num_attention_heads": 64, "head_dim": None}, "hidden_size 32 is too small for 64 attention heads"),
        ({"num_key_value_heads": 0}, "`num_key_value_heads`: 0 is not between 1"),
        ({"rms_norm_eps": "x"}, "`rms_norm_eps`: 'x' is no number"),
        ({"rms_norm_eps": float("nan")}, "`rms_norm_eps`: nan is not between"),
        ({"rope_theta": -1.0, "rope_parameters": None}, "`rope_theta`: -1.0 is not between"),
        ({"rope_parameters": []}, r"`rope_parameters`: \[\] is no JSON object"),
        ({"rope_parameters": {"rope_type": 7}}, "`rope_type`: 7 is no text"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": "x"}}, "`beta_fast`: 'x' is no number"),
        ({"architectures": 5}, "`architectures`: 5 is no text"),
        ({"architectures": [["x"]]}, "`architectures`: .* is no text"),
        ({"text_config": [1]}, r"`text_config`: \[1\] is no JSON object"),
        ({"hidden_act": ["silu"]}, "`hidden_act`: .* is no text"),
        ({"tie_word_embeddings": "no"}, "`tie_word_embeddings`: 'no' is no true or false"),
        ({"vocab_size": None}, "the field 'vocab_size' is missing"),
        ({"quantization_config": {"quant_method": "fp8"}}, "says that the weights are in 8 bits, but no tensor has a scale"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": 5}}, "quantization_config can't be understood"),
        ({"quantization_config": {"quant_method": "compressed-tensors", "config_groups": []}}, "can't be understood"),
        ({"quantization_config": "fp8"}, "`quantization_config`: 'fp8' is no JSON object"),
    ],
)  # fmt: skip
def test_a_senseless_config_is_refused_by_its_field(folder, change, message):
    write(folder / "config.json", {**CONFIG, **change})
    with pytest.raises(ModelError, match=message) as caught:
        load(folder)
    assert "config.json" in str(caught.value) or str(folder) in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", DEEP, "config.json: nested too deeply"),
        ("config.json", '{"a": ' + DEEP + "}", "config.json: nested too deeply"),
        ("config.json", "[1]", "not a JSON object"),
        ("tokenizer_config.json", [1, 2], "tokenizer_config.json: not a JSON object"),
        ("tokenizer_config.json", DEEP, "tokenizer_config.json: nested too deeply"),
        ("tokenizer_config.json", {"eos_token": {"id": 3}}, "`eos_token`: .* is neither text nor an object with a content"),
        ("tokenizer_config.json", {"chat_template": 5}, "`chat_template`: 5 is no text"),
        ("tokenizer_config.json", {"chat_template": [{"name": "default"}, 5]}, None),
        ("tokenizer_config.json", {"chat_template": [{"name": "default", "template": 5}]}, "`chat_template`: 5 is no text"),
        ("tokenizer.json", DEEP, "not a tokenizer"),
        ("tokenizer.json", {}, "not a tokenizer"),
        ("tokenizer.json", {**tiny_tokenizer(96), "model": {"type": "BPE", "vocab": {"a": 2**31}, "merges": []}}, "the id 2,147,483,648"),
        ("tokenizer.json", {**tiny_tokenizer(96), "model": {"type": "BPE", "vocab": {}, "merges": []}}, "no tokens"),
        ("generation_config.json", {"eos_token_id": 400}, "generation_config.json: `eos_token_id`: 400 is no id"),
        ("generation_config.json", {"eos_token_id": {"a": 1}}, "generation_config.json: `eos_token_id`: .* is no whole number"),
        ("generation_config.json", "{", "generation_config.json: not JSON"),
        ("model.safetensors.index.json", {"weight_map": {"a": 5}}, "weight_map names 5, which is no file of the folder"),
        ("model.safetensors.index.json", {"weight_map": {"a": "/etc/passwd"}}, "weight_map names '/etc/passwd', which is no"),
        ("model.safetensors.index.json", {"weight_map": {"a": "../model.safetensors"}}, "which is no file of the folder"),
        ("model.safetensors.index.json", {"weight_map": {"a": "x/../../m"}}, "which is no file of the folder"),
        ("model.safetensors.index.json", {"weight_map": {"a": ""}}, "which is no file of the folder"),
        ("model.safetensors.index.json", {"weight_map": {"a": "a\0b"}}, "which is no file of the folder"),
        ("model.safetensors.index.json", {"weight_map": {"a": "config.json"}}, "config.json: damaged or truncated"),
        ("model.safetensors.index.json", {"weight_map": {}}, "it has no weight_map"),
        ("model.safetensors.index.json", DEEP, "nested too deeply"),
    ],
)  # fmt: skip
def test_other_files_are_checked_too(folder, file, content, message):
    write(folder / file, content)
    if message is None:
        load(folder)
        return
    with pytest.raises(ModelError, match=message) as caught:
        load(folder)
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize(
    "header",
    [
        {"dtype": ["F32"]},
        {"shape": [1.0]},
        {"shape": [True]},
        {"shape": [-1, -1]},
        {"data_offsets": [0.0, 4.0]},
    ],
    ids=str,
)
def test_a_header_of_safetensors_that_has_no_numbers_is_damaged(tmp_path, header):
    header = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **header}
    text = json.dumps({"lm_head.weight": header}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    with pytest.raises(ModelError, match=r"damaged or truncated: .* has no"):
        read_header(LocalRanges(), file)


@pytest.mark.parametrize(
    "file", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja",
             "model.safetensors", "shard"],
)  # fmt: skip
def test_a_pipe_is_not_waited_for(folder, file):
    if file == "shard":
        write(folder / "model.safetensors.index.json", {"weight_map": {"a": "shard"}})
    (folder / file).unlink(missing_ok=True)
    os.mkfifo(folder / file)
    with pytest.raises(ModelError, match="not a regular file"):
        load(folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(threads=10**6), "threads: 1000000 is more than 1,024"),
        (dict(max_running=10**9), "max_running: 1000000000 is more than"),
        (
            dict(max_total_tokens=2**31 - 1),
            r"needs .* GiB \(2,147,483,646 tokens of keys and values",
        ),
        (dict(context_length=10**12), "context_length: 1000000000000 is more than"),
        (dict(context_length=10**9), "context_length: 1000000000 is more than the model's 128"),
        (dict(chat_template=5), "chat_template: 5 is no text"),
        (
            dict(chat_template="t.jinja"),
            "chat_template: there is no file 't.jinja', and the text has no {{ or {%, so it is no template.",
        ),
    ],
)
def test_more_than_there_is_is_refused_before_it_is_taken(folder, options, message):
    # 32 KiB a token
    write(folder / "config.json", {**CONFIG, "num_hidden_layers": 64, "head_dim": 64})
    with pytest.raises(SglError, match=message):
        sgl.Engine(model=str(folder), device="cpu", load_format="dummy", **options, in_process=True)


@pytest.mark.parametrize(
    "model", ["x" * 5000, "a/" + "x" * 5000, "~nobody-of-this-name/x", "a\0b", ""]
)
def test_names_that_are_no_paths(model):
    with pytest.raises(SglError):
        sgl.Engine(model=model, in_process=True)


# --------------------------------------------------------------------------------------------- GGUF

_CODES = {bool: (7, "<?"), int: (10, "<Q"), float: (12, "<d")}


def gguf_value(value):
    if isinstance(value, str):
        return struct.pack("<I", 8) + gguf_string(value)
    if isinstance(value, list):
        kind = (
            8 if not value or isinstance(value[0], str) else 6 if isinstance(value[0], float) else 5
        )
        items = b"".join(
            gguf_string(v) if kind == 8 else struct.pack("<f" if kind == 6 else "<i", v)
            for v in value
        )
        return struct.pack("<IIQ", 9, kind, len(value)) + items
    if isinstance(value, int) and not isinstance(value, bool) and value < 0:
        return struct.pack("<Iq", 11, value)
    code, form = _CODES[type(value)]
    return struct.pack("<I", code) + struct.pack(form, value)


def gguf_string(text):
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def gguf_file(metadata, tensors):
    """The bytes of a GGUF file with float32 tensors."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(gguf_string(key) + gguf_value(value) for key, value in metadata.items())
    data = b""
    for name, tensor in tensors.items():
        shape = tuple(reversed(tensor.shape))
        head += (
            gguf_string(name)
            + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
            + struct.pack("<IQ", 0, len(data))
        )
        data += tensor.float().numpy().tobytes()
    return head + b"\0" * (-len(head) % 32) + data


TOKENS = [chr(33 + i) for i in range(94)] + ["ab", "bc"]
METADATA = {
    "general.architecture": "llama", "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2,
    "llama.embedding_length": 32, "llama.feed_forward_length": 64, "llama.block_count": 2, "llama.context_length": 128,
    "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 10_000.0, "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": TOKENS, "tokenizer.ggml.token_type": [1] * 96, "tokenizer.ggml.merges": ["a b", "b c"],
    "tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.bos_token_id": 0, "tokenizer.chat_template": "{{ messages }}",
}  # fmt: skip
_GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "model.layers": "blk",
}  # fmt: skip


def gguf_names(tensors):
    renamed = {}
    for name, tensor in tensors.items():
        for theirs, ours in _GGUF_NAMES.items():
            name = name.replace(theirs, ours)
        renamed[name] = tensor
    return renamed


def write_gguf(tmp_path, metadata, tensors):
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_file(metadata, gguf_names(tensors)))
    return path


def load_gguf(tmp_path, metadata, tensors):
    return load(write_gguf(tmp_path, metadata, tensors))


def test_the_gguf_file_itself_is_fine(tmp_path, tensors):
    loaded = load_gguf(tmp_path, METADATA, tensors)
    assert loaded.tokenizer.encode("abc", first=False) == [94, 66]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.merges": ["a zz"]}, "the merge 'a zz' is not of tokens of the vocabulary"),
        ({"tokenizer.ggml.merges": ["ab"]}, "the merge 'ab' is not of tokens"),
        ({"tokenizer.ggml.merges": [1, 2]}, "`tokenizer.ggml.merges`: .* is no text"),
        ({"tokenizer.ggml.eos_token_id": 96}, "`tokenizer.ggml.eos_token_id`: 96 is no id of the 96 tokens"),
        ({"tokenizer.ggml.eot_token_id": 2**40}, "`tokenizer.ggml.eot_token_id`: .* is not between"),
        ({"tokenizer.ggml.bos_token_id": "x"}, "`tokenizer.ggml.bos_token_id`: 'x' is no whole number"),
        ({"tokenizer.ggml.token_type": [1]}, "is not one for each of 96 tokens"),
        ({"tokenizer.ggml.tokens": "a"}, "is not one for each of|no whole number|tensor"),
        ({"tokenizer.ggml.tokens": []}, "no|not"),
        ({"tokenizer.ggml.model": "llama"}, "scores"),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [1.0] * 96, "tokenizer.ggml.tokens": ["a" * 99_999, *TOKENS[1:]]}, "a token has 99,999 characters"),
        ({"llama.attention.head_count": 0}, "`llama.attention.head_count`: 0 is not between"),
        ({"llama.attention.head_count": [4, 4]}, "`llama.attention.head_count`: .* is no whole number"),
        ({"llama.block_count": 10**9}, "`llama.block_count`: 1000000000 is not between"),
        ({"llama.context_length": 2**31 - 1, "llama.attention.key_length": 65_536}, "GiB are free"),
        ({"llama.attention.layer_norm_rms_epsilon": "x"}, "is no number"),
        ({"llama.rope.dimension_count": 7}, "dimension_count` is 7: it must be an even number"),
        ({"llama.rope.scaling.type": 5}, "is no text"),
        ({"general.alignment": 0}, "`general.alignment`: 0 is not between"),
        ({"general.alignment": "x"}, "`general.alignment`: 'x' is not between"),
        ({"general.architecture": [1]}, "is no text"),
        ({"general.type": "adapter"}, r"is an adapter \(LoRA\)"),
        ({"tokenizer.chat_template": 5}, "is no text"),
    ],
)  # fmt: skip
def test_a_senseless_gguf_file_is_refused_by_its_key(tmp_path, tensors, change, message):
    with pytest.raises(ModelError, match=message):
        load_gguf(tmp_path, {**METADATA, **change}, tensors)


def test_an_engine_in_its_own_process_refuses_merges_before_a_text_needs_them(tmp_path, tensors):
    """That process builds what encodes with the first text; the handle has read the file, too."""
    path = write_gguf(tmp_path, {**METADATA, "tokenizer.ggml.merges": ["a zz"]}, tensors)
    with pytest.raises(ModelError, match="the merge 'a zz' is not of tokens of the vocabulary"):
        sgl.Engine(model=str(path), device="cpu")


def test_arrays_of_arrays_of_arrays_end(tmp_path):
    nested = struct.pack("<IIQ", 9, 9, 1) + struct.pack("<IQ", 9, 1) * 100_000
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + gguf_string("a") + nested
    (tmp_path / "m.gguf").write_bytes(head + b"\0" * 64)
    with pytest.raises(ModelError, match="arrays nested more than 8 deep at byte"):
        load(tmp_path / "m.gguf")


def test_a_metadata_type_of_a_later_version_is_named(tmp_path):
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + gguf_string("a") + struct.pack("<I", 77)
    (tmp_path / "m.gguf").write_bytes(head + b"\0" * 64)
    with pytest.raises(ModelError, match=r"metadata type 77 at byte .* newer GGUF version"):
        load(tmp_path / "m.gguf")


# ---------------------------------------------------------------------------------------- at random


def outcome(call):
    """Loads, and runs what has loaded."""
    try:
        return call()
    except SglError:
        return None


GEMMA = {**Gemma3TextConfig(**TINY).to_dict(), "architectures": ["Gemma3ForCausalLM"]}


def test_random_configs_load_and_run_or_are_refused(folder):
    draw = random.Random(3)
    files = {
        "config.json": [CONFIG, CONFIG, GEMMA], "tokenizer_config.json": [SETTINGS], "tokenizer.json": [tiny_tokenizer(96)],
        "generation_config.json": [{"eos_token_id": [1]}],
    }  # fmt: skip
    options: dict[str, Any] = dict(
        dtype="float32", max_running=2, max_total_tokens=64, step_tokens=8
    )
    loaded = 0
    for _ in range(EXAMPLES):
        file = draw.choice(["config.json", "config.json", *files])
        write(folder / file, strangely(draw, draw.choice(files[file])))

        def run():
            with sgl.Engine(model=str(folder), device="cpu", **options, in_process=True) as engine:
                outcome(engine.chat_template)
                return engine.complete([5, 6, 7], SamplingParams(max_tokens=2, temperature=0))

        loaded += outcome(run) is not None
        write(folder / file, files[file][0])
    assert loaded or EXAMPLES < 20


def test_random_gguf_heads_load_or_are_refused(tmp_path, tensors):
    draw = random.Random(5)
    path = tmp_path / "m.gguf"
    plain = gguf_file(METADATA, gguf_names(tensors))
    start = len(plain) - sum(t.numel() * 4 for t in tensors.values())
    loaded = 0
    for _ in range(EXAMPLES):
        data = bytearray(plain)
        for _ in range(draw.randrange(1, 4)):
            at = draw.randrange(start)
            kind = draw.randrange(4)
            if kind == 0:
                data[at] = draw.randrange(256)
            elif kind == 1:
                data[at : at + 8] = struct.pack(
                    "<Q", draw.choice([0, 1, 2**31, 2**63, 2**64 - 1, 96, 7])
                )
            elif kind == 2:
                del data[at : at + draw.randrange(1, 9)]
            else:
                data[at:at] = bytes(draw.randrange(256) for _ in range(draw.randrange(1, 9)))
        path.write_bytes(data if draw.random() < 0.9 else data[: draw.randrange(len(data))])
        loaded += outcome(lambda: load(path, dtype="float32", context_length=64)) is not None
    assert loaded or EXAMPLES < 20


def test_every_field_of_the_schema_refuses_what_is_strange():
    for fields in (
        config_fields.CONFIG,
        config_fields.ROPE,
        config_fields.GENERATION,
        config_fields.TOKENIZER,
        config_fields.GGUF,
    ):
        for name, field in fields.items():
            for value in STRANGE:
                if value is not None and field.problem(value):
                    required = {
                        key: {"whole": 1, "texts": ["x"]}[f.kind]
                        for key, f in fields.items()
                        if f.required
                    }
                    with pytest.raises(ModelError, match=f"`{name}`"):
                        config_fields.check({**required, name: value}, fields, "file")
    assert torch.get_num_threads() < 1024
