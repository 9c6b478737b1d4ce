"""Facts that only a GPU shows: every head size in every format, memory that is kept within, and
memory that ends.
"""

import copy
import json
import random
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

import sglang_lite as sgl
from sglang_lite.protocol import OverloadedError, Regex, SamplingParams
from sglang_lite.runtime.executor import prefix_groups as shared
from tests.runtime.models.test_families import FAMILIES, SHAPE
from tests.runtime.models.tiny import VOCAB, randomise, save, tiny_tokenizer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

HEADS = (64, 80, 96, 128, 256)


def prompts(count, *, prefix=0, own=200, vocab=VOCAB, seed=0):
    draw = random.Random(seed)
    start = [draw.randrange(2, vocab) for _ in range(prefix)]
    return [
        start + [draw.randrange(2, vocab) for _ in range(draw.randint(1, own))]
        for _ in range(count)
    ]


def answers(engine, asked, params, constraint=None):
    futures = [Future() for _ in asked]
    for prompt, future in zip(asked, futures):
        engine.submit(prompt, params, constraint, sink=future.set_result)
    return [future.result(timeout=300) for future in futures]


def greedy(tokens=8, **more):
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **more)


@pytest.fixture(scope="module")
def of_head(tmp_path_factory):
    """By head size: folder, and transformers' model in float32."""
    found = {}

    def make(dim, **changes):
        key = dim, *changes.items()
        if key not in found:
            config = LlamaConfig(**{
                "vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2,
                "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": dim, "max_position_embeddings": 16384,
                "bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False, **changes,
            })  # fmt: skip
            reference = randomise(LlamaForCausalLM(config))
            folder = save(reference, tmp_path_factory.mktemp("head"))
            (folder / "tokenizer.json").write_text(json.dumps(tiny_tokenizer()))
            found[key] = str(folder), reference
        return found[key]

    return make


def log_probabilities(reference, ids):
    with torch.no_grad():
        return reference(torch.tensor([ids], device="cuda")).logits[0].float().log_softmax(-1).cpu()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dim", HEADS)
def test_every_head_size_in_every_format(of_head, dim, dtype, monkeypatch):
    """Alone, in a batch, with a shared prefix, and in pieces."""
    monkeypatch.setattr(shared, "MIN_SAVED_TOKENS", 1)
    folder, reference = of_head(dim)
    reference = copy.deepcopy(reference).cuda()
    rounded = copy.deepcopy(reference).to(getattr(torch, dtype))
    worst = {"ours": 0.0, "theirs": 0.0}
    asked = [*prompts(3), *prompts(4, prefix=150, own=20, seed=1)]
    params = greedy(return_logprob=True, logprob_start_len=1, top_logprobs_num=VOCAB)
    settings = {
        "model": folder,
        "dtype": dtype,
        "max_total_tokens": 4096,
        "step_tokens": 300,
        "max_running": 8,
    }
    with sgl.Engine(**settings, in_process=True) as engine:
        for batch in (asked[:1], asked[1:], [[*p, 5] for p in asked]):
            for prompt, generation in zip(batch, answers(engine, batch, params)):
                ids = [*prompt, *generation.token_ids]
                exact = log_probabilities(reference, ids)[:-1]
                entries = (*generation.prompt_logprobs, *generation.output_logprobs)
                ours = torch.tensor(
                    [[v for v, _, _ in sorted(e.top, key=lambda t: t[1])] for e in entries]
                )
                gap = (ours - exact[-len(entries) :]).abs().max().item()
                if dtype == "float32":
                    assert gap < 1e-3
                    assert exact[len(prompt) - 1 :].argmax(-1).tolist() == list(
                        generation.token_ids
                    )
                theirs = (
                    (log_probabilities(rounded, ids)[:-1] - exact)[-len(entries) :]
                    .abs()
                    .max()
                    .item()
                )
                worst = {"ours": max(worst["ours"], gap), "theirs": max(worst["theirs"], theirs)}
    print(
        f"heads of {dim}, {dtype}: {worst['ours']:.2g} from float32, transformers {worst['theirs']:.2g}"
    )
    if dtype != "float32":
        assert worst["ours"] <= 1.2 * worst["theirs"]


