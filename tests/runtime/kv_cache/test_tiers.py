"""A cache that keeps pages in the host's memory: outputs are those of one that never forgets, and
less is computed.
"""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import sglang_lite as sgl
from sglang_lite.protocol import Generation, SamplingParams
from sglang_lite.runtime.calls import Stats, WriteTensors
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.core.cache_tiers import page_names
from sglang_lite.runtime.kv_cache.eviction_policy import EVICTION
from sglang_lite.runtime.kv_cache.page_names import PageNames
from sglang_lite.runtime.kv_cache.prefix_space import PrefixSpace
from sglang_lite.runtime.kv_cache.radix import RadixTree
from sglang_lite.runtime.loading.load_model import load_model
from tests.counts import some
from tests.runtime.models.test_new_weights import pair, tensors_of
from tests.runtime.scripted import VOCAB, SteppedEngine, answer, ended, loaded

ACTIONS = some(60, 3000)  # requests of each case, with some three actions each
POLICIES = ["write_through", "write_through_selective", "write_back"]


def engine(**config):
    sizes = {"max_running": 4, "context_length": 160, "max_total_tokens": 192, "hicache_ratio": 4}
    return SteppedEngine(**{"enable_hierarchical_cache": True, **sizes, **config})


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("page", "host"), [(1, 4), (4, 2), (16, 0.3)])
def test_whatever_happens_answers_are_those_of_a_cache_that_never_forgets(policy, page, host):
    rng = random.Random(page)
    tiers = engine(
        page_size=page,
        hicache_ratio=host,
        hicache_write_policy=policy,
        late=lambda: rng.random() < 0.4,
        seed=1,
    )
    stems = [[rng.randrange(1, VOCAB) for _ in range(100)] for _ in range(5)]
    requests = []
    for i in range(ACTIONS):
        ids = stems[rng.randrange(5)][: rng.randrange(1, 100)] + [
            rng.randrange(1, VOCAB)
        ] * rng.randrange(6)
        params = SamplingParams(
            max_tokens=rng.randrange(10), temperature=float(rng.random() < 0.5), seed=i
        )
        requests.append((*tiers.start(ids, params, namespace=rng.choice(["", "a"])), ids, params))
        for _ in range(rng.randrange(5)):
            tiers.step()
        if rng.random() < 0.1:
            rng.choice(requests)[0].abort()
        if rng.random() < 0.01:
            tiers.scheduler.end_pauses_and_flush()
    tiers.drain()
    for _, events, ids, params in requests:
        result = ended(events)
        if isinstance(result, Generation):
            assert (list(result.token_ids), result.finish_reason) == answer(
                ids, params, params.seed
            )
    tiers.check_empty()


def generation(tiers, prompt, **options):
    _, events = tiers.start(prompt, SamplingParams(max_tokens=1, temperature=0), **options)
    tiers.drain()
    return ended(events)


def one(tiers, prompt, **options):
    return generation(tiers, prompt, **options).usage.cached_tokens


@pytest.mark.parametrize("policy", POLICIES)
def test_what_was_evicted_is_fetched(policy):
    tiers, prompts = engine(hicache_write_policy=policy), [[1 + i] * 100 for i in range(4)]
    for prompt in prompts:
        one(tiers, prompt)
        one(tiers, prompt)  # used again
    assert [one(tiers, prompt) for prompt in prompts] == [99] * 4


def test_usage_and_stats_tell_the_tier():
    tiers = engine(hicache_write_policy="write_back")
    for prompt in ([1] * 100, [2] * 100, [3] * 100):
        one(tiers, prompt)
    again = generation(tiers, [1] * 120).usage
    assert (again.cached_tokens, again.host_tokens, again.disk_tokens) == (100, 100, 0)
    stats = tiers.core.submit_call(Stats())
    tiers.step()
    assert stats.result()["host_tokens_fetched"] == 100
    assert (
        100
        <= stats.result()["host_cached_tokens"]
        <= stats.result()["host_total_tokens"]
        == 4 * 192
    )
    assert generation(tiers, [1] * 110).usage.host_tokens == 0  # on the device now


def test_answers_of_the_native_protocol_tell_the_tier():
    config = {
        "enable_hierarchical_cache": True,
        "hicache_write_policy": "write_back",
        "max_total_tokens": 192,
    }
    one_token = {"max_new_tokens": 1, "temperature": 0}
    with sgl.Engine.of(loaded(), **config) as opened:
        answers: list[Any] = [
            opened.generate(input_ids=[i] * 100, sampling_params=one_token) for i in (1, 2, 3, 1)
        ]
    told = [each["meta_info"]["cached_tokens_details"] for each in answers]
    assert told[0] == {"device": 0, "host": 0, "storage": 0}
    assert told[3] == {"device": 0, "host": 99, "storage": 0}


