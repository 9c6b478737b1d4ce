"""A text that is complete and could go on ends where the model writes something else: against brute force over the
default model's tokens, with transformers' probabilities and Python's regexes."""

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

from sglang_lite.constraints.schema import json_schema
from sglang_lite.protocol import Choices, Constraint, Ebnf, Generation, InOrder, Lark, Regex, SamplingParams
from tests.counts import some
from tests.runtime.structured_output.test_distribution import p_value

DRAWS = some(200, 400)
LEAST = 1e-4  # p of the chi-square test
SEEN = 2e-3  # probability below which the beginning of a text is not followed further


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
    Language(Ebnf('root ::= "yes" (", " ("sir" | "please"))?'), r"yes(, (sir|please))?", "Well, ", "Tea?"),
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


class BruteForce:
    """The masked process over a model's tokens.

    Args:
        model: model of transformers.
        tokens: text of each token; "" for one without, and for half a character.
        language: the language.
        ids: the prompt.
    """

    def __init__(self, model, tokens, language, ids):
        self.model, self.tokens, self.language, self.prompt = model, tokens, language, list(ids)
        self.pattern = regex.compile(language.pattern)
        self.begins = cache(lambda text: self.pattern.fullmatch(text, partial=True) is not None)
        self.is_whole = cache(lambda text: self.pattern.fullmatch(text) is not None)

    def logits(self, ids):
        with torch.no_grad():
            return self.model(torch.tensor([[*self.prompt, *ids]])).logits[0, -1].double().numpy()

    def places(self, text, end):
        """Texts that begin with a text and a token, for tokens that go on; and whole texts, for those that end it."""
        on, ends = {}, {}
        whole = self.is_whole(text)
        goes_on = cache(lambda char: self.begins(text + char))
        last = kind(text[-1:]) if whole and text else None
        for token, piece in enumerate(self.tokens):
            if piece and goes_on(piece[0]) and self.begins(text + piece):
                on[token] = piece
                continue
            if piece and goes_on(piece[0]):
                inner = [
                    at for at in range(1, len(piece))
                    if self.is_whole(text + piece[:at])
                    and (kind(piece[at - 1]) is None or kind(piece[at - 1]) != kind(piece[at]))
                ]  # fmt: skip
            else:
                inner = []
            if whole and not (last and piece and kind(piece[0]) == last):
                ends[token] = text + piece[: max(inner, default=0)]
            elif not whole and end is not None:
                ends[token] = text + piece[: max(inner)] if inner else end
        return on, ends, whole, last

    def step(self, ids, text, end):
        """Yields tokens with their probabilities, and the text that each ends or else (None, the end further back)."""
        on, ends, whole, last = self.places(text, end)
        allowed = np.array(sorted({*on, *ends}))
        logits = self.logits(ids)[allowed]
        shares = np.exp(logits - logits.max())
        for token, share in zip(allowed.tolist(), shares / shares.sum()):
            if token in on:
                piece, kept = on[token], end
                if whole:
                    kept = text if self.language.reads and (last is None or kind(piece[0]) != last) else None
                yield token, share, None, kept
            else:
                yield token, share, ends[token], None

    def is_over(self, text):
        return self.is_whole(text) and not any(self.begins(text + chr(code)) for code in range(32, 127))

    def distribution(self):
        """Probability of each text, and of those that were not followed to their end."""
        found: dict[str, float] = collections.defaultdict(float)
        queue: list[Any] = [((), "", None, 1.0)]
        left = 0.0
        while queue:
            ids, text, end, p = queue.pop()
            if self.is_over(text):
                found[text] += p
                continue
            if p < SEEN:
                left += p
                continue
            for token, share, ended, kept in self.step(ids, text, end):
                if ended is not None:
                    found[ended] += p * share
                elif p * share < SEEN / 100:
                    left += p * share
                else:
                    queue.append(((*ids, token), text + self.tokens[token], kept, p * share))
        return found, left

    def greedy(self, limit):
        """The likeliest token in each place; None if two are alike, or the limit comes first."""
        ids: tuple[int, ...] = ()
        text, end = "", None
        for _ in range(limit):
            if self.is_over(text):
                return text
            best, second = sorted(self.step(ids, text, end), key=lambda each: -each[1])[:2]
            if best[1] < 1.001 * second[1]:
                return None
            if best[2] is not None:
                return best[2]
            ids, text, end = (*ids, best[0]), text + self.tokens[best[0]], best[3]
        return None


@pytest.fixture(scope="module")
def reference(model_file):
    from transformers import AutoModelForCausalLM

    folder, name = str(model_file.parent), model_file.name
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokens(smollm):
    table = smollm.tokenizer
    texts = [table.decode((token,)) for token in range(table.vocab_size)]
    return ["" if "\ufffd" in text else text for text in texts]


def drawn(engine, ids, constraint):
    counts, left = collections.Counter(), threading.Semaphore(0)

    def take(event):
        assert isinstance(event, Generation), event
        counts[event.text if event.finish_reason == "stop" else None] += 1
        left.release()

    for seed in range(DRAWS):
        engine.submit(ids, SamplingParams(max_tokens=24, seed=seed, temperature=1.0), constraint, sink=take)
    for _ in range(DRAWS):
        assert left.acquire(timeout=300)
    return counts


def prompt_of(language, chat):
    return f"<|im_start|>user\n{language.question}<|im_end|>\n<|im_start|>assistant\n" if chat else language.text


@pytest.mark.filterwarnings("ignore")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("chat", [False, True], ids=["text", "turn"])
@pytest.mark.parametrize("number", range(len(LANGUAGES)))
def test_texts_are_drawn_as_by_brute_force(smollm, reference, tokens, number, chat):
    language = LANGUAGES[number]
    ids = smollm.tokenizer.encode(prompt_of(language, chat))
    brute = BruteForce(reference, tokens, language, ids)
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
        greedy = smollm.complete(ids, SamplingParams(max_tokens=24, temperature=0), language.constraint)
        assert (greedy.text, greedy.finish_reason) == (best, "stop")
