"""A process that reads large bodies for a server: see reader_pool.py."""

from __future__ import annotations

import logging
import os
import pickle
import socket

from sglang_lite.engine.connection import Connection
from sglang_lite.protocol import BackendError, SglError
from sglang_lite.runtime.host.parent import end_with_parent
from sglang_lite.server.endpoint import BodyTask, HttpRequest
from sglang_lite.server.reader import ModelFacts, RequestReader
from sglang_lite.server.reader_pool import send_object

logger = logging.getLogger(__name__)


def main(descriptor: int, server: int) -> None:
    """Answers the tasks that arrive on a socket. Ends this process when the server closes the
    socket or has itself ended.

    Args:
        descriptor: file descriptor of the socket.
        server: id of the server's process.
    """
    logging.basicConfig()
    end_with_parent(server)  # even while a body is read
    connection = Connection(socket.socket(fileno=descriptor))
    frames = connection.read_frames()
    facts: ModelFacts = pickle.loads(next(frames))
    reader: RequestReader | None = None
    for content in frames:
        task: BodyTask = pickle.loads(content)
        call = HttpRequest(task.data, {}, {}, {}, "", "", task.limits, [], task.reports)
        answer: object
        try:
            reader = reader or facts.reader()
            answer = task.function(reader, call, *task.more), call.unused
        except SglError as error:
            answer = error
        except Exception:  # a bug of this package
            logger.exception("a body could not be read")
            answer = BackendError("the server failed.", hint="Its log says how.")
        send_object(connection, answer)
    os._exit(0)
