"""Layers with a window have pages of their own: the answers are those of a cache that keeps all
tokens, in less memory.
"""

import random
from concurrent.futures import Future
from unittest import mock

import numpy as np
import pytest
import torch
from transformers import Gemma3ForCausalLM, GptOssForCausalLM, Lfm2ForCausalLM, MistralForCausalLM

import sglang_lite as sgl
from sglang_lite.protocol import SamplingParams
from sglang_lite.runtime.capacity import Sizes
from sglang_lite.runtime.executor import kv_pool_size
from sglang_lite.runtime.kv_cache.eviction_policy import EVICTION
from sglang_lite.runtime.kv_cache.prefix_cache import PrefixCache
from sglang_lite.runtime.kv_cache.prefix_space import PrefixSpace
from sglang_lite.runtime.kv_cache.window_pages import WindowPages
from sglang_lite.runtime.models.gpu_decoder import GpuDecoder
from sglang_lite.runtime.models.lora.adapter import Adapter
from tests.runtime.core.test_equivalence import requests
from tests.runtime.kernels import needs_kernels
from tests.runtime.models.test_families import FAMILIES, SHAPE
from tests.runtime.models.tiny import VOCAB, randomise, save
from tests.runtime.scripted import Guesses, SteppedEngine, answer, ended, loaded

WINDOW = 9
MODELS = {
    "gemma3": Gemma3ForCausalLM,
    "gpt-oss": GptOssForCausalLM,
    "mistral-window": MistralForCausalLM,
    "lfm2": Lfm2ForCausalLM,
}


@pytest.fixture(scope="module", params=MODELS)
def folder(request, tmp_path_factory):
    model, changes = FAMILIES[request.param]
    return save(
        randomise(model(model.config_class(**SHAPE | changes))),
        tmp_path_factory.mktemp(request.param),
    )


def prompts():
    """Prompts that share beginnings of many lengths, longer than the window."""
    draw = random.Random(1)
    stems = [[draw.randrange(2, VOCAB) for _ in range(80)] for _ in range(2)]
    return [
        draw.choice(stems)[: draw.randrange(80)] + [draw.randrange(2, VOCAB) for _ in range(8)]
        for _ in range(6)
    ]


def answers(engine, asked, most=8, *, scored=False):
    params = SamplingParams(
        max_tokens=most, temperature=0, ignore_eos=True, return_logprob=True, top_logprobs_num=5,
        logprob_start_len=1 if scored else -1,
    )  # fmt: skip
    futures = [Future() for _ in asked]
    for ids, future in zip(asked, futures):
        engine.submit(ids, params, sink=future.set_result)
    return [future.result(timeout=300) for future in futures]


def seen(generations):
    """Tokens and their log-probabilities, and these alone as an array."""
    entries = [[*(g.prompt_logprobs or ()), *g.output_logprobs] for g in generations]
    return [g.token_ids for g in generations], np.concatenate(
        [[e.logprob for e in each] for each in entries]
    )


@pytest.mark.sampled(18)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("pool", [300, 2000])
def test_answers_are_those_of_a_cache_that_keeps_all(folder, page_size, pool):
    settings = dict(
        model=str(folder), device="cpu", dtype="float32", max_running=3, step_tokens=32, page_size=page_size,
        deterministic=True, max_total_tokens=pool, threads=1, in_process=True,
    )  # fmt: skip
    with (
        sgl.Engine(**settings) as windowed,
        sgl.Engine(**settings, enable_hierarchical_cache=True) as whole,
    ):
        assert windowed.stats()["window_total_tokens"] < whole.stats()["total_tokens"]
        assert "window_total_tokens" not in whole.stats()
        for scored in (True, False, False):
            found, expected = (
                seen(answers(engine, prompts(), scored=scored)) for engine in (windowed, whole)
            )
            assert found[0] == expected[0]
            # To the last bit, but for sinks and experts, whose sums depend on the batch.
            assert np.abs(found[1] - expected[1]).max() <= 1e-5 * ("gpt-oss" in str(folder))
        assert windowed.stats()["prompt_tokens_cached"] > 0


