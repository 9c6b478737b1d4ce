"""Limits of thoughts, with a model that never stops thinking. What a thought must be is worked out
on its text.
"""

import itertools
import json

import pytest

import sglang_lite as sgl
from sglang_lite.constraints.schema import json_schema
from sglang_lite.protocol import Delta, ParameterError, Regex, SamplingParams
from sglang_lite.text.reasoning import allow_reasoning_before
from tests.counts import some
from tests.runtime.scripted import Guesses, SteppedEngine, ended
from tests.runtime.thinkers import ANSWER, END, thinker, token_ids

SENTENCE = "abcdefghij."
NO_END = "abcdefghij "
PERSON = {
    "type": "object", "additionalProperties": False, "required": ["steps", "age"],
    "properties": {"steps": {"type": "string", "maxLength": 4}, "age": {"type": "integer", "maximum": 99}},
}  # fmt: skip
SCHEMA = json_schema(PERSON)
WITH_THOUGHT = allow_reasoning_before("qwen3", SCHEMA)
GRACE = 32


def greedy(**more):
    return SamplingParams(
        **{"temperature": 0, "max_tokens": 300, "reasoning_format": ("qwen3",), **more}
    )


def thought(sentence, limit):
    """The text that is thought within a limit, and to the end of the sentence behind it."""
    endless = "".join(itertools.islice(itertools.cycle(sentence), limit + GRACE))
    if limit == 0 or endless[limit - 1] == ".":
        return endless[:limit]
    dot = endless.find(".", limit)
    return endless if dot < 0 else endless[: dot + 1]


def played(engine, params, constraint=None, prompt="x", **options):
    if constraint is not None:
        engine.compile_grammar(constraint)
    _, events = engine.start(prompt, params, constraint=constraint, **options)
    engine.drain()
    return ended(events), events[:-1]


def check_answer(found, answer):
    """The answer is a value, or was cut and says so."""
    if found.finish_reason == "length":
        assert found.meta["shortened"] == [""]
        return
    value = json.loads(answer)
    assert set(value) == {"steps", "age"}
    assert value["age"] <= 99


@pytest.fixture(params=[{}, {"jump_forward": "off"}, {"overlap": False}], ids=str)
def config(request):
    return request.param


@pytest.mark.parametrize("sentence", [SENTENCE, NO_END])
@pytest.mark.parametrize("limit", [0, 1, 11, 12, 50])
def test_a_thought_without_an_end_is_ended_with_its_sentence_and_the_answer_has_room(
    config, sentence, limit
):
    engine = SteppedEngine(model=thinker(sentence), **config)
    found, _ = played(engine, greedy(thinking=limit), WITH_THOUGHT)
    expected = thought(sentence, limit)
    assert found.text.startswith(f"<think>{expected}\n</think>\n\n{{")
    check_answer(found, found.text.partition("</think>")[2])
    assert found.meta["thinking"] == {"tokens": len(expected), "limit": limit, "ended_by": "limit"}
    assert list(found.token_ids) == token_ids(found.text)
    engine.check_empty()


def test_without_a_limit_a_thought_leaves_the_room_of_the_schema():
    engine = SteppedEngine(model=thinker(SENTENCE))
    for total in (60, 100, 200):
        found, _ = played(engine, greedy(max_tokens=total), WITH_THOUGHT)
        before, _, answer = found.text.partition("\n</think>\n\n")
        check_answer(found, answer)
        assert before.endswith(".")
        shortest = len('{"steps": "", "age": 0}')
        assert total - 2 * shortest - 45 <= len(before) < total - 2 * shortest or total == 60
        assert len(found.token_ids) <= total
        assert found.meta["thinking"]["ended_by"] == "limit"


def test_a_total_that_leaves_nothing_is_refused_with_both_numbers():
    engine = SteppedEngine(model=thinker(SENTENCE))
    shortest = len('{"steps": "", "age": 0}')
    with pytest.raises(
        ParameterError, match=rf"max_tokens: leaves 20 tokens .* has {shortest}"
    ) as caught:
        raise played(engine, greedy(max_tokens=20, thinking=5), WITH_THOUGHT)[0]
    assert "4 to end the thought" in str(caught.value)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("limit", [0, 5, 40])
