"""A model that is cut over ranks gives what the whole one gives."""

import pytest
import torch
import transformers

from tests.runtime.models.test_families import FAMILIES, SHAPE, ask, engine, prompts
from tests.runtime.models.tiny import randomise, save
from tests.runtime.parallel.threads import engine_of_ranks


def folder_of(name, where, **more):
    model, changes = FAMILIES[name]
    if isinstance(model, str):
        model = getattr(transformers, model, None) or pytest.skip(f"transformers {transformers.__version__} has none")
    return save(randomise(model(model.config_class(**SHAPE | changes | more))), where)


def answers(running):
    """Log-probabilities of the whole vocabulary, of prompts and answers: of requests that run together, and of one that
    begins with what is in the cache."""
    batch = prompts(50, 33, 4)
    found = [each.result() for each in [ask(running, ids) for ids in batch]]
    found.append(ask(running, [*batch[0], 3, 1, 4], prompt=False).result())
    entries = [entry for each in found for entry in (*each.prompt_logprobs, *each.output_logprobs)]
    return torch.tensor([[value for value, _, _ in sorted(entry.top, key=lambda top: top[1])] for entry in entries])


@pytest.mark.sampled(40)
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_ranks_give_the_logits_of_one_process(name, tp, tmp_path):
    compare(folder_of(name, tmp_path / "model"), tp, tmp_path / "meeting")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tp", [2, 3, 5])
@pytest.mark.parametrize("name", ["smollm2", "qwen2-moe", "youtu"])
def test_on_a_cpu_heads_feed_forwards_and_tokens_need_not_divide(name, tp, tmp_path):
    odd = dict(hidden_size=40, num_attention_heads=5, num_key_value_heads=5, intermediate_size=49)
    compare(folder_of(name, tmp_path / "model", **odd), tp, tmp_path / "meeting")


def compare(folder, tp, meeting):
    with engine(folder, step_tokens=16) as whole:
        expected = answers(whole)
    with engine_of_ranks(folder, tp, meeting, dtype="float32", max_running=4, step_tokens=16) as ranks:
        torch.testing.assert_close(answers(ranks), expected, rtol=1e-5, atol=1e-5)
