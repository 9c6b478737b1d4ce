"""A handle's threads, order and pressure: what many callers at a time, a slow reader and a stopped
process may do.
"""

import asyncio
import contextlib
import copy
import gc
import logging
import os
import pickle
import sys
import threading
from concurrent.futures import Future
from functools import partial
from unittest.mock import create_autospec

import pytest

import sglang_lite as sgl
from sglang_lite.engine.engine_process import EngineProcess
from sglang_lite.engine.open_submissions import OpenSubmission, OpenSubmissions
from sglang_lite.program.nodes import Gen, Program, Text
from sglang_lite.protocol import (
    Delta,
    Ebnf,
    EngineClosedError,
    Generation,
    Played,
    ProgramResult,
    Regex,
    SamplingParams,
)
from sglang_lite.runtime.calls import EndSession
from tests.children import stopped
from tests.engine import processes, processors
from tests.engine.collector import Collector
from tests.waiting import until

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)
SLOW = Ebnf("root ::= " + " ".join(f'("a" | "b"){{1,{n}}}' for n in range(50, 90)))


def busy(engine):
    stats = engine.stats()
    return stats["running"], stats["waiting"]


# --------------------------------------------------------------------------------- logit processors


@pytest.mark.parametrize(
    ("processor", "text"),
    [
        (processors.only_e_where_garbage_is_collected, "EEE"),
        (processors.only_e, "EEE"),
        (processors.Class.only_f, "FFF"),
        (partial(processors.only, 38), "GGG"),
    ],
)
def test_a_logit_processor_crosses_by_its_name(own, processor, text):
    assert (
        own.generate("ab", {"max_new_tokens": 3}, custom_logit_processor=processor)["text"] == text
    )


def test_a_processor_that_fails_says_so(own, here):
    said = []
    for engine in (own, here):
        with pytest.raises(sgl.ProgramError, match="logit_processor failed") as caught:
            engine.generate("ab", {"max_new_tokens": 3}, custom_logit_processor=processors.bad)
        said.append(str(caught.value))
    assert said[0] == said[1]


def nested():
    return lambda ids, logits: logits


@pytest.mark.parametrize(
    "processor",
    [lambda ids, logits: logits, nested(), processors.instance, processors.Instance().__call__],
    ids=range(4),
)
def test_a_processor_without_a_name_is_refused_with_both_cures(own, processor):
    with pytest.raises(sgl.ParameterError, match=r"by name.*module of its own.*in_process=True"):
        own.generate("ab", {"max_new_tokens": 3}, custom_logit_processor=processor)


def test_a_processor_of_the_main_module_is_refused(own, monkeypatch):
    def main_processor(ids, logits):
        return logits

    main_processor.__module__, main_processor.__qualname__ = "__main__", "main_processor"
    monkeypatch.setattr(sys.modules["__main__"], "main_processor", main_processor, raising=False)
    with pytest.raises(sgl.ParameterError, match=r"by name.*in_process=True"):
        own.generate("ab", {"max_new_tokens": 3}, custom_logit_processor=main_processor)


def test_a_processor_that_the_process_can_not_import_fails_its_request_alone(own, monkeypatch):
    module = type(sys)("made_up_module")
    exec("def made_up(ids, logits): return logits", vars(module))
    monkeypatch.setitem(sys.modules, "made_up_module", module)
    with pytest.raises(sgl.SglError, match="made_up_module"):
        own.generate("ab", {"max_new_tokens": 3}, custom_logit_processor=module.made_up)
    assert busy(own) == (0, 0)


def test_a_session_ends_in_the_engines_process(own, here):
    for engine in (own, here):
        assert engine.core.submit_call(EndSession("a")).result(60) is None


def test_a_process_that_prints_a_megabyte_goes_on(own, caplog):
    with caplog.at_level(logging.INFO, "sglang_lite.engine"):
        assert own.generate("ab", {"max_new_tokens": 2}, custom_logit_processor=processors.loud)
        assert own.complete("ab", GREEDY)
    assert "xxxx" in caplog.text


# ------------------------------------------------------------------------------------------ threads


