"""A program played inside the engine gives what its nodes give one call after another."""

import random
import threading

import pytest

import sglang_lite as sgl
import sglang_lite.runtime.core.engine_program as module
import sglang_lite.runtime.core.submission as submission
from sglang_lite.program.nodes import (
    Fork,
    Gen,
    Join,
    Mark,
    Node,
    Pause,
    Program,
    Rollback,
    Select,
    Text,
    Verdict,
)
from sglang_lite.protocol import (
    Choices,
    Delta,
    Generation,
    ParameterError,
    Played,
    ProgramResult,
    Prompt,
    Regex,
    SamplingParams,
    Span,
)
from sglang_lite.runtime.core.submission import ProgramRequest
from tests.runtime.scripted import SteppedEngine, ended
from tests.waiting import until


@pytest.fixture
def engine(small_engine):
    return small_engine


def greedy(tokens=8, **options):
    return SamplingParams(temperature=0, max_tokens=tokens, **options)


def call_by_call(engine, spans, segments):
    """Plays segments with one request each; returns the spans they add and what each brought."""
    added, brought, forked = [], [], []

    def prompt():
        return Prompt(tuple(spans) + tuple(added))

    for segment in segments:
        match segment:
            case Text(text):
                added.append(Span(text))
            case Gen(_, params, constraint):
                brought.append(engine.complete(prompt(), params, constraint))
                added += brought[-1].spans
            case Select(_, choices):
                brought.append(engine.select(prompt(), choices))
                best = max(brought[-1].scores, key=lambda s: sum(s.logprobs) / len(s.logprobs))
                added.append(Span(best.text))
            case Fork(branches):
                for branch in branches:
                    spans_added, found = call_by_call(engine, [*spans, *added], branch)
                    forked.append("".join(s.text for s in spans_added))
                    brought += found
            case Join():
                added += [Span(text) for text in forked]
                forked.clear()
    return added, brought


def by_path(played):
    return [p.event for p in sorted(played, key=lambda p: p.path) if not isinstance(p.event, Delta)]


def same(a, b):
    if isinstance(a, Generation):
        return (a.token_ids, a.text, a.finish_reason) == (b.token_ids, b.text, b.finish_reason)
    return [s.token_ids for s in a.scores] == [s.token_ids for s in b.scores] and all(
        abs(x - y) < 1e-4
        for s, t in zip(a.scores, b.scores)
        for x, y in zip(s.logprobs, t.logprobs)
    )


QUESTIONS = (
    Text(
        "<|im_start|>user\nName a country and its capital.<|im_end|>\n<|im_start|>assistant\nThe country is"
    ),
    Gen("country", greedy(6, stop=(".", ","))),
    Text(", and its capital is"),
    Gen("capital", greedy(6, stop=(".",))),
    Text(". Founded in "),
    Gen("year", greedy(6), Regex(r"1[0-9]{3}")),
    Select("size", (" It is small", " It is large", " It is medium-sized")),
    Fork(
        (
            (Text(". Food:"), Gen("food", greedy(8, stop=("\n",)))),
            (Text(". River:"), Gen("river", greedy(8)), Gen("more", greedy(4))),
            (Text(". The end"),),
        )
    ),
    Gen("beside", greedy(5)),
    Join(),
    Text(" In short,"),
    Gen("last", greedy(6), Choices((" it is nice", " it is far"))),
    Text("!"),
)


def test_a_program_gives_what_its_calls_give(engine):
    engine.flush_cache()
    result, played = engine.play("", Program(QUESTIONS))
    added, brought = call_by_call(engine, [], QUESTIONS)
    assert result.text == "".join(span.text for span in added)
    assert [p.name for p in sorted(played, key=lambda p: p.path)] == [
        "country", "capital", "year", "size", "food", "river", "more", "beside", "last",
    ]  # fmt: skip
    assert all(same(a, b) for a, b in zip(by_path(played), brought, strict=True))


def test_the_next_generation_goes_on_in_its_slot(engine, monkeypatch):
    engine.flush_cache()
    queued = []
    add = engine.core.scheduler.accept_request
    monkeypatch.setattr(
        engine.core.scheduler,
        "accept_request",
        lambda request: (queued.append(request), add(request)),
    )
    program = Program((Gen("a", greedy(5)), Text(" And then"), Gen("b", greedy(5))))
    _, played = engine.play("Once upon a time", program)
    first, second = by_path(played)
    assert second.usage.cached_tokens >= first.usage.prompt_tokens + len(first.token_ids) - 1
    assert len(queued) == 1  # the second one did not wait for a slot
    miss = second.meta["cache_miss"]
    assert (miss["reason"], miss["at"]) == ("continued", second.usage.cached_tokens)
    assert " And" in miss["now"]


