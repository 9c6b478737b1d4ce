"""Cards that a model can't run on, or hardly: one line says why, and what to do."""

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sglang_lite.bench.shapes import SHAPES
from sglang_lite.protocol import ModelError, ParameterError
from sglang_lite.runtime.capacity import Sizes
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.executor import kv_pool_size
from sglang_lite.runtime.loading import load_model as load
from sglang_lite.runtime.loading.load_model import load_model, pick_device
from sglang_lite.runtime.models.memory_check import check_free_memory, rotary_bytes, weight_bytes
from sglang_lite.runtime.models.precision import Precision
from sglang_lite.runtime.parallel.layout import ALONE, Parallel

CUDA = torch.device("cuda", 0)
TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by downloading "
    "and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx"
)


@pytest.fixture
def old_driver(monkeypatch, tmp_path):
    """A machine with a driver of which torch says that it is too old."""

    def refuse():
        raise RuntimeError(f"{TOO_OLD}\nAlternatively, go to: https://pytorch.org")

    (tmp_path / "version").touch()
    monkeypatch.setattr(load, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", refuse)
    monkeypatch.setattr(torch.version, "cuda", "12.8")


def test_a_driver_that_is_too_old_is_said_in_torchs_words(old_driver):
    with pytest.raises(ParameterError) as refused:
        pick_device(EngineConfig(device="cuda"))
    assert str(refused.value).startswith(f"device: 'cuda' can't be used: torch says: {TOO_OLD}")
    assert 'Use device="cpu".' in str(refused.value)
    assert "Alternatively" not in str(refused.value)


def test_where_the_cpu_takes_its_place_the_log_says_why(old_driver, folders, monkeypatch, caplog):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = EngineConfig(model=folders[0], skip_tokenizer_init=True)
    with caplog.at_level(logging.WARNING, "sglang_lite"):
        assert load_model(config, Path(folders[0])).model.device.type == "cpu"
    assert (
        caplog.text.count(
            f"the model runs on the CPU, as the GPU can't be used: torch says: {TOO_OLD}"
        )
        == 1
    )


@pytest.mark.parametrize("hidden", [True, False])
def test_a_gpu_that_is_hidden_or_not_there_is_not_missed(
    old_driver, folders, monkeypatch, caplog, tmp_path, hidden
):
    if hidden:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    else:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(load, "DRIVER", tmp_path / "none")
    load_model(EngineConfig(model=folders[0], skip_tokenizer_init=True), Path(folders[0]))
    assert not caplog.text


def test_a_card_that_is_too_old_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    with pytest.raises(
        ParameterError, match=r"its compute capability is 7\.5; 8\.0 \(Ampere\) or newer is needed"
    ):
        pick_device(EngineConfig(device="cuda:0"))
    assert pick_device(EngineConfig()).type == "cpu"


def test_a_card_that_is_named_twice_is_said(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,0")
    with pytest.raises(
        ParameterError, match=r"CUDA_VISIBLE_DEVICES: '0,1,0' names a GPU twice.*Name each once"
    ):
        pick_device(EngineConfig(device="cuda"))


def test_a_torch_for_cpus_beside_a_driver_is_said(old_driver, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(
        ParameterError, match=r"a build for CPUs\. Install one for CUDA: pip install"
    ):
        pick_device(EngineConfig(device="cuda"))


@pytest.mark.parametrize(
    ("compiled", "runs"),
    [
        (["sm_80", "sm_90"], False),
        (["sm_80", "compute_90"], True),
        (["sm_120"], True),
        (["sm_121a"], False),
        (["sm_130"], False),
    ],
)
def test_a_torch_for_another_cuda_than_the_card_needs_is_said(monkeypatch, compiled, runs):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (12, 0))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: compiled)
    monkeypatch.setattr(torch.version, "cuda", "12.4")
    if runs:
        assert pick_device(EngineConfig(device="cuda")) == torch.device("cuda:0")
    else:
        with pytest.raises(
            ParameterError, match=r"torch, for CUDA 12\.4, has no kernels for .* Install a torch"
        ):
            pick_device(EngineConfig(device="cuda"))


# --------------------------------------------------------------------------------- a card with 8 GB


@pytest.fixture
def card(monkeypatch):
    """A card with 7.6 GiB, of which so many are free."""

    def of(free: float) -> None:
        monkeypatch.setattr(
            torch.cuda, "mem_get_info", lambda device: (int(free * 2**30), int(7.6 * 2**30))
        )
        for name in ("memory_reserved", "memory_allocated"):
            monkeypatch.setattr(torch.cuda, name, lambda device: 0)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    return of


def pool_tokens(
    shape: str, taken: float = 0.0, processes: int = 1, layout: Parallel = ALONE
) -> int:
    """Tokens of the pool beside the loaded weights of a shape in 16 bits, if another rank's card
    has so many GiB taken, or so many of the engine's processes are on one card.
    """
    spec = SHAPES[shape]
    half = torch.bfloat16
    model = SimpleNamespace(
        device=CUDA, spec=spec, attentions=[layer.attention for layer in spec.layers], shares_prefixes=True, vocab_size=spec.vocab_size, activation_elements=23_552,
        active_parameters=sum(layer.active_weight_elements(spec.hidden_size) for layer in spec.layers),
        token_bytes=2 * spec.kv_layout.numbers, state_bytes=0, precision=Precision(half, half, half),
    )  # fmt: skip
    sizes = EngineConfig().resolve_sizes(gpu=True, longest=spec.max_positions)
    assert sizes == Sizes(256, 8192, 16)
    room = kv_pool_size.cache_room(
        model,
        EngineConfig().mem_fraction,
        sizes,
        spec.max_positions,
        taken=int(taken * 2**30),
        processes=processes,
        layout=layout,
    )
    return kv_pool_size.pool_tokens(model, room, sizes, spec.max_positions)


def test_a_card_with_8_gb_takes_a_small_model(card):
    card(7.2)
    spec = SHAPES["qwen3-0.6b"]
    weights = weight_bytes(spec, 2)
    check_free_memory(
        {"weights": weights, "positions": rotary_bytes(spec, spec.max_positions)}, CUDA, "qwen", ""
    )
    card(7.2 - weights / 2**30)
    assert pool_tokens("qwen3-0.6b") > 30_000


def test_ranks_have_as_many_tokens_as_the_fullest_card_has_room_for(card):
    card(5.0)
    assert pool_tokens("qwen3-0.6b") == pool_tokens("qwen3-0.6b", taken=2.0)
    fewer = pool_tokens("qwen3-0.6b", taken=3.6)
    card(4.0)
    assert fewer == pool_tokens("qwen3-0.6b")


def test_processes_of_an_engine_have_a_part_of_their_card_each_whatever_the_others_have_taken(
    card, monkeypatch
):
    def of_two(free: float, own: float) -> int:
        card(free)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: int(own * 2**30))
        return pool_tokens("qwen3-0.6b", processes=2)

    assert of_two(7.2, 0.2) == of_two(2.0, 0.2) > of_two(7.2, 0.3) > 4000
    with pytest.raises(
        ModelError, match=r"of 3\.8 GiB, 1\.6 are taken \(the weights and libraries\)"
    ):
        of_two(7.2, 1.0)