def test_64_threads_and_event_loops_share_a_handle(own):
    expected = {text: own.complete(text, GREEDY).text for text in ("ab", "cd", "ef")}
    played = own.play("ab", Program((Gen("x", GREEDY), Text("c"), Gen("y", GREEDY))))[0].text
    picked = own.select("ab", ["c", "de"]).scores
    got = []

    async def several():
        texts = [*expected] * 2
        answers = await asyncio.gather(
            *(
                own.async_generate(t, {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True})
                for t in texts
            )
        )
        return [answer["text"] == expected[t] for answer, t in zip(answers, texts)]

    def work(i):
        match i % 4:
            case 0:
                got.extend(own.complete(text, GREEDY).text == expected[text] for text in expected)
            case 1:
                got.append(
                    own.play("ab", Program((Gen("x", GREEDY), Text("c"), Gen("y", GREEDY))))[0].text
                    == played
                )
            case 2:
                got.append(
                    [s.token_ids for s in own.select("ab", ["c", "de"]).scores]
                    == [s.token_ids for s in picked]
                )
                own.stats()
            case 3:
                got.extend(asyncio.run(several()))

    def guarded(i):
        try:
            work(i)
        except sgl.OverloadedError:
            got.append(True)  # said, and nothing else happened
        except BaseException as error:
            got.append(error)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [each for each in got if each is not True] == []
    assert len(got) >= 64
    assert busy(own) == (0, 0)


def test_an_abort_right_after_its_submit_ends_it_once(own):
    sinks = []
    for i in range(200):
        sink = Collector()
        ticket = own.submit(
            "ab", LONG, Regex("[ab]{3000}") if i % 3 == 0 else None, sink=sink, stream=True
        )
        ticket.abort()
        sinks.append(sink)
        sink.end() if i % 40 == 39 else None  # so that there is room
    assert {type(sink.end()) for sink in sinks} == {sgl.RequestAbortedError}
    assert [len(sink.ends()) for sink in sinks] == [1] * 200
    assert busy(own) == (0, 0)


def test_a_request_is_aborted_while_its_constraint_compiles(own):
    sinks = [Collector() for _ in range(3)]
    tickets = [own.submit("ab", LONG, SLOW, sink=sink, rid=f"r{i}") for i, sink in enumerate(sinks)]
    tickets[0].abort()
    own.abort("r1")
    tickets[2].abort()
    assert [type(sink.end()) for sink in sinks] == [sgl.RequestAbortedError] * 3
    with pytest.raises(sgl.ParameterError, match="r1"):
        own.abort("r1")


def test_programs_are_aborted_whatever_they_are_at(own):
    """The process stands still until all is sent: else one of them may have ended before it is
    aborted.
    """
    one, two, three, never = Collector(), Collector(), Collector(), Collector()
    with stopped(*processes.children()):
        own.run_program("ab", Program((Gen("x", LONG),)), sink=one).abort()
        growing = own.open_program(sink=two)
        growing.extend((), (Gen("x", LONG, SLOW),))
        growing.abort()
        growing.extend((), (Gen("y", GREEDY),))
        growing.close()
        unused = own.open_program(sink=three)
        unused.close()
        own.open_program(sink=never).abort()
    ends = [sink.end() for sink in (one, two, never)]
    assert [type(end) for end in ends] == [sgl.RequestAbortedError] * 3, ends
    assert isinstance(three.end(), ProgramResult)
    assert busy(own) == (0, 0)


def test_requests_and_programs_wind_down_whatever_they_are_at(own):
    """The process stands still until all is sent: else one of them may have ended before."""
    one, two, three = Collector(), Collector(), Collector()
    with stopped(*processes.children()):
        own.submit("ab", LONG, sink=one).wind_down()
        own.run_program("ab", Program((Gen("x", LONG), Gen("y", LONG))), sink=two).wind_down()
        growing = own.open_program(sink=three)
        growing.extend((), (Text("ab"), Gen("x", LONG)))
        growing.wind_down()
        growing.extend((), (Gen("y", LONG),))
        growing.close()
    assert one.end().finish_reason == "length"
    ends = [
        one.end(),
        *(event.event for sink in (two, three) if sink.end() for event in sink.events[:-1]),
    ]
    assert len(ends) == 5
    assert all(1 <= end.usage.completion_tokens < LONG.max_tokens for end in ends), ends
    assert busy(own) == (0, 0)


