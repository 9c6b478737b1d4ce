"""The example of training: what its rollouts give TRL, and that the engine takes the weights of each step."""

import runpy
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import sglang_lite as sgl

GRPO = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "grpo.py"))


def test_rollouts_are_what_trl_asks_for_and_follow_the_weights(folders, tmp_path):
    prompts = ["ab", "ab", "cd"]
    written = SimpleNamespace(save_pretrained=lambda folder: shutil.copytree(folders[1], folder, dirs_exist_ok=True))
    trainer: Any = SimpleNamespace(state=SimpleNamespace(global_step=0), model=written, processing_class=written)
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