def test_rows_of_other_replicas_and_of_steps_at_other_stages_have_room(card):
    card(7.2)
    alone, token = pool_tokens("qwen3-0.6b"), 2 * SHAPES["qwen3-0.6b"].kv_layout.numbers
    for layout, bytes_of_token in (
        (Parallel(tp=2, dp=2), 2 * 23_552),
        (Parallel(pp=3), 2 * 2 * 1024),
    ):
        taken = (alone - pool_tokens("qwen3-0.6b", layout=layout)) * token
        assert taken == pytest.approx(8192 * bytes_of_token, abs=16 * token)


def test_a_model_too_large_for_it_is_refused_before_it_is_read(card):
    card(7.2)
    with pytest.raises(ModelError) as refused:
        check_free_memory(
            {"weights": weight_bytes(SHAPES["llama-3.1-8b"], 2)},
            CUDA,
            "llama",
            "Take a smaller model.",
        )
    assert "llama: needs 15.0 GiB (weights 15.0 GiB); 7.2 GiB are free on cuda:0." in str(
        refused.value
    )


def test_a_model_that_leaves_no_room_for_tokens_is_refused_with_the_numbers(card):
    card(1.0)
    with pytest.raises(
        ModelError, match=r"of 7\.6 GiB, 6\.6 are taken .* leaves room for 0 tokens"
    ) as refused:
        pool_tokens("qwen3-0.6b")
    assert "Raise mem_fraction, lower step_tokens or max_running, or take a smaller model" in str(
        refused.value
    )
