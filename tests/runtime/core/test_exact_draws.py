"""Exact draws: their probabilities are those of what is read from the model's free text, by brute
force and by the engine's own free draws, in any batch, with any cache.
"""

import collections
import math
import random
import threading
from functools import partial

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

import sglang_lite as sgl
from sglang_lite.constraints.schema import json_schema
from sglang_lite.protocol import (
    Choices,
    Constraint,
    Delta,
    Generation,
    Regex,
    RequestAbortedError,
    SamplingParams,
)
from sglang_lite.runtime.core.exact_draws import list_drawable_texts
from sglang_lite.runtime.loading.load_model import LoadedModel
from sglang_lite.runtime.tokens.tokenizer import Tokenizer
from tests.chi_square import chi_square_fits
from tests.counts import some
from tests.free_reading import longest_match, longest_text, read_masses, read_pattern_masses
from tests.runtime.scripted import ScriptedModel, SteppedEngine, hashes

TOKENS = [
    "\x00",
    *'abno 1245,."truefalsil{}:',
    "no",
    "not",
    " no",
    " a",
    "ab",
    "42",
    "12",
    "n,",
    "true",
    "4,",
    " not a",
    "ue",
]
TOKENS = list(dict.fromkeys(TOKENS))
SIZE = len(TOKENS)
PROMPT = [3, 7, 1]
LANGUAGES: list[Constraint] = [
    Choices(("4", "42", "12", "5")),
    Choices((" no", " not", " not a", " not ab", "no")),
    Choices(("a", "ab", "", "aba")),
    Choices(("true", "false")),
    Regex("(no|not){1,2}[,.]?"),
    Regex("[ab]{1,3}"),
    json_schema(
        {
            "type": "object",
            "properties": {"a": {"type": "boolean"}},
            "required": ["a"],
            "additionalProperties": False,
        }
    ),
]
OPEN_PATTERNS = ["[ab]+", r"\d{1,3}", "(no|not| a)+[.,]?", "a[^,]{0,2},"]


