"""The next generation of a program begins in the slot of the one before, whose end is told later."""

import gc
import random
import weakref

import pytest

import sglang_lite as sgl
import sglang_lite.runtime.core.generation_job as module
from sglang_lite.program.nodes import Gen, Program, Text
from sglang_lite.protocol import Delta, Generation, Played, ProgramResult, SamplingParams, Span
from sglang_lite.runtime.calls import Stats
from sglang_lite.runtime.core.step_loop import Postponed
from tests.runtime.core.test_engine_program import (
    _Inline,
    by_path,
    call_by_call,
    greedy,
    random_segments,
    same,
)
from tests.runtime.scripted import SteppedEngine

TWO = (
    Text("ab"),
    Gen("x", greedy(5, ignore_eos=True)),
    Text("cd"),
    Gen("y", greedy(5, ignore_eos=True)),
)


class Launched:
    """Draws that a device may still compute."""

    ready = True

    def __init__(self, sampled):
        self.sampled = sampled

    def wait_for_tokens(self):
        return self.sampled


def stepped(**config):
    """An engine with a device, which nobody has to wait for."""
    engine = SteppedEngine(
        **{"max_running": 8, "context_length": 256, "max_total_tokens": 1024, **config}
    )
    runner, sample = engine.loop.runner, engine.loop.runner.sample
    runner.sample = lambda *arguments: Launched(sample(*arguments))  # type: ignore[method-assign]  # a fake around it
    return engine


def calls_of(programs):
    """Text of each program and what its nodes bring, one call after another."""
    reference, found = stepped(max_running=4, max_total_tokens=2048), []
    for segments in programs:
        added, brought = call_by_call(_Inline(reference), [Span("xy")], segments)
        found.append(("".join(span.text for span in added), brought))
    return found


@pytest.mark.parametrize("overlap", [False, True])
def test_the_next_generation_begins_before_the_end_of_the_one_before_is_told(overlap):
    engine, events, lengths = stepped(overlap=overlap), [], set()
    engine.run_program("xy", Program(TWO), sink=events.append)
    while engine.step():
        if not events:
            lengths |= {len(request.tokens) for request in engine.scheduler.queues.prefilling}
    assert len("xyab") + 5 + len("cd") in lengths
    ((text, brought),) = calls_of([TWO])
    assert events[-1].text == text
    assert all(same(a, b) for a, b in zip(by_path(events[:-1]), brought, strict=True))
    engine.check_empty()


def test_without_a_device_the_end_is_told_before_the_next_step_computes():
    engine, told = SteppedEngine(overlap=True, context_length=256, max_total_tokens=1024), []
    engine.run_program(
        "xy", Program(TWO), sink=lambda event: told.append((engine.loop.steps, event))
    )
    engine.drain()
    steps = [step for step, event in told if isinstance(event, Played)]
    # a step for each token; those that are appended share one with the sixth
    assert steps == [5, 10]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("page", "running", "retract"), [(1, 8, 0), (4, 3, 2), (16, 16, 3)])
def test_what_is_told_late_is_told_in_order(monkeypatch, stream, page, running, retract):
    draw = random.Random(page)
    run = Postponed.run
    monkeypatch.setattr(
        Postponed, "run", lambda self, _: draw.random() < 0.2 and run(self, lambda: False)
    )
    programs = [random_segments(draw) for _ in range(25)]
    engine = stepped(
        overlap=True, page_size=page, step_tokens=64, max_running=running, retract_every=retract
    )
    told = [[] for _ in programs]
    for segments, events in zip(programs, told):
        engine.run_program("xy", Program(segments), sink=events.append, stream=stream)
    engine.drain()
    for events, (text, brought) in zip(told, calls_of(programs)):
        assert isinstance(events[-1], ProgramResult), events[-1]
        assert events[-1].text == text
        assert all(same(a, b) for a, b in zip(by_path(events[:-1]), brought, strict=True))
        for path in {event.path for event in events[:-1]} if stream else ():
            mine = [event.event for event in events[:-1] if event.path == path]
            if isinstance(mine[-1], Generation):
                assert "".join(each.text for each in mine[:-1]) == mine[-1].text
            assert all(isinstance(each, Delta) for each in mine[:-1])
    engine.check_empty()


