"""The engine through its own interface: generation, limits, scoring, failure."""

import subprocess
import sys
import threading

import pytest

import sglang_lite as sgl
from sglang_lite.protocol import (
    Choices,
    Delta,
    Generation,
    JsonSchema,
    Prompt,
    Regex,
    SamplingParams,
    Span,
)
from sglang_lite.runtime.executor.cpu_runner import CpuRunner
from tests.runtime.scripted import CHAT

GREEDY = SamplingParams(temperature=0, max_tokens=16)


def greedy(**options):
    return SamplingParams(temperature=0, **{"max_tokens": 16, **options})


def test_a_generation_tells_what_happened(engine):
    generation = engine.complete(CHAT, GREEDY)
    assert generation.text == "The capital of France is Paris."
    assert (generation.finish_reason, generation.matched) == ("stop", 2)
    assert generation.token_ids[-1] == 2
    assert generation.spans == (Span(generation.text, generation.token_ids[:-1]),)
    assert generation.usage.prompt_tokens == len(engine.tokenizer.encode(CHAT))
    assert generation.usage.completion_tokens == len(generation.token_ids)
    assert 0 < generation.usage.first_token_s <= generation.usage.total_s


def test_the_cache_changes_what_is_computed_and_nothing_else(small_engine):
    small_engine.flush_cache()
    cold = small_engine.complete(CHAT, GREEDY)
    warm = small_engine.complete(CHAT, GREEDY)
    assert cold.usage.cached_tokens == 0
    assert warm.usage.cached_tokens == warm.usage.prompt_tokens - 1
    assert cold.text == warm.text
    assert small_engine.stats()["cached_tokens"] > 0
    assert small_engine.flush_cache() > 0
    assert small_engine.stats()["cached_tokens"] == 0


def test_ids_text_and_spans_are_the_same_prompt(small_engine):
    ids = small_engine.tokenizer.encode(CHAT)
    texts = {
        small_engine.complete(p, GREEDY).text
        for p in (CHAT, ids, Prompt((Span(CHAT[:9]), Span(CHAT[9:]))))
    }
    assert len(texts) == 1


def test_stops_end_the_text_and_cut_it(reciting):
    cut = reciting.complete(CHAT, greedy(stop=("France", "Paris")))
    assert (cut.text, cut.matched) == ("The capital of ", "France")
    assert [span.text for span in cut.spans] == ["The capital of", " "]
    assert (
        reciting.complete(CHAT, greedy(stop=("France",), include_stop=True)).text
        == "The capital of France"
    )
    comma = reciting.complete(
        CHAT, greedy(stop_token_ids=tuple(reciting.tokenizer.encode(" capital")))
    )
    assert comma.text == "The"
    short = reciting.complete(CHAT, greedy(max_tokens=3))
    assert (short.text, short.finish_reason, short.matched) == ("The capital of", "length", None)
    long = reciting.complete(CHAT, greedy(max_tokens=12, ignore_eos=True))
    assert len(long.token_ids) == 12
    assert reciting.complete(CHAT, greedy(min_tokens=10)).usage.completion_tokens >= 10


def test_draws_depend_on_the_seed_alone(small_engine):
    params = SamplingParams(temperature=1.0, max_tokens=12, seed=7)
    alone = small_engine.complete(CHAT, params).text
    results = {}
    threads = [
        threading.Thread(
            target=lambda i=i: results.update(
                {
                    i: small_engine.complete(
                        CHAT, SamplingParams(temperature=1.0, max_tokens=12, seed=i)
                    ).text
                }
            )
        )
        for i in range(4, 10)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(results.values())) > 1
    assert small_engine.complete(CHAT, params).text == alone
    assert (
        len({small_engine.complete("Once", SamplingParams(max_tokens=8)).text for _ in range(3)})
        > 1
    )


@pytest.mark.parametrize(
    "params", [dict(top_k=1), dict(top_p=1e-6), dict(min_p=1.0), dict(temperature=1e-6)]
)
def test_filters_at_their_limit_are_greedy(small_engine, params):
    assert (
        small_engine.complete(
            CHAT, SamplingParams(**{"max_tokens": 16, "temperature": 5.0, "seed": 1, **params})
        ).text
        == small_engine.complete(CHAT, GREEDY).text
    )


