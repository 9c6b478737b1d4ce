"""Folder of SmolLM2 with its channels in a random order, which is the same function in other
blocks; and in formats.

python benchmarks/permuted.py OUT [--formats gptq awq nf4 fp4 nvfp4 mxfp4]

The model's file holds blocks of 4 bits, so to round its matrices to 4 bits again in the same blocks
would lose little. With the hidden channels, the MLP's and each head's values in a random order, a
block has columns of many of the file's. Prints the largest difference of log-probabilities on a
text, and fails if it is above 1e-4. The folder is OUT/plain; those of `--formats` are rounded to
the nearest by the packers of the tests, in blocks of 32 (nf4, fp4 64; nvfp4 16).
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.append(str(Path(__file__).parents[1]))  # for tests

from sglang_lite.runtime.models.resolve import resolve
from tests.runtime.models.packings import Format, awq, declare, four_bits, gptq, mxfp4, nvfp4

TEXT = (
    "The import statement combines two operations; it searches for the named module, then it binds the results. "
    * 8
)
FORMATS = {
    "gptq": gptq(symmetric=False), "awq": awq(), "nf4": four_bits(block=64), "fp4": four_bits("fp4", block=64),
    "nvfp4": nvfp4(), "mxfp4": mxfp4(),
}  # fmt: skip


@torch.inference_mode()
def permute(model: Any, generator: torch.Generator) -> None:
    """Puts the channels of a Llama whose head is its embedding in a random order, in place."""

    def order(size: int) -> torch.Tensor:
        return torch.randperm(size, generator=generator)

    config, state = model.config, model.state_dict()
    heads, kept = config.num_attention_heads, config.num_key_value_heads
    hidden = order(config.hidden_size)
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        state[name].copy_(state[name][..., hidden])
    for i in range(config.num_hidden_layers):
        layer = {name: state[f"model.layers.{i}.{name}.weight"] for name in (
            "input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
            "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
        )}  # fmt: skip
        size = len(layer["self_attn.v_proj"]) // kept
        by_head = torch.stack([order(size) for _ in range(kept)])
        values = (by_head + size * torch.arange(kept).unsqueeze(1)).flatten()
        mixed = (
            by_head.repeat_interleave(heads // kept, 0) + size * torch.arange(heads).unsqueeze(1)
        ).flatten()
        inner = order(config.intermediate_size)
        for name, tensor in layer.items():
            rows = {"self_attn.v_proj": values, "mlp.gate_proj": inner, "mlp.up_proj": inner}.get(
                name
            )
            columns = {"self_attn.o_proj": mixed, "mlp.down_proj": inner}.get(name, hidden)
            if columns is not hidden:
                rows = hidden
            changed = tensor[..., columns]
            tensor.copy_(changed if rows is None else changed[rows])


@torch.inference_mode()
def write_plain(out: Path) -> None:
    """Writes the permuted model, in float32."""
    file = resolve("smollm2-135m")
    model: Any = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    ids = torch.tensor([tokenizer(TEXT)["input_ids"]])
    before = model(ids).logits.log_softmax(-1)
    permute(model, torch.Generator().manual_seed(0))
    difference = (model(ids).logits.log_softmax(-1) - before).abs().max().item()
    print(f"{ids.numel()} tokens: log-probabilities differ by at most {difference:.1e}", flush=True)
    if difference > 1e-4:
        sys.exit("not the same function")
    del model.config.quantization_config  # the file's
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(out)
    tokenizer.save_pretrained(out)
    state = model.state_dict()
    del state["lm_head.weight"]  # the embedding's
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})


def write_packed(plain: Path, out: Path, form: Format) -> None:
    """Writes a folder with the layers' matrices in a format."""
    shutil.copytree(plain, out, ignore=shutil.ignore_patterns("*.safetensors"))
    state = load_file(plain / "model.safetensors")
    for name in [name for name, tensor in state.items() if ".layers." in name and tensor.ndim == 2]:
        tensors, _ = form.store(state.pop(name))
        module = name.removesuffix(".weight")
        state |= {module + part: tensor.clone().contiguous() for part, tensor in tensors.items()}
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    declare(out, form.config)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--formats", nargs="*", default=[], choices=FORMATS)
    options = parser.parse_args()
    if not (plain := options.out / "plain").exists():
        write_plain(plain)
    for name in options.formats:
        write_packed(plain, options.out / name, FORMATS[name])


if __name__ == "__main__":
    main()
