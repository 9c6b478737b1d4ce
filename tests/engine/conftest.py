"""Two small checkpoints, and an engine of one in both forms: one child for all tests that leave it as it was."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import sglang_lite as sgl
from tests.runtime.models.tiny import VOCAB, save

SETTINGS = dict(dtype="float32", max_running=4, max_queued=64, max_total_tokens=8192, threads=1, deterministic=True)


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Checkpoints of one architecture, with other weights."""
    made = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=2048, eos_token_id=0, bos_token_id=1, initializer_range=0.3,
        )  # fmt: skip
        made.append(str(save(LlamaForCausalLM(config), tmp_path_factory.mktemp("tiny"))))
    return made


@pytest.fixture(scope="session")
def own(folders):
    """An engine in a process of its own."""
    with sgl.Engine(folders[0], **SETTINGS) as engine:
        yield engine


@pytest.fixture(scope="session")
def here(folders):
    """The same in this process."""
    with sgl.Engine(folders[0], **SETTINGS, in_process=True) as engine:
        yield engine