def test_penalties_and_biases_move_the_choice(engine):
    capital = engine.tokenizer.encode(" capital")[0]
    assert (
        "capital"
        not in engine.complete(CHAT, greedy(max_tokens=4, logit_bias=((capital, -100.0),))).text
    )
    echo = "a b c a b c a b c a b c a b"
    plain = engine.complete(echo, greedy(max_tokens=5)).text
    for penalty in (
        dict(repetition_penalty=2.0),
        dict(frequency_penalty=2.0),
        dict(presence_penalty=2.0),
    ):
        assert engine.complete(echo, greedy(max_tokens=5, **penalty)).text != plain


def test_logprobs_of_output_and_prompt(small_engine):
    ids = small_engine.tokenizer.encode(CHAT)
    params = greedy(
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=3,
        token_ids_logprob=(5, 6),
        return_text_in_logprobs=True,
    )
    generation = small_engine.complete(CHAT, params)
    assert [e.token_id for e in generation.output_logprobs] == list(generation.token_ids)
    first = generation.output_logprobs[0]
    assert (first.text, first.top[0][1], len(first.top)) == (
        small_engine.tokenizer.decode([first.token_id]),
        first.token_id,
        3,
    )
    assert [i for _, i, _ in first.ids] == [5, 6]
    assert [e.token_id for e in generation.prompt_logprobs] == ids[1:]
    again = small_engine.complete(
        [*ids, *generation.token_ids],
        greedy(max_tokens=0, return_logprob=True, logprob_start_len=len(ids)),
    )
    assert [e.logprob for e in again.prompt_logprobs] == pytest.approx(
        [e.logprob for e in generation.output_logprobs], abs=0.15
    )


def test_constraints_hold(engine):
    assert engine.complete(CHAT, greedy(), Regex("[A-Z]{3}-[0-9]{2}")).text[3] == "-"
    assert (
        engine.complete(
            CHAT + "The capital of France is", greedy(), Choices((" London", " Paris", " Rome"))
        ).text
        == " Paris"
    )
    generation = engine.complete(
        CHAT,
        greedy(max_tokens=60),
        JsonSchema(
            '{"type":"object","properties":{"city":{"type":"string","maxLength":20}},"required":["city"],"additionalProperties":false}'
        ),
    )
    assert '"city": "' in generation.text
    assert generation.text.endswith('"}')
    assert (generation.finish_reason, generation.matched) == ("stop", None)


def test_what_a_grammar_cannot_keep_is_refused_before_the_first_token(engine):
    with pytest.raises(sgl.ConstraintError, match="multipleOf"):
        engine.complete(CHAT, GREEDY, JsonSchema('{"type": "integer", "multipleOf": 1234577}'))


def collect(engine, prompt, params, constraint=None):
    events, done = [], threading.Event()

    def sink(event):
        events.append(event)
        if not isinstance(event, Delta):
            done.set()

    ticket = engine.submit(prompt, params, constraint, sink=sink, stream=True)
    return events, done, ticket


@pytest.mark.parametrize(
    "params",
    [
        greedy(),
        greedy(stop=("Paris",)),
        greedy(max_tokens=3),
        greedy(stop=("is",), include_stop=True),
    ],
)
def test_deltas_add_up_to_the_text(reciting, params):
    events, done, _ = collect(reciting, CHAT, params)
    assert done.wait(60)
    *deltas, last = events
    assert isinstance(last, Generation)
    assert "".join(d.text for d in deltas) == last.text


def test_selection_scores_every_choice_on_the_same_text(engine):
    prompt = CHAT + "The capital is"
    choices = [" Paris", " London", " New York"]
    selection = engine.select(prompt, choices)
    assert [s.text for s in selection.scores] == choices
    for score in selection.scores:
        ids = engine.tokenizer.encode(prompt + score.text)
        start = len(ids) - len(score.token_ids)
        params = SamplingParams(max_tokens=0, return_logprob=True, logprob_start_len=start)
        whole = engine.complete(ids, params)
        assert [e.token_id for e in whole.prompt_logprobs] == list(score.token_ids)
        assert [e.logprob for e in whole.prompt_logprobs] == pytest.approx(
            list(score.logprobs), abs=1e-3
        )
    assert sum(selection.scores[0].logprobs) > sum(selection.scores[1].logprobs)
    assert selection.usage.cached_tokens > selection.usage.prompt_tokens / 2


