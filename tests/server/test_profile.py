"""Profiles over HTTP: a trace with the engine's steps, of either form of engine."""

import gzip
import json
import tempfile

import httpx2
import pytest

import sglang_lite as sgl
from tests.server.conftest import SETTINGS, serving

BODY = {
    "text": "a quick",
    "sampling_params": {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True, "regex": "a+"},
}


@pytest.fixture(scope="module", params=["here", "process"])
def client(request, folder):
    with (
        sgl.Engine(folder, **SETTINGS, in_process=request.param == "here") as engine,
        serving(engine, api_key=("key",), admin_api_key="admin") as url,
        httpx2.Client(
            base_url=url, timeout=60, headers={"authorization": "Bearer admin"}
        ) as client,
    ):
        yield client


def test_a_profile_has_the_spans_of_steps(client, tmp_path, monkeypatch):
    assert client.post("/stop_profile").status_code == 400
    wanted = tmp_path / "traces"
    started = client.post("/start_profile", json={"output_dir": str(wanted)})
    assert started.json() == {"success": True, "output_dir": str(wanted)}
    assert client.post("/start_profile", json={"output_dir": str(wanted)}).status_code == 400
    assert (
        client.post("/generate", json=BODY, headers={"authorization": "Bearer key"}).status_code
        == 200
    )
    path = client.post("/stop_profile").json()["path"]
    assert path.startswith(str(wanted))
    with gzip.open(path) as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"step", "prefill", "decode", "masks"} <= names
    assert client.post("/stop_profile").status_code == 400
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = client.get("/start_profile").json()["output_dir"]
    assert own.startswith(str(tmp_path))
    assert client.get("/stop_profile").json()["path"].startswith(own)


def test_a_profile_is_the_administrators(client):
    for path in ("/start_profile", "/stop_profile"):
        assert client.post(path, headers={"authorization": "Bearer key"}).status_code == 401


def test_what_can_not_be_profiled_is_refused(client, tmp_path):
    file = tmp_path / "file"
    file.touch()
    for body, parameter in (
        ({"output_dir": str(file / "below")}, "output_dir"),
        ({"num_steps": 3}, "num_steps"),
        ({"activities": ["MEM"]}, "activities"),
        ({"dir": "a"}, "dir"),
    ):
        response = client.post("/start_profile", json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, parameter)
    assert client.post("/stop_profile").status_code == 400
