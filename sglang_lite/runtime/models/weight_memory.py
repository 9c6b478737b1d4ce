"""Memory of a model's weights that a sleeping engine can release."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence

import torch

from sglang_lite.protocol import ModelError, ParameterError
from sglang_lite.runtime.kernels.arena import DeviceArena
from sglang_lite.runtime.kernels.pinned_memory import pin_memory, unpin_memory
from sglang_lite.runtime.models.decoder import Decoder
from sglang_lite.runtime.models.model import Model
from sglang_lite.runtime.models.offload import tensors_within
from sglang_lite.runtime.models.weight_parts import look_up_part, part_keys

_REGION_BYTES = 1 << 30  # of tensors that are moved together
_ALIGNED = 512  # bytes


def save_memory(model: Model, *, backup: bool) -> None:
    """Moves the weights of a model on a GPU to memory that can be released. Caches allocated later
    will be in such memory, too.

    Args:
        model: loaded model; on a CPU nothing is moved.
        backup: as for `WeightMemory`.

    Raises:
        ParameterError: transformers' code runs the model.
    """
    if model.device.type != "cuda":
        return
    if not isinstance(model, Decoder):
        raise ParameterError(
            "enable_memory_saver", "transformers' code runs this model, without it."
        )
    with torch.inference_mode():
        model.weight_memory = WeightMemory(model, backup=backup)


class WeightMemory:
    """Weights of a decoder on a GPU and of its encoder, in memory that can be released and restored
    at the same addresses.

    Args:
        model: loaded decoder, whose tensors are moved. Moving them takes 1 GiB of additional
            memory.
        backup: whether to allocate host memory for copies now, rather than for the first copy.
    """

    def __init__(self, model: Decoder, *, backup: bool) -> None:
        self._arena = DeviceArena(model.device)
        self._regions: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []
        self._zeros: list[torch.Tensor] = []
        by_storage: dict[int, list[torch.Tensor]] = {}
        for tensor in _tensors(model):
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        group = list[list[torch.Tensor]]()
        size = 0
        for views in by_storage.values():
            group.append(views)
            size += views[0].untyped_storage().nbytes()
            if size >= _REGION_BYTES:
                self._move_to_own_region(group)
                group = []
                size = 0
        if group:
            self._move_to_own_region(group)
        by_storage.clear()
        torch.cuda.empty_cache()
        if backup:
            self.allocate_copies()

    def _move_to_own_region(self, group: list[list[torch.Tensor]]) -> None:
        """Moves tensors to a new region of memory. Each list in `group` has the tensors that share
        one storage.
        """
        sizes = [views[0].untyped_storage().nbytes() for views in group]
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + -(-size // _ALIGNED) * _ALIGNED)
        region = self._arena.allocate_bytes(starts[-1])
        for views, start, size in zip(group, starts, sizes):
            stored = torch.empty(0, dtype=torch.uint8, device=region.device).set_(
                views[0].untyped_storage()
            )
            region[start : start + size].copy_(stored)
            for tensor in views:
                at = start // tensor.itemsize + tensor.storage_offset()
                tensor.set_(region.untyped_storage(), at, tensor.shape, tensor.stride())
        self._regions.append(region)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return sum(region.nbytes for region in self._regions)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor of zeros whose memory is released and restored together with the
        weights. Restoring zeroes it again.
        """
        made = self._arena.zeros(shape, dtype)
        self._zeros.append(made)
        return made

    def release_memory(self, *, keep: bool) -> None:
        """Releases the memory of the weights and of tensors from `zeros`. With `keep`, first copies
        the weights to the host memory that `allocate_copies` has allocated.
        """
        if keep:
            for region, copy in zip(self._regions, self._copies):
                copy.copy_(region, non_blocking=True)
        self._arena.release_memory()

    def restore_memory(self, *, kept: bool) -> None:
        """Allocates the memory again. Restores the weights if a copy was kept; otherwise fills them
        with zeros, which an encoder's padding needs.
        """
        self._arena.restore_memory()
        for region, copy in zip(self._regions, self._copies) if kept else ():
            region.copy_(copy, non_blocking=True)
        for made in (*self._zeros, *(() if kept else self._regions)):
            made.zero_()
        torch.cuda.synchronize()

    def allocate_copies(self) -> None:
        """Allocates host memory for copies unless it exists. Raises ModelError if that much can't
        be pinned.
        """
        for region in self._regions[len(self._copies) :]:
            try:
                with torch.inference_mode(mode=False):  # threads write to it
                    copy = pin_memory(region.nbytes)
            except (RuntimeError, OSError) as error:
                raise ModelError(
                    f"the host's memory for a copy of the weights can't be pinned: {error}",
                    hint="Drop the weights: sleep(level=2).",
                ) from error
            weakref.finalize(self, unpin_memory, copy.data_ptr()).atexit = False
            self._copies.append(copy)


class DroppedTensors:
    """Tensors on a CPU whose memory has been released. They keep their shapes, and still share
    memory with their views.

    Args:
        tensors: the tensors. No others may share their memory.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._sizes: dict[int, tuple[torch.UntypedStorage, int]] = {}  # by address
        for tensor in tensors:
            if not tensor.untyped_storage().resizable():  # memory of a file, for example
                tensor.data = tensor.data.clone()
            storage = tensor.untyped_storage()
            self._sizes.setdefault(storage.data_ptr(), (storage, storage.nbytes()))
        for storage, _ in self._sizes.values():
            storage.resize_(0)

    def allocate_zeros(self) -> None:
        """Allocates the memory again, filled with zeros."""
        for storage, size in self._sizes.values():
            storage.resize_(size)
            torch.empty(0, dtype=torch.uint8).set_(storage).zero_()


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Returns the bytes of the tensors' memory, each storage counted once."""
    storages = {
        each.data_ptr(): each.nbytes() for each in (tensor.untyped_storage() for tensor in tensors)
    }
    return sum(storages.values())


def _tensors(model: Decoder) -> Iterator[torch.Tensor]:
    """Yields each tensor of a decoder's parts once, followed by those of its encoder. Leaves out
    rotary tables, and the scratch memory of linear layers.
    """
    seen = {id(each) for each in vars(model.linears).values()}
    for key in part_keys(model):
        yield from tensors_within(look_up_part(model, key), seen)
    yield from model.encoder_weights.values()