def test_a_free_answer_follows_an_ended_thought(config, special, limit):
    engine = SteppedEngine(model=thinker(SENTENCE, special=special), **config)
    found, _ = played(engine, greedy(thinking=limit, skip_special_tokens=False))
    assert found.text == f"<think>{thought(SENTENCE, limit)}\n</think>\n\n{ANSWER}"
    assert found.finish_reason == "stop"
    assert found.meta["thinking"]["ended_by"] == "limit"
    assert "constraint_backend" not in found.meta
    assert "shortened" not in found.meta


def test_a_thought_that_the_prompt_has_opened_is_ended():
    engine = SteppedEngine(model=thinker(SENTENCE))
    for form in ("qwen3", "deepseek-r1"):
        found, _ = played(engine, greedy(thinking=20, reasoning_format=(form,)), prompt="x<think>")
        assert found.text == f"{thought(SENTENCE, 20)}\n</think>\n\n{ANSWER}"
    found, _ = played(
        engine,
        greedy(thinking=20),
        allow_reasoning_before("deepseek-r1", SCHEMA),
        prompt="x<think>",
    )
    assert found.text.startswith(f"{thought(SENTENCE, 20)}\n</think>\n\n{{")
    closed, _ = played(engine, greedy(thinking=2, max_tokens=30), prompt="x<think>\n\n</think>\n\n")
    assert closed.text == ANSWER


def test_the_template_tells_the_format_and_where_it_shows_none_the_limit_is_refused():
    engine = SteppedEngine(model=thinker(SENTENCE))
    params = SamplingParams(temperature=0, max_tokens=100, thinking=3)
    found, _ = played(engine, params)
    assert found.text.endswith(f".\n</think>\n\n{ANSWER}")
    engine.tokenizer.chat_template = "{{ messages }}"
    other = SteppedEngine(model=thinker(SENTENCE))
    other.tokenizer.chat_template = None
    with pytest.raises(
        ParameterError, match=r"^thinking: the model's chat template shows no marks"
    ):
        other.start("x", params)


def test_a_thought_that_ends_by_itself_is_left_alone():
    engine = SteppedEngine(model=thinker("abcdef"))
    model = engine.loop.runner.model
    model.following[ord("d")] = END
    found, _ = played(engine, greedy(thinking=40))
    assert found.text == f"<think>abcd</think>\n{ANSWER}"
    assert found.meta["thinking"] == {"tokens": 4, "limit": 40, "ended_by": "model"}
    silent = SteppedEngine(model=thinker("abcdef", starts=False))
    found, _ = played(silent, greedy(thinking=40))
    assert found.text == ANSWER
    assert found.meta["thinking"] == {"tokens": 0, "limit": 40, "ended_by": None}


def test_marks_of_several_tokens_are_found_and_written():
    engine = SteppedEngine(model=thinker("abcdefg", spelled=True))
    found, _ = played(engine, greedy(thinking=20), WITH_THOUGHT, prompt="x<think>")
    assert found.text.startswith("{") or "</think>" in found.text
    found, _ = played(
        engine,
        greedy(thinking=20),
        allow_reasoning_before("deepseek-r1", SCHEMA),
        prompt="x<think>",
    )
    count = 20 + GRACE
    begun = found.text.partition("\n</think>\n\n")
    assert begun[1]
    assert len(begun[0]) == count
    check_answer(found, begun[2])


def test_a_share_of_the_total_is_a_limit():
    engine = SteppedEngine(model=thinker(SENTENCE))
    found, _ = played(engine, greedy(thinking=("25%",), max_tokens=200))
    assert found.text == f"<think>{thought(SENTENCE, 50)}\n</think>\n\n{ANSWER}"
    assert found.meta["thinking"]["limit"] == 50