def test_nothing_is_told_after_the_end(own):
    """Late deltas of what was aborted are on their way when it ends."""
    for _ in range(10):
        sink = Collector()
        ticket = own.submit("ab", LONG, sink=sink, stream=True)
        sink.begun()
        ticket.abort()
        ticket.abort()
        assert isinstance(sink.end(), sgl.RequestAbortedError)
        own.stats()
        assert not isinstance(sink.events[-1], Delta)
        assert sink.end().partial.finish_reason == "abort"


@pytest.mark.parametrize("kind", ["stream", "last event", "program", "select"])
def test_a_sink_that_raises_ends_its_own_request_alone(own, caplog, kind):
    seen, other, ended = [], Collector(), threading.Event()

    def sink(event):
        seen.append(event)
        if not isinstance(event, Delta | Played):
            ended.set()
        raise LookupError("mine")

    own.submit(
        "cd",
        SamplingParams(temperature=0, max_tokens=100, ignore_eos=True),
        sink=other,
        stream=True,
    )
    match kind:
        case "stream":
            own.submit("ab", LONG, sink=sink, stream=True)
        case "last event":
            own.submit("ab", GREEDY, sink=sink)
        case "program":
            own.run_program("ab", Program((Gen("x", LONG),)), sink=sink, stream=True)
        case "select":
            own.submit_select("ab", ["c"], sink=sink)
    assert ended.wait(60)
    assert isinstance(other.end(), Generation)
    assert busy(own) == (0, 0)
    assert len(seen) <= 2  # the first event, and the end
    assert "mine" in caplog.text


