"""Shapes of real models, to be filled with random weights."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.loading.load_model import LoadedModel, precision
from sglang_lite.runtime.models.decoder import Decoder
from sglang_lite.runtime.models.kv_scales import kv_scales
from sglang_lite.runtime.models.read_config import spec_from_config
from sglang_lite.runtime.models.spec import (
    AttentionSpec,
    DenseSpec,
    ExpertsSpec,
    LatentSpec,
    LayerSpec,
    ModelSpec,
    RopeSpec,
)
from sglang_lite.runtime.models.weights.dummy import DummySource
from sglang_lite.runtime.models.weights.quantised_formats import PLAIN, Q4_K
from sglang_lite.runtime.tokens.tokenizer import Tokenizer


def _build_shape_spec(
    hidden: int,
    layers: int,
    heads: int,
    inner: int | ExpertsSpec,
    vocab: int,
    *,
    qk_norm: bool = False,
    tied: bool = False,
    kv_heads: int = 8,
    head_dim: int = 128,
) -> ModelSpec:
    layer = LayerSpec(
        AttentionSpec(
            heads,
            kv_heads,
            head_dim,
            head_dim,
            head_dim**-0.5,
            RopeSpec(theta=5e5),
            qk_norm="head" if qk_norm else "",
        ),
        DenseSpec(inner) if isinstance(inner, int) else inner,
    )
    dense = "qwen3" if qk_norm else "llama"
    return ModelSpec(
        architecture=dense if isinstance(inner, int) else f"{dense}_moe",
        vocab_size=vocab,
        hidden_size=hidden,
        max_positions=16384,
        rms_eps=1e-5,
        layers=(layer,) * layers,
        tied_embeddings=tied,
    )


def _deepseek_v2_lite() -> ModelSpec:
    rope = RopeSpec(rotary_dim=64, interleaved=True)
    attention = LatentSpec(16, 512, None, 128, 64, 128, 192**-0.5, rope)
    experts = LayerSpec(attention, ExpertsSpec(64, 6, 1408, shared_size=2 * 1408))
    return ModelSpec(
        architecture="deepseek_v2",
        vocab_size=102_400,
        hidden_size=2048,
        max_positions=16384,
        rms_eps=1e-6,
        layers=(LayerSpec(attention, DenseSpec(10944)), *(experts,) * 26),
    )


SHAPES = {
    "llama-3.1-8b": _build_shape_spec(4096, 32, 32, 14336, 128_256),
    "llama-3.1-70b": _build_shape_spec(8192, 80, 64, 28672, 128_256),
    "qwen3-0.6b": _build_shape_spec(1024, 28, 16, 3072, 151_936, qk_norm=True, tied=True),
    "qwen3-14b": _build_shape_spec(5120, 40, 40, 17408, 151_936, qk_norm=True),
    "qwen3-30b-a3b": _build_shape_spec(
        2048, 48, 32, ExpertsSpec(128, 8, 768, normalise=True), 151_936, qk_norm=True, kv_heads=4
    ),
    "deepseek-v2-lite": _deepseek_v2_lite(),
    "small": _build_shape_spec(256, 2, 4, 512, 10_240, kv_heads=2, head_dim=64),
}
# Shapes for CPUs, and the factor by which texts are shortened there, because whole ones take too
# long.
ON_CPUS = {"small": 16}
_SPLIT = pre_tokenizers.Split(Regex(" [a-z]+"), "isolated")


def hf_config(name: str) -> dict[str, object]:
    """Returns the `config.json` that a model of this shape would have on the Hugging Face hub."""
    spec = SHAPES[name]
    family = spec.architecture
    attention = spec.first_attention
    feed_forward = spec.layers[0].feed_forward
    others: dict[str, object] = {
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.key_size,
    }
    if isinstance(attention, LatentSpec):
        others = {
            "num_key_value_heads": attention.heads,
            "kv_lora_rank": attention.rank,
            "q_lora_rank": attention.query_rank,
            "qk_nope_head_dim": attention.nope_size,
            "qk_rope_head_dim": attention.rope_size,
            "v_head_dim": attention.value_size,
        }
    sparse = [
        layer.feed_forward for layer in spec.layers if isinstance(layer.feed_forward, ExpertsSpec)
    ]
    if sparse:
        experts = sparse[0]
        others |= {
            "num_experts": experts.count,
            "num_experts_per_tok": experts.top_k,
            "moe_intermediate_size": experts.size,
            "norm_topk_prob": experts.normalise,
        }
    if len(sparse) < len(spec.layers) and sparse:
        others |= {
            "n_routed_experts": sparse[0].count,
            "n_shared_experts": sparse[0].shared_size // sparse[0].size,
            "first_k_dense_replace": len(spec.layers) - len(sparse),
        }
    return {
        "architectures": [f"{family.title().replace('_', '')}ForCausalLM"], "model_type": family, **others,
        "vocab_size": spec.vocab_size, "hidden_size": spec.hidden_size, "intermediate_size": feed_forward.size,
        "num_hidden_layers": len(spec.layers), "num_attention_heads": attention.heads,
        "hidden_act": feed_forward.activation, "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": spec.rms_eps, "rope_theta": attention.rope.theta, "tie_word_embeddings": spec.tied_embeddings,
    }  # fmt: skip


def write_model(folder: Path, name: str) -> None:
    """Writes the files that an engine needs to load a model of this shape, except its weights: the
    config, and a tokenizer whose tokens are meaningless words.
    """
    (folder / "config.json").write_text(json.dumps(hf_config(name)))
    words = {_word_of_token(i).replace(" ", "\u0120"): i for i in range(SHAPES[name].vocab_size)}
    backend = Backend(models.BPE(words, [], ignore_merges=True))
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([_SPLIT, bytewise])
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))


def load_shape(
    name: str,
    *,
    fp8: bool = False,
    model_impl: str = "native",
    quantization: str | None = None,
    deterministic: bool = False,
    config: EngineConfig | None = None,
) -> LoadedModel:
    """Creates a model of a shape on the first GPU, or on the CPU if no GPU is available, with a
    tokenizer whose tokens are meaningless words.

    Args:
        fp8: whether weights, keys and values (but not latents) have 8 bits instead of bfloat16.
        model_impl: "native", or "transformers" for the code of that package instead of ours.
        quantization: as in `EngineConfig`; "gguf" for matrices in blocks of Q4_K.
        deterministic: as in `EngineConfig`; must also be set for the engine.
        config: settings of the engine whose kernels are compiled ahead; None for the defaults.
    """
    if model_impl == "transformers":
        return _load_with_transformers(name)
    # The spec that an engine reads from a folder, for which the kernels are known.
    spec = spec_from_config(hf_config(name), name)
    device = torch.device("cpu")
    kind = Decoder
    compiles = None
    kv_fp8 = fp8 and not spec.latent
    if torch.cuda.is_available():
        from sglang_lite.runtime.models.gpu_decoder import GpuDecoder  # needs Triton

        device = torch.device("cuda:0")
        kind = GpuDecoder
    quantization = "fp8" if fp8 else quantization
    formats = precision(
        "auto", device, quantization=quantization, kv_fp8=kv_fp8, batch_invariant=deterministic
    )
    matrices = Q4_K if quantization == "gguf" else PLAIN
    if device.type == "cuda":
        from sglang_lite.runtime.executor.compile_ahead import start_compiling

        compiles = start_compiling(
            config or EngineConfig(),
            spec,
            formats,
            spec.max_positions,
            device,
            stored=matrices.format,
        )
    with torch.inference_mode():
        model = kind(spec, DummySource(device, matrices), formats, device, spec.max_positions)
    if kv_fp8:
        model.kv_scales = kv_scales(model, {}, bos=None)
    return LoadedModel(
        name,
        model,
        make_tokenizer(spec.vocab_size),
        spec.vocab_size,
        frozenset(),
        spec.max_positions,
        compiles,
    )


def _load_with_transformers(name: str) -> LoadedModel:
    """Creates a model of a shape with transformers' code instead of ours."""
    # imports all of transformers' models
    from sglang_lite.runtime.models.load_transformers import load_transformers

    spec = SHAPES[name]
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(hf_config(name)))
        model = load_transformers(
            Path(folder), precision("auto", device).compute, device, dummy=True
        )
    return LoadedModel(
        name,
        model,
        make_tokenizer(spec.vocab_size),
        spec.vocab_size,
        frozenset(),
        spec.max_positions,
    )


def make_tokenizer(size: int) -> Tokenizer:
    """Creates a tokenizer with `size` tokens, each of which is one word."""
    words = [_word_of_token(i) for i in range(size)]
    backend = Backend(models.BPE({word: i for i, word in enumerate(words)}, [], ignore_merges=True))
    backend.pre_tokenizer = _SPLIT
    return Tokenizer(backend, [word.encode() for word in words], [], eos_ids=[])


def text_from_ids(ids: Iterable[int]) -> str:
    """Returns the text that the tokenizer encodes to these ids."""
    return "".join(map(_word_of_token, ids))


def _word_of_token(i: int) -> str:
    """Returns the word of a token: a space and four letters. Text is split into these words before
    it is encoded.
    """
    letters = "abcdefghijklmnopqrstuvwxyz"
    return " " + "".join(letters[i // 26**place % 26] for place in (3, 2, 1, 0))
