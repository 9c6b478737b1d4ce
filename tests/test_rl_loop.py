"""The example of a loop with an engine in another process: its log-probabilities are those of the
trainer's weights.
"""

import runpy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import sglang_lite as sgl
from tests.counts import some
from tests.engine.processes import children, resident
from tests.runtime.models.test_new_weights import pair

LOOP = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "rl_loop.py"))


@pytest.mark.slow
def test_samples_have_the_weights_of_their_round(tmp_path):
    folder, _ = pair("llama-biases", tmp_path)
    trainer = AutoModelForCausalLM.from_pretrained(folder)
    count, memory = some(3, 50), list[int]()
    with sgl.Engine(str(folder), dtype="float32", max_running=4) as engine:
        for step, answers in enumerate(LOOP["rounds"](engine, trainer, count), 1):
            memory.append(sum(map(resident, children())))
            for answer in answers:
                info = answer["meta_info"]
                assert (
                    info["weight_version"]
                    == engine.get_model_info()["weight_version"]
                    == f"step {step}"
                )
                prompt, drawn = answer["prompt_token_ids"], answer["output_ids"]
                with torch.no_grad():
                    logits = trainer(torch.tensor([[*prompt, *drawn]])).logits[
                        0, len(prompt) - 1 : -1
                    ]
                expected = (
                    logits.log_softmax(-1).gather(1, torch.tensor([drawn]).t()).flatten().tolist()
                )
                assert [each[0] for each in info["output_token_logprobs"]] == pytest.approx(
                    expected, abs=1e-3
                )
    # the first rounds fill what is kept
    assert count < 50 or max(memory[10:]) - memory[9] < 2 << 20
