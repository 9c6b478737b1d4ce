"""Tiny models that read images, as transformers saves them, and what transformers itself makes of a
prompt.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image as Picture
from transformers import (
    CLIPImageProcessorPil,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessorPil,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextImageProcessorPil,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionImageProcessorPil,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PixtralImageProcessorPil,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    SmolVLMImageProcessorPil,
    VoxtralConfig,
    VoxtralForConditionalGeneration,
    WhisperFeatureExtractor,
)

import sglang_lite as sgl
from sglang_lite.protocol import Generation, Media, Prompt, SamplingParams, SglError, Span
from tests.runtime.models.tiny import VOCAB, randomise, tiny_tokenizer

# of "<image>", which sounds have as well, and of "<|video_pad|>"
IMAGE_ID, VIDEO_ID = VOCAB, VOCAB + 7
GREEDY = SamplingParams(
    max_tokens=6, temperature=0, return_logprob=True, return_prompt_token_ids=True, ignore_eos=True
)
_GEMMA = ["<start_of_image>", "<end_of_image>"]
_SPECIAL = [
    "<image>", "<fake_token_around_image>", "<global-img>", "[IMG_BREAK]", "[IMG_END]", *_GEMMA, "<|video_pad|>",
]  # fmt: skip
_PLACES = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
_TEXT = dict(
    model_type="llama", hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=VOCAB + 32, max_position_embeddings=1024, bos_token_id=None, eos_token_id=1,
    pad_token_id=None,
)  # fmt: skip
_VISION = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2)


def _llava(folder: Path) -> torch.nn.Module:
    CLIPImageProcessorPil(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}
    ).save_pretrained(folder)
    vision = dict(
        _VISION, model_type="clip_vision_model", image_size=28, patch_size=7, projection_dim=32
    )
    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=_TEXT, image_token_index=IMAGE_ID)
    )


def _idefics(folder: Path) -> torch.nn.Module:
    Idefics3ImageProcessorPil(
        size={"longest_edge": 96}, max_image_size={"longest_edge": 32}
    ).save_pretrained(folder)
    vision = dict(_VISION, image_size=32, patch_size=8)
    return Idefics3ForConditionalGeneration(
        Idefics3Config(
            vision_config=vision, text_config=_TEXT, image_token_id=IMAGE_ID, scale_factor=2
        )
    )


def _smolvlm(folder: Path) -> torch.nn.Module:
    SmolVLMImageProcessorPil(
        size={"longest_edge": 64}, max_image_size={"longest_edge": 32}
    ).save_pretrained(folder)
    vision = dict(_VISION, image_size=32, patch_size=8)
    return SmolVLMForConditionalGeneration(
        SmolVLMConfig(
            vision_config=vision, text_config=_TEXT, image_token_id=IMAGE_ID, scale_factor=2
        )
    )


def _llava_next(folder: Path) -> torch.nn.Module:
    sizes = [[28, 56], [56, 28], [56, 56]]
    LlavaNextImageProcessorPil(
        size={"shortest_edge": 28},
        crop_size={"height": 28, "width": 28},
        image_grid_pinpoints=sizes,
    ).save_pretrained(folder)
    vision = dict(
        _VISION, model_type="clip_vision_model", image_size=28, patch_size=7, projection_dim=32
    )
    return LlavaNextForConditionalGeneration(
        LlavaNextConfig(
            vision_config=vision, text_config=dict(_TEXT, model_type="mistral", head_dim=16),
            image_token_index=IMAGE_ID, image_grid_pinpoints=sizes,
        )
    )  # fmt: skip


def _onevision(folder: Path) -> torch.nn.Module:
    tile = {"height": 16, "width": 16}
    sizes = [[16, 16], [16, 32], [32, 16], [32, 32], [48, 32]]
    LlavaOnevisionImageProcessorPil(size=tile, image_grid_pinpoints=sizes).save_pretrained(folder)
    vision = dict(
        _VISION,
        model_type="siglip_vision_model",
        image_size=16,
        patch_size=4,
        vision_use_head=False,
    )
    text = dict(_TEXT, model_type="qwen2")
    return LlavaOnevisionForConditionalGeneration(
        LlavaOnevisionConfig(
            vision_config=vision, text_config=text, image_token_index=IMAGE_ID, image_grid_pinpoints=sizes,
            vision_aspect_ratio="anyres_max_4", video_token_index=VIDEO_ID,
        )
    )  # fmt: skip


def _pixtral_vision(folder: Path) -> dict[str, Any]:
    PixtralImageProcessorPil(size={"longest_edge": 48}, patch_size=8).save_pretrained(folder)
    return dict(_VISION, model_type="pixtral", image_size=64, patch_size=8, head_dim=16)


def _pixtral(folder: Path) -> torch.nn.Module:
    return LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=_pixtral_vision(folder), text_config=dict(_TEXT, model_type="mistral", head_dim=16),
            image_token_index=IMAGE_ID, vision_feature_layer=-1, vision_feature_select_strategy="full",
        )
    )  # fmt: skip


def _mistral3(folder: Path) -> torch.nn.Module:
    return Mistral3ForConditionalGeneration(
        Mistral3Config(
            vision_config=_pixtral_vision(folder), text_config=dict(_TEXT, model_type="mistral", head_dim=16),
            image_token_index=IMAGE_ID, tie_word_embeddings=False,
        )
    )  # fmt: skip


def _ministral3(folder: Path) -> torch.nn.Module:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "llama_4_scaling_beta": 0.5}
    rope |= {"original_max_position_embeddings": 8}
    text = dict(_TEXT, model_type="ministral3", head_dim=16, rope_parameters=rope)
    return Mistral3ForConditionalGeneration(
        Mistral3Config(
            vision_config=_pixtral_vision(folder),
            text_config=text,
            image_token_index=IMAGE_ID,
            tie_word_embeddings=False,
        )
    )


def _qwen(folder: Path, text: str, sections: list[int]) -> dict[str, Any]:
    size = {"shortest_edge": 4 * 8 * 8, "longest_edge": 24 * 8 * 8}
    Qwen2VLImageProcessorPil(size=size, patch_size=4, merge_size=2).save_pretrained(folder)
    images = json.loads((folder / "preprocessor_config.json").read_text())
    videos = {**images, "size": {"shortest_edge": 64, "longest_edge": 96 * 8 * 8}, "fps": 2}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(videos))
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}
    return {
        "text_config": dict(_TEXT, model_type=text, rope_parameters=rope), "image_token_id": IMAGE_ID,
        "video_token_id": VIDEO_ID, "vision_start_token_id": IMAGE_ID + 2, "vision_end_token_id": IMAGE_ID + 2,
    }  # fmt: skip


def _qwen2_vl(folder: Path) -> torch.nn.Module:
    vision = dict(embed_dim=32, hidden_size=64, depth=2, num_heads=2, patch_size=4, mlp_ratio=2)
    return Qwen2VLForConditionalGeneration(
        Qwen2VLConfig(vision_config=vision, **_qwen(folder, "qwen2_vl_text", [2, 3, 3]))
    )


def _qwen2_5_vl(folder: Path) -> torch.nn.Module:
    vision = dict(
        hidden_size=32, out_hidden_size=64, intermediate_size=44, depth=3, num_heads=2, patch_size=4, window_size=16,
        fullatt_block_indexes=[1], tokens_per_second=2,
    )  # fmt: skip
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(vision_config=vision, **_qwen(folder, "qwen2_5_vl_text", [4, 2, 2]))
    )


def _qwen3(folder: Path, text: str) -> dict[str, Any]:
    vision = dict(
        hidden_size=32, out_hidden_size=64, intermediate_size=48, depth=3, num_heads=2, patch_size=4,
        num_position_embeddings=16, deepstack_visual_indexes=[0, 2],
    )  # fmt: skip
    config = _qwen(folder, text, [4, 2, 2])
    config["text_config"] |= {"num_hidden_layers": 3, "head_dim": 16}
    return {**config, "vision_config": vision}


def _qwen3_vl(folder: Path) -> torch.nn.Module:
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(**_qwen3(folder, "qwen3_vl_text")))


def _qwen3_vl_moe(folder: Path) -> torch.nn.Module:
    config = _qwen3(folder, "qwen3_vl_moe_text")
    config["text_config"] |= {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
    }
    return Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig(**config))


def _gemma3(folder: Path) -> torch.nn.Module:
    Gemma3ImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder)
    vision = dict(
        _VISION,
        model_type="siglip_vision_model",
        image_size=32,
        patch_size=4,
        vision_use_head=False,
    )
    text = dict(_TEXT, model_type="gemma3_text", head_dim=16, query_pre_attn_scalar=16, sliding_window=40,
                layer_types=["sliding_attention", "full_attention"])  # fmt: skip
    return Gemma3ForConditionalGeneration(
        Gemma3Config(
            vision_config=vision, text_config=text, mm_tokens_per_image=16, image_token_index=IMAGE_ID,
            boi_token_index=IMAGE_ID + 5, eoi_token_index=IMAGE_ID + 6,
        )
    )  # fmt: skip


def _qwen2_audio(folder: Path) -> torch.nn.Module:
    WhisperFeatureExtractor(feature_size=16, chunk_length=1).save_pretrained(folder)
    audio = dict(
        d_model=32, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=64, num_mel_bins=16,
        max_source_positions=50,
    )  # fmt: skip
    return Qwen2AudioForConditionalGeneration(
        Qwen2AudioConfig(
            audio_config=audio, text_config=dict(_TEXT, model_type="qwen2"), audio_token_index=IMAGE_ID
        )
    )  # fmt: skip


def _voxtral(folder: Path) -> torch.nn.Module:
    WhisperFeatureExtractor(feature_size=16, chunk_length=1).save_pretrained(folder)
    audio = dict(
        model_type="voxtral_encoder", hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        num_mel_bins=16, max_source_positions=50,
    )  # fmt: skip
    return VoxtralForConditionalGeneration(
        VoxtralConfig(
            audio_config=audio, text_config=dict(_TEXT, head_dim=16), audio_token_id=IMAGE_ID
        )
    )


_HEARING = {"qwen2_audio": _qwen2_audio, "voxtral": _voxtral}
FAMILIES = {
    "llava": _llava, "llava_next": _llava_next, "onevision": _onevision, "pixtral": _pixtral, "mistral3": _mistral3,
    "mistral3_ministral3": _ministral3, "idefics3": _idefics, "smolvlm": _smolvlm, "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl, "qwen3_vl": _qwen3_vl, "qwen3_vl_moe": _qwen3_vl_moe, "gemma3": _gemma3,
}  # fmt: skip


# Reads contents as lists of parts alone, as the template of SmolVLM does.
CHAT = (
    "{% for m in messages %}{{ m.role[0] }}:{% for part in m.content %}"
    "{% if part.type == 'image' %}<image>{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %};"
    "{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def save_seeing(family: str, folder: Path, chat_template: str = "") -> Any:
    """Saves a tiny model of a family, with tokenizer and image processor, and returns it."""
    folder.mkdir(exist_ok=True)
    if chat_template:
        (folder / "chat_template.jinja").write_text(chat_template)
    model = randomise((FAMILIES | _HEARING)[family](folder))
    model.save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer["added_tokens"] = [
        {"id": IMAGE_ID + i, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
        for i, content in enumerate(_SPECIAL + _PLACES)
    ]  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return model


def engine_of(folder: Path, **config: Any) -> sgl.Engine:
    """Engine for a folder, on a GPU where the tests may use one."""
    settings: dict[str, Any] = (
        {"device": "cuda", "max_total_tokens": 2048}
        if torch.cuda.is_available()
        else {"device": "cpu"}
    )
    return sgl.Engine(str(folder), in_process=True, dtype="float32", **{**settings, **config})


def png(width: int, height: int, seed: int = 0) -> bytes:
    """PNG file of random pixels."""
    return encoded(
        Picture.fromarray(
            np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8)
        ),
        "PNG",
    )


def encoded(picture: Picture.Image, kind: str, **options: Any) -> bytes:
    """File of a picture."""
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def seen(*parts: str | bytes | Media) -> Prompt:
    """Prompt of texts, images (as bytes), videos and sounds."""
    spans = [Span(part) if isinstance(part, str) else Span("<image>", ()) for part in parts]
    media = [
        Media(part, "image/png") if isinstance(part, bytes) else part
        for part in parts
        if not isinstance(part, str)
    ]
    return Prompt(tuple(spans), images=tuple(media))


def logprobs(model: Any, folder: Path, ids: Sequence[int], images: Sequence[bytes]) -> torch.Tensor:
    """transformers' log-probabilities [tokens, vocabulary] of ids that have placeholder tokens for
    images.
    """
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    pictures = [Picture.open(io.BytesIO(each)) for each in images]
    options: dict[str, Any] = {"patch_size": 16} if "mistral3" in folder.name else {}
    # Of several images in a row, LLaVA-OneVision's processor makes no tiles.
    rows = [[each] for each in pictures] if "onevision" in folder.name else [pictures]
    inputs = processor(images=rows, return_tensors="pt", **options)
    names = (
        "pixel_values",
        "pixel_attention_mask",
        "image_grid_thw",
        "image_sizes",
        "batch_num_images",
    )
    given = {name: inputs[name] for name in names if name in inputs}
    tokens = torch.tensor([list(ids)])
    if "gemma3" in folder.name:
        given["token_type_ids"] = (tokens == IMAGE_ID).int()
    if "image_grid_thw" in given:
        given["mm_token_type_ids"] = (tokens == IMAGE_ID).int()
    with torch.inference_mode():
        found = model(input_ids=tokens, **given)
    return found.logits[0].float().log_softmax(-1)


@dataclass(frozen=True)
class Seeing:
    """An engine, and transformers' model in its folder."""

    folder: Path
    model: Any
    engine: sgl.Engine


