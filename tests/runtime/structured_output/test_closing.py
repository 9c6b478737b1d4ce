"""A constrained generation is complete at its end, whatever its limit, and nothing changes where the free answer fits."""

import json
import random
import re
import threading
from concurrent.futures import Future
from typing import Any

import pytest

import sglang_lite as sgl
from sglang_lite import Engine
from sglang_lite.constraints.formal import automaton
from sglang_lite.constraints.schema import json_schema, parse_json
from sglang_lite.protocol import Choices, ConstraintError, Delta, Ebnf, Generation, JsonSchema, Regex, SamplingParams
from sglang_lite.runtime.structured_output import fewest_tokens, language_endings, language_states
from tests.constraints.random_regexes import pattern
from tests.constraints.suites import maskbench
from tests.constraints.test_generation import enforced_schemas, random_model
from tests.counts import some

MORE = (0, 1, 8, 64)  # tokens beyond the shortest text
NESTED = {"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 2}
RULES: dict[str, dict[str, Any]] = {
    "different integers": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "minItems": 8},
    "different strings": {"type": "array", "items": {"type": "string"}, "uniqueItems": True, "minItems": 3},
    "different choices": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "uniqueItems": True,
                          "minItems": 3},
    "different digits": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9},
                         "uniqueItems": True, "minItems": 5},
    "several names": {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 3},
    "nested names": {"type": "object", "additionalProperties": {"type": "array", "items": NESTED, "minItems": 1},
                     "minProperties": 2},
    "a required name": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a", "zeta"]},
}  # fmt: skip
PERSON = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"},
          "tags": {"type": "array", "items": {"type": "string"}}}, "required": ["name", "age", "tags"]}  # fmt: skip
PERSON_TEXT = '{"name": "", "age": 0, "tags": []}'
OTHERS = {
    "regex": Regex(r"[a-z]{3,8}( [a-z]{4,8}){1,3}\."),
    "an intersection": Regex(r"(?=.*[0-9])(?=.*[a-z])[0-9a-z]{2,40}"),
    "characters of several bytes": Regex("[é-ü€😀-😂]{2,9}x"),
    "choices": Choices(("a", "abracadabra", "é")),
    "nesting": Ebnf('root ::= "(" root ")" | "[" root root "]" | [0-9]+ ";"'),
}


@pytest.fixture(scope="module")
def engine():
    with Engine.of(random_model()) as engine:
        yield engine


def generations(engine, jobs):
    """Generations of (constraint, max_tokens, seed) at the same time."""
    found, left = {}, threading.Semaphore(0)

    def sink(i):
        def take(event):
            if not isinstance(event, Delta):
                found[i] = event
                left.release()

        return take

    for i, (constraint, limit, seed) in enumerate(jobs):
        one = SamplingParams(max_tokens=limit, seed=seed, temperature=1.0)
        engine.submit("x", one, constraint, sink=sink(i))
    for _ in jobs:
        assert left.acquire(timeout=120)
    return [found[i] for i in range(len(jobs))]


def least(engine, constraint):
    """Number of tokens of a short text that the engine knows, or None."""
    endings = engine.compile_grammar(constraint).endings()
    text = endings.text(endings.start)
    return None if text is None else len(endings.spell(text))


def is_valid(constraint, text):
    if isinstance(constraint, JsonSchema):
        parse_json(constraint, text)
        return True
    if isinstance(constraint, Regex):
        return re.fullmatch(constraint.pattern, text) is not None
    return sgl.grammar.matches(constraint, text)


def check_all_complete(engine, constraints):
    """Returns how many were shortened, and how many there were."""
    jobs = [
        (constraint, tokens + more, seed)
        for seed, constraint in enumerate(constraints)
        if (tokens := least(engine, constraint)) is not None
        for more in MORE
        if 0 < tokens + more < 400
    ]
    assert len(jobs) > len(MORE)
    shortened = 0
    for (constraint, limit, _), answer in zip(jobs, generations(engine, jobs)):
        assert isinstance(answer, Generation), (constraint, limit, answer)
        assert answer.meta["shortened"] in (True, False), (constraint, limit)
        assert is_valid(constraint, answer.text), (constraint, limit, answer.text)
        shortened += answer.meta["shortened"]
    return shortened, len(jobs)


def test_random_schemas(engine):
    shortened, count = check_all_complete(engine, [constraint for _, constraint in enforced_schemas(some(12, 300))])
    assert 0 < shortened < count


def test_schemas_of_others(engine):
    constraints = []
    for _, schema, _ in maskbench(some(60, 2)):
        try:
            constraint = json_schema(schema)
            engine.compile_grammar(constraint)
        except ConstraintError:
            continue
        constraints.append(constraint)
    check_all_complete(engine, constraints)


def test_a_schema_of_very_many_states(engine):
    schema = next(schema for name, schema, _ in maskbench() if name == "Github_medium---o25763")
    check_all_complete(engine, [json_schema(schema)] * 2)