def test_prompt_log_probabilities_stay_within_their_share(of_head):
    """8,000 positions of a large vocabulary: 4 GB of logits in float32, where the engine may take
    4.9.
    """
    folder, _ = of_head(64, vocab_size=131_072, tie_word_embeddings=True)
    total = torch.cuda.get_device_properties(0).total_memory
    (prompt,) = prompts(1, own=1, prefix=7_999, vocab=131_072)
    asked = greedy(1, return_logprob=True, logprob_start_len=0)
    free_before = torch.cuda.mem_get_info()[0]
    fraction = (total - free_before + (5 << 30)) / total
    with sgl.Engine(
        model=folder, dtype="bfloat16", mem_fraction=fraction, in_process=True
    ) as engine:
        (generation,) = answers(engine, [prompt], asked)
        assert len(generation.prompt_logprobs) == len(prompt) - 1
        used = total - torch.cuda.mem_get_info()[0]
    assert used <= fraction * total


def test_the_engine_serves_on_when_memory_ends(of_head):
    """Twenty times nearly all memory is taken from the side in the middle of a step, and given
    back.
    """
    folder, _ = of_head(64)
    asked = prompts(24, own=300)
    sampled = SamplingParams(temperature=1.0, seed=5, max_tokens=40, ignore_eos=True)
    settings = {
        "model": folder,
        "max_total_tokens": 20_000,
        "step_tokens": 512,
        "max_running": 16,
        "dtype": "float32",
    }
    constraint = Regex("[!-~]{3,40}")
    with sgl.Engine(**settings, in_process=True) as engine:
        expected = [
            [g.token_ids for g in answers(engine, asked, greedy(40))],
            [g.token_ids for g in answers(engine, asked, sampled)],
            [g.token_ids for g in answers(engine, asked, greedy(20), constraint)],
        ]
        engine.flush_cache()
        happened = []
        torch.cuda.empty_cache()
        # takes seconds
        most = torch.empty(
            torch.cuda.mem_get_info()[0] - (1 << 30), dtype=torch.uint8, device="cuda"
        )
        runner, forward = engine.core.runner, engine.core.runner.forward
        runner.prompts.max_tokens = 0  # graphs have their memory

        def short(record):
            if len(record.slots) > 1 and not engine.core.scheduler.isolated and draw.random() < 0.2:
                torch.cuda.empty_cache()
                taken = []
                size = torch.cuda.mem_get_info()[0]
                while size > 1 << 12:
                    try:
                        taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
                    except torch.OutOfMemoryError:
                        size //= 2
                try:
                    return forward(record)
                except torch.OutOfMemoryError:
                    happened.append(len(record.ids))
                    raise
            return forward(record)

        draw = random.Random(0)
        runner.forward = short  # type: ignore[method-assign]  # memory ends in it
        for _ in range(20):
            found = [
                [g.token_ids for g in answers(engine, asked, greedy(40))],
                [g.token_ids for g in answers(engine, asked, sampled)],
                [g.token_ids for g in answers(engine, asked, greedy(20), constraint)],
            ]
            engine.flush_cache()
            assert found == expected
            if len(happened) >= 20:
                break
        assert len(happened) >= 20
        runner.forward = forward  # type: ignore[method-assign]  # as it was
        del most
        stats = engine.stats()
    assert stats["free_tokens"] == stats["total_tokens"]


def test_one_that_needs_more_than_there_is_fails_alone(of_head):
    folder, _ = of_head(64)
    with sgl.Engine(
        model=folder, max_total_tokens=4096, step_tokens=512, dtype="float32", in_process=True
    ) as engine:
        runner, forward = engine.core.runner, engine.core.runner.forward
        running = engine.core.scheduler.queues.running

        def short(record):
            if any(
                len(request.tokens) == 777 and request.slot in record.slots for request in running()
            ):
                torch.empty(1 << 50, device="cuda")
            return forward(record)

        runner.forward = short  # type: ignore[method-assign]  # memory ends in it
        good, bad = prompts(3), prompts(1, prefix=776, own=1)
        first, error, *others = answers(engine, [good[0], *bad, *good[1:]], greedy())
        assert isinstance(error, OverloadedError)
        assert [g.token_ids for g in (first, *others)] == [
            g.token_ids for g in answers(engine, good, greedy())
        ]


def test_nothing_is_compiled_after_the_start(of_head, monkeypatch):
    """Not for shared prefixes, rows of any number, masks, log-probabilities, penalties, or pages
    that are copied.
    """
    import triton

    monkeypatch.setattr(shared, "MIN_SAVED_TOKENS", 1)
    folder, _ = of_head(64)
    constraint = Regex("[a-c]defghijklm[ij]nopqrstuvw[x-z]*")
    with sgl.Engine(
        model=folder, max_total_tokens=40_000, max_running=80, dtype="bfloat16", in_process=True
    ) as engine:
        compiled = []
        monkeypatch.setattr(
            triton.knobs.runtime,
            "jit_post_compile_hook",
            lambda **found: compiled.append(found["repr"]),
        )
        for count in (1, 3, 64, 80):
            for asked in (prompts(count, own=40), prompts(count, prefix=160, own=3)):
                answers(engine, asked, greedy())
                answers(engine, asked, greedy(30), constraint)
                answers(
                    engine,
                    asked,
                    greedy(return_logprob=True, logprob_start_len=0, top_logprobs_num=2),
                )
                answers(
                    engine,
                    asked,
                    SamplingParams(temperature=0.7, top_p=0.9, presence_penalty=0.5, max_tokens=4),
                )
        assert compiled == []


