"""Models with recurrent layers, combined with other features of an engine: each gives what it gives
without a cache.
"""

from __future__ import annotations

import pytest
import torch
import transformers

import sglang_lite as sgl
from tests.runtime.models.test_families import (
    FAMILIES,
    SHAPE,
    ask,
    differences,
    engine,
    limit,
    prompts,
)
from tests.runtime.models.tiny import randomise, save

# The last one, rwkv and xlstm have no attention, lara-mini has windows, and minimax no convolution.
# Inkling's only states are the last inputs of convolutions.
KINDS = (
    "qwen3.5",
    "bamba",
    "jamba",
    "minimax",
    "recurrent-gemma",
    "lara-mini",
    "xlstm",
    "rwkv",
    "inkling",
    "inkling2-loop",
    "mamba2",
)


def made(name, folder):
    model, changes = FAMILIES[name]
    if isinstance(model, str):
        model = getattr(transformers, model)
    reference = randomise(model(model.config_class(**SHAPE | changes)))
    return save(reference, folder), reference


def keeps_maxima(reference):
    """True for a model whose states are refused in bfloat16."""
    names = ("rescale_every", "chunkwise_kernel")
    return any(hasattr(reference.config, name) for name in names)


@pytest.fixture(scope="module", params=KINDS)
def kind(request, tmp_path_factory):
    """(folder, transformers' model, folder of a model with other weights, that model)"""
    return [
        each
        for name in ("one", "two")
        for each in made(request.param, tmp_path_factory.mktemp(name))
    ]


@sgl.function
def program(s):
    s += "abcdefghijklm" * 3
    s += sgl.gen("forced", regex="x(yz){3}[ab]{4}", max_tokens=20)
    branches = s.fork(3)
    for i, branch in enumerate(branches):
        branch += str(i) * 4
        branch += sgl.gen("branch", max_tokens=5, ignore_eos=True)
    s += "".join(branch["branch"] for branch in branches)
    s += sgl.select("choice", choices=["aa", "ab", "bb"])
    s += sgl.gen("more", max_tokens=6, n=3, temperature=1.0, ignore_eos=True)


def texts(running):
    state = program.run(backend=running, temperature=0, seed=5)
    return state.text(), state["choice"], state["more"]


def test_forced_text_forks_choices_drafts_and_sleep(kind):
    folder = kind[0]
    with engine(folder, prefix_cache=False, page_size=4) as plain:
        expected = texts(plain)
    with engine(folder, speculation="auto", page_size=4) as running:
        for _ in range(3):
            assert texts(running) == expected
            running.sleep()
            running.wake()


def test_new_weights_drop_what_the_old_ones_summed_up(kind):
    folder, _, other, reference = kind
    asked = prompts(40, 33)
    with engine(folder, page_size=4) as running:
        running.update_weights(str(folder))
        before = [ask(running, ids, prompt=False, most=60) for ids in asked]
        running.update_weights(str(other))  # while they are answered
        assert [len(each.result(timeout=60).token_ids) for each in before] == [60, 60]
        for ids in asked:
            generation = ask(running, ids, prompt=False).result(timeout=60)
            assert differences(reference, ids, generation).max() <= limit(reference)


TIERS = {"enable_hierarchical_cache": True, "hicache_ratio": 8, "page_size": 4, "max_running": 2}
SMALL = {"max_total_tokens": 200, "max_mamba_cache_size": 4}