def test_time_ends_a_thought_and_is_marked():
    engine = SteppedEngine(model=thinker(SENTENCE))
    engine.loop.clock.now = lambda: float(engine.loop.steps)
    found, _ = played(engine, greedy(thinking=("30s",)))
    before, _, answer = found.text.partition("\n</think>\n\n")
    assert answer == ANSWER
    assert 25 <= len(before.removeprefix("<think>")) <= 45
    assert before.endswith(".")
    told = found.meta["thinking"]
    assert (told["ended_by"], told["seconds"], told["reproducible"]) == ("time", 30.0, False)


# ---------------------------------------------------------------------------------- beside the rest


@pytest.mark.parametrize("constraint", [None, WITH_THOUGHT], ids=["free", "schema"])
def test_streams_samples_and_log_probabilities_have_it(constraint):
    engine = SteppedEngine(model=thinker(SENTENCE))
    plain, _ = played(engine, greedy(thinking=15), constraint)
    streamed, deltas = played(engine, greedy(thinking=15), constraint, stream=True)
    assert "".join(delta.text for delta in deltas) == streamed.text == plain.text
    scored, _ = played(engine, greedy(thinking=15, return_logprob=True), constraint)
    assert scored.text == plain.text
    assert [each.token_id for each in scored.output_logprobs] == list(scored.token_ids)
    at = scored.token_ids.index(END)
    assert scored.output_logprobs[at].logprob == 0  # like all text that nothing else can replace
    sure, _ = played(engine, greedy(thinking=15, confidence=True), constraint)
    assert sure.text == plain.text
    assert sure.scores is not None
    # the model would not have ended
    assert sure.scores.logprobs[at] < -5 < sure.scores.logprobs[at - 5]
    if constraint is not None:
        engine.compile_grammar(constraint)
    _, events = engine.start("x", greedy(thinking=15, n=3), constraint=constraint)
    engine.drain()
    assert [
        (each.text, each.meta["thinking"]) for each in events if not isinstance(each, Delta)
    ] == [(plain.text, plain.meta["thinking"])] * 3


@pytest.mark.parametrize("constraint", [None, WITH_THOUGHT], ids=["free", "schema"])
@pytest.mark.parametrize("jump", ["safe", "off"])
def test_retraction_loses_no_count(constraint, jump):
    model = thinker(SENTENCE)
    whole, _ = played(SteppedEngine(model=model), greedy(thinking=30), constraint)
    engine = SteppedEngine(
        model=model, retract_every=5, max_running=3, page_size=4, jump_forward=jump
    )
    if constraint is not None:
        engine.compile_grammar(constraint)
    started = [engine.start("x", greedy(thinking=30), constraint=constraint)[1] for _ in range(3)]
    engine.drain()
    assert any(ended(events).meta["num_retractions"] for events in started)
    for events in started:
        assert ended(events).token_ids == whole.token_ids
        assert ended(events).meta["thinking"] == whole.meta["thinking"]
    engine.check_empty()


@pytest.mark.parametrize("constraint", [None, WITH_THOUGHT], ids=["free", "schema"])
@pytest.mark.parametrize("more", [{}, {"return_logprob": True}], ids=str)
def test_a_continued_output_is_ended_at_the_same_place(constraint, more):
    engine = SteppedEngine(model=thinker(SENTENCE), page_size=4)
    whole, _ = played(engine, greedy(thinking=15, **more), constraint)
    count = len(whole.token_ids) + 1
    around = range(min(count, 60))  # the thought, and what ends it
    for cut in sorted({*around[:: some(4, 1)], *range(0, count, some(90, 1)), count - 1}):
        again, _ = played(
            engine, greedy(thinking=15, **more), constraint, output_ids=list(whole.token_ids[:cut])
        )
        assert again.token_ids == whole.token_ids
        assert again.meta["thinking"] == whole.meta["thinking"]
        assert again.usage.forced_tokens == whole.usage.forced_tokens


