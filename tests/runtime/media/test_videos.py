"""Videos on the local engine give transformers' probabilities, are shared when they are the same,
and never cross.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoImageProcessor

import sglang_lite as sgl
from sglang_lite.media.files import VideoHeader
from sglang_lite.protocol import (
    Generation,
    Media,
    ParameterError,
    Prompt,
    Regex,
    SamplingParams,
    Span,
)
from sglang_lite.runtime.loading.model_files import open_model_files
from sglang_lite.runtime.media.video_families import VIDEO_FAMILIES, video_settings
from sglang_lite.runtime.tokens.image_span import Grid
from tests.media_files import frames_in, mp4
from tests.runtime.media.seeing import (
    GREEDY,
    VIDEO_ID,
    Seeing,
    check_with,
    engine_of,
    png,
    save_seeing,
    seen,
    submit,
)

WATCHING = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "onevision", "smolvlm")
QWEN = WATCHING[:4]
# Frames that families take of 8 in 2 seconds, and two of them.
TAKEN: dict[str, Sequence[int]] = {
    "qwen2_vl": (0, 2, 4, 6), "qwen2_5_vl": (0, 2, 4, 6), "qwen3_vl": (0, 2, 5, 7), "qwen3_vl_moe": (0, 2, 5, 7),
    "onevision": range(8), "smolvlm": (0, 7),
}  # fmt: skip
TWO = {
    "qwen2_vl": (0, 4), "qwen2_5_vl": (0, 4), "qwen3_vl": (0, 7), "qwen3_vl_moe": (0, 7), "onevision": (0, 4),
    "smolvlm": (0, 7),
}  # fmt: skip


@pytest.fixture(params=WATCHING, scope="module")
def watching(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Seeing]:
    folder = tmp_path_factory.mktemp("models") / request.param
    model = save_seeing(request.param, folder)
    with engine_of(folder) as engine:
        yield Seeing(folder, model, engine)


def pixels(folder: Path, shown: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Inputs of transformers' encoder for frames, made by its processor of images, one frame at a
    time.
    """
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    if folder.name in QWEN:
        made = [processor(images=[each], return_tensors="pt") for each in shown]
        _, rows, columns = made[0]["image_grid_thw"][0].tolist()
        # Each patch has its frame twice: of two frames, the first of the one and the second of the
        # other.
        halves = [each["pixel_values"].view(rows * columns, 3, 2, -1) for each in made]
        pairs = [
            torch.stack((a[:, :, 0], b[:, :, 1]), 2).flatten(1)
            for a, b in zip(halves[::2], halves[1::2])
        ]
        grid = torch.tensor([[len(pairs), rows, columns]])
        return {"pixel_values_videos": torch.cat(pairs), "video_grid_thw": grid}
    if folder.name == "onevision":
        frames = [
            processor(images=[[each]], return_tensors="pt")["pixel_values"][0, 0] for each in shown
        ]
        return {"pixel_values_videos": torch.stack(frames)[None]}
    processor.do_image_splitting = False
    made = processor(images=[list(shown)], return_tensors="pt")
    return {name: made[name] for name in ("pixel_values", "pixel_attention_mask")}


def expected(
    seeing: Seeing, ids: Sequence[int], shown: Sequence[Sequence[Any]], seconds: float
) -> torch.Tensor:
    """transformers' log-probabilities [tokens, vocabulary] of ids about videos of these frames,
    from plane to plane of which there are so many seconds.
    """
    each = [pixels(seeing.folder, frames) for frames in shown]
    together = 1 if seeing.folder.name == "smolvlm" else 0
    given: dict[str, Any] = {
        name: torch.cat([one[name] for one in each], together) for name in each[0]
    }
    tokens = torch.tensor([list(ids)])
    if seeing.folder.name in QWEN:
        given["mm_token_type_ids"] = (tokens == VIDEO_ID).int() * 2
    if seeing.folder.name == "qwen2_5_vl":
        given["second_per_grid_ts"] = torch.tensor([seconds] * len(shown))
    with torch.inference_mode():
        return seeing.model(input_ids=tokens, **given).logits[0].float().log_softmax(-1)  # type: ignore[no-any-return] # of transformers


