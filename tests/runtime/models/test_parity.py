"""Our model is transformers' model: the same logits and the same greedy tokens, from the same
tensors of a file: those of the default model's first layers, or of all with
SGLANG_LITE_CASES=all.
"""

import random

import pytest
import torch

import sglang_lite as sgl
from sglang_lite.protocol import SamplingParams
from tests.counts import some
from tests.runtime.models import small_gguf

QUESTIONS = [
    "What is the capital of France?",
    "List three colours: 1, 2, 3.",
    "Translate 'good morning' into Spanish.",
]


def prompts(tokenizer) -> list[list[int]]:
    """Chats, and strings of random ids."""
    rng = random.Random(0)
    chats = [f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n" for q in QUESTIONS]
    noise = [[rng.randrange(17, 49_152) for _ in range(length)] for length in (2, 40, 80)]
    return [tokenizer.encode(chat) for chat in chats] + noise


LAYERS = some(4, 30)


@pytest.fixture
def reference(model_file, tmp_path):
    from transformers import AutoModelForCausalLM

    file = small_gguf.first_layers(tmp_path / "reference.gguf", model_file, LAYERS, tokens=10)
    return AutoModelForCausalLM.from_pretrained(
        str(tmp_path), gguf_file=file.name, dtype=torch.float32
    ).eval()


@pytest.mark.filterwarnings("ignore")
def test_logits_and_greedy_tokens_equal_those_of_transformers(reference, model_file, tmp_path):
    file = small_gguf.first_layers(tmp_path / "ours.gguf", model_file, LAYERS)
    with sgl.Engine(file, dtype="float32", max_running=4, in_process=True) as engine:
        worst = 0.0
        for ids in prompts(engine.tokenizer):
            params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, return_logprob=True,
                                    logprob_start_len=1, top_logprobs_num=20)  # fmt: skip
            ours = engine.complete(ids, params)
            with torch.no_grad():
                theirs = (
                    reference(torch.tensor([[*ids, *ours.token_ids]])).logits[0].log_softmax(-1)
                )
            entries = [*ours.prompt_logprobs, *ours.output_logprobs]
            for row, entry in zip(theirs, entries):
                worst = max(worst, abs(row[entry.token_id].item() - entry.logprob))
                worst = max(worst, *(abs(row[i].item() - value) for value, i, _ in entry.top))
            greedy = theirs[len(ids) - 1 : -1].argmax(-1).tolist()
            assert greedy == list(ours.token_ids)
        assert worst <= 1e-3
