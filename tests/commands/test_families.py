"""`sglang-lite families`: every family is written as pseudo-code, with the numbers of its config."""

import re

import pytest
from transformers import Gemma2Config, Gemma2ForCausalLM, GPTBigCodeConfig, GPTBigCodeForCausalLM

from sglang_lite.cli import main
from sglang_lite.runtime.models.families import FAMILIES
from tests.runtime.models.tiny import save


def lines_of(capsys, *arguments):
    assert main(["families", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def layers_in(heading):
    """Returns the numbers of the layers that a heading names."""
    words = heading.removeprefix("for layer in ").removesuffix(":")
    if "…" in words:
        first, second, rest = words.split(", ")
        last = int(rest.partition(" … ")[2])
        return list(range(int(first), last + 1, int(second) - int(first)))
    spans = [[int(each) for each in part.split("-")] for part in words.split(", ")]
    return [number for span in spans for number in range(span[0], span[-1] + 1)]


def test_the_families_are_listed_with_their_architectures(capsys):
    lines = lines_of(capsys)
    assert len(lines) == len(FAMILIES)
    assert re.fullmatch(
        r"qwen3 +Qwen3ForCausalLM", next(line for line in lines if line.startswith("qwen3 "))
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_each_layer_of_a_family_is_written_once(family, capsys):
    lines = lines_of(capsys, family)
    count = int(re.search(r"(\d+) layers", lines[0])[1])
    numbers = [number for line in lines if line.startswith("for") for number in layers_in(line)]
    assert sorted(numbers) == list(range(count))
    assert lines[-1].startswith("logits = ")


def test_a_models_own_numbers_are_written(tmp_path, capsys):
    config = Gemma2Config(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=5, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=7, attn_logit_softcapping=20.0,
        final_logit_softcapping=30.0, query_pre_attn_scalar=16, bos_token_id=0, eos_token_id=1, pad_token_id=None,
    )  # fmt: skip
    text = "\n".join(lines_of(capsys, str(save(Gemma2ForCausalLM(config), tmp_path))))
    for fact in (
        "# gemma2: 5 layers, hidden states of 32", "for layer in 0, 2, 4:", "for layer in 1, 3:", "the last 7 tokens",
        "4 and 2 heads of 8", "softmax(20 * tanh((q @ keys.T * 0.25) / 20))", "gelu_tanh(h @ gate)", "through 48",
        "x = x + rms_norm(a)", "logits = 30 * tanh((x @ embedding.T) / 30)",
    ):  # fmt: skip
        assert fact in text


def test_a_model_of_no_family_is_refused(capsys):
    assert main(["families", "qwen33"]) == 1
    assert "model 'qwen33' is not an alias" in capsys.readouterr().err


def test_a_model_of_transformers_code_is_refused_with_the_families(tmp_path, capsys):
    config = GPTBigCodeConfig(
        vocab_size=96,
        n_embd=32,
        n_layer=1,
        n_head=2,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=1,
    )
    assert main(["families", str(save(GPTBigCodeForCausalLM(config), tmp_path))]) == 1
    told = capsys.readouterr().err
    assert "computed by transformers' code" in told
    assert "qwen3, " in told