@needs_kernels
@pytest.mark.sampled(4)
@pytest.mark.parametrize("folder", ["gemma3", "mistral-window"], indirect=True)
def test_kernels_give_the_same(folder, monkeypatch):
    """The path of a GPU; without one, under Triton's interpreter."""
    if not torch.cuda.is_available():
        monkeypatch.setattr("sglang_lite.runtime.loading.load_model.Decoder", GpuDecoder)
    asked = [[*range(2, 36)], [*range(2, 34), 5, 6, 7]]
    with sgl.Engine(
        model=str(folder), dtype="float32", max_running=2, step_tokens=24, page_size=4, max_total_tokens=200, threads=1,
        in_process=True,
    ) as engine:  # fmt: skip
        found = [generation for ids in asked for generation in answers(engine, [ids], 2)]
        assert engine.stats()["window_free_tokens"] + engine.stats()["window_cached_tokens"] > 0
    assert found[1].usage.cached_tokens >= 32
    with sgl.Engine(
        model=str(folder), device="cpu", dtype="float32", prefix_cache=False, in_process=True
    ) as whole:
        tokens, logprobs = seen(answers(whole, asked, 2))
    assert seen(found)[0] == tokens
    assert np.abs(seen(found)[1] - logprobs).max() <= 1e-4


def check(seed, *, rows=20):
    """Random requests to a scripted model whose windowed layer must see what its other one sees."""
    draw = random.Random(seed)
    engine = SteppedEngine(
        model=loaded(window=draw.choice([1, 3, 8, 20, 40])), overlap=draw.random() < 0.5, max_running=4,
        step_tokens=draw.choice([4, 16, 1000]), page_size=draw.choice([1, 2, 4, 16]), prefix_cache=draw.random() < 0.8,
        context_length=96, max_total_tokens=draw.choice([128, 256, 640]), retract_every=draw.choice([0, 0, 3]),
        policy=draw.choice(["lpm", "fcfs"]), drafter=draw.choice([None, None, Guesses(0.8)]),
    )  # fmt: skip
    asked = requests(rows, seed)
    events = [engine.start(prompt, params)[1] for prompt, params in asked]
    engine.drain()
    for found, (prompt, params) in zip(events, asked):
        result = ended(found)
        assert (list(result.token_ids), result.finish_reason) == answer(prompt, params, params.seed)
    engine.check_empty()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(6))
def test_every_schedule_sees_what_is_in_the_window(seed):
    check(seed)


def test_a_prefix_can_be_used_up_to_the_end_of_a_whole_window():
    windows = WindowPages(10, 10, page_size=4, window=6, slots=1, step_tokens=8)
    pages = np.arange(8, dtype=np.int32)
    windows.attach(pages)
    assert [windows.usable_pages(pages[:n]) for n in range(9)] == [*range(9)]
    windows.detach(pages[2:3], 0)
    # A token at 8 or 12 sees positions from 3 and 7 on: pages 0 and 1; at 16 from 11 on, page 2,
    # and at 20 from 15 on.
    assert [windows.usable_pages(pages[:n]) for n in range(9)] == [0, 1, 2, 2, 2, 5, 6, 7, 8]


def test_a_prefix_that_a_window_cuts_does_not_end_in_a_late_adapter_s_first_tokens():
    """Which another adapter's may equal by chance."""
    windows = WindowPages(32, 32, page_size=1, window=2, slots=2, step_tokens=32)
    store = PrefixCache(32, 1, 2, 32, reuse=True, priority=EVICTION["lru"], windows=windows)
    tokens = np.arange(20, dtype=np.int32)
    space = PrefixSpace.in_namespace(
        "", Adapter("late", 1, 8, (), "its digest", (10,))
    ).start_at_invocation(tokens)
    handle = store.allocate_slot_for(tokens, store.match_usable(tokens, space), space)
    assert store.reserve_pages(handle.slot, len(tokens))
    store.table.computed[handle.slot] = len(tokens)
    store.publish_pages(handle)
    pages = store.match_usable(tokens, space).pages
    assert len(pages) == 19
    windows.detach(pages[12:], 0)
    assert windows.usable_pages(pages) == 12
    assert store.match_usable(tokens, space).count_cached(1) == space.start == 10