def _digests_and_awaited() -> tuple[str, list[str]]:
    """Digest of a variant that is told on a GPU's stand-in, and what a launch on the GPU waits for."""
    from sglang_lite.runtime.kernels.device_properties import properties_of
    from sglang_lite.runtime.kernels.page_table import update_pages
    from sglang_lite.runtime.kernels.variants import intercept_launches, waiting_for_variants

    def launch(device: str) -> None:
        update_pages(*(torch.zeros(n, dtype=torch.int32, device=device) for n in (64, 4, 4)))

    told: list[str] = []
    awaited: list[str] = []
    with intercept_launches(
        properties_of(torch.device("cuda:0")), lambda variant: told.append(variant.digest)
    ):
        launch("meta")
    with waiting_for_variants(awaited.append):
        launch("cuda")
        launch("cuda")
    return told[0], awaited


def test_the_first_launch_alone_waits_for_the_variant_that_was_told():
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        told, awaited = pool.submit(_digests_and_awaited).result()
    assert awaited == [told]


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_prefixes_that_were_copied_to_the_host_come_back(of_head, tmp_path, policy):
    folder, _ = of_head(64)
    asked = [prompt[:500] for prompt in prompts(12, prefix=200, own=600)]
    settings = {
        "model": folder,
        "dtype": "float32",
        "max_running": 4,
        "step_tokens": 300,
        "in_process": True,
    }
    with sgl.Engine(**settings, max_total_tokens=20_000) as plain:
        expected = [each.token_ids for each in answers(plain, asked, greedy())]
    tiers = {
        "enable_hierarchical_cache": True,
        "hicache_write_policy": policy,
        "hicache_ratio": 8.0,
    }
    files = {"hicache_storage_backend": "file", "hicache_storage_dir": str(tmp_path)}
    for _ in range(2):
        with sgl.Engine(**settings, **tiers, **files, max_total_tokens=2048) as engine:
            # this model computes faster than it copies
            engine.core.scheduler.pauses.record_duration = lambda *_: None
            for _ in range(3):  # equal prompts of one round would run together
                assert [each.token_ids for each in answers(engine, asked, greedy())] == expected
            store = engine.core.scheduler.store
            assert store.source.fetched_pages
    assert store.source.read_pages


@pytest.mark.parametrize("family", ["qwen3.5", "bamba"])
@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_states_that_were_copied_to_the_host_come_back(family, policy, tmp_path):
    model, changes = FAMILIES[family]
    model = getattr(transformers, model) if isinstance(model, str) else model
    shape = SHAPE | changes | {"max_position_embeddings": 1024}
    folder = str(save(randomise(model(model.config_class(**shape))), tmp_path / "model"))
    asked = [prompt[:400] for prompt in prompts(12, prefix=150, own=400)]
    settings: dict[str, Any] = {
        "model": folder,
        "dtype": "float32",
        "max_running": 4,
        "step_tokens": 300,
        "enable_memory_saver": True,
        "in_process": True,
    }
    with sgl.Engine(**settings, max_total_tokens=20_000) as plain:
        expected = [each.token_ids for each in answers(plain, asked, greedy())]
    tiers: dict[str, Any] = {
        "enable_hierarchical_cache": True,
        "hicache_write_policy": policy,
        "hicache_ratio": 8.0,
        "max_total_tokens": 2048,
        "max_mamba_cache_size": 8,
    }
    files = {"hicache_storage_backend": "file", "hicache_storage_dir": str(tmp_path / "files")}
    for _ in range(2):
        with sgl.Engine(**settings, **tiers, **files) as engine:
            # this model computes faster than it copies
            engine.core.scheduler.pauses.record_duration = lambda *_: None
            for _ in range(3):  # equal prompts of one round would run together
                assert [each.token_ids for each in answers(engine, asked, greedy())] == expected
            engine.release_memory_occupation()
            engine.resume_memory_occupation()
            assert [each.token_ids for each in answers(engine, asked, greedy())] == expected
            store = engine.core.scheduler.store
            assert store.source.states.fetched
            store.source.check_invariants()
    assert store.source.read_pages
