"""The end of a prompt that is spelled anew."""

import pytest

from sglang_lite.protocol import Prompt, SamplingParams, Span
from sglang_lite.runtime.tokens.prompt_end import count_end_tokens


@pytest.fixture(scope="module")
def tokenizer(small_engine):
    return small_engine.tokenizer


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("The capital of France is Par", " Par"),
        ("The capital of France is ", " "),
        ("The capital of France is", " is"),
        ("Wait.", "."),
        ("Wait.\n", ".\n"),
        ("Wait. \n\n  ", ". \n\n  "),
        ("def f(x):\n    retu", " retu"),
        ("http:", ":"),
        ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", ""),
        ("<|im_start|>assistant\nThe ri", " ri"),
        ("<|im_start|>assistant\nThe\n", "\n"),
        ("<|im_start|>\n\n", ""),
        ("<|im_start|>assistant\n- ", "- "),
        ("<|im_start|>assistant\n    ", "    "),
        ("<|im_start|>assistant\n{", "{"),
        ("<|im_start|>user\nHi<|im_end|>", ""),
        ("<|im_start|>us", "us"),
        ("Größ", " Größ"),
        ("word", ""),  # nothing would come before it
    ],
)
def test_the_last_word_is_spelled_anew(tokenizer, text, end):
    text = "So " + text if end == " Größ" else text
    ids = tokenizer.encode(text)
    count = count_end_tokens(tokenizer, ids, len(ids))
    found = tokenizer.decode(ids[len(ids) - count :])
    assert text.endswith(found)
    assert found == end or (end and found.endswith(end.strip(" ")))


def test_at_most_six_tokens_and_whole_characters(tokenizer):
    for text in ("So " + "x7q" * 40, "So " + "漢字仮名" * 20, "So 🤷🏽‍♀️🤷🏽‍♀️🤷🏽‍♀️"):
        ids = tokenizer.encode(text)
        for cut in range(2, len(ids) + 1):
            part = ids[:cut]
            count = count_end_tokens(tokenizer, part, len(part))
            assert count <= 6
            if count:
                first = tokenizer.token_bytes[part[-count]][0]
                assert not 0x80 <= first < 0xC0


def test_tokens_that_were_generated_stay(tokenizer):
    ids = tokenizer.encode("The capital of France is Par")
    assert count_end_tokens(tokenizer, ids, 0) == 0
    assert count_end_tokens(tokenizer, ids, 1) <= 1


def test_generated_tokens_stay_in_a_prompt(small_engine):
    ids = tuple(small_engine.tokenizer.encode(" Par"))
    prompt = Prompt((Span("France is"), Span(" Par", ids)))
    params = SamplingParams(heal=True, max_tokens=2)
    assert "healed" not in small_engine.complete(prompt, params).meta
    after = Prompt((*prompt.spans, Span("is")))
    assert small_engine.complete(after, params).meta["healed"]["end"] == "is"
