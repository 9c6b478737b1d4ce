"""Frames, sizes and pixels of videos are those of transformers' processors, which need torchvision."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Picture

from sglang_lite.media.files import VideoHeader
from sglang_lite.runtime.media.prepare import video_inputs
from sglang_lite.runtime.media.video_families import VIDEO_FAMILIES, video_settings
from sglang_lite.runtime.tokens.image_span import Grid

pytest.importorskip("torchvision")

# By family: config; transformers' class; its settings; what it samples by.
FAMILIES: dict[str, tuple[dict[str, Any], str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": ({"vision_config": {}}, "Qwen2VLVideoProcessor", {"size": {"shortest_edge": 3136, "longest_edge": 50_000}}, {"fps": 2}),
    "qwen2_5_vl": (
        {"vision_config": {"tokens_per_second": 2}}, "Qwen2VLVideoProcessor",
        {"size": {"shortest_edge": 3136, "longest_edge": 12_845_056}}, {"fps": 2},
    ),
    "qwen3_vl": ({}, "Qwen3VLVideoProcessor", {"size": {"shortest_edge": 4096, "longest_edge": 300_000}}, {"fps": 2}),
    "llava_onevision": (
        {"vision_config": {"image_size": 384, "patch_size": 14}}, "LlavaOnevisionVideoProcessor",
        {"size": {"height": 384, "width": 384}}, {"num_frames": 32},
    ),
    "smolvlm": (
        {"vision_config": {"image_size": 512, "patch_size": 16}, "scale_factor": 4}, "SmolVLMVideoProcessor",
        {"size": {"longest_edge": 512}, "max_image_size": {"longest_edge": 512}}, {"fps": 1, "num_frames": 64},
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("count", "fps", "width", "height"),
    [(40, 10.0, 160, 90), (90, 29.97, 90, 160), (300, 30.0, 61, 47)],
)
def test_frames_sizes_and_pixels_are_transformers(
    family: str, count: int, fps: float, width: int, height: int
) -> None:
    import transformers
    from transformers.video_utils import VideoMetadata

    config, name, settings, by = FAMILIES[family]
    ours = VIDEO_FAMILIES[family](
        {"model_type": family, **config}, video_settings({**settings, **by}, {})
    )
    noise = np.random.default_rng(0).integers(0, 256, (count, 6, 8, 3), np.uint8)
    pictures = [
        Picture.fromarray(each).resize((width, height), Picture.Resampling.BICUBIC)
        for each in noise
    ]
    sample = ours.sample(VideoHeader(count, fps, width, height), 0)
    found = video_inputs(ours, sample.sizes, [pictures[i] for i in sample.indices])
    processor = getattr(transformers, name)(**settings)
    metadata = VideoMetadata(
        total_num_frames=count, fps=fps, width=width, height=height, duration=count / fps
    )
    stacked = torch.from_numpy(np.stack([np.asarray(each) for each in pictures])).permute(
        0, 3, 1, 2
    )
    made = processor(
        videos=[stacked],
        video_metadata=[metadata],
        do_sample_frames=True,
        return_metadata=True,
        return_tensors="pt",
        **by,
    )
    indices = [int(i) for i in made["video_metadata"][0].frames_indices]
    assert [*sample.indices][: len(indices)] == indices
    assert {*sample.indices[len(indices) :]} <= {indices[-1]}
    expected = made["pixel_values" if family == "smolvlm" else "pixel_values_videos"]
    pixels = found[ours.inputs]
    assert pixels.shape == expected.shape
    # Of two ways to round 8 bits: pillow's, and torchvision's.
    assert (pixels - expected).abs().max() < 0.06
    assert (pixels - expected).abs().mean() < 0.005
    if "video_grid_thw" in made:
        assert found["image_grid_thw"].tolist() == made["video_grid_thw"].tolist()
        grids = [part for part in sample.parts if isinstance(part, Grid)]
        planes, rows, columns = made["video_grid_thw"][0].tolist()
        assert [(sum(len(each.times) for each in grids), grids[0].rows, grids[0].columns)] == [
            (planes, rows // 2, columns // 2)
        ]
    if family == "qwen3_vl":
        indices += indices[-1:] * (len(indices) % 2)
        seconds = [(a + b) / 2 / fps for a, b in zip(indices[::2], indices[1::2])]
        assert sample.parts[::3] == [
            f"<{second:.1f} seconds><|vision_start|>" for second in seconds
        ]
