"""Adapters of an engine by name: the host's tier."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

from sglang_lite.errors import shown
from sglang_lite.protocol import ParameterError
from sglang_lite.runtime.models.lora.adapter import Adapter, AdapterReader


@dataclass(slots=True)
class LoadedAdapter:
    """Adapter that requests can name.

    Attributes:
        name, path: its name, and the folder that it is read from.
        pinned: whether it stays in memory, and on the device.
        adapter: its tensors, or None while they are not in memory.
    """

    name: str
    path: Path
    pinned: bool
    adapter: Adapter | None


class LoadedAdapters:
    """Adapters that requests can name. Methods may be called by any thread.

    Args:
        reader: reads their folders.
        reserved: names that no adapter may have.
        max_loaded: maximum number of adapters in memory; None for no limit. The least recently used one that is not
            pinned gives way, and is read again when a request names it.
        max_pinned: maximum number of pinned ones.
    """

    def __init__(
        self, reader: AdapterReader, reserved: frozenset[str], max_loaded: int | None, max_pinned: int
    ) -> None:
        self._reader, self._reserved = reader, reserved
        self._max_loaded, self._max_pinned = max_loaded, max_pinned
        self._lock = threading.Lock()
        self._by_name: dict[str, LoadedAdapter] = {}  # least recently used first

    def list(self) -> list[LoadedAdapter]:
        """All adapters, by name."""
        with self._lock:
            return sorted(self._by_name.values(), key=lambda each: each.name)

    @property
    def bytes(self) -> int:
        """Bytes of the tensors in memory."""
        return sum(each.adapter.bytes for each in self.list() if each.adapter is not None)

    def load(self, name: str, path: Path, *, pinned: bool) -> None:
        """Reads an adapter, which requests can name from then on.

        Raises:
            ParameterError: the name can't be used, no more adapters can be pinned, or all that may be in memory are.
            ModelError: the adapter can't be used.
        """
        with self._lock:
            self._check_new(name, pinned=pinned)
        adapter = self._reader.read(name, path)  # without the lock, which the loop's thread may wait for
        with self._lock:
            self._check_new(name, pinned=pinned)
            self._make_room()
            self._by_name[name] = LoadedAdapter(name, path, pinned, adapter)

    def unload(self, name: str) -> Adapter | None:
        """Forgets an adapter: requests can't name it any more. Returns it, or None if it is not in memory.

        Raises:
            ParameterError: there is none of that name.
        """
        with self._lock:
            found = self._known(name, "lora_name")
            del self._by_name[name]
            return found.adapter

    def get(self, name: str) -> Adapter:
        """Adapter of a name, for a request.

        Raises:
            ParameterError: there is none, or all that may be in memory are pinned.
            ModelError: it had to be read again, and can't be used any more.
        """
        with self._lock:
            found = self._known(name, "lora_path")
            self._by_name[name] = self._by_name.pop(name)
            if found.adapter is not None:
                return found.adapter
        adapter = self._reader.read(name, found.path)
        with self._lock:
            if found.adapter is None:
                self._make_room()
                found.adapter = adapter
            return found.adapter

    def _known(self, name: str, parameter: str) -> LoadedAdapter:
        if name not in self._by_name:
            names = ", ".join(sorted(self._by_name)[:8]) or "none"
            hint = "Load it: load_lora_adapter()."
            if name in self._reserved:
                hint = "That is the model's name: leave it out."
            raise ParameterError(parameter, f"there is no adapter {shown(name)} (loaded: {names}).", hint=hint)
        return self._by_name[name]

    def _check_new(self, name: str, *, pinned: bool) -> None:
        if not name or ":" in name or "," in name:
            raise ParameterError("lora_name", f"{shown(name)} can't be one: it is empty, or has a colon or a comma.")
        if name in self._reserved:
            raise ParameterError("lora_name", f"{shown(name)} is the model's.", hint="Choose another one.")
        if name in self._by_name:
            raise ParameterError("lora_name", f"{shown(name)} is taken.", hint="Unload that adapter first.")
        if pinned and sum(each.pinned for each in self._by_name.values()) >= self._max_pinned:
            raise ParameterError(
                "pinned", f"{self._max_pinned} adapters are pinned already, and others need a place.",
                hint="Raise max_loras_per_batch, or leave pinned out.",
            )  # fmt: skip

    def _make_room(self) -> None:
        in_memory = [each for each in self._by_name.values() if each.adapter is not None]
        if self._max_loaded is None or len(in_memory) < self._max_loaded:
            return
        leaving = next((each for each in in_memory if not each.pinned), None)
        if leaving is None:
            raise ParameterError(
                "lora_path",
                f"{len(in_memory)} adapters are in memory, as many as may be, and all are pinned.",
                hint="Raise max_loaded_loras, or unload one.",
            )
        leaving.adapter = None
