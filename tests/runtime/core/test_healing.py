"""Healed prompts: the text that follows is the model's own, by brute force over the spellings of the
prompt's end.
"""

import collections
import re
import threading

import numpy as np
import pytest

import sglang_lite as sgl
from sglang_lite.process.service_threads import this_thread
from sglang_lite.protocol import (
    Choices,
    Delta,
    Generation,
    Regex,
    RequestAbortedError,
    SamplingParams,
)
from sglang_lite.runtime.core import healing
from tests.chi_square import chi_square_fits
from tests.counts import some
from tests.runtime.core.test_exact_draws import TOKENS, loaded, logits_of, run_all
from tests.runtime.scripted import SteppedEngine, hashes

PROMPT = "4,a, no"  # its last word is " no", which several tokens can begin
KEPT = [TOKENS.index(char) for char in "4,a,"]
END = " no"


def healed(**options):
    return SamplingParams(heal=True, **options)


@pytest.fixture(scope="module")
def engine():
    with sgl.Engine.of(loaded()) as engine:
        yield engine


def following(ids, temperature=1.0):
    logits = logits_of(hashes([*KEPT, *ids])[-1:])[0].astype(np.float64) / temperature
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def list_spellings():
    """Tokens that spell the end of the prompt, with their probabilities."""
    found = {}
    open_: list[tuple[tuple[int, ...], str, float]] = [((), "", 1.0)]
    while open_:
        ids, spelled, mass = open_.pop()
        for token, share in enumerate(following(ids)):
            longer = spelled + TOKENS[token]
            if token and longer.startswith(END):
                found[*ids, token] = mass * share
            elif token and END.startswith(longer):
                open_.append(((*ids, token), longer, mass * share))
    return found


def next_characters(count):
    """Probabilities of the text's next characters after the prompt, by brute force."""
    shares = collections.Counter()
    spellings = list_spellings()
    total = sum(spellings.values())
    open_ = [(ids, "".join(TOKENS[i] for i in ids)[len(END) :], m) for ids, m in spellings.items()]
    while open_:
        ids, text, mass = open_.pop()
        if len(text) >= count:
            shares[text[:count]] += mass / total
            continue
        for token, share in enumerate(following(ids)):
            if token == 0:
                shares[text] += mass * share / total
            else:
                open_.append(((*ids, token), text + TOKENS[token], mass * share))
    return shares


def test_the_next_characters_are_the_models_own(engine):
    count = some(2000, 20_000)
    for length in (1, 2):
        drawn = run_all(engine, [(PROMPT, healed(max_tokens=3, seed=i), {}) for i in range(count)])
        texts = collections.Counter(each.text[:length] for each in drawn)
        shares = next_characters(length)
        assert chi_square_fits(texts, shares)
    plain = run_all(
        engine, [(PROMPT, SamplingParams(max_tokens=3, seed=i), {}) for i in range(count)]
    )
    assert not chi_square_fits(collections.Counter(each.text[:2] for each in plain), shares)


def test_a_temperature_sharpens_the_spellings(engine):
    spellings = list_spellings()
    for temperature in (0.5, 2.0):
        weights = {ids: mass ** (1 / temperature) for ids, mass in spellings.items()}
        total = sum(weights.values())
        count = some(1000, 10_000)
        asked = [
            (PROMPT, healed(max_tokens=1, seed=i, temperature=temperature), {})
            for i in range(count)
        ]
        drawn: collections.Counter[str | None] = collections.Counter(
            str(each.meta["healed"]["token_ids"]) for each in run_all(engine, asked)
        )
        assert chi_square_fits(
            drawn, {str([*ids]): weight / total for ids, weight in weights.items()}
        )


def test_filters_leave_the_likeliest_spellings(engine):
    best = max(list_spellings().items(), key=lambda each: each[1])[0]
    for params in ({"top_k": 1}, {"temperature": 0}, {"top_p": 0.001}, {"min_p": 0.9999}):
        found = engine.complete(PROMPT, healed(max_tokens=2, seed=4, **params))
        assert tuple(found.meta["healed"]["token_ids"]) == best


