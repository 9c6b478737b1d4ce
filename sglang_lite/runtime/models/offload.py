"""Keeps a decoder's last layers in host memory and copies them to the device group by group.

The device has memory for two groups, which groups use in turn. Copies run on their own stream while
other groups compute: a group's copy begins when the group two places before it has been computed.
Steps are launched kernel by kernel, not as captured graphs.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch

from sglang_lite.protocol import ParameterError
from sglang_lite.runtime.kernels.pinned_memory import pin_memory, unpin_memory
from sglang_lite.runtime.models.spec import ModelSpec
from sglang_lite.runtime.models.weight_reader import Layer

_ALIGNED = 512  # bytes
_GROUPS = 2  # groups on the device
# upper bound on a layer's bytes relative to its matrices', for scales, norms and biases
_BESIDE_MATRICES = 1.1


def check_offload_size(spec: ModelSpec, gigabytes: int, item: float) -> None:
    """Checks, before weights are read, that a model's layers are large enough for the offload size.

    Args:
        spec: specification of the model.
        gigabytes: GiB to keep in host memory.
        item: most bytes that an element of a matrix may take.

    Raises:
        ParameterError: the layers have fewer bytes, whatever their format.
    """
    matrices = sum(layer.weight_elements(spec.hidden_size) for layer in spec.layers) * item
    if gigabytes << 30 > matrices * _BESIDE_MATRICES:
        raise _offload_too_large_error(gigabytes << 30, matrices)


def _offload_too_large_error(least: int, has: float) -> ParameterError:
    wanted = f"{least / (1 << 30):,.4g}"
    return ParameterError(
        "cpu_offload_gb",
        f"{wanted} is more than the {has / (1 << 30):.1f} GiB of the layers.",
        hint="Give at most so many.",
    )


@dataclass(frozen=True, slots=True)
class _View:
    """Tensor of a layer, with its layout. `start` is where it begins in the layer's bytes, counted
    in elements.
    """

    tensor: torch.Tensor
    start: int
    shape: torch.Size
    stride: tuple[int, ...]


class Offload:
    """Keeps the weights of a decoder's last layers in host memory. Takes only as many layers as a
    given size needs.

    Sizes are those that layers have on the device, in whatever format. A layer's size is known
    only once it is built, so layers are taken from the last to the first.

    Args:
        device: device of the decoder. On a CPU, for tests, copies are made immediately.
        least: bytes that these layers must reach.
        group_size: number of layers that are copied together.
    """

    def __init__(self, device: torch.device, least: int, group_size: int) -> None:
        self._device = device
        self._least = least
        self._group_size = group_size
        self._taken = 0  # bytes of the layers that were taken
        self._first = 0  # index of the first of these layers, when all are taken
        self._host: list[torch.Tensor] = []  # bytes of each layer
        self._views: list[list[_View]] = []
        self._buffers = torch.empty(0)  # uint8 [layers of all groups there, bytes of a layer]
        self._seen: set[int] = set()
        cuda: Any = torch.cuda  # which leaves its types out
        self._link: torch.cuda.Stream | None = (
            cuda.Stream(device) if device.type == "cuda" else None
        )

    @property
    def nbytes(self) -> int:
        """Bytes that each step copies."""
        return sum(map(len, self._host))

    def offload_layer(self, index: int, layer: Layer, shared: Iterable[object]) -> None:
        """Moves a layer's weights to the host. Does nothing if the layers moved so far have enough
        bytes.

        Args:
            index: index of the layer; layers are taken from the last to the first.
            layer: the layer, whose tensors have no values until `allocate`.
            shared: objects that layers share, which stay where they are.
        """
        if self._taken >= self._least:
            return
        self._first = index
        self._seen.update(map(id, shared))
        tensors = list(tensors_within(layer, self._seen))
        by_storage: dict[int, list[torch.Tensor]] = {}
        for tensor in tensors:
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        stored = [_view_storage_bytes(views[0]) for views in by_storage.values()]
        self._taken += sum(map(len, stored))
        starts = [0]
        for each in stored:
            starts.append(starts[-1] + -(-len(each) // _ALIGNED) * _ALIGNED)
        host = self._allocate_host_memory(starts[-1])
        for each, start in zip(stored, starts):
            host[start : start + len(each)].copy_(each)
        self._views.append(
            [
                _View(
                    each,
                    start // each.itemsize + int(each.storage_offset()),
                    each.shape,
                    each.stride(),
                )
                for views, start in zip(by_storage.values(), starts)
                for each in views
            ]
        )
        self._host.append(host)
        for tensor in tensors:
            tensor.set_(torch.empty(0, device=self._device).untyped_storage(), 0, (0,), (1,))

    def allocate(self) -> None:
        """Allocates memory on the device for two groups, shared by the offloaded layers.

        Raises:
            ParameterError: all layers together are smaller than the requested size.
        """
        if self._taken < self._least:
            raise _offload_too_large_error(self._least, self._taken)
        self._host.reverse()
        self._views.reverse()
        size = max(map(len, self._host))
        count = min(_GROUPS * self._group_size, len(self._host))
        self._buffers = torch.zeros(count, size, dtype=torch.uint8, device=self._device)
        for index, views in enumerate(self._views):
            start = index % len(self._buffers) * size
            for view in views:
                at = start // view.tensor.itemsize + view.start
                view.tensor.set_(self._buffers.untyped_storage(), at, view.shape, view.stride)
        self._views.clear()

    def stream(self, layers: Sequence[Layer]) -> Iterator[Layer]:
        """Yields the decoder's layers in order, each when its weights are on the device.

        Work that uses a layer must be launched on the current stream before the next layer is
        requested.
        """
        groups = [
            range(at, min(at + self._group_size, len(self._host)))
            for at in range(0, len(self._host), self._group_size)
        ]
        copied = [self._start_copy(group) for group in groups[:_GROUPS]]
        yield from layers[: self._first]
        for number, group in enumerate(groups):
            if (event := copied[number]) is not None:
                torch.cuda.current_stream(self._device).wait_event(event)
            for index in group:
                yield layers[self._first + index]
            if number + _GROUPS < len(groups):
                copied.append(self._start_copy(groups[number + _GROUPS]))
        if self._link is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._link)

    def _start_copy(self, group: range) -> torch.cuda.Event | None:
        """Starts to copy a group once all work launched so far has finished. Returns an event that
        marks the end of the copy, or None on a CPU.
        """
        if self._link is None:
            self._copy_group_to_device(group)
            return None
        self._link.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._link):
            self._copy_group_to_device(group)
            done: torch.cuda.Event = self._link.record_event()
            return done

    def _copy_group_to_device(self, group: range) -> None:
        for index in group:
            host = self._host[index]
            self._buffers[index % len(self._buffers), : len(host)].copy_(host, non_blocking=True)

    def _allocate_host_memory(self, size: int) -> torch.Tensor:
        if self._link is None:
            return torch.empty(size, dtype=torch.uint8)
        with torch.inference_mode(mode=False):  # threads write to it
            memory = pin_memory(size)
        weakref.finalize(self, unpin_memory, memory.data_ptr()).atexit = False
        return memory


def _view_storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns all bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def tensors_within(part: Any, seen: set[int]) -> Iterator[torch.Tensor]:  # any part of a model
    """Yields the tensors in a part of a model whose ids are not in `seen`, and adds their ids to
    it.
    """
    if id(part) in seen:
        return
    if isinstance(part, torch.Tensor):
        seen.add(id(part))
        yield part
    elif isinstance(part, tuple | list):
        for each in part:
            yield from tensors_within(each, seen)
    elif is_dataclass(part):
        for field in fields(part):
            yield from tensors_within(getattr(part, field.name), seen)
    elif hasattr(part, "__dict__"):
        for each in vars(part).values():
            yield from tensors_within(each, seen)
