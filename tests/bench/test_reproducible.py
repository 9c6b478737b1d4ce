"""The benchmark runs, on a model without meaning."""

import functools
import re
import runpy
import sys
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM

import sglang_lite as sgl
from tests.runtime.models.tiny import VOCAB, randomise, save

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "reproducible.py"


def test_equal_answers_are_counted(tmp_path, monkeypatch, capsys):
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, bos_token_id=0, eos_token_id=1, pad_token_id=None,
    )  # fmt: skip
    model = str(save(randomise(LlamaForCausalLM(config)), tmp_path))
    monkeypatch.syspath_prepend(SCRIPT.parent)
    monkeypatch.setattr(sgl, "Engine", functools.partial(sgl.Engine, in_process=True))
    command = [
        str(SCRIPT),
        "--prompts",
        "3",
        "--new",
        "4",
        "--rows",
        "2",
        "--threads",
        "1",
        "--model",
        model,
    ]
    for options in ([], ["--deterministic", "--temperature", "1"]):
        monkeypatch.setattr(sys, "argv", [*command, *options])
        runpy.run_path(str(SCRIPT), run_name="__main__")
        shown = capsys.readouterr().out
        assert len(re.findall(r"\d of 3 equal \(", shown)) == 3
    assert shown.count("3 of 3 equal (100.0%)") == 3  # of the deterministic one
