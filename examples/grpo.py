"""GRPO with TRL, whose rollouts are runs of a program: an engine plays them, and takes the new
weights after each step.

pip install trl 'datasets<5.1'; python examples/grpo.py MODEL_FOLDER [STEPS]
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import sglang_lite as sgl


@sgl.function
def two_turns(s, prompt):
    s += prompt + sgl.gen("first", max_tokens=6) + "\nAgain:" + sgl.gen("second", max_tokens=6)


class Rollouts:
    """TRL's `rollout_func`: runs the program for each prompt, and gives the trainer the tokens of
    the runs.
    """

    def __init__(self, engine: sgl.Engine, folder: Path) -> None:
        self.engine, self.folder, self.step = engine, folder, 0

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        if trainer.state.global_step != self.step:
            self.step = trainer.state.global_step
            # a new one each time: the engine still reads the one before
            folder = self.folder / str(self.step)
            trainer.model.save_pretrained(folder)
            trainer.processing_class.save_pretrained(folder)
            self.engine.update_weights(str(folder), f"step {self.step}")
        rows, asked = (
            [(prompt,) for prompt in prompts],
            {"return_prompt_token_ids": True, "return_logprob": True},
        )
        states = two_turns.run_batch(rows, backend=self.engine, **asked)
        # the only one: no text is cut off
        runs = [state.trajectory().sequences[0] for state in states]
        return {
            "prompt_ids": [list(run.ids[: run.prompt_len]) for run in runs],
            "completion_ids": [list(run.ids[run.prompt_len :]) for run in runs],
            "logprobs": [
                [value or 0.0 for value in run.logprobs[run.prompt_len :]] for run in runs
            ],
            "env_mask": [[int(drawn) for drawn in run.loss_mask[run.prompt_len :]] for run in runs],
        }


def vowels(completions: list[str], **_: Any) -> list[float]:
    """The toy reward: the share of vowels in what was said."""
    return [sum(map("aeiouAEIOU".count, text)) / max(len(text), 1) for text in completions]


if __name__ == "__main__":
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    model, steps = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 30
    prompts = Dataset.from_dict(
        {"prompt": ["Legs of a cat:", "A song:", "My name:", "Once upon"] * steps}
    )
    with tempfile.TemporaryDirectory() as folder, sgl.Engine(model, dtype="float32") as engine:
        config = GRPOConfig(
            folder, max_steps=steps, learning_rate=2e-4, logging_steps=1, use_cpu=True, bf16=False
        )
        config.report_to, config.save_strategy, config.lr_scheduler_type = [], "no", "constant"
        GRPOTrainer(
            model, vowels, config, prompts, rollout_func=Rollouts(engine, Path(folder))
        ).train()
