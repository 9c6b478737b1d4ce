"""Groups of processes in which a trainer broadcasts weights to an engine, through torch.distributed.

What is received lies beside the running weights, so a broadcast that fails changes nothing.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed

from sglang_lite.errors import shown
from sglang_lite.protocol import ModelError, ParameterError

_DEVICES = {"gloo": "cpu", "nccl": "cuda"}
_LOOK_S = 0.001  # between two looks at a broadcast
_GRACE_S = 1.0  # in which gloo, whose threads would outlive it, gives a broadcast up by itself
_FOREVER = timedelta(days=30)  # of NCCL's watchdog, which would end the process; `_wait` ends broadcasts instead
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TensorForm:
    """Name, dtype and shape of a tensor that will come."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def tensor_forms(names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> list[TensorForm]:
    """Forms of tensors from lists of equal length; dtypes may begin with "torch.".

    Raises:
        ParameterError: the lists differ in length or are empty, a name is there twice, or a dtype or shape is none.
    """
    if not len(names) == len(dtypes) == len(shapes):
        raise ParameterError(
            "names", f"there are {len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes.",
            hint="Give one of each for a tensor.",
        )  # fmt: skip
    if not names or len(set(names)) < len(names):
        raise ParameterError("names", "is empty." if not names else "has a name twice.")
    forms = []
    for name, kind, shape in zip(names, dtypes, shapes):
        dtype = getattr(torch, kind.removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype):
            raise ParameterError("dtypes", f"{shown(kind)} is no dtype of torch.")
        if any(size < 0 for size in shape):
            raise ParameterError("shapes", f"{name!r} can't have the shape {list(shape)}.")
        forms.append(TensorForm(name, dtype, tuple(shape)))
    return forms


@dataclass(frozen=True, slots=True)
class _Group:
    """Group that this process is in.

    Attributes:
        backend: torch's object for it, a ProcessGroupGloo or ProcessGroupNCCL.
        device: device of tensors that are broadcast in it.
    """

    backend: Any
    device: torch.device


