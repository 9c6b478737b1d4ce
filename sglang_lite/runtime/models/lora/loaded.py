"""Adapters that requests can name, and which of them are in host memory."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sglang_lite.errors import short_repr
from sglang_lite.protocol import ParameterError
from sglang_lite.runtime.models.lora.adapter import Adapter, AdapterFiles, AdapterReader


@dataclass(slots=True)
class LoadedAdapter:
    """Adapter that requests can name.

    Attributes:
        name: its name.
        files: files that it is read from, when a request first names it.
        pinned: whether it stays in memory, and on the device.
        adapter: its tensors, or None while they are not in memory.
        reading: lock held by the thread that reads its tensors.
        left: dropped copies of its tensors, as long as requests hold them.
    """

    name: str
    files: AdapterFiles
    pinned: bool
    adapter: Adapter | None
    reading: threading.Lock = field(default_factory=threading.Lock)
    left: weakref.WeakSet[Adapter] = field(default_factory=weakref.WeakSet)

    def drop_tensors(self) -> None:
        """Drops its tensors, which are read again when a request names it."""
        if self.adapter is not None:
            self.left.add(self.adapter)
        self.adapter = None


class LoadedAdapters:
    """Adapters that requests can name. Methods may be called from any thread.

    Args:
        reader: checks and reads their folders.
        reserved: names that no adapter may have.
        max_loaded, max_bytes: maximum number of adapters in memory, and of their bytes; None for no
            limit. The least recently used ones that are not pinned give way, and are read again
            when a request names them.
        max_pinned: maximum number of pinned ones.

    Attributes:
        reads: number of times that tensors were read.
    """

    def __init__(
        self,
        reader: AdapterReader,
        reserved: frozenset[str],
        max_loaded: int | None,
        max_pinned: int,
        max_bytes: int | None = None,
    ) -> None:
        self._reader = reader
        self._reserved = reserved
        self._max_loaded = max_loaded
        self._max_pinned = max_pinned
        self._max_bytes = max_bytes
        self.reads = 0
        self._lock = threading.Lock()
        self._by_name: dict[str, LoadedAdapter] = {}  # least recently used first

    def list(self) -> list[LoadedAdapter]:
        """Returns all adapters, sorted by name."""
        with self._lock:
            return sorted(self._by_name.values(), key=lambda each: each.name)

    @property
    def bytes(self) -> int:
        """Bytes of the tensors in memory."""
        return sum(each.adapter.bytes for each in self.list() if each.adapter is not None)

    def register_adapter(self, name: str, path: Path, *, pinned: bool) -> None:
        """Checks an adapter and makes it available to requests. Reads its tensors immediately only
        if it is pinned.

        Raises:
            ParameterError: the name can't be used, no more adapters can be pinned, or there is no
                room for the pinned adapter beside the others.
            ModelError: the adapter can't be used.
        """
        with self._lock:
            self._check_can_register(name, pinned=pinned)
        files = self._reader.open(path)
        adapter = self._read_tensors(name, files) if pinned else None
        with self._lock:
            self._check_can_register(name, pinned=pinned)
            if adapter is not None:
                self._make_room(adapter.bytes)
            self._by_name[name] = LoadedAdapter(name, files, pinned, adapter)

    def unload(self, name: str) -> Sequence[Adapter]:
        """Removes an adapter, so that requests can no longer name it. Returns all copies of its
        tensors that are still in memory, including those that only requests hold.

        Raises:
            ParameterError: there is no adapter of that name.
        """
        with self._lock:
            found = self._find(name, "lora_name")
            del self._by_name[name]
            return [*found.left, *(() if found.adapter is None else (found.adapter,))]

    def adapter_for(self, name: str) -> Adapter:
        """Returns the adapter that a request names. Reads its tensors if they are not in memory.
        Requests that wait for the same adapter share one read.

        Raises:
            ParameterError: there is no such adapter, or it doesn't fit into memory with the pinned
                ones.
            ModelError: its tensors can't be read or used.
        """
        found = self._mark_used(name)
        if (adapter := found.adapter) is not None:
            return adapter
        with found.reading:
            if (adapter := found.adapter) is None:
                adapter = self._read_tensors(name, found.files)
                with self._lock:
                    # another one has been loaded under its name
                    if self._find(name, "lora_path") is not found:
                        raise ParameterError(
                            "lora_path", f"{short_repr(name)} was unloaded.", hint="Ask again."
                        )
                    self._make_room(adapter.bytes)
                    found.adapter = adapter
            return adapter

    def drop_all(self) -> None:
        """Drops the tensors of all adapters. Requests keep those that they hold."""
        with self._lock:
            for each in self._by_name.values():
                each.drop_tensors()

    def is_in_memory(self, name: str) -> bool:
        """Returns False if `adapter_for` would have to read files. Also marks the adapter as just
        used.
        """
        try:
            return self._mark_used(name).adapter is not None
        except ParameterError:  # `adapter_for` will raise it
            return True

    def _mark_used(self, name: str) -> LoadedAdapter:
        with self._lock:
            found = self._find(name, "lora_path")
            self._by_name[name] = self._by_name.pop(name)
            return found

    def _read_tensors(self, name: str, files: AdapterFiles) -> Adapter:
        # without the lock, which the loop's thread may wait for
        adapter = self._reader.read_adapter(name, files)
        self.reads += 1
        return adapter

    def _find(self, name: str, parameter: str) -> LoadedAdapter:
        if name not in self._by_name:
            names = ", ".join(sorted(self._by_name)[:8]) or "none"
            hint = "Load it: load_lora_adapter()."
            if name in self._reserved:
                hint = "That is the model's name: leave it out."
            raise ParameterError(
                parameter, f"there is no adapter {short_repr(name)} (loaded: {names}).", hint=hint
            )
        return self._by_name[name]

    def _check_can_register(self, name: str, *, pinned: bool) -> None:
        if not name or ":" in name or "," in name:
            raise ParameterError(
                "lora_name",
                f"{short_repr(name)} can't be one: it is empty, or has a colon or a comma.",
            )
        if name in self._reserved:
            raise ParameterError(
                "lora_name", f"{short_repr(name)} is the model's.", hint="Choose another one."
            )
        if name in self._by_name:
            raise ParameterError(
                "lora_name", f"{short_repr(name)} is taken.", hint="Unload that adapter first."
            )
        if pinned and sum(each.pinned for each in self._by_name.values()) >= self._max_pinned:
            raise ParameterError(
                "pinned",
                f"{self._max_pinned} adapters are pinned already, and others need a place.",
                hint="Raise max_loras_per_batch, or leave pinned out.",
            )

    def _make_room(self, more: int) -> None:
        """Drops unpinned adapters until there is room in memory for another one, of `more` bytes."""
        in_memory = [
            (each, each.adapter.bytes)
            for each in self._by_name.values()
            if each.adapter is not None
        ]
        count = len(in_memory)
        size = sum(own for _, own in in_memory)
        leaving = list[LoadedAdapter]()
        for each, own in in_memory:
            if not self._exceeds_limits(count, size + more):
                break
            if not each.pinned:
                leaving.append(each)
                count = count - 1
                size = size - own
        if self._exceeds_limits(count, size + more):
            limit = (
                "" if self._max_bytes is None else f", and all may take {self._max_bytes >> 20:,}"
            )
            raise ParameterError(
                "lora_path",
                f"there is no room in memory: {count} adapters are pinned, with {size >> 20:,} MiB; this one takes "
                f"{more >> 20:,}{limit}.",
                hint="Raise max_loaded_loras, or unload pinned ones.",
            )
        for each in leaving:
            each.drop_tensors()

    def _exceeds_limits(self, count: int, size: int) -> bool:
        """Returns whether one more adapter would exceed the limits. `count` is the number of
        adapters without the new one. `size` is the bytes of all adapters, the new one included.
        """
        too_many = self._max_loaded is not None and count >= self._max_loaded
        return too_many or (self._max_bytes is not None and size > self._max_bytes)
