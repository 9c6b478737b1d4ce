"""Reinforcement learning in one loop: sample, change the weights in place, sample again.

The trainer here only scales the weights of a copy of the model; a real one would make a step of its
optimiser. The engine runs in a process of its own and takes the tensors through shared memory.

    python examples/rl_loop.py MODEL_FOLDER [ROUNDS]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import sglang_lite as sgl

PROMPTS = ["The capital of France is", "Two and two make"]


# a model of transformers; answers
def rounds(engine: sgl.Engine, trainer: Any, count: int) -> Iterator[list[Any]]:
    """Answers of each round, with the ids and log-probabilities of what was read and drawn."""
    for step in range(1, count + 1):
        engine.pause_generation("retract")
        for parameter in trainer.parameters():
            parameter.data.mul_(0.99)
        engine.update_weights_from_tensor(dict(trainer.state_dict()), weight_version=f"step {step}")
        engine.continue_generation()
        sampling = {"max_new_tokens": 8, "temperature": 1.0}
        yield engine.generate(PROMPTS, sampling, return_logprob=True, return_prompt_token_ids=True)


def main(folder: str, count: int = 3) -> None:
    from transformers import AutoModelForCausalLM

    with sgl.Engine(folder, dtype="float32") as engine:
        for answers in rounds(engine, AutoModelForCausalLM.from_pretrained(folder), count):
            for answer in answers:
                print(answer["meta_info"]["weight_version"], repr(answer["text"]))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
