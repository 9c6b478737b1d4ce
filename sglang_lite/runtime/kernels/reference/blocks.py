"""Torch twin of `kernels.blocks`. The CPU runs it."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class BlockCopy:
    def __init__(
        self, planes: Sequence[torch.Tensor], memory: torch.Tensor, page_size: int
    ) -> None:
        alike: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = {}
        for plane in planes:
            if plane.shape[2]:  # layers without attention have none
                alike.setdefault((plane.shape, plane.dtype), []).append(plane)
        # [heads, pages, bytes] and its part of the blocks
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        if not alike:
            return
        blocks = memory.view(
            -1, page_size * sum(p.shape[0] * p.shape[2] * p.itemsize for p in planes)
        )
        first = 0
        for plane in (plane for group in alike.values() for plane in group):
            pages = plane.view(torch.uint8).view(plane.shape[0], plane.shape[1] // page_size, -1)
            heads, _, size = pages.shape
            part = blocks[:, first : first + heads * size].view(-1, heads, size).transpose(0, 1)
            self._pairs.append((pages, part))
            first += heads * size

    def __call__(self, pages: torch.Tensor, slots: torch.Tensor, *, to_host: bool) -> None:
        of_pages = _as_index(pages)
        of_slots = _as_index(slots)
        for plane, part in self._pairs:
            if to_host:
                part[:, of_slots] = plane[:, of_pages]
            else:
                plane[:, of_pages] = part[:, of_slots]


def _as_index(places: torch.Tensor) -> torch.Tensor | slice:
    """Converts numbers of pages or blocks to an index: a slice if they are consecutive, which is
    faster.
    """
    first = int(places[0])
    if torch.equal(
        places, torch.arange(first, first + len(places), dtype=places.dtype, device=places.device)
    ):
        return slice(first, first + len(places))
    return places.long()
