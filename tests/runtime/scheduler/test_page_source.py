"""The scheduler works with any source of pages: here with another engine's cache, whose pages are
promised and come some plans later, or are lost.
"""

import random

import numpy as np
import pytest

from sglang_lite.protocol import Generation, SamplingParams
from sglang_lite.runtime.kv_cache.page_source import PageSource, PromisedPages
from tests.counts import some
from tests.runtime.scripted import VOCAB, SteppedEngine, answer, ended

PAGE = 4
SIZES = {"max_running": 4, "context_length": 160, "max_total_tokens": 240, "page_size": PAGE}


class Sent(PromisedPages):
    """Pages on their way: which they are at the other engine, and where they go."""

    def __init__(self, tokens, namespace, lock, before, pages, theirs, plans):
        super().__init__(from_host=len(pages))
        self.tokens, self.namespace, self.lock, self.before = tokens, namespace, lock, before
        self.pages, self.theirs, self.plans, self.is_lost = pages, theirs, abs(plans), plans < 0


class OtherEngine(PageSource):
    """Sends pages of another engine's cache. `delay` says how many plans later they come; a
    negative number of plans means that they are lost then.
    """

    has_pages = True

    def __init__(self, engine, other, delay):
        self._store, self._other, self._delay = engine.store, other.store, delay
        count = other.store.pool.total
        self._from = other.loop.runner.allocate_page_memory(count)
        self._to = engine.loop.runner.allocate_page_memory(count)
        self.open, self.sent, self.lost = [], 0, 0

    def has_pending_pages(self, completed):
        return bool(self.open)

    def list_pending_pages(self):
        return [(each.lock, each.pages) for each in self.open]

    def fetch_after_match(self, tokens, match, space, token_s, before):
        if before is not None:
            return None  # a request asks once, and computes what was lost
        ids = space.tree_ids(tokens)
        theirs = self._other.tree.match_prefix(ids[:-1], space.namespace).pages[len(match.pages) :]
        if not len(theirs) or len(theirs) > self._store.available + self._store.pool.quarantined:
            return None
        lock = self._store.tree.lock_node(match.node)
        pages = self._store.allocate(len(theirs))
        if pages is None:
            lock.unlock_prefix()
            return "later"
        end = (len(match.pages) + len(pages)) * PAGE
        plans = self._delay()
        sent = Sent(ids[:end].copy(), space.namespace, lock, match.pages, pages, theirs, plans)
        self.open.append(sent)
        return sent

    def add_arrived_pages(self):
        for sent in list(self.open):
            sent.plans -= 1
            if sent.plans == 0:
                self.open.remove(sent)
                self._end(sent, lost=sent.is_lost)
        return 0

    def _end(self, sent, *, lost):
        pages = sent.pages
        if not lost:
            slots = np.arange(len(pages), dtype=np.int32)
            self._from.copy_to_host(sent.theirs, slots)
            self._to.rows[: len(pages)] = self._from.rows[: len(pages)]
            self._to.copy_to_device(slots, pages)
            whole = np.concatenate((sent.before, pages))
            pages = self._store.tree.insert_sequence(sent.tokens, whole, sent.namespace).duplicates
        self._store.pool.quarantine_pages(pages, self._store.step)
        sent.lock.unlock_prefix()
        sent.done = True
        self.sent += not lost
        self.lost += lost

    def drop_pages(self, *, keep=False):
        for sent in self.open:
            self._end(sent, lost=True)
        self.open.clear()


def greedy(tokens):
    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)


def pair(delay, **more):
    """An engine, and its source: an engine that has computed `STEM`."""
    other = SteppedEngine(**SIZES)
    other.start(STEM, greedy(1))
    other.drain()
    engine = SteppedEngine(**{**SIZES, **more})
    engine.store.source = OtherEngine(engine, other, delay)
    return engine, engine.store.source


STEM = [1 + i * i % 29 for i in range(101)]


def test_a_request_waits_for_promised_pages_and_begins_with_them():
    engine, source = pair(lambda: 5)
    _, events = engine.start([*STEM, 7], greedy(3))
    for _ in range(4):
        engine.step()
    assert engine.scheduler.queues.has_waiting
    assert source.open
    engine.drain()
    result = ended(events)
    assert (result.usage.cached_tokens, result.usage.host_tokens) == (100, 100)
    assert list(result.token_ids) == answer([*STEM, 7], greedy(3), 0)[0]
    engine.check_empty()


def test_a_request_computes_what_was_promised_and_lost():
    engine, source = pair(lambda: -5)
    _, events = engine.start([*STEM, 7], greedy(3))
    engine.drain()
    result = ended(events)
    assert source.lost == 1
    assert (result.usage.cached_tokens, result.usage.host_tokens) == (0, 0)
    assert list(result.token_ids) == answer([*STEM, 7], greedy(3), 0)[0]
    engine.check_empty()


def test_other_requests_run_while_one_waits_for_promised_pages():
    engine, source = pair(lambda: 40)
    _, waits = engine.start([*STEM, 7], greedy(3))
    _, runs = engine.start([5, 6], greedy(3))
    for _ in range(10):
        engine.step()
    assert source.open
    assert waits == []
    assert ended(runs)
    engine.drain()
    assert ended(waits).usage.cached_tokens == 100


@pytest.mark.parametrize("end", ["abort", "flush"])
def test_what_ends_while_pages_are_promised_leaves_nothing_behind(end):
    engine, source = pair(lambda: 50)
    ticket, events = engine.start([*STEM, 7], greedy(3))
    engine.step()
    assert source.open
    if end == "abort":
        ticket.abort()
    else:
        engine.scheduler.end_pauses_and_flush()
    engine.drain()
    assert ended(events) is not None
    assert not source.open
    engine.check_empty()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(4))
def test_answers_do_not_depend_on_what_a_source_sends_or_loses(seed):
    rng = random.Random(seed)
    engine, source = pair(lambda: rng.randrange(1, 9) * rng.choice([1, 1, -1]))
    requests = []
    for i in range(some(60, 1000)):
        ids = [*STEM[: rng.randrange(1, 101)], *[rng.randrange(1, VOCAB)] * rng.randrange(1, 6)]
        params = SamplingParams(max_tokens=rng.randrange(10), temperature=float(i % 2), seed=i)
        requests.append((*engine.start(ids, params), ids, params))
        for _ in range(rng.randrange(5)):
            engine.step()
        if rng.random() < 0.1:
            rng.choice(requests)[0].abort()
        if rng.random() < 0.3:
            engine.scheduler.end_pauses_and_flush()
    engine.drain()
    for _, events, ids, params in requests:
        result = ended(events)
        if isinstance(result, Generation):
            assert list(result.token_ids) == answer(ids, params, params.seed)[0]
    assert source.sent
    assert source.lost
    engine.check_empty()