class UpdateGroups:
    """Groups that an engine has joined. Its calls run on threads of their own, one at a time, as they wait for others.

    Args:
        device: device of the model.
        timeout_s: seconds that a process may keep the others waiting.
    """

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        self._device, self._timeout_s = device, timeout_s
        self._groups: dict[str, _Group] = {}
        self._one_at_a_time = threading.Lock()
        self._closed = threading.Event()

    def ask(self, call: Callable[[], T]) -> Future[T]:
        """Future of a call of the methods below. Its thread doesn't keep the process from exiting."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                with self._one_at_a_time:
                    result = call()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        threading.Thread(target=run, name="sglang_lite-groups", daemon=True).start()
        return future

    def join(self, address: str, port: int, rank: int, size: int, name: str, backend: str) -> None:
        """Joins a group that another process makes.

        Args:
            address, port: where its first process, of rank 0, keeps torch's TCP store.
            rank, size: this process's number in the group, and the number of all.
            name: name of the group.
            backend: "gloo" for tensors of a CPU, "nccl" for those of a GPU.

        Raises:
            ParameterError: an argument is invalid, the group is there already, or the model's device lacks the backend.
            ModelError: the others have not come in time.
        """
        if backend not in _DEVICES:
            raise ParameterError("backend", f"{shown(backend)} is neither gloo nor nccl.")
        if backend == "nccl" and self._device.type != "cuda":
            raise ParameterError("backend", "nccl is for an engine on a GPU.", hint='Use "gloo".')
        if name in self._groups:
            raise ParameterError(
                "group_name", f"{name!r} is there already.", hint="Leave it: destroy_weights_update_group."
            )
        if not 0 < rank < size:
            raise ParameterError(
                "rank_offset", f"{rank} is no rank of a group of {size}, whose sender has rank 0.",
                hint="Use 1 for one engine beside its trainer.",
            )  # fmt: skip
        if not 0 < port < 1 << 16:
            raise ParameterError("master_port", f"{port} is no port.")
        kind = _DEVICES[backend]
        patience = timedelta(seconds=self._timeout_s)
        try:
            store: Any = distributed.TCPStore(address, port, size, timeout=patience)  # type: ignore[attr-defined] # of C++
            store.set_timeout(patience)
            for prefix in (name, f"{name}/", f"{kind}/"):  # where torch's own groups, and SGLang's, look for each other
                store = distributed.PrefixStore(prefix, store)  # type: ignore[attr-defined] # of C++
            made: Any
            if backend == "gloo":
                made = distributed.ProcessGroupGloo(store, rank, size, patience)
            else:
                options = distributed.ProcessGroupNCCL.Options()
                setattr(options, "_timeout", _FOREVER)  # noqa: B010 # torch has no other name for it
                made = distributed.ProcessGroupNCCL(store, rank, size, options)
        except RuntimeError as error:  # torch's DistError is one
            raise ModelError(
                f"the group {name!r} at {address}:{port} did not come together: {_first_line(error)}",
                hint=f"All of its {size} processes have to join it within {self._timeout_s:g} s (dist_timeout).",
            ) from error
        self._groups[name] = _Group(made, torch.device("cpu") if backend == "gloo" else self._device)

    def leave(self, name: str) -> None:
        """Leaves a group. Raises ParameterError if there is none of this name."""
        self._group(name)
        self._drop(name)

    def receive(self, name: str, forms: Sequence[TensorForm], *, flattened: bool = False) -> Mapping[str, torch.Tensor]:
        """Receives tensors, which rank 0 broadcasts in this order. If that fails, the group is left.

        Args:
            name: name of the group.
            forms: the tensors.
            flattened: whether they come as one tensor of their bytes.

        Raises:
            ParameterError: there is no such group.
            ModelError: a tensor has not come in time, or its sender has gone.
        """
        group = self._group(name)
        try:
            if not flattened:
                found = {each.name: torch.empty(each.shape, dtype=each.dtype, device=group.device) for each in forms}
                self._broadcast(group, list(found.values()))
                return found
            whole = torch.empty(sum(each.nbytes for each in forms), dtype=torch.uint8, device=group.device)
            self._broadcast(group, [whole])
            parts = torch.split(whole, [each.nbytes for each in forms])
            return {
                # a copy, as a part need not begin where its dtype may
                each.name: part.clone().view(each.dtype).view(each.shape)
                for each, part in zip(forms, parts)
            }
        except (RuntimeError, TimeoutError) as error:
            self._drop(name)
            raise ModelError(
                f"the group {name!r} has sent no weights: {_first_line(error)} The old ones are kept.",
                hint="The group is left: join it again, and send all weights.",
            ) from error

    def close(self) -> None:
        """Ends broadcasts that are under way, and leaves all groups."""
        self._closed.set()
        for name in list(self._groups):
            self._drop(name)

    def _group(self, name: str) -> _Group:
        if name not in self._groups:
            raise ParameterError(
                "group_name", f"there is no group {shown(name)}.", hint="Join it: init_weights_update_group."
            )
        return self._groups[name]

    def _drop(self, name: str) -> None:
        group = self._groups.pop(name, None)
        if group is not None:
            group.backend.abort()

    def _broadcast(self, group: _Group, tensors: Sequence[torch.Tensor]) -> None:
        works = [group.backend.broadcast(tensor, 0) for tensor in tensors]
        until = time.monotonic() + self._timeout_s + _GRACE_S
        for work in works:
            while not work.is_completed():
                if self._closed.wait(_LOOK_S):
                    raise TimeoutError("the engine is closed.")
                if time.monotonic() > until:
                    raise TimeoutError(f"nothing has come for {self._timeout_s:g} s (dist_timeout).")
            work.wait()  # raises what has failed


def _first_line(error: BaseException) -> str:
    """First sentence of an error of torch's, without the place in its sources."""
    line = re.sub(r"^\[[^\]]*\] ", "", str(error).partition("\n")[0])
    return f"{line.partition('. ')[0].rstrip('.')}."
