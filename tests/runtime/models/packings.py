"""Checkpoints of a small model as quantisation tools pack them, written from the published layouts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.runtime.models.tiny import VOCAB, randomise, save

TINY = Qwen3Config(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=256, bos_token_id=0, eos_token_id=1,
    pad_token_id=None, tie_word_embeddings=False,
)  # fmt: skip
E2M1 = torch.tensor(
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
)
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Format:
    """A format: what the config says, and how a matrix [outputs, inputs] is stored: tensors by
    suffix, and its values.

    Attributes:
        wide: whether the values are decoded on CPUs, as no kernel multiplies them.
    """

    config: dict[str, Any]
    store: Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
    names: tuple[str, ...] = ()
    wide: bool = False
    more: dict[str, Any] = field(default_factory=dict)


def words(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Numbers one behind another, each row in whole int32 words: bit by bit, by Python's integers."""
    rows = []
    for row in numbers.tolist():
        whole = sum(int(number) << i * bits for i, number in enumerate(row))
        rows.append(np.frombuffer(whole.to_bytes(-(-len(row) * bits // 32) * 4, "little"), "<i4"))
    return torch.from_numpy(np.stack(rows).copy())


def integers(weight: torch.Tensor, bits: int, group: int, *, symmetric: bool, dtype=torch.float16):
    """Rounded to the nearest: unsigned numbers [N, K], scales and zeros [N, groups], values [N, K]."""
    rows, columns = weight.shape
    blocks = weight.view(rows, -1, group)
    most = 2**bits - 1
    if symmetric:
        scale = (blocks.abs().amax(-1) / (most // 2)).to(dtype)
        zero = torch.full(scale.shape, 2 ** (bits - 1))
    else:
        low, high = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
        scale = ((high - low) / most).to(dtype)
        zero = (-low / scale.float()).round().clamp(0, most).long()
    numbers = (
        ((blocks / scale.float().unsqueeze(-1)).round() + zero.unsqueeze(-1)).clamp(0, most).long()
    )
    values = (numbers - zero.unsqueeze(-1)).float() * scale.float().unsqueeze(-1)
    return numbers.view(rows, columns), scale, zero, values.view(rows, columns)


def gptq(bits=4, group=32, *, symmetric=True, second=False, reorder=False) -> Format:
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": symmetric,
        "desc_act": reorder,
    }
    if second:
        config["checkpoint_format"] = "gptq_v2"

    def store(weight):
        columns = weight.shape[1]
        size = columns if group == -1 else group
        order = (
            torch.randperm(columns, generator=torch.Generator().manual_seed(1))
            if reorder
            else torch.arange(columns)
        )
        index = torch.empty(columns, dtype=torch.int32)
        index[order] = (torch.arange(columns) // size).int()
        numbers, scale, zero, values = integers(weight[:, order], bits, size, symmetric=symmetric)
        if not second:
            zero = zero.clamp(min=1)
            values = (
                (numbers - zero.repeat_interleave(size, 1)).float()
            ) * scale.float().repeat_interleave(size, 1)
        back = torch.empty_like(order)
        back[order] = torch.arange(columns)
        stored = {
            ".qweight": words(numbers[:, back], bits).t(),
            ".qzeros": words(zero.t() - (0 if second else 1), bits),
            ".scales": scale.t(),
            ".g_idx": index,
        }
        return stored, values[:, back]

    return Format(config, store, ("gptq", "gptq_marlin"))


def awq(group=32) -> Format:
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # output of each nibble, from the lowest

    def words_of(numbers):  # [rows, outputs]
        return words(numbers.view(len(numbers), -1, 8)[:, :, order].flatten(1), 4)

    def store(weight):
        size = weight.shape[1] if group == -1 else group
        numbers, scale, zero, values = integers(weight, 4, size, symmetric=False)
        return {
            ".qweight": words_of(numbers.t()),
            ".qzeros": words_of(zero.t()),
            ".scales": scale.t(),
        }, values

    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": "gemm",
    }
    return Format(config, store, ("awq", "awq_marlin"))


def group_of(strategy, bits, group, kind="int", **more):
    weights = {"type": kind, "num_bits": bits, "strategy": strategy, "group_size": group, **more}
    return {"group_0": {"weights": weights, "targets": ["Linear"]}}


def packed(bits=4, group=32, *, symmetric=True) -> Format:
    strategy = "channel" if group is None else "group"
    config = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": group_of(strategy, bits, group, symmetric=symmetric),
    }  # fmt: skip

    def store(weight):
        size = weight.shape[1] if group is None else group
        numbers, scale, zero, values = integers(
            weight, bits, size, symmetric=symmetric, dtype=torch.bfloat16
        )
        stored = {".weight_packed": words(numbers, bits), ".weight_scale": scale}
        stored[".weight_shape"] = torch.tensor(weight.shape)
        if not symmetric:
            stored[".weight_zero_point"] = words(zero.t(), bits).t()
        return stored, values

    return Format(config, store, ("compressed-tensors",))


def eight(*, inputs: bool = True) -> Format:
    groups = group_of("channel", 8, None)
    if inputs:
        groups["group_0"]["input_activations"] = {
            "type": "int",
            "num_bits": 8,
            "strategy": "token",
            "dynamic": True,
        }
    config = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": groups,
    }

    def store(weight):
        numbers, scale, _, values = integers(
            weight, 8, weight.shape[1], symmetric=True, dtype=torch.bfloat16
        )
        return {".weight": (numbers - 128).to(torch.int8), ".weight_scale": scale}, values

    return Format(config, store, ("compressed-tensors", "w8a8_int8"))


def _floats(weight, group, scale_of):
    """Indices in E2M1 [N, K], scales [N, groups] as `scale_of` makes them of the largest numbers,
    and values.
    """
    blocks = weight.view(len(weight), -1, group)
    scale = scale_of(blocks.abs().amax(-1) / 6)
    indices = (blocks.unsqueeze(-1) / scale[..., None, None] - E2M1).abs().argmin(-1)
    return (
        indices.view(weight.shape),
        scale,
        (E2M1[indices] * scale.unsqueeze(-1)).view(weight.shape),
    )


def _bytes(indices):
    return (indices[:, ::2] | indices[:, 1::2] << 4).to(torch.uint8)


def nvfp4(tool="compressed-tensors") -> Format:
    def store(weight):
        whole = (weight.abs().max() / (6 * 448)).reshape(1)
        eights = (weight.view(len(weight), -1, 16).abs().amax(-1) / 6 / whole).to(
            torch.float8_e4m3fn
        )
        if tool == "modelopt":
            indices, _, values = _floats(weight, 16, lambda _: eights.float() * whole)
            return {
                ".weight": _bytes(indices),
                ".weight_scale": eights,
                ".weight_scale_2": whole.squeeze(),
            }, values
        inverse = 1 / whole
        indices, _, values = _floats(weight, 16, lambda _: eights.float() / inverse)
        return {
            ".weight_packed": _bytes(indices),
            ".weight_scale": eights,
            ".weight_global_scale": inverse,
        }, values

    if tool == "modelopt":
        return Format(
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
            store,
            ("modelopt_fp4",),
        )
    groups = group_of("tensor_group", 4, 16, kind="float")
    config = {"quant_method": tool, "format": "nvfp4-pack-quantized", "config_groups": groups}
    return Format(config, store, ("compressed-tensors",))


def mxfp4() -> Format:
    def store(weight):
        indices, scale, values = _floats(weight, 32, lambda most: 2.0 ** most.log2().ceil())
        return {
            ".weight_packed": _bytes(indices),
            ".weight_scale": (scale.log2() + 127).to(torch.uint8),
        }, values

    groups = group_of("group", 4, 32, kind="float")
    config = {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "config_groups": groups,
    }
    return Format(config, store, ("compressed-tensors",))


NF4 = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip


def four_bits(kind="nf4", block=32, *, nested=False) -> Format:
    table = NF4 if kind == "nf4" else E2M1 / 6

    def store(weight):
        flat = torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % block)).view(
            -1, block
        )
        most = flat.abs().amax(1)
        state = {
            "quant_type": kind,
            "blocksize": block,
            "dtype": "float16",
            "shape": list(weight.shape),
        }
        stored = {".weight.absmax": most, ".weight.quant_map": table}
        if nested:
            offset, size = most.mean(), 4
            padded = torch.nn.functional.pad(most - offset, (0, -len(most) % size)).view(-1, size)
            outer = padded.abs().amax(1)
            book = torch.linspace(-1, 1, 256)
            eights = (
                ((padded / outer.unsqueeze(1) + 1) / 2 * 255)
                .round()
                .clamp(0, 255)
                .flatten()[: len(most)]
                .long()
            )
            most = book[eights] * outer.repeat_interleave(size)[: len(most)] + offset
            stored |= {
                ".weight.absmax": eights.to(torch.uint8), ".weight.nested_absmax": outer,
                ".weight.nested_quant_map": book,
            }  # fmt: skip
            state |= {
                "nested_blocksize": size,
                "nested_dtype": "float32",
                "nested_offset": offset.item(),
            }
        indices = (flat.unsqueeze(-1) / most[:, None, None] - table).abs().argmin(-1)
        values = (table[indices] * most.unsqueeze(1)).flatten()[: weight.numel()].view(weight.shape)
        flat_indices = indices.flatten()[: weight.numel()]
        stored[".weight"] = (
            (flat_indices[::2] << 4 | flat_indices[1::2]).to(torch.uint8).unsqueeze(1)
        )
        text = json.dumps(state).encode()
        stored[f".weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(
            list(text), dtype=torch.uint8
        )
        return stored, values

    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    return Format(config, store, ("bitsandbytes",), wide=True)


def bytes_of_bitsandbytes() -> Format:
    def store(weight):
        most = weight.abs().amax(1)
        numbers = (weight / most.unsqueeze(1) * 127).round().to(torch.int8)
        return {".weight": numbers, ".SCB": most, ".weight_format": torch.tensor(0)}, numbers * (
            most / 127
        ).unsqueeze(1)

    config = {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}
    return Format(config, store, ("bitsandbytes",))


def bytes_of_torchao(bits=8, group=None, kind="IntxWeightOnlyConfig", *, symmetric=True) -> Format:
    config = {
        "quant_method": "torchao",
        "quant_type": {"default": {"_type": kind, "_version": 2, "_data": {}}},
    }

    def store(weight):
        size = weight.shape[1] if group is None else group
        numbers, scale, zero, values = integers(
            weight, bits, size, symmetric=symmetric, dtype=torch.bfloat16
        )
        half = 2 ** (bits - 1)
        stored = {
            "._weight_qdata": (numbers.short() - half).to(torch.int8),
            "._weight_scale": scale,
        }
        return stored | {"._weight_zero_point": (zero.short() - half).to(torch.int8)}, values

    return Format(config, store, ("torchao",))


def floats_of_torchao() -> Format:
    kind = {"_type": "Float8WeightOnlyConfig", "_version": 2, "_data": {}}

    def store(weight):
        scale = weight.abs().amax(1, keepdim=True) / 448
        numbers = (weight / scale).to(torch.float8_e4m3fn)
        return {"._weight_qdata": numbers, "._weight_scale": scale}, numbers.float() * scale

    config = {"quant_method": "torchao", "quant_type": {"default": kind}}
    return Format(config, store, ("torchao",), wide=True)


def eight_bit_floats() -> Format:
    groups = group_of("channel", 8, None, kind="float")

    def store(weight):
        scale = weight.abs().amax(1, keepdim=True) / 448
        numbers = (weight / scale).to(torch.float8_e4m3fn)
        return {".weight": numbers, ".weight_scale": scale}, numbers.float() * scale

    return Format(
        {"quant_method": "compressed-tensors", "config_groups": groups},
        store,
        ("compressed-tensors",),
    )


def beside(first: Format, second: Format, **config: Any) -> Format:
    """Two formats of a tool in one checkpoint: the first for keys, values, gates and ups, the
    second for others.
    """
    both = first.config | config
    if (groups := first.config.get("config_groups")) is not None:
        both["config_groups"] = groups | {"group_1": second.config["config_groups"]["group_0"]}
    return Format(
        both,
        lambda weight: (first if len(weight) in (32, 96) else second).store(weight),
        first.names[:1],
    )


_LAYERS = {"a": {"quant_algo": "NVFP4", "group_size": 16}, "b": {"quant_algo": "FP8"}}
MIXED = {
    "integers of 4 bits and floats": beside(packed(), eight_bit_floats()),
    "nvfp4 and floats": beside(nvfp4(), eight_bit_floats()),
    "nvfp4 and integers": beside(nvfp4(), eight()),
    "integers of 4 and 8 bits": beside(packed(), packed(8)),
    "gptq, 8 bits and 4": beside(
        gptq(4), gptq(8), dynamic={"-:.*head": {}, "+:.*q_proj": {"bits": 8}}
    ),
    "gptq, groups of 16 and 32": beside(
        gptq(4), gptq(4, 16), dynamic={".*q_proj": {"group_size": 16}}
    ),
    "nvfp4 and floats of Model Optimizer": beside(
        nvfp4("modelopt"),
        eight_bit_floats(),
        quant_algo="MIXED_PRECISION",
        quantized_layers=_LAYERS,
    ),
}
FORMATS = {
    "gptq": gptq(), "gptq, zeros": gptq(symmetric=False), "gptq, a scale a row": gptq(group=-1),
    "gptq, second version": gptq(symmetric=False, second=True), "gptq, reordered": gptq(reorder=True, symmetric=False),
    "gptq, 2 bits": gptq(2, symmetric=False), "gptq, 3 bits": gptq(3, second=True, symmetric=False),
    "gptq, 8 bits": gptq(8), "gptq, 8 bits with zeros": gptq(8, symmetric=False, second=True),
    "awq": awq(), "awq, a scale a row": awq(-1),
    "compressed-tensors": packed(), "compressed-tensors, zeros": packed(symmetric=False),
    "compressed-tensors, a scale a row": packed(group=None), "compressed-tensors, 8 bits": packed(8),
    "compressed-tensors, 3 bits": packed(3), "compressed-tensors, bytes": eight(),
    "compressed-tensors, bytes of weights alone": eight(inputs=False),
    "nvfp4": nvfp4(), "nvfp4 of Model Optimizer": nvfp4("modelopt"), "mxfp4": mxfp4(),
    "nf4": four_bits(), "nf4, scales in 8 bits": four_bits(nested=True), "fp4": four_bits("fp4"),
    "nf4, blocks over two rows": four_bits(block=64), "bitsandbytes, 8 bits": bytes_of_bitsandbytes(),
    "torchao": bytes_of_torchao(4, 32, symmetric=False),
    "torchao, 8 bits": bytes_of_torchao(kind="Int8WeightOnlyConfig"), "torchao, floats": floats_of_torchao(),
}  # fmt: skip


def write(folder: Path, form: Format, config=TINY, **more: torch.Tensor):
    """A checkpoint in a format; returns it, and transformers' model of the same values."""
    reference = randomise(Qwen3ForCausalLM(config))
    save(reference, folder)
    state = {}
    for name, weight in reference.state_dict().items():
        if weight.ndim == 1 or "layers" not in name:
            state[name] = weight.contiguous()
            continue
        tensors, values = form.store(weight)
        module = name.removesuffix(".weight")
        state |= {module + part: tensor.clone().contiguous() for part, tensor in tensors.items()}
        weight.copy_(values)
    save_file({**state, **more}, folder / "model.safetensors")
    declare(folder, form.config)
    return folder, reference


def declare(folder: Path, quantisation: Any) -> None:
    file = folder / "config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"quantization_config": quantisation})
    )
