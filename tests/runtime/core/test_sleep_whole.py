"""An engine sleeps with all that belongs to its weights: adapters, an encoder of images and its
features.

With a GPU, on it; without one, in memory of a CPU that forgets what it had.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence

import pytest
import torch

import sglang_lite as sgl
from sglang_lite.protocol import SamplingParams
from sglang_lite.runtime.models import weight_memory
from sglang_lite.runtime.models.weight_memory import WeightMemory
from tests.runtime.media.seeing import Seeing, check, engine_of, png, save_seeing, seen, submit
from tests.runtime.models.test_families import engine, prompts
from tests.runtime.models.test_lora import adapted, ask, farthest

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # that peft reads
GPU = torch.cuda.is_available()
FEW = SamplingParams(
    max_tokens=2, temperature=0, return_logprob=True, return_prompt_token_ids=True, ignore_eos=True
)
RANKED = ("one", "two", "three")
SMALL = {"threads": 1, "page_size": 4, "max_running": 2, "enable_memory_saver": True}


class ForgettingArena:
    """Memory of a CPU in which all bytes are ones after it was given back."""

    def __init__(self, _: torch.device) -> None:
        self.made: list[torch.Tensor] = []

    def allocate_bytes(self, size: int) -> torch.Tensor:
        self.made.append(torch.empty(size, dtype=torch.uint8))
        return self.made[-1]

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return (
            self.allocate_bytes(math.prod(shape) * dtype.itemsize).zero_().view(dtype).view(*shape)
        )

    def release_memory(self) -> None:
        for each in self.made:
            each.fill_(255)

    def restore_memory(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _memory(monkeypatch):
    """Keeps weights in memory that can be given back, without a GPU, too."""
    if GPU:
        return
    monkeypatch.setattr(weight_memory, "DeviceArena", ForgettingArena)
    monkeypatch.setattr(
        weight_memory, "pin_memory", lambda size: torch.empty(size, dtype=torch.uint8)
    )
    monkeypatch.setattr(weight_memory, "unpin_memory", lambda _: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)

    @torch.inference_mode()
    def save(model, *, backup):
        model.weight_memory = WeightMemory(model, backup=backup)

    monkeypatch.setattr("sglang_lite.runtime.core.engine_thread.save_memory", save)


@pytest.mark.skipif(
    not GPU, reason="a CPU's adapters are the host's; test_gpu_adapters.py has their memory"
)
def test_adapters_are_in_their_slots_again(tmp_path):
    base, reference = adapted(
        "qwen2", tmp_path, {"one": {"r": 20}, "two": {"r": 4}, "late": {"r": 8}}
    )
    paths = [f"{name}={reference.folders[name]}" for name in ("one", "two")]
    (ids,) = prompts(5)

    def asked(*names):
        return [(ask(running, ids, name, most=2), name) for name in names]

    def right(answers):
        return all(
            farthest(reference, ids, name, each.result(timeout=300)) <= 1e-4
            for each, name in answers
        )

    with engine(base, lora_paths=paths, max_total_tokens=400, **SMALL) as running:
        assert right(asked("one", "two", None))
        for level in (1, 2):
            running.sleep(level)
            if level == 1:
                running.load_lora_adapter("late", str(reference.folders["late"]))
            answers = asked("one", "two", None)
            running.wake()
            assert right(answers)
        assert running.stats()["adapter_copies"] == 2
        assert right(asked("late"))


def test_images_are_encoded_again(tmp_path):
    folder = tmp_path / "llava"
    model, images = save_seeing("llava", folder), [png(28, 28), png(28, 28, seed=1)]
    with engine_of(folder, **{"max_total_tokens": 512, **SMALL}) as running:
        seeing = Seeing(folder, model, running)
        check(seeing, running.complete(seen("ab", images[0], "c"), FEW), images[:1])
        for level in (1, 2):
            running.sleep(level)
            pending = [submit(running, seen("ab", image, "d"), FEW) for image in images]
            running.wake()
            for image, future in zip(images, pending):
                check(seeing, future.result(timeout=300), [image])


def held_bytes() -> int:
    """Bytes of the memory of all tensors of this process, each once."""
    gc.collect()
    tensors = (
        each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)
    )
    storages = [
        each.untyped_storage()
        for each in tensors
        if each.layout is torch.strided and not each.is_meta
    ]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def test_adapters_of_a_cpu_that_drops_its_weights_are_read_again(tmp_path):
    base, reference = adapted(
        "qwen2", tmp_path, {"one": {"r": 20}, "two": {"r": 4}, "three": {"r": 8}}
    )
    paths = [
        {"lora_name": name, "lora_path": str(reference.folders[name]), "pinned": name == "one"}
        for name in RANKED
    ]
    (ids,) = prompts(5)
    with engine(base, device="cpu", lora_paths=paths, max_total_tokens=400, threads=1) as running:

        def right(*names):
            answers = [(ask(running, ids, name, most=2), name) for name in names]
            return all(
                farthest(reference, ids, name, each.result(timeout=60)) <= 1e-4
                for each, name in answers
            )

        for _ in range(2):
            assert right("one", "two", "three", None)
            before, held = running.stats(), held_bytes()
            assert before["adapter_pool_bytes"] >= before["adapter_bytes"] > 0
            running.sleep(2)
            asleep = running.stats()
            assert (
                asleep["adapter_bytes"],
                asleep["adapter_pool_bytes"],
                asleep["adapters_resident"],
            ) == (0, 0, 0)
            assert held - held_bytes() >= before["adapter_pool_bytes"]
            waiting = ask(running, ids, "two", most=2)
            running.wake()
            assert farthest(reference, ids, "two", waiting.result(timeout=60)) <= 1e-4
            assert [each["lora_name"] for each in running.loras() if each["pinned"]] == ["one"]
        assert right("one", "three")
        running.sleep(1)  # which keeps them
        assert running.stats()["adapter_pool_bytes"] > 0
        running.wake()


@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl"])
def test_a_cpu_that_drops_its_weights_drops_its_encoder(kind, tmp_path):
    folder = tmp_path / kind
    model, image = save_seeing(kind, folder), png(28, 28)
    with engine_of(folder, max_total_tokens=512, threads=1, max_running=2, device="cpu") as running:
        seeing = Seeing(folder, model, running)
        check(seeing, running.complete(seen("ab", image, "c"), FEW), [image])
        size = running.stats()["encoder_bytes"]
        assert (
            size
            >= sum(each.nbytes for each in running.core.runner.model.encoder_weights.values())
            > 0
        )
        for _ in range(2):
            held = held_bytes()
            running.sleep(2)
            assert running.stats()["encoder_bytes"] == 0
            assert held - held_bytes() >= size
            pending = submit(running, seen("ab", image, "d"), FEW)
            running.wake()
            check(seeing, pending.result(timeout=60), [image])
            assert running.stats()["encoder_bytes"] == size


@pytest.mark.skipif(GPU, reason="has memory that runs out when it is told to")
def test_memory_that_is_short_is_told_and_the_same_call_may_come_again(tmp_path, monkeypatch):
    folder, prompt, few = (
        tmp_path / "llava",
        seen("ab", png(28, 28)),
        SamplingParams(max_tokens=4, temperature=0),
    )
    save_seeing("llava", folder)

    def refused(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate much")

    with engine_of(folder, enable_memory_saver=True) as running:
        expected = running.complete(prompt, few).token_ids
        with monkeypatch.context() as patch:
            patch.setattr(weight_memory, "pin_memory", refused)
            with pytest.raises(sgl.ModelError, match=r"can't be pinned: CUDA out of memory"):
                running.sleep()
        assert not running.is_sleeping()
        assert running.complete(prompt, few).token_ids == expected
        running.sleep()
        with monkeypatch.context() as patch:
            patch.setattr(ForgettingArena, "restore_memory", refused)
            with pytest.raises(
                sgl.OverloadedError, match=r"not enough memory to wake: CUDA out of memory"
            ):
                running.wake()
        assert running.is_sleeping()
        running.wake()
        assert running.complete(prompt, few).token_ids == expected
