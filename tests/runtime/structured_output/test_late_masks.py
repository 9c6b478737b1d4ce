"""A mask that takes long holds up its own request alone."""

# mypy: disable-error-code="arg-type, list-item"
# Fakes stand for matchers.

import threading
from functools import partial

import numpy as np
import pytest
from msgspec.structs import replace

import sglang_lite as sgl
from sglang_lite.protocol import SamplingParams
from sglang_lite.runtime.structured_output.mask_filler import MaskFiller
from sglang_lite.runtime.structured_output.request_matcher import RequestMatcher
from tests.engine.collector import Collector
from tests.runtime.scripted import VOCAB, SteppedEngine, ended

WORDS = (VOCAB + 31) // 32


class SlowEngine:
    """Engine whose masks for matchers that are `slow` are not made before `go` is set."""

    name, vocab_size = "slow", VOCAB

    def __init__(self):
        self.go, self.begun, self.asked = threading.Event(), threading.Event(), 0

    def masks(self, matchers):
        if any(matcher.slow for matcher in matchers):
            self.asked += 1
            self.begun.set()
            assert self.go.wait(60)
        return [matcher.mask() for matcher in matchers]


class Parity:
    """Tokens must be odd and even by turns; from the token `slow_at` on its masks are slow."""

    open_text, thinking, finished, complete, error = None, None, False, True, ""

    def __init__(self, engine, slow_at=None):
        self.engine, self.slow_at, self.count, self.kept = engine, slow_at, 0, None
        self.parts, self.lock_key, self.state_key = (self,), id(self), id(self)

    @property
    def slow(self):
        return self.slow_at is not None and self.count >= self.slow_at

    def mask(self):
        return np.full(WORDS, 0x55555554 if self.count % 2 else -0x55555556, np.int32)

    def cached_mask(self):
        return self.kept

    def set_mask(self, mask):
        self.kept = mask

    def accept(self, token):
        assert token % 2 != self.count % 2
        self.count, self.kept = self.count + 1, None
        return True

    def find_forced_tokens(self):
        return []


PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SETTINGS = [
    {"overlap": overlap, "page_size": page, "retract_every": retract}
    for overlap, page, retract in [
        (True, 1, 0),
        (True, 4, 0),
        (False, 16, 3),
        (False, 4, 0),
        (True, 16, 2),
    ]
]


def run(engine, grammars, slow_at, constrained, length=3):
    """Four requests, of which the second is slow from some token on, until the others have ended;
    their tokens.
    """
    ends = [None] * 4

    def sink(i, event):
        ends[i] = event
        if all(ends[:1] + ends[2:]):
            grammars.go.set()

    for i in range(4):
        engine.submit([5] * (length - 2) + [6, 7 + i], PARAMS, sink=partial(sink, i))
        if i in constrained:
            engine.built[-1].output.matcher = RequestMatcher(
                Parity(grammars, slow_at if i == 1 else None)
            )
    engine.drain()
    return [end.token_ids for end in ends]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "constrained", [(1,), (0, 1, 2, 3)], ids=["it alone is constrained", "all are"]
)
@pytest.mark.parametrize(("slow_at", "length"), [(0, 16), (0, 3), (1, 3), (5, 3)])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_others_end_before_it_and_it_gets_what_it_would_have_got(
    settings, slow_at, length, constrained
):
    """A first mask that is late as well, and a prompt that fills its last page."""

    def engine():
        return SteppedEngine(max_total_tokens=256, context_length=64, threads=2, **settings)

    expected = run(engine(), SlowEngine(), None, constrained, length)
    late = engine()
    assert run(late, SlowEngine(), slow_at, constrained, length) == expected
    assert late.loop.masks.late > 0
    late.check_empty()


def test_a_request_whose_mask_is_late_can_be_aborted_and_its_slot_used_again():
    engine, grammars = (
        SteppedEngine(max_total_tokens=256, context_length=64, max_running=2, threads=2),
        SlowEngine(),
    )
    _, free = engine.start([5, 6, 7], replace(PARAMS, max_tokens=40))
    slow, aborted = engine.start([5, 6, 8], PARAMS)
    engine.built[-1].output.matcher = RequestMatcher(Parity(grammars, 3))
    while not engine.loop.masks.late:
        engine.step()
    slow.abort()
    _, events = engine.start([5, 6, 8], PARAMS)
    engine.built[-1].output.matcher = RequestMatcher(Parity(grammars))
    engine.drain()  # while the mask is being made
    assert isinstance(ended(aborted), sgl.RequestAbortedError)
    assert [len(ended(each).token_ids) for each in (free, events)] == [40, 12]
    grammars.go.set()
    engine.check_empty()


