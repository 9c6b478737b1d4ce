"""The examples of training: what its rollouts give TRL, and that the engine takes the weights of
each step.
"""

import json
import random
import runpy
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import sglang_lite as sgl
from tests.runtime.models.tiny import VOCAB, save
from tests.server.conftest import TEMPLATE

EXAMPLES = Path(__file__).parents[1] / "examples"
GRPO = runpy.run_path(str(EXAMPLES / "grpo.py"))
ORDERS = runpy.run_path(str(EXAMPLES / "grpo_json.py"))


def test_rollouts_are_what_trl_asks_for_and_follow_the_weights(folders, tmp_path):
    prompts = ["ab", "ab", "cd"]
    written = SimpleNamespace(
        save_pretrained=lambda folder: shutil.copytree(folders[1], folder, dirs_exist_ok=True)
    )
    trainer: Any = SimpleNamespace(
        state=SimpleNamespace(global_step=0), model=written, processing_class=written
    )
    with sgl.Engine(folders[0], dtype="float32", in_process=True, seed=1) as engine:
        rollouts = GRPO["Rollouts"](engine, tmp_path)
        before = rollouts(prompts, trainer)
        assert engine.get_model_info()["weight_version"] == "default"
        trainer.state.global_step = 1
        after = rollouts(prompts, trainer)
        assert engine.get_model_info()["weight_version"] == "step 1"
    for found in (before, after):
        assert {*found} == {"prompt_ids", "completion_ids", "logprobs", "env_mask"}
        for prompt, ids, logprobs, mask in zip(*found.values()):
            assert prompt
            assert len(ids) == len(logprobs) == len(mask)
            assert all((logprob < 0) == bool(drawn) for logprob, drawn in zip(logprobs, mask))
        assert [*map(len, found.values())] == [3] * 4


def test_the_reward_is_the_share_of_vowels():
    assert GRPO["vowels"](["ae", "ab", "", "b"]) == [1.0, 0.5, 0.0, 0.0]


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    """Two checkpoints whose head is their embedding, and the second one as transformers loads it."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, eos_token_id=0, bos_token_id=1, initializer_range=0.3, tie_word_embeddings=True,
    )  # fmt: skip
    made = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        made.append(str(save(LlamaForCausalLM(config), tmp_path_factory.mktemp("tied"))))
    return *made, AutoModelForCausalLM.from_pretrained(made[1], dtype=torch.float32)


def test_rollouts_of_orders_follow_the_tensors_of_the_trainer(tied):
    """The head and the embedding are given in the same memory, as transformers has them."""
    first, second, model = tied
    trainer: Any = SimpleNamespace(state=SimpleNamespace(global_step=0), model=model)
    with sgl.Engine(first, dtype="float32", seed=1, chat_template=TEMPLATE) as engine:
        rollouts = ORDERS["Rollouts"](engine)
        before = rollouts(["ab", "cd"], trainer)
        trainer.state.global_step = 1
        after = rollouts(["ab", "cd"], trainer)
        assert engine.get_model_info()["weight_version"] == "step 1"
    with sgl.Engine(second, dtype="float32", in_process=True) as other:
        prompt, answer = after["prompt_ids"][0], after["completion_ids"][0]
        asked = {"max_new_tokens": 1, "temperature": 0}
        read = other.generate(
            input_ids=[*prompt, *answer],
            sampling_params=asked,
            return_logprob=True,
            logprob_start_len=len(prompt),
        )
        expected = [value for value, *_ in read["meta_info"]["input_token_logprobs"]]
    assert after["logprobs"][0] == pytest.approx(expected, abs=1e-4)
    assert before["logprobs"][0] != pytest.approx(after["logprobs"][0], abs=1e-4)


def test_an_order_has_one_right_answer_and_others_earn_a_part():
    order = ORDERS["make_order"](random.Random(3))
    right = json.loads(order["answer"])
    assert right["item"] in order["prompt"]
    score = ORDERS["score"]
    assert score(order["answer"], order["answer"]) == pytest.approx(1)
    assert score(json.dumps(right), order["answer"]) == pytest.approx(0.8)  # with spaces
    assert score(json.dumps({**right, "count": 0}), order["answer"]) == pytest.approx(0.7)
    assert score(f"```json\n{order['answer']}\n```", order["answer"]) == 0
    assert score("[]", order["answer"]) == 0
