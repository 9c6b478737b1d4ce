"""The oracle's rule as a model, with its tokenizer."""

from __future__ import annotations

import numpy as np
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from sglang_lite.runtime.loading.load_model import LoadedModel
from sglang_lite.runtime.tokens.tokenizer import Tokenizer
from tests.conformance import oracle
from tests.conformance.oracle import ALPHABET
from tests.runtime.scripted import ScriptedModel

# GPT-2's names of bytes that are not printed.
NAMES = {" ": "\u0120", "\n": "\u010a", "\0": "\u0100"}


class RuleModel(ScriptedModel):
    """The oracle's rule as a model."""

    def logits(self, hidden):
        states = hidden[:, 0].numpy().view(np.uint64).tolist()
        return torch.tensor([oracle.logits(state) for state in states], dtype=torch.float32)


def tokenizer() -> Backend:
    """A token a byte."""
    backend = Backend(
        models.BPE({NAMES.get(letter, letter): i for i, letter in enumerate(ALPHABET)}, [])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def model() -> LoadedModel:
    tokens = [letter.encode("latin-1") for letter in ALPHABET]
    found = Tokenizer(tokenizer(), tokens, [0], eos_ids=[0])
    return LoadedModel("rule", RuleModel(), found, len(tokens), frozenset({0}), 4096)
