"""A tiny Whisper, with the special tokens of a real one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

from tests.runtime.models.tiny import VOCAB, randomise, tiny_tokenizer

SECONDS, FRAMES, PREFIX = 3, 150, 192  # of a window, and the tokens that it takes
TEXT = 24  # tokens behind it
_SPECIAL = [
    "<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>", "<|startofprev|>",
    "<|nospeech|>", "<|notimestamps|>",
]  # fmt: skip
_TIMES = [f"<|{i / 50:.2f}|>" for i in range(FRAMES + 1)]
EOT, SOT, EN, DE, TRANSLATE, TRANSCRIBE, PREVIOUS, _, NO_TIMES, FIRST_TIME = range(
    VOCAB, VOCAB + 10
)
GENERATION: dict[str, Any] = {
    "is_multilingual": True, "lang_to_id": {"<|en|>": EN, "<|de|>": DE}, "no_timestamps_token_id": NO_TIMES,
    "task_to_id": {"transcribe": TRANSCRIBE, "translate": TRANSLATE}, "decoder_start_token_id": SOT,
    "eos_token_id": EOT, "pad_token_id": EOT, "max_initial_timestamp_index": 50,
    "suppress_tokens": [3, 4, SOT, EN, DE, TRANSLATE, TRANSCRIBE, PREVIOUS, NO_TIMES - 1],
    "begin_suppress_tokens": [5, EOT],
}  # fmt: skip


def save_whisper(folder: Path, **changes: Any) -> Any:
    """Saves a tiny Whisper with its tokenizer and extractor, and returns transformers' model."""
    WhisperFeatureExtractor(feature_size=16, chunk_length=SECONDS).save_pretrained(folder)
    config = WhisperConfig(
        vocab_size=FIRST_TIME + len(_TIMES), d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=16, max_source_positions=FRAMES,
        max_target_positions=TEXT, bos_token_id=EOT, eos_token_id=EOT, pad_token_id=EOT, decoder_start_token_id=SOT,
    )  # fmt: skip
    model = randomise(WhisperForConditionalGeneration(config))
    # or it would tell nothing but times
    model.model.decoder.embed_tokens.weight.data[FIRST_TIME:] *= 0.3
    for name, value in {**GENERATION, **changes}.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer["added_tokens"] = [
        {"id": VOCAB + i, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": content not in _TIMES}
        for i, content in enumerate(_SPECIAL + _TIMES)
    ]  # fmt: skip
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|startoftranscript|>", "type_id": 0}},
            {"SpecialToken": {"id": "<|notimestamps|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            text: {"id": text, "ids": [VOCAB + _SPECIAL.index(text)], "tokens": [text]}
            for text in ("<|startoftranscript|>", "<|notimestamps|>", "<|endoftext|>")
        },
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"})
    )
    return model
