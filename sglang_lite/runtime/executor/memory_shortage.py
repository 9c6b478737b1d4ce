"""Recognises errors caused by a lack of memory, and builds the errors to raise instead."""

from __future__ import annotations

import errno

import torch

from sglang_lite.protocol import ModelError, OverloadedError


def is_out_of_memory(error: BaseException) -> bool:
    """Returns True if the error means that memory ran out, judging by its type or by the message of
    a library below torch.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _SHORTAGE)


_SHORTAGE = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


def startup_error(error: BaseException) -> BaseException:
    """Returns the error to raise if an engine can't start: a ModelError with advice if memory ran
    out, else `error` itself.
    """
    if not is_out_of_memory(error):
        return error
    return ModelError(
        f"not enough memory to start: {str(error).partition(chr(10))[0]}",
        hint="Lower mem_fraction, max_total_tokens, max_running or step_tokens, take a smaller model, or end what else "
        "takes memory.",
    )


def request_error(shortage: str, pieces: int) -> OverloadedError:
    """Returns the error for a request that runs out of memory even when no other request runs and
    its prompt is computed in pieces of `pieces` tokens.
    """
    return OverloadedError(
        f"not enough memory for the request, alone and in pieces of {pieces} tokens: {shortage}",
        hint="Lower mem_fraction or max_total_tokens, which leaves more beside the KV pool, or end what else takes "
        "memory.",
    )


def release_cached_memory() -> None:
    """Gives the GPU memory that torch keeps for later allocations back to the driver."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
