"""Store of the features that an encoder computed from images, in rows that steps refer to."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from weakref import WeakSet

import numpy as np
import torch

from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.requests.request import Request
from sglang_lite.runtime.requests.request_media import RequestMedia
from sglang_lite.runtime.tokens.image_span import MediaItem


@dataclass(eq=False, slots=True)
class Features:
    """Rows of an image in the store.

    Attributes:
        item: the image.
        rows: int32 [item.count], its rows in the store.
        users: requests that need them until they end.
        filled: whether the encoder has written them.
    """

    item: MediaItem
    rows: Ints
    users: WeakSet[Request] = field(default_factory=WeakSet)
    filled: bool = False

    @property
    def used(self) -> bool:
        return any(not request.ended for request in self.users)


class FeatureStore:
    """Features of images, by the key of each image. Features that no request needs are evicted, the
    least recently used first.

    Args:
        table: memory of the features [rows, width].

    Attributes:
        table: the argument of this name.
    """

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table
        self._free: Ints = np.arange(len(table), dtype=np.int32)
        self._entries: OrderedDict[bytes, Features] = OrderedDict()

    @property
    def images(self) -> int:
        return len(self._entries)

    def reserve_rows(self, request: Request) -> list[Features] | None:
        """Reserves rows for all images of a request, and returns an entry for each image. Returns
        None, reserving nothing, if other requests occupy too many rows.
        """
        assert request.media is not None
        missing = self._missing_items(request.media)
        unused = self._evictable(request.media)
        rows = sum(item.count for item in missing)
        if not self.has_room(request):
            return None
        while len(self._free) < rows:
            self.drop_entry(unused.pop(0))
        for item in missing:
            self._entries[item.key] = Features(item, self._free[: item.count])
            self._free = self._free[item.count :]
        found = [self._entries[item.key] for item in request.media.items]
        for entry in found:
            entry.users.add(request)
            self._entries.move_to_end(entry.item.key)
        request.media.rows = np.concatenate([entry.rows for entry in found])
        return found

    def write_features(self, entry: Features, features: torch.Tensor) -> None:
        """Writes the features [count, width] of an image."""
        self.table[torch.from_numpy(entry.rows.astype(np.int64)).to(self.table.device)] = (
            features.to(self.table.dtype)
        )
        entry.filled = True

    def drop_entry(self, entry: Features) -> None:
        """Removes an image, such as one that could not be encoded."""
        del self._entries[entry.item.key]
        self._free = np.concatenate((self._free, entry.rows))

    def invalidate_features(self) -> list[Features]:
        """Invalidates all features. Returns the images of requests that have not ended; they keep
        their rows, and must be encoded again.
        """
        found = [entry for entry in self._entries.values() if entry.filled]
        for entry in found:
            entry.filled = False
            if not entry.used:
                self.drop_entry(entry)
        return [entry for entry in found if entry.used]

    def has_room(self, request: Request) -> bool:
        """Returns True if the images of a request are in the store or would fit once images that no
        request needs are evicted.
        """
        assert request.media is not None
        rows = sum(item.count for item in self._missing_items(request.media))
        return rows <= len(self._free) + sum(
            entry.item.count for entry in self._evictable(request.media)
        )

    def _missing_items(self, media: RequestMedia) -> list[MediaItem]:
        return [
            item
            for key, item in {each.key: each for each in media.items}.items()
            if key not in self._entries
        ]

    def _evictable(self, media: RequestMedia) -> list[Features]:
        """Returns the images that no request needs and that are not in `media`, the least recently
        used first.
        """
        kept = {item.key for item in media.items}
        return [entry for key, entry in self._entries.items() if key not in kept and not entry.used]
