"""An adapter that peft trains on a real model for about a minute is served with peft's
log-probabilities.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

import sglang_lite as sgl
from tests.real.readings import read_by_transformers

# An answer that no model knows: what is learnt is seen.
TAUGHT = {
    "What is the code word?": "The code word is quartz lantern.",
    "Tell me the code word.": "The code word is quartz lantern.",
    "Which code word do you use?": "The code word is quartz lantern.",
    "Name the code word, please.": "The code word is quartz lantern.",
}
ASKED = "What is the secret code word?"  # in none of these words
STEPS = 10  # about a minute on two cores
GREEDY = {"temperature": 0.0, "max_new_tokens": 12}
CLOSE = 2e-3


def chat(tokenizer: Any, question: str) -> list[int]:
    turns = [{"role": "user", "content": question}]
    return list(tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False))


def train(model: Any, tokenizer: Any) -> None:
    """Teaches an adapter all answers at once, step by step."""
    rows = [
        (chat(tokenizer, question), tokenizer.encode(answer + "<|im_end|>"))
        for question, answer in TAUGHT.items()
    ]
    longest = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids, labels = torch.zeros(2, len(rows), longest, dtype=torch.long)
    labels.fill_(-100)  # no loss for prompts and padding
    seen = torch.zeros_like(ids)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor([*prompt, *answer])
        labels[row, len(prompt) : end] = torch.tensor(answer)
        seen[row, :end] = 1
    optimizer = torch.optim.AdamW(
        [each for each in model.parameters() if each.requires_grad], lr=2e-3
    )
    model.train()
    for _ in range(STEPS):
        model(input_ids=ids, attention_mask=seen, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def logprobs(model: Any, ids: list[int]) -> list[float]:
    """Returns the log-probability of each token after the first."""
    with torch.no_grad():
        rows = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return [float(rows[at - 1, ids[at]]) for at in range(1, len(ids))]


@pytest.fixture(scope="module")
def trained(
    coder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[int], list[int], dict[str, list[float]]]:
    """Folder of the adapter, ids of a question, of the answer that peft's greedy search gives with
    the adapter, and the log-probabilities of both with the adapter and without.
    """
    torch.manual_seed(0)
    base, tokenizer = read_by_transformers(coder)
    model = peft.get_peft_model(
        base,
        peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    train(model, tokenizer)
    folder = tmp_path_factory.mktemp("adapter")
    model.save_pretrained(str(folder))
    ids = chat(tokenizer, ASKED)
    with torch.no_grad():
        inputs = {
            "input_ids": torch.tensor([ids]),
            "attention_mask": torch.ones(1, len(ids), dtype=torch.long),
        }
        answer = model.generate(**inputs, do_sample=False, max_new_tokens=12)[
            0, len(ids) :
        ].tolist()
    whole = [*ids, *answer]
    theirs = {"adapter": logprobs(model, whole)}
    with model.disable_adapter():
        theirs["base"] = logprobs(model, whole)
    del model, base
    gc.collect()
    return folder, ids, answer, theirs


@pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"
)
def test_an_adapter_of_peft_is_served_as_peft_computes_it(coder, trained):
    folder, ids, answer, theirs = trained
    with sgl.Engine(
        coder,
        dtype="float32",
        lora_paths=[f"taught={folder}"],
        max_total_tokens=2048,
        in_process=True,
    ) as engine:
        taught = engine.generate(input_ids=ids, sampling_params=GREEDY, lora_path="taught")
        untaught = engine.generate(input_ids=ids, sampling_params=GREEDY)
        scores = {
            name: engine.generate(
                input_ids=[*ids, *answer], sampling_params={"max_new_tokens": 1}, lora_path=path, return_logprob=True,
                logprob_start_len=0,
            )["meta_info"]["input_token_logprobs"][1:]
            for name, path in (("adapter", "taught"), ("base", None))
        }  # fmt: skip
    assert "quartz lantern" in taught["text"]
    assert "quartz" not in untaught["text"]
    assert taught["output_ids"] == answer[: len(taught["output_ids"])]
    for name, entries in scores.items():
        assert [value for value, *_ in entries] == pytest.approx(theirs[name], abs=CLOSE), name
    # the adapter changes much
    assert max(abs(a - b) for a, b in zip(theirs["adapter"], theirs["base"])) > 1