def test_where_nobody_can_go_on_the_first_one_that_can_is_waited_for():
    class Meeting(SlowEngine):
        """Both rows' masks are being made at the same time."""

        both = threading.Barrier(2)

        def masks(self, matchers):
            self.both.wait(60)
            return super().masks(matchers)

    filler, grammars = MaskFiller(2), Meeting()
    matchers = [Parity(grammars), Parity(grammars, 0)]
    masks = np.zeros((2, WORDS), np.int32)
    assert filler.fill(matchers, masks.__setitem__, patience=0.0) == [1]
    assert (masks[0] == matchers[0].mask()).all()
    assert not masks[1].any()
    grammars.go.set()
    assert filler.fill(matchers[1:], masks[1:].__setitem__) == []
    assert (masks[1] == matchers[1].mask()).all()
    filler.close()


@pytest.mark.parametrize("before", [True, False], ids=["before it waits", "while it waits"])
def test_where_nobody_can_go_on_a_command_is_not_kept_waiting(before):
    filler, grammars = MaskFiller(2), SlowEngine()
    matchers = [Parity(grammars, 0), Parity(grammars, 0)]
    masks = np.zeros((2, WORDS), np.int32)
    asked = threading.Event()

    def wanted():
        asked.set()
        return before

    def command():
        assert asked.wait(60)
        filler.interrupt()

    thread = threading.Thread(target=command)
    thread.start()
    assert filler.fill(matchers, masks.__setitem__, has_other_work=wanted) == [0, 1]
    thread.join()
    grammars.go.set()
    assert filler.fill(matchers, masks.__setitem__) == []
    assert (masks == [matcher.mask() for matcher in matchers]).all()
    filler.close()


def test_a_command_that_comes_behind_the_first_mask_makes_no_row_late():
    filler, grammars = MaskFiller(1), SlowEngine()
    matchers = [Parity(grammars), Parity(grammars, 0)]
    masks = np.zeros((2, WORDS), np.int32)

    def wanted():
        assert grammars.begun.wait(60)  # so the first one's mask is made
        filler.interrupt()
        grammars.go.set()
        return False

    assert filler.fill(matchers, masks.__setitem__, has_other_work=wanted) == []
    assert (masks == [matcher.mask() for matcher in matchers]).all()
    filler.close()


def test_a_request_that_comes_while_all_wait_for_their_masks_is_answered():
    """By the engine's own thread, which stands in the middle of a step."""
    engine, grammars = (
        SteppedEngine(max_total_tokens=256, context_length=64, threads=2),
        SlowEngine(),
    )
    waiting = [Collector() for _ in range(2)]
    for i, sink in enumerate(waiting):
        engine.submit([5, 6, 7 + i], PARAMS, sink=sink)
        engine.built[-1].output.matcher = RequestMatcher(Parity(grammars, 3))
    loop = threading.Thread(target=engine.loop.run)
    loop.start()
    assert grammars.begun.wait(60)
    for _ in range(3):
        free = Collector()
        engine.submit([5, 6, 9], PARAMS, sink=free)
        assert len(free.end().token_ids) == 12
    assert not any(sink.events for sink in waiting)
    grammars.go.set()
    assert [len(sink.end().token_ids) for sink in waiting] == [12, 12]
    engine.loop.inbox.close()
    loop.join()


def test_rows_in_the_place_of_a_late_one_wait_for_its_mask():
    """Else it could be moved while the engine works on it."""
    filler, grammars = MaskFiller(2), SlowEngine()
    slow, alike, other = Parity(grammars, 0), Parity(grammars), Parity(grammars)
    alike.state_key = slow.state_key
    masks = np.zeros((3, WORDS), np.int32)
    assert filler.fill([slow, other], masks.__setitem__, patience=0.0) == [0]
    assert filler.fill([slow, alike, other], masks.__setitem__, patience=0.0) == [0, 1]
    assert alike.kept is None
    assert grammars.asked == 1
    grammars.go.set()
    assert filler.fill([slow], masks.__setitem__) == []
    filler.close()


def test_a_late_row_waits_for_its_engine_though_others_learn_the_mask_of_its_place():
    """A generation within a larger grammar makes masks where it is, at once; and nobody moves what
    an engine reads.
    """
    filler, grammars = MaskFiller(2), SlowEngine()
    slow, other = Parity(grammars, 0), Parity(grammars)
    masks = np.zeros((2, WORDS), np.int32)
    assert filler.fill([slow, other], masks.__setitem__, patience=0.0) == [0]
    slow.set_mask(slow.mask())
    assert filler.fill([slow, other], masks.__setitem__, patience=0.0) == [0]
    assert filler.fill([slow], masks.__setitem__, patience=0.0, has_unmasked_rows=True) == [0]
    grammars.go.set()
    assert filler.fill([slow, other], masks.__setitem__) == []
    assert (masks[0] == slow.mask()).all()
    assert grammars.asked == 1
    filler.close()