def test_merges_at_the_boundary_are_handled_alike_for_all_choices(small_engine):
    tokenizer = small_engine.tokenizer
    prompt = "The answer is un"
    assert tokenizer.encode(prompt + "known") != [
        *tokenizer.encode(prompt),
        *tokenizer.encode("known"),
    ]
    selection = small_engine.select(prompt, ["known", "zebra"])
    texts = {tokenizer.decode(s.token_ids)[: -len(s.text)] for s in selection.scores}
    assert len(texts) == 1  # both are scored from the same place on


def test_selection_without_a_prompt_and_without_condition(small_engine):
    selection = small_engine.select("", ["yes", "no"], unconditional=True)
    assert all(len(s.logprobs) == len(s.token_ids) for s in selection.scores)
    assert all(s.unconditional[0] is None for s in selection.scores)
    with pytest.raises(sgl.ParameterError, match="choices"):
        small_engine.select("x", [])
    with pytest.raises(sgl.ParameterError, match="needs text before it"):
        small_engine.select("", ["a", ""])
    with pytest.raises(sgl.ParameterError, match="without the prompt"):
        small_engine.select("x", ["a", ""], unconditional=True)


def test_a_small_engine_queues_retracts_and_answers_everything(folders):
    """Pages for two requests at most: the others wait or are put back, and all texts are those of a
    roomy engine.
    """
    prompts = [f"Question {i}: what is {i} plus one?\nAnswer:" for i in range(4)]
    with sgl.Engine(
        folders[0], dtype="float32", max_running=3, max_total_tokens=120, context_length=100, step_tokens=16,
        in_process=True,
    ) as small:  # fmt: skip
        results: dict[int, Generation] = {}
        done = threading.Event()

        def sink(i):
            def take(event):
                results[i] = event
                if len(results) == len(prompts):
                    done.set()

            return take

        for i, prompt in enumerate(prompts):
            small.submit(prompt, greedy(max_tokens=40, ignore_eos=True), sink=sink(i))
        assert done.wait(600)
        assert small.stats()["running"] == 0
        assert small.stats()["free_tokens"] + small.stats()["cached_tokens"] == 120
        alone = [
            small.complete(prompt, greedy(max_tokens=40, ignore_eos=True)).text
            for prompt in prompts
        ]
    assert [results[i].text for i in range(len(prompts))] == alone
    assert sum(generation.meta["num_retractions"] for generation in results.values()) > 0


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("step_tokens", [7, 512])
def test_pages_and_chunks_do_not_change_the_text(folders, page_size, step_tokens):
    with sgl.Engine(
        folders[0],
        dtype="float32",
        page_size=page_size,
        step_tokens=step_tokens,
        max_running=2,
        max_total_tokens=256,
        context_length=200,
        in_process=True,
    ) as engine:
        first = engine.complete(CHAT * 2, greedy(ignore_eos=True))
        again = engine.complete(CHAT * 2, greedy(ignore_eos=True))
    assert first.text == again.text
    assert again.usage.cached_tokens == again.usage.prompt_tokens - 1


def test_abort_ends_a_request_once_and_frees_its_pages(small_engine):
    small_engine.flush_cache()
    before = small_engine.stats()["free_tokens"]
    events, done, ticket = collect(small_engine, CHAT, greedy(max_tokens=4000, ignore_eos=True))
    ticket.abort()
    assert done.wait(60)
    ticket.abort()
    assert isinstance(events[-1], sgl.RequestAbortedError)
    assert small_engine.stats()["running"] == 0
    small_engine.flush_cache()
    assert small_engine.stats()["free_tokens"] == before
    assert sum(not isinstance(e, Delta) for e in events) == 1


def test_pages_that_a_step_under_way_may_read_are_free(small_engine):
    store, inbox = small_engine.core.scheduler.store, small_engine.core.loop.inbox
    small_engine.flush_cache()
    before = small_engine.stats()["free_tokens"]
    inbox.call_and_wait(lambda: store.pool.quarantine_pages(store.allocate(3), 1 << 40))
    assert small_engine.stats()["free_tokens"] == before
    inbox.call_and_wait(lambda: store.pool.settle_quarantine(1 << 40))
    assert small_engine.stats()["free_tokens"] == before