def test_the_sequence_is_what_the_model_has_read(engine):
    for seed in range(40):
        found = engine.complete(
            PROMPT, healed(max_tokens=4, seed=seed, return_prompt_token_ids=True)
        )
        tokens = found.meta["healed"]["token_ids"]
        assert list(found.prompt_ids) == [*KEPT, *tokens]
        whole = "".join(TOKENS[i] for i in (*found.prompt_ids, *found.token_ids) if i)
        assert whole == PROMPT + found.text
        assert found.text.startswith(found.meta["healed"]["begun"])
        assert found.usage.prompt_tokens == len(found.prompt_ids)
        assert "".join(span.text for span in found.spans) == found.text
        again = engine.complete(list(found.prompt_ids), SamplingParams(max_tokens=4, seed=seed))
        assert again.token_ids == found.token_ids


def test_a_seed_gives_the_same_in_any_batch(engine):
    asked = [(PROMPT, healed(max_tokens=5, seed=i), {}) for i in range(64)]
    alone = [engine.complete(*each[:2]) for each in asked]
    together = run_all(engine, asked)
    assert [each.text for each in together] == [each.text for each in alone]
    assert len({each.text for each in alone}) > 10


def test_samples_are_healed_each(engine):
    outcome = run_all_samples(engine, healed(max_tokens=4, seed=3, n=6))
    assert outcome[0].text == engine.complete(PROMPT, healed(max_tokens=4, seed=3)).text
    assert len({tuple(each.meta["healed"]["token_ids"]) for each in outcome.values()}) > 1


def run_all_samples(engine, params, **options):
    events, done = {}, threading.Event()
    pieces = collections.defaultdict(str)

    def sink(event):
        if isinstance(event, Delta):
            pieces[event.index] += event.text
            return
        events[event.index] = event
        if len(events) == params.n:
            done.set()

    engine.submit(PROMPT, params, sink=sink, stream=True, **options)
    assert done.wait(60)
    for index, event in events.items():
        assert pieces[index] == event.text
    return events


@pytest.mark.parametrize("pattern", ["[ta ]{2,4}", "t[a-z ]*,", "(t|t a|ta)"])
def test_constrained_text_goes_on_behind_the_word(engine, pattern):
    bias = ((TOKENS.index(" not a"), 6.0), (TOKENS.index("not"), 6.0))
    begun = set()
    for seed in range(some(60, 400)):
        found = engine.complete(
            PROMPT,
            healed(max_tokens=12, seed=seed, logit_bias=bias),
            constraint=Regex(pattern),
        )
        assert found.finish_reason == "length" or re.fullmatch(pattern, found.text)
        begun.add(found.meta["healed"]["begun"])
    assert len(begun) > 1
    assert all(text == "" or text[0] == "t" for text in begun)


def test_a_choice_may_end_with_the_spelled_token(engine):
    bias = ((TOKENS.index(" not a"), 60.0),)
    found = engine.complete(
        PROMPT, healed(max_tokens=5, logit_bias=bias), constraint=Choices(("t a", "x"))
    )
    assert found.text == "t a"
    assert found.token_ids == ()
    assert found.finish_reason == "stop"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"stop": (" ",)}, "t"),
        ({"stop": ("t a",)}, ""),
        ({"stop": (" ",), "include_stop": True}, "t "),
        ({"stop_regex": ("t.",)}, ""),
    ],
)
def test_a_stop_inside_the_spelled_token_ends_the_text(engine, options, text):
    bias = ((TOKENS.index(" not a"), 60.0),)
    found = engine.complete(PROMPT, healed(max_tokens=5, logit_bias=bias, **options))
    assert found.text == text
    assert found.finish_reason == "stop"


def test_nothing_is_left_after_an_abort():
    for steps in range(4):
        engine = SteppedEngine(model=loaded(), max_total_tokens=192, context_length=128)
        started = [engine.start(PROMPT, healed(max_tokens=6, seed=i)) for i in range(8)]
        for _ in range(steps):
            engine.step()
        for ticket, _ in started[::2]:
            ticket.abort()
        engine.drain()
        for i, (_, events) in enumerate(started):
            assert [type(each) for each in events] == [Generation if i % 2 else RequestAbortedError]
        assert not engine.open
        assert engine.scheduler.queues.idle


