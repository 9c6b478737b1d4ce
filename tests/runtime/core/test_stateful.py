"""Anything may happen to requests at any time: what they hold stays consistent, and each ends once
with its answer.
"""

import os
import random

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang_lite.program.nodes import Fork, Gen, Node, Program, Text
from sglang_lite.protocol import (
    Generation,
    OverloadedError,
    Played,
    ProgramResult,
    RequestAbortedError,
    SamplingParams,
)
from tests.runtime.scripted import VOCAB, Guesses, SteppedEngine, answer, ended, loaded

# of 50 actions each; more: CONTRIBUTING.md
EXAMPLES = int(os.environ.get("SGLANG_LITE_EXAMPLES", "8"))
STEMS = [[random.Random(i).randrange(1, VOCAB) for _ in range(40)] for i in range(3)]

prompts = st.tuples(
    st.sampled_from(STEMS), st.integers(1, 40), st.lists(st.integers(1, VOCAB - 1), max_size=6)
)


class Scheduling(RuleBasedStateMachine):
    @initialize(
        overlap=st.booleans(),
        page=st.sampled_from([1, 2, 4, 16]),
        chunk=st.sampled_from([4, 16, 1000]),
        cached=st.booleans(),
        policy=st.sampled_from(["lpm", "fcfs", "priority"]),
        eviction=st.sampled_from(["lru", "lfu", "fifo", "slru"]),
        drafter=st.sampled_from([None, Guesses(1), Guesses(0.8), Guesses(0)]),
        drafted=st.sampled_from([1, 4, 16]),
        writes=st.sampled_from([None, "write_through", "write_through_selective", "write_back"]),
        host=st.sampled_from([0.25, 1, 8]),
        window=st.sampled_from([None, 1, 3, 8, 20]),
        stages=st.sampled_from([1, 1, 2, 3]),
        states=st.sampled_from([None, None, 4, 5, 20]),
        interval=st.sampled_from([0, 0, 7]),
        seed=st.integers(0, 1000),
    )
    def start(
        self,
        overlap,
        page,
        chunk,
        cached,
        policy,
        eviction,
        drafter,
        drafted,
        writes,
        host,
        window,
        stages,
        states,
        interval,
        seed,
    ):
        if states is not None:
            stages = 1
            window = None
        drafter = drafter if stages == 1 else None  # stages check no drafts
        late = random.Random(seed)
        tiers = {
            "enable_hierarchical_cache": True,
            "hicache_ratio": host,
            "hicache_write_policy": writes,
        }
        self.engine = SteppedEngine(
            overlap=overlap, page_size=page, step_tokens=chunk, prefix_cache=cached, max_running=4,
            context_length=96, max_total_tokens=128, policy=policy, eviction=eviction, fails=self._fails,
            drafter=drafter, draft_tokens=drafted,
            model=loaded(window=window, stages=stages, states=states is not None),
            max_mamba_cache_size=states, mamba_track_interval=interval,
            late=lambda: late.random() < 0.3, **(tiers if writes and cached else {}),
        )  # fmt: skip
        self.requests, self.programs, self.aborted = [], [], set()
        self.short, self.alone = [], 0

    @rule(prompt=prompts, tokens=st.integers(0, 10), warm=st.booleans())
    def submit(self, prompt, tokens, warm):
        stem, length, rest = prompt
        ids = [*stem[:length], *rest]
        params = SamplingParams(max_tokens=tokens, temperature=float(warm), seed=len(self.requests))
        self.requests.append((*self.engine.start(ids, params), ids, params))

    @rule(prompt=prompts, widths=st.lists(st.integers(1, 4), min_size=1, max_size=3))
    def fork(self, prompt, widths):
        params = SamplingParams(max_tokens=3, temperature=0)
        segments: tuple[Node, ...] = (Gen("end", params),)
        for width in widths:
            segments = (Text("ab"), Gen("g", params), Fork((segments,) * width))
        events = []
        ticket = self.engine.run_program(
            "".join("xyz"[i % 3] for i in prompt[0][:9]), Program(segments), sink=events.append
        )
        self.programs.append((ticket, events))

    @rule(count=st.integers(1, 5))
    def step(self, count):
        for _ in range(count):
            self.engine.step()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data):
        i = data.draw(st.integers(0, len(self.requests) - 1))
        self.aborted.add(i)
        self.requests[i][0].abort()

    @precondition(lambda self: self.programs)
    @rule(data=st.data())
    def abort_program(self, data):
        data.draw(st.sampled_from(self.programs))[0].abort()

    @precondition(lambda self: len(list(self.engine.scheduler.queues.running())) > 1)
    @rule(data=st.data())
    def retract(self, data):
        self.engine.scheduler.retraction.retract_request(
            data.draw(
                st.sampled_from(sorted(self.engine.scheduler.queues.running(), key=lambda r: r.id))
            )
        )

    @rule(where=st.lists(st.sampled_from(["forward", "sample", "read"]), min_size=1, max_size=2))
    def run_short(self, where):
        """Memory ends in the next steps."""
        self.short += where

    def _fails(self, batch):
        if not self.short:
            return None
        self.alone += self.engine.scheduler.isolated
        return self.short.pop()

    @rule(pages=st.integers(1, 60))
    def evict(self, pages):
        self.engine.store.evict_pages(pages)

    @rule()
    def flush(self):
        self.engine.scheduler.end_pauses_and_flush()

    @invariant()
    def consistent(self):
        if hasattr(self, "engine"):
            self.engine.check()

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        self.engine.drain()
        for i, (_, events, ids, params) in enumerate(self.requests):
            result = ended(events)
            if i in self.aborted and isinstance(result, RequestAbortedError):
                continue
            if isinstance(result, OverloadedError):  # nothing but it ran
                self.alone -= 1
                continue
            assert isinstance(result, Generation), result
            assert (list(result.token_ids), result.finish_reason) == answer(
                ids, params, params.seed
            )
        for _, events in self.programs:
            assert len([e for e in events if not isinstance(e, Played)]) == 1
            assert isinstance(events[-1], ProgramResult | RequestAbortedError | OverloadedError), (
                events[-1]
            )
            self.alone -= isinstance(events[-1], OverloadedError)
        assert self.alone >= 0
        self.engine.check_empty()


Scheduling.TestCase.settings = settings(
    max_examples=EXAMPLES, stateful_step_count=50, deadline=None
)
TestScheduling = Scheduling.TestCase
