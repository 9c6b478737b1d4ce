"""Programs say of their future: prefixes are held and yield, the queue is ordered, room is kept.
Counted, not timed; the engine's cache is checked after every step.
"""

import random
from collections import Counter

import pytest

from sglang_lite.program.nodes import Fork, Gen, Mark, Program, Rollback, Select, Text, Verdict
from sglang_lite.program.play.branch import NOTHING_EXPECTED, ExpectedTokens, ProgramBranch, Totals
from sglang_lite.protocol import (
    Choices,
    Delta,
    Generation,
    Number,
    Played,
    ProgramResult,
    SamplingParams,
    Span,
)
from sglang_lite.runtime.requests.scheduled_branch import (
    ScheduledBranch,
    ScheduledProgram,
    estimate_node_tokens,
)
from sglang_lite.runtime.scheduler.admission_order import fcfs, lpm, priority
from tests.runtime.scripted import SteppedEngine, ended, hashes


def greedy(tokens, **options):
    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, **options)


def letters(seed, count):
    return "".join(random.Random(seed).choices("abcdefghijklmnopqrstuvwxyz", k=count))


def engine_with(tokens, **config):
    return SteppedEngine(
        **{"max_running": 8, "context_length": 256, "max_total_tokens": tokens, **config}
    )


class Checked:
    """A program whose caller has a verdict on each of its generations, some steps after it came."""

    def __init__(self, engine, own, rounds=3, tokens=4):
        self.own, self.rounds, self.tokens = own, rounds, tokens
        self.values, self.usages, self.result = [], [], None
        self.program = engine.open_program(sink=self.told)
        self.waiting = True  # for its verdict
        self.program.extend((), (Text(own),))
        self.go_on()

    def go_on(self):
        self.waiting = False
        self.program.extend((), (Gen("x", greedy(self.tokens), judged=True),))

    def told(self, event):
        if isinstance(event, Played) and not isinstance(event.event, Delta):
            assert isinstance(event.event, Generation), event
            self.values.append(event.event.text)
            self.usages.append(event.event.usage)
            self.waiting = True
        elif not isinstance(event, Played):
            self.result = event

    def verdict(self):
        self.waiting = False
        self.program.judge((), len(self.values), Verdict((Span(self.values[-1]),)))
        if len(self.values) < self.rounds:
            self.go_on()
        else:
            self.program.close()


def play(engine, programs, delay=1, limit=5000):
    """Steps until all have ended; verdicts come `delay` steps after their generations."""
    answered = {}
    for step in range(limit):
        engine.step()
        for program in programs:
            if program.waiting and answered.setdefault(id(program), step) + delay <= step:
                del answered[id(program)]
                program.verdict()
        if all(program.result is not None for program in programs):
            return
    raise AssertionError("programs that never end")


def counted(engine):
    """Counts of how often each token was computed, by all tokens up to it."""
    computed, record_launch = Counter(), engine.scheduler.record_launch

    def launch(batch):
        for slot, start, end in zip(
            batch.slots.tolist(), batch.starts.tolist(), batch.ends.tolist()
        ):
            computed.update(hashes(engine.store.table.tokens[slot, :end])[start:].tolist())
        return record_launch(batch)

    engine.scheduler.record_launch = launch
    return computed


def test_what_a_verdict_is_awaited_on_stays_cached_and_is_let_go_at_the_end():
    engine = engine_with(128)
    program = Checked(engine, letters(0, 60), rounds=2)
    while not program.waiting:
        engine.step()
    for i in range(4):  # others would evict it
        engine.start(letters(i + 1, 30), greedy(2))
    engine.drain()
    assert len(engine.scheduler.pauses) == 1
    program.verdict()
    while not program.waiting:
        engine.step()
    assert program.usages[1].cached_tokens >= 60
    program.verdict()
    engine.drain()
    assert isinstance(program.result, ProgramResult)
    engine.check_empty()


def test_dropping_the_cache_drops_what_is_locked_too():
    """As an update of the weights does: what is held is of the old ones."""
    engine = engine_with(128)
    program = Checked(engine, letters(0, 60), rounds=1)
    while not program.waiting:
        engine.step()
    engine.step()
    assert len(engine.scheduler.pauses)
    assert engine.scheduler.end_pauses_and_flush() >= 60
    assert engine.store.tree.pages == 0
    program.verdict()
    engine.drain()
    assert isinstance(program.result, ProgramResult)
    engine.check_empty()


def test_programs_that_are_checked_compute_their_prefixes_once_where_a_few_fit():
    engine = engine_with(3 * 80)
    computed = counted(engine)
    programs = [Checked(engine, letters(i, 60), rounds=4) for i in range(10)]
    play(engine, programs)
    assert sum(computed.values()) <= 1.1 * len(computed)  # a second is expected of the first pause
    assert not any(request.retractions for request in engine.built)
    engine.check_empty()