def test_copies_that_were_slow_once_are_tried_again():
    tiers, prompts = engine(), [[1 + i] * 100 for i in range(4)]
    for prompt in prompts:
        one(tiers, prompt)
    tiers.scheduler.pauses.token_s, tiers.store.source.host.memory.page_s = 1e-3, 1.0
    assert one(tiers, prompts[0]) == 0
    found = [one(tiers, prompts[i % 4]) for i in range(1, 100)]
    assert max(found) == 99


def test_what_nobody_has_used_again_is_not_copied_by_the_selective_policy():
    tiers, prompts = (
        engine(hicache_write_policy="write_through_selective"),
        [[1 + i] * 100 for i in range(4)],
    )
    assert [one(tiers, prompt) for prompt in prompts * 2] == [0] * 8


def test_an_engine_that_closes_gives_back_what_the_device_has_of_the_hosts_memory(monkeypatch):
    closed = []
    monkeypatch.setattr(
        "sglang_lite.runtime.executor.page_memory.CpuPageMemory.close",
        lambda memory: closed.append(memory),
    )
    with sgl.Engine.of(loaded(), enable_hierarchical_cache=True, max_total_tokens=192) as opened:
        opened.complete([1, 2, 3], SamplingParams(max_tokens=1))
        assert closed == []
    assert len(closed) == 1


def test_namespaces_share_nothing():
    tiers = engine(hicache_write_policy="write_back")
    for prompt, namespace in (([1] * 100, "a"), ([2] * 100, ""), ([3] * 100, "")):
        one(tiers, prompt, namespace=namespace)
    assert one(tiers, [1] * 100, namespace="b") == one(tiers, [1] * 100) == 0
    assert one(tiers, [1] * 100, namespace="a") == 99


def test_what_computing_brings_sooner_is_computed():
    tiers, prompts = engine(hicache_write_policy="write_back"), [[1 + i] * 100 for i in range(3)]
    for prompt in prompts:
        one(tiers, prompt)
    tiers.store.source.host.memory.page_s = 1.0
    computed = generation(tiers, prompts[0])
    assert computed.usage.cached_tokens == 0
    assert computed.meta["cache_miss"]["reason"] == "on_host"


def test_a_flush_forgets_the_hosts_copies():
    tiers = engine()
    one(tiers, [1] * 100)
    tiers.scheduler.end_pauses_and_flush()
    assert one(tiers, [1] * 100) == 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("policy", POLICIES)
