"""Files through which replicas synchronize if they share the weights of their feed-forward layers.
One file is for collectives, and each replica has a pipe that announces steps. The files have no
name in any folder; the replicas open them while they start.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from sglang_lite.engine.frames import Meeting
from sglang_lite.protocol import ParameterError
from sglang_lite.runtime.config import DIST_TIMEOUT_S, EngineConfig

if TYPE_CHECKING:
    from sglang_lite.runtime.parallel.shared_steps import SharedSteps


@contextmanager
def open_rendezvous(config: EngineConfig) -> Iterator[Sequence[Meeting | None]]:
    """Creates the files through which replicas synchronize, and closes them on exit, once the
    replicas have started. Yields one Meeting per replica, or None for each replica if they share no
    weights.

    Raises:
        ParameterError: replicas share weights, and this is not Linux (`os.memfd_create`).
    """
    if not config.enable_dp_attention:
        yield [None] * config.dp_size
        return
    if not hasattr(os, "memfd_create"):
        raise ParameterError("enable_dp_attention", "is for Linux alone.", hint="Leave it out.")
    with ExitStack() as open_files:

        def path(descriptor: int) -> str:
            open_files.callback(os.close, descriptor)
            return f"/proc/{os.getpid()}/fd/{descriptor}"

        file = path(os.memfd_create("sglang_lite-replicas"))
        ends = [
            (path(reader), path(writer))
            for reader, writer in (os.pipe() for _ in range(config.dp_size))
        ]
        pipes = tuple(reader for reader, _ in ends)
        yield [Meeting(replica, file, pipes) for replica in range(config.dp_size)]


def join_rendezvous(meeting: Meeting, config: EngineConfig) -> SharedSteps:
    """Waits until all replicas have arrived. Returns the object through which this replica takes
    part in their common steps.

    Raises:
        RuntimeError: not all have arrived in time.
    """
    from sglang_lite.runtime.parallel.collectives import GlooCollectives  # imports torch
    from sglang_lite.runtime.parallel.shared_steps import SharedSteps

    own = meeting.replica
    every = range(len(meeting.pipes))
    inbox = open(meeting.pipes[own], "rb")  # noqa: SIM115  # until the process ends
    others = [open(meeting.pipes[each], "wb", 0) for each in every if each != own]  # noqa: SIM115  # the same
    patience = config.dist_timeout or DIST_TIMEOUT_S
    return SharedSteps(
        GlooCollectives(config.sharing.as_seen_by(own), meeting.file, patience),
        inbox,
        others,
        patience,
    )
