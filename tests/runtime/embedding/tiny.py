"""Encoders of a few thousand random weights, as transformers and sentence-transformers save them."""

import json

from tests.runtime.models.tiny import randomise

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "the",
    "sea",
    "is",
    "green",
    "and",
    "deep",
    "##er",
    "a",
    "cat",
    "sat",
    "##s",
]


def piece(name, kind):
    return {"SpecialToken": {"id": name, "type_id": kind}}


def text(name, kind):
    return {"Sequence": {"id": name, "type_id": kind}}


def tokenizer():
    """A WordPiece tokenizer that encloses texts in [CLS] and [SEP]."""
    special = [
        {"id": i, "content": WORDS[i], "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for i in range(4)
    ]  # fmt: skip
    return {
        "version": "1.0", "truncation": {"max_length": 8, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
        "padding": None, "added_tokens": special,
        "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
                       "strip_accents": None, "lowercase": True},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [piece("[CLS]", 0), text("A", 0), piece("[SEP]", 0)],
            "pair": [piece("[CLS]", 0), text("A", 0), piece("[SEP]", 0), text("B", 1), piece("[SEP]", 1)],
            "special_tokens": {n: {"id": n, "ids": [WORDS.index(n)], "tokens": [n]} for n in ("[CLS]", "[SEP]")},
        },
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                  "max_input_chars_per_word": 100, "vocab": {word: i for i, word in enumerate(WORDS)}},
    }  # fmt: skip


def saved(kind, folder, *, pooling=None, normalise=False, **config):
    """A model of transformers' class, random, with its folder."""
    settings = dict(
        vocab_size=len(WORDS), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=40, pad_token_id=0, type_vocab_size=2,
    )  # fmt: skip
    model = randomise(kind(kind.config_class(**(settings | config))))
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer()))
    if pooling is not None:
        modules = [{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},
                   {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]  # fmt: skip
        if normalise:
            modules.append(
                {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
            )
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(
            json.dumps({"word_embedding_dimension": 32, **pooling})
        )
    return model
