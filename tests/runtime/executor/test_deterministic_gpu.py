"""On a Hopper GPU a deterministic engine gives a request the same bits in any company, in any
chunks, from any cache.
"""

import gc
import random
from concurrent.futures import Future
from typing import Any

import pytest
import torch

import sglang_lite as sgl
from sglang_lite.bench.shapes import SHAPES, load_shape
from sglang_lite.protocol import SamplingParams
from sglang_lite.runtime.drafting.registry import DRAFTERS
from sglang_lite.runtime.executor import prefix_groups
from tests.runtime.executor.test_gpu_runner import Half
from tests.runtime.scripted import FreeDrafts

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="needs a Hopper GPU",
)
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.0, "top_k": 40},
    {"temperature": 1.2, "min_p": 0.01, "repetition_penalty": 1.1},
]  # fmt: skip
COMPANY = (1, 2, 3, 7, 16, 44, 64, 128, 256)


def requests(vocab, tokens=10):
    """Prompts of 1 to 6,000 tokens, half of which begin with one of two texts, each with options of
    its own.
    """
    draw = random.Random(0)
    texts = [[draw.randrange(vocab) for _ in range(length)] for length in (900, 4700)]
    for i in range(max(COMPANY)):
        own = [
            draw.randrange(vocab) for _ in range(6000 if i == 5 else draw.choice((1, 9, 70, 300)))
        ]
        scored: dict[str, Any] = (
            {"return_logprob": True, "top_logprobs_num": 3} if i % 3 == 0 else {}
        )
        if i % 12 == 0:
            scored["logprob_start_len"] = 0
        yield (
            [*texts[i % 4 // 2], *own] if i % 2 and i != 5 else own,
            SamplingParams(seed=i, max_tokens=tokens, ignore_eos=True, **OPTIONS[i % 4], **scored),
        )


def bits(generation):
    return generation.token_ids, generation.prompt_logprobs, generation.output_logprobs


def answers(engine, asked):
    futures = [Future() for _ in asked]
    for (prompt, params), future in zip(asked, futures):
        engine.submit(prompt, params, sink=future.set_result)
    return [bits(future.result(timeout=300)) for future in futures]


@pytest.mark.parametrize("shape", ["qwen3-0.6b", "llama-3.1-8b"])
def test_a_request_has_the_same_bits_in_any_company_chunks_and_cache(shape, monkeypatch):
    asked = list(requests(SHAPES[shape].vocab_size))
    found, counts = [dict[object, list[str]]() for _ in asked], dict.fromkeys((256, 1000, 8192), 0)
    for step_tokens in counts:
        loaded = load_shape(shape, deterministic=True)
        settings = {
            "deterministic": True,
            "max_running": 256,
            "max_total_tokens": 150_000,
            "context_length": 8192,
        }
        with sgl.Engine.of(loaded, **settings, step_tokens=step_tokens) as engine:
            for saved in (1, 1 << 30):  # prefixes are read together, or not
                monkeypatch.setattr(prefix_groups, "MIN_SAVED_TOKENS", saved)
                for count in COMPANY if saved == 1 else (44, 256):
                    for cache in ("cold", "warm"):
                        if cache == "cold":
                            engine.flush_cache()
                        for i, given in enumerate(answers(engine, asked[:count])):
                            found[i].setdefault(given, []).append(
                                f"{step_tokens} {saved} {count} {cache}"
                            )
                            counts[step_tokens] += 1
        del engine, loaded
        gc.collect()
    differing = {i: list(each.values()) for i, each in enumerate(found) if len(each) > 1}
    assert not differing, (
        f"{len(differing)} of {len(asked)} requests differ, such as {dict(list(differing.items())[:2])}"
    )
    print(f"{shape}: {counts} answers by tokens of a step, 0 ids and 0 log-probabilities differ")


def test_drafts_change_no_bit(monkeypatch):
    asked = list(requests(SHAPES["qwen3-0.6b"].vocab_size, tokens=40))[:44]
    loaded = load_shape("qwen3-0.6b", deterministic=True)
    settings = {
        "deterministic": True,
        "max_running": 64,
        "max_total_tokens": 60_000,
        "context_length": 8192,
    }
    with sgl.Engine.of(loaded, **settings) as engine:
        expected = answers(engine, asked)
    known = {tuple(prompt): list(ids) for (prompt, _), (ids, *_) in zip(asked, expected)}
    monkeypatch.setitem(DRAFTERS, "prompt", lambda _: Half(known))
    for saved in (1, 1 << 30):  # what is before a draft is read together, or not
        monkeypatch.setattr(prefix_groups, "MIN_SAVED_TOKENS", saved)
        with sgl.Engine.of(loaded, **settings, speculation="prompt", draft_tokens=5) as engine:
            engine.core.scheduler.drafts.drafting.cost = FreeDrafts()
            assert answers(engine, asked) == expected
            assert engine.core.scheduler.drafts.drafting.counts["prompt"].accepted > 200