def check(seeing: Seeing, answer: Generation, *shown: Sequence[Any], seconds: float = 1.0) -> None:
    check_with(answer, lambda ids: expected(seeing, ids, shown, seconds))


def taken(seeing: Seeing, video: Media, *, two: bool = False) -> list[Any]:
    """Frames that a family takes of one with 8 frames in 2 seconds, or two of them."""
    indices = (TWO if two else TAKEN)[seeing.folder.name]
    shown = frames_in(video)
    return [shown[i] for i in indices]


def test_videos_have_transformers_probabilities(watching: Seeing) -> None:
    video, other = mp4(8, 48, 32), mp4(8, 32, 48)  # of sizes that Qwen's processors do not change
    answer = watching.engine.complete(seen("ab", video, "cd"), GREEDY)
    check(watching, answer, taken(watching, video))
    more = seen("ab", video, "ef", other, "g")
    answer = watching.engine.complete(more, GREEDY)
    check(watching, answer, taken(watching, video), taken(watching, other))
    assert answer.usage.cached_image_tokens > 0
    runs = watching.engine.stats()["images_encoded"]
    assert watching.engine.complete(more, GREEDY).token_ids == answer.token_ids
    assert watching.engine.stats()["images_encoded"] == runs
    # With another number of frames it is another video.
    few = msgspec.structs.replace(video, frames=2)
    check(
        watching,
        watching.engine.complete(seen("ab", few, "cd"), GREEDY),
        taken(watching, video, two=True),
    )


@pytest.mark.sampled(5)
@pytest.mark.parametrize("step_tokens", [7, 64])
def test_a_video_is_computed_in_chunks_forked_and_found_in_the_cache(
    watching: Seeing, step_tokens: int
) -> None:
    video = mp4(8, 48, 32)
    with engine_of(watching.folder, step_tokens=step_tokens) as engine:
        check(watching, engine.complete(seen("ab", video, "cd"), GREEDY), taken(watching, video))

        @sgl.function
        def watch(s: sgl.ProgramState) -> None:
            s += "ab" + sgl.video(video.data, 8)
            branches = s.fork(4)
            for i, branch in enumerate(branches):
                branch += f"{i}" + sgl.gen("answer", regex="[A-Z]{3}", temperature=0)
            branches.join()

        state = watch().run(backend=engine)
        all_frames = msgspec.structs.replace(video, frames=8)
        params, constraint = SamplingParams(temperature=0), Regex("[A-Z]{3}")
        answers = [
            engine.complete(seen("ab", all_frames, f"{i}"), params, constraint) for i in range(4)
        ]
        assert state["answer"] == [each.text for each in answers]
        assert engine.stats()["images_encoded"] == 2


@pytest.mark.parametrize("watching", ["qwen2_vl", "qwen2_5_vl"], indirect=True)
def test_positions_in_time_go_beyond_those_of_rows_and_columns(watching: Seeing) -> None:
    """transformers 5 numbers the text behind a video by its rows and columns alone; the models were
    trained with the largest number before it (arXiv:2409.12191). So positions are given to it.
    """
    video = mp4(16, 16, 16, fps=2)  # 8 planes of 2 x 2 squares: half a second from frame to frame
    answer = watching.engine.complete(seen("ab", video, "cd"), GREEDY)
    times = np.arange(8) * (2 if watching.folder.name == "qwen2_5_vl" else 1)
    grid = (
        np.stack(np.meshgrid(times, np.arange(2), np.arange(2), indexing="ij")).reshape(3, -1) + 2
    )

    def logprobs(ids: Sequence[int]) -> torch.Tensor:
        behind = np.tile(np.arange(len(ids) - 2 - grid.shape[1]) + grid.max() + 1, (3, 1))
        positions = np.concatenate((np.tile(np.arange(2), (3, 1)), grid, behind), 1)
        given: Any = pixels(watching.folder, frames_in(video))
        tokens = torch.tensor([list(ids)])
        with torch.inference_mode():
            found = watching.model(
                input_ids=tokens, position_ids=torch.from_numpy(positions)[:, None], **given
            )
        return found.logits[0].float().log_softmax(-1)  # type: ignore[no-any-return] # of transformers

    assert answer.usage.prompt_tokens == 4 + grid.shape[1]
    check_with(answer, logprobs)