@pytest.mark.parametrize("constraint", [None, WITH_THOUGHT], ids=["free", "schema"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("jump", ["safe", "off"])
@pytest.mark.parametrize("limit", [9, 15, ("10s",)])
def test_drafts_change_nothing(constraint, temperature, jump, limit):
    class Reciting(Guesses):
        """Guesses what the model would say without a limit."""

        def make_guesser(self, request, known, chance):
            following = engine.loop.runner.model.following

            def guess(text, state):
                from sglang_lite.runtime.drafting.guess import Guess

                return Guess(int(following[text[-1]]), 0)

            return guess

    params = greedy(thinking=limit, temperature=temperature, seed=3, max_tokens=150)
    model = thinker(SENTENCE)
    plain = SteppedEngine(model=model, jump_forward=jump)
    engine = SteppedEngine(model=model, jump_forward=jump, drafter=Reciting(1.0))
    for each in (plain, engine):
        each.loop.clock.now = lambda: 0.0
    whole, _ = played(plain, params, constraint)
    drafted, _ = played(engine, params, constraint)
    assert drafted.token_ids == whole.token_ids
    assert drafted.meta["thinking"] == whole.meta["thinking"]
    if limit != ("10s",):
        assert drafted.meta["spec_accept_token_num"] > 5
        assert whole.meta["thinking"]["ended_by"] == "limit"


def test_a_grammar_that_forbids_the_end_mark_is_not_broken():
    engine = SteppedEngine(model=thinker("abc"))
    found, _ = played(engine, greedy(thinking=3, max_tokens=60), Regex("<think>[abc]{50}!"))
    assert found.text.startswith("<think>abcabc")
    assert len(found.text) == len("<think>") + 51
    assert found.meta["thinking"]["ended_by"] is None


def test_programs_have_it():
    with sgl.Engine.of(thinker(SENTENCE)) as engine:

        @sgl.function
        def program(s):
            s += "x"
            s += sgl.gen(
                "a",
                max_tokens=300,
                temperature=0,
                json_schema=PERSON,
                reasoning="qwen3",
                thinking=15,
            )
            s += "x"
            s += sgl.gen("b", max_tokens=300, temperature=0, reasoning="qwen3", thinking=4)
            s += "x"
            s += sgl.gen("c", max_tokens=200, temperature=0, type=int, reasoning="qwen3")

        state = program.run(backend=engine)
        assert state["a"].startswith('{"steps": "')
        assert state["a_reasoning_content"] == thought(SENTENCE, 15) + "\n"
        assert state["b"] == ANSWER
        assert state["b_reasoning_content"] == thought(SENTENCE, 4) + "\n"
        assert isinstance(state["c"], int)
        assert state.get_meta_info("c")["thinking"]["ended_by"] == "limit"
        assert state.get_meta_info("b")["thinking"] == {
            "tokens": 11,
            "limit": 4,
            "ended_by": "limit",
        }


def test_a_limit_beside_a_constraint_without_reasoning_is_refused():
    with sgl.Engine.of(thinker(SENTENCE)) as engine:

        @sgl.function
        def program(s):
            s += "x" + sgl.gen("a", type=int, thinking=15)

        with pytest.raises(
            ParameterError, match=r"^thinking: the constraint begins with the answer"
        ):
            program.run(backend=engine).sync()


def test_providers_get_a_budget_or_refuse_it_by_name():
    claude, gpt = (
        sgl.Anthropic("claude-opus-4-1", api_key="none"),
        sgl.OpenAI("gpt-5", api_key="none"),
    )

    @sgl.function
    def program(s, thinking):
        s += sgl.user("x") + sgl.assistant(sgl.gen("a", thinking=thinking))

    assert "thinking" in (claude.capabilities.params or ())
    with pytest.raises(sgl.CapabilityError, match=r"thinking.*reasoning_effort="):
        program.run(1024, backend=gpt).sync()
    with pytest.raises(sgl.CapabilityError, match="thinking in seconds or as a share"):
        program.run("30s", backend=claude).sync()