def test_random_patterns(engine):
    constraints = []
    for seed in range(some(12, 200)):
        try:
            constraint = Regex(pattern(random.Random(seed)))
            engine.compile_grammar(constraint)
        except ConstraintError:
            continue
        constraints.append(constraint)
    check_all_complete(engine, constraints)


@pytest.mark.parametrize("name", OTHERS)
def test_other_constraints(engine, name):
    check_all_complete(engine, [OTHERS[name]] * 4)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("order", ["schema", "any"])
@pytest.mark.parametrize("name", RULES)
def test_rules_that_no_grammar_can_express(engine, name, order):
    check_all_complete(engine, [json_schema(RULES[name], order=order)] * 3)


def test_a_limit_below_the_shortest_text_is_refused_with_both_numbers(small_engine):
    constraint = json_schema(PERSON)
    shortest = least(small_engine, constraint)
    for limit in (1, shortest // 2, shortest - 1):
        with pytest.raises(sgl.ParameterError, match=rf"max_tokens.* {limit} tokens .* has {shortest}\."):
            small_engine.complete("x", SamplingParams(max_tokens=limit), constraint)
    answer = small_engine.complete("x", SamplingParams(max_tokens=shortest, seed=1), constraint)
    assert parse_json(constraint, answer.text)["tags"] == []
    assert answer.usage.completion_tokens <= shortest


def test_where_no_completion_is_found_masks_alone_hold(engine, monkeypatch):
    monkeypatch.setattr(language_endings, "_MAX_EXPANDED", 0)
    monkeypatch.setattr(fewest_tokens, "_MAX_STEPS", 10)
    constraint = Regex("".join(f"(?=[a-z]*{letter})" for letter in "abcdefghij") + "[a-z]+")
    cut, whole = generations(engine, [(constraint, 8, 1), (constraint, 400, 1)])
    assert [each.meta["shortened"] for each in (cut, whole)] == ["unknown", "unknown"]
    assert (cut.finish_reason, is_valid(constraint, cut.text)) == ("length", False)
    assert (whole.finish_reason, is_valid(constraint, whole.text)) == ("stop", True)


def test_the_text_of_the_fewest_tokens_may_be_another_one_than_that_of_the_fewest_characters(small_engine):
    answer = small_engine.complete("x", SamplingParams(max_tokens=1, seed=1), Regex("[a-z]{12}"))
    assert re.fullmatch("[a-z]{12}", answer.text)
    assert answer.usage.completion_tokens == 1


def test_a_full_context_closes_as_well(engine):
    constraint = json_schema(PERSON)
    answer = engine.complete("a" * 470, SamplingParams(max_tokens=10_000, seed=1), constraint)
    assert is_valid(constraint, answer.text)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tokens", ["bytes", "the default model's"])
def test_where_the_free_answer_fits_no_token_changes(engine, small_engine, tokens):
    """Not even in a limit of its own length, but for rules that no grammar expresses, which need a token more (1 of 500
    with bytes). The tokenizer of the first one splits every text into bytes."""
    asked = engine if tokens == "bytes" else small_engine
    ruled = list(map(json_schema, RULES.values()))
    constraints = [json_schema(PERSON), *OTHERS.values(), *ruled]
    jobs = [(constraint, 60, seed) for seed, constraint in enumerate(constraints * some(2, 40))]
    again = []
    for (constraint, _, seed), answer in zip(jobs, generations(asked, jobs)):
        if answer.finish_reason == "stop" and not answer.meta["shortened"]:
            tokens = answer.usage.completion_tokens - isinstance(answer.matched, int)
            again += [
                (answer.token_ids[:tokens], (constraint, tokens + more, seed)) for more in (constraint in ruled, 2, 8)
            ]
    assert len(again) > 20
    for (before, job), answer in zip(again, generations(asked, [job for _, job in again])):
        assert (answer.token_ids[: len(before)], answer.meta["shortened"]) == (before, False), job


def test_a_token_that_opens_much_is_seen_in_time(engine):
    """Even where many tokens were left before it."""
    names = [f"name_{i}" for i in range(14)]
    members: dict[str, Any] = {name: {"type": "boolean"} for name in names}
    item = {"type": "object", "properties": members, "required": names}
    tree = {"anyOf": [{"type": "null"}, {**item, "properties": {**members, "name_0": {"$ref": "#"}}}]}
    for schema in ({"type": "array", "items": item}, tree):
        constraint = json_schema(schema)
        limits = range(least(engine, constraint) + 100, 300, 12)
        answers = generations(engine, [(constraint, limit, limit + 1000) for limit in limits])
        assert all(is_valid(constraint, answer.text) for answer in answers)
        assert {answer.meta["shortened"] for answer in answers} == {True, False}


@pytest.mark.parametrize(
    ("where", "limit", "value"), [(language_states, "_MAX_STEPS", 5), (automaton, "MAX_TRANSITIONS", 2_000)]
)
def test_a_grammar_that_has_seen_many_texts_still_closes(engine, monkeypatch, where, limit, value):
    monkeypatch.setattr(where, limit, value)  # transitions that are kept for one language
    constraint = json_schema({**PERSON, "title": f"of its own states, {limit}"})
    answers = generations(engine, [(constraint, 40, seed) for seed in range(16)])
    assert all(is_valid(constraint, answer.text) for answer in answers)
    assert {answer.meta["shortened"] for answer in answers} <= {True, False}


def test_what_is_refused_is_never_streamed(engine):
    constraint, events, ended = json_schema(PERSON), [], threading.Event()

    def sink(event):
        events.append(event)
        if not isinstance(event, Delta):
            ended.set()

    engine.submit("x", SamplingParams(max_tokens=45, seed=0, temperature=1.0), constraint, sink=sink, stream=True)
    assert ended.wait(60)
    *deltas, answer = events
    assert answer.meta["shortened"] is True
    assert "".join(delta.text for delta in deltas) == answer.text
    assert sum((delta.token_ids for delta in deltas), ()) == answer.token_ids
    assert is_valid(constraint, answer.text)


def test_log_probabilities_are_those_of_the_tokens_that_stay(engine):
    params = SamplingParams(max_tokens=45, seed=0, temperature=1.0, return_logprob=True)
    answer = engine.complete("x", params, json_schema(PERSON))
    assert answer.meta["shortened"] is True
    assert [each.token_id for each in answer.output_logprobs] == list(answer.token_ids)


def test_a_batch_draws_what_a_row_alone_draws(engine):
    constraint = json_schema(PERSON)
    jobs = [(constraint, 40 + i % 7, i) for i in range(24)]
    together = generations(engine, jobs)
    alone = [generations(engine, [job])[0] for job in jobs]
    assert [each.token_ids for each in together] == [each.token_ids for each in alone]


@pytest.mark.parametrize("settings", [{"jump_forward": "off"}, {"overlap": False}, {"max_total_tokens": 256}], ids=str)
def test_other_ways_of_running_close_as_well(settings):
    """The last one retracts requests."""
    constraint = json_schema(PERSON)
    with Engine.of(random_model(), **settings) as engine:
        answers = generations(engine, [(constraint, 36 + i, i) for i in range(24)])
    assert all(is_valid(constraint, answer.text) for answer in answers)


def test_an_output_that_is_continued_closes_as_it_would_have(engine):
    constraint, params = json_schema(PERSON), SamplingParams(max_tokens=45, seed=3, temperature=1.0)
    whole = engine.complete("x", params, constraint)
    for cut in range(1, len(whole.token_ids), 7):
        done = Future()
        engine.submit("x", params, constraint, sink=done.set_result, output_ids=whole.token_ids[:cut])
        assert done.result(timeout=60).token_ids == whole.token_ids


def test_a_generation_inside_a_grammar_completes_it_if_it_can(small_engine):
    @sgl.function
    def program(s, limit):
        s += "x"
        with s.grammar(json_schema(PERSON)):
            s += '{"name": "' + sgl.gen("rest", max_tokens=limit)

    state = program.run(40, backend=small_engine, temperature=1.0, seed=1)
    assert json.loads(state.text()[1:])["name"] is not None


PARTS = {
    "a longer end": (r"id-[0-9]{4}-(red|green)\.( more)*", "id-", r"[a-z0-9-]{1,60}\."),
    "a choice of ends": (r'"(yes, [a-z]{5,}|no)"', '"', r"[a-z, ]+"),
    "a shorter whole": (r"[ab]{3,9}c*", "", r"[abc]{4,30}"),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_closes_with_what_the_whole_allows(engine, name):
    whole, begin, part = PARTS[name]

    @sgl.function
    def program(s, limit):
        s += "x"
        with s.grammar(Regex(whole)):
            s += begin + sgl.gen("part", constraint=Regex(part), max_tokens=limit)
            with s.checkpoint():
                s += sgl.gen("rest", max_tokens=30)

    for limit in range(10, 40, 3):
        state = program.run(limit, backend=engine, temperature=1.0, seed=limit)
        assert re.fullmatch(part, state["part"]), state["part"]
        assert re.fullmatch(whole, begin + state["part"] + state["rest"])
        assert state.get_meta_info("part")["shortened"] in (True, False)


def test_a_stop_inside_a_grammar_is_free_until_it_comes(small_engine):
    """The text after the stop is somebody else's to complete."""

    @sgl.function
    def program(s, limit):
        s += "x"
        with s.grammar(json_schema(PERSON)):
            s += '{"name": "' + sgl.gen("name", max_tokens=limit, stop='"') + '", "age": 1, "tags": []}'

    names = [program.run(limit, backend=small_engine, temperature=0)["name"] for limit in (12, 200)]
    assert names[1].startswith(names[0])
