"""A limit cuts a constrained output: what is left is unchanged, and marked.

The oracle is the output without a limit: as draws depend only on logits, mask, seed and position,
one with a limit begins with its tokens.
"""

import json
import threading
from concurrent.futures import Future

import pytest

import sglang_lite as sgl
from sglang_lite import Engine
from sglang_lite.constraints.schema import json_schema, parse_json
from sglang_lite.program.nodes import Gen
from sglang_lite.protocol import (
    Choices,
    Delta,
    Ebnf,
    Generation,
    Number,
    ParameterError,
    Regex,
    SamplingParams,
)
from tests.constraints.test_generation import enforced_schemas, random_model
from tests.constraints.test_unfinished_json import scalars
from tests.counts import some
from tests.runtime.scripted import FreeDrafts

UNLIMITED = 400
PERSON = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"},
          "tags": {"type": "array", "items": {"type": "string"}}}, "required": ["name", "tags"]}  # fmt: skip
OPEN = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"type": "string"}}},
    "required": ["a"],
}
OTHERS = {
    "regex": Regex(r"[a-z]{3,80}( [a-z]{4,8}){1,30}\."),
    "two branches": Regex("[a-z]{200}|[0-9]{150}"),
    "characters of several bytes": Regex("[é-ü€😀-😂]{20,90}x"),
    "choices": Choices(("a" * 60, "abracadabra" * 8, "é" * 50)),
    "nesting": Ebnf('root ::= "(" root ")" | "[" root root "]" | [0-9]+ ";"'),
}


@pytest.fixture(scope="module")
def engine():
    with Engine.of(random_model()) as engine:
        yield engine


@pytest.fixture(scope="module")
def seeds(engine):
    """Seeds of which the output without a limit is long."""
    answers = generations(engine, [(json_schema(OPEN), UNLIMITED, seed) for seed in range(80)])
    found = [seed for seed, answer in enumerate(answers) if answer.usage.completion_tokens > 120]
    assert len(found) >= 4
    return found


def generations(engine, jobs, **options):
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
        engine.submit("x", one, constraint, sink=sink(i), **options)
    for _ in jobs:
        assert left.acquire(timeout=120)
    return [found[i] for i in range(len(jobs))]


def check_cut(constraint, limit, cut, whole):
    """Checks an output with a limit against the one without. Returns "whole", "closed" or "as cut"."""
    assert isinstance(cut, Generation), (limit, cut)
    text = whole.text
    if limit >= whole.usage.completion_tokens:
        assert (cut.text, cut.finish_reason, cut.meta["shortened"]) == (
            text,
            whole.finish_reason,
            [],
        )
        return "whole"
    assert cut.finish_reason == "length"
    assert (cut.token_ids, cut.usage.completion_tokens) == (whole.token_ids[:limit], limit)
    (pointer,) = cut.meta["shortened"]
    if pointer == "":
        assert text.startswith(cut.text)
        return "as cut"
    kept = cut.text.rstrip("]}")
    assert text.startswith(kept)
    parse_json(constraint, cut.text)
    if whole.finish_reason == "stop":
        values = scalars(json.loads(text))
        assert all(values[at] == each for at, each in scalars(json.loads(cut.text)).items())
        assert pointer not in scalars(json.loads(cut.text))
    return "closed"


def check_all(engine, constraints, limits):
    """Checks outputs of all constraints with all limits. Returns how they ended."""
    wholes = generations(
        engine, [(constraint, UNLIMITED, seed) for seed, constraint in enumerate(constraints)]
    )
    jobs = [
        (constraint, limit, seed) for seed, constraint in enumerate(constraints) for limit in limits
    ]
    kinds = []
    for (constraint, limit, seed), cut in zip(jobs, generations(engine, jobs)):
        kinds.append(check_cut(constraint, limit, cut, wholes[seed]))
    return kinds


