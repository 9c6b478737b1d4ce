"""A text that is complete and could go on ends where the model writes something else: against brute
force over the default model's tokens, with transformers' probabilities and Python's regexes.
"""

import collections
import re
import threading
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
import regex
import torch
from msgspec.structs import replace

from sglang_lite.constraints.schema import json_schema
from sglang_lite.program.nodes import Gen, GrammarBegin, GrammarEnd, Program, Text
from sglang_lite.protocol import (
    Choices,
    Constraint,
    Delta,
    Ebnf,
    Generation,
    InOrder,
    Lark,
    Number,
    OneOf,
    Played,
    Prompt,
    Regex,
    Repeated,
    SamplingParams,
    Span,
    StructuralTag,
)
from sglang_lite.runtime.structured_output.open_end import find_end_rule
from tests.counts import some
from tests.runtime.scripted import ended
from tests.runtime.structured_output.test_distribution import p_value
from tests.runtime.structured_output.test_numbers import TOKENS, asked, engine_for

DRAWS = some(150, 400)
LEAST = 1e-4  # p of the chi-square test
SEEN = 3e-3  # probability below which the beginning of a text is not followed further


@dataclass
class Language:
    """A constraint, after a text or as the answer to a question.

    Attributes:
        constraint: the constraint.
        pattern: regex of its texts.
        text, question: prompts.
        reads: whether its texts may end further back.
    """

    constraint: Constraint
    pattern: str
    text: str
    question: str
    reads: bool = field(init=False)

    def __post_init__(self):
        self.reads = not isinstance(self.constraint, Ebnf | Lark)


def choices(*options: str) -> tuple[Choices, str]:
    return Choices(options), "|".join(map(re.escape, options))


# that brute force computes of a language; what is not followed is not compared
ROWS = some(300, 20_000)
LANGUAGES = [
    Language(*choices("4", "42", "400", "5", "55"), "2 + 2 = ", "What is 2 + 2?"),
    Language(*choices(" blue", " blue and green"), "The sky is", "What colour is the sky?"),
    Language(*choices("no", "not at all", "nobody knows", "no, never"), "Will it rain? I say: ", "Will it rain?"),
    Language(*choices(" New York", " New York City", " New", " Newark"), "The largest city is", "Where is Broadway?"),
    Language(*choices("C", "C++", "C#", "Java", "JavaScript"), "My favourite language is ", "Name a language."),
    Language(*choices("yes", "yes, but not now", "yes!"), "Do you like me? ", "Do you like me?"),
    Language(*choices("A", "A or B", "A and B", "B"), "The right answer is ", "A or B?"),
    Language(*choices("1", "1.5", "1.55", "10"), "It costs ", "How much is a coffee?"),
    Language(*choices(" the", " the end", " the end of the world"), "It is", "Finish: it is"),
    Language(*choices("", " very", " very very"), "I am", "How are you?"),
    Language(Regex(r"\d+"), r"\d+", "There are 3", "How many days has a week?"),
    Language(Regex(r"-?\d+(\.\d+)?"), r"-?\d+(\.\d+)?", "The temperature is ", "What is 7 / 2?"),
    Language(Regex(r" [a-z]{2,4}"), r" [a-z]{2,4}", "My favourite animal is the", "Name an animal."),
    Language(Regex(r"\d{4}(-\d\d)?"), r"\d{4}(-\d\d)?", "The war ended in ", "When did the war end?"),
    Language(Regex(r" \w+(, \w+)*"), r" \w+(, \w+)*", "I have seen", "Whom have you seen?"),
    Language(Regex(r"(red|green)( (red|green))?"), r"(red|green)( (red|green))?", "The flag is ", "Red or green?"),
    Language(Regex(r"[A-Z][a-z]+"), r"[A-Z][a-z]+", "His name is ", "What is your name?"),
    Language(Regex(r"\$\d+(\.\d\d)?"), r"\$\d+(\.\d\d)?", "It costs ", "How much is it?"),
    Language(Regex(r"(ha)+"), r"(ha)+", "He laughed: ", "Laugh!"),
    Language(Regex(r"[01]*"), r"[01]*", "In binary: ", "Write 5 in binary."),
    Language(Lark('start: A ("," A)~0..2\nA: "a" | "b"'), r"(a|b)(,(a|b)){0,2}", "Letters: ", "Name letters."),
    Language(Lark('start: "very "* "good"\n'), r"(very )*good", "It was ", "How was it?"),
    Language(Lark('start: N ("+" N)?\nN: /[0-9]{1,2}/'), r"\d\d?(\+\d\d?)?", "5 = ", "What is 5?"),
    # Of text that is forced, masks allow one split alone: it is drawn behind other tokens than
    # brute force draws it.
    Language(Ebnf('root ::= [yn] (", " ("sir" | "please"))?'), r"[yn](, (sir|please))?", "Well, ", "Tea? y or n?"),
    Language(Ebnf('root ::= [0-9]+ "%"?'), r"\d+%?", "The share is ", "How many per cent?"),
    Language(json_schema({"type": "integer", "minimum": 0, "maximum": 120}), r"\d|[1-9]\d|1[01]\d|120", "Her age is ",
             "How old is she?"),
    Language(json_schema({"enum": [7, 70, 700]}), r"70{0,2}", "It weighs ", "How much?"),
    Language(json_schema({"anyOf": [{"const": 1}, {"const": 12}, {"type": "null"}]}), r"1|12|null", "x = ", "x?"),
    Language(InOrder((Choices(("= ",)), Regex(r"\d{1,3}"))), r"= \d{1,3}", "3 * 3 ", "What is 3 * 3?"),
    Language(Regex(r"(true|false|unknown)( \([a-z]+\))?"), r"(true|false|unknown)( \([a-z]+\))?", "2 > 1 is ",
             "Is 2 > 1?"),
]  # fmt: skip


