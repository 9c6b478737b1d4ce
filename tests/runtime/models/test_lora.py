"""Adapters give peft's logits, alone and mixed in a batch; what can't be honoured is refused by name."""

from concurrent.futures import Future

import msgspec
import pytest
import torch

from tests.runtime.models.adapters import Adapted
from tests.runtime.models.test_families import FAMILIES, SHAPE, asked, engine, prompts
from tests.runtime.models.tiny import randomise, save

DENSE = [
    "llama-2", "llama-biases", "smollm2", "mistral-window", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "smollm3", "olmo2",
    "granite", "glm", "glm4", "exaone4", "seed-oss", "helium", "ernie4.5", "starcoder2", "phi", "stablelm-parallel", "cohere",
    "nemotron", "gpt-neox", "olmo",
]  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # that peft reads
RANKS = {"one": 4, "two": 8, "three": 12, "four": 64}


def adapted(family, folder, adapters):
    model, changes = FAMILIES[family]
    reference = randomise(model(model.config_class(**SHAPE | changes)))
    return save(reference, folder / "base"), Adapted(reference, folder, adapters)


def ask(running, ids, name, most=4):
    future: Future = Future()
    params = msgspec.structs.replace(asked(most=most), **({} if name is None else {"lora_path": (name,)}))
    running.submit(ids, params, sink=future.set_result)
    return future


def farthest(reference, ids, name, generation):
    """Distance of a log-probability that the engine gave from peft's."""
    theirs = reference([*ids, *generation.token_ids], name)[:-1]
    entries = [*(generation.prompt_logprobs or ()), *generation.output_logprobs]
    ours = torch.tensor([[value for value, _, _ in sorted(entry.top, key=lambda top: top[1])] for entry in entries])
    return (ours - theirs[-len(entries) :]).abs().max()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", DENSE)
def test_logits_equal_those_of_peft(family, tmp_path):
    base, reference = adapted(family, tmp_path, {name: {"r": rank} for name, rank in RANKS.items()})
    paths = [f"{name}={folder}" for name, folder in reference.folders.items()]
    batch = prompts(20, 9, 17, 13, 11)
    with engine(base, lora_paths=paths, max_loras_per_batch=3, max_running=8) as running:
        names = [*RANKS, None]
        alone = [ask(running, ids, name).result(timeout=30) for ids, name in zip(batch, names)]
        mixed = [(ask(running, ids, name), ids, name) for ids in batch for name in names]
        for generation, ids, name in [*zip(alone, batch, names), *((f.result(timeout=30), *of) for f, *of in mixed)]:
            assert farthest(reference, ids, name, generation) <= 1e-4, name