def test_random_schemas(engine):
    kinds = check_all(
        engine, [constraint for _, constraint in enforced_schemas(some(16, 300))], (8, 30, 90)
    )
    assert {"whole", "closed", "as cut"} == set(kinds)


@pytest.mark.parametrize("schema", [PERSON, OPEN], ids=["a person", "a list"])
def test_all_limits_of_a_schema(engine, schema):
    kinds = check_all(engine, [json_schema(schema)] * 18, range(1, 120, 7))
    assert kinds.count("closed") > 20


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_json_is_as_it_was_cut(engine, name):
    assert "closed" not in check_all(engine, [OTHERS[name]] * 3, (2, 20, 50))


def test_a_number_that_a_limit_ends_is_cut(engine):
    """Its next digit might have come."""
    for constraint in (Number("integer"), json_schema({"type": "integer"}), Regex("[0-9]+")):
        for seed in range(4):
            whole, cut = generations(engine, [(constraint, 60, seed), (constraint, 1, seed)])
            ended = whole.usage.completion_tokens == 1  # by the grammar
            assert (cut.finish_reason, cut.meta["shortened"]) == (
                ("stop", []) if ended else ("length", [""])
            )
            assert whole.text.startswith(cut.text)


def test_a_number_that_ends_with_the_limit_is_whole(small_engine):
    params = SamplingParams(max_tokens=60, temperature=0)
    whole = small_engine.complete("2 + 2 =", params, Number("integer"))
    count = whole.usage.completion_tokens
    for limit, end in ((count, ("stop", [])), (count - 1, ("length", [""]))):
        cut = small_engine.complete(
            "2 + 2 =", SamplingParams(max_tokens=limit, temperature=0), Number("integer")
        )
        assert (cut.finish_reason, cut.meta["shortened"]) == end


def test_a_limit_below_the_shortest_text_is_reported(small_engine):
    constraint = json_schema(PERSON)
    answer = small_engine.complete("x", SamplingParams(max_tokens=4), constraint)
    assert (answer.finish_reason, answer.meta["shortened"]) == ("length", [""])
    assert answer.meta["fewest_tokens"] > 4
    enough = small_engine.complete(
        "x", SamplingParams(max_tokens=answer.meta["fewest_tokens"]), constraint
    )
    assert "fewest_tokens" not in enough.meta


def test_a_full_context_cuts_as_well(engine, seeds):
    limit = SamplingParams(max_tokens=10_000, seed=seeds[0], temperature=1.0)
    whole = engine.complete("x", limit, json_schema(OPEN))
    with Engine.of(random_model(), context_length=60) as small:
        cut = small.complete("x", limit, json_schema(OPEN))
    assert check_cut(json_schema(OPEN), cut.usage.completion_tokens, cut, whole) == "closed"


@pytest.mark.parametrize("schema", [PERSON, OPEN], ids=["a person", "a list"])
def test_streams_are_what_whole_answers_are(engine, schema):
    constraint = json_schema(schema)
    for limit in range(10, 240, 16):
        deltas, done = [], Future()

        def sink(event, deltas=deltas, done=done):
            deltas.append(event) if isinstance(event, Delta) else done.set_result(event)

        params = SamplingParams(max_tokens=limit, seed=limit, temperature=1.0, return_logprob=True)
        engine.submit("x", params, constraint, sink=sink, stream=True)
        answer = done.result(timeout=60)
        assert answer.text == engine.complete("x", params, constraint).text
        assert "".join(delta.text for delta in deltas) == answer.text
        assert sum((delta.token_ids for delta in deltas), ()) == answer.token_ids
        # A token may have been sent whose text, such as a comma, was held back and then cut off.
        sent = sum((delta.logprobs for delta in deltas), ())
        assert sent[: len(answer.output_logprobs)] == answer.output_logprobs


