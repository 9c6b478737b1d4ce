"""Models of ModelScope, fetched from a hub on this machine in its layout of addresses."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

import sglang_lite as sgl
from sglang_lite.runtime.models.aliases import ALIASES, HubFile
from sglang_lite.runtime.models.resolve import resolve
from tests.runtime.models.test_new_weights import pair, told

MODEL = "owner/tiny"


class Hub:
    """What the hub has, and what it was asked for.

    Attributes:
        files: contents by name.
        asked: paths of files that were fetched, and revisions of lists.
        listed: changes of what is listed of a file, by name.
        storage: address that requests for files are sent on to, if there is one.
        keys: values of "Authorization" that came.
        broken: name of a file that is not answered by HTTP.
    """

    def __init__(self, folder: Path) -> None:
        self.files = {each.name: each.read_bytes() for each in folder.iterdir()}
        self.asked: list[str] = []
        self.listed: dict[str, dict[str, Any]] = {}
        self.url = self.storage = self.broken = ""
        self.keys: list[str | None] = []

    def answer(self, path: str, query: dict[str, list[str]]) -> bytes | None:
        if path == f"/api/v1/models/{MODEL}/repo/files":
            self.asked.append(query["Revision"][0])
            files = [
                {"Path": name, "Size": len(data), "Sha256": hashlib.sha256(data).hexdigest(), "Type": "blob",
                 **self.listed.get(name, {})}
                for name, data in self.files.items()
            ]  # fmt: skip
            return json.dumps(
                {"Code": 200, "Data": {"Files": [*files, {"Path": "sub", "Type": "tree"}]}}
            ).encode()
        if path == f"/api/v1/models/{MODEL}/repo":
            self.asked.append(name := query["FilePath"][0])
            return self.files.get(name)
        return None


@contextmanager
def served(hub: Hub) -> Iterator[None]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            split = urlsplit(self.path)
            hub.keys.append(self.headers["Authorization"])
            if hub.storage and split.path.endswith("/repo"):
                self.send_response(302)
                self.send_header("Location", f"{hub.storage}{self.path}")
                self.end_headers()
                return
            if hub.broken and hub.broken in split.query:
                self.wfile.write(b"broken\r\n")
                return
            data = hub.answer(split.path, parse_qs(split.query))
            self.send_response(404 if data is None else 200)
            self.send_header("Content-Length", str(len(data or b"")))
            self.end_headers()
            self.wfile.write(data or b"")

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return pair("llama-biases", tmp_path_factory.mktemp("llamas"))[0]


@pytest.fixture
def hub(folder, own_cache, monkeypatch):
    made = Hub(folder)
    made.files |= {"pytorch_model.bin": b"again", "README.md": b"# It"}
    with served(made):
        monkeypatch.setenv("SGLANG_USE_MODELSCOPE", "true")
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", made.url)
        yield made


def test_a_model_is_fetched_once_and_used_without_the_hub(hub, folder, monkeypatch):
    settings: dict[str, Any] = dict(dtype="float32", max_running=4, in_process=True)
    with sgl.Engine(str(folder), **settings) as running:
        expected = told(running)
    with sgl.Engine(MODEL, **settings) as running:
        assert told(running) == expected
    fetched = sorted(hub.asked)
    assert fetched == sorted(["master", *(each.name for each in folder.iterdir())])
    assert resolve(MODEL).name == "master"
    assert sorted(hub.asked) == sorted([*fetched, "master"])
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", "http://127.0.0.1:9")
    with sgl.Engine(MODEL, **settings) as running:
        assert told(running) == expected


def test_a_short_name_of_a_file_is_fetched_alone_and_with_its_hash(hub, monkeypatch):
    real, content = ALIASES["gemma-3-270m"], b"GGUF" + bytes(2000)
    assert isinstance(real, HubFile)
    alias = replace(real, hub_id=MODEL, file_sha256=hashlib.sha256(content).hexdigest())
    monkeypatch.setitem(ALIASES, "gemma-3-270m", alias)
    with pytest.raises(sgl.DownloadError, match=f"{MODEL}: there is no file {real.file}"):
        resolve("gemma-3-270m")
    hub.files[real.file] = bytes(2000)
    with pytest.raises(sgl.DownloadError, match="nothing was kept"):
        resolve("gemma-3-270m")
    hub.files[real.file] = content
    hub.asked.clear()
    assert resolve("gemma-3-270m").read_bytes() == content
    assert hub.asked == ["master", real.file]


def test_a_changed_file_is_fetched_again(hub):
    there = resolve(MODEL, "v1")
    hub.asked.clear()
    hub.files["generation_config.json"] = b"{}"
    assert resolve(MODEL, "v1") == there
    assert hub.asked == ["v1", "generation_config.json"]
    assert (there / "generation_config.json").read_bytes() == b"{}"


def test_a_token_goes_to_no_other_host(hub, folder, monkeypatch):
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", "secret")
    storage = Hub(folder)
    with served(storage):
        hub.storage = storage.url
        resolve(MODEL, weights=False)
    assert set(hub.keys) == {"Bearer secret"}
    assert set(storage.keys) == {None}


@pytest.mark.parametrize("note", ['{"config.json": {"si', "[]", "\udc80"])
def test_a_damaged_note_is_as_none(note, hub):
    there = resolve(MODEL)
    (there / ".files.json").write_text(note, errors="surrogateescape")
    hub.asked.clear()
    assert resolve(MODEL) == there
    assert "config.json" in hub.asked
    hub.asked.clear()
    assert resolve(MODEL) == there
    assert hub.asked == ["master"]


def test_what_was_fetched_before_a_failure_is_not_fetched_again(hub):
    hub.files["model.safetensors"] = hub.files.pop("model.safetensors")  # the last one
    hub.listed = {"model.safetensors": {"Sha256": "0" * 64}}
    with pytest.raises(sgl.DownloadError, match="came with"):
        resolve(MODEL)
    before = set(hub.asked)
    hub.listed, hub.asked = {}, []
    resolve(MODEL)
    assert {"config.json", "model.safetensors"} <= before
    assert hub.asked == ["master", "model.safetensors"]


def test_a_folder_without_its_weights_is_not_used_without_the_hub(hub, monkeypatch):
    there = resolve(MODEL, weights=False)
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", "http://127.0.0.1:9")
    assert resolve(MODEL, weights=False) == there
    with pytest.raises(sgl.DownloadError, match="ModelScope did not give it"):
        resolve(MODEL)


def test_an_answer_that_is_no_http_is_named(hub):
    hub.broken = "config.json"
    with pytest.raises(
        sgl.DownloadError, match=r"owner/tiny: can't be fetched from ModelScope: broken"
    ):
        resolve(MODEL)


def test_no_more_is_read_than_is_listed(hub):
    hub.listed = {"config.json": {"Size": 1}}
    with pytest.raises(sgl.DownloadError, match=r"config\.json came with more than 1 bytes"):
        resolve(MODEL)


def test_a_description_needs_no_weights(hub):
    resolve(MODEL, weights=False)
    assert "model.safetensors" not in hub.asked
    resolve(MODEL)
    assert "model.safetensors" in hub.asked


BAD = {
    "a sum": ({"config.json": {"Sha256": "0" * 64}}, "config.json came with .* and the SHA-256"),
    "a size": ({"model.safetensors": {"Size": 3}}, "model.safetensors came with"),
    "a path": ({"config.json": {"Path": "../config.json"}}, r"lists '../config.json'"),
    "a list": ({"config.json": {"Size": None}}, "ModelScope did not give it: int"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_not_as_it_is_listed_is_not_kept(case, hub, tmp_path):
    hub.listed, why = BAD[case]
    with pytest.raises(sgl.DownloadError, match=why):
        resolve(MODEL)
    name = next(iter(hub.listed))
    assert not list(tmp_path.rglob(name))
    assert not list(tmp_path.rglob(".fetching-*"))


def test_a_model_that_is_not_there_is_named(hub):
    with pytest.raises(
        sgl.DownloadError,
        match=r"owner/none: ModelScope did not give it: HTTP Error 404.*SGLANG_USE_MOD",
    ):
        resolve("owner/none")
