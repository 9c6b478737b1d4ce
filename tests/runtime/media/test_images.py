"""Images on the local engine give transformers' probabilities, are shared when they are the same,
and never cross.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image as Picture
from safetensors.torch import load_file, save_file
from transformers import AutoImageProcessor, AutoTokenizer, Idefics3Processor, LlavaProcessor

import sglang_lite as sgl
from sglang_lite.protocol import (
    Generation,
    JsonSchema,
    Media,
    ModelError,
    ParameterError,
    Regex,
    SamplingParams,
)
from sglang_lite.runtime.loading.model_files import open_model_files
from sglang_lite.runtime.media import header
from sglang_lite.runtime.models.config_fields import read_json
from sglang_lite.runtime.models.read_config import spec_from_config
from sglang_lite.runtime.requests.request_media import RequestMedia
from sglang_lite.runtime.tokens.image_span import Grid, MediaItem
from sglang_lite.runtime.tokens.virtual_ids import hash_to_virtual_ids
from tests.runtime.media.seeing import (
    FAMILIES,
    GREEDY,
    IMAGE_ID,
    Seeing,
    check,
    encoded,
    logprobs,
    png,
    save_seeing,
    seen,
    submit,
)


def _engine(folder: Path, **config: Any) -> sgl.Engine:
    return sgl.Engine(str(folder), in_process=True, dtype="float32", device="cpu", **config)


class Saved(dict[str, tuple[Path, Any]]):
    """Folder and model of each family, saved when they are first used."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __missing__(self, family: str) -> tuple[Path, Any]:
        folder = self._folder / family
        self[family] = folder, save_seeing(family, folder)
        return self[family]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("models"))


@pytest.fixture(params=FAMILIES, scope="module")
def seeing(request: pytest.FixtureRequest, saved: dict[str, tuple[Path, Any]]) -> Iterator[Seeing]:
    folder, model = saved[request.param]
    with _engine(folder) as engine:
        yield Seeing(folder, model, engine)


@pytest.fixture(scope="module")
def llava(saved: dict[str, tuple[Path, Any]]) -> Iterator[sgl.Engine]:
    with _engine(saved["llava"][0]) as engine:
        yield engine


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("sizes"),
    [[(50, 40)], [(32, 32), (90, 30)], [(20, 70), (33, 31), (64, 65)]],
    ids=["one", "two", "three"],
)
def test_answers_are_those_of_transformers(seeing: Seeing, sizes: list[tuple[int, int]]) -> None:
    images = [png(*size, seed=i) for i, size in enumerate(sizes)]
    parts: list[str | bytes] = ["ab"]
    for image in images:
        parts += [image, "cd"]
    check(seeing, seeing.engine.complete(seen(*parts), GREEDY), images)
    check(seeing, seeing.engine.complete(seen(*parts), GREEDY), images)  # from the cache


def _transparent(mode: str) -> bytes:
    """PNG of random colours, and of random transparency, or with one transparent colour."""
    random = np.random.default_rng(1)
    picture = Picture.fromarray(random.integers(0, 255, (41, 50, 3), dtype=np.uint8)).convert(mode)
    if picture.has_transparency_data:
        picture.putalpha(Picture.fromarray(random.integers(0, 255, (41, 50), dtype=np.uint8)))
        return encoded(picture, "PNG")
    corner = picture.getpixel((0, 0))
    assert corner is not None
    picture.paste(corner, (0, 0, 30, 30))
    return encoded(picture, "PNG", transparency=corner)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L", "RGB"])
def test_what_is_transparent_is_white_as_for_transformers(seeing: Seeing, mode: str) -> None:
    image = _transparent(mode)
    check(
        seeing,
        seeing.engine.complete(
            seen("ab", image, "cd"), msgspec.structs.replace(GREEDY, max_tokens=1)
        ),
        [image],
    )


