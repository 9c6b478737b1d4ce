"""What each drafter guesses, and when a guess pays."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import sglang_lite as sgl
from sglang_lite.constraints.schema import json_schema
from sglang_lite.program.nodes import Fork, Gen, Program, Text
from sglang_lite.protocol import Lark, SamplingParams
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.drafting.contexts import ContextTable, make_node_drafter
from sglang_lite.runtime.drafting.drafting import StepCost
from sglang_lite.runtime.drafting.prompt import PromptDrafter
from sglang_lite.runtime.requests.output_builder import DraftProgress
from tests.counts import some
from tests.runtime.scripted import FreeDrafts, SteppedEngine, ended, loaded
from tests.runtime.structured_output.test_distribution import byte_model


def engine_for(speculation="auto", **config):
    config = {
        "max_running": 4,
        "max_total_tokens": 640,
        "context_length": 160,
        "speculation": speculation,
    } | config
    return SteppedEngine(**config)


def run(engine, prompts, namespace="", **values):
    """Answers of prompts one after another, and the steps that they take."""
    params = SamplingParams(**{"temperature": 0, "max_tokens": 40, "ignore_eos": True, **values})
    before, found = engine.loop.steps, []
    for prompt in prompts:
        events = engine.start(prompt, params, namespace=namespace)[1]
        engine.drain()
        found.append(ended(events))
    return found, engine.loop.steps - before


PROMPTS = [[5, 6, 7 + i] for i in range(4)]


@pytest.mark.parametrize("drafter", ["again", "node"])
def test_the_same_prompts_again_take_few_steps(drafter):
    engine = engine_for(drafter)
    first, many = run(engine, PROMPTS)
    again, few = run(engine, PROMPTS)
    assert [each.token_ids for each in again] == [each.token_ids for each in first]
    assert few < 0.5 * many
    assert engine.scheduler.drafts.drafting.stats()[drafter]["accepted"] > 40


def test_what_does_not_fit_the_capacity_is_forgotten():
    engine = engine_for("again", draft_capacity=80)
    _, many = run(engine, PROMPTS)
    assert run(engine, PROMPTS[-1:])[1] < 0.5 * many / len(PROMPTS)
    assert run(engine, PROMPTS[:1])[1] > 0.9 * many / len(PROMPTS)


def test_a_context_is_as_long_as_the_setting_says():
    """Answers that differ in one token only, ten before the one that is guessed."""
    request: Any = SimpleNamespace(
        output=SimpleNamespace(draft=DraftProgress(), origin="node"),
        space=SimpleNamespace(namespace=""),
    )
    text = [20, *range(9), 30], [21, *range(9), 31], [21, *range(9), 31]
    guessed = []
    for longest in (8, 16):
        drafter = make_node_drafter(EngineConfig(draft_context=longest))
        for each in text:
            drafter.learn_tokens(request, [*range(40, 46), *each], 16)
        guesser = drafter.make_guesser(
            request, np.zeros(0, dtype=np.int32), lambda evidence: 1 / (1 + evidence)
        )
        guessed.append(guesser([*range(40, 46), *text[0][:-1]], None).token)
    assert guessed == [31, 30]


def test_a_text_is_guessed_in_its_namespace_alone():
    engine = engine_for("again,node")
    first, many = run(engine, PROMPTS, namespace="one")
    other, as_many = run(engine, PROMPTS, namespace="other")
    assert [each.token_ids for each in other] == [each.token_ids for each in first]
    fresh = engine_for("again,node")
    assert run(fresh, PROMPTS, namespace="other")[1] == as_many == many


def test_samples_of_one_prompt_learn_from_each_other():
    """Four equal answers: one is ahead, as the others begin a step later."""
    engine = engine_for("again", step_tokens=8)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    leader = engine.start(PROMPTS[0], params)[1]
    for _ in range(10):
        engine.step()
    followers = [engine.start(PROMPTS[0], params)[1] for _ in range(3)]
    engine.drain()
    assert len({ended(events).token_ids for events in (leader, *followers)}) == 1
    assert engine.loop.steps < 44


def test_a_request_can_go_without():
    engine = engine_for()
    run(engine, PROMPTS)
    (answer,), steps = run(engine, PROMPTS[:1], speculation=False)
    assert steps == 40
    assert not any(name.startswith("spec_") for name in answer.meta)


def test_a_result_tells_its_drafts():
    engine = engine_for()
    run(engine, PROMPTS)
    (answer,), steps = run(engine, PROMPTS[:1])
    meta = answer.meta
    assert 0 < meta["spec_accept_token_num"] <= meta["spec_draft_token_num"]
    assert meta["spec_verify_ct"] <= steps == 40 - meta["spec_accept_token_num"]
    assert meta["spec_accept_rate"] == meta["spec_accept_token_num"] / meta["spec_draft_token_num"]
    assert meta["spec_accept_length"] == 1 + meta["spec_accept_token_num"] / meta["spec_verify_ct"]


@sgl.function
def story(s):
    s += "once there was " + sgl.gen("start", max_tokens=12, temperature=0)
    branches = s.fork(3)
    for branch in branches:
        branch += " and " + sgl.gen("part", max_tokens=12, temperature=0)
    s += " so " + sgl.gen("end", max_tokens=12, temperature=0)
    s["parts"] = [branch["part"] for branch in branches]


def test_a_program_with_a_fork_that_runs_again_is_guessed_and_unchanged():
    found = []
    for speculation in ("off", "auto"):
        with sgl.Engine.of(loaded(), speculation=speculation) as engine:
            drafts = engine.core.scheduler.drafts
            if drafts is not None:
                drafts.drafting.cost = FreeDrafts()
            state = story.run(backend=engine)
            states = [
                state,
                story.run(backend=engine),
                state.rerun("start"),
                state.rerun("start", "a dog"),
            ]
            found.append([[each[name] for name in ("start", "parts", "end")] for each in states])
    assert found[0] == found[1]
    assert sum(each.accepted for each in drafts.drafting.counts.values()) > 20


def test_other_branches_of_a_program_are_guessed_from():
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    program = Program(
        (Fork(tuple((Text("abc"), Gen("each", params)) for _ in range(2))), Gen("end", params))
    )
    engine = engine_for("node")
    for _ in range(2):
        events: list = []
        engine.run_program("xyz", program, sink=events.append)
        before = engine.loop.steps
        engine.drain()
    assert engine.loop.steps - before < 25
    assert engine.scheduler.drafts.drafting.stats()["node"]["accepted"] > 20


def constrained(constraint, *, drafts, **values):
    """The answer under a constraint, and its steps."""
    engine = engine_for("off", model=byte_model())
    engine.scheduler.drafts.drafting.cost = FreeDrafts()
    engine.compile_grammar(constraint)
    events = engine.start(
        [5, 6, 7], SamplingParams(speculation=drafts, **values), constraint=constraint
    )[1]
    engine.drain()
    return ended(events), engine.loop.steps


def test_what_came_in_a_state_of_a_grammar_is_guessed_behind_other_texts_of_its_namespace():
    fields = {
        "name": {"type": "string", "maxLength": 4},
        "size": {"enum": ["small", "big"]},
        "sold": {"type": "boolean"},
    }
    # all are optional
    schema = json_schema({"type": "object", "properties": fields, "additionalProperties": False})

    def answers(engine, seeds, namespace=""):
        """Answers one after another, and the numbers of guesses and of steps."""
        counts, steps, found = engine.scheduler.drafts.drafting.counts, engine.loop.steps, []
        before = {name: each.drafted for name, each in counts.items()}
        for seed in seeds:
            params = SamplingParams(seed=seed, max_tokens=60)
            events = engine.start([5, 6, 7], params, constraint=schema, namespace=namespace)[1]
            engine.drain()
            found.append(ended(events).token_ids)
        return (
            found,
            {name: each.drafted - before[name] for name, each in counts.items()},
            engine.loop.steps - steps,
        )

    off, on = (engine_for(drafter, model=byte_model()) for drafter in ("off", "state"))
    for engine in (off, on):
        engine.compile_grammar(schema)
        engine.scheduler.drafts.drafting.cost = FreeDrafts()
    (plain, _, many), (drafted, _, few) = (answers(engine, range(12)) for engine in (off, on))
    assert drafted == plain
    assert on.scheduler.drafts.drafting.counts["state"].accepted > 10
    assert few < many - 10
    unknown, known = answers(on, [20, 21], "other"), answers(on, [20, 21])
    assert unknown[0] == known[0]
    assert unknown[1]["state"] < known[1]["state"]


def test_a_quote_takes_few_steps():
    source = "the cat sat on the mat, and a dog lay by the door. who else was there?"
    quote = Lark('start: %regex {"substring_chars": "' + source + '"}')
    few = many = 0
    for seed in range(some(2, 6)):
        values = {"seed": seed, "temperature": 3, "min_tokens": 40, "max_tokens": 60}
        answer, steps = constrained(quote, drafts=True, **values)
        plain, each = constrained(quote, drafts=False, **values)
        assert answer.text == plain.text
        assert answer.text in source
        few, many = few + steps, many + each
    assert few < 0.6 * many


def test_scoring_what_is_forced_takes_few_steps():
    names = ["first name", "last name", "favourite colour"]
    schema = json_schema({
        "type": "object", "properties": {name: {"enum": ["red", "green"]} for name in names}, "required": names,
        "additionalProperties": False,
    })  # fmt: skip
    answer, few = constrained(schema, drafts=True, confidence=True, max_tokens=120, seed=3)
    plain, many = constrained(schema, drafts=False, confidence=True, max_tokens=120, seed=3)
    assert (answer.token_ids, answer.scores) == (plain.token_ids, plain.scores)
    assert many >= len(plain.token_ids) > 60
    assert few < 0.4 * many


# -------------------------------------------------------------------------------------------- parts


def longest_match(known, most):
    """Token after the longest earlier match of the last tokens, up to `most`. Of equally long ones
    it is the latest of those behind which most tokens are among the last 16 of the text.
    """
    best = (0, 0, 0, None)
    for end in range(1, len(known)):
        length = 0
        while length < min(most, end) and known[end - 1 - length] == known[-1 - length]:
            length += 1
        around = sum(known[max(end - distance, 0)] in known[-16:] for distance in range(1, 17))
        if length and (length, around, end) >= best[:3]:
            best = length, around, end, known[end]
    return best[3]


def copying(known, most=12):
    """Guesser of a text."""
    request: Any = None  # which only other drafters look at
    drafter = PromptDrafter(EngineConfig(draft_context=most))
    return drafter.make_guesser(request, np.array(known, dtype=np.int32), lambda evidence: 0.5)


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_match_is_copied(seed):
    dice = random.Random(seed)
    known = [dice.randrange(3) for _ in range(dice.randrange(2, 60))]
    most = dice.choice((1, 2, 3, 12, 16))
    guess = copying(known, most)(known[-16:], None)
    assert (guess and guess.token) == longest_match(known, most)


def test_a_copy_goes_on_behind_a_change():
    """The comma comes twice; the text before it is that of the first place, but for its middle."""
    source = [1, 2, 3, 4, 5, 9, 6, 7, 8, 20, 21, 22, 23, 9, 24]
    assert (
        copying([*source, 1, 2, 30, 31, 32, 4, 5, 33, 9])(
            [1, 2, 30, 31, 32, 4, 5, 33, 9], None
        ).token
        == 6
    )


def test_a_copy_goes_on_as_it_began():
    known = [1, 2, 3, 4, 5, 6, 9, 2, 3]
    guesser, text = copying(known), [9, 2, 3]
    for expected in (4, 5, 6, 9):
        guess = guesser(text, None)
        assert guess.token == expected
        text.append(guess.token)


def test_the_commonest_token_follows_and_memory_is_bounded():
    table = ContextTable(entries=1000, lengths=(8, 5, 3, 2, 1))
    for last in (7, 8, 8, 7, 8):
        table.record_text(1, [4, 5, 6, last], 3)
    assert table.likely_next_token(1, [5, 6])[0] == 8
    assert table.likely_next_token(2, [5, 6]) == (0, 0)
    dice = random.Random(0)
    for _ in range(50):
        table.record_text(1, [dice.randrange(10**6) for _ in range(100)], 0)
    assert len(table) <= 1000


def test_a_guess_has_to_pay_for_its_token():
    cost = StepCost()
    for tokens in (1, 5, 9, 1, 5, 9, 40):
        cost.record_step_cost(tokens, 0.010 + 0.001 * tokens)
    assert cost.next_worthwhile_size(1, 1.0, likely=0.092, best=1 / 0.011) == 2
    assert not cost.next_worthwhile_size(1, 1.0, likely=0.090, best=1 / 0.011)
    assert cost.next_worthwhile_size(64, 64.0, likely=0.87, best=64 / 0.074) == 65
    assert not cost.next_worthwhile_size(64, 64.0, likely=0.86, best=64 / 0.074)
    free = StepCost()
    for tokens in (1, 5, 9):
        free.record_step_cost(tokens, 0.01)
    assert free.next_worthwhile_size(9, 9.0, likely=1e-6, best=9 / 0.01)


def test_a_drafter_that_is_wrong_is_not_asked_for_long():
    """Random texts: hardly any guess is right, so once that is known fewer are computed than tokens
    written, not eight times as many.
    """
    drafted, written = 0, 0
    for seed in range(4):
        engine = engine_for()
        dice = random.Random(seed)
        prompts = [[dice.randrange(1, 31) for _ in range(40)] for _ in range(12)]
        # With one seed, texts would be alike where their tokens have the same position.
        answers = [
            run(engine, [prompt], temperature=1.0, seed=100 * seed + i)[0][0]
            for i, prompt in enumerate(prompts)
        ]
        drafted += sum(
            each["drafted"] for each in engine.scheduler.drafts.drafting.stats().values()
        )
        written += sum(len(each.token_ids) for each in answers)
    assert drafted < written


def test_the_average_length_is_told():
    engine = engine_for()
    run(engine, PROMPTS)
    before = engine.core.scheduler.drafts.stats()["avg_spec_accept_length"]
    (answer,), _ = run(engine, PROMPTS[:1])
    assert before < engine.core.scheduler.drafts.stats()["avg_spec_accept_length"]
    assert answer.meta["spec_accept_length"] > 5


def test_a_deterministic_engine_gives_the_same_bits(small_file):
    """Real attention and products: the logits of a drafted position are those of a step of its own."""
    found = []
    for speculation in ("off", "auto"):
        with sgl.Engine(
            small_file,
            dtype="bfloat16",
            deterministic=True,
            in_process=True,
            speculation=speculation,
        ) as engine:
            if engine.core.scheduler.drafts is not None:  # whatever steps take on a busy machine
                engine.core.scheduler.drafts.drafting.cost = FreeDrafts()
            told = []
            for seed, temperature in enumerate((0, 1.5)):
                params = SamplingParams(
                    temperature=temperature, seed=seed, max_tokens=16, return_logprob=True
                )
                for _ in range(2):  # the second time most of it is guessed
                    answer = engine.complete("one two one two one", params)
                    told.append((answer.token_ids, answer.output_logprobs, answer.finish_reason))
            drafters = engine.stats()["drafters"]
        found.append(told)
    assert found[0] == found[1]
    assert sum(each["accepted"] for each in drafters.values()) > 15