def test_a_text_between_generations_is_encoded_once_for_all_programs(monkeypatch):
    engine, encoded = SteppedEngine(max_total_tokens=512, page_size=4), []
    encode = engine.core.tokenizer.encode_spans
    monkeypatch.setattr(
        engine.core.tokenizer,
        "encode_spans",
        lambda spans, first: (encoded.append([*spans]), encode(spans, first=first))[1],
    )
    again = (Text(" and"), Gen("b", greedy(3)), Text(" and"), Gen("c", greedy(3)))
    for start in ("abc", "xyz"):
        events = []
        engine.run_program(
            "go ", Program((Text(start), Gen("a", greedy(3)), *again)), sink=events.append
        )
        engine.drain()
        assert [event.event.finish_reason for event in events[:-1]] == ["length"] * 3
    assert encoded.count([Span(" and")]) == 1


@pytest.mark.parametrize("stream", [True, False])
def test_deltas_are_the_texts_in_pieces(engine, stream):
    events = []
    program = Program((Gen("a", greedy(6)), Text(" So"), Gen("b", greedy(6), stream=True)))
    done = threading.Event()

    def sink(event):
        events.append(event)
        if not isinstance(event, Played):
            done.set()

    engine.run_program("One two three", program, sink=sink, stream=stream)
    assert done.wait(60)
    for path, streamed in (((0,), stream), ((2,), True)):
        mine = [e.event for e in events if isinstance(e, Played) and e.path == path]
        assert "".join(e.text for e in mine if isinstance(e, Delta)) == (
            mine[-1].text if streamed else ""
        )
    assert isinstance(events[-1], ProgramResult)


# ---------------------------------------------------- scheduled in every way, with a scripted model


def random_segments(draw, depth=0):
    segments: list[Node] = []
    for _ in range(draw.randrange(1, 6)):
        kind = draw.random()
        if kind < 0.35:
            segments.append(
                Text("".join(draw.choice("abcde ") for _ in range(draw.randrange(0, 6))))
            )
        elif kind < 0.75:
            stop = (draw.choice("abc"),) if draw.random() < 0.3 else ()
            params = SamplingParams(
                temperature=draw.choice([0, 1.0]),
                seed=draw.randrange(99),
                max_tokens=draw.randrange(0, 7),
                stop=stop,
            )
            segments.append(Gen("g", params))
        elif kind < 0.85:
            segments.append(Select("s", ("ab", "abc", "b", "d e")))
        elif depth < 2:
            segments.append(
                Fork(tuple(random_segments(draw, depth + 1) for _ in range(draw.randrange(1, 4))))
            )
            if draw.random() < 0.5:
                segments.append(Join())
    return tuple(segments)


class _Inline:
    """A stepped engine's blocking calls."""

    def __init__(self, engine):
        self.engine = engine

    def complete(self, prompt, params, constraint):
        _, events = self.engine.start(prompt, params)
        self.engine.drain()
        return events[-1]

    def select(self, prompt, choices):
        events = []
        self.engine.submit_select(prompt, choices, sink=events.append)
        self.engine.drain()
        return events[-1]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("page", "chunk", "running", "retract"), [(1, 64, 8, 0), (4, 16, 3, 2), (16, 1000, 16, 3)]
)
def test_random_programs_give_what_their_calls_give(overlap, page, chunk, running, retract):
    draw = random.Random(page)
    programs = [("xyz"[: draw.randrange(1, 4)], random_segments(draw)) for _ in range(40)]
    reference = SteppedEngine(max_running=4, context_length=256, max_total_tokens=2048)
    expected = []
    for prompt, segments in programs:
        added, brought = call_by_call(_Inline(reference), [Span(prompt)], segments)
        expected.append(("".join(s.text for s in added), brought))
    engine = SteppedEngine(
        overlap=overlap, page_size=page, step_tokens=chunk, max_running=running, retract_every=retract,
        context_length=256, max_total_tokens=1024,
    )  # fmt: skip
    found = []
    for prompt, segments in programs:
        events = []
        found.append(events)
        engine.run_program(prompt, Program(segments), sink=events.append)
    engine.drain()
    for events, (text, brought) in zip(found, expected):
        assert isinstance(events[-1], ProgramResult), events[-1]
        assert [type(e) for e in events].count(ProgramResult) == 1
        assert events[-1].text == text
        assert all(same(a, b) for a, b in zip(by_path(events[:-1]), brought, strict=True))
    engine.check_empty()