@pytest.mark.sampled(4)
@pytest.mark.parametrize("chunk", [7, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_and_cache_hits_inside_an_image_change_nothing(
    saved: Any, family: str, chunk: int
) -> None:
    folder, model = saved[family]
    images = [png(80, 40), png(40, 80, seed=1)]
    with _engine(folder, step_tokens=chunk, max_running=4, page_size=16) as engine:
        prompts: list[list[str | bytes]]
        prompts = [
            ["ab", images[0], "c"],
            ["ab", images[0], "x", images[1], "d"],
            ["ab", images[1], "e"],
        ]
        for parts in prompts:
            used = [part for part in parts if isinstance(part, bytes)]
            check(Seeing(folder, model, engine), engine.complete(seen(*parts), GREEDY), used)


def test_tokens_that_are_computed_one_by_one_see_all_of_their_image(saved: Any) -> None:
    folder, model = saved["gemma3"]
    with _engine(folder, deterministic=True) as engine:
        images = [png(50, 40), png(40, 50, seed=1)]
        check(
            Seeing(folder, model, engine),
            engine.complete(seen("ab", images[0], "x", images[1], "d"), GREEDY),
            images,
        )


def test_a_pool_that_is_too_small_for_an_image_at_once_is_refused(
    saved: Any, tmp_path: Path
) -> None:
    shutil.copytree(saved["gemma3"][0], tmp_path, dirs_exist_ok=True)
    config = read_json(tmp_path / "config.json")
    config["text_config"]["sliding_window"] = 12
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ParameterError,
        match=r"max_total_tokens: a step has room for 10 tokens, and an image has 16",
    ):
        _engine(tmp_path, max_total_tokens=96)


def test_an_image_of_too_many_bytes_or_without_pillow_is_one_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(header, "MAX_BYTES", 100)
    with pytest.raises(
        ParameterError, match=r"image: .* bytes, the limit is 100\. Save it smaller\."
    ):
        header.read_image_size(Media(png(20, 20)))
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(
        ParameterError, match=r"needs the package pillow\. pip install 'sglang-lite\[media\]'"
    ):
        header.read_image_size(Media(b"any"))


def test_images_that_are_seen_as_a_whole_are_cut_by_no_chunk() -> None:
    items = [MediaItem(Media(), key, 4, 99, both_ways=True) for key in (b"a", b"b")]
    tokens = np.array(
        [5, *hash_to_virtual_ids(b"a", 4, 100), *hash_to_virtual_ids(b"b", 4, 100), 6, 7],
        dtype=np.int32,
    )
    media = RequestMedia.from_tokens(items, tokens, 100)
    assert media is not None
    assert media.limits.tolist() == [1, 5, 5, 5, 5, 9, 9, 9, 9]
    inside = {2: (1, 5), 3: (1, 5), 4: (1, 5), 6: (5, 9), 7: (5, 9), 8: (5, 9)}
    assert [media.find_unsplit_ends(end) for end in range(1, 12)] == [
        inside.get(end, (end, end)) for end in range(1, 12)
    ]


def test_a_second_question_runs_no_encoder_and_computes_its_text_alone(llava: sgl.Engine) -> None:
    llava.flush_cache()
    image = png(50, 60, seed=7)
    llava.complete(seen("ab", image, "c" * 10), GREEDY)
    before = llava.stats()["images_encoded"]
    usage = llava.complete(seen("ab", image, "c" * 10 + "d"), GREEDY).usage
    assert llava.stats()["images_encoded"] == before
    assert usage.cached_tokens >= 0.95 * (usage.prompt_tokens - 1)


def test_images_of_one_size_never_cross(llava: sgl.Engine) -> None:
    images = [png(28, 28, seed=seed) for seed in (11, 12)]
    expected = [llava.complete(seen("q", image, "?"), GREEDY) for image in images]
    assert expected[0].token_ids != expected[1].token_ids
    llava.flush_cache()
    order = random.Random(0).choices((0, 1), k=200)
    pending = [(which, submit(llava, seen("q", images[which], "?"), GREEDY)) for which in order]
    firsts = {0: 0, 1: 0}
    for which, future in pending:
        answer = future.result()
        assert answer.token_ids == expected[which].token_ids
        firsts[which] += answer.usage.cached_tokens <= 1  # "q" alone is common to both
    assert all(count >= 1 for count in firsts.values())


def test_every_sampling_parameter_runs_behind_an_image(llava: sgl.Engine) -> None:
    prompt = seen("ab", png(30, 30), "cd")
    cases: dict[str, Any] = {
        "frequency_penalty": 1.0, "presence_penalty": 1.0, "repetition_penalty": 1.5, "top_k": 5, "top_p": 0.5,
        "min_p": 0.1, "min_tokens": 3, "seed": 3, "n": 3, "stop": ("z",), "stop_token_ids": (5,), "stop_regex": ("y",),
        "logit_bias": ((70, 5.0),), "return_logprob": True, "top_logprobs_num": 2, "confidence": True,
        "return_prompt_token_ids": True, "temperature": 0.7,
    }  # fmt: skip
    for name, value in cases.items():
        given: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True, name: value}
        params = SamplingParams(**given)
        assert submit(llava, prompt, params).result().usage.prompt_tokens == 20, name
    limited = SamplingParams(max_tokens=6, return_logprob=True, logprob_start_len=18)
    assert len(llava.complete(prompt, limited).prompt_logprobs) == 2
    with pytest.raises(ParameterError, match="before an image"):
        llava.complete(
            prompt, SamplingParams(max_tokens=6, return_logprob=True, logprob_start_len=3)
        )
    assert IMAGE_ID in llava.complete(prompt, GREEDY).prompt_ids


