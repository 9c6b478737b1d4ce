"""Methods of SGLang's engine that this engine lacks. Each raises an error that names the method to
use instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NoReturn

from sglang_lite.errors import short_repr
from sglang_lite.protocol import CapabilityError
from sglang_lite.protocol.anything import UserValue

if TYPE_CHECKING:
    from sglang_lite.engine.engine import Engine


def update_weights_from_ipc(
    engine: Engine, zmq_handles: Mapping[str, str], flush_cache: bool = True
) -> NoReturn:
    """Raises CapabilityError, because this engine has no client of checkpoint-engine."""
    raise CapabilityError(
        f"update_weights_from_ipc: {len(zmq_handles)} sockets of checkpoint-engine can't be read here.",
        hint="Pass the tensors: update_weights_from_tensor, or update_weights_from_distributed.",
    )


def save_sharded_model(engine: Engine, **kwargs: UserValue) -> NoReturn:
    """Raises CapabilityError, because a rank's part of the weights is never written to a file."""
    raise CapabilityError(
        f"save_sharded_model: the engine writes no weights (path={short_repr(kwargs.get('path'))}).",
        hint="Start the engine with the checkpoint itself: each rank reads only its part.",
    )


def save_remote_model(engine: Engine, **kwargs: UserValue) -> NoReturn:
    """Raises CapabilityError, because this engine has none of SGLang's connectors."""
    raise CapabilityError(
        f"save_remote_model: the engine writes no weights (url={short_repr(kwargs.get('url'))}).",
        hint="Another engine reads them from this one, with the load format remote_instance.",
    )


def collective_rpc(engine: Engine, method: str, **kwargs: UserValue) -> NoReturn:
    """Raises CapabilityError, because ranks lack the methods of SGLang's scheduler."""
    raise CapabilityError(
        f"collective_rpc: {short_repr(method)} is a method of SGLang's scheduler, which isn't here.",
        hint="Call a method of Engine: each reaches every rank.",
    )


def attach_tokenizer_worker(parent_pid: int | None = None) -> NoReturn:
    """Raises CapabilityError, because only the process that started an engine can use it."""
    raise CapabilityError(
        f"attach_tokenizer_worker: the engine of process {parent_pid or 'this one started from'} can't be shared.",
        hint="Serve one engine, and connect to it from each process.",
    )
