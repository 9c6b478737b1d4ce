"""Adapters in the host's memory give way by their bytes, and each is read once for all that wait
for it.
"""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest
import torch

import sglang_lite as sgl
from sglang_lite.runtime.models.lora.adapter import Adapter
from sglang_lite.runtime.models.lora.loaded import LoadedAdapters

MIB = 1 << 20


class Folders:
    """A reader of folders that are named after their size in MiB, which reads while `opened` is
    set.
    """

    def __init__(self):
        self.read_names, self.opened, self._numbers = [], threading.Event(), itertools.count()
        self.opened.set()

    def open(self, folder):
        return int(folder.name) * MIB

    def read_adapter(self, name, size):
        self.read_names.append(name)
        assert self.opened.wait(30)
        return Adapter(
            name, next(self._numbers), 8, (), "", pages=torch.empty(size, dtype=torch.uint8)
        )


def loaded(folders, *, max_loaded=None, mib=10):
    return LoadedAdapters(folders, frozenset(), max_loaded, 3, mib * MIB)


def used(adapters, name, mib):
    """An adapter that is loaded, and used."""
    adapters.register_adapter(name, Path(str(mib)), pinned=False)
    return adapters.adapter_for(name)


def test_tensors_are_read_when_a_request_names_them_or_they_are_pinned():
    folders = Folders()
    adapters = loaded(folders)
    for name in "abc":
        adapters.register_adapter(name, Path("4"), pinned=name == "b")
    assert (folders.read_names, adapters.bytes) == (["b"], 4 * MIB)
    assert not adapters.is_in_memory("a")
    assert adapters.adapter_for("a") is adapters.adapter_for("a")
    assert (folders.read_names, adapters.bytes) == (["b", "a"], 8 * MIB)


def test_the_least_recently_used_give_way_until_all_fit():
    folders = Folders()
    adapters = loaded(folders)
    for name, size in {"a": 4, "b": 3, "c": 3}.items():
        used(adapters, name, size)
    assert adapters.adapter_for("a").bytes == 4 * MIB  # so that b and c are older
    used(adapters, "d", 5)
    assert [each.name for each in adapters.list() if each.adapter is not None] == ["a", "d"]
    assert (adapters.is_in_memory("a"), adapters.is_in_memory("b")) == (True, False)
    assert adapters.adapter_for("b").name == "b"  # and d goes, as a was just looked at
    assert adapters.bytes == 7 * MIB
    assert folders.read_names == ["a", "b", "c", "d", "b"]
    assert adapters.reads == 5


def test_one_without_room_fails_alone_and_moves_nobody():
    adapters = loaded(Folders())
    adapters.register_adapter("pinned", Path("6"), pinned=True)
    used(adapters, "small", 2)
    adapters.register_adapter("large", Path("5"), pinned=False)
    for _ in range(2):
        with pytest.raises(
            sgl.ParameterError,
            match="no room in memory: 1 adapters are pinned, with 6 MiB; this one takes 5",
        ):
            adapters.adapter_for("large")
    with pytest.raises(sgl.ParameterError, match="no room in memory"):
        adapters.register_adapter("also", Path("5"), pinned=True)
    assert {each.name: each.adapter is not None for each in adapters.list()} == {
        "pinned": True, "small": True, "large": False,
    }  # fmt: skip
    used(adapters, "four", 4)
    adapters.unload("pinned")
    assert (
        adapters.adapter_for("large").bytes + adapters.adapter_for("four").bytes == adapters.bytes
    )


def test_pinned_adapters_count_as_much_as_torch_takes_for_them(monkeypatch):
    adapters = loaded(Folders(), mib=16)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    for name in "abc":
        used(adapters, name, 5)
    assert [each.name for each in adapters.list() if each.adapter is not None] == ["b", "c"]
    assert adapters.bytes == 16 * MIB


def test_a_folder_is_read_once_for_all_requests_that_wait():
    folders = Folders()
    adapters = loaded(folders)
    adapters.register_adapter("a", Path("6"), pinned=False)
    used(adapters, "b", 4)
    folders.opened.clear()
    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(adapters.adapter_for, "a") for _ in range(8)]
        assert adapters.is_in_memory("b")  # nobody else waits for a read
        assert adapters.adapter_for("b").name == "b"
        folders.opened.set()
        assert len({id(each.result(30)) for each in asked}) == 1
    assert folders.read_names == ["b", "a"]


@pytest.mark.parametrize("seed", range(5))
def test_random_uses_stay_within_both_bounds(seed):
    draw = Random(seed)
    adapters = loaded(Folders(), max_loaded=4, mib=12)
    for number in range(8):
        adapters.register_adapter(str(number), Path(str(draw.randrange(1, 5))), pinned=number < 2)
    for _ in range(60):
        name = str(draw.randrange(8))
        assert adapters.adapter_for(name).name == name
        in_memory = [each for each in adapters.list() if each.adapter is not None]
        assert len(in_memory) <= 4
        assert adapters.bytes <= 12 * MIB
        assert all(each in in_memory for each in adapters.list() if each.pinned)


def test_one_that_has_left_memory_is_unloaded_when_its_requests_have_ended():
    adapters = loaded(Folders())
    first = used(adapters, "a", 6)  # by a request
    used(adapters, "b", 6)
    assert not adapters.is_in_memory("a")
    assert [*adapters.unload("a")] == [first]
    used(adapters, "a", 6)
    used(adapters, "c", 6)
    assert [*adapters.unload("a")] == []  # nobody has that one
