"""LoRA adapters in a GPU's memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from sglang_lite.runtime.kernels.lora_weights import RANKS, LoraStep, LoraWeights
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.models.lora.adapter import (
    Adapter,
    AdapterRoom,
    ProductShape,
    product_shapes,
)
from sglang_lite.runtime.models.lora.pool import PoolSize
from sglang_lite.runtime.models.spec import ModelSpec


class GpuAdapters:
    """LoRA adapters in a GPU's memory, identified by number. This is an `AdapterMemory`.

    The adapters' matrices are in one tensor [pages, elements of a page]. A page holds RANKS ranks
    of every adapted linear layer of the model, so writing an adapter takes one copy per page.

    Args:
        spec: the model.
        size: number of adapters and of pages.
        dtype: the model's data type.
        device: device of the model.
        zeros: function that creates the tensor of pages from a shape and data type; None for
            `torch.zeros`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        size: PoolSize,
        dtype: torch.dtype,
        device: torch.device,
        zeros: Callable[[Sequence[int], torch.dtype], torch.Tensor] | None = None,
    ) -> None:
        self.slots = size.slots
        self.max_adapters = size.max_adapters
        self._shapes = product_shapes(spec)
        self._device = device
        shape = size.pages, _page_elements(self._shapes)
        self._memory = (
            torch.zeros(shape, dtype=dtype, device=device) if zeros is None else zeros(shape, dtype)
        )
        self._pages = torch.zeros((size.slots, size.longest), dtype=torch.int32, device=device)
        self._ranks = torch.zeros(size.slots, dtype=torch.int32, device=device)
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch leaves it untyped
        # events after writes that no step has waited for yet
        self._written: dict[int, torch.cuda.Event] = {}

    @property
    def bytes(self) -> int:
        """Size of the pages of all adapters, in bytes."""
        return self._memory.nbytes

    def build_lora_step(self, of_slot: torch.Tensor) -> LoraStep:
        """Returns the `LoraStep` to use in plans. It refers to the adapters' memory, so it always
        reflects the adapters written so far.
        """
        return LoraStep(
            of_slot, self._pages, self._ranks, _view_matrices(self._memory, self._shapes)
        )

    def allocate_adapter_buffer(self, rank: int) -> AdapterRoom:
        """Allocates pinned pages for reading in an adapter of the given rank, and returns them with
        views of its matrices. Can be called on any thread.
        """
        shape = (rank // RANKS, self._memory.shape[1])
        pages = torch.zeros(shape, dtype=self._memory.dtype, pin_memory=self._stream is not None)
        return pages, _view_matrices(pages, self._shapes)

    def write_adapter_slot(self, slot: int, pages: Sequence[int], adapter: Adapter) -> None:
        """Copies an adapter to the GPU and gives it a number. Steps keep running meanwhile, and the
        first step that uses the adapter waits for the copy.

        Args:
            slot: the number, which no running request uses.
            pages: pages for the adapter, which no running request uses either.
            adapter: adapter that was read into memory from `allocate_adapter_buffer`.
        """
        assert adapter.pages is not None, "not in pages"
        table = torch.tensor(
            [*pages, adapter.rank], dtype=torch.int32, pin_memory=self._stream is not None
        )
        if self._stream is not None:  # earlier steps that use these pages may still be running
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for page, source in zip(pages, adapter.pages):
                self._memory[page].copy_(source, non_blocking=True)
            self._pages[slot, : len(pages)].copy_(table[:-1], non_blocking=True)
            self._ranks[slot].copy_(table[-1], non_blocking=True)
        if self._stream is not None:
            self._written[slot] = self._stream.record_event()

    def clear_adapter_slot(self, slot: int) -> None:
        """Does nothing: an adapter's memory is never read once no slot has its number."""

    def wait_for(self, slots: Ints) -> None:
        """Makes the next step wait until the adapters with these numbers are written."""
        for slot in self._written.keys() & set(slots.tolist()):
            torch.cuda.current_stream(self._device).wait_event(self._written.pop(slot))


def pool_bytes(spec: ModelSpec, pages: int, dtype: torch.dtype) -> int:
    """Returns the bytes that `pages` pages of adapters take."""
    return pages * _page_elements(product_shapes(spec)) * dtype.itemsize


_Shapes = Sequence[Mapping[str, ProductShape]]


def _page_elements(shapes: _Shapes) -> int:
    return sum(RANKS * _elements_per_rank(shape) for layer in shapes for shape in layer.values())


def _elements_per_rank(shape: ProductShape) -> int:
    """Returns how many elements each LoRA rank takes for a linear layer of this shape, in A and B
    together.
    """
    return len(shape.outputs) * shape.inputs + sum(shape.outputs)


def _view_matrices(pages: torch.Tensor, shapes: _Shapes) -> tuple[Mapping[str, LoraWeights], ...]:
    """Returns views of the adapters' matrices in `pages` [pages, elements of a page]. There is one
    mapping per layer of the model, from the names of linear layers to their matrices.
    """
    at = 0
    layers = []
    for layer in shapes:
        products = {}
        for name, shape in layer.items():
            split = at + RANKS * len(shape.outputs) * shape.inputs
            end = at + RANKS * _elements_per_rank(shape)
            a = pages[:, at:split].view(len(pages), len(shape.outputs), RANKS, shape.inputs)
            products[name] = LoraWeights(
                a, pages[:, split:end].view(len(pages), RANKS, -1), shape.outputs
            )
            at = end
        layers.append(products)
    return tuple(layers)
