"""Settings for images, each of which has an effect or is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sglang_lite as sgl
from sglang_lite.protocol import ModelError, ParameterError, SamplingParams
from tests.runtime.media.seeing import GREEDY, Seeing, check, png, save_seeing, seen

ONE = SamplingParams(max_tokens=1)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("qwen2_vl")
    return folder, save_seeing("qwen2_vl", folder)


@pytest.fixture(scope="module")
def limited(saved: tuple[Path, Any]) -> Iterator[sgl.Engine]:
    more: dict[str, Any] = {
        "limit_mm_data_per_request": {"image": 2, "video": 1},
        "mm_preprocess_cache_size_mb": 1,
    }
    with _engine(
        saved[0], **more, mm_process_config='{"image": {"max_pixels": 512, "min_pixels": 64}}'
    ) as engine:
        yield engine


def _engine(folder: Path, **config: Any) -> sgl.Engine:
    return sgl.Engine(str(folder), in_process=True, dtype="float32", device="cpu", **config)


def test_settings_of_the_processor_make_other_images(
    saved: tuple[Path, Any], limited: sgl.Engine, tmp_path: Path
) -> None:
    image = png(60, 40)
    answer = limited.complete(seen("ab", image, "c"), GREEDY)
    # a grid of 2 x 3 squares of 8 x 8 pixels
    assert answer.usage.prompt_tokens == 3 + 512 // 64 - 2
    folder = tmp_path / "qwen2_vl"
    save_seeing("qwen2_vl", folder)
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    settings["size"] = {"shortest_edge": 64, "longest_edge": 512}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    check(Seeing(folder, saved[1], limited), answer, [image])


def test_more_images_than_the_limit_are_refused_in_prompts_and_programs(
    limited: sgl.Engine,
) -> None:
    image = png(20, 20)
    assert limited.complete(seen(image, "a", image), ONE).usage.prompt_tokens > 1
    with pytest.raises(ParameterError, match="has 3 images, and 2 is the limit"):
        limited.complete(seen(image, image, "a", image), ONE)

    @sgl.function
    def look(s: sgl.ProgramState) -> None:
        for i in range(3):
            s += sgl.image(image) + sgl.gen(f"answer{i}", max_tokens=1)

    state = look().run(backend=limited)
    assert state.usage("answer1").image_tokens > state.usage("answer0").image_tokens > 0
    with pytest.raises(ParameterError, match="has 3 images, and 2 is the limit"):
        state["answer2"]


def test_a_cache_of_one_megabyte_has_room_for_its_features(limited: sgl.Engine) -> None:
    assert limited.config.image_cache_mb == 1


def test_features_that_have_no_room_are_computed_again(saved: tuple[Path, Any]) -> None:
    """Of 20 images of 256 tokens and 256 bytes for each: 16 have room in a megabyte."""
    images = [png(128, 128, seed=i) for i in range(20)]
    larger = {"image": {"max_pixels": 128 * 128}}
    with _engine(saved[0], image_cache_mb=1, mm_process_config=larger) as engine:
        for image in (*images, images[0]):
            engine.flush_cache()
            engine.complete(seen(image), ONE)
        assert engine.stats()["images_encoded"] == 21


def test_a_model_that_reads_images_can_be_without(saved: tuple[Path, Any]) -> None:
    with _engine(saved[0], enable_multimodal=False) as engine:
        assert not engine.reads_images
        assert engine.complete("abc", ONE).usage.prompt_tokens == 3
        with pytest.raises(ParameterError, match="can't see images"):
            engine.complete(seen("ab", png(9, 9)), ONE)


def test_a_model_without_images_is_refused_where_they_are_wanted() -> None:
    with pytest.raises(
        ParameterError, match=r"enable_multimodal: .* has a model that reads no images"
    ):
        sgl.Engine("smollm2-135m", in_process=True, enable_multimodal=True, load_format="dummy")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (
            {"limit_mm_data_per_request": {"image": 0}},
            "limit_mm_data_per_request: 0 is not right for 'image'",
        ),
        ({"limit_mm_data_per_request": {"picture": 1}}, "is no object with image, video, audio"),
        ({"limit_mm_data_per_request": "{"}, "limit_mm_data_per_request: '{' is no JSON"),
        (
            {"mm_process_config": {"audio": {"hop_length": 1}}},
            "mm_process_config: sounds have no settings",
        ),
        (
            {"mm_process_config": {"video": {"wings": 7}}},
            "mm_process_config: videos have no 'wings'. They have fps, ",
        ),
        ({"mm_process_config": {"image": 7}}, "mm_process_config: 7 is not right for 'image'"),
        (
            {"mm_process_config": {"image": {"wings": 7}}},
            "the model's image processor has no 'wings'",
        ),
    ],
)
def test_wrong_settings_are_refused_by_name(
    saved: tuple[Path, Any], given: dict[str, Any], why: str
) -> None:
    with pytest.raises(ParameterError, match=why):
        _engine(saved[0], **given)


def test_a_processor_that_transformers_has_not_is_a_named_error(tmp_path: Path) -> None:
    save_seeing("qwen2_vl", tmp_path / "qwen2_vl")
    file = tmp_path / "qwen2_vl" / "preprocessor_config.json"
    file.write_text(
        json.dumps({**json.loads(file.read_text()), "image_processor_type": "OfTomorrow"})
    )
    with pytest.raises(ModelError, match="can't make its image processor"):
        _engine(tmp_path / "qwen2_vl")