def kind(char):
    return "digit" if char.isdigit() else "letter" if char.upper() != char.lower() else None


class Vocabulary:
    """Texts of a model's tokens, "" for one without and for half a character, by the first
    character and its kind.
    """

    def __init__(self, texts):
        self.texts = texts
        self.by_first = collections.defaultdict(list)
        for token, text in enumerate(texts):
            self.by_first[text[:1]].append(token)
        kinds = np.array([kind(text[:1]) or "" for text in texts])
        self.all = np.ones(len(texts), dtype=bool)
        self.behind = {None: self.all, "digit": kinds != "digit", "letter": kinds != "letter"}


@dataclass
class Place:
    """Beginning of a text.

    Attributes:
        ids, text: its tokens, and what they say.
        end: text further back that it may end as, if any.
        p: its probability.
    """

    ids: tuple[int, ...] = ()
    text: str = ""
    end: str | None = None
    p: float = 1.0


class BruteForce:
    """The masked process over a model's tokens.

    Args:
        model: model of transformers.
        vocabulary: its tokens.
        language: the language.
        ids: the prompt.
    """

    def __init__(self, model, vocabulary, language, ids):
        self.model, self.vocabulary, self.language, self.prompt = (
            model,
            vocabulary,
            language,
            list(ids),
        )
        pattern = regex.compile(language.pattern)
        self.begins = cache(lambda text: pattern.fullmatch(text, partial=True) is not None)
        self.is_whole = cache(lambda text: pattern.fullmatch(text) is not None)

    def logits(self, places):
        with torch.no_grad():
            ids = torch.tensor([[*self.prompt, *place.ids] for place in places])
            return self.model(ids, logits_to_keep=1).logits[:, -1].double().numpy()

    def steps(self, place, logits):
        """Returns the places behind the tokens that go on, and the probability of each text that
        others end.
        """
        vocabulary, text = self.vocabulary, place.text
        whole, last = self.is_whole(text), kind(text[-1:]) if self.is_whole(text) else None
        allowed = (
            vocabulary.behind[last].copy()
            if whole
            else place.end is not None and vocabulary.all.copy()
        )
        allowed = np.zeros(len(logits), dtype=bool) if allowed is False else allowed
        on, ends = [], {}
        for first, tokens in vocabulary.by_first.items():
            if not first or not self.begins(text + first):
                continue
            for token in tokens:
                piece = vocabulary.texts[token]
                if self.begins(text + piece):
                    on.append(token)
                elif allowed[token] and (inner := self.end_within(text, piece)) is not None:
                    ends[token] = inner
        going = np.zeros(len(logits), dtype=bool)
        going[on] = True
        shares = np.where(allowed | going, np.exp(logits - logits.max()), 0)
        shares *= place.p / shares.sum()
        found = collections.defaultdict(float)
        for token, within in ends.items():
            found[within] += shares[token]
        allowed[[*on, *ends]] = False
        if allowed.any():
            found[text if whole else place.end] += shares[allowed].sum()
        after = []
        for token in on:
            piece, end = vocabulary.texts[token], place.end
            if whole:
                end = (
                    text
                    if self.language.reads and (last is None or kind(piece[0]) != last)
                    else None
                )
            after.append(Place((*place.ids, token), text + piece, end, shares[token]))
        return after, found, shares

    def end_within(self, text, piece):
        """Text that ends within a token, the longest one, or None."""
        for at in range(len(piece) - 1, 0, -1):
            before = kind(piece[at - 1])
            if self.is_whole(text + piece[:at]) and (before is None or before != kind(piece[at])):
                return text + piece[:at]
        return None

    def is_over(self, text):
        return self.is_whole(text) and not any(
            self.begins(text + chr(code)) for code in range(32, 127)
        )

    def distribution(self):
        """Probability of each text, and of those that were not followed to their end."""
        found, left, level, rows = collections.defaultdict(float), 0.0, [Place()], 0
        while level:
            after, rows = [], rows + len(level)
            for start in range(0, len(level), 16):
                some_places = level[start : start + 16]
                for place, logits in zip(some_places, self.logits(some_places), strict=True):
                    more, ends, _ = self.steps(place, logits)
                    after += more
                    for text, p in ends.items():
                        found[text] += p
            level = []
            for place in after:
                if self.is_over(place.text):
                    found[place.text] += place.p
                elif place.p < SEEN or rows > ROWS:
                    left += place.p
                else:
                    level.append(place)
        return found, left

    def greedy(self, limit):
        """The likeliest token in each place; None if two are alike, or the limit comes first."""
        place = Place()
        for _ in range(limit):
            if self.is_over(place.text):
                return place.text
            after, ends, shares = self.steps(place, self.logits([place])[0])
            second, best = np.argsort(shares)[-2:]
            if shares[best] < 1.001 * shares[second]:
                return None
            goes_on = [each for each in after if each.ids[-1] == best]
            if not goes_on:
                return next(iter(ends)) if len(ends) == 1 else None
            place = Place(goes_on[0].ids, goes_on[0].text, goes_on[0].end)
        return None


