"""Pauses of an engine, and updates in several calls: what requests get meanwhile."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

import sglang_lite as sgl
from sglang_lite.protocol import SamplingParams
from sglang_lite.runtime.calls import PauseGeneration
from sglang_lite.runtime.core import weight_update
from tests.runtime.models.test_new_weights import Q, engine, pair, tensors_of
from tests.runtime.scripted import FreeDrafts

LONG = SamplingParams(max_tokens=150, temperature=0, ignore_eos=True)
PROMPT = list(range(3, 40))


@pytest.fixture(scope="module")
def llamas(tmp_path_factory):
    return pair("llama-biases", tmp_path_factory.mktemp("llamas"))


@pytest.fixture
def running(llamas):
    with engine(llamas[0]) as running:
        yield running


class Stream:
    """A request that streams: its ticket, its first delta, what is then done on the engine's
    thread, and its end.
    """

    def __init__(self, running, params=LONG, then=lambda: None):
        self.first, self.end, self._then = Future(), Future(), then
        self.ticket = running.submit(PROMPT, params, sink=self._take, stream=True)

    def _take(self, event):
        if isinstance(event, sgl.SglError | sgl.protocol.Generation):
            self.end.set_result(event)
        elif not self.first.done():
            self.first.set_result(self._then())


def tokens(running, params=LONG):
    return Stream(running, params).end.result(60).token_ids


def test_a_pause_keeps_new_requests_waiting(running):
    expected = tokens(running)
    assert running.pause_generation() == 0
    waiting = Stream(running)
    assert running.stats()["waiting"] == 1
    running.continue_generation()
    assert waiting.end.result(60).token_ids == expected


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_running_requests_end_or_continue_as_the_mode_says(running, mode):
    expected = tokens(running)
    stream = Stream(running)
    stream.first.result(60)
    assert running.pause_generation(mode) == 1
    if mode == "abort":
        assert isinstance(stream.end.result(60), sgl.RequestAbortedError)
    else:
        steps = running.stats()["steps"]
        assert running.stats()["steps"] == steps
    running.continue_generation()
    running.continue_generation()  # there is no pause any more
    if mode != "abort":
        assert stream.end.result(60).token_ids == expected
    assert tokens(running) == expected


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_each_token_has_the_version_that_drew_it(running, llamas, mode):
    stream = Stream(running)
    stream.first.result(60)
    running.pause_generation(mode)
    running.update_weights_from_tensor(tensors_of(llamas[1]), weight_version="new")
    running.continue_generation()
    generation = stream.end.result(60)
    ((count, version),) = generation.meta["older_weight_versions"]
    assert (version, generation.meta["weight_version"], len(generation.token_ids)) == (
        "default",
        "new",
        150,
    )
    assert 0 < count < 150
    new, drawn = tokens(running), [*generation.token_ids]
    with engine(llamas[1]) as other:
        assert new == tokens(other)  # nothing of the old weights is found again
        if mode == "retract":
            rest = SamplingParams(max_tokens=150 - count, temperature=0, ignore_eos=True)
            done: Future = Future()
            other.submit([*PROMPT, *drawn[:count]], rest, sink=done.set_result)
            assert list(done.result(60).token_ids) == drawn[count:]


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_new_weights_come_between_two_steps_with_drafts(llamas, mode):
    """The drafts are of the old weights' answer, which is drafted as a whole, and end where the new
    ones differ.
    """
    with engine(llamas[0], speculation="again", draft_tokens=16) as running:
        running.core.scheduler.drafts.drafting.cost = FreeDrafts()
        old = tokens(running)
        stream = Stream(running, then=lambda: running.core.submit_call(PauseGeneration(mode)))
        assert stream.first.result(60).result(60) == 1
        running.update_weights_from_tensor(tensors_of(llamas[1]), weight_version="new")
        running.continue_generation()
        generation = stream.end.result(60)
        ((count, _),) = generation.meta["older_weight_versions"]
        assert generation.token_ids[:count] == old[:count]
        assert generation.meta["spec_accept_token_num"] > 0
        fresh = tokens(running)
    with engine(llamas[1]) as other:
        assert fresh == tokens(other) != old
        if mode == "retract":
            done: Future = Future()
            rest = SamplingParams(max_tokens=150 - count, temperature=0, ignore_eos=True)
            other.submit([*PROMPT, *old[:count]], rest, sink=done.set_result)
            assert done.result(60).token_ids == generation.token_ids[count:]


def test_an_update_that_has_not_ended_refuses_requests(running, llamas):
    old, new = llamas
    expected = tokens(running)
    running.update_weights_from_tensor({Q: tensors_of(new)[Q]}, flush_cache=False)
    assert "weights incomplete" in str(Stream(running).end.result(60))
    running.update_weights(str(old))
    assert tokens(running) == expected


def test_requests_wait_while_the_calls_of_one_update_come(running, llamas):
    old, new = llamas
    before = tokens(running)
    running.update_weights(str(new))
    expected = tokens(running)
    running.update_weights(str(old))
    running.begin_weight_update()
    assert tokens(running) == before  # nothing has changed yet
    tensors = tensors_of(new)
    running.update_weights_from_tensor({Q: tensors.pop(Q)})
    waiting = Stream(running)
    assert running.stats()["waiting"] == 1
    running.update_weights_from_tensor(tensors)
    assert not waiting.end.done()
    running.end_weight_update()
    assert waiting.end.result(60).token_ids == expected != before


def test_an_update_in_a_pause_ends_with_the_pause(running, llamas):
    running.pause_generation()
    running.begin_weight_update()
    running.update_weights_from_tensor({Q: tensors_of(llamas[1])[Q]})
    running.end_weight_update()
    waiting = Stream(running)
    assert running.stats()["waiting"] == 1
    running.continue_generation()
    assert waiting.end.result(60).token_ids


def test_a_pause_in_an_update_ends_before_it(running, llamas):
    running.begin_weight_update()
    running.pause_generation()
    running.update_weights_from_tensor({Q: tensors_of(llamas[1])[Q]})
    running.continue_generation()
    waiting = Stream(running)
    assert running.stats()["waiting"] == 1
    running.end_weight_update()
    assert waiting.end.result(60).token_ids


def test_an_update_begins_once_and_ends_once(running):
    with pytest.raises(sgl.ModelError, match="no update of the weights has begun"):
        running.end_weight_update()
    running.begin_weight_update("target")
    with pytest.raises(sgl.ModelError, match="an update of the weights has begun"):
        running.begin_weight_update()
    running.end_weight_update()
    with pytest.raises(sgl.ParameterError, match="selector: 'draft' is not here"):
        running.begin_weight_update("draft")


def test_a_write_that_fails_leaves_an_engine_that_says_so(running, llamas, monkeypatch):
    old, new = llamas
    expected = tokens(running)

    def fail(staged):
        raise MemoryError("no room")

    with monkeypatch.context() as broken:
        broken.setattr(weight_update.StagedWeights, "write_to_model", fail)
        with pytest.raises(MemoryError):
            running.update_weights(str(new))
    assert "weights incomplete" in str(Stream(running).end.result(60))
    with pytest.raises(sgl.BackendError, match="weights incomplete"):
        running.continue_generation()
    tensors = tensors_of(old)
    running.update_weights_from_tensor({Q: tensors.pop(Q)})
    assert "weights incomplete" in str(Stream(running).end.result(60))
    running.update_weights_from_tensor(tensors)
    assert tokens(running) == expected


def test_an_unknown_mode_is_refused(running):
    with pytest.raises(sgl.ParameterError, match="none of abort, retract, in_place"):
        running.pause_generation("later")
    assert running.stats()["waiting"] == 0
