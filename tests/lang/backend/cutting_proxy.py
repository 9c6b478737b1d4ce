"""A TCP proxy that cuts each stream of `/generate` and each program once, at a random byte of its
answer.
"""

import contextlib
import random
import re
import socket
import struct
import threading

_SEED = re.compile(rb'"(?:sampling_)?seed":\s*(\d+)')
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: what is closed is reset


class CuttingProxy:
    """
    Args:
        port: of the server behind it.
        most: bytes of an answer within which it is cut.

    Attributes:
        url: of the proxy.
        cuts: how many answers were cut.
    """

    def __init__(self, port, most, seed=0):
        self._port, self._most, self._random = port, most, random.Random(seed)
        self._seen, self.cuts = set(), 0
        self._lock = threading.Lock()
        self._sockets = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._close(self._listener)
        self._thread.join()
        for each in list(self._sockets):
            self._close(each)

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._sockets.add(client)
                try:
                    server = socket.create_connection(("127.0.0.1", self._port))
                except OSError:
                    self._close(client)
                    continue
                self._sockets.add(server)
                left = [None]  # bytes of the answer that still pass
                threading.Thread(
                    target=self._requests, args=(client, server, left), daemon=True
                ).start()
                threading.Thread(
                    target=self._answers, args=(client, server, left), daemon=True
                ).start()

    def _requests(self, client, server, left):
        pending = b""
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                pending += data
                found = _SEED.search(pending)
                if found:
                    streams = (
                        b'"stream":true' in pending.replace(b" ", b"")
                        or b"POST /program " in pending
                    )
                    pending = b""
                    with self._lock:
                        if streams and found[1] not in self._seen:
                            self._seen.add(found[1])
                            left[0] = self._random.randrange(self._most)
                server.sendall(data)
        self._close(client)
        self._close(server)

    def _answers(self, client, server, left):
        with contextlib.suppress(OSError):
            while data := server.recv(1024):
                if left[0] is not None:
                    passes, left[0] = data[: left[0]], left[0] - len(data)
                    if left[0] < 0:
                        client.sendall(passes)
                        self.cuts += 1
                        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                        break
                client.sendall(data)
        self._close(client)
        self._close(server)

    def _close(self, each):
        self._sockets.discard(each)
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()
