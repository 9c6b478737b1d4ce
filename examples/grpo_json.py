"""GRPO on a task that a small model does badly: an order in words becomes one line of JSON, of an
exact form.

The rollouts are runs of a program on an engine beside the trainer, on the same GPU. The engine
takes the trainer's weights after each step, and gives it the tokens that the program read and drew.

    pip install trl 'datasets<5.1'; python examples/grpo_json.py MODEL_FOLDER [SECONDS]
"""

import json
import random
import sys
import tempfile
import time
from typing import Any

import sglang_lite as sgl

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
NAMES = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
UNITS = {
    "crate": "crates",
    "box": "boxes",
    "bag": "bags",
    "sack": "sacks",
    "tray": "trays",
    "jar": "jars",
}
ITEMS = (
    "pears",
    "nails",
    "rice",
    "coffee",
    "tiles",
    "soap",
    "eggs",
    "honey",
    "bolts",
    "candles",
    "flour",
    "paint",
)
NUMBERS = (
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
)
RULES = (
    "\nWrite the order as one line of compact JSON, without spaces and without a code fence. Keys, in this order: "
    "item, unit (singular), count (a number), day (mon, tue, wed, thu, fri, sat or sun; null if none is named), urgent "
    "(true or false)."
)


def make_order(dice: random.Random) -> dict[str, str]:
    """A prompt and its only right answer."""
    item = dice.choice(ITEMS)
    unit = dice.choice([*UNITS])
    count = dice.randint(2, 12)
    day = dice.choice([None, *range(7)])
    urgent = dice.random() < 0.5
    amount = dice.choice([str(count), NUMBERS[count - 1]])
    sentence = dice.choice(
        ["We need {} of {}", "Please send {} of {}", "The shop in Elm Street orders {} of {}"]
    )
    sentence = sentence.format(f"{amount} {UNITS[unit]}", item)
    sentence += (
        ""
        if day is None
        else dice.choice([" by {}", " for {}", ", to arrive on {}"]).format(NAMES[day])
    )
    sentence += dice.choice(
        ["; it is urgent.", ", as fast as you can!"] if urgent else [".", "; there is no hurry."]
    )
    value = {
        "item": item, "unit": unit, "count": count, "day": None if day is None else DAYS[day], "urgent": urgent
    }  # fmt: skip
    return {"prompt": sentence + RULES, "answer": json.dumps(value, separators=(",", ":"))}


def score(text: str, answer: str) -> float:
    """Reward of an answer, 0 to 1: for being JSON, for its keys, for each right value, and for the
    exact text.
    """
    right = json.loads(answer)
    try:
        value = json.loads(text)
    except ValueError:
        return 0.0
    if not isinstance(value, dict):
        return 0.0
    values = sum(
        key in value and value[key] == each and type(value[key]) is type(each)
        for key, each in right.items()
    )
    return 0.2 + 0.1 * ([*value] == [*right]) + 0.1 * values + 0.2 * (text == answer)


def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """The reward in TRL's form."""
    return [score(text, right) for text, right in zip(completions, answer)]


@sgl.function
def write_order(s: sgl.ProgramState, prompt: str) -> None:
    s += sgl.user(prompt)
    s += sgl.assistant(sgl.gen("order", max_tokens=80))


class Rollouts:
    """TRL's `rollout_func`: runs the program for each prompt, and gives the trainer the tokens of
    the runs.
    """

    def __init__(self, engine: sgl.Engine) -> None:
        self.engine = engine
        self.step = 0

    def update_weights(self, trainer: Any) -> None:
        """Gives the engine the trainer's weights of this step, if it has not got them yet."""
        if trainer.state.global_step == self.step:
            return
        self.step = trainer.state.global_step
        kind = (
            next(trainer.model.parameters()).dtype
            if self.engine.config.dtype == "float32"
            else "bfloat16"
        )
        weights = {name: _as(value, kind) for name, value in trainer.model.state_dict().items()}
        self.engine.update_weights_from_tensor(weights, weight_version=f"step {self.step}")

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        self.update_weights(trainer)
        states = write_order.run_batch(
            [(prompt,) for prompt in prompts],
            backend=self.engine,
            return_prompt_token_ids=True,
            return_logprob=True,
            temperature=1.0,
        )
        runs = [state.trajectory().sequences[0] for state in states]
        return {
            "prompt_ids": [list(run.ids[: run.prompt_len]) for run in runs],
            "completion_ids": [list(run.ids[run.prompt_len :]) for run in runs],
            "logprobs": [
                [value or 0.0 for value in run.logprobs[run.prompt_len :]] for run in runs
            ],
            "env_mask": [[int(drawn) for drawn in run.loss_mask[run.prompt_len :]] for run in runs],
        }


def _as(value: Any, kind: Any) -> Any:
    import torch

    return value.detach().to(getattr(torch, kind) if isinstance(kind, str) else kind)


def count_right(engine: sgl.Engine, orders: list[dict[str, str]]) -> tuple[float, float]:
    """Share of exact answers, and mean reward, of greedy answers to orders that no training has
    seen.
    """
    rows = [(order["prompt"],) for order in orders]
    states = write_order.run_batch(rows, backend=engine, temperature=0)
    texts = [state["order"] for state in states]
    exact = sum(text == order["answer"] for text, order in zip(texts, orders))
    rewards = [score(text, order["answer"]) for text, order in zip(texts, orders)]
    return exact / len(orders), sum(rewards) / len(orders)


def main(folder: str, seconds: float = 480) -> None:
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    dice = random.Random(0)
    seen, held_out = ([make_order(dice) for _ in range(count)] for count in (4000, 200))
    gpu = torch.cuda.is_available()

    class Clock(TrainerCallback):  # type: ignore[misc] # transformers leaves it untyped
        """Ends the training when its time is over."""

        def __init__(self) -> None:
            self.began = time.monotonic()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = time.monotonic() - self.began > seconds

    settings: dict[str, Any] = {"mem_fraction": 0.3} if gpu else {"dtype": "float32"}
    with tempfile.TemporaryDirectory() as output, sgl.Engine(folder, **settings) as engine:
        print(
            "before: {:.1%} exact, mean reward {:.3f}".format(*count_right(engine, held_out)),
            flush=True,
        )
        config = GRPOConfig(
            output, max_steps=2000, per_device_train_batch_size=64 if gpu else 8, num_generations=8,
            learning_rate=3e-6, logging_steps=5, use_cpu=not gpu, bf16=gpu, beta=0.0, gradient_checkpointing=False,
            disable_tqdm=True, save_strategy="no", report_to=[], lr_scheduler_type="constant_with_warmup",
            warmup_steps=10, model_init_kwargs={"dtype": "float32", "attn_implementation": "eager"},
        )  # fmt: skip
        rollouts = Rollouts(engine)
        trainer = GRPOTrainer(
            folder,
            reward,
            config,
            Dataset.from_list(seen),
            rollout_func=rollouts,
            callbacks=[Clock()],
        )
        trainer.train()
        rollouts.update_weights(trainer)
        print(
            "after: {:.1%} exact, mean reward {:.3f}".format(*count_right(engine, held_out)),
            flush=True,
        )
        curve = [
            (entry["step"], entry["reward"])
            for entry in trainer.state.log_history
            if "reward" in entry
        ]
        print("reward:", " ".join(f"{step}:{value:.3f}" for step, value in curve))


if __name__ == "__main__":
    main(sys.argv[1], *map(float, sys.argv[2:]))