@pytest.fixture(scope="module")
def reference(model_file):
    from transformers import AutoModelForCausalLM

    folder, name = str(model_file.parent), model_file.name
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def vocabulary(smollm):
    table = smollm.tokenizer
    texts = [table.decode((token,)) for token in range(table.vocab_size)]
    return Vocabulary(["" if "\ufffd" in text else text for text in texts])


def drawn(engine, ids, constraint):
    counts, left = collections.Counter(), threading.Semaphore(0)

    def take(event):
        assert isinstance(event, Generation), event
        counts[event.text if event.finish_reason == "stop" else None] += 1
        left.release()

    for seed in range(DRAWS):
        engine.submit(
            ids, SamplingParams(max_tokens=24, seed=seed, temperature=1.0), constraint, sink=take
        )
    for _ in range(DRAWS):
        assert left.acquire(timeout=300)
    return counts


def prompt_of(language, chat):
    return (
        f"<|im_start|>user\n{language.question}<|im_end|>\n<|im_start|>assistant\n"
        if chat
        else language.text
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.sampled(20)
@pytest.mark.parametrize("chat", [False, True], ids=["text", "turn"])
@pytest.mark.parametrize("number", range(len(LANGUAGES)))
def test_texts_are_drawn_as_by_brute_force(smollm, reference, vocabulary, number, chat):
    language = LANGUAGES[number]
    ids = smollm.tokenizer.encode(prompt_of(language, chat))
    brute = BruteForce(reference, vocabulary, language, ids)
    probabilities, left = brute.distribution()
    counts = drawn(smollm, ids, language.constraint)
    assert all(regex.fullmatch(language.pattern, text) for text in counts if text is not None)
    rest = "(not followed)"
    known = collections.Counter({text if text in probabilities else rest: 0 for text in counts})
    for text, count in counts.items():
        known[text if text in probabilities else rest] += count
    # What was not followed may have come as any text: only what is far more likely is compared.
    compared = {text: p for text, p in probabilities.items() if p > 20 * left}
    others = 1 - sum(compared.values())
    cells = collections.Counter({text: known[text] for text in compared})
    cells[rest] = DRAWS - sum(cells.values())
    assert p_value(cells, {**compared, rest: others}, DRAWS) > LEAST, (counts, compared)
    best = brute.greedy(24)
    if best is not None:
        greedy = smollm.complete(
            ids, SamplingParams(max_tokens=24, temperature=0), language.constraint
        )
        assert (greedy.text, greedy.finish_reason) == (best, "stop")


# ----------------------------------------------------- ends in streams, programs, blocks and drafts


def free_reading(pattern, written):
    """Text that Python's `re` reads from what was written: the longest that ends neither in a word
    nor in a number.
    """
    for at in range(len(written), -1, -1):
        before, after = kind(written[at - 1 : at] or " "), kind(written[at : at + 1] or " ")
        if re.fullmatch(pattern, written[:at]) and (before is None or before != after):
            return written[:at]
    return None


OPEN: list[tuple[Constraint, str]] = [
    (Choices(("4", "42", "400", "4.5")), r"4|42|400|4\.5"), (Regex(r"\d+"), r"\d+"),
    (Regex(r"-?\d+(\.\d+)?"), r"-?\d+(\.\d+)?"), (Regex(r"a( a+)?"), r"a( a+)?"), (Regex(r"[0-9]{1,2}(,8)*"), r"[0-9]{1,2}(,8)*"),
    (json_schema({"enum": [7, 24, 2400, 1.5]}), r"7|24|2400|1\.5"),
]  # fmt: skip


@pytest.mark.parametrize(("overlap", "page", "chunk", "retract", "backend"), [
    (True, 1, 7, 0, "llguidance"), (True, 4, 64, 3, "llguidance"), (False, 16, 7, 3, "xgrammar"), (True, 4, 64, 3, "outlines"),
], ids=str)  # fmt: skip
def test_what_ends_a_text_is_outside_of_it(overlap, page, chunk, retract, backend):
    """With every engine and schedule, in streams and out of them."""
    engine = engine_for(overlap=overlap, page_size=page, step_tokens=chunk, retract_every=retract, max_running=3,
                        constraint_backend=backend)  # fmt: skip
    started = []
    for i, (prompt, params, _) in enumerate(asked(90)):
        constraint, pattern = OPEN[i % len(OPEN)]
        engine.compile_grammar(constraint)
        params = replace(params, max_tokens=20)
        started.append(
            (
                params,
                pattern,
                engine.start(prompt, params, constraint=constraint, stream=i % 3 == 0)[1],
            )
        )
    engine.drain()
    engine.check_empty()
    seen = set()
    for params, pattern, events in started:
        generation = ended(events)
        tokens = [TOKENS[i] for i in generation.token_ids]
        written = "".join(tokens).removesuffix("\x00")
        assert generation.usage.completion_tokens == len(tokens)
        kept = sum(len(span.ids or ()) for span in generation.spans)
        if generation.finish_reason == "stop":
            assert generation.text == free_reading(pattern, written)
            assert "".join(tokens[:kept]) == generation.text[: len("".join(tokens[:kept]))]
            seen.add(written[len(generation.text) :][:1])
        else:
            assert generation.text == written
        assert "".join(span.text for span in generation.spans) == generation.text
        if params.return_logprob:
            assert [each.token_id for each in generation.output_logprobs] == [
                *generation.token_ids[:kept]
            ]
        deltas = [event for event in events if isinstance(event, Delta)]
        if deltas:
            assert "".join(delta.text for delta in deltas) == generation.text
            assert [entry for delta in deltas for entry in delta.logprobs] == [
                *generation.output_logprobs
            ]
    assert len(seen) > 3


@pytest.mark.parametrize("overlap", [True, False])
def test_a_program_goes_on_behind_the_text(overlap):
    """Programs as wholes give what call by call gives, whose prompts have the text's own tokens and
    no others.
    """
    engine = engine_for(overlap=overlap, page_size=4, step_tokens=16, max_running=4)
    for i, (prompt, params, _) in enumerate(asked(30, seed=1)):
        constraint, _ = OPEN[i % len(OPEN)]
        engine.compile_grammar(constraint)
        text = "".join(TOKENS[i] for i in prompt)
        params = replace(params, return_logprob=False)
        free = Gen("b", SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
        played: list[Any] = []
        engine.run_program(
            text, Program((Gen("a", params, constraint), Text(" a"), free)), sink=played.append
        )
        engine.drain()
        first, second = (event.event for event in played if isinstance(event, Played))
        _, events = engine.start(text, params, constraint=constraint)
        engine.drain()
        assert ended(events).text == first.text
        spans = (Span(text), *first.spans, Span(" a"))
        _, events = engine.start(Prompt(spans), free.params)
        engine.drain()
        assert ended(events).token_ids == second.token_ids
        assert played[-1].text == first.text + " a" + second.text
    engine.check_empty()


def test_in_a_grammar_only_what_it_allows_ends_a_text():
    grammar = Regex("[0-9]{1,4}(,8)? a{1,3}")
    engine = engine_for()
    for each in (grammar, Regex(r"\d+"), Regex("a+")):
        engine.compile_grammar(each)
    for prompt, params, _ in asked(16, seed=3):
        params = SamplingParams(temperature=params.temperature, max_tokens=12, seed=params.seed)
        program = Program((GrammarBegin(grammar), Gen("n", params, Regex(r"\d+")), Text(" "),
                           Gen("rest", params, Regex("a+")), GrammarEnd()))  # fmt: skip
        played: list[Any] = []
        engine.run_program("".join(TOKENS[i] for i in prompt), program, sink=played.append)
        engine.drain()
        assert re.fullmatch(grammar.pattern, played[-1].text), played[-1]


def test_a_stream_holds_back_what_may_not_belong_to_the_text():
    """Behind "24" a point may belong to a number, or to what follows it."""
    engine = engine_for()
    constraint = Regex(r"\d+(\.\d+)?")
    engine.compile_grammar(constraint)
    bias = ((TOKENS.index("."), 40.0), (TOKENS.index("4"), 20.0))
    params = SamplingParams(temperature=0, max_tokens=9, logit_bias=bias)
    _, events = engine.start([5, 6], params, constraint=constraint, stream=True)
    engine.drain()
    generation = ended(events)
    assert [TOKENS[i] for i in generation.token_ids] == ["4", ".", "."]
    assert (generation.text, generation.finish_reason) == ("4", "stop")
    assert "".join(event.text for event in events if isinstance(event, Delta)) == generation.text


@pytest.mark.parametrize(("constraint", "rule"), [
    (Choices(("a", "b")), None), (Choices(("a", "ab")), "read"), (Regex("a"), "read"), (Lark('start: "a"'), "written"),
    (Ebnf('root ::= "a"'), "written"), (Number("integer"), None), (StructuralTag((), ()), None),
    (InOrder((StructuralTag((), ()), Regex("a+"))), "read"), (InOrder((Regex("a+"), StructuralTag((), ()))), None),
    (InOrder((Repeated(Regex("a")), Choices(("",)))), "written"), (OneOf((Choices(("a",)), Choices(("ab",)))), "read"),
    (OneOf((Regex("a"), Lark('start: "a"'))), "written"), (OneOf((Regex("a"), StructuralTag((), ()))), None),
], ids=str)  # fmt: skip
def test_which_texts_end_so(constraint, rule):
    assert find_end_rule(constraint) == rule