def test_a_program_can_be_aborted_between_the_end_and_its_report(monkeypatch):
    draw = random.Random(3)
    monkeypatch.setattr(Postponed, "run", lambda self, _: draw.random() < 0.2 and self.run_all())
    engine, found = stepped(overlap=True), []
    for _ in range(30):
        events = []
        found.append(
            (engine.run_program("xy", Program(random_segments(draw)), sink=events.append), events)
        )
    for ticket, _ in found[::2]:
        engine.step()
        ticket.abort()
    engine.drain()
    for _, events in found:
        assert isinstance(events[-1], ProgramResult | sgl.RequestAbortedError)
        assert [type(event) for event in events].count(type(events[-1])) == 1
    assert any(isinstance(events[-1], sgl.RequestAbortedError) for _, events in found)
    engine.check_empty()


def test_a_generation_that_began_behind_another_text_than_the_program_has_is_made_again(
    monkeypatch,
):
    # one too few
    monkeypatch.setattr(module, "count_kept_tokens", lambda request, tokens, *_: len(tokens) - 1)
    engine, events = stepped(overlap=True), []
    engine.run_program("xy", Program(TWO), sink=events.append)
    engine.drain()
    ((text, brought),) = calls_of([TWO])
    assert events[-1].text == text
    assert all(same(a, b) for a, b in zip(by_path(events[:-1]), brought, strict=True))
    engine.check_empty()


@pytest.mark.parametrize("how", ["stop string", "stop token"])
def test_the_text_of_a_stop_is_not_continued(how):
    """The next generation continues what the answer's text is, without what ended it."""
    first = greedy(20, ignore_eos=True)
    ((_, (alone,)),) = calls_of([(Text("ab"), Gen("x", first))])
    token = alone.token_ids[7]
    ending = {"stop": (alone.text[7],)} if how == "stop string" else {"stop_token_ids": (token,)}
    program = (Text("ab"), Gen("x", greedy(20, ignore_eos=True, **ending)), *TWO[2:])
    engine, events = stepped(overlap=True), []
    engine.run_program("xy", Program(program), sink=events.append)
    engine.drain()
    ((text, brought),) = calls_of([program])
    assert brought[0].finish_reason == "stop"
    assert events[-1].text == text
    assert all(same(a, b) for a, b in zip(by_path(events[:-1]), brought, strict=True))


def test_appended_tokens_are_counted():
    engine, events = stepped(overlap=True), []
    engine.run_program(
        "xy", Program((*TWO, Text("e"), Gen("z", SamplingParams(max_tokens=2)))), sink=events.append
    )
    engine.drain()
    stats = engine.core.submit_call(Stats())
    engine.drain()
    assert stats.result()["appended_tokens"] == len("cd") + len("e")
    assert stats.result()["steps"] == engine.loop.steps


def test_a_request_that_was_made_ahead_and_not_used_leaves_nothing_behind():
    """Garbage collection would stop the loop for longer than a step takes."""
    gc.collect()
    gc.disable()
    try:
        engine, events, made = stepped(overlap=True), [], []
        ahead = engine.core.builder.build_ahead
        engine.core.builder.build_ahead = lambda *args, **options: keep(
            made, ahead(*args, **options)
        )
        stops = Gen("x", greedy(40, stop=tuple("abcde ")))
        engine.run_program("xy", Program((Text("ab"), stops, *TWO[2:])), sink=events.append)
        engine.drain()
        assert isinstance(events[-1], ProgramResult)
        assert made
        assert not any(output() for output in made)
    finally:
        gc.enable()


def keep(made, request):
    made.append(weakref.ref(request.output))
    return request


def test_calls_that_wait_run_once_and_in_order():
    ran = []
    postponed = Postponed()
    now = [postponed.postpone_call(lambda i=i: ran.append(i)) for i in range(8)]
    postponed.run(lambda: False)
    assert ran == [0, 1]  # a share of them, though there is no time
    now[5]()
    now[5]()
    assert ran == [0, 1, 5]
    postponed.run(lambda: len(ran) < 6)
    assert ran == [0, 1, 5, 2, 3, 4]
    postponed.postpone_call(lambda: postponed.postpone_call(lambda: ran.append("added")))
    postponed.run_all()
    assert ran == [0, 1, 5, 2, 3, 4, 6, 7, "added"]
    assert not postponed


def test_a_call_that_fails_as_the_loop_ends_keeps_no_other_from_running(caplog):
    ran, postponed = [], Postponed()
    for call in (lambda: ran.append(1), lambda: 1 / 0, lambda: ran.append(2)):
        postponed.postpone_call(call)
    postponed.close()
    assert ran == [1, 2]
    assert "ZeroDivisionError" in caplog.text