def test_no_room_leaves_the_prompt_as_it_is():
    with sgl.Engine.of(loaded(), context_length=len(PROMPT) + 1, max_total_tokens=64) as engine:
        for seed in range(30):
            found = engine.complete(PROMPT, healed(max_tokens=1, seed=seed))
            assert len(found.token_ids) <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": [3, 7, 1]}, "heal: the prompt is given as token ids"),
        ({"params": healed(confidence=True)}, "heal: can't be combined with confidence"),
        ({"output_ids": [3]}, "heal: can't be combined with output_ids"),
        (
            {"params": healed(return_logprob=True, logprob_start_len=0)},
            "heal: can't be combined with log-probabilities of the prompt",
        ),
        ({"logit_processor": lambda ids, logits: logits}, "heal: can't be combined with logit_"),
    ],
)
def test_what_is_not_healed_is_refused(engine, arguments, message):
    given = {"prompt": PROMPT, "params": healed(max_tokens=2), **arguments}
    with pytest.raises(sgl.ParameterError, match=message):
        run_one(engine, given.pop("prompt"), given.pop("params"), given)


def run_one(engine, prompt, params, options):
    (event,) = run_all(engine, [(prompt, params, options)])
    if isinstance(event, sgl.SglError):
        raise event


def test_exact_draws_are_healed(engine):
    """The shares are those of free text behind the prompt's text."""
    count = some(4000, 40_000)
    texts = ("t", "t a", "2")
    found = engine.complete(PROMPT, healed(exact=True, seed=1), constraint=Choices(texts))
    probs = found.meta["exact"]["probs"]
    assert set(probs) == set(texts)
    assert found.usage.prompt_tokens == len(PROMPT)
    free = run_all(engine, [(PROMPT, healed(max_tokens=6, seed=i), {}) for i in range(count)])
    read = collections.Counter(read_choice(each.text) for each in free)
    del read[None]
    assert chi_square_fits(read, probs)
    pattern = "t[ a]{0,2}"
    drawn = run_all(
        engine,
        [
            (PROMPT, healed(exact=True, seed=i), {"constraint": Regex(pattern)})
            for i in range(some(1000, 10_000))
        ],
    )
    assert all(re.fullmatch(pattern, each.text) for each in drawn)


def read_choice(text):
    """The longest of the choices in the text, in whole words."""
    for choice in ("t a", "t", "2"):
        rest = text[len(choice) :]
        if text.startswith(choice) and not rest[:1].isalnum():
            return choice
    return None


@pytest.mark.parametrize("pattern", ["(?s:.)*", "[a-z ,0-9]*"])
def test_a_constraint_that_allows_all_changes_nothing(engine, pattern):
    """A word may end inside the begun text, and need not."""
    bias = ((TOKENS.index(" not a"), 3.0),)
    count = some(300, 2000)
    for constraint in (Regex(pattern), None):
        found = run_all(
            engine,
            [
                (PROMPT, healed(max_tokens=2, seed=i, logit_bias=bias), {"constraint": constraint})
                for i in range(count)
            ],
        )
        begun = [each.meta["healed"]["begun"] for each in found]
        if constraint is not None:
            expected = begun
    assert begun == expected
    assert begun.count("t a") > count / 10


def test_no_tokens_are_no_text(engine):
    found = engine.complete(PROMPT, healed(max_tokens=0))
    assert found.text == ""
    assert "healed" not in found.meta


def test_grammars_are_not_asked_on_the_loops_thread(engine, monkeypatch):
    on_loop = []
    begins_text = healing.begins_text

    def record(grammar, text):
        on_loop.append(this_thread.runs_engine)
        return begins_text(grammar, text)

    monkeypatch.setattr(healing, "begins_text", record)
    engine.complete(PROMPT, healed(max_tokens=2), constraint=Regex("[a-z ]*"))
    assert on_loop
    assert not any(on_loop)
