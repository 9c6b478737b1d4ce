"""A hub on this machine: its layout of addresses over folders, for tests of what is fetched from
one.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

COMMIT = "c" * 40


@contextmanager
def local_hub(folders: Mapping[str, Path], gated: Mapping[str, int] = {}) -> Iterator[str]:
    """Serves folders by hub id, but for the files of those that are gated, by the status that
    refuses them. Yields its address.
    """

    class Hub(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            if found := re.fullmatch(
                r"/api/models/([^/]+/[^/]+)(/revision/[^/?]+)?(\?.*)?", self.path
            ):
                folder = folders.get(found[1])
                return (
                    self.refuse()
                    if folder is None
                    else self.answer(json.dumps(described(found[1], folder)))
                )
            if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/[^/?]+(\?.*)?", self.path):
                folder = folders.get(found[1])
                return self.refuse() if folder is None else self.answer(json.dumps(tree(folder)))
            found = re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", self.path)
            if not found or found[1] not in folders:
                return self.refuse()
            if found[1] in gated:
                return self.refuse(gated[found[1]], "GatedRepo")
            file = folders[found[1]] / found[2]
            return self.send(file) if file.is_file() else self.refuse(404, "EntryNotFound")

        do_HEAD = do_GET  # noqa: N815 # the name that http.server calls

        def answer(self, text):
            self.begin(
                200, {"Content-Type": "application/json", "Content-Length": len(text.encode())}
            )
            self.write(text.encode())

        def refuse(self, status=404, code="RepoNotFound"):
            self.begin(status, {"X-Error-Code": code, "Content-Length": 0})

        def send(self, file):
            data = file.read_bytes()
            headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
            if found := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
                start, end = int(found[1]), min(int(found[2] or len(data)), len(data) - 1)
                headers["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
                data = data[start : end + 1]
                self.begin(206, {**headers, "Content-Length": len(data)})
            else:
                self.begin(200, {**headers, "Content-Length": len(data)})
            self.write(data)

        def begin(self, status, headers):
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, str(value))
            self.end_headers()

        def write(self, data):
            if self.command != "HEAD":
                self.wfile.write(data)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def ask(url: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has this process and its children ask a hub. huggingface_hub reads the variables only when it
    is imported.
    """
    import huggingface_hub.constants as constants

    for name, value in (("HF_ENDPOINT", url), ("HF_HUB_CACHE", str(cache))):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))


def names(folder):
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def described(hub_id, folder):
    siblings = [{"rfilename": name} for name in names(folder)]
    return {
        "id": hub_id,
        "modelId": hub_id,
        "sha": COMMIT,
        "private": False,
        "tags": [],
        "siblings": siblings,
    }


def tree(folder):
    return [
        {"type": "file", "path": name, "size": (folder / name).stat().st_size, "oid": "a" * 40}
        for name in names(folder)
    ]
