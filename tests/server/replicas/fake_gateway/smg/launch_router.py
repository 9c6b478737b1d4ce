"""Settings and routes of the gateway, as `sglang_lite.server.replicas.gateway` uses them."""

from __future__ import annotations

import dataclasses
import json
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclasses.dataclass
class RouterArgs:
    host: str
    port: int
    control_plane_api_keys: list[tuple[str, str, str, str]]


def launch_router(args: RouterArgs) -> None:
    """Runs it."""
    workers: dict[str, str] = {}
    admin = f"Bearer {args.control_plane_api_keys[0][2]}"

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def answer(self, content: Any, status: int = 200) -> None:
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            if self.path.startswith("/workers"):
                if self.headers.get("authorization") != admin:
                    return self.answer({}, 401)
                return self.tell_of_workers(body)
            status, content = 503, json.dumps({"error": "no worker"}).encode()
            for _ in range(12):  # as smg does
                if not (known := list(workers.values())):
                    break
                request = urllib.request.Request(
                    known[0] + self.path, body or None, {"content-type": "application/json"}
                )
                try:
                    with urllib.request.urlopen(request) as answer:
                        return self.answer(answer.read(), answer.status)
                except urllib.error.HTTPError as error:
                    status, content = error.code, error.read()
                except OSError:
                    status, content = 503, json.dumps({"error": "the worker is gone"}).encode()
                if status != 503:
                    break
            return self.answer(content, status)

        def tell_of_workers(self, body: bytes) -> None:
            if self.command == "POST":
                url = json.loads(body)["url"]
                workers[str(hash(url))] = url
            elif self.command == "DELETE":
                workers.pop(self.path.rpartition("/")[2], None)
            told = [
                {"id": id, "url": url, "is_healthy": True, "status": "ready"}
                for id, url in workers.items()
            ]
            self.answer({"workers": told})

        def do_POST(self) -> None:
            self.do_GET()

        def do_DELETE(self) -> None:
            self.do_GET()

    with ThreadingHTTPServer((args.host, args.port), Handler) as server:
        server.serve_forever(0.02)
