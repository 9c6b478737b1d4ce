"""Tokenizers of GGUF files against what transformers makes of the same metadata."""

import random

import pytest
from tokenizers import Regex, pre_tokenizers

import sglang_lite as sgl
from sglang_lite.runtime.models.weights.gguf_file import GgufFile
from sglang_lite.runtime.tokens.from_gguf import tokenizer_from_gguf

theirs = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
NAMES = ["llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "dbrx", "smaug-bpe", "qwen2", "deepseek-r1-qwen",
         "megrez", "qwen35", "tekken", "gpt-4o", "llama4"]  # fmt: skip
PIECES = ["the", "The", "THE", "camelCase", "HTTPServer", "it's", "WE'LL", "can't", " ", "  ", "\n", "\r\n", "\t", "1", "1234",
          "3.14", "!", "...", "/*", "a/b", "é", "É", "e\u0301", "नमस्ते", "日本語", "Ünïcödé", "ǅ", "ʰ", "½", "_x", "-", "\u00a0", "😀"]  # fmt: skip


EAST = [
    "中文字",
    "ひらがな",
    "カタカナ",
    "한국어",
    "，",
    "。",
    "“x”",
    "ＡＢ",
    "\u3000",
    "№",
    "Ω",
    "+",
    "<=",
    "€",
    "ß",
    "ა",
]
# Of the tokenizers' own files, where transformers names no pre-tokenizer of GGUF.
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
OWN = {
    "command-r": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "deepseek-coder": [
        *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in (
            "[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+")),
        pre_tokenizers.Digits(individual_digits=True), BYTES],
    "deepseek-v3": [
        *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in (
            r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+",
            r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")),
        BYTES],
}  # fmt: skip


@pytest.fixture(scope="module")
def metadata(model_file):
    return GgufFile(model_file).metadata


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", NAMES)
def test_text_is_split_as_transformers_splits_it(metadata, name):
    ours = tokenizer_from_gguf(
        {**metadata, "tokenizer.ggml.pre": name}, "test"
    ).backend.pre_tokenizer
    split = pre_tokenizers.Split(Regex(theirs.GGUF_PRE_TOKENIZER_SPLITS[name]), behavior="isolated")
    expected = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    rng = random.Random(0)
    for _ in range(200):
        text = "".join(rng.choices(PIECES, k=rng.randrange(1, 12)))
        assert ours.pre_tokenize_str(text) == expected.pre_tokenize_str(text)


@pytest.mark.parametrize("name", OWN)
def test_text_is_split_as_the_tokenizers_own_file_splits_it(metadata, name):
    ours = tokenizer_from_gguf(
        {**metadata, "tokenizer.ggml.pre": name}, "test"
    ).backend.pre_tokenizer
    expected = pre_tokenizers.Sequence(OWN[name])
    rng = random.Random(0)
    for _ in range(200):
        text = "".join(rng.choices(PIECES + EAST, k=rng.randrange(1, 12)))
        assert ours.pre_tokenize_str(text) == expected.pre_tokenize_str(text)


def test_deepseeks_first_pre_tokenizer_splits_by_scripts(metadata):
    """Pieces as llama.cpp's vocabulary tests have them: letters, punctuation and East Asian text
    apart.
    """
    ours = tokenizer_from_gguf(
        {**metadata, "tokenizer.ggml.pre": "deepseek-llm"}, "test"
    ).backend.pre_tokenizer
    text = "Hello, y'all! 3 33 333 我想在apple工作1314天～\n\nнещо ===  "
    pieces = [text[slice(*span)] for _, span in ours.pre_tokenize_str(text)]
    assert pieces == ["Hello", ",", " y", "'", "all", "!", " ", "3", " ", "33", " ", "333", " ", "我想在", "apple", "工作",
                      "1314", "天", "～", "\n", "\n", "нещо", " ===", "  "]  # fmt: skip


@pytest.mark.parametrize("name", ["falcon", "gpt-5"])
def test_what_is_not_checked_is_refused_by_name(metadata, name):
    with pytest.raises(sgl.ModelError, match=f"pre-tokenizer '{name}' is not supported"):
        tokenizer_from_gguf({**metadata, "tokenizer.ggml.pre": name}, "test")


def test_gemmas_merges_have_the_order_of_its_tokens():
    tokens = ["<pad>", "<eos>", "<bos>", *(f"<0x{b:02X}>" for b in range(256)), "▁a", "ab", "bc", "▁ab", "abc", "cab", "▁",
              "a", "b", "c"]  # fmt: skip
    rng = random.Random(1)
    described = {
        "tokenizer_type": "llama", "tokens": tokens, "scores": [rng.uniform(-9, 0) for _ in tokens], "unk_token_id": 0,
        "token_type": [3, 3, 3, *[6] * 256, *[1] * 10], "bos_token_id": 2, "eos_token_id": 1,
    }  # fmt: skip
    ours = tokenizer_from_gguf(
        {
            "general.architecture": "gemma2", "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": described["scores"], "tokenizer.ggml.token_type": described["token_type"],
            "tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.bos_token_id": 2, "tokenizer.ggml.eos_token_id": 1,
        },
        "test",
    )  # fmt: skip
    expected, _ = theirs.convert_gguf_tokenizer("gemma2", described)
    for _ in range(200):
        text = "".join(rng.choices("abc ", k=rng.randrange(1, 16)))
        assert ours.encode(text, first=False) == expected.encode(text, add_special_tokens=False).ids