def test_too_many_requests_are_refused(small_file):
    with sgl.Engine(
        small_file,
        max_running=1,
        max_queued=1,
        max_total_tokens=256,
        context_length=128,
        step_tokens=16,
        in_process=True,
    ) as engine:
        tickets = [
            engine.submit("x", greedy(max_tokens=100, ignore_eos=True), sink=lambda e: None)
            for _ in range(2)
        ]
        with pytest.raises(sgl.OverloadedError, match="2 requests are waiting or running"):
            engine.submit("x", greedy(), sink=lambda e: None)
        for ticket in tickets:
            ticket.abort()
        engine.stats()
        assert engine.complete("x", greedy(max_tokens=1)).token_ids


def test_closing_fails_what_is_under_way_and_what_comes_later(small_file):
    engine = sgl.Engine(small_file, max_running=2, in_process=True)
    events, done, _ = collect(engine, CHAT, greedy(max_tokens=4000, ignore_eos=True))
    engine.close()
    assert done.wait(60)
    assert isinstance(events[-1], sgl.EngineClosedError)
    engine.close()
    for call in (
        lambda: engine.complete("x"),
        lambda: engine.complete("x", GREEDY, Regex("a")),
        engine.stats,
        engine.flush_cache,
        lambda: engine.select("x", ["a"]),
    ):
        with pytest.raises(sgl.EngineClosedError):
            call()


def test_a_process_may_end_while_its_engine_works(small_file):
    """Python would end the engine's thread within torch's code, which aborts the process."""
    script = f"""
import threading
import sglang_lite as sgl
from sglang_lite.protocol import SamplingParams
engine, begun = sgl.Engine({str(small_file)!r}, in_process=True), threading.Event()
for _ in range(8):
    engine.submit("Hello", SamplingParams(max_tokens=500, ignore_eos=True), sink=lambda _: begun.set(), stream=True)
begun.wait()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_crash_of_the_loop_fails_every_request_with_its_cause(small_file, monkeypatch, caplog):
    engine = sgl.Engine(small_file, max_running=2, in_process=True)

    def crash(*_):
        raise ArithmeticError("out of everything")

    monkeypatch.setattr(CpuRunner, "forward", crash)
    with pytest.raises(sgl.EngineClosedError, match="out of everything") as caught:
        engine.complete("x")
    assert isinstance(caught.value.__cause__, ArithmeticError)
    with pytest.raises(sgl.EngineClosedError):
        engine.complete("x")
    engine.close()


def test_a_failing_sink_harms_nobody_else(reciting, caplog):
    def bad(event):
        raise RuntimeError("sink")

    reciting.submit("x", greedy(max_tokens=1), sink=bad)
    assert reciting.complete(CHAT, greedy(max_tokens=2)).text == "The capital"
    assert "sink of request" in caplog.text


def test_a_failing_flush_harms_nobody_else(small_engine, caplog):
    """As that of an event loop which was closed meanwhile."""
    woken, told = threading.Event(), []

    def bad():
        raise RuntimeError("flush")

    small_engine.submit("x", greedy(max_tokens=1), sink=told.append, flush=bad)
    small_engine.submit("x", greedy(max_tokens=1), sink=told.append, flush=woken.set)
    assert woken.wait(60)
    assert small_engine.complete("x", greedy(max_tokens=1)).finish_reason == "length"
    assert len(told) == 2
    assert "could not be woken" in caplog.text


def test_two_engines_live_side_by_side(small_engine, small_file):
    with sgl.Engine(small_file, dtype="float32", max_running=2, seed=5, in_process=True) as other:
        a, b = small_engine.complete(CHAT, GREEDY), other.complete(CHAT, GREEDY)
        assert a.text == b.text
        first = other.complete(CHAT, SamplingParams(max_tokens=12)).text
    with sgl.Engine(small_file, dtype="float32", max_running=2, seed=5, in_process=True) as other:
        other.complete(CHAT, GREEDY)
        assert other.complete(CHAT, SamplingParams(max_tokens=12)).text == first


def test_a_chat_template_of_ones_own(small_file, tmp_path):
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    with sgl.Engine(
        small_file, max_running=2, chat_template=str(tmp_path / "t.jinja"), in_process=True
    ) as other:
        assert other.chat_template().get_prefix_and_suffix("user", []) == ("[user]", "")
    with pytest.raises(
        sgl.ParameterError, match=r"chat_template: there is no file 'nothing\.jinja'"
    ):
        sgl.Engine(small_file, max_running=2, chat_template="nothing.jinja", in_process=True)
