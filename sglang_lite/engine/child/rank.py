"""Process of a rank other than 0. It loads its part of the model and executes the computations that
rank 0 requests.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import socket
import time
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from sglang_lite.engine.child.ranks import BEAT_S, START_S
from sglang_lite.engine.connection import Connection
from sglang_lite.engine.frames import (
    Loaded,
    Start,
    StartFailed,
    decode_commands,
    encode_frame,
    serializable_failure,
)
from sglang_lite.engine.spawned_process import CAUSE_FIRST_S
from sglang_lite.runtime.host.parent import be_killed_with_parent, end_with_parent
from sglang_lite.runtime.host.process_name import set_process_name


def main(descriptor: int, rank: int, meeting: str) -> None:
    """Runs the rank's process. Never returns.

    Args:
        descriptor: file descriptor of the process's end of the socket to rank 0.
        rank: this rank.
        meeting: where the ranks meet; see `GlooCollectives`.
    """
    be_killed_with_parent()
    set_process_name(f"sgl-rank-{rank}")
    faulthandler.enable()  # rank 0 passes on what is printed
    connection = Connection(socket.socket(fileno=descriptor))
    contents = connection.read_frames()
    first = next(contents, None)
    if first is None:
        os._exit(0)
    ((_, start),) = decode_commands(first)
    assert isinstance(start, Start)
    # each look is a sign of life
    end_with_parent(start.handle, partial(connection.send, encode_frame([])), BEAT_S)
    try:
        _load_and_follow_rank_0(connection, contents, start, rank, meeting)
    except Exception as error:
        from sglang_lite.runtime.executor.memory_shortage import startup_error

        traceback.print_exc()  # rank 0 passes on what is printed
        # if a collective failed because another rank was killed, report that first
        time.sleep(CAUSE_FIRST_S)
        connection.send(encode_frame([StartFailed(serializable_failure(startup_error(error)))]))
        os._exit(1)
    os._exit(0)


def _load_and_follow_rank_0(
    connection: Connection, contents: Iterator[memoryview], start: Start, rank: int, meeting: str
) -> None:
    from sglang_lite.runtime.config import EngineConfig
    from sglang_lite.runtime.executor import make_runner  # imports torch
    from sglang_lite.runtime.executor.kv_pool_size import gpu_bytes_in_use
    from sglang_lite.runtime.executor.ranks import follow_rank_0, read_message
    from sglang_lite.runtime.host.heap import start_trimming
    from sglang_lite.runtime.host.onednn import limit_primitive_caches
    from sglang_lite.runtime.host.openmp import set_share_of_threads
    from sglang_lite.runtime.loading.load_model import load_model
    from sglang_lite.runtime.parallel.collectives import GlooCollectives

    config = EngineConfig(**start.config)
    set_share_of_threads(
        config.threads,
        config.parallel.ranks_sharing_threads,
        max(config.dp_size // config.nnodes, 1),
    )
    limit_primitive_caches()
    ranks = GlooCollectives(
        config.parallel.as_seen_by(rank), meeting, config.dist_timeout or START_S
    )
    loaded = load_model(config, Path(start.model_path), iter, ranks=ranks)
    device = loaded.model.device
    connection.send(
        encode_frame([Loaded(gpu_bytes_in_use(device) if device.type == "cuda" else 0)])
    )
    gc.freeze()
    if device.type == "cpu":
        start_trimming()
    follow_rank_0(
        map(read_message, contents),
        lambda capacity: make_runner(loaded.model, capacity, config, loaded.compiling),
    )