def check(seeing: Seeing, answer: Generation, images: list[bytes]) -> None:
    """The answer is transformers' most likely one, with its probabilities."""
    check_with(answer, lambda ids: logprobs(seeing.model, seeing.folder, ids, images))


def check_with(answer: Generation, logprobs_of: Callable[[Sequence[int]], torch.Tensor]) -> None:
    """The answer is the most likely one by these log-probabilities of ids, with its probabilities,
    up to a placeholder that is drawn, for which transformers wants an image.
    """
    drawn = list(answer.token_ids)
    if found := [i for i, token in enumerate(drawn) if token in (IMAGE_ID, VIDEO_ID)]:
        drawn = drawn[: found[0] + 1]
    ids = [*answer.prompt_ids, *drawn[:-1]]
    expected = logprobs_of(ids)[len(answer.prompt_ids) - 1 :]
    assert drawn == expected.argmax(-1).tolist()
    got = torch.tensor([each.logprob for each in answer.output_logprobs[: len(drawn)]])
    assert torch.allclose(got, expected.max(-1).values, atol=1e-4)


def submit(
    engine: sgl.Engine, prompt: Prompt, params: SamplingParams, constraint: Any = None
) -> Future[Generation]:
    """Future of an answer."""
    future: Future[Generation] = Future()

    def sink(event: Any) -> None:
        if isinstance(event, SglError):
            future.set_exception(event)
        elif isinstance(event, Generation):
            future.set_result(event)

    engine.submit(prompt, params, constraint, sink=sink)
    return future