@pytest.mark.sampled(3)
def test_requests_about_videos_of_equal_size_never_cross(watching: Seeing) -> None:
    videos = [mp4(8, 48, 32), mp4(9, 48, 32)]
    few = [msgspec.structs.replace(each, frames=2) for each in videos]
    alone = [watching.engine.complete(seen("q", each), GREEDY).token_ids for each in few]
    pending = [submit(watching.engine, seen("q", few[i % 2]), GREEDY) for i in range(12)]
    assert [each.result().token_ids for each in pending] == alone * 6


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("family", "room"), [("qwen2_5_vl", 128), ("qwen3_vl", 176)])
def test_requests_that_are_retracted_read_their_videos_again(
    family: str, room: int, tmp_path: Path
) -> None:
    save_seeing(family, tmp_path)
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    videos = [msgspec.structs.replace(mp4(8 + i, 32, 32), frames=2) for i in range(7)]
    exact: dict[str, Any] = {"device": "cpu", "deterministic": True}
    with engine_of(tmp_path, **exact) as engine:
        expected = [engine.complete(seen("q", video), params).token_ids for video in videos]
    with engine_of(
        tmp_path, max_total_tokens=room, max_running=6, step_tokens=7, **exact
    ) as engine:
        answers = [
            each.result() for each in [submit(engine, seen("q", video), params) for video in videos]
        ]
    assert [each.token_ids for each in answers] == expected
    assert any(each.meta["num_retractions"] for each in answers)


@pytest.mark.sampled(3)
def test_a_video_and_an_image_share_a_prompt_and_are_named_by_their_own_placeholders(
    watching: Seeing,
) -> None:
    media = open_model_files(watching.folder).media
    assert media is not None
    video, image = mp4(8, 48, 32), png(48, 32)
    named = {kind: each.named for kind, each in media.kinds.items()}
    text = f"a{named['video']}b{named['image']}c"
    pictures = (Media(image, "image/png"), video)  # each kind in its order
    answer = watching.engine.complete(Prompt((Span(text),), images=pictures), GREEDY)
    assert (
        answer.token_ids
        == watching.engine.complete(seen("a", video, "b", image, "c"), GREEDY).token_ids
    )
    generated = watching.engine.generate(
        text, {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}, image_data=image, video_data=video.data,
        modalities=["image", "video"],
    )  # fmt: skip
    assert generated["output_ids"] == list(answer.token_ids)
    with pytest.raises(ParameterError, match=r"has 1 placeholder, and 2 videos\. Write "):
        watching.engine.generate(text, {}, image_data=image, video_data=[video.data] * 2)


@pytest.mark.parametrize("family", ["llava"])
def test_a_model_without_videos_names_them_and_is_shown_frames(family: str, tmp_path: Path) -> None:
    save_seeing(family, tmp_path)
    video = mp4(8, 48, 32)
    with engine_of(tmp_path) as engine:
        with pytest.raises(ParameterError, match="can't watch videos"):
            engine.generate("<image>", {}, video_data=video.data)

        @sgl.function
        def watch(s: sgl.ProgramState) -> None:
            s += "ab" + sgl.video(video.data, 3) + sgl.gen("answer", max_tokens=1)

        assert watch().run(backend=engine).usage("answer").image_tokens == 3 * 16


# --------------------------------------------------------------------------------- frames and sizes