def test_finished_values_are_streamed_before_the_limit(engine, seeds):
    """Only what may be left out is held back."""
    pieces, done = [], Future()

    def sink(event):
        pieces.append(event.text) if isinstance(event, Delta) else done.set_result(event)

    params = SamplingParams(max_tokens=110, seed=seeds[0], temperature=1.0)
    engine.submit("x", params, json_schema(OPEN), sink=sink, stream=True)
    assert done.result(timeout=60).finish_reason == "length"
    assert len(pieces) > 5


def test_log_probabilities_are_those_of_the_tokens_that_stay(engine):
    answers = [
        engine.complete(
            "x",
            SamplingParams(
                max_tokens=60, seed=seed, temperature=1.0, return_logprob=True, confidence=True
            ),
            json_schema(OPEN),
        )
        for seed in range(8)
    ]
    answer = min(answers, key=lambda each: len(each.output_logprobs))
    count = len(answer.output_logprobs)
    assert count < 60
    assert [each.token_id for each in answer.output_logprobs] == list(answer.token_ids[:count])
    assert len(answer.scores.logprobs) == count
    assert (
        answer.scores.ends[-1] == len(answer.text.rstrip("]}"))
        or answer.text[answer.scores.ends[-1] - 1] in "]}"
    )


def test_a_batch_draws_what_a_row_alone_draws(engine):
    jobs = [(json_schema(PERSON), 40 + i % 7, i) for i in range(24)]
    together = generations(engine, jobs)
    alone = [generations(engine, [job])[0] for job in jobs]
    assert [(each.token_ids, each.text) for each in together] == [
        (each.token_ids, each.text) for each in alone
    ]


@pytest.mark.parametrize("settings", [
    {"jump_forward": "off"}, {"overlap": False}, {"page_size": 4, "step_tokens": 7}, {"speculation": "again", "draft_tokens": 4},
    {"max_total_tokens": 256}, {"max_total_tokens": 256, "enable_hierarchical_cache": True},
    {"max_total_tokens": 256, "speculation": "again", "draft_tokens": 4},
], ids=str)  # fmt: skip
def test_other_ways_of_running_cut_the_same(engine, settings):
    """The last three retract requests."""
    jobs = [(json_schema(PERSON), 36 + i % 12, i) for i in range(24)]
    expected = [
        (each.text, each.finish_reason, each.shortened) for each in generations(engine, jobs)
    ]
    with Engine.of(random_model(), **settings) as other:
        if "speculation" in settings:
            other.core.loop.scheduler.drafts.drafting.cost = FreeDrafts()
        for _ in range(2):  # so that the second time drafts the first's answers
            found = generations(other, jobs)
            assert [(each.text, each.finish_reason, each.shortened) for each in found] == expected
        if "speculation" in settings:
            assert sum(each.meta.get("spec_accept_token_num", 0) for each in found) > 50


def test_an_output_that_is_continued_is_cut_as_it_would_have_been(engine, seeds):
    constraint, params = (
        json_schema(OPEN),
        SamplingParams(max_tokens=45, seed=seeds[0], temperature=1.0),
    )
    whole = engine.complete("x", params, constraint)
    for cut in range(1, len(whole.token_ids), 7):
        done = Future()
        engine.submit(
            "x", params, constraint, sink=done.set_result, output_ids=whole.token_ids[:cut]
        )
        found = done.result(timeout=60)
        assert (found.token_ids, found.text) == (whole.token_ids, whole.text)


def test_a_program_goes_on_behind_the_closed_text(engine, seeds):
    @sgl.function
    def program(s, seed):
        s += "x" + sgl.gen("list", json_schema=OPEN, max_tokens=50, shortened="keep", seed=seed)
        s += " then" + sgl.gen("next", max_tokens=8, temperature=0)

    for seed in seeds:
        state = program.run(seed, backend=engine, temperature=1.0, return_prompt_token_ids=True)
        assert state.get_meta_info("list")["shortened"] != []
        assert state.text() == "x" + state["list"] + " then" + state["next"]
        *_, goes_on = state.trajectory().sequences
        assert engine.tokenizer.decode(goes_on.ids) == state.text()