def logits_of(states):
    with np.errstate(over="ignore"):
        odd = np.arange(1, SIZE + 1, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
        mixed = (np.asarray(states, dtype=np.uint64)[:, None] ^ np.uint64(0x5DEECE66D)) * odd
    return ((mixed >> np.uint64(40)) % np.uint64(1009)).astype(np.float32) / 150


class FreeModel(ScriptedModel):
    def logits(self, hidden):
        return torch.from_numpy(logits_of(hidden[:, 0].numpy().view(np.uint64)))


def loaded():
    written = [token.replace("\x00", "Ā").replace(" ", "Ġ") for token in TOKENS]
    backend = Backend(models.BPE({token: i for i, token in enumerate(written)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(backend, [token.encode() for token in TOKENS], [0], eos_ids=[0])
    return LoadedModel("free", FreeModel(), tokenizer, SIZE, frozenset({0}), 512)


def following(ids, bias=()):
    """Probabilities of the token after the prompt and some tokens."""
    logits = logits_of(hashes([*PROMPT, *ids])[-1:])[0].astype(np.float64)
    for token, value in bias:
        logits[token] += value
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


@pytest.fixture(scope="module")
def engine():
    with sgl.Engine.of(loaded()) as engine:
        yield engine


def exact(**options):
    return SamplingParams(exact=True, **options)


def by_hand(texts, bias=()):
    """Shares of texts, and the log of their mass, by brute force."""
    masses, left = read_masses(texts, ["", *TOKENS[1:]], partial(following, bias=bias), least=1e-20)
    total = sum(masses.get(text, 0.0) for text in texts)
    assert left < 1e-4 * total
    return {text: masses.get(text, 0.0) / total for text in texts}, math.log(total)


@pytest.mark.parametrize("language", LANGUAGES, ids=lambda each: str(each)[:40])
def test_probabilities_are_those_of_free_text(engine, language):
    found = engine.complete(PROMPT, exact(temperature=0), constraint=language)
    figures = found.meta["exact"]
    shares, log_mass = by_hand(list(figures["probs"]))
    distance = 0.5 * sum(abs(figures["probs"][text] - share) for text, share in shares.items())
    assert distance <= figures["gap"] + 2e-4  # of what brute force has left out
    assert abs(figures["log_mass"] - log_mass) < 5e-3
    assert found.text == max(figures["probs"], key=figures["probs"].get)


@pytest.mark.parametrize("language", [LANGUAGES[0], LANGUAGES[1], LANGUAGES[5]], ids=str)
def test_free_draws_read_the_same(engine, language):
    """The engine draws freely and Python's `re` reads what it has written."""
    probs = engine.complete(PROMPT, exact(), constraint=language).meta["exact"]["probs"]
    count = some(4000, 40_000)
    free = run_all(
        engine, [(PROMPT, SamplingParams(max_tokens=9, seed=i), {}) for i in range(count)]
    )
    read = collections.Counter(longest_text(list(probs), each.text) for each in free)
    del read[None]
    assert chi_square_fits(read, probs)


@pytest.mark.parametrize("pattern", OPEN_PATTERNS)
def test_open_languages_are_drawn_as_free_text_is_read(engine, pattern):
    masses, left = read_pattern_masses(pattern, ["", *TOKENS[1:]], following, 1e-7)
    total = sum(mass for text, mass in masses.items() if text is not None)
    assert left < 2e-3 * total
    shares = {text: mass / total for text, mass in masses.items() if text is not None}
    count = some(1000, 10_000)
    drawn = run_all(
        engine, [(PROMPT, exact(seed=i), {"constraint": Regex(pattern)}) for i in range(count)]
    )
    assert chi_square_fits(collections.Counter(each.text for each in drawn), shares)
    free = run_all(
        engine, [(PROMPT, SamplingParams(max_tokens=20, seed=i), {}) for i in range(4 * count)]
    )
    read = collections.Counter(longest_match(pattern, each.text) for each in free)
    del read[None]
    assert chi_square_fits(read, shares)


@pytest.mark.parametrize("pattern", OPEN_PATTERNS)
def test_the_likeliest_text_of_an_open_language_is_found(engine, pattern):
    masses, left = read_pattern_masses(pattern, ["", *TOKENS[1:]], following, 1e-7)
    masses.pop(None)
    for n in (1, 3):
        found = run_all(
            engine, [(PROMPT, exact(temperature=0), {"constraint": Regex(pattern)})] * n
        )
        for each in found:
            assert masses[each.text] + left >= max(masses.values())
            assert each.meta["exact"]["probs"][each.text] == max(
                each.meta["exact"]["probs"].values()
            )


@pytest.mark.parametrize("pattern", OPEN_PATTERNS)
def test_an_open_language_gives_the_same_in_any_batch(engine, pattern):
    asked = [(PROMPT, exact(seed=i), {"constraint": Regex(pattern)}) for i in range(64)]
    alone = [engine.complete(*each[:2], **each[2]) for each in asked]
    together = run_all(engine, asked)
    assert [each.text for each in together] == [each.text for each in alone]
    assert [each.meta["exact"] for each in together] == [each.meta["exact"] for each in alone]
    assert len({each.text for each in alone}) > 2


def test_draws_have_their_probabilities(engine):
    answer = engine.complete(PROMPT, exact(), constraint=LANGUAGES[5])
    probs = answer.meta["exact"]["probs"]
    for temperature in (1.0, 0.6):
        params = [exact(seed=i, temperature=temperature) for i in range(some(600, 4000))]
        drawn = collections.Counter(
            each.text
            for each in run_all(
                engine, [(PROMPT, each, {"constraint": LANGUAGES[5]}) for each in params]
            )
        )
        weights = {text: share ** (1 / temperature) for text, share in probs.items()}
        total = sum(weights.values())
        assert chi_square_fits(drawn, {text: each / total for text, each in weights.items()})


def run_all(engine, requests):
    """Submits all at once; their last events, in order."""
    outcomes, done = {}, threading.Event()

    def sink(i):
        def take(event):
            if not isinstance(event, Delta):
                outcomes[i] = event
                if len(outcomes) == len(requests):
                    done.set()

        return take

    for i, (prompt, params, options) in enumerate(requests):
        engine.submit(prompt, params, sink=sink(i), **options)
    assert done.wait(300)
    return [outcomes[i] for i in range(len(requests))]


def test_a_seed_gives_the_same_answer_in_any_batch(engine):
    asked = [(PROMPT, exact(seed=i), {"constraint": LANGUAGES[1]}) for i in range(64)]
    alone = [engine.complete(*each[:2], **each[2]) for each in asked]
    together = run_all(engine, asked)
    assert [each.text for each in together] == [each.text for each in alone]
    assert len({each.text for each in alone}) > 1
    for each in together:
        assert each.meta["exact"]["probs"] == alone[0].meta["exact"]["probs"]


def test_nothing_changes_with_a_tiny_cache():
    """Rows wait for each other, are retracted and computed again."""
    languages: list[Constraint] = [*LANGUAGES, *map(Regex, OPEN_PATTERNS)]
    asked = [(PROMPT, exact(seed=i), languages[i % 11]) for i in range(22)]
    with sgl.Engine.of(loaded()) as roomy:
        expected = [
            roomy.complete(prompt, params, constraint=language).text
            for prompt, params, language in asked
        ]
    with sgl.Engine.of(
        loaded(), max_total_tokens=48, context_length=40, max_running=3, step_tokens=8
    ) as tiny:
        requests = [(prompt, params, {"constraint": each}) for prompt, params, each in asked]
        assert [each.text for each in run_all(tiny, requests)] == expected


def test_the_prompt_is_computed_once(engine):
    engine.flush_cache()
    prompt = PROMPT * 40
    found = engine.complete(prompt, exact(), constraint=LANGUAGES[0])
    assert found.usage.prompt_tokens == 120
    assert found.usage.cached_tokens == 0
    again = engine.complete(prompt, exact(), constraint=LANGUAGES[0])
    assert again.usage.cached_tokens == 119


def test_samples_share_what_is_computed(engine):
    events, done = [], threading.Event()

    def sink(event):
        events.append(event)
        if sum(isinstance(each, Generation) for each in events) == 5:
            done.set()

    engine.submit(PROMPT, exact(n=5, seed=3), constraint=LANGUAGES[5], sink=sink, stream=True)
    assert done.wait(60)
    ends = {each.index: each for each in events if isinstance(each, Generation)}
    assert sorted(ends) == [0, 1, 2, 3, 4]
    assert len({id(each.meta["exact"]["rows"]) for each in ends.values()}) == 1
    for i, end in ends.items():
        pieces = [each.text for each in events if isinstance(each, Delta) and each.index == i]
        assert "".join(pieces) == end.text
    assert ends[0].text == engine.complete(PROMPT, exact(seed=3), constraint=LANGUAGES[5]).text


def test_a_bias_belongs_to_the_model(engine):
    bias = ((TOKENS.index("5"), 4.0), (TOKENS.index(","), 3.0))
    found = engine.complete(PROMPT, exact(logit_bias=bias), constraint=LANGUAGES[0]).meta["exact"]
    plain = engine.complete(PROMPT, exact(), constraint=LANGUAGES[0]).meta["exact"]
    shares, _ = by_hand(list(found["probs"]), bias)
    assert found["probs"]["5"] > plain["probs"]["5"] + 0.1
    for text, share in shares.items():
        assert abs(found["probs"][text] - share) < 1e-3


def test_texts_beyond_the_limit_are_not_drawn(engine):
    found = engine.complete(PROMPT, exact(max_tokens=1), constraint=LANGUAGES[0])
    assert set(found.meta["exact"]["probs"]) == {"4", "5"}
    with pytest.raises(sgl.ParameterError, match="max_tokens: none of the texts fits 2 tokens"):
        engine.complete(PROMPT, exact(max_tokens=2), constraint=Choices(("true",)))


def test_a_seed_may_be_negative(engine):
    answers = [
        engine.complete(PROMPT, exact(seed=seed), constraint=LANGUAGES[5])
        for seed in (-1, 2**64 - 1, -(2**63))
    ]
    assert answers[0].text == answers[1].text


def test_rows_use_up_no_seed_of_the_engine():
    def draw(first):
        with sgl.Engine.of(loaded(), seed=7) as engine:
            engine.complete(PROMPT, first, constraint=LANGUAGES[0])
            return engine.complete(PROMPT, SamplingParams(max_tokens=12)).token_ids

    assert draw(exact()) == draw(SamplingParams())


def test_rules_that_only_masks_enforce_hold(engine):
    pair = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2}
    found = engine.complete(
        PROMPT,
        exact(logit_bias=tuple((i, 5.0) for i in range(1, SIZE))),
        constraint=json_schema({"enum": [4, 42]}),
    )
    assert set(found.meta["exact"]["probs"]) == {"4", "42"}
    unique = list_drawable_texts(json_schema({**pair, "uniqueItems": True}))
    assert unique == ("[1, 2]", "[2, 1]")
    nested = {"type": "array", "items": {**pair, "maxItems": 1, "minItems": 1}, "minItems": 2}
    texts = list_drawable_texts(json_schema({**nested, "maxItems": 2, "uniqueItems": True}))
    assert texts == ("[[1], [2]]", "[[2], [1]]")


def test_many_long_choices_are_listed(engine):
    dice = random.Random(0)
    texts = tuple("".join(dice.choices("ab12", k=60)) for _ in range(64))
    assert list_drawable_texts(Choices(texts)) == tuple(sorted(texts))
    assert list_drawable_texts(Choices((*texts, "a"))) is None


def test_texts_at_the_end_of_the_context_are_drawn():
    """What would be beyond it counts as open."""
    engine = SteppedEngine(model=loaded(), max_total_tokens=192, context_length=128)
    for length in (120, 126, 127):
        prompt = (PROMPT * 43)[:length]
        _, events = engine.start(prompt, exact(), constraint=Choices(("5", "a,", "0")))
        engine.drain()
        assert isinstance(events[-1], Generation if length == 120 else Generation | sgl.SglError)


@pytest.mark.parametrize("language", [LANGUAGES[1], Regex("a[^,]{0,2},")], ids=str)
def test_new_weights_begin_again(language):
    engine = SteppedEngine(model=loaded(), max_total_tokens=192, context_length=128)
    _, plain = engine.start(PROMPT, exact(seed=1), constraint=language)
    engine.drain()
    _, events = engine.start(PROMPT, exact(seed=1), constraint=language)
    engine.step()
    engine.core.builder.weights.version = "next"
    engine.drain()
    before, after = plain[-1].meta["exact"], events[-1].meta["exact"]
    assert after["probs"] == before["probs"]
    assert after["steps"] > before["steps"]


def test_rows_that_are_read_twice_are_computed_once():
    engine = SteppedEngine(model=loaded(), max_total_tokens=192, context_length=128)
    _, events = engine.start(PROMPT, exact(n=40, seed=1), constraint=Regex("[ab]+"))
    engine.drain()
    assert len(events) == 40
    figures = events[-1].meta["exact"]
    assert figures["rows"] < 30
    assert figures["steps"] < 20


def test_a_text_that_does_not_end_is_an_error(engine):
    """Free text of these letters goes on for ever, and the budget of rows ends."""
    bias = tuple((TOKENS.index(token), 60.0) for token in ("a", "b"))
    with pytest.raises(sgl.ConstraintError, match="after 512 beginnings of texts, the likeliest"):
        engine.complete(
            PROMPT,
            exact(max_tokens=4000, logit_bias=bias, temperature=0),
            constraint=Regex("[ab]+,"),
        )
    with pytest.raises(sgl.ConstraintError, match=r"after 512 beginnings of texts, 1 of 1 draws"):
        engine.complete(PROMPT, exact(max_tokens=4000, logit_bias=bias), constraint=Regex("[ab]+,"))
    with pytest.raises(sgl.ConstraintError, match="would hardly write a text"):
        engine.complete(PROMPT, exact(max_tokens=3, logit_bias=bias), constraint=Regex("[ab]{9}"))


def test_free_text_that_was_prepared_ahead_is_refused(engine):
    @sgl.function
    def program(s):
        s += "ab" + sgl.gen("x", max_tokens=3, ignore_eos=True) + "no"
        s += sgl.gen("y", max_tokens=3, exact=True)

    with pytest.raises(sgl.ParameterError, match="exact: free text is drawn as"):
        program.run(backend=engine)["y"]


@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.parametrize("language", [LANGUAGES[1], Regex("[ab]+")], ids=str)
def test_aborted_draws_leave_nothing(steps, language):
    engine = SteppedEngine(model=loaded(), max_total_tokens=192, context_length=128)
    started = [engine.start(PROMPT, exact(seed=i), constraint=language) for i in range(8)]
    for _ in range(steps):
        engine.step()
    for ticket, _ in started[::2]:
        ticket.abort()
    engine.drain()
    for i, (_, events) in enumerate(started):
        assert [type(each) for each in events] == [Generation if i % 2 else RequestAbortedError]
    assert not engine.open
    assert engine.scheduler.queues.idle


def test_rows_end_with_the_last_request():
    engine = SteppedEngine(model=loaded(), max_total_tokens=192, context_length=128)
    ticket, events = engine.start(PROMPT, exact(n=2, seed=1), constraint=LANGUAGES[1])
    engine.step()
    assert not engine.scheduler.queues.idle
    ticket.abort()
    engine.loop.inbox.run()
    engine.loop.inbox.run()
    assert engine.scheduler.queues.idle
    assert [type(each) for each in events] == [RequestAbortedError] * 2


@pytest.mark.parametrize("texts", [(), ("\ud800",)])
def test_a_constraint_without_texts_is_refused(engine, texts):
    @sgl.function
    def program(s):
        s += "ab" + sgl.gen("x", constraint=Choices(texts), exact=True)

    with pytest.raises(sgl.SglError):
        engine.complete(PROMPT, exact(), constraint=Choices(texts))
    with pytest.raises(sgl.SglError):
        program.run(backend=engine)["x"]


def test_retracted_rows_change_nothing():
    engine = SteppedEngine(model=loaded(), max_total_tokens=192, context_length=128)
    often = SteppedEngine(
        model=loaded(), max_total_tokens=192, context_length=128, step_tokens=3, retract_every=2
    )
    for seed, language in enumerate([*LANGUAGES[:6], *map(Regex, OPEN_PATTERNS)]):
        texts = []
        for each in (engine, often):
            _, events = each.start(PROMPT * 4, exact(seed=seed), constraint=language)
            each.drain()
            texts.append((events[-1].text, events[-1].meta["exact"]["probs"]))
        assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("options", "constraint", "message"),
    [
        ({}, None, "free text is drawn as the model gives it anyway"),
        ({"temperature": 0.5}, Regex("a*"), "64 texts, which can be drawn at temperature 0 or 1"),
        ({"top_p": 0.5}, LANGUAGES[0], "can't be combined with top_p"),
        ({"top_k": 1}, LANGUAGES[0], "can't be combined with top_k"),
        ({"repetition_penalty": 1.1}, LANGUAGES[0], "combined with repetition_penalty"),
        ({"stop": ("2",)}, LANGUAGES[0], "can't be combined with stop"),
        ({"return_logprob": True}, LANGUAGES[0], "can't be combined with return_logprob"),
        ({"confidence": True}, LANGUAGES[0], "can't be combined with confidence"),
        ({"thinking": 5}, LANGUAGES[0], "can't be combined with thinking"),
        ({"temperature": 1.5}, LANGUAGES[0], "temperature is 1.5: above 1"),
    ],
)
def test_what_can_not_be_exact_is_refused(engine, options, constraint, message):
    with pytest.raises(sgl.ParameterError, match=f"^exact: .*{message}"):
        engine.complete(PROMPT, exact(**options), constraint=constraint)


def test_texts_that_the_model_would_not_write_are_refused(engine):
    with pytest.raises(sgl.ConstraintError, match=r"hardly write them|write none of the 2 texts"):
        engine.complete(PROMPT, exact(max_tokens=100), constraint=Choices(("ab" * 30, "ba" * 30)))