# of published checkpoints: config, settings
PROCESSORS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": ({"vision_config": {}}, {"min_pixels": 3136, "max_pixels": 12845056}),
    "qwen2_5_vl": ({"vision_config": {"tokens_per_second": 2}}, {"min_pixels": 3136, "max_pixels": 12845056}),
    "qwen3_vl": ({}, {"size": {"longest_edge": 25165824, "shortest_edge": 4096}, "patch_size": 16}),
    "llava_onevision": (
        {"vision_config": {"image_size": 384, "patch_size": 14}}, {"size": {"height": 384, "width": 384}},
    ),
    "smolvlm": (
        {"vision_config": {"image_size": 512, "patch_size": 16}, "scale_factor": 4},
        {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512},
         "video_sampling": {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": 512}}},
    ),
}  # fmt: skip


def sample(family: str, video: VideoHeader, wanted: int = 0) -> Any:
    config, saved = PROCESSORS[family]
    made = VIDEO_FAMILIES[family]({"model_type": family, **config}, video_settings(saved, {}))
    return made.sample(video, wanted)


def test_frames_are_two_a_second_with_their_times() -> None:
    minute = VideoHeader(1800, 30.0, 1280, 720)
    of_qwen2, of_qwen25, of_qwen3 = (sample(family, minute) for family in QWEN[:3])
    assert [*of_qwen2.indices] == [*of_qwen25.indices] == [15 * i for i in range(120)]
    assert of_qwen2.parts == [Grid(26, 46, tuple(range(60)))]
    assert of_qwen25.parts == [Grid(26, 46, tuple(range(0, 120, 2)))]  # 2 positions a second
    assert of_qwen2.sizes == of_qwen25.sizes == ((46 * 28, 26 * 28),)
    assert [*of_qwen3.indices[:3], of_qwen3.indices[-1]] == [0, 15, 30, 1799]
    # 120 frames of 1280 x 720 are 110 million pixels, of at most 25.
    assert of_qwen3.parts[1] == Grid(10, 19)
    assert of_qwen3.parts[0] == "<0.2 seconds><|vision_start|>"
    assert of_qwen3.parts[-3:] == ["<59.7 seconds><|vision_start|>", Grid(10, 19), "<|vision_end|>"]
    assert of_qwen3.sizes == ((19 * 32, 10 * 32),)


def test_frames_of_other_families() -> None:
    minute = VideoHeader(1800, 30.0, 1280, 720)
    of_onevision, of_smolvlm = sample("llava_onevision", minute), sample("smolvlm", minute)
    assert [*of_onevision.indices[:3]] == [0, 56, 112]
    assert (len(of_onevision.indices), of_onevision.parts) == (32, (32 * 14 * 14 + 1,))
    assert (len(of_smolvlm.indices), of_smolvlm.indices[-1]) == (60, 1799)
    assert of_smolvlm.parts[0] == (
        "You are provided the following series of sixty frames from a 0:01:00 [H:MM:SS] video.\n"
    )
    assert of_smolvlm.parts[1:4] == (
        "\nFrame from 00:00:<fake_token_around_image><global-img>",
        64,
        "<fake_token_around_image>",
    )
    assert of_smolvlm.parts[-1] == "\n\n"
    assert of_smolvlm.sizes == ((512, 288), (512, 512))


@pytest.mark.parametrize("family", PROCESSORS)
def test_videos_of_any_length_have_frames(family: str) -> None:
    for frames in (1, 2, 3, 5, 100_000):
        for wanted in (0, 1, 3, 16):
            found = sample(family, VideoHeader(frames, 29.97, 1280, 720), wanted)
            assert found.indices[-1] < frames
            assert sorted(found.indices) == [*found.indices]
            assert len(found.indices) <= 768
            assert family not in QWEN or len(found.indices) % 2 == 0


def test_frames_that_are_too_sparse_for_their_positions_are_refused() -> None:
    with pytest.raises(
        ParameterError, match="its 4 frames are 3,600 seconds, which 2,392 tokens can't tell"
    ):
        sample("qwen2_5_vl", VideoHeader(108_000, 30.0, 1280, 720), 4)
