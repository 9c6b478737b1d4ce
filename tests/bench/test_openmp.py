"""The benchmark runs, on a model without meaning."""

import subprocess
import sys
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM

from tests.runtime.models.tiny import VOCAB, save

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "openmp.py"


def test_waiting_threads_are_compared(tmp_path):
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, bos_token_id=0, eos_token_id=1, pad_token_id=None,
    )  # fmt: skip
    model = str(save(LlamaForCausalLM(config), tmp_path))
    command = [
        sys.executable,
        str(SCRIPT),
        "--rounds",
        "1",
        "--settings",
        "ours",
        "--new",
        "2",
        "--model",
        model,
    ]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    name, *figures = shown[1].split()
    assert name == "ours"
    assert len(figures) == 3
