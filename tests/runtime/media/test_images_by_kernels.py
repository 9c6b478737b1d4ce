"""The GPU's kernels read features of images as the CPU's decoder does, and give transformers'
probabilities.

With a GPU, on it and through captured graphs; without one, on the CPU under Triton's
interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import sglang_lite as sgl
from sglang_lite.protocol import ParameterError, SamplingParams
from sglang_lite.runtime.models.gpu_decoder import GpuDecoder
from tests.runtime.kernels import needs_kernels
from tests.runtime.media.seeing import (
    FAMILIES,
    GREEDY,
    Seeing,
    check,
    png,
    save_seeing,
    seen,
    submit,
)

pytestmark = needs_kernels
GPU = torch.cuda.is_available()


# the interpreter takes seconds for each
FAMILIES_HERE = FAMILIES if GPU else ["qwen3_vl", "gemma3"]

FEW = msgspec.structs.replace(GREEDY, max_tokens=2)


class Kernels:
    """A model, and a maker of engines that run it by kernels."""

    def __init__(self, family: str, folder: Path) -> None:
        self.folder, self.model, self.opened = (
            folder,
            save_seeing(family, folder),
            list[sgl.Engine](),
        )

    def engine(self, **config: Any) -> sgl.Engine:
        with pytest.MonkeyPatch.context() as patch:
            if not GPU:
                patch.setattr("sglang_lite.runtime.loading.load_model.Decoder", GpuDecoder)
            settings = {
                "dtype": "float32",
                "max_total_tokens": 512,
                "threads": 1,
                "device": "cuda" if GPU else "cpu",
            }
            self.opened.append(
                sgl.Engine(str(self.folder), in_process=True, **{**settings, **config})
            )
        return self.opened[-1]

    def seeing(self, **config: Any) -> Seeing:
        return Seeing(self.folder, self.model, self.engine(**config))


@pytest.fixture(params=FAMILIES_HERE, scope="module")
def kernels(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Kernels]:
    made = Kernels(request.param, tmp_path_factory.mktemp(request.param))
    yield made
    for engine in made.opened:
        engine.close()


@pytest.mark.parametrize("step_tokens", [7, 64] if GPU else [7])
def test_answers_in_chunks_and_behind_a_cached_image(kernels: Kernels, step_tokens: int) -> None:
    seeing = kernels.seeing(step_tokens=step_tokens, max_running=4, page_size=4)
    image = png(60, 40)
    for text in ("c", "d"):
        answer = seeing.engine.complete(seen("ab", image, text), FEW)
        check(seeing, answer, [image])
    assert answer.usage.cached_tokens >= 4


@pytest.mark.skipif(
    not GPU, reason="the rows of a step are those of text, which test_gpu_runner.py runs"
)
def test_forks_and_retractions_read_features_again(kernels: Kernels) -> None:
    if "gemma3" in kernels.folder.name:
        with pytest.raises(ParameterError, match="can't see images"):
            kernels.engine(deterministic=True, dtype="bfloat16").complete(
                seen("q", png(28, 28)), GREEDY
            )
        return
    if "moe" in kernels.folder.name:
        with pytest.raises(ParameterError, match="a mixture of experts"):
            kernels.engine(deterministic=True, dtype="bfloat16")
        return
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    images = [png(28, 28, seed=seed) for seed in range(8)]
    exact: dict[str, Any] = {"deterministic": True, "dtype": "bfloat16"}
    plenty, tight = kernels.engine(**exact), kernels.engine(max_total_tokens=384, **exact)
    expected = [plenty.complete(seen("q", image), params).token_ids for image in images]
    pending = [submit(tight, seen("q", image), params) for image in images]
    assert [each.result().token_ids for each in pending] == expected

    @sgl.function
    def look(s: sgl.ProgramState) -> None:
        s += "ab" + sgl.image(images[0])
        branches = s.fork(8)
        for i, branch in enumerate(branches):
            branch += f"{i}" + sgl.gen("answer", max_tokens=4, temperature=0, ignore_eos=True)
        branches.join()

    state = look().run(backend=plenty)
    for i, answer in enumerate(state["answer"]):
        few = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
        assert answer == plenty.complete(seen("ab", images[0], f"{i}"), few).text


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_steps_run_as_graphs_and_images_in_batches(kernels: Kernels) -> None:
    seeing = kernels.seeing(max_running=16, max_total_tokens=4096)
    images = [png(30, 20, seed=seed) for seed in range(12)]
    pending = [submit(seeing.engine, seen("ab", image, "c"), FEW) for image in images]
    for image, future in zip(images, pending):
        check(seeing, future.result(), [image])
    assert seeing.engine.core.runner.graphs.captured  # type: ignore[attr-defined] # of the core in this process
