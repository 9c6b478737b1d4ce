"""Prompts between two texts, as the families' cards write them."""

import pytest
from tokenizers import AddedToken

from sglang_lite.protocol import ParameterError
from sglang_lite.runtime.tokens.tokenizer import Tokenizer
from sglang_lite.server.infill import InfillFormat, require_infill_format
from tests.server.conftest import byte_tokenizer

# marks in the order of the vocabulary, and the prompt for `a` and `b`, as the models' cards have it
CARDS = {
    "qwen": (
        ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"],
        "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>",
    ),
    "starcoder": (
        ["<fim_prefix>", "<fim_middle>", "<fim_suffix>"], "<fim_prefix>a<fim_suffix>b<fim_middle>",
    ),
    "deepseek": (
        ["<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>"],
        "<|begin|><｜fim▁begin｜>a<｜fim▁hole｜>b<｜fim▁end｜>",
    ),
    "codellama": (["▁<PRE>", "▁<MID>", "▁<SUF>", "▁<EOT>"], "<|begin|>▁<PRE>a▁<SUF>b▁<MID>"),
    "codestral": (["[PREFIX]", "[SUFFIX]"], "<|begin|>[SUFFIX]b[PREFIX]a"),
}  # fmt: skip


def tokenizer_with(marks, bos=None):
    """A token a byte, and those of the marks."""
    backend = byte_tokenizer()
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    count = backend.get_vocab_size()
    letters = [b"<|end|>", b"<|begin|>", *(backend.decode([i]).encode() for i in range(2, 258))]
    texts = [*letters, *(mark.encode() for mark in marks)]
    return Tokenizer(backend, texts, (0, 1, *range(258, count)), bos_id=bos)


@pytest.mark.parametrize("family", CARDS)
def test_a_prompt_is_written_as_the_card_has_it(family):
    marks, card = CARDS[family]
    tokenizer = tokenizer_with(marks, bos=1 if card.startswith("<|begin|>") else None)
    ids = InfillFormat.in_vocabulary(tokenizer).write_prompt(tokenizer, "a", "b")
    assert tokenizer.decode(ids, skip_special=False) == card


@pytest.mark.parametrize("family", CARDS)
def test_each_of_its_tokens_ends_the_middle(family):
    marks, _ = CARDS[family]
    found = InfillFormat.in_vocabulary(tokenizer_with(marks))
    assert found.ends == tuple(range(258, 258 + len(marks)))


def test_names_of_tokens_in_the_texts_are_text():
    marks, _ = CARDS["qwen"]
    tokenizer = tokenizer_with(marks)
    ids = InfillFormat.in_vocabulary(tokenizer).write_prompt(tokenizer, marks[1], marks[2])
    assert [i for i in ids if i >= 258] == [258, 260, 259]


@pytest.mark.parametrize("marks", [[], ["<|fim_prefix|>", "<|fim_suffix|>"], ["[PREFIX]"]])
def test_a_model_without_all_of_them_is_refused(marks):
    with pytest.raises(ParameterError, match=r"suffix: tiny has no tokens .* Qwen2\.5-Coder"):
        require_infill_format(tokenizer_with(marks), "tiny")