def test_answers_about_an_image_obey_their_constraint(llava: sgl.Engine) -> None:
    prompts = [seen("ab", png(30, 30, seed=seed), "cd") for seed in range(5)]
    pending = [
        submit(llava, prompt, SamplingParams(max_tokens=8), Regex("[0-9]{3}")) for prompt in prompts
    ]
    assert all(len(each.result().text) == 3 and each.result().text.isdigit() for each in pending)
    fields = {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "y"]}}
    whole = {
        "type": "object",
        "properties": fields,
        "required": [*fields],
        "additionalProperties": False,
    }
    schema = JsonSchema(json.dumps(whole), whitespace="compact")
    pending = [submit(llava, prompt, SamplingParams(max_tokens=64), schema) for prompt in prompts]
    assert all(json.loads(each.result().text)["b"] in ("x", "y") for each in pending)


def test_drafts_behind_an_image_change_nothing_and_guess_no_image(
    saved: Any, llava: sgl.Engine
) -> None:
    image, params = png(30, 30), SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    prompts = [seen("abcabc", image, "abcabc"), seen("x", image, "y")]
    with _engine(saved["llava"][0], speculation="auto") as engine:
        for prompt in (*prompts, *prompts):
            assert (
                engine.complete(prompt, params).token_ids
                == llava.complete(prompt, params).token_ids
            )
        assert sum(each["drafted"] for each in engine.stats()["drafters"].values()) > 0


@pytest.mark.sampled(5)
def test_programs_fork_and_select_over_an_image(seeing: Seeing) -> None:
    images = [png(50, 40), png(40, 50, seed=1)]

    @sgl.function
    def look(s: sgl.ProgramState) -> None:
        s += "ab" + sgl.image(images[0]) + "cd" + sgl.gen("first", regex="[A-Z]{3}", temperature=0)
        s += (
            "ef"
            + sgl.gen("second", regex="[A-Z]{3}", temperature=0)
            + sgl.image(images[1])
            + sgl.gen("third", regex="[A-Z]{3}", temperature=0)
        )
        branches = s.fork(8)
        for i, branch in enumerate(branches):
            branch += f"{i}" + sgl.gen("answer", regex="[A-Z]{3}", temperature=0)
        branches.join()
        s += "gh" + sgl.select("chosen", ["ij", "kl"])

    state = look().run(backend=seeing.engine)
    for branch in range(8):
        parts = [
            "ab",
            images[0],
            "cd",
            state["first"],
            "ef",
            state["second"],
            images[1],
            state["third"],
            f"{branch}",
        ]
        expected = seeing.engine.complete(
            seen(*parts), SamplingParams(temperature=0), Regex("[A-Z]{3}")
        )
        assert state["answer"][branch] == expected.text
    assert state["chosen"] in ("ij", "kl")


@pytest.mark.sampled(5)
def test_choices_are_scored_behind_an_image(seeing: Seeing) -> None:
    image, found = png(50, 40), Future[Any]()
    seeing.engine.submit_select(seen("ab", image, "cd"), ["ij", "kl"], sink=found.set_result)
    prompt = seeing.engine.complete(seen("ab", image, "cd"), GREEDY).prompt_ids
    for scored in found.result(timeout=60).scores:
        ids = [*prompt, *scored.token_ids]
        expected = logprobs(seeing.model, seeing.folder, ids, [image])
        each = [expected[i - 1, ids[i]].item() for i in range(len(prompt), len(ids))]
        assert scored.logprobs == pytest.approx(each, abs=1e-4)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("family", FAMILIES)
