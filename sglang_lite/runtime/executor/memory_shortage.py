"""Shortages of memory: which errors say that it was not enough, and what is done about them."""

from __future__ import annotations

import errno

import torch

from sglang_lite.protocol import ModelError


def is_shortage(error: BaseException) -> bool:
    """True for errors that say that memory was not enough: by type, or in the words of a library below torch."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _SHORTAGE)


_SHORTAGE = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


def explained(error: BaseException) -> BaseException:
    """The error of an engine that does not start: what to do, where memory was not enough."""
    if not is_shortage(error):
        return error
    return ModelError(
        f"not enough memory to start: {str(error).partition(chr(10))[0]}",
        hint="Lower mem_fraction, max_total_tokens, max_running or step_tokens, take a smaller model, or end what else "
        "takes memory.",
    )


def release_cached() -> None:
    """Gives back to the GPU what torch keeps of it for later."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
