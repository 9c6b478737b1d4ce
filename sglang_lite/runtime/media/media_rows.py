"""Handles images, videos and sounds in the steps of requests: marks the tokens that stand for their
features, and chooses where a prompt may be cut into chunks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.kv_cache.slot_table import SlotTable
from sglang_lite.runtime.requests.request import Request
from sglang_lite.runtime.requests.request_media import RequestMedia
from sglang_lite.runtime.requests.resource import Resource

if TYPE_CHECKING:
    from sglang_lite.runtime.scheduler.batch import Batch  # of a package above this one

_NO_ROTARY: Ints = np.zeros((3, 0), dtype=np.int32)
_NO_LIMITS: Ints = np.zeros(0, dtype=np.int32)


class MediaRows(Resource):
    """Handles requests with images for the scheduler and for the writer of step records. "Image"
    stands for any medium here.

    Args:
        table: slot table. Gets a column `rope_offset`: how much the rotary positions of text after
            a request's images differ from its plain positions.
    """

    def __init__(self, table: SlotTable) -> None:
        self._rope_offset = table.add_column("rope_offset", 0)

    def count_usable_cached(self, request: Request, cached: int) -> int:
        """Returns how many cached tokens of a request may be used. If they end within the first
        tokens of an image, that image's tokens are left out, since they may belong to another
        image.
        """
        return cached if request.media is None else request.media.trusted_cached_length(cached)

    def record_start(self, request: Request) -> None:
        """Writes the rotary offset of a request that starts to the slot table."""
        media = request.media
        self._rope_offset[request.slot] = 0 if media is None else media.rope_offset

    def cut_chunk(self, request: Request, start: int, end: int, *, first: bool) -> int:
        """Returns where to end a chunk of a prompt. An image whose tokens attend to each other
        stays in one chunk. An image for which the step has no room waits until it is the step's
        first chunk.
        """
        if request.media is None:
            return end
        shorter, longer = request.media.find_unsplit_ends(end)
        if shorter == longer:
            return end
        if shorter > start:
            return shorter
        return longer if first else start

    def replace_tokens(
        self, batch: Batch, ends: Ints, ids: Ints, positions: Ints
    ) -> tuple[Ints, Ints]:
        """Replaces the virtual ids of images in a step with ids of their feature rows. Returns
        `StepRecord.rotary` and `limits`.

        Args:
            batch: the step's rows.
            ends: int32 [R], ends of the rows, including drafts.
            ids: int32 [T], ids of the step's tokens, changed in place.
            positions: int32 [T], their positions.
        """
        offsets = self._rope_offset[batch.slots]
        media = dict[int, RequestMedia]()
        for i, request in enumerate(batch.requests[batch.decoding :], batch.decoding):
            if request.media is not None:
                media[i] = request.media
        rotary = _NO_ROTARY
        limits = _NO_LIMITS
        if offsets.any() or any(each.rotary.size for each in media.values()):
            rotary = np.tile(positions + np.repeat(offsets, ends - batch.starts), (3, 1))
        for i, each in media.items():
            start = int(batch.starts[i])
            end = int(ends[i])
            first = int((ends[:i] - batch.starts[:i]).sum())
            each.replace_with_row_ids(ids[first : first + end - start], start)
            own = each.rotary[:, start:end]
            rotary[:, first : first + own.shape[1]] = own
            if (seen := each.limits[start:end]).size:
                limits = limits if limits.size else positions + np.int32(1)
                limits[first : first + len(seen)] = seen
        return rotary, limits