def test_what_is_locked_yields_before_anybody_is_retracted():
    engine = engine_with(128)
    program = Checked(engine, letters(0, 60), rounds=1)
    while not program.waiting:
        engine.step()
    _, events = engine.start(letters(1, 20), greedy(100))
    engine.drain()
    assert len(ended(events).token_ids) == 100
    assert not any(request.retractions for request in engine.built)
    assert 0 < engine.scheduler.pauses.pages_given_up < 60  # no more than was needed
    program.verdict()
    engine.drain()
    assert isinstance(program.result, ProgramResult)
    engine.check_empty()


def test_forks_hold_what_they_begin_with_until_they_have_it():
    engine = engine_with(400, max_running=1)
    events = []
    branches = tuple((Text(letters(i, 20)), Gen("x", greedy(4))) for i in range(4))
    ticket = engine.run_program(
        letters(9, 100), Program((Gen("a", greedy(4)), Fork(branches))), sink=events.append
    )
    others = [engine.start(letters(20 + i, 120), greedy(2))[1] for i in range(4)]
    computed = counted(engine)
    engine.drain()
    assert isinstance(events[-1], ProgramResult)
    assert all(isinstance(ended(each), Generation) for each in others)
    assert sum(computed.values()) <= len(computed) + 8
    ticket.abort()
    engine.check_empty()


def test_going_back_finds_what_was_there_before_the_mark():
    engine = engine_with(256)
    found = []
    program = engine.open_program(sink=found.append)
    program.extend(
        (), (Text(letters(0, 60)), Gen("a", greedy(2)), Mark(), Gen("x", greedy(8), judged=True))
    )
    engine.drain()
    program.extend((), (Rollback(2), Gen("y", greedy(8))))
    program.close()
    engine.drain()
    usage = next(e.event.usage for e in found if isinstance(e, Played) and e.path == (5,))
    assert usage.cached_tokens >= 61
    engine.check_empty()


def test_a_program_that_was_played_before_continues_from_the_cache():
    engine = engine_with(1024)
    nodes = tuple(node for i in range(4) for node in (Text(letters(i, 20)), Gen("x", greedy(2))))
    texts, computed = [], counted(engine)
    for _ in range(2):
        events = []
        engine.run_program("abc", Program(nodes), sink=events.append)
        engine.drain()
        texts.append(events[-1].text)
        usages = [e.event.usage for e in events if isinstance(e, Played)]
    assert texts[0] == texts[1]
    assert all(usage.cached_tokens == usage.prompt_tokens - 1 for usage in usages)
    # the last token of each prompt, and those that are drawn
    assert sum(computed.values()) <= len(computed) + 8
    engine.check_empty()


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_continuing_from_the_cache_gives_the_same_tokens(page_size):
    nodes = tuple(node for i in range(4) for node in (Text(letters(i, 7 + i)), Gen("x", greedy(3))))
    engine, texts = engine_with(1024, page_size=page_size), []
    for _ in range(3):
        events = []
        engine.run_program("abc", Program(nodes), sink=events.append)
        engine.drain()
        texts.append(events[-1].text)
    assert len(set(texts)) == 1
    engine.check_empty()


def test_nobody_is_retracted_for_pages_that_are_being_freed():
    engine = engine_with(256, context_length=128, step_tokens=64)
    for i in range(12):
        engine.start(letters(i, 90), greedy(20))
    engine.drain()
    assert not any(request.retractions for request in engine.built)


def test_programs_that_would_starve_each_other_half_way_run_one_after_the_other():
    engine = engine_with(160)
    nodes = tuple(node for i in range(4) for node in (Text(letters(i, 4)), Gen("x", greedy(16))))
    events = []
    for i in range(6):
        engine.run_program(letters(50 + i, 20), Program(nodes), sink=events.append)
    engine.drain()
    assert [type(e) for e in events].count(ProgramResult) == 6
    assert sum(request.retractions for request in engine.built) <= 2
    engine.check_empty()


def waiting(engine, *prompts):
    """Requests that wait for admission."""
    return [
        request
        for ids, options in prompts
        for request in engine.core.builder.build_requests(
            ids, engine.core.builder.resolve_with_defaults(greedy(4)), print, **options
        )
    ]


