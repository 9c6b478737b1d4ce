"""Weights that replace those of a running engine: equal to an engine loaded with them, bit for bit."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import sglang_lite as sgl
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.loading import load_model as load
from sglang_lite.runtime.models.gpu_decoder import GpuDecoder
from sglang_lite.runtime.models.new_weights import StagedWeights, tensor_pairs
from sglang_lite.runtime.models.weights.folder import TensorSource
from sglang_lite.runtime.models.weights.source import WeightSource
from tests.runtime.kernels import needs_kernels
from tests.runtime.models.test_families import COMPUTED, FAMILIES, SHAPE, ask, engine, prompts
from tests.runtime.models.tiny import randomise, save

GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}


def pair(name: str, root: Path) -> list[Path]:
    """Folders of two models of a family with different weights."""
    kind, changes = FAMILIES[name]
    if isinstance(kind, str):
        transformers = pytest.importorskip("transformers")
        kind = getattr(transformers, kind, None) or pytest.skip("transformers has none")
    folders = []
    for scale, folder in ((1.0, "old"), (0.8, "new")):
        model = randomise(kind(kind.config_class(**SHAPE | changes)))
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.mul_(scale)
        folders.append(save(model, root / folder))
    return folders


def told(running: sgl.Engine, most: int = 4) -> list:
    """Tokens and log-probabilities of the whole vocabulary."""
    generations = [ask(running, ids, most=most).result(timeout=60) for ids in prompts(20, 9)]
    return [(each.token_ids, [entry.top for entry in each.output_logprobs]) for each in generations]


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.fixture(params=sorted(FAMILIES))
def folders(request, tmp_path):
    return pair(request.param, tmp_path)


@pytest.mark.sampled(18)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_new_weights_equal_those_of_an_engine_that_loads_them(folders, dtype):
    old, new = folders
    given = list(tensors_of(new).items())
    with engine(new, dtype=dtype) as running:
        expected = told(running)
    with engine(old, dtype=dtype) as running:
        before = told(running)
        assert before != expected
        running.update_weights(str(new))
        assert told(running) == expected
        running.update_weights(str(old))
        assert told(running) == before
        for start in range(0, len(given), 2):  # each product gets its tensors in several calls
            running.update_weights_from_tensor(
                given[start : start + 2], flush_cache=start + 2 >= len(given)
            )
        assert told(running) == expected
        for name, tensor in given:
            if name.endswith(COMPUTED):
                continue
            read = torch.tensor(running.get_weights_by_name(name, 1000))
            wanted = tensor if dtype == "float32" else tensor.bfloat16().float()
            # some stay float32 in an engine of bfloat16
            atol, rtol = (1e-6, 1e-5) if dtype == "float32" else (1e-2, 5e-3)
            assert torch.allclose(read, wanted, rtol, atol), name


def opener_of(tensors: dict[str, torch.Tensor]) -> Callable[[], WeightSource]:
    return lambda: TensorSource("the test", tensors)


@pytest.fixture(scope="module")
def llamas(tmp_path_factory):
    return pair("llama-biases", tmp_path_factory.mktemp("llamas"))


def gpu_decoder(folder: Path, **settings: Any) -> GpuDecoder:
    """The decoder of a GPU, whose kernels nobody runs."""
    model = load.load_model(
        EngineConfig(model=str(folder), device="cpu", dtype="float32", **settings), folder
    ).model
    assert isinstance(model, GpuDecoder)
    return model


def all_tensors(model: GpuDecoder) -> dict[str, torch.Tensor]:
    whole = [model.embedding, model.head, model.norm, model.layers]
    # which all linear layers share
    scratch = {id(each): each for each in vars(model.linears).values()}
    return {
        f"{i}": old
        for i, (old, _) in enumerate(tensor_pairs(whole, copy.deepcopy(whole, scratch), ""))
    }


@needs_kernels
@pytest.mark.parametrize(
    "name", ["llama-biases", "deepseek-v2", "qwen2-moe", "gpt-neox", "gpt-oss", "gemma3", "gemma4"]
)
def test_new_weights_overwrite_those_of_a_gpu(name, tmp_path, monkeypatch):
    monkeypatch.setattr(load, "Decoder", GpuDecoder)
    old, new = pair(name, tmp_path)
    running, expected = gpu_decoder(old), all_tensors(gpu_decoder(new))
    found = all_tensors(running)
    addresses = [tensor.data_ptr() for tensor in found.values()]
    given = list(tensors_of(new).items())
    for start in range(0, len(given), 3):
        opener = opener_of(dict(given[start : start + 3]))
        with torch.inference_mode():
            StagedWeights(running, opener, whole=False).write_to_model()
    assert [tensor.data_ptr() for tensor in all_tensors(running).values()] == addresses
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in found)


def test_a_flattened_bucket_has_all_of_its_tensors(llamas):
    old, new = llamas
    tensors, parts, at = tensors_of(new), [], 0
    for name, tensor in tensors.items():
        end = at + tensor.numel()
        parts.append(
            SimpleNamespace(
                name=name, shape=tensor.shape, dtype=tensor.dtype, start_idx=at, end_idx=end
            )
        )
        at = end
    flat = torch.cat([tensor.flatten() for tensor in tensors.values()])
    with engine(new) as running:
        expected = told(running)
    with engine(old) as running:
        with pytest.raises(sgl.ParameterError, match="not within its bucket"):
            running.update_weights_from_tensor(
                {"flattened_tensor": flat[:-1], "metadata": parts}, "flattened_bucket"
            )
        running.update_weights_from_tensor(
            {"flattened_tensor": flat, "metadata": parts}, "flattened_bucket"
        )
        assert told(running) == expected


Q = "model.layers.1.self_attn.q_proj.weight"
REFUSED = {
    "misshapen": (lambda t: {Q: t[Q][:-1]}, r"q_proj.weight has shape \(47, 32\), the config says \(48, 32\)"),
    "extra": (lambda t: {Q: t[Q], "model.layers.9.mlp.up_proj.weight": t[Q]}, r"no place for model.layers.9.mlp"),
    "unknown": (lambda t: {"what.weight": t[Q]}, "no place for what.weight"),
    "nan": (lambda t: {Q: t[Q] * float("nan")}, "q_proj.weight has NaN or infinite elements"),
    "infinite in float32": (lambda t: {Q: t[Q].double() + 1e300}, "q_proj.weight has NaN or infinite elements"),
    "integers": (lambda t: {Q: t[Q].long()}, "q_proj.weight is stored as torch.int64"),
    "doubled": (lambda t: [(Q, t[Q]), (Q, t[Q])], "given twice"),
    "no tensor": (lambda t: {Q: 1.0}, "not a tensor"),
    "nothing": (lambda t: {}, "is empty"),
    "another one last": (lambda t: {**t, "model.norm.weight": t["model.norm.weight"] * float("inf")}, "norm.weight has NaN"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_tensors_that_do_not_fit_change_nothing(llamas, case):
    make, why = REFUSED[case]
    with engine(llamas[0]) as running:
        before = told(running)
        with pytest.raises(sgl.SglError, match=why):
            running.update_weights_from_tensor(make(tensors_of(llamas[1])))
        assert told(running) == before


@pytest.mark.parametrize("what", ["missing", "nan"])
def test_a_checkpoint_that_is_not_whole_changes_nothing(llamas, what, tmp_path):
    tensors = tensors_of(llamas[1])
    if what == "missing":
        del tensors[Q]
    else:
        tensors["model.norm.weight"][3] = float("nan")
    folder = tmp_path / "broken"
    shutil.copytree(llamas[1], folder)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with engine(llamas[0]) as running:
        before = told(running)
        with pytest.raises(
            sgl.ModelError, match="is missing" if what == "missing" else "NaN or infinite"
        ):
            running.update_weights_from_disk(str(folder))
        assert told(running) == before


@pytest.fixture
def other_head(tmp_path):
    """Folder of a model with one table for embedding and head, and tensors with two."""
    old, _ = pair("gemma", tmp_path)
    table = tensors_of(old)["model.embed_tokens.weight"]
    return old, {"model.embed_tokens.weight": table, "lm_head.weight": table * 0.5}


def test_a_head_of_its_own_replaces_a_shared_one_on_a_cpu(other_head):
    old, tensors = other_head
    with engine(old) as running:
        before = told(running)
        running.update_weights_from_tensor(tensors)
        assert told(running) != before


@needs_kernels
def test_a_head_of_its_own_is_refused_where_addresses_stay(other_head, monkeypatch):
    monkeypatch.setattr(load, "Decoder", GpuDecoder)
    old, tensors = other_head
    running = gpu_decoder(old)
    with torch.inference_mode(), pytest.raises(sgl.ModelError, match="one table for both"):
        StagedWeights(running, opener_of(tensors), whole=False)


@needs_kernels
def test_a_matrix_of_another_form_is_refused_where_addresses_stay(llamas, monkeypatch):
    monkeypatch.setattr(load, "Decoder", GpuDecoder)
    running = gpu_decoder(llamas[0])
    linear = running.layers[0].output
    monkeypatch.setattr(linear, "bias", None)
    opener = opener_of(tensors_of(llamas[1]))
    with (
        torch.inference_mode(),
        pytest.raises(sgl.ModelError, match=r"layer 0, output: .* another form"),
    ):
        StagedWeights(running, opener, whole=False)


@pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="no VNNI")  # noqa: SLF001 # torch has no other name for it
def test_a_quantised_product_takes_its_tensors_together(llamas):
    old, new = llamas
    with engine(new, dtype="int8") as running:
        expected = told(running)
    with engine(old, dtype="int8") as running:
        with pytest.raises(
            sgl.ModelError, match="in fewer bits in this engine, and can't be read back"
        ):
            running.update_weights_from_tensor({Q: tensors_of(new)[Q]})
        running.update_weights_from_tensor(tensors_of(new))
        assert told(running) == expected


def test_checksums_tell_what_has_changed(llamas):
    old, new = llamas
    with engine(old) as running:
        with pytest.raises(sgl.ParameterError, match="no snapshot"):
            running.check_weights("compare")
        with pytest.raises(sgl.ParameterError, match="none of checksum"):
            running.check_weights("reset_tensors")
        first = running.check_weights("snapshot")
        running.update_weights_from_tensor({Q: tensors_of(new)[Q]})
        assert running.check_weights("compare")["changed"] == [Q]
        running.update_weights(str(old))
        found = running.check_weights("compare")
        assert (found["changed"], found["checksums"], found["unreadable"]) == (
            [],
            first["checksums"],
            [],
        )
        with pytest.raises(sgl.ModelError, match="no tensor of this model"):
            running.get_weights_by_name("what")
