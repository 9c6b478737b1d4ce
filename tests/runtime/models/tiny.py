"""Models of a few thousand random weights, as transformers saves them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import PreTrainedModel

VOCAB = 96


def tiny_tokenizer(vocab_size: int = VOCAB) -> dict:
    """A byte-level tokenizer whose tokens are single characters."""
    vocab = {chr(33 + i): i for i in range(vocab_size)}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None, "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }  # fmt: skip


def randomise(model: PreTrainedModel) -> PreTrainedModel:
    """Weights under which everything matters: as transformers draws them norms are all ones, biases
    all zeros, and logits so small that a wrong rotation changes them by less than rounding does.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            noise = torch.randn(tensor.shape, generator=generator)
            # Zamba normalises the sum of residual and block, and rounding of a large block with it
            scale = 0.05 if name.endswith(".linear.weight") else 1.5
            if tensor.ndim == 1:
                tensor += 0.3 * noise
            else:
                tensor.copy_(noise * scale / tensor.shape[-1] ** 0.5)
        for name, tensor in model.named_buffers():
            if name.endswith(("correction_bias", "layer_scalar")):
                tensor += 0.3 * torch.randn(tensor.shape, generator=generator)
            if name.endswith("balancing_biases"):  # so that tokens also choose no expert
                tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))
    return model.eval()


def save(model: PreTrainedModel, folder: Path) -> Path:
    """The model as transformers saves it, with a tokenizer."""
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(
        json.dumps(tiny_tokenizer(model.config.get_text_config().vocab_size))
    )
    return folder