CALLS = {
    "stats": lambda e: e.stats(),
    "flush_cache": lambda e: e.flush_cache(),
    "complete": lambda e: e.complete("ab"),
    "select": lambda e: e.select("ab", ["c"]),
    "score": lambda e: e.score("ab", ["c"]),
    "play": lambda e: e.play("ab", Program((Gen("x"),))),
    "generate": lambda e: e.generate("ab"),
    "generate stream": lambda e: list(e.generate("ab", stream=True)),
    "update_weights": lambda e: e.update_weights("x"),
    "compile_grammar": lambda e: e.compile_grammar(Regex("a+")),
    "get_server_info": lambda e: e.get_server_info(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_waits_is_refused_in_a_sink(own, name):
    said, done = [], threading.Event()

    def sink(event):
        try:
            CALLS[name](own)
        except BaseException as error:
            said.append(error)
        done.set()

    own.submit("ab", GREEDY, sink=sink)
    assert done.wait(60)
    assert isinstance(said[0], sgl.BackendError)
    assert "engine's own thread" in str(said[0])


def test_what_does_not_wait_can_be_called_in_a_sink(own):
    chain = Collector()

    def sink(event):
        own.submit("cd", GREEDY, sink=chain)

    own.submit("ab", GREEDY, sink=sink)
    assert isinstance(chain.end(), Generation)


def test_flush_is_called_after_its_sinks_and_seldom(own):
    params = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
    events, flushes, done = [], [], threading.Event()

    def flush():
        flushes.append(len(events))
        if sum(isinstance(event, Generation) for event in events) == 4:
            done.set()

    with stopped(*processes.children()):  # so that they begin together
        for _ in range(4):
            own.submit("ab", params, sink=events.append, flush=flush, stream=True)
    assert done.wait(120)
    assert flushes == sorted(set(flushes))  # each has something new
    assert flushes[-1] == len(events)
    assert len(flushes) <= len(events) / 2  # one for the four streams of a step


def test_readers_of_what_a_process_leaves_open_are_woken_once_behind_all_its_ends():
    """Also while the reader of the process that replaces it delivers events."""
    dead, other = (create_autospec(EngineProcess, ready=Future()) for _ in range(2))
    submissions, events, woken = OpenSubmissions(abort=print), [], []

    def flush():
        woken.append(len(events))

    for number, process in enumerate((dead, dead, other)):
        entry = submissions.open[number] = OpenSubmission(flush=flush)
        entry.sink, entry.process = events.append, process
    submissions.fail_all_of(dead, EngineClosedError("gone"))
    assert (len(events), woken, list(submissions.open)) == (2, [2], [2])


def test_a_flush_that_fails_and_a_loop_that_is_closed_stop_nobody(own, caplog):
    loop = asyncio.new_event_loop()
    loop.close()
    sinks = [Collector() for _ in range(3)]
    for sink, flush in zip(sinks, (lambda: loop.call_soon_threadsafe(print), lambda: 1 / 0, None)):
        own.submit("ab", GREEDY, sink=sink, flush=flush)
    assert all(isinstance(sink.end(), Generation) for sink in sinks)

    async def leaves():
        left = asyncio.ensure_future(
            own.async_generate("ab", {"max_new_tokens": 1000, "ignore_eos": True})
        )
        await own.async_generate("ab", {"max_new_tokens": 1})
        assert not left.done()

    asyncio.run(leaves())
    assert isinstance(own.complete("ab", GREEDY), Generation)


def test_who_waited_for_room_on_a_loop_that_was_closed_takes_it_from_nobody(own, here, caplog):
    def check(engine):
        sinks = [Collector() for _ in range(68)]  # all that may be open
        for sink in sinks:
            engine.submit("ab", GREEDY, sink=sink, rid=f"room{id(sink)}")
        loop = asyncio.new_event_loop()
        waiting = loop.create_task(
            engine.submit_when_room(lambda: engine.submit("ab", GREEDY, sink=print), 1)
        )
        loop.call_soon(loop.stop)
        loop.run_forever()
        loop.close()
        assert all(isinstance(sink.end(), Generation) for sink in sinks)
        assert isinstance(engine.complete("ab", GREEDY), Generation)
        waiting.get_coro().close()

    check(own)
    check(here)


def test_what_is_refused_takes_no_room(own, here):
    for engine in (own, here):
        for _ in range(70):  # more than may be open
            with pytest.raises(sgl.ParameterError):
                engine.select("a" * 3000, ["c"])
        assert engine.select("ab", ["c"])


def test_room_is_given_to_who_waits_for_it_in_turn(own, here):
    def check(engine):
        sinks = [Collector() for _ in range(68)]
        tickets = [engine.submit("ab", LONG, sink=sink) for sink in sinks]
        with pytest.raises(sgl.OverloadedError, match="68 requests are waiting or running"):
            engine.submit("ab", GREEDY, sink=print)
        with pytest.raises(sgl.OverloadedError, match="68 requests are waiting or running"):
            engine.submit_select("ab", ["c"], sink=print)
        with pytest.raises(sgl.OverloadedError):
            engine.run_program("ab", Program((Gen("x", GREEDY),)), sink=print)
        growing, end = [engine.open_program(sink=Collector()) for _ in range(10)], Collector()
        one = engine.open_program(sink=end)
        one.extend((), (Text("ab"), Gen("x", GREEDY)))
        one.close()

        async def several():
            return await asyncio.gather(
                *(engine.async_generate("ab", {"max_new_tokens": 2}) for _ in range(5))
            )

        answers = []
        thread = threading.Thread(target=lambda: answers.extend(asyncio.run(several())))
        thread.start()
        for ticket in tickets:
            ticket.abort()
        thread.join()
        assert len(answers) == 5
        assert end.end().text
        for each in growing:
            each.abort()
        assert {type(sink.end()) for sink in sinks} <= {sgl.RequestAbortedError, Generation}

    check(own)
    check(here)


def test_a_caller_whose_logging_fails_is_answered(own):
    class Failing(logging.Handler):
        def emit(self, record):
            raise LookupError("no log")

    handler, logger = Failing(), logging.getLogger("sglang_lite")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    sink = Collector()
    try:
        own.submit("ab", GREEDY, sink=lambda event: 1 / 0)
        own.submit("ab", GREEDY, sink=sink, flush=lambda: 1 / 0)
        assert isinstance(sink.end(), Generation)
        assert own.generate("ab", {"max_new_tokens": 2}, custom_logit_processor=processors.loud)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def test_names_are_free_again_when_requests_end(own):
    for _ in range(3):
        assert own.generate("ab", {"max_new_tokens": 2}, rid="mine")["meta_info"]["id"] == "mine"
    sink = Collector()
    own.submit("ab", LONG, sink=sink, rid="mine", stream=True)
    with pytest.raises(sgl.ParameterError, match="mine"):
        own.generate("ab", {"max_new_tokens": 2}, rid="mine")
    own.abort("mine")
    assert isinstance(sink.end(), sgl.RequestAbortedError)


# ----------------------------------------------------------------------------------------- pressure


def test_a_reader_that_stands_still_loses_nothing(own):
    middling = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    expected = own.complete("ab", middling).text
    go, stopped, sinks = threading.Event(), threading.Event(), [Collector() for _ in range(16)]

    def still(event):
        stopped.set()
        assert go.wait(120)

    own.submit("ab", GREEDY, sink=still)
    assert stopped.wait(60)
    before = threading.active_count()
    for sink in sinks:
        own.submit("ab", middling, sink=sink, stream=True)
    for pid in processes.children():
        processes.idle(pid)
    assert not any(sink.events for sink in sinks)
    go.set()
    for sink in sinks:
        assert sink.end().text == expected
        assert "".join(e.text for e in sink.events if isinstance(e, Delta)) == expected
    pieces = sum(len(sink.events) for sink in sinks)
    assert pieces < 16 * 75  # joined
    assert threading.active_count() <= before + 1


def test_a_process_that_is_stopped_is_waited_for_by_nobody_who_submits(own):
    with stopped(*processes.children()):
        sinks = [Collector() for _ in range(60)]
        # more than the socket holds
        tickets = [own.submit([5] * 1500, GREEDY, sink=sink) for sink in sinks]
        late = [own.open_program(sink=Collector()) for _ in range(100)]
        for growing in late:
            growing.extend((), (Text("x" * 5000),))
        for ticket in tickets[::2]:
            ticket.abort()
        for growing in late:
            growing.abort()
        assert not any(sink.events for sink in sinks)
    assert {type(sink.end()) for sink in sinks[1::2]} == {Generation}
    assert {type(sink.end()) for sink in sinks[::2]} <= {Generation, sgl.RequestAbortedError}
    assert busy(own) == (0, 0)


# ------------------------------------------------------------------------------------- copies, ends


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_an_engine_is_not_pickled_or_copied(own, copied):
    with pytest.raises(sgl.BackendError, match="can't be pickled"):
        copied(own)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_copy_is_refused_and_can_not_harm(own):
    sink, held = Collector(), own.open_program(sink=Collector())
    middling = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    ticket = own.submit("ab", middling, sink=sink, stream=True, rid="held")
    stream = own.generate("ab", {"max_new_tokens": 400, "ignore_eos": True}, stream=True)
    next(stream)
    sink.begun()
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        said = []
        try:
            for call in (
                lambda: own.complete("ab"), own.stats, lambda: own.submit("ab", sink=print), lambda: own.abort("held"),
                lambda: own.open_program(sink=print), lambda: own.generate("ab"), lambda: own.compile_grammar(Regex("a")),
            ):  # fmt: skip
                try:
                    call()
                except EngineClosedError as error:
                    said.append("forked copy" in str(error))
            ticket.abort()
            held.abort()
            stream.close()
            own.close()
            del stream
            gc.collect()
            os.write(theirs, repr(said).encode())
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as pipe:
        assert pipe.read() == repr([True] * 7)
    os.waitpid(child, 0)
    assert isinstance(sink.end(), Generation)
    assert list(stream)[-1]["meta_info"]["completion_tokens"] == 400
    held.abort()
    assert isinstance(own.complete("ab", GREEDY), Generation)


class CollectingName(str):
    """A request's name that has garbage collected while it is looked up: in the middle of
    submitting.
    """

    __slots__ = ()

    def __hash__(self):
        gc.collect()
        return super().__hash__()


@pytest.mark.parametrize("waits", [False, True])
def test_a_stream_that_the_collector_finds_while_somebody_submits_stops_nobody(own, here, waits):
    for engine in (own, here):
        other = [Collector() for _ in range(66 if waits else 0)]
        for sink in other:
            engine.submit("ab", LONG, sink=sink, rid=f"other{id(sink)}")
        cycle: list[object] = [
            engine.generate(["ab"] * 3, {"max_new_tokens": 300, "ignore_eos": True}, stream=True)
        ]
        cycle.append(cycle)
        del cycle
        sink = Collector()
        with contextlib.suppress(sgl.OverloadedError):
            engine.submit("ab", GREEDY, sink=sink, rid=CollectingName("mine"))
            assert isinstance(sink.end(), Generation)
        for each in other:
            engine.abort(f"other{id(each)}")
        assert {type(each.end()) for each in other} <= {sgl.RequestAbortedError}
        until(lambda engine=engine: not engine.stats()["running"])
        assert isinstance(engine.complete("ab", GREEDY), Generation)
