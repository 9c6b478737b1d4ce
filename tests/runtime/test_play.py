"""A program played inside the engine gives what its nodes give one call after another."""

import random
import threading

import pytest

import sglang_lite as sgl
from sglang_lite.protocol import (
    Choices,
    Delta,
    ForkSegment,
    Generation,
    GenSegment,
    JoinSegment,
    Played,
    Program,
    ProgramResult,
    Prompt,
    Regex,
    SamplingParams,
    Selection,
    SelectSegment,
    Span,
    TextSegment,
)
from tests.runtime.scripted import SteppedEngine


def greedy(tokens=8, **options):
    return SamplingParams(temperature=0, max_tokens=tokens, **options)


def call_by_call(engine, spans, segments):
    """Plays segments with one request each; returns the spans they add and what each brought."""
    added, brought, forked = [], [], []

    def prompt():
        return Prompt(tuple(spans) + tuple(added))

    for segment in segments:
        match segment:
            case TextSegment(text):
                added.append(Span(text))
            case GenSegment(_, params, constraint):
                brought.append(engine.complete(prompt(), params, constraint))
                added += brought[-1].spans
            case SelectSegment(_, choices):
                brought.append(engine.select(prompt(), choices))
                best = max(brought[-1].scores, key=lambda s: sum(s.logprobs) / len(s.logprobs))
                added.append(Span(best.text))
            case ForkSegment(branches):
                for branch in branches:
                    spans_added, found = call_by_call(engine, [*spans, *added], branch)
                    forked.append("".join(s.text for s in spans_added))
                    brought += found
            case JoinSegment():
                added += [Span(text) for text in forked]
                forked.clear()
    return added, brought


def by_path(played):
    return [p.event for p in sorted(played, key=lambda p: p.path) if not isinstance(p.event, Delta)]


def same(a, b):
    if isinstance(a, Generation):
        return (a.token_ids, a.text, a.finish_reason) == (b.token_ids, b.text, b.finish_reason)
    return [s.token_ids for s in a.scores] == [s.token_ids for s in b.scores] and all(
        abs(x - y) < 1e-4 for s, t in zip(a.scores, b.scores) for x, y in zip(s.logprobs, t.logprobs)
    )


QUESTIONS = (
    TextSegment("<|im_start|>user\nName a country and its capital.<|im_end|>\n<|im_start|>assistant\nThe country is"),
    GenSegment("country", greedy(6, stop=(".", ","))),
    TextSegment(", and its capital is"),
    GenSegment("capital", greedy(6, stop=(".",))),
    TextSegment(". Founded in "),
    GenSegment("year", greedy(6), Regex(r"1[0-9]{3}")),
    SelectSegment("size", (" It is small", " It is large", " It is medium-sized")),
    ForkSegment(
        (
            (TextSegment(". Food:"), GenSegment("food", greedy(8, stop=("\n",)))),
            (TextSegment(". River:"), GenSegment("river", greedy(8)), GenSegment("more", greedy(4))),
            (TextSegment(". The end"),),
        )
    ),
    GenSegment("beside", greedy(5)),
    JoinSegment(),
    TextSegment(" In short,"),
    GenSegment("last", greedy(6), Choices((" it is nice", " it is far"))),
    TextSegment("!"),
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


def test_the_next_generation_goes_on_in_its_slot(engine):
    engine.flush_cache()
    program = Program((GenSegment("a", greedy(5)), TextSegment(" And then"), GenSegment("b", greedy(5))))
    _, played = engine.play("Once upon a time", program)
    first, second = by_path(played)
    assert second.usage.cached_tokens >= first.usage.prompt_tokens + len(first.token_ids) - 1
    assert second.usage.queue_s == pytest.approx(0, abs=1e-3)


def test_deltas_are_the_texts_in_pieces(engine):
    events = []
    program = Program((GenSegment("a", greedy(6)), TextSegment(" So"), GenSegment("b", greedy(6))))
    done = threading.Event()

    def sink(event):
        events.append(event)
        if not isinstance(event, Played):
            done.set()

    engine.run_program("One two three", program, sink=sink, stream=True)
    assert done.wait(60)
    for path in ((0,), (2,)):
        mine = [e.event for e in events if isinstance(e, Played) and e.path == path]
        assert "".join(e.text for e in mine if isinstance(e, Delta)) == mine[-1].text
    assert isinstance(events[-1], ProgramResult)


# ------------------------------------------------------------------------- scheduled in every way, with a scripted model


def random_segments(draw, depth=0):
    segments = []
    for _ in range(draw.randrange(1, 6)):
        kind = draw.random()
        if kind < 0.35:
            segments.append(TextSegment("".join(draw.choice("abcde ") for _ in range(draw.randrange(0, 6)))))
        elif kind < 0.75:
            stop = (draw.choice("abc"),) if draw.random() < 0.3 else ()
            params = SamplingParams(
                temperature=draw.choice([0, 1.0]), seed=draw.randrange(99), max_tokens=draw.randrange(0, 7), stop=stop
            )
            segments.append(GenSegment("g", params))
        elif kind < 0.85:
            segments.append(SelectSegment("s", ("ab", "abc", "b", "d e")))
        elif depth < 2:
            segments.append(ForkSegment(tuple(random_segments(draw, depth + 1) for _ in range(draw.randrange(1, 4)))))
            if draw.random() < 0.5:
                segments.append(JoinSegment())
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


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("page", "chunk", "running", "retract"), [(1, 64, 8, 0), (4, 16, 3, 2), (16, 1000, 16, 3)])
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


# ----------------------------------------------------------------------------------------------------- bad programs


def test_bad_parameters_are_refused_before_anything_runs(engine):
    with pytest.raises(sgl.ParameterError, match="temperature"):
        engine.play("x", Program((GenSegment("a"), GenSegment("b", SamplingParams(temperature=-1)))))
    with pytest.raises(sgl.ParameterError, match="n: a generation inside a program has one sample"):
        engine.play("x", Program((ForkSegment(((GenSegment("b", SamplingParams(n=2)),),)),)))
    with pytest.raises(sgl.ConstraintError):
        engine.play("x", Program((GenSegment("a", greedy(2)), GenSegment("b", greedy(2), Regex("(")))))


def test_a_prompt_that_grows_too_long_fails_its_program_alone():
    engine = SteppedEngine(max_running=4, context_length=32, max_total_tokens=64)
    events, others = [], []
    grow = (GenSegment("a", greedy(8, ignore_eos=True)), TextSegment("b" * 30), GenSegment("c", greedy(4)))
    engine.run_program("abc", Program(grow), sink=events.append)
    engine.run_program("abc", Program(grow[:1]), sink=others.append)
    engine.drain()
    assert isinstance(events[0].event, Generation)
    assert isinstance(events[-1], sgl.ParameterError)
    assert "prompt" in str(events[-1])
    assert isinstance(others[-1], ProgramResult)
    engine.check_empty()


def test_a_program_of_text_needs_no_model(engine):
    assert engine.play("a", Program((TextSegment("b"), TextSegment("c"))))[0].text == "bc"
    assert engine.play("a", Program(()))[0].text == ""


def test_a_selection_can_be_picked_by_the_caller(engine):
    picked = []

    def worst(selection: Selection):
        picked.append(selection)
        return min(selection.scores, key=lambda s: sum(s.logprobs)).text

    result, _ = engine.play("The capital of France is", Program((SelectSegment("x", (" Paris", " Xylophone"), worst),)))
    assert result.text == " Xylophone"
    assert len(picked) == 1
