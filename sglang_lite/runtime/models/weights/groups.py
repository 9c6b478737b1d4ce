"""Process groups of torch.distributed, through which an engine receives weights or sends its own.

Received tensors are kept separate from the running weights, so a broadcast that fails changes
nothing.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed

from sglang_lite.errors import short_repr
from sglang_lite.protocol import ModelError, ParameterError

_DEVICES = {"gloo": "cpu", "nccl": "cuda"}
_LOOK_S = 0.0005  # interval at which a broadcast is polled
_MAX_TENSOR_BYTES = 1 << 46  # largest tensor that may be announced
_WINDOWS = (1 << 40, 1 << 33)  # bytes of address space, more than a sender sends
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0x40  # in mmap only from Python 3.13 on
_MARK_BYTES = 16
_GRACE_S = 1.0  # time for gloo, whose threads outlive the group, to give up a broadcast
_FOREVER = timedelta(days=30)  # NCCL's watchdog would kill the process; we end broadcasts ourselves
_QUANTISED = (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TensorForm:
    """Name, dtype and shape of a tensor that will be received."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def empty(self) -> torch.Tensor:
        """Uninitialised tensor of this form."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


def build_tensor_forms(
    names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
) -> list[TensorForm]:
    """Builds the forms of tensors from lists of equal length; dtypes may begin with "torch.".

    Raises:
        ParameterError: the lists differ in length or are empty, a name occurs twice, or a dtype or
            shape is invalid.
    """
    if not len(names) == len(dtypes) == len(shapes):
        raise ParameterError(
            "names",
            f"there are {len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes.",
            hint="Give one of each for a tensor.",
        )
    if not names or len(set(names)) < len(names):
        raise ParameterError("names", "is empty." if not names else "has a name twice.")
    forms = []
    for name, kind, shape in zip(names, dtypes, shapes):
        dtype = getattr(torch, kind.removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype) or dtype in _QUANTISED:
            raise ParameterError(
                "dtypes", f"{short_repr(kind)} is no dtype of torch that can be sent."
            )
        form = TensorForm(name, dtype, tuple(shape))
        if any(size < 0 for size in shape) or form.nbytes > _MAX_TENSOR_BYTES:
            raise ParameterError("shapes", f"{name!r} can't have the shape {list(shape)}.")
        forms.append(form)
    return forms


@dataclass(frozen=True, slots=True)
class _Group:
    """Group that this process belongs to.

    Attributes:
        backend: torch's object for it, a ProcessGroupGloo or ProcessGroupNCCL.
        device: device of tensors that are broadcast in it.
        forwards: whether this process forwards what it receives to others.
        left: set when the process leaves the group, which ends a broadcast.
        lock: held during a broadcast.
    """

    backend: Any
    device: torch.device
    forwards: bool
    left: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)


class UpdateGroups:
    """Groups that an engine has joined. Calls wait for other processes, so each runs on its own
    thread.

    Args:
        device: device of the model.
        timeout_s: seconds that a process may keep the others waiting.
    """

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        self._device = device
        self._timeout_s = timeout_s
        self._groups: dict[str, _Group] = {}
        self._names: set[str] = set()  # names of these, and of groups that are being created
        # groups being joined; the event is set when that ends
        self._joining: dict[str, threading.Event] = {}
        self._lock = threading.Lock()  # held while joining a group completes, or is cancelled
        self._hosted: dict[str, Future[_Group]] = {}  # groups in which this process sends
        self._used: dict[str, float] = {}  # time at which each of them was created or last used

    def run_in_thread(self, call: Callable[[], T]) -> Future[T]:
        """Runs a call of one of the methods below on a thread, and returns its future. The thread
        doesn't keep the process from exiting.
        """
        future: Future[T] = Future()

        def run() -> None:
            try:
                result = call()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        threading.Thread(target=run, name="sglang_lite-groups", daemon=True).start()
        return future

    def join(self, address: str, port: int, rank: int, size: int, name: str, backend: str) -> None:
        """Joins a group that another process creates.

        Args:
            address, port: address of torch's TCP store, which the process of rank 0 runs.
            rank, size: this process's rank in the group, and the group's size.
            name: name of the group.
            backend: "gloo" for tensors of a CPU, "nccl" for those of a GPU.

        Raises:
            ParameterError: an argument is invalid, the group exists already, or the model's device
                lacks the backend.
            ModelError: the others have not joined in time, or the group is left before they have.
        """
        self._check_group_arguments(name, backend, port)
        if not 0 < rank < size:
            raise ParameterError(
                "rank_offset",
                f"{rank} is no rank of a group of {size}, whose sender has rank 0.",
                hint="Use 1 for one engine beside its trainer.",
            )
        settled = self._joining[name] = threading.Event()
        self._names.add(name)
        # torch's store limits the time to connect, but not the time until the other side answers.
        made = self.run_in_thread(
            lambda: self._make_group(address, port, rank, size, name, backend)
        )
        made.add_done_callback(lambda _: settled.set())
        settled.wait(self._timeout_s + _GRACE_S)
        with self._lock:
            is_left = self._joining.get(name) is not settled
            if not is_left:
                del self._joining[name]
                if made.done() and made.exception() is None:
                    self._groups[name] = made.result()
                    return
                self._names.discard(name)
        if made.done() and not is_left:
            made.result()  # raises the error if it was not made
        made.add_done_callback(_abort_group)
        problem = (
            "it was left"
            if is_left
            else f"nothing has come for {self._timeout_s:g} s (dist_timeout)"
        )
        raise ModelError(
            f"the group {name!r} at {address}:{port} did not come together: {problem}.",
            hint=f"All of its {size} processes have to join in time, and the first is to keep a store of torch there.",
        )

    def host_group(self, address: str, port: int, name: str, backend: str) -> int:
        """Creates a group of this process, which sends, and one other process. Returns the port at
        which the other process can then join.

        A group is dropped if its receiver has requested nothing for twice the time that it may keep
        others waiting. The receiver must then have died, which nothing else reports.

        Args:
            address, port: where the other process finds it; port 0 for any that is free.
            name, backend: as for `join`.

        Raises:
            ParameterError, ModelError: as for `join`, or the port is taken.
        """
        self._check_group_arguments(name, backend, port, least=0)
        for idle in [
            each for each, at in self._used.items() if time.monotonic() - at > 2 * self._timeout_s
        ]:
            self._drop_group(idle)
        patience = timedelta(seconds=self._timeout_s)
        try:
            store = distributed.TCPStore(  # type: ignore[attr-defined] # of C++
                address, port, 2, is_master=True, wait_for_workers=False, timeout=patience
            )
        except RuntimeError as error:
            raise ModelError(
                f"the group {name!r} can't be made at {address}:{port}: {_first_error_sentence(error)}"
            ) from error
        self._names.add(name)
        self._used[name] = time.monotonic()
        self._hosted[name] = self.run_in_thread(
            lambda: self._make_group(address, store.port, 0, 2, name, backend, store)
        )
        self._hosted[name].add_done_callback(lambda made: self._on_host_group_created(name, made))
        return int(store.port)

    def _on_host_group_created(self, name: str, made: Future[_Group]) -> None:
        if made.exception() is None:
            self._groups[name] = made.result()
        else:  # nobody has come
            self._names.discard(name)
            self._hosted.pop(name, None)
            self._used.pop(name, None)

    def send(self, name: str, data: torch.Tensor) -> None:
        """Broadcasts bytes in a group that this process hosts. Leaves the group if that fails.

        Raises:
            ParameterError: there is no such group.
            ModelError: no process has joined it, or received them in time.
        """
        hosted = self._hosted.get(name)
        group = self._find_update_group(name) if hosted is None else hosted.result()
        try:
            with group.lock:
                self._used[name] = time.monotonic()
                self._broadcast(group, data.to(group.device))
        except (RuntimeError, TimeoutError) as error:
            self._drop_group(name)
            raise ModelError(
                f"the group {name!r} has not received the weights: {_first_error_sentence(error)}"
            ) from error

    def _check_group_arguments(self, name: str, backend: str, port: int, least: int = 1) -> None:
        """Raises ParameterError if a group can't be created with these arguments, or exists
        already.
        """
        if backend not in _DEVICES:
            raise ParameterError("backend", f"{short_repr(backend)} is neither gloo nor nccl.")
        if backend == "nccl" and self._device.type != "cuda":
            raise ParameterError("backend", "nccl is for an engine on a GPU.", hint='Use "gloo".')
        if not name:
            raise ParameterError("group_name", "is empty.")
        if not least <= port < 1 << 16:
            raise ParameterError("master_port", f"{port} is no port.")
        if name in self._names:
            raise ParameterError(
                "group_name",
                f"{name!r} is there already.",
                hint="Leave it: destroy_weights_update_group.",
            )

    def _make_group(
        self,
        address: str,
        port: int,
        rank: int,
        size: int,
        name: str,
        backend: str,
        store: Any = None,  # torch's
    ) -> _Group:
        """Creates a group once all its processes have joined. Raises ModelError if they don't."""
        kind = _DEVICES[backend]
        patience = timedelta(seconds=self._timeout_s)
        device = torch.device("cpu") if backend == "gloo" else self._device
        # gloo sends along a tree: a process sends to those whose rank has one more leading bit.
        forwards = rank + (1 << rank.bit_length()) < size
        try:
            store = store or distributed.TCPStore(address, port, size, timeout=patience)  # type: ignore[attr-defined] # of C++
            store.set_timeout(patience)
            for prefix in (name, f"{name}/", f"{kind}/"):  # as in torch's own groups, and SGLang's
                store = distributed.PrefixStore(prefix, store)  # type: ignore[attr-defined] # of C++
            if backend == "gloo":
                return _Group(
                    distributed.ProcessGroupGloo(store, rank, size, patience), device, forwards
                )
            options = distributed.ProcessGroupNCCL.Options()
            setattr(options, "_timeout", _FOREVER)  # noqa: B010 # torch has no other name for it
            return _Group(
                distributed.ProcessGroupNCCL(store, rank, size, options), device, forwards
            )
        except RuntimeError as error:  # torch's DistError is one
            raise ModelError(
                f"the group {name!r} at {address}:{port} did not come together: {_first_error_sentence(error)}",
                hint=f"All of its {size} processes have to join it within {self._timeout_s:g} s (dist_timeout).",
            ) from error

    def leave_update_group(self, name: str) -> None:
        """Leaves a group, which ends a broadcast in progress. If the group is still being joined,
        stops joining it.

        Raises:
            ParameterError: there is no group of this name.
        """
        with self._lock:
            settled = self._joining.pop(name, None)
            if settled is not None:
                self._names.discard(name)
                settled.set()
                return
        group = self._find_update_group(name)
        group.left.set()
        with group.lock:
            self._drop_group(name)

    def receive(
        self,
        name: str,
        forms: Sequence[TensorForm],
        *,
        flattened: bool = False,
        begun: bool = False,
    ) -> Mapping[str, torch.Tensor]:
        """Receives tensors that rank 0 broadcasts in the given order. Leaves the group if that
        fails.

        Args:
            name: name of the group.
            forms: the tensors.
            flattened: whether they arrive as one tensor of their bytes.
            begun: whether other tensors of the update have already been written.

        Raises:
            ParameterError: there is no such group.
            ModelError: a tensor has not arrived in time, or has another size, or its sender has
                gone.
        """
        group = self._find_update_group(name)
        try:
            with group.lock:
                if not flattened:
                    return {
                        each.name: self._receive_concatenated(group, [each])[0] for each in forms
                    }
                return {
                    each.name: tensor
                    for each, tensor in zip(forms, self._receive_concatenated(group, forms))
                }
        except (RuntimeError, TimeoutError) as error:
            self._drop_group(name)
            kept = (
                "Other weights of this update have been written."
                if begun
                else "The old ones are kept."
            )
            again = ", or read a whole checkpoint: update_weights_from_disk." if begun else "."
            raise ModelError(
                f"the group {name!r} has sent no weights: {_first_error_sentence(error)} {kept}",
                hint=f"The group is left: join it again, and send all weights{again}",
            ) from error

    def close(self) -> None:
        """Ends broadcasts in progress, and leaves all groups."""
        for name, group in list(self._groups.items()):
            group.left.set()
            self._drop_group(name)

    def _find_update_group(self, name: str) -> _Group:
        if name not in self._groups:
            raise ParameterError(
                "group_name",
                f"there is no group {short_repr(name)}.",
                hint="Join it: init_weights_update_group.",
            )
        return self._groups[name]

    def _drop_group(self, name: str) -> None:
        self._hosted.pop(name, None)
        self._used.pop(name, None)
        group = self._groups.pop(name, None)
        if group is not None:
            self._names.discard(name)
            group.backend.abort()

    def _receive_concatenated(
        self, group: _Group, forms: Sequence[TensorForm]
    ) -> list[torch.Tensor]:
        """Receives tensors that are sent as one. Raises RuntimeError unless exactly as many bytes
        arrive.
        """
        size = sum(each.nbytes for each in forms)
        room = _receive_buffer(group, size)
        # Marks show how much has arrived: too much overwrites the one after it, too little leaves
        # the one at its end. The latter is NaN if its dtype is a float, because no weight is.
        end = min(
            forms[-1].dtype.itemsize if forms[-1].dtype.is_floating_point else _MARK_BYTES, size
        )
        marks = torch.frombuffer(bytearray(secrets.token_bytes(_MARK_BYTES)), dtype=torch.uint8).to(
            group.device
        )
        last = (
            torch.full_like(marks, 0xFF)[:end] if forms[-1].dtype.is_floating_point else marks[:end]
        )
        behind = room[size : size + _MARK_BYTES]
        room[size - end : size] = last
        behind.copy_(marks[: len(behind)])
        self._broadcast(group, room)
        if not torch.equal(behind, marks[: len(behind)]):
            raise RuntimeError(
                f"more has come than the {size:,} bytes of {forms[0].name!r} by its dtype and shape"
            )
        if size and torch.equal(room[size - end : size], last):
            raise RuntimeError(
                f"less has come than the {size:,} bytes of {forms[0].name!r} by its dtype and shape"
            )
        parts = torch.split(room[:size], [each.nbytes for each in forms])
        # copies, because a part need not be aligned for its dtype, and the room is larger
        return [part.clone().view(each.dtype).view(each.shape) for each, part in zip(forms, parts)]

    def _broadcast(self, group: _Group, tensor: torch.Tensor) -> None:
        work = group.backend.broadcast(tensor, 0)
        until = time.monotonic() + self._timeout_s + _GRACE_S
        while not work.is_completed():
            if group.left.wait(_LOOK_S):
                threading.Thread(
                    target=_wait_for_broadcast, args=(work, group.backend), daemon=True
                ).start()
                raise TimeoutError("the group was left meanwhile.")
            if time.monotonic() > until:
                raise TimeoutError(f"nothing has come for {self._timeout_s:g} s (dist_timeout).")
        work.wait()  # raises the error if it failed