def test_requests_that_are_retracted_read_their_images_again(saved: Any, family: str) -> None:
    folder, _ = saved[family]
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    images = [png(28, 28, seed=seed) for seed in range(12)]
    with _engine(folder, deterministic=True) as engine:
        expected = [engine.complete(seen("q", image), params).token_ids for image in images]
    # these write an image by more tokens
    room = {"onevision": 208, "idefics3": 160}.get(family, 96)
    with _engine(
        folder, max_total_tokens=room, max_running=6, step_tokens=7, deterministic=True
    ) as engine:
        pending = [submit(engine, seen("q", image), params) for image in images]
        answers = [each.result() for each in pending]
    assert [each.token_ids for each in answers] == expected
    assert any(each.meta["num_retractions"] for each in answers)


def test_images_that_need_more_than_the_store_has_are_refused_and_others_go_on(saved: Any) -> None:
    folder, _ = saved["llava"]
    with _engine(folder, max_total_tokens=64, context_length=64) as engine:
        images = [png(28, 28, seed=seed) for seed in range(30)]
        pending = [
            submit(engine, seen("q", image), SamplingParams(max_tokens=2)) for image in images
        ]
        assert all(isinstance(each.result(), Generation) for each in pending)
        assert engine.stats()["images_stored"] <= 16


def test_an_engine_in_its_own_process_reads_images(saved: Any) -> None:
    folder, model = saved["llava"]
    with sgl.Engine(str(folder), dtype="float32", device="cpu") as engine:
        seeing = Seeing(folder, model, engine)
        images = [png(50, 40)]
        check(seeing, engine.complete(seen("ab", images[0], "cd"), GREEDY), images)

        @sgl.function
        def look(s: sgl.ProgramState) -> None:
            s += (
                "ab"
                + sgl.image(images[0])
                + "cd"
                + sgl.gen("answer", max_tokens=6, temperature=0, ignore_eos=True)
            )

        assert (
            look().run(backend=engine)["answer"]
            == engine.complete(seen("ab", images[0], "cd"), GREEDY).text
        )


def test_settings_that_a_processor_saved_are_read_before_those_of_an_older_file(
    saved: Any, tmp_path: Path
) -> None:
    folder, model = saved["llava"]
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "preprocessor_config.json").unlink()
    assert open_model_files(tmp_path).media is None
    images = AutoImageProcessor.from_pretrained(folder, backend="pil")
    LlavaProcessor(images, AutoTokenizer.from_pretrained(folder), patch_size=7).save_pretrained(
        tmp_path
    )
    assert not (tmp_path / "preprocessor_config.json").exists()
    for _ in range(2):
        with _engine(tmp_path) as engine:
            check(
                Seeing(folder, model, engine),
                engine.complete(seen("ab", png(50, 40), "cd"), GREEDY),
                [png(50, 40)],
            )
        (tmp_path / "preprocessor_config.json").write_text(
            '{"image_processor_type": "of another model"}'
        )


def test_placeholders_are_those_of_transformers_for_all_sizes(saved: Any) -> None:
    folder, _ = saved["idefics3"]
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    spec = open_model_files(folder)
    names = SimpleNamespace(
        fake_image_token="<fake_token_around_image>", global_image_tag="<global-img>", image_token="<image>",
        image_seq_len=4,
    )  # fmt: skip
    assert spec.media is not None
    for width, height in [
        (1, 1),
        (31, 32),
        (33, 32),
        (32, 33),
        (96, 95),
        (97, 97),
        (200, 3),
        (3, 200),
        (64, 127),
        (640, 400),
    ]:
        made = processor(images=[[Picture.new("RGB", (width, height))]], return_row_col_info=True)
        expected = Idefics3Processor.replace_image_token(
            names, {"rows": made["rows"], "cols": made["cols"]}, 0
        )
        parts = spec.media.kinds["image"].parts(Media(png(width, height)))
        text = "".join("<image>" * part if isinstance(part, int) else str(part) for part in parts)
        assert text == expected, (width, height)