def test_pages_behind_the_window_are_free_again():
    engine = SteppedEngine(
        model=loaded(window=8), max_running=2, context_length=400, max_total_tokens=800, page_size=4
    )
    engine.start([*range(1, 30)] * 10, SamplingParams(max_tokens=90, min_tokens=90, temperature=0))
    windows, table = engine.store.windows, engine.store.table
    while engine.step():
        (request,) = engine.scheduler.queues.running() or [None]
        if request is not None and table.length[request.slot] > 300:
            held = int((windows.readers > 0).sum())
            assert held <= windows.kept + 1
    assert windows.pool.total * 4 < engine.store.pool.total


def test_a_shared_beginning_survives_what_is_computed_behind_it():
    """Pages in the midst of a prompt go first, the later the sooner."""
    engine = SteppedEngine(
        model=loaded(window=8),
        max_running=5,
        context_length=400,
        max_total_tokens=4000,
        page_size=4,
        step_tokens=16,
    )
    system = [*range(1, 30)] * 2
    for i in range(6):
        _, events = engine.start(
            [*system, *[i + 1] * 250], SamplingParams(max_tokens=1, temperature=0)
        )
        engine.drain()
        if i:
            assert ended(events).usage.cached_tokens >= len(system) - 4


def test_a_prefix_without_the_pages_of_a_window_was_evicted():
    engine = SteppedEngine(
        model=loaded(window=8),
        max_running=2,
        context_length=200,
        max_total_tokens=1200,
        page_size=4,
        step_tokens=16,
    )
    prompts = [[i, *range(1, 30)] * 4 for i in range(1, 9)]
    for prompt in prompts:
        engine.start(prompt, SamplingParams(max_tokens=1, temperature=0))
        engine.drain()
    assert engine.store.tree.cached_length(np.array(prompts[0], dtype=np.int32)) > 100
    _, events = engine.start(prompts[0], SamplingParams(max_tokens=1, temperature=0))
    engine.drain()
    assert ended(events).usage.cached_tokens < 100
    assert engine.built[-1].cache.miss.reason == "evicted"


def test_what_is_taken_back_beyond_the_window_is_computed_again():
    engine = SteppedEngine(
        model=loaded(window=4), max_running=2, context_length=200, max_total_tokens=400
    )
    prompt, params = [*range(1, 25)] * 4, SamplingParams(max_tokens=20, temperature=0)
    _, events = engine.start(prompt, params)
    for _ in range(6):
        engine.step()
    (request,) = engine.scheduler.queues.running()
    engine.store.table.computed[request.slot] = 40
    engine.drain()
    assert list(ended(events).token_ids) == answer(prompt, params)[0]


@pytest.mark.parametrize("window", [128, 1024, 4096])
@pytest.mark.parametrize("pages", [100, 2_000, 1_000_000])
def test_a_pool_is_split_so_that_a_long_request_runs(window, pages):
    sizes = Sizes(256, 8192, 16)
    own = kv_pool_size.count_window_pages(window, pages, sizes, 32_000)
    if not own:
        assert pages * 16 < 2 * window + 64
        return
    windows = WindowPages(pages, own, 16, window, 256, 8192)
    assert windows.kept + windows.chunk <= own < pages
    assert windows.limit_chunk(8192) >= 1
    assert windows.kept * 16 >= window


def test_a_gpus_pool_has_more_tokens_with_windows():
    model = mock.Mock(token_bytes=100, window_bytes=50)
    sizes = Sizes(256, 8192, 16)
    tokens = kv_pool_size.tokens_with_window_pages(model, 10**8, 10**6, sizes, 131_072, 128)
    own = kv_pool_size.count_window_pages(128, tokens // 16, sizes, 131_072)
    used = kv_pool_size.pool_bytes(model, tokens // 16, own, 16)
    assert 0.99 * 10**8 < used <= 10**8
    assert tokens > 1.8 * 10**6