def test_new_weights_and_flushes_come_while_copies_are_under_way(policy, tmp_path):
    """Each answer is that of the weights that drew it, whatever was on its way when they came."""
    rng, folders = random.Random(3), dict(zip(("old", "new"), pair("llama-biases", tmp_path)))
    weights = {name: tensors_of(folder) for name, folder in folders.items()}
    stems = [[rng.randrange(3, 90) for _ in range(60)] for _ in range(6)]
    prompts = [[*stems[i % 6][: 60 - 20 * (i // 6)], 3 + i] for i in range(12)]
    params = SamplingParams(
        max_tokens=4, temperature=0, ignore_eos=True, return_prompt_token_ids=True
    )
    expected = {}
    for name, folder in folders.items():
        with sgl.Engine(
            str(folder), dtype="float32", device="cpu", in_process=True, max_running=4
        ) as plain:
            expected[name] = [plain.complete(ids, params).token_ids for ids in prompts]
    config = EngineConfig.make(model=str(folders["old"]), dtype="float32", device="cpu")
    tiers = engine(
        model=load_model(config, folders["old"]), weight_version="old", page_size=4, hicache_write_policy=policy,
        late=lambda: rng.random() < 0.3, device="cpu",
    )  # fmt: skip
    requests, on_the_way = [], 0
    for _ in range(ACTIONS):
        index = rng.randrange(len(prompts))
        requests.append((tiers.start(prompts[index], params)[1], index))
        for _ in range(rng.randrange(8)):
            tiers.step()
        host = tiers.store.source.host.memory
        if rng.random() < 0.1:
            on_the_way += host.count_completed() < host.launched
            version = rng.choice(["old", "new"])
            written = tiers.core.submit_call(
                WriteTensors(weights[version], last=True, version=version)
            )
            tiers.step()
            assert written.result(0) == version
        elif rng.random() < 0.05:
            on_the_way += host.count_completed() < host.launched
            tiers.scheduler.end_pauses_and_flush()
    tiers.drain()
    assert on_the_way
    whole = [(ended(events), index) for events, index in requests]
    whole = [(each, index) for each, index in whole if "older_weight_versions" not in each.meta]
    assert len(whole) > ACTIONS // 2
    for each, index in whole:
        assert each.token_ids == expected[each.meta["weight_version"]][index]
    assert tiers.store.source.fetched_pages
    tiers.check_empty()


def test_names_depend_on_header_namespace_and_all_tokens_before():
    def names(tokens, header=b"model 1", namespace=""):
        tree = RadixTree(4, EVICTION["lru"])
        node = tree.insert_sequence(
            np.array(tokens, np.int32), np.arange(len(tokens) // 4, dtype=np.int32), namespace
        ).node
        return PageNames(header, 4).names_of_node(node)

    tokens = list(range(12))
    same = names(tokens)
    assert len(set(same)) == 3
    assert names(tokens) == same
    for others in (
        names(tokens, header=b"model 2"),
        names(tokens, namespace="a"),
        names([9, *tokens[1:]]),
    ):
        assert not set(others) & set(same)
    assert names([*tokens[:8], 9, 9, 9, 9])[:2] == same[:2]


def test_adapters_share_what_the_model_itself_has_computed_alone():
    tree, names = RadixTree(4, EVICTION["lru"]), PageNames(b"", 4)
    tokens, pages = np.arange(1, 13, dtype=np.int32), np.arange(3, dtype=np.int32)

    def named(namespace="", digest="", invocation=()):
        adapter: Any = SimpleNamespace(digest=digest, invocation=invocation) if digest else None
        ids, place = (
            PrefixSpace.in_namespace(namespace, adapter)
            .start_at_invocation(tokens)
            .tree_key(tokens)
        )
        return names.names_of_node(tree.insert_sequence(ids, pages, place).node)[-3:]

    plain, a, b = named(), named(digest="a"), named(digest="b")
    late_a, late_b = named(digest="a", invocation=(5, 6)), named(digest="b", invocation=(5, 6))
    same = {*plain} | {*a} | {*b} | {*late_a} | {*late_b} | {*named("a:")} | {*named("\0a:")}
    assert len(same) == 3 + 3 + 3 + 2 + 2 + 3 + 3
    assert named(digest="a") == a
    first = names.names_after(names.root_name(b""), tokens)
    assert next(first) == plain[0]


def test_names_depend_on_what_an_engine_records_of_tokens():
    core = engine().core
    keys = [
        page_names(
            replace(core.config, **records), "scripted", None, loaded().model, core.capacity
        ).key
        for records in (
            {},
            {"enable_return_routed_experts": True},
            {"enable_return_hidden_states": True},
        )
    ]
    assert keys[0] == core.scheduler.store.source.names.key
    assert len(set(keys)) == 3


def test_names_of_a_node_stay_those_of_its_pages_when_it_is_split():
    tree, names = RadixTree(2, EVICTION["lru"]), PageNames(b"", 2)
    tokens = np.arange(8, dtype=np.int32)
    node = tree.insert_sequence(tokens, np.arange(4, dtype=np.int32)).node
    before = names.names_of_node(node)
    end = tree.insert_sequence(
        np.array([0, 1, 2, 3, 9, 9], np.int32), np.array([0, 1, 7], np.int32)
    )
    assert names.names_of_node(node) == before[2:]
    assert end.node.parent is not None
    assert names.last_name(end.node.parent) == before[1]
    assert len(names.names_of_node(end.node)) == 1


def test_pages_added_under_a_renamed_namespace_have_names_of_their_own():
    """They may be of older weights."""
    tree, names = RadixTree(2, EVICTION["lru"]), PageNames(b"", 2)
    first, later = (np.array(ids, np.int32) for ids in ([1, 2], [3, 4]))
    pages = np.arange(3, dtype=np.int32)
    tree.insert_sequence(first, pages[:1])
    tree.rename_namespaces(" old")
    old = tree.insert_sequence(later, pages[1:2], " old").node
    new = tree.insert_sequence(later, pages[2:]).node
    assert names.names_of_node(old) != names.names_of_node(new)


@pytest.mark.parametrize(
    ("config", "wrong"),
    [
        ({"hicache_ratio": 0}, "hicache_ratio"),
        ({"hicache_size": -1}, "hicache_size"),
        ({"hicache_write_policy": "never"}, "hicache_write_policy"),
        ({"prefix_cache": False}, "enable_hierarchical_cache"),
    ],
)
def test_wrong_settings_are_refused(config, wrong):
    with pytest.raises(sgl.ParameterError, match=wrong):
        engine(**config)


def test_more_than_the_hosts_memory_is_refused_before_it_is_taken():
    with pytest.raises(sgl.ModelError, match="of the host's cache"):
        engine(hicache_size=1 << 20)