@pytest.mark.parametrize("family", ["qwen2_vl"])
def test_grids_are_those_of_transformers_for_all_sizes(saved: Any, family: str) -> None:
    folder, _ = saved[family]
    media, processor = (
        open_model_files(folder).media,
        AutoImageProcessor.from_pretrained(folder, backend="pil"),
    )
    assert media is not None
    sizes = [
        (1, 1),
        (7, 9),
        (12, 20),
        (20, 12),
        (31, 33),
        (50, 41),
        (100, 90),
        (400, 3),
        (3, 400),
        (95, 96),
    ]
    for width, height in sizes:
        made = processor(images=[[Picture.new("RGB", (width, height))]])["image_grid_thw"][
            0
        ].tolist()
        (grid,) = media.kinds["image"].parts(Media(png(width, height)))
        assert isinstance(grid, Grid)
        assert made == [1, 2 * grid.rows, 2 * grid.columns], (width, height)


@pytest.mark.sampled(5)
def test_an_image_of_any_size_has_as_many_features_as_placeholders(seeing: Seeing) -> None:
    sizes = [
        (17, 1),
        (1, 40),
        (48, 1),
        (5, 190),
        (31, 33),
        (40, 17),
        (17, 41),
        (64, 64),
        (100, 77),
        (200, 300),
    ]
    prompts = [seen("ab", png(*size), "c") for size in sizes]
    pending = [submit(seeing.engine, prompt, SamplingParams(max_tokens=1)) for prompt in prompts]
    # else the engine says how many
    assert all(isinstance(each.result(), Generation) for each in pending)


@pytest.mark.parametrize(("family", "size"), [("pixtral", (190, 1)), ("mistral3", (9, 9))])
def test_an_image_of_too_few_patches_is_refused(
    saved: Any, family: str, size: tuple[int, int]
) -> None:
    media = open_model_files(saved[family][0]).media
    assert media is not None
    with pytest.raises(
        ParameterError, match=f"{size[0]} x {size[1]} pixels have . of at least . patches"
    ):
        media.kinds["image"].parts(Media(png(*size)))


def test_experts_are_read_with_inputs_before_outputs_and_behind_them(
    saved: Any, tmp_path: Path
) -> None:
    folder, model = saved["qwen3_vl_moe"]
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    turned = {
        name: each.mT.contiguous() if ".experts." in name else each
        for name, each in tensors.items()
    }
    assert sum(each.shape != turned[name].shape for name, each in tensors.items()) == 6
    save_file(turned, tmp_path / "model.safetensors")
    for each in (folder, tmp_path):
        with _engine(each) as engine:
            check(
                Seeing(folder, model, engine),
                engine.complete(seen("ab", png(50, 40), "cd"), GREEDY),
                [png(50, 40)],
            )
    config = read_json(folder / "config.json")
    config["text_config"]["moe_intermediate_size"] = 32
    with pytest.raises(ModelError, match="experts of 32 by hidden_size 64 have square matrices"):
        spec_from_config(config, "config.json")


def test_a_config_without_a_text_part_is_that_of_the_decoder(saved: Any) -> None:
    folder, _ = saved["qwen2_vl"]
    config = read_json(folder / "config.json")
    text = config["text_config"]
    rope = {"type": "mrope", "mrope_section": text["rope_parameters"]["mrope_section"]}
    flat = {**text, **config, "model_type": "qwen2_vl", "rope_scaling": rope, "rope_theta": 1e4}
    del flat["text_config"], flat["rope_parameters"]
    found, expected = (spec_from_config(each, "config.json") for each in (flat, config))
    assert (
        [each.axes for each in found.ropes]
        == [(0, 0, 1, 1, 1, 2, 2, 2)]
        == [each.axes for each in expected.ropes]
    )
    assert replace(found, layers=()) == replace(expected, layers=())
    rope["mrope_section"] = [2, 3, 2]
    with pytest.raises(ModelError, match="mrope_section"):
        spec_from_config(flat, "config.json")


def test_a_hash_that_two_images_share_by_chance_is_not_used() -> None:
    items = [MediaItem(Media(), key, 16, 99) for key in (b"a", b"b")]
    tokens = np.array(
        [5, *hash_to_virtual_ids(b"a", 16, 100), 6, *hash_to_virtual_ids(b"b", 16, 100), 7],
        dtype=np.int32,
    )
    media = RequestMedia.from_tokens(items, tokens, 100)
    assert media is not None
    assert [media.trusted_cached_length(cached) for cached in (0, 1, 2, 4, 5, 17, 18, 19, 21, 22, 35)] == [
        0, 1, 1, 1, 5, 17, 18, 18, 18, 22, 35,
    ]  # fmt: skip
    assert media.restore_placeholders(tokens).tolist() == [5, *[99] * 16, 6, *[99] * 16, 7]
