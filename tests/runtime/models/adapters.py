"""Adapters of tiny models, as peft makes and saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

peft = pytest.importorskip("peft")


class Adapted:
    """A model of transformers with adapters of random matrices, each saved in a folder.

    Attributes:
        folders: folder of each adapter, by name.
        config: config of the model.
    """

    def __init__(
        self, model: PreTrainedModel, folder: Path, adapters: dict[str, dict[str, Any]]
    ) -> None:
        self.folders: dict[str, Path] = {}
        self.config = model.config
        self._model: Any = None
        for seed, (name, settings) in enumerate(adapters.items()):
            common: dict[str, Any] = {
                "target_modules": "all-linear",
                "lora_alpha": 16,
                "init_lora_weights": False,
            }
            config = peft.LoraConfig(**common | settings)
            if self._model is None:
                self._model = peft.get_peft_model(model, config, adapter_name=name)
            else:
                self._model.add_adapter(name, config)
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                for parameter, tensor in self._model.named_parameters():
                    if f".{name}." in parameter:
                        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)
            self._model.save_pretrained(str(folder), selected_adapters=[name])
            self.folders[name] = folder / name
        self._model.eval()

    def __call__(self, ids: list[int], name: str | None) -> torch.Tensor:
        """Log-probabilities [tokens, vocabulary] with an adapter, or without any."""
        return self.output(ids, name).logits[0].log_softmax(-1)

    def output(self, ids: list[int], name: str | None, **options: bool) -> Any:
        """The model's own output with an adapter, or without any, and with options of its call."""
        with torch.no_grad():
            if name is None:
                with self._model.disable_adapter():
                    return self._model(torch.tensor([ids]), **options)
            self._model.set_adapter(name)
            return self._model(torch.tensor([ids]), **options)