def test_an_aborted_program_ends_once_and_holds_nothing():
    engine = SteppedEngine(max_running=8, context_length=256, max_total_tokens=1024)
    draw = random.Random(5)
    found = []
    for i in range(30):
        events = []
        ticket = engine.run_program("xy", Program(random_segments(draw)), sink=events.append)
        found.append((i, ticket, events))
    for i, ticket, _ in found:
        engine.step()
        if i % 2:
            ticket.abort()
    engine.drain()
    for i, ticket, events in found:
        assert len([e for e in events if not isinstance(e, Played)]) == 1
        assert isinstance(events[-1], ProgramResult | sgl.RequestAbortedError), i
        ticket.abort()
    assert any(isinstance(events[-1], sgl.RequestAbortedError) for _, _, events in found)
    engine.drain()
    engine.check_empty()


# ------------------------------------------------------------------------------------- bad programs


def test_bad_parameters_are_refused_before_anything_runs(engine):
    with pytest.raises(sgl.ParameterError, match="temperature"):
        engine.play("x", Program((Gen("a"), Gen("b", SamplingParams(temperature=-1)))))
    with pytest.raises(sgl.ParameterError, match="top_p"):
        engine.play("x", Program((Fork(((Gen("b", SamplingParams(top_p=7)),),)),)))
    with pytest.raises(sgl.ConstraintError):
        engine.play("x", Program((Gen("a", greedy(2)), Gen("b", greedy(2), Regex("(")))))


def test_a_prompt_that_grows_too_long_fails_its_program_alone():
    engine = SteppedEngine(max_running=4, context_length=32, max_total_tokens=64)
    events, others = [], []
    grow = (Gen("a", greedy(8, ignore_eos=True)), Text("b" * 30), Gen("c", greedy(4)))
    engine.run_program("abc", Program(grow), sink=events.append)
    engine.run_program("abc", Program(grow[:1]), sink=others.append)
    engine.drain()
    assert isinstance(events[0].event, Generation)
    assert isinstance(events[-1], sgl.ParameterError)
    assert "prompt" in str(events[-1])
    assert isinstance(others[-1], ProgramResult)
    engine.check_empty()


def test_a_program_of_text_needs_no_model(engine):
    assert engine.play("a", Program((Text("b"), Text("c"))))[0].text == "bc"
    assert engine.play("a", Program(()))[0].text == ""


def test_the_first_of_several_samples_goes_into_the_text(engine):
    several = SamplingParams(temperature=1.0, seed=3, max_tokens=4, n=3)
    result, played = engine.play("One", Program((Text(" two"), Gen("a", several), Text(" end"))))
    samples = [p.event for p in sorted(played, key=lambda p: p.event.index)]
    assert [sample.index for sample in samples] == [0, 1, 2]
    assert len({sample.token_ids for sample in samples}) > 1
    assert result.text == f" two{samples[0].text} end"


# ------------------------------------------------------------------------------------ open programs


class Opened:
    """A program that is open at a stepped engine."""

    def __init__(self, engine, **options):
        self.engine, self.events = engine, []
        self.program = engine.open_program(sink=self.events.append, **options)

    def extend(self, *nodes, path=()):
        self.program.extend(path, nodes)
        self.engine.drain()
        self.engine.check()

    def at(self, *path):
        return [
            e.event
            for e in self.events
            if isinstance(e, Played) and e.path == path and type(e.event) is not Delta
        ]


def stepped(**config):
    return SteppedEngine(
        **{"max_running": 8, "context_length": 256, "max_total_tokens": 1024, **config}
    )