def _abort_group(made: Future[_Group]) -> None:
    """Aborts a group that was created only after its caller had stopped waiting for it."""
    if made.exception() is None:
        made.result().backend.abort()


def _wait_for_broadcast(work: Any, backend: Any) -> None:  # torch's
    """Waits until a broadcast ends, which can't be cancelled. This keeps its gloo group alive. If
    garbage collection destroyed the group earlier, the collecting thread would have to wait.
    """
    with contextlib.suppress(RuntimeError):  # nothing has come
        work.wait()


def _receive_buffer(group: _Group, size: int) -> torch.Tensor:
    """Returns zeroed bytes to receive a broadcast into. On a CPU, the memory is larger than `size`,
    because gloo kills the process if more bytes arrive than fit. A process that forwards the
    broadcast gets no extra memory, because it would forward all of it.
    """
    for window in _WINDOWS if group.device.type == "cpu" and not group.forwards else ():
        with contextlib.suppress(OSError):  # there may be a limit of addresses
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
            return torch.frombuffer(mmap.mmap(-1, size + window, flags), dtype=torch.uint8)
    return torch.zeros(size, dtype=torch.uint8, device=group.device)


def _first_error_sentence(error: BaseException) -> str:
    """Returns the first sentence of a torch error, without the location in its sources."""
    line = re.sub(r"^\[[^\]]*\] ", "", str(error).partition("\n")[0])
    return f"{line.partition('. ')[0].rstrip('.')}."
