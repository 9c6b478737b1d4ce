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


@pytest.fixture(scope="module")
def metadata(model_file):
    return GgufFile(model_file).metadata


@pytest.mark.parametrize("name", NAMES)
def test_text_is_split_as_transformers_splits_it(metadata, name):
    ours = tokenizer_from_gguf({**metadata, "tokenizer.ggml.pre": name}, "test").backend.pre_tokenizer
    split = pre_tokenizers.Split(Regex(theirs.GGUF_PRE_TOKENIZER_SPLITS[name]), behavior="isolated")
    expected = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    rng = random.Random(0)
    for _ in range(200):
        text = "".join(rng.choices(PIECES, k=rng.randrange(1, 12)))
        assert ours.pre_tokenize_str(text) == expected.pre_tokenize_str(text)


@pytest.mark.parametrize("name", ["deepseek-llm", "command-r", "gpt-5"])
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