def test_an_open_program_goes_on_where_it_was_and_holds_no_slot_meanwhile():
    engine = stepped()
    opened = Opened(engine)
    opened.extend(Text("abc"), Gen("x", greedy(5)))
    (first,) = opened.at(1)
    assert engine.store.table.free == len(engine.store.table.length)
    assert not engine.open
    opened.extend(Text("de"), Gen("y", greedy(5)))
    (second,) = opened.at(3)
    whole = Opened(engine)
    whole.extend(Text("abc"), Gen("x", greedy(5)), Text("de"), Gen("y", greedy(5)))
    assert [e.token_ids for e in whole.at(1) + whole.at(3)] == [first.token_ids, second.token_ids]
    assert not any(isinstance(e, ProgramResult) for e in opened.events)
    assert engine.stats_now()["programs_open"] == 2
    opened.program.close()
    engine.drain()
    assert opened.events[-1].text == f"abc{first.text}de{second.text}"
    assert engine.stats_now()["programs_open"] == 1
    assert engine.stats_now()["programs_opened"] == 2
    assert engine.stats_now()["programs_extended"] == 3


def test_a_join_takes_what_was_there_when_it_was_made():
    engine = stepped()
    opened = Opened(engine)
    opened.extend(Fork(((),)))
    opened.extend(Text("b"), path=(0, 0))
    opened.extend(Text("c"), path=(0, 0))
    opened.extend(Join(0, (1,)))
    opened.program.close()
    engine.drain()
    assert opened.events[-1].text == "b"


def test_a_branch_that_fails_fails_its_readers_only():
    engine = stepped()
    opened = Opened(engine)
    bad = Gen("bad", greedy(2), Regex("("))
    opened.extend(
        Text("a"),
        Fork(((bad,), (Gen("good", greedy(3)),))),
        Gen("main", greedy(3)),
        Join(1, (1, 1)),
    )
    until(lambda: engine.drain() or opened.at(1, 0, 0))  # it is compiled on another thread
    (failed,) = opened.at(1, 0, 0)
    assert isinstance(failed, sgl.ConstraintError)
    assert isinstance(opened.at(1, 1, 0)[0], Generation)
    assert isinstance(opened.at(2)[0], Generation)
    assert isinstance(opened.at(3)[0], sgl.ConstraintError)  # it reads the branch
    opened.extend(Gen("late", greedy(2)))
    assert not opened.at(4)
    opened.program.close()
    engine.drain()
    assert isinstance(opened.events[-1], sgl.ConstraintError)
    engine.check_empty()


@pytest.mark.parametrize("steps", range(0, 12, 2))
def test_going_back_ends_what_came_after_the_mark(steps):
    engine = stepped()
    opened = Opened(engine)
    long = greedy(6, ignore_eos=True)
    opened.program.extend((), (Text("abc"), Mark(), Gen("x", long), Text("q"), Gen("y", long)))
    for _ in range(steps):
        engine.step()
    seen = len(opened.events)
    opened.extend(Rollback(1), Text("de"), Gen("z", greedy(4)))
    assert {e.path for e in opened.events[seen:]} == {(7,)}
    expected = Opened(engine)
    expected.extend(Text("abc"), Text("de"), Gen("z", greedy(4)))
    assert opened.at(7)[0].token_ids == expected.at(2)[0].token_ids
    opened.program.close()
    engine.drain()
    assert opened.events[-1].text == f"abcde{opened.at(7)[0].text}"
    engine.check_empty()


def test_a_branch_that_was_dropped_tells_nothing_and_can_go_back():
    engine = stepped()
    opened = Opened(engine)
    opened.program.extend((), (Text("abc"), Mark(), Gen("x", greedy(200, ignore_eos=True))))
    for _ in range(4):
        engine.step()
    opened.program.drop_branch(())
    engine.drain()
    assert not opened.events
    opened.extend(Gen("y", greedy(3)))
    assert not opened.events
    opened.extend(Rollback(1), Gen("z", greedy(3)))
    assert isinstance(opened.at(5)[0], Generation)


def test_a_verdict_says_what_stands_where_an_answer_was_judged():
    engine = stepped()
    opened = Opened(engine)
    opened.extend(
        Text("abc"),
        Gen("x", greedy(4), judged=True),
        Select("s", ("d", "e"), method=None),
        Text("!"),
        Gen("y", greedy(4)),
    )
    (x,) = opened.at(1)
    assert not opened.at(2)
    opened.program.judge((), 1, Verdict(x.spans))
    engine.drain()
    (s,) = opened.at(2)
    assert [score.text for score in s.scores] == ["d", "e"]
    assert s.picked is None
    again = Select(None, ("f", "g"))
    opened.program.judge((), 2, Verdict((Span("d"),), again))
    engine.drain()
    picked = opened.at(2)[1].picked
    plain = Opened(engine)
    plain.extend(Text("abc"), Gen("x", greedy(4)), Text(f"d{picked}!"), Gen("y", greedy(4)))
    assert opened.at(4)[0].token_ids == plain.at(3)[0].token_ids
    opened.program.close()
    engine.drain()
    assert opened.events[-1].text == f"abc{x.text}d{picked}!{opened.at(4)[0].text}"


