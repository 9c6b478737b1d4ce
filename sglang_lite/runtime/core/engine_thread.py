"""Thread that builds an engine's core and then runs its loop."""

from __future__ import annotations

import atexit
import threading
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeAlias

from sglang_lite.protocol import EngineClosedError
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.core.embedding_core import EmbeddingCore, EmbeddingLoop
from sglang_lite.runtime.core.engine_core import EngineCore
from sglang_lite.runtime.core.engine_parts import make_parts
from sglang_lite.runtime.core.step_loop import StepLoop
from sglang_lite.runtime.core.tower_core import TowerCore, TowerLoop
from sglang_lite.runtime.embedding.load import LoadedEncoder
from sglang_lite.runtime.executor import memory_shortage
from sglang_lite.runtime.executor.token_records import enable_recording
from sglang_lite.runtime.host import onednn, openmp
from sglang_lite.runtime.loading.load_model import Loaded, LoadedTower
from sglang_lite.runtime.models.weight_memory import save_memory

AnyCore: TypeAlias = EngineCore | EmbeddingCore | TowerCore
AnyLoop: TypeAlias = StepLoop | EmbeddingLoop | TowerLoop


def start_engine_thread(
    handle: object, config: EngineConfig, load: Callable[[], Loaded]
) -> AnyCore:
    """Starts an engine's thread, and waits until the core is ready.

    All work with tensors, loading included, is done on that one thread: OpenMP keeps a team of
    threads for every thread that computes, and with more teams than cores each matrix
    multiplication waits for sleeping threads (measured: 13 ms per token instead of 8).

    Args:
        handle: handle of the engine; the loop ends when the handle is garbage-collected.
        config: configuration of the engine.
        load: function that loads the model.

    Raises:
        SglError: the model can't be loaded, or the core can't be built.
    """
    ready: Future[AnyCore] = Future()
    thread = threading.Thread(
        target=_run_engine,
        args=(weakref.ref(handle), config, load, ready),
        name="sglang_lite-engine",
        daemon=True,
    )
    thread.start()
    try:
        return ready.result()
    finally:
        # an exception refers to this frame, and this frame to it through the future: breaks the
        # cycle
        del ready


_running: dict[threading.Thread, AnyLoop] = {}


def _run_engine(
    handle: weakref.ref[object],
    config: EngineConfig,
    load: Callable[[], Loaded],
    ready: Future[AnyCore],
) -> None:
    """Builds the core and runs its loop. Keeps no reference to the handle while the loop runs,
    because the loop ends when the handle is garbage-collected.
    """
    thread = threading.current_thread()
    try:
        core = build_core(config, load)
        owner = handle()
        if owner is None:
            raise EngineClosedError("the constructor of the engine was interrupted.")
        # At exit Python runs `_close_all_loops`, which also waits for the threads, instead of the
        # finalizers.
        weakref.finalize(owner, core.loop.inbox.close).atexit = False
        del owner
        _running[thread] = core.loop
    except BaseException as error:  # raised again by `start_engine_thread`
        ready.set_exception(error)
        return
    ready.set_result(core)
    core.loop.run()
    del _running[thread]


def build_core(config: EngineConfig, load: Callable[[], Loaded]) -> AnyCore:
    """Builds an engine's core, on the thread that will run its loop.

    Args:
        config: configuration of the engine.
        load: function that loads the model.

    Raises:
        SglError: the model can't be loaded, or the core can't be made.
    """
    openmp.set_share_of_threads(
        config.threads,
        config.parallel.ranks_sharing_threads,
        max(config.dp_size // config.nnodes, 1),
    )
    onednn.limit_primitive_caches()
    try:
        # not assigned to a local name, so a failure releases the model
        return _build_core_for_model(config, load())
    except BaseException as error:
        # keeps a stored error from keeping tensors alive
        traceback.clear_frames(error.__traceback__)
        raise memory_shortage.startup_error(error) from error.__cause__


def _build_core_for_model(config: EngineConfig, loaded: Loaded) -> AnyCore:
    if isinstance(loaded, LoadedEncoder):
        return EmbeddingCore(config, loaded)
    if isinstance(loaded, LoadedTower):
        return TowerCore(config, loaded)
    try:
        if config.enable_memory_saver:
            save_memory(loaded.model, backup=config.enable_weights_cpu_backup)
        enable_recording(loaded.model, config)
        return EngineCore(config, loaded, make_parts(config, loaded))
    except BaseException:
        if loaded.compiling is not None:
            loaded.compiling.end_process()
        raise


@atexit.register
def _close_all_loops() -> None:
    """Ends all loops before Python exits. Otherwise Python would kill their daemon threads, and
    killing a thread inside torch's code aborts the process.
    """
    for thread, loop in list(_running.items()):
        if not loop.inbox.gate.is_forked_copy:
            loop.inbox.close()
            thread.join()