def test_requests_that_share_a_prefix_follow_each_other():
    engine = engine_with(256)
    a, b = [1] * 40, [2] * 40
    queue = waiting(engine, *(([*stem, 3, i], {}) for i, stem in enumerate((a, b, a, b, a))))
    assert [request.id for request in lpm([], queue, engine.store.tree)] == [0, 2, 4, 1, 3]
    assert [request.id for request in fcfs([], queue, engine.store.tree)] == [0, 1, 2, 3, 4]


def test_plain_requests_that_share_nothing_keep_their_order():
    engine = engine_with(256)
    queue = waiting(engine, *(([i, 5, 6], {}) for i in range(1, 9)))
    assert list(lpm([], queue, engine.store.tree)) == queue


def test_of_a_program_the_longest_way_goes_first_and_others_keep_their_place():
    engine = engine_with(256)
    queue = waiting(engine, *(([7, i], {}) for i in range(5)))
    program = ScheduledProgram()
    for request, path in zip(queue[1:4], (5, 50, 20)):
        branch: ProgramBranch = ProgramBranch((), Totals())
        branch.expected = ExpectedTokens(0, path, path)
        request.branch = ScheduledBranch(program, branch)
    assert [request.id for request in lpm([], queue, engine.store.tree)] == [0, 2, 3, 1, 4]


def test_what_was_passed_over_too_often_comes_first_and_what_continues_before_others():
    engine = engine_with(256)
    *queue, continued = waiting(engine, *(([7, i], {}) for i in range(5)))
    queue[3].passed_over = 256
    assert [request.id for request in lpm([continued], queue, engine.store.tree)] == [4, 3, 0, 1, 2]
    assert [request.id for request in priority([continued], queue, engine.store.tree)] == [
        3,
        4,
        0,
        1,
        2,
    ]
    assert [request.id for request in fcfs([continued], queue, engine.store.tree)] == [
        4,
        0,
        1,
        2,
        3,
    ]


def test_a_high_priority_does_not_keep_a_low_one_waiting_for_ever():
    engine = engine_with(256)
    queue = waiting(engine, *(([7, i], {}) for i in range(3)))
    queue[1].priority = 5
    assert [request.id for request in priority([], queue, engine.store.tree)] == [1, 0, 2]
    queue[2].passed_over = 256
    assert [request.id for request in priority([], queue, engine.store.tree)] == [2, 1, 0]


def test_tokens_ahead_are_bounded_by_what_nodes_say():
    resolved = engine_with(256).core.builder.resolve_with_defaults
    params = resolved(greedy(100))
    assert estimate_node_tokens(Text("abcdefgh"), None, ()) == ExpectedTokens(2, 0, 2)
    assert estimate_node_tokens(Text("", (1, 2, 3)), None, ()) == ExpectedTokens(3, 0, 3)
    assert estimate_node_tokens(Gen("x"), params, ()) == ExpectedTokens(0, 100, 100)
    assert estimate_node_tokens(Gen("x"), resolved(greedy(100, n=3)), ()) == ExpectedTokens(
        0, 300, 100
    )
    assert estimate_node_tokens(
        Gen("x", constraint=Choices(("yes", "no"))), params, ()
    ) == ExpectedTokens(0, 3, 3)
    assert estimate_node_tokens(Gen("x", constraint=Number("integer")), params, ()).path < 100
    assert estimate_node_tokens(Gen("x"), None, ()) == NOTHING_EXPECTED  # refused
    assert estimate_node_tokens(Select("x", ("abcd", "abcdefgh")), None, ()) == ExpectedTokens(
        3, 0, 2
    )
    assert estimate_node_tokens(
        Fork(((), ())), None, (ExpectedTokens(1, 2, 3), ExpectedTokens(10, 20, 5))
    ) == ExpectedTokens(11, 22, 5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(12))
def test_random_programs_in_small_pools_all_end_with_the_same_texts(seed):
    chance = random.Random(seed)
    shapes = [(letters(chance.randrange(4), chance.randrange(5, 40)), chance.randrange(1, 4), chance.randrange(1, 9))
              for _ in range(10)]  # fmt: skip
    delay, texts = chance.randrange(1, 5), []
    for tokens in (4096, 96):
        engine = engine_with(
            tokens, context_length=96, max_running=chance.choice([1, 3, 8]), page_size=chance.choice([1, 2, 4]),
            policy=chance.choice(["lpm", "fcfs", "priority"]), overlap=chance.random() < 0.5,
        )  # fmt: skip
        programs = [Checked(engine, *shape) for shape in shapes]
        plain = [engine.start(letters(i, 30), greedy(8))[1] for i in range(4)]
        play(engine, programs, delay)
        engine.drain()
        texts.append(
            [program.result.text for program in programs] + [ended(events).text for events in plain]
        )
        assert not len(engine.scheduler.pauses)
        engine.check_empty()
    assert texts[0] == texts[1]