def test_a_verdict_may_ask_again_and_say_what_stands_at_a_pause():
    engine = stepped()
    opened = Opened(engine)
    opened.extend(Text("abc"), Pause(), Gen("y", greedy(4), judged=True))
    opened.program.judge((), 2, Verdict((Span("no"),)))  # before its place is reached
    opened.program.judge((), 1, Verdict((Span("d"),), Gen("x", greedy(3), judged=True)))
    engine.drain()
    assert opened.at(1)[0].usage.prompt_tokens == 4
    opened.program.judge((), 1, Verdict())
    opened.program.close()
    engine.drain()
    assert not opened.at(2)  # decided on before it was asked
    assert opened.events[-1].text == "abcdno"


def test_a_program_that_is_not_open_takes_no_verdicts():
    engine = stepped()
    whole = Program((Text("a"), Fork(((Pause(),),))))
    with pytest.raises(ParameterError, match="a pause needs a verdict"):
        ProgramRequest("", whole).check_fields()
    with pytest.raises(ParameterError, match="verdict: 'x' is no Verdict"):
        Opened(engine).program.judge((), 0, "x")


def test_open_programs_wait_for_room_and_their_nodes_have_a_bound():
    engine = stepped(max_running=1, max_queued=1)
    programs = [Opened(engine) for _ in range(6)]
    for each in programs:
        each.program.extend((), (Text("ab"), Gen("x", greedy(3))))
    for each in programs:  # while they wait
        each.program.extend((), (Text("c"), Fork(((Gen("z", greedy(3)),),))))
    engine.drain()
    assert all(isinstance(each.at(1)[0], Generation) for each in programs)
    for each in programs[:3]:
        each.program.extend((), (Gen("y", greedy(3)),))
    programs[1].program.abort()
    engine.drain()
    assert isinstance(programs[1].events[-1], sgl.RequestAbortedError)
    assert isinstance(programs[2].at(4)[0], Generation)
    assert engine.open == 0
    with pytest.raises(sgl.OverloadedError, match="nodes of the program"):
        engine.run_program("", Program((Text("a"),) * 100_001), sink=lambda event: None)
    opened = Opened(engine)
    opened.extend(*[Text("a")] * 100_001)
    assert isinstance(opened.at(0)[0], sgl.OverloadedError)


@pytest.mark.parametrize("played", [False, True])
def test_nodes_beyond_the_bound_fail_and_a_rollback_revives_their_branch(monkeypatch, played):
    monkeypatch.setattr(module, "MAX_QUEUED", 3)
    engine = stepped()
    opened = Opened(engine)
    opened.program.extend((), (Text("ab"), Mark(), Gen("x", greedy(3))))
    opened.program.extend((), (Text("c"), Gen("y", greedy(3))))
    opened.program.extend((), (Gen("z", greedy(3)), Gen("z", greedy(3))))
    opened.program.extend((), (Gen("z", greedy(3)),))
    if played:
        engine.drain()
        assert isinstance(opened.at(4)[0], Generation)
    opened.program.extend((), (Rollback(1), Text("d"), Gen("w", greedy(3))))
    opened.program.extend((), [Text("e")] * 2)
    opened.program.close()
    engine.drain()
    assert isinstance(opened.at(5)[0], sgl.OverloadedError)
    assert not opened.at(6) + opened.at(7)
    assert opened.events[-1].text == f"abd{opened.at(10)[0].text}ee"
    engine.check_empty()


@pytest.mark.parametrize(
    "fork", [Fork(((),) * 6), Fork(((Text("c"),) * 5,)), Fork(((Fork(((),) * 5),),))]
)
def test_the_branches_of_a_fork_and_their_nodes_count_towards_the_limit(monkeypatch, fork):
    for each in (module, submission):
        monkeypatch.setattr(each, "MAX_QUEUED", 5)
    engine = stepped()
    opened = Opened(engine)
    opened.program.extend((), (Text("ab"), fork))
    opened.program.close()
    engine.drain()
    assert isinstance(opened.events[-1], sgl.OverloadedError)
    with pytest.raises(sgl.OverloadedError):
        ProgramRequest("ab", Program((fork,))).check_fields()
    engine.check_empty()