def test_a_generation_inside_a_grammar_closes_it_if_it_can(engine, seeds):
    @sgl.function
    def program(s, seed):
        s += "x"
        with s.grammar(json_schema(OPEN)):
            s += '{"a": ["b"' + sgl.gen("rest", max_tokens=50, seed=seed)

    for seed in seeds:
        state = program.run(seed, backend=engine, temperature=1.0, shortened="keep")
        parse_json(json_schema(OPEN), state.text()[1:])


# --------------------------------------------------------------------------------------------- time


@pytest.fixture(params=[{}, {"jump_forward": "off"}, {"overlap": False}], ids=str)
def timed(request):
    """An engine on whose clock each step takes a second."""
    with Engine.of(random_model(), **request.param) as engine:
        loop = engine.core.loop
        loop.clock.now = lambda: float(loop.steps)
        yield engine


def answer(engine, constraint, timeout, **params):
    """A generation, and the number of steps until its end."""
    done, before = Future(), engine.core.loop.steps
    settings = SamplingParams(**{"max_tokens": UNLIMITED, "temperature": 1.0, **params})
    engine.submit("x", settings, constraint, sink=done.set_result, timeout=timeout)
    return done.result(timeout=60), engine.core.loop.steps - before


def test_a_timeout_cuts_like_a_limit(timed, seeds):
    for seed in seeds[:4]:
        free, _ = answer(timed, json_schema(OPEN), None, seed=seed)
        found, took = answer(timed, json_schema(OPEN), 60, seed=seed)
        assert took <= 60
        assert check_cut(json_schema(OPEN), found.usage.completion_tokens, found, free) == "closed"


def test_time_that_suffices_changes_nothing(timed):
    for seed in range(4):
        free, steps = answer(timed, json_schema(PERSON), None, seed=seed, max_tokens=100)
        found, _ = answer(timed, json_schema(PERSON), 10 * steps + 1000, seed=seed, max_tokens=100)
        assert (found.token_ids, found.text) == (free.token_ids, free.text)


def test_drafted_tokens_are_cut_in_time_as_well(seeds):
    with Engine.of(random_model(), speculation="again", draft_tokens=1) as engine:
        loop = engine.core.loop
        loop.clock.now, loop.scheduler.drafts.drafting.cost = (
            lambda: float(loop.steps),
            FreeDrafts(),
        )
        # which the second one drafts
        free, _ = answer(engine, json_schema(OPEN), None, seed=seeds[0])
        found, took = answer(engine, json_schema(OPEN), 60, seed=seeds[0])
        assert check_cut(json_schema(OPEN), found.usage.completion_tokens, found, free) == "closed"
        assert took <= 60
        assert found.meta["spec_accept_token_num"] > 5


def test_a_node_of_a_program_is_cut_in_time(timed, seeds):
    @sgl.function
    def program(s, seed):
        s += "x" + sgl.gen(
            "list", json_schema=OPEN, max_tokens=UNLIMITED, temperature=1.0, timeout=60, seed=seed
        )

    for seed in seeds[:3]:
        state = program.run(seed, backend=timed)
        parse_json(json_schema(OPEN), state["list"])
        assert timed.core.loop.steps < 400


def test_what_does_not_close_takes_no_notice_of_time(timed):
    for constraint in (None, Number("integer"), OTHERS["regex"]):
        free, _ = answer(timed, constraint, None, seed=1, max_tokens=50)
        found, _ = answer(timed, constraint, 10, seed=1, max_tokens=50)
        assert found.token_ids == free.token_ids


def test_a_timeout_that_is_no_number_is_refused():
    with pytest.raises(ParameterError, match="timeout"):
        Gen("a", timeout="3")  # type: ignore[arg-type]