def answers_of(running, asked):
    """The ids of each answer, and the number of cached tokens of each prompt."""
    # a model this small computes faster than it copies
    running.core.scheduler.pauses.record_duration = lambda *_: None
    found = [ask(running, ids, prompt=False).result(timeout=60) for ids in asked]
    return [each.token_ids for each in found], [each.usage.cached_tokens for each in found]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_states_come_back_from_the_host(kind, policy):
    folder, asked = kind[0], prompts(90, 61, 75, 82, 66)
    with engine(folder, prefix_cache=False, page_size=4) as plain:
        expected, _ = answers_of(plain, asked)
    saver = {"enable_memory_saver": True}
    with engine(folder, **TIERS, **SMALL, **saver, hicache_write_policy=policy) as running:
        again = [each for ids in asked for each in (ids, ids)]
        assert answers_of(running, again)[0] == [ids for ids in expected for _ in range(2)]
        ends = [(len(ids) - 1) // 4 * 4 for ids in asked]
        assert answers_of(running, asked) == (expected, ends)
        running.sleep()
        running.wake()
        computed = running.stats()["prompt_tokens"] - running.stats()["prompt_tokens_cached"]
        assert answers_of(running, asked) == (expected, ends)
        stats = running.stats()
        computed = stats["prompt_tokens"] - stats["prompt_tokens_cached"] - computed
        assert computed == sum(len(ids) for ids in asked) - sum(ends)
        assert stats["host_states_fetched"]


def test_another_engine_goes_on_behind_states_in_files(kind, tmp_path):
    folder, asked = kind[0], prompts(90, 61, 200)
    files = {"hicache_storage_backend": "file", "hicache_storage_dir": str(tmp_path)}
    with engine(folder, **TIERS, **files) as running:
        expected, _ = answers_of(running, asked)
    with engine(folder, **TIERS, **files) as running:
        ends = [(len(ids) - 1) // 4 * 4 for ids in asked]
        assert answers_of(running, asked) == (expected, ends)
        assert running.stats()["disk_tokens_read"] == sum(ends)
    if keeps_maxima(kind[1]):
        with pytest.raises(sgl.ParameterError, match=r"mamba_ssm_dtype: .* running maxima"):
            engine(folder, mamba_ssm_dtype="bfloat16")
        return
    with engine(folder, **TIERS, **files, mamba_ssm_dtype="bfloat16") as running:
        assert answers_of(running, asked)[1] == [0] * 3


def test_a_saved_program_goes_on_from_its_state(kind, tmp_path):
    path = tmp_path / "story.json"

    @sgl.function
    def story(s):
        s += "abcdefghij" * 8
        s += sgl.gen("a", max_tokens=20, temperature=0, ignore_eos=True)

    def continued(state):
        state += "xyz" + sgl.gen("b", max_tokens=4, temperature=0, ignore_eos=True)
        return state["b"], state.usage("b").cached_tokens

    with engine(kind[0], **TIERS) as running:
        state = story.run(backend=running)
        state.save(path, cache=True)
        expected, _ = continued(state)
    with engine(kind[0], **TIERS) as running:
        again, cached = continued(sgl.load(path, backend=running, trust_cache=True))
        assert again == expected
        assert cached >= 96
    if keeps_maxima(kind[1]):
        return
    with (
        engine(kind[0], **TIERS, mamba_ssm_dtype="bfloat16") as running,
        pytest.raises(sgl.ParameterError, match=r"in float32 .* in bfloat16"),
    ):
        sgl.load(path, backend=running, trust_cache=True)


def test_new_weights_find_no_state_of_the_old_ones_on_the_host(kind):
    folder, _, other, reference = kind
    asked = prompts(90, 61, 75, 82, 66)
    with engine(folder, **TIERS, **SMALL) as running:
        answers_of(running, asked)
        running.update_weights(str(other))
        assert running.stats()["host_states_kept"] == 0
        for ids in asked:
            generation = ask(running, ids, prompt=False).result(timeout=60)
            assert generation.usage.cached_tokens == 0
            assert differences(reference, ids, generation).max() <= limit(reference)


def test_states_of_16_bits_sum_up_the_same_with_a_cache_and_without(kind):
    folder, asked, found = kind[0], prompts(40, 33), []
    for cached in (False, True):
        with engine(folder, page_size=4, prefix_cache=cached, dtype="bfloat16") as running:
            for _ in range(2):
                answers = [ask(running, ids, prompt=False).result(timeout=60) for ids in asked]
            assert any(each.usage.cached_tokens for each in answers) == cached
            found.append([each.token_ids for each in answers])
    assert found[0] == found[1]


def test_exact_draws_begin_with_kept_states(kind):
    @sgl.function
    def drawn(s):
        s += "abc" * 10
        s += sgl.gen("text", regex="[ab]{4}", max_tokens=8, exact=True)

    with engine(kind[0], page_size=4) as running:
        first, second = (drawn.run(backend=running, temperature=1, seed=3) for _ in range(2))
        assert first["text"] == second["text"]
        assert first.exact("text").log_mass == pytest.approx(
            second.exact("text").log_mass, abs=1e-3
        )


@pytest.mark.parametrize("name", KINDS)
def test_a_request_whose_states_are_nan_fails_alone(name, tmp_path):
    """States beside it, and those that take its places later, are as ever."""
    _, reference = made(name, tmp_path)
    embeddings = reference.get_input_embeddings().weight
    with torch.no_grad():
        embeddings[7] = torch.nan
        reference.get_output_embeddings().weight[7] = 0  # no answer has it
    folder = save(reference, tmp_path)
    asked = [[each if each != 7 else 8 for each in ids] for ids in prompts(40, 33)]
    with engine(folder, page_size=4, max_running=3, max_mamba_cache_size=3) as running:
        for _ in range(3):
            wrong = ask(running, [*asked[0][20:], 7, *asked[0][20:]], prompt=False)
            right = [ask(running, ids, prompt=False) for ids in asked]
            assert "NaN or infinite" in str(wrong.result(timeout=60))
            for each, ids in zip(right, asked):
                generation = each.result(timeout=60)
                assert differences(reference, ids, generation).max() <= limit(reference)


@pytest.mark.parametrize("name", ["qwen2-moe", "mixtral-window", "lara-mini", "qwen3.5"])
def test_what_a_request_with_nan_computed_is_not_read_by_others(name, tmp_path):
    """A token's NaN reaches earlier tokens of its step, which other prompts have, too."""
    _, reference = made(name, tmp_path)
    with torch.no_grad():
        reference.get_input_embeddings().weight[7] = torch.nan
        reference.get_output_embeddings().weight[7] = 0  # no answer has it
    folder = save(reference, tmp_path)
    (asked,) = ([each if each != 7 else 8 for each in ids] for ids in prompts(40))
    with engine(folder, page_size=4) as running:
        for _ in range(2):
            wrong = ask(running, [*asked[:20], 7, *asked[20:]], prompt=False)
            assert "NaN or infinite" in str(wrong.result(timeout=60))
            generation = ask(running, asked, prompt=False).result(timeout=60)
            assert differences(reference, asked, generation).max() <= limit(reference)


def test_a_model_without_attention_keeps_states_whatever_tokens_take(tmp_path):
    folder, reference = made("mamba2", tmp_path)
    with engine(folder, max_running=3) as running:
        stats = running.stats()
        assert stats["total_tokens"] >= 3 * 256  # all requests may be as long as the context
        assert stats["states_total"] >= 3 * 6  # two for each request, and others to go on from
        for ids in prompts(200, 9):
            generation = ask(running, ids).result(timeout=60)
            assert differences(reference, ids, generation).max() < limit(reference)
    with engine(folder, mem_fraction=0.5, max_mamba_cache_size=7, max_running=5) as running:
        assert running.stats()["states_total"] == 2 * 5 + 7


def test_a_size_of_the_host_is_for_the_states_of_a_model_without_attention(tmp_path):
    folder, _ = made("mamba2", tmp_path)
    size = {"enable_hierarchical_cache": True, "hicache_ratio": 2.0, "hicache_size": 1}
    with engine(folder, max_total_tokens=640, **size) as running:
        stats = running.stats()
    assert stats["host_total_tokens"] == 2 * stats["total_tokens"]  # which take no memory
    assert stats["host_states_total"] > 10_000
