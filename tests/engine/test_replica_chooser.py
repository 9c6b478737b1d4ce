"""The choice of a replica, with replicas of which only trees and capacities are real."""

from collections import Counter
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglang_lite.engine.replica_chooser import AHEAD_ROWS, ReplicaChooser
from sglang_lite.engine.replica_program import ProgramLoad, estimate_forked_load
from sglang_lite.program.nodes import Fork, Gen, Text
from sglang_lite.protocol import Generation, Played, SamplingParams
from sglang_lite.runtime.capacity import Capacity, Sizes
from sglang_lite.runtime.kv_cache.eviction_policy import EVICTION
from sglang_lite.runtime.kv_cache.prefix_hash import PrefixHash, PrefixHasher
from sglang_lite.runtime.kv_cache.radix import RadixTree
from sglang_lite.runtime.kv_cache.tree_changes import TreeChanges
from tests.counts import some

PAGE = 16


def chooser_of(count, rule="auto", *, rows=256, tokens=1 << 20, down=()):
    capacity = Capacity(Sizes(rows, 8192, PAGE), tokens, tokens // PAGE, tokens)
    return ReplicaChooser(count, rule, capacity, PAGE, lambda rank: int(rank not in down))


class Fleet:
    """Replicas that compute at once what they are given: a tree each, in a pool of pages that
    evicts the oldest.
    """

    def __init__(self, chooser, count, pages):
        self.chooser, self.pages, self.hasher = chooser, pages, PrefixHasher()
        self.trees = [RadixTree(PAGE, EVICTION["lru"], TreeChanges(PAGE)) for _ in range(count)]
        self.prompted = self.computed = 0

    def place(self, tokens, expected=32, rows=1):
        digests = self.hasher.compute_digests(PrefixHash.for_namespace(""), tokens, PAGE).tolist()
        return self.chooser.place_prompt(digests, len(tokens), expected, rows=rows)

    def finish(self, placement, tokens):
        tree = self.trees[placement.rank]
        self.prompted += len(tokens)
        self.computed += len(tokens) - tree.cached_length(tokens)
        whole = tokens[: len(tokens) - len(tokens) % PAGE]
        tree.insert_sequence(whole, np.arange(len(whole) // PAGE, dtype=np.int32))
        tree.evict_leaves(tree.pages - self.pages)
        if (change := tree.changes.take_changes()) is not None:
            self.chooser.update_tree(
                placement.rank,
                change.gained.tolist(),
                change.lost.tolist(),
                forgotten=change.forgotten,
            )
        self.chooser.forget_placement(placement)

    def run(self, tokens):
        placement = self.place(tokens)
        self.finish(placement, tokens)
        return placement.rank


def text(seed, length):
    return np.random.default_rng(seed).integers(0, 50_000, length).astype(np.int32)


def joined(*parts):
    return np.concatenate(parts)


# --------------------------------------------------------------------------------------- the prefix


def test_a_prompt_goes_where_the_tree_has_its_prefix_until_it_is_evicted():
    fleet = Fleet(chooser_of(3), 3, pages=40)
    first, second = text(1, 320), text(2, 320)
    assert [fleet.run(first), fleet.run(second), fleet.run(second), fleet.run(first)] == [
        0,
        1,
        1,
        0,
    ]
    assert fleet.computed == 640
    assert fleet.run(joined(first, text(3, 300))) == 0
    fleet.finish(fleet.chooser.place_prompt((), 10, 0, rank=0), text(4, 640))  # evicts all of it
    assert fleet.run(first) == 2  # whose cache is the emptiest


def test_prompts_follow_a_prefix_that_is_only_on_its_way():
    fleet = Fleet(chooser_of(4), 4, pages=1000)
    shared = text(1, 160)
    assert {fleet.place(joined(shared, text(seed, 40))).rank for seed in range(20)} == {0}


def test_a_beginning_that_all_share_gathers_nobody():
    fleet = Fleet(chooser_of(4), 4, pages=1000)
    head = text(0, 64)
    ranks = [fleet.place(joined(head, text(seed, 400))).rank for seed in range(1, 41)]
    assert [ranks.count(rank) for rank in range(4)] == [10] * 4


def test_a_full_replica_spills_by_subtree():
    """Rows of the same subtree stay together at the replica that takes over."""
    fleet = Fleet(chooser_of(3, rows=8), 3, pages=1000)
    root = text(0, 400)
    subtrees = {name: joined(root, text(name, 200)) for name in (1, 2, 3, 4)}
    ranks = [
        (name, fleet.place(joined(subtrees[name], text(10 + i, 20))).rank)
        for name in subtrees
        for i in range(4)
    ]
    assert {rank for name, rank in ranks if name in (1, 2)} == {0}
    assert {rank for name, rank in ranks if name in (3, 4)} == {1}


def test_a_program_of_many_branches_keeps_others_away_once_it_fills_its_replica():
    fleet = Fleet(chooser_of(2, rows=64), 2, pages=1000)
    shared = text(1, 160)
    program = fleet.place(shared)
    fleet.chooser.adjust(program, 63, 63 * 100)  # a fork
    assert fleet.place(shared).rank == 1
    fleet.chooser.forget_placement(program)
    assert fleet.place(joined(shared, text(2, 16))).rank == 1


def test_programs_that_begin_together_spread_by_the_branches_that_they_will_have():
    """Every second one has asked in all its branches before the next one is placed, the others only
    in their first.
    """
    chooser, loads = chooser_of(4, rows=2048), []
    # what else it builds is not asked for
    builder: Any = SimpleNamespace(resolve_with_defaults=lambda params: params)
    fork, ask = Fork(((),) * 64), Gen("a", params=SamplingParams(max_tokens=8, n=1))
    for seed in range(16):
        early = [((), (Text("a"), fork)), ((1, 0), (ask,))]
        coming = estimate_forked_load(early, builder)
        tokens = text(seed, 64)
        digests = (
            PrefixHasher().compute_digests(PrefixHash.for_namespace(""), tokens, PAGE).tolist()
        )
        placement = chooser.place_prompt(
            digests, 64, coming.branches * coming.tokens, rows=1 + coming.branches
        )
        loads.append((ProgramLoad(chooser, placement, builder, coming), placement))
        for path, nodes in early:
            loads[-1][0].add_nodes(path, nodes)
        for branch in range(1, 64) if seed % 2 else ():
            loads[-1][0].add_nodes((1, branch), (ask,))
    assert Counter(placement.rank for _, placement in loads) == dict.fromkeys(range(4), 4)
    for load, _ in loads[::2]:
        for branch in range(1, 64):
            load.add_nodes((1, branch), (ask,))
    for load, placement in loads:
        assert (placement.rows, placement.tokens) == (64, 64 + 64 * coming.tokens)
        tell = load.make_counting_sink(lambda _: None)
        for branch in range(64):
            tell(Played((1, branch, 0), None, Generation("a", (1,), finish_reason="stop")))
        assert placement.rows == 1


def test_a_prefix_does_not_hold_a_replica_that_runs_far_ahead():
    fleet = Fleet(chooser_of(2), 2, pages=1000)
    shared = text(1, 160)
    ranks = [fleet.place(shared).rank for _ in range(2 * AHEAD_ROWS)]
    assert ranks[:AHEAD_ROWS] == [0] * AHEAD_ROWS
    assert ranks[AHEAD_ROWS] == 1


def test_a_queue_behind_full_replicas_still_follows_its_prefixes():
    fleet = Fleet(chooser_of(2, rows=4), 2, pages=1000)
    groups = [text(1, 160), text(2, 160)]
    ranks = [(i % 2, fleet.place(groups[i % 2]).rank) for i in range(40)]
    assert {ranks[0], ranks[1]} == {*ranks}


# --------------------------------------------------------------------------------------------- load


def test_without_a_prefix_the_fewest_expected_tokens_decide_and_then_the_number():
    chooser = chooser_of(3)
    placed = [chooser.place_prompt((), length, 10) for length in (100, 50, 50, 10, 10)]
    assert [each.rank for each in placed] == [0, 1, 2, 1, 2]
    chooser.forget_placement(placed[0])
    assert chooser.place_prompt((), 1, 1).rank == 0


@pytest.mark.parametrize(
    ("rule", "ranks"),
    [
        ("round_robin", [0, 1, 2, 0, 1, 2]),
        ("total_requests", [0, 1, 2, 1, 2, 0]),  # of equal numbers the fewest tokens
        ("shortest_queue", [0, 1, 2, 1, 2, 0]),
        ("total_tokens", [0, 1, 2, 1, 2, 1]),
        ("cache_aware", [0, 1, 2, 1, 2, 1]),
    ],
)
def test_rules_by_name(rule, ranks):
    chooser = chooser_of(3, rule)
    assert [
        chooser.place_prompt((), length, 0).rank for length in (900, 100, 100, 100, 200, 1)
    ] == ranks


@pytest.mark.parametrize("rule", ["auto", "round_robin", "total_requests", "total_tokens"])
def test_a_replica_that_is_down_gets_nothing_and_one_that_is_asked_for_everything(rule):
    chooser = chooser_of(3, rule, down={1})
    assert {chooser.place_prompt((), 10, 10).rank for _ in range(10)} == {0, 2}
    assert chooser.place_prompt((), 10, 10, rank=1).rank == 1


def test_what_has_ended_leaves_nothing():
    rng, chooser = Random(0), chooser_of(2)
    fleet = Fleet(chooser, 2, pages=50)
    opened = []
    for seed in range(200):
        tokens = joined(text(seed % 5, 64), text(seed, 40))
        opened.append((fleet.place(tokens, rows=rng.choice([1, 3])), tokens))
        rng.shuffle(opened)
        while len(opened) > 8:
            fleet.finish(*opened.pop())
    for each in opened:
        fleet.finish(*each)
    for rank in range(2):
        chooser.update_tree(rank, (), (), forgotten=True)
    # both were empty
    assert [chooser.place_prompt((), 16, 0).rank, chooser.place_prompt((), 16, 0).rank] == [0, 1]
    assert (
        chooser.find_holder(
            fleet.hasher.compute_digests(PrefixHash.for_namespace(""), text(1, 64), PAGE).tolist()
        )
        == 0
    )


# --------------------------------------------------------------------------------------------- bars


BEGINNING, TURN = 64, 256  # tokens that a group shares, and that a turn adds to its chat


def hit_rate(rule, chats, groups, turns=8, replicas=8):
    """Share of the prompts' tokens that caches had: chats in groups that share a beginning, whose
    turns come in random order. Each replica's pool holds a quarter of the chats.
    """
    rng, begins = Random(1), [text(group, BEGINNING) for group in range(groups)]
    said = [begins[chat % groups] for chat in range(chats)]
    pages = chats * (BEGINNING + turns * TURN) // PAGE // 4
    fleet = Fleet(chooser_of(replicas, rule), replicas, pages)
    left = [chat for chat in range(chats) for _ in range(turns)]
    rng.shuffle(left)
    for number, chat in enumerate(left):
        said[chat] = joined(said[chat], text(10_000 + number, TURN))
        fleet.run(said[chat])
    possible = 1 - (groups * BEGINNING + len(left) * TURN) / fleet.prompted
    return 1 - fleet.computed / fleet.prompted, possible


def test_chats_are_found_in_caches_three_times_as_often_as_by_turns():
    chats, groups = some(120, 2000), some(12, 200)
    (ours, possible), (turns, _) = (
        hit_rate(rule, chats, groups) for rule in ("auto", "round_robin")
    )
    assert ours >= 3 * turns, (ours, turns)
    assert ours >= 0.98 * possible, (ours, possible)
