"""Handles of tensors that another process shares in GPU memory. Reads them from SGLang's pickled
buckets without running any code of the pickle, and opens the tensors.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from sglang_lite.errors import short_repr
from sglang_lite.protocol import ParameterError

_COUNTERS = 10_000  # number of counters in torch's file, its CUDA_IPC_REF_COUNTER_FILE_SIZE
_COUNTER_FILE = re.compile(rb"/torch_\w{1,200}")
# torch's, and SGLang's with the GPU's UUID
_REBUILD = "rebuild_cuda_tensor", "_rebuild_cuda_tensor_modified"
_KINDS = ("Tensor", "Parameter", "TypedStorage", "UntypedStorage")


class TensorHandle(msgspec.Struct, frozen=True, array_like=True):
    """Description of a tensor on a GPU, in the form that `torch.multiprocessing` sends.

    Attributes:
        shape, stride, offset: of the tensor in its storage, in elements.
        dtype: name of its dtype.
        device: index of the GPU, or its UUID.
        memory: CUDA's handle of the memory that the storage is in.
        size, start: size of the storage in bytes, and its offset in that memory.
        counter_file, counter: file and index of torch's reference count.
        event: CUDA's handle of the event that is recorded after the sender's writes.
        waits: whether to wait for the event.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: str
    device: int | str
    memory: bytes
    size: int
    start: int
    counter_file: bytes
    counter: int
    event: bytes
    waits: bool


class _Part(msgspec.Struct, frozen=True):
    """Name, shape, dtype and position of a tensor within a flattened one. The position counts
    elements of the flattened tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    start_idx: int
    end_idx: int


def _decode_tensor_handle(*args: Any) -> TensorHandle:  # of torch's function
    (
        _,
        shape,
        stride,
        offset,
        _,
        dtype,
        device,
        memory,
        size,
        start,
        _,
        file,
        counter,
        event,
        waits,
    ) = args
    return msgspec.convert(
        (shape, stride, offset, dtype, device, memory, size, start, file, counter, event, waits),
        TensorHandle,
    )


class _Reader(pickle.Unpickler):
    """Unpickler that accepts only the names that occur in a bucket, and replaces them with
    stand-ins that run no code. A pickle can set attributes of a stand-in, so each reader has its
    own.
    """

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))

        class Metadata:
            """Stands for SGLang's FlattenedTensorMetadata, whose fields a pickle sets."""

        def handle(*args: Any) -> TensorHandle:  # of torch's function
            return _decode_tensor_handle(*args)

        self._metadata = Metadata
        self._handle = handle

    def find_class(self, module: str, name: str) -> Any:  # its stand-in
        if name in _REBUILD:
            return self._handle
        if name == "FlattenedTensorMetadata":
            return self._metadata
        if (module, name) == ("torch", "Size"):
            return tuple
        if module.partition(".")[0] == "torch" and name in _KINDS:
            return name
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return name
        raise pickle.UnpicklingError(f"it names {module}.{name}"[:200])


def read_flattened_bucket(
    data: bytes, device: torch.device
) -> Mapping[str, Any]:  # a tensor, and JSON
    """Reads SGLang's flattened bucket from a pickle: its `flattened_tensor`, opened, and its
    `metadata`.

    Args:
        data: the pickle, from which only handles and metadata are read.
        device: GPU of the engine. The sender keeps the tensor meanwhile.

    Raises:
        ParameterError: the data is no bucket, or the tensor is not in this GPU's memory.
    """
    try:
        content = _Reader(data).load()
        handle = content["flattened_tensor"]
        parts = [msgspec.convert(vars(each), _Part) for each in content["metadata"]]
        if not isinstance(handle, TensorHandle):
            raise ValueError("its tensor is not on a GPU")
        if not all(isinstance(getattr(torch, each.dtype, None), torch.dtype) for each in parts):
            raise ValueError("a dtype is none of torch")
    except Exception as error:  # the data may make the reader raise anything
        raise ParameterError(
            "serialized_named_tensors",
            f"is no flattened bucket of a GPU: {short_repr(str(error))}.",
            hint="Send what SGLang's MultiprocessingSerializer makes of one, or a safetensors file.",
        ) from error
    return {
        "flattened_tensor": _open_tensor(handle, device),
        "metadata": list(map(msgspec.structs.asdict, parts)),
    }


def _open_tensor(handle: TensorHandle, device: torch.device) -> torch.Tensor:
    """Opens the tensor of a handle. Raises ParameterError if it is on another GPU, or invalid."""
    if device.type != "cuda":
        raise ParameterError(
            "serialized_named_tensors", "a GPU's memory is for an engine on that GPU."
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    if handle.device not in (index, uuid, f"GPU-{uuid}"):
        raise ParameterError(
            "serialized_named_tensors", f"is of GPU {handle.device}, and the engine is on {index}."
        )
    dtype = getattr(torch, handle.dtype, None)
    counted = _COUNTER_FILE.fullmatch(handle.counter_file) and 0 <= handle.counter < _COUNTERS
    last = handle.offset + sum((size - 1) * step for size, step in zip(handle.shape, handle.stride))
    steps = (*handle.shape, *handle.stride, handle.offset, handle.size, handle.start)
    if (
        not isinstance(dtype, torch.dtype)
        or not counted
        or min(steps) < 0
        or len(handle.shape) != len(handle.stride)
    ):
        raise ParameterError("serialized_named_tensors", "the handle is damaged.")
    if (last + 1) * dtype.itemsize > handle.size:
        raise ParameterError("serialized_named_tensors", "the tensor is larger than its memory.")
    rebuild: Any = rebuild_cuda_tensor  # which has no types
    try:
        tensor: torch.Tensor = rebuild(
            torch.Tensor,
            handle.shape,
            handle.stride,
            handle.offset,
            torch.storage.TypedStorage,
            dtype,
            index,
            handle.memory,
            handle.size,
            handle.start,
            False,
            handle.counter_file,
            handle.counter,
            handle.event,
            handle.waits,
        )
    except RuntimeError as error:
        raise ParameterError(
            "serialized_named_tensors", f"can't be opened: {short_repr(str(error))}"
        ) from error
    return tensor
