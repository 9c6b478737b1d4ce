"""Writes prefixes from the host tier of the KV cache to files of the user, and reads them back.

Files are written and read on separate threads. The loop's thread only pins slots of the host, so no
step waits for a file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import takewhile
from pathlib import Path

import msgspec
import numpy as np

from sglang_lite.protocol import CapabilityError, ParameterError
from sglang_lite.runtime.core.inbox import Inbox
from sglang_lite.runtime.kv_cache.page_file import (
    THREADS,
    PageFile,
    open_pages,
    pack_pages,
    write_pages,
)
from sglang_lite.runtime.kv_cache.page_sums import DamagedFileError
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.kv_cache.prefix_cache import PrefixCache
from sglang_lite.runtime.kv_cache.prefix_space import PrefixSpace
from sglang_lite.runtime.kv_cache.state_tier import StateTier
from sglang_lite.runtime.kv_cache.tiers import Tiers

_WAIT_S = 0.001  # pause between checks whether copies have completed
_STEPS = 8  # parts a file is read in, so copies to the device overlap reading the next part


class _Header(msgspec.Struct, frozen=True, array_like=True):
    """Header of a file: the tokens of the prefix, int32, and the key of the `PageNames` used by the
    engine that wrote the file.
    """

    key: bytes
    tokens: bytes


class _StateHeader(msgspec.Struct, frozen=True, array_like=True):
    """Header of a file's second part, which has the state at the end of the prefix: the description
    of the engine's states, and the hash of the first part's header.
    """

    states: str
    prefix: bytes


@dataclass(eq=False, slots=True)
class _Pinned:
    """Pinned slots of the host tier.

    Attributes:
        key: key of `PageNames` when they were pinned.
        slots: int32, the slots that are not adopted yet.
        copy: number of the last copy that may use the slots.
        state_slots: int32, the slot of the state at the end of the pages; empty for models without
            states, or once the state is adopted.
        state_copy: number of the last copy of a state that may use this slot.
    """

    key: bytes
    slots: Ints
    copy: int
    state_slots: Ints
    state_copy: int


class PrefixFiles:
    """Writer and reader of the files in which users keep prefixes of the KV cache.

    Args:
        store: the engine's cache.
        inbox: commands for the loop's thread.

    Raises:
        CapabilityError: the cache has no tiers below the device.
    """

    def __init__(self, store: PrefixCache, inbox: Inbox) -> None:
        if not isinstance(store.source, Tiers):
            raise CapabilityError(
                "the engine keeps no prefixes below the device.",
                hint="Make it with enable_hierarchical_cache=True.",
            )
        self._store = store
        self._tiers = store.source
        self._host = store.source.host
        self._states = store.source.states
        self._inbox = inbox

    def export_prefix_file(
        self, tokens: Ints, namespace: str, path: str, secret: str | None
    ) -> int:
        """Writes the cached part of a prefix; see `Engine.export_prefix`."""
        with self._hold_pinned_slots(partial(self._copy_and_pin, tokens, namespace)) as pinned:
            if not len(pinned.slots):
                what = "page" if self._states is None else "state"
                raise ParameterError(
                    "prompt", f"the cache has no {what} of it.", hint="Generate from it first."
                )
            kept = tokens[: len(pinned.slots) * self._tiers.names.page_size]
            header = msgspec.msgpack.encode(_Header(pinned.key, kept.tobytes()))
            rows = self._host.memory.rows
            following = self._pack_state(header, pinned, secret)
            try:
                write_pages(Path(path), header, rows, pinned.slots, secret, following)
            except OSError as error:
                hint = "Make room on its disk, or give another path that the engine may write."
                raise ParameterError(
                    "path", f"the file can't be written: {error}.", hint=hint
                ) from error
        return len(kept)

    def _pack_state(
        self, header: bytes, pinned: _Pinned, secret: str | None
    ) -> list[bytes | memoryview]:
        """Returns the part of a file with the state; empty for models without states."""
        if self._states is None:
            return []
        of_state = _StateHeader(self._tiers.names.states, blake2b(header).digest())
        rows = self._states.host.memory.rows
        return pack_pages(msgspec.msgpack.encode(of_state), rows, pinned.state_slots, secret)

    def import_prefix_file(self, path: str, namespace: str, secret: str | None) -> int:
        """Reads a file into the host tier, and starts fetching it to the device; see
        `Engine.import_prefix`.
        """
        page_size = self._tiers.names.page_size
        try:
            with open_pages(path, secret) as file:
                tokens = self._read_tokens(file, path)
                names = self._page_names_of(tokens, namespace)
                with (
                    self._hold_pinned_slots(partial(self._reserve_slots, file.pages)) as pinned,
                    ThreadPoolExecutor(THREADS) as threads,
                ):
                    slots = pinned.slots
                    steps = _STEPS
                    if self._states is not None:
                        self._read_state(file, self._states, pinned)
                        steps = 1  # no page is useful before the last one has arrived
                    done = 0
                    for count in file.read_with_threads(threads, self._host.memory.rows, slots):
                        if count == len(slots) or count - done >= file.pages / steps:
                            self._inbox.call_and_wait(
                                partial(self._adopt_slots, names[done:count], pinned)
                            )
                            self._inbox.call_and_wait(
                                partial(
                                    self._fetch_to_device, tokens[: count * page_size], namespace
                                )
                            )
                            done = count
        except OSError as error:
            raise ParameterError("path", f"the file can't be read: {error}") from error
        except DamagedFileError as error:
            raise ParameterError(
                "path", f"{path!r} is no whole file of a prefix: {error}."
            ) from error
        return len(slots) * page_size

    def _read_state(self, file: PageFile, states: StateTier, pinned: _Pinned) -> None:
        """Reads the state of a file into its pinned slot. Raises if the host has no room for it and
        for all pages.
        """
        if len(pinned.slots) < file.pages or not len(pinned.state_slots):
            raise ParameterError(
                "path",
                f"the host has room for {len(pinned.slots)} of its {file.pages} pages, which are of no use without "
                "the state behind the last one.",
                hint="Raise hicache_ratio or hicache_size.",
            )
        rows = states.host.memory.rows
        part = file.following
        if part is None or part.page_bytes != rows.shape[1]:
            raise DamagedFileError("it has no state")
        if _decode_state_header(part).prefix != blake2b(file.header).digest():
            raise DamagedFileError("its state is of another prefix")
        part.read_into(rows, pinned.state_slots)

    def _read_tokens(self, file: PageFile, path: str) -> Ints:
        """Returns the tokens of a file, int32. Raises if its pages don't match this engine."""
        names = self._tiers.names
        try:
            header = msgspec.msgpack.decode(file.header, type=_Header)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise DamagedFileError(
                "it is of the cache's own folder, or another program's"
            ) from error
        if header.key != names.key:
            there = "" if file.following is None else _decode_state_header(file.following).states
            if there != names.states:
                raise ParameterError(
                    "path",
                    f"{path!r} has {_or_none(there)}, and the engine {_or_none(names.states)}.",
                    hint="Export it again from an engine like this one.",
                )
            raise ParameterError(
                "path",
                f"{path!r} is of another model, version of its weights, data type or size of pages.",
                hint="Export it again from an engine like this one.",
            )
        fits = file.page_bytes == self._host.memory.rows.shape[1]
        if (
            not fits
            or len(header.tokens) != file.pages * names.page_size * np.dtype(np.int32).itemsize
        ):
            raise DamagedFileError("it has other pages than it says")
        return np.frombuffer(header.tokens, dtype=np.int32)

    @contextmanager
    def _hold_pinned_slots(self, pin: Callable[[], _Pinned]) -> Iterator[_Pinned]:
        """Pins slots of the host, and waits for copies that were launched earlier. On exit, unpins
        the slots that have not been adopted.
        """
        pinned = self._inbox.call_and_wait(pin)
        try:
            while not self._inbox.call_and_wait(partial(self._have_copies_completed, pinned)):
                time.sleep(_WAIT_S)
            yield pinned
        finally:
            self._inbox.post_if_open(partial(self._unpin, pinned))

    # ------------------------------------------------------------------------- on the loop's thread

    def _have_copies_completed(self, pinned: _Pinned) -> bool:
        """Returns whether all copies that may use pinned slots have completed."""
        states = 0 if self._states is None else self._states.settle_copies()
        pages = self._host.memory.count_completed()
        return pages >= pinned.copy and states >= pinned.state_copy

    def _unpin(self, pinned: _Pinned) -> None:
        """Unpins the slots that have not been adopted."""
        self._host.unpin_slots(pinned.slots)
        if self._states is not None:
            self._states.host.unpin_slots(pinned.state_slots)

    def _copy_and_pin(self, tokens: Ints, namespace: str) -> _Pinned:
        """Copies the pages of a prefix from the device to the host. Then pins the host's pages of
        the prefix, up to the first missing one or, for models with states, up to the last state.
        """
        host = self._host
        match = self._store.tree.match_prefix(tokens, namespace)
        names = self._page_names_of(tokens, namespace)
        host.save_pages(names[: len(match.pages)], match.pages)
        names = list(takewhile(host.__contains__, names))
        state_slots = _NONE
        if self._states is not None:
            self._states.save_states_of_prefix(self._tiers.names, match.node)
            names = names[: self._states.find_last(names)]
            state_slots = self._states.host.touch_pages(names[-1:])
            self._states.host.pin_slots(state_slots)
        slots = host.touch_pages(names)
        host.pin_slots(slots)
        return self._record_pinned_slots(slots, state_slots)

    def _reserve_slots(self, pages: int) -> _Pinned:
        states = self._states
        state_slots = _NONE if states is None else states.host.reserve_pinned_slots(1)
        return self._record_pinned_slots(self._host.reserve_pinned_slots(pages), state_slots)

    def _record_pinned_slots(self, slots: Ints, state_slots: Ints) -> _Pinned:
        """Returns the record of slots that were just pinned."""
        states = 0 if self._states is None else self._states.host.memory.launched
        key = self._tiers.names.key
        return _Pinned(key, slots, self._host.memory.launched, state_slots, states)

    def _adopt_slots(self, names: list[bytes], pinned: _Pinned) -> None:
        if pinned.key != self._tiers.names.key:
            raise ParameterError(
                "path", "the engine's weights were replaced while the file was read."
            )
        slots = pinned.slots[: len(names)]
        pinned.slots = pinned.slots[len(names) :]
        self._host.name_reserved_slots(names, slots)
        if self._states is not None and not len(pinned.slots):
            self._states.host.name_reserved_slots(names[-1:], pinned.state_slots)
            pinned.state_slots = _NONE

    def _fetch_to_device(self, tokens: Ints, namespace: str) -> None:
        """Starts copying the host's pages of a prefix to the device's free pages."""
        store = self._store
        match = store.tree.match_prefix(tokens, namespace)
        if len(tokens) // store.page_size - len(match.pages) <= store.pool.free:
            prompt = np.append(tokens, np.int32(0))  # the last token of a prompt is always computed
            self._tiers.fetch_after_match(prompt, match, PrefixSpace(namespace), 0.0, None)

    def _page_names_of(self, tokens: Ints, namespace: str) -> list[bytes]:
        names = self._tiers.names
        return list(
            names.names_after(names.root_name(namespace.encode("utf-8", "surrogatepass")), tokens)
        )


def _decode_state_header(part: PageFile) -> _StateHeader:
    try:
        return msgspec.msgpack.decode(part.header, type=_StateHeader)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise DamagedFileError("it is of the cache's own folder, or another program's") from error


def _or_none(states: str) -> str:
    """Returns a phrase that names the states, or "no states"."""
    return f"states of {states}" if states else "no states"


_NONE: Ints = np.empty(0, dtype=np.int32)