def test_a_join_of_a_branch_with_too_many_nodes_fails(monkeypatch):
    monkeypatch.setattr(module, "MAX_QUEUED", 5)
    engine = stepped()
    opened = Opened(engine)
    opened.program.extend((), (Text("ab"), Fork(((), ())), Join(1, (7, 1))))
    opened.program.extend((1, 0), [Text("c")] * 7)
    opened.program.extend((1, 1), [Gen("x", greedy(2))])
    opened.program.close()
    engine.drain()
    assert isinstance(opened.events[-1], sgl.OverloadedError)
    engine.check_empty()


def test_joins_of_what_is_not_there_are_told():
    engine = stepped()
    for nodes in (
        (Join(5, (1,)),),
        (Fork(((),)), Join(0, (1, 2))),
        (Rollback(0),),
        (Fork(((),)), Join(0, (3,))),
    ):
        opened = Opened(engine)
        opened.extend(*nodes)
        opened.program.close()
        engine.drain()
        assert isinstance(opened.events[-1], sgl.ProgramError), nodes


@pytest.mark.parametrize("before", [("abc",), ("abc", Gen("x", greedy(3)))])
def test_with_an_empty_choice_all_are_scored_with_the_token_before_it(before):
    engine = stepped()
    opened = Opened(engine)
    nodes = [Text(each) if isinstance(each, str) else each for each in before]
    opened.extend(*nodes, Select("s", ("de", "", "de")), Select("t", ("de", "df")))
    (first,), (second,) = opened.at(len(nodes)), opened.at(len(nodes) + 1)
    one, empty, same = first.scores
    assert one == same
    assert len(empty.token_ids) == 1
    assert one.token_ids[:1] == empty.token_ids
    assert one.logprobs[0] == pytest.approx(empty.logprobs[0], abs=1e-4)
    assert second.scores
    engine.check_empty()


def test_a_selection_without_choices_and_a_library_that_fails_are_told(monkeypatch):
    engine = stepped()
    opened = Opened(engine)
    opened.extend(Text("a"), Select("s", ()), Gen("x", greedy(2)))
    assert isinstance(opened.at(1)[0], sgl.ParameterError)
    opened = Opened(engine)
    monkeypatch.setattr(type(engine.tokenizer), "encode_spans", lambda *args, **options: 1 / 0)
    opened.extend(Text("a"), Gen("x", greedy(2)))
    assert isinstance(opened.events[-1], sgl.ProgramError)
    assert isinstance(opened.events[-1].__cause__, ZeroDivisionError)
    engine.check_empty()


def test_open_programs_that_are_idle_hold_nobody_up_and_hold_nothing():
    """Many more than there is room for: in a fresh engine the same requests take as many steps and
    find as much room.
    """

    def steps(engine):
        before = engine.loop.steps
        answers = [engine.start("abc" * i, greedy(9))[1] for i in range(1, 9)]
        with pytest.raises(sgl.OverloadedError):  # all the room there is
            engine.start("abc")
        engine.drain()
        return engine.loop.steps - before, [ended(events).token_ids for events in answers]

    def make():
        return SteppedEngine(max_running=4, max_queued=4, context_length=64, max_total_tokens=256)

    alone, engine = make(), make()
    found = []
    for i in range(60):
        found.append([])
        program = engine.open_program(sink=found[-1].append)
        program.extend((), (Text("ab" * (i % 9)), Text("c"), Gen("a", greedy(3)), Text("then")))
        found[-1].append(program)
        if i % 4 == 3:
            engine.drain()
    # the program itself, and what its generation brought
    assert all(len(events) == 2 for events in found)
    engine.check_empty()
    assert engine.scheduler.queues.idle
    assert steps(engine) == steps(alone)
    for events in found:
        events[0].extend((), (Gen("b", greedy(2)),))
        events[0].close()
    engine.drain()
    assert all(isinstance(events[-1], ProgramResult) and len(events) == 4 for events in found)
    engine.check_empty()


def test_nothing_can_be_continued_without_a_token(engine, monkeypatch):
    monkeypatch.setattr(engine.tokenizer, "bos_id", None)
    with pytest.raises(sgl.ParameterError, match="prompt: is empty"):
        engine.play("", Program((Gen("a", greedy()),)))
    assert isinstance(
        engine.play("a quick", Program((Gen("b", greedy()),)))[1][0].event, Generation
    )
