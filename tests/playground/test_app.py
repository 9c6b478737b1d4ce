"""The playground as its page and others reach it, over real HTTP."""

import threading

import pytest
import requests
import uvicorn

from sglang_lite.cli import main
from sglang_lite.playground.app import build_application
from sglang_lite.server.http.sockets import bind_socket
from tests.playground.test_programs import Page

TOKEN = "the token"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A page, and the address of its server."""
    page = Page(tmp_path_factory.mktemp("program"))
    with bind_socket("127.0.0.1", 0) as listening:
        listening.listen()
        port = listening.getsockname()[1]
        server = uvicorn.Server(
            uvicorn.Config(build_application(page.playground, TOKEN, port), log_level="error")
        )
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        yield page, f"http://127.0.0.1:{port}"
        server.should_exit = True
        thread.join()


def asked(page):
    return {"version": page.described["version"], "program": "inner"}


def test_its_page_has_no_program_in_it(served):
    _, address = served
    answer = requests.get(address, params={"token": TOKEN})
    assert answer.status_code == 200
    assert "profile" not in answer.text
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]


def test_what_it_runs_needs_its_token(served):
    page, address = served
    post = requests.post(f"{address}/run", json=asked(page), headers={"x-token": TOKEN})
    assert post.json()["error"] is None
    assert post.json()["run"] == 1
    for path in ("programs", "run", "rerun", "check"):
        for headers in ({}, {"x-token": "another"}, {"authorization": f"Bearer {TOKEN}"}):
            assert (
                requests.post(f"{address}/{path}", json=asked(page), headers=headers).status_code
                == 401
            )
        assert requests.get(f"{address}/{path}", headers={"x-token": TOKEN}).status_code == 405
    assert requests.get(address).status_code == 401


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"}, {"Host": "127.0.0.1"}, {"Host": "evil.example:{port}"}, {"Origin": "null"},
        {"Origin": "http://evil.example"}, {"Origin": "http://127.0.0.1:1"}, {"Origin": "https://127.0.0.1:{port}"},
    ],
)  # fmt: skip
def test_other_pages_and_names_are_refused(served, headers):
    page, address = served
    port = address.rpartition(":")[2]
    headers = {
        "x-token": TOKEN,
        **{name: value.format(port=port) for name, value in headers.items()},
    }
    assert requests.post(f"{address}/run", json=asked(page), headers=headers).status_code == 403
    assert requests.get(address, params={"token": TOKEN}, headers=headers).status_code == 403
    good = {"x-token": TOKEN, "Origin": address}
    assert requests.post(f"{address}/run", json=asked(page), headers=good).status_code == 200


def test_bad_bodies_are_refused(served):
    _, address = served
    headers = {"x-token": TOKEN}
    for body in (b"", b"{", b"[]", b'{"version": 1}', b"\xff"):
        answer = requests.post(f"{address}/run", data=body, headers=headers)
        assert answer.status_code == 400
        assert answer.json()["error"]["text"]
    assert (
        requests.post(f"{address}/run", data=b" " * (5 * 2**20), headers=headers).status_code == 413
    )


def test_the_command_says_what_it_can_not_serve(served, tmp_path, capsys):
    page, address = served
    assert main(["playground", str(tmp_path / "none.py")]) == 1
    assert "there is no file" in capsys.readouterr().err
    assert main(["playground", str(page.file), "--port", address.rpartition(":")[2]]) == 1
    assert "Choose another port with --port" in capsys.readouterr().err
