"""The thread that an engine's core is built on, and whose loop it then runs."""

from __future__ import annotations

import atexit
import threading
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import Future

import torch

from sglang_lite.protocol import EngineClosedError
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.core.embedding_core import EmbeddingCore
from sglang_lite.runtime.core.embedding_loop import EmbeddingLoop
from sglang_lite.runtime.core.engine_core import EngineCore
from sglang_lite.runtime.core.step_loop import StepLoop
from sglang_lite.runtime.embedding.load import LoadedEncoder
from sglang_lite.runtime.executor import memory_shortage
from sglang_lite.runtime.load import LoadedModel


def start(
    handle: object, config: EngineConfig, load: Callable[[], LoadedModel | LoadedEncoder]
) -> EngineCore | EmbeddingCore:
    """Starts an engine's thread and waits until it is ready.

    All work with tensors, loading too, is done on that one thread: OpenMP keeps a team of threads for every thread
    that computes, and with more teams than cores each product waits for sleeping threads (measured: 13 ms a token
    instead of 8).

    Args:
        handle: of the engine. When nobody refers to it any more, the loop ends.
        load: gives its model.

    Raises:
        SglError: of loading and building.
    """
    ready: Future[EngineCore | EmbeddingCore] = Future()
    thread = threading.Thread(
        target=_run, args=(weakref.ref(handle), config, load, ready), name="sglang_lite-engine", daemon=True
    )
    thread.start()
    try:
        return ready.result()
    finally:
        del ready  # a failure refers to this frame: no cycle


_running: dict[threading.Thread, StepLoop | EmbeddingLoop] = {}


def _run(
    handle: weakref.ref[object],
    config: EngineConfig,
    load: Callable[[], LoadedModel | LoadedEncoder],
    ready: Future[EngineCore | EmbeddingCore],
) -> None:
    """The thread. It never has a reference to the handle while the loop runs: the handle's end is the loop's end."""
    thread = threading.current_thread()
    try:
        core = build(config, load)
        owner = handle()
        if owner is None:
            raise EngineClosedError("its constructor was interrupted.")
        # At exit Python runs no finalizers of ours, but `_end_all`, which waits for the threads, too.
        weakref.finalize(owner, core.loop.inbox.close).atexit = False
        del owner
        _running[thread] = core.loop
    except BaseException as error:  # raised again in the constructor
        ready.set_exception(error)
        return
    ready.set_result(core)
    core.loop.run()
    del _running[thread]


def build(config: EngineConfig, load: Callable[[], LoadedModel | LoadedEncoder]) -> EngineCore | EmbeddingCore:
    """An engine's core, on the thread that will run its loop.

    Args:
        load: gives its model.

    Raises:
        SglError: of loading and building.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    try:
        return _core(config, load())  # no name here for what a failure must let go
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # whoever keeps the error keeps no tensors
        raise memory_shortage.explained(error) from error.__cause__


def _core(config: EngineConfig, loaded: LoadedModel | LoadedEncoder) -> EngineCore | EmbeddingCore:
    if isinstance(loaded, LoadedEncoder):
        return EmbeddingCore(config, loaded)
    try:
        return EngineCore(config, loaded)
    except BaseException:
        if loaded.compiling is not None:
            loaded.compiling.end()
        raise


@atexit.register
def _end_all() -> None:
    """Python ends daemon threads wherever they are, and within torch's code that aborts the process."""
    for thread, loop in list(_running.items()):
        if not loop.inbox.is_copy:
            loop.inbox.close()
            thread.join()
