"""What those need who run a server: a file of flags, HTTPS, a log for programs."""

import json
import logging
import os
import ssl
import sys
from pathlib import Path

import httpx2
import pytest

import sglang_lite as sgl
from sglang_lite.cli import main
from sglang_lite.commands.config_file import ConfigFile
from sglang_lite.commands.parser import CommandParser
from sglang_lite.server import flags, log
from sglang_lite.server.log import JsonFormatter
from sglang_lite.server.settings import ServerSettings
from tests.server.conftest import serving

DATA = Path(__file__).parent / "data"
PEM, KEY = str(DATA / "localhost.pem"), str(DATA / "localhost.key")


@pytest.fixture
def read(tmp_path):
    """Function that reads a command line beside a file of flags."""
    parser = CommandParser(prog="serve")
    flags.add_serve_flags(parser)
    parser.add_argument("--config", action=ConfigFile)

    def read(text, *before, after=()):
        (tmp_path / "server.yaml").write_text(text)
        line = [*before, "--config", str(tmp_path / "server.yaml"), *after]
        return flags.read_serve_flags(parser.parse_args(line))

    return read


def test_a_file_says_what_flags_say(read):
    server, engine, replicas = read(
        "model_path: m\nport: 1234\nallowed-host: [a.lan, b.lan]\nrestart: true\nplayground: false\nreplicas: 2\n"
        "log_requests: false\nmax_body_mb: 1.5\nserved_model_name: null\n"
    )
    assert (server.port, server.allowed_host, server.max_body_mb) == (1234, ("a.lan", "b.lan"), 1.5)
    assert (server.playground, server.served_model_name) == (False, None)
    assert (engine["model"], engine["restart"], replicas.replicas) == ("m", True, 2)
    assert "log_requests" not in engine


def test_the_command_line_wins_wherever_it_stands(read):
    text = "port: 1\nhost: 10.0.0.1\n"
    assert read(text, "--port", "2")[0].port == read(text, after=["--port", "2"])[0].port == 2
    assert read(text, "--port", "2")[0].host == "10.0.0.1"


@pytest.mark.parametrize(("text", "problem"), [
    ("prot: 1", "unrecognized arguments: --prot=1; did you mean --port?"), ("- port", "has no flags"), ("", "has no flags"),
    ("a: [", "can't be read"), ("port: x", "invalid int value"), ("1: 2", "has no flags"), ("restrat: true", "--restart?"),
    ("port: {a: 1}", "invalid int value"), ("port: [1, 2]", "port takes one value"), ("por: 1", "did you mean --port?"),
    ("model_pth: m", "did you mean --model-path?"),
    ("model_path: a\nmodel-path: b", "model-path and model_path are one setting"),
    ("port: 1\nport: 2", "port is given twice"), ("model: a\nmodel_path: b", "model_path and model are one setting"),
])  # fmt: skip
def test_a_file_with_a_mistake_is_one_line(read, text, problem, capsys):
    with pytest.raises(SystemExit) as exit_:
        read(text)
    assert exit_.value.code == 2
    said = capsys.readouterr().err
    assert problem in said
    assert said.count("\n") == 1


def test_a_missing_file_is_told_by_the_command(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--config", "/none.yaml"])
    assert "--config: /none.yaml can't be read" in capsys.readouterr().err


def test_the_command_reads_a_file_of_several_flags(tmp_path, capsys):
    (tmp_path / "server.yaml").write_text("model_path: /none/there\nport: 0\nlog_level: error\n")
    assert main(["serve", "--config", str(tmp_path / "server.yaml")]) == 1
    assert "/none/there" in capsys.readouterr().err


def test_a_servers_streams_are_told_of_as_seldom_as_it_says():
    """The engine joins the text: tests/engine/test_paced_streams.py."""
    parser = CommandParser(prog="serve")
    flags.add_serve_flags(parser)
    _, engine, _ = flags.read_serve_flags(
        parser.parse_args(["--model-path", "a", "--stream-interval-ms", "250"])
    )
    assert engine["stream_interval_s"] == 0.25


def test_the_playground_over_https_takes_requests_of_its_own_page(engine):
    with serving(engine, token="token", ssl_certfile=PEM, ssl_keyfile=KEY) as url:
        address = url.replace("http:", "https:")
        trusting = ssl.create_default_context(cafile=PEM)
        with httpx2.Client(verify=trusting, timeout=60, headers={"x-token": "token"}) as client:
            for origin, status in ((address, 200), (url, 403), ("https://evil.example", 403)):
                answer = client.post(
                    f"{address}/playground/check",
                    json={"kind": "regex", "text": "a"},
                    headers={"origin": origin},
                )
                assert answer.status_code == status, origin


def test_https(engine):
    with serving(engine, ssl_certfile=PEM, ssl_keyfile=KEY) as url:
        address = url.replace("http:", "https:")
        trusting = ssl.create_default_context(cafile=PEM)
        with httpx2.Client(verify=trusting, timeout=60) as client:
            answer = client.post(
                f"{address}/generate", json={"text": "a", "sampling_params": {"max_new_tokens": 2}}
            )
            assert answer.json()["meta_info"]["completion_tokens"] <= 2
            with client.stream(
                "POST", f"{address}/generate", json={"text": "a", "stream": True}
            ) as stream:
                assert [line for line in stream.iter_lines() if line][-1] == "data: [DONE]"
        with pytest.raises(
            httpx2.ConnectError, match=r"CERTIFICATE_VERIFY_FAILED|self-signed|self signed"
        ):
            httpx2.get(f"{address}/ping", timeout=60)
        assert sgl.RuntimeEndpoint(address, verify=PEM).get_model_name()
        with pytest.raises(sgl.BackendError, match="Give verify= a file with the authority"):
            sgl.RuntimeEndpoint(address)
        for file in ("/none.pem", KEY):
            with pytest.raises(
                sgl.ParameterError, match=f"verify: {file} has no certificate authorities"
            ):
                sgl.RuntimeEndpoint(address, verify=file)
        with pytest.raises(httpx2.TransportError):  # HTTP where HTTPS is spoken
            httpx2.get(f"{url}/ping", timeout=60)


@pytest.mark.parametrize(("given", "problem"), [
    ({"ssl_certfile": "/none.pem"}, "No such file"), ({"ssl_certfile": PEM}, "can't be used"),
    ({"ssl_certfile": KEY, "ssl_keyfile": KEY}, "can't be used"), ({"ssl_keyfile": KEY}, "a key needs a certificate"),
    ({"ssl_keyfile_password": "x"}, "ssl_keyfile_password: a key needs a certificate"),
])  # fmt: skip
def test_a_certificate_that_cant_be_used_is_refused_at_the_start(given, problem):
    with pytest.raises(sgl.ParameterError, match=problem):
        ServerSettings(**given)


def test_the_log_as_json(engine, caplog):
    with caplog.at_level("INFO", "sglang_lite.server"), serving(engine) as url:
        httpx2.post(
            f"{url}/generate", json={"text": 3}, headers={"x-request-id": "mine"}, timeout=60
        )
    (record,) = [record for record in caplog.records if hasattr(record, "request")]
    told = json.loads(JsonFormatter().format(record))
    assert told["ms"] >= 0
    assert told["time"].endswith("Z")
    expected = {
        "level": "info",
        "method": "POST",
        "route": "/generate",
        "status": 400,
        "request_id": "mine",
    }
    assert expected.items() <= told.items()


def test_the_log_of_a_command_is_json_too_without_its_polls_of_other_servers(monkeypatch, capsys):
    root, client = logging.getLogger(), logging.getLogger("httpx2")
    for logger in (root, client):
        monkeypatch.setattr(logger, "level", logger.level)  # and back
    monkeypatch.setattr(root, "handlers", [])
    log.configure(ServerSettings(log_format="json"))
    client.info("GET /health 200")
    logging.getLogger("sglang_lite.server").info("it is there")
    told = json.loads(capsys.readouterr().err)
    assert (told["message"], told["process"]) == ("it is there", os.getpid())


def test_an_exception_in_the_log_is_one_line_of_json():
    try:
        raise ValueError("of\ntwo lines")
    except ValueError:
        record = logging.LogRecord(
            "name", logging.ERROR, "", 0, "failed: %s", ("x",), sys.exc_info()
        )
    line = JsonFormatter().format(record)
    assert "\n" not in line
    assert "two lines" in json.loads(line)["exception"]
    assert json.loads(line)["message"] == "failed: x"


def test_the_level_of_the_log_changes_while_the_server_runs(engine, monkeypatch):
    root = logging.getLogger()
    monkeypatch.setattr(root, "level", root.level)  # and back
    with (
        serving(engine, api_key=("key",), admin_api_key="admin") as url,
        httpx2.Client(base_url=url) as client,
    ):
        body = {"log_level": "debug"}
        assert (
            client.post("/configure_logging", json=body, headers={"x-api-key": "key"}).status_code
            == 401
        )
        answer = client.post("/configure_logging", json=body, headers={"x-api-key": "admin"})
        assert (answer.json(), root.level) == (body, logging.DEBUG)
        wrong = client.post(
            "/configure_logging", json={"log_level": "loud"}, headers={"x-api-key": "admin"}
        )
        assert (wrong.status_code, root.level) == (400, logging.DEBUG)
        asked: tuple[tuple[dict[str, object], str], ...] = (
            (
                {"log_requests": True, "log_requests_level": 0, "dump_requests_folder": None},
                "debug",
            ),
            ({"log_requests": False, "log_level": "warning"}, "warning"),
            ({}, "warning"),
        )
        admin = {"x-api-key": "admin"}
        for given, level in asked:
            answer = client.post("/configure_logging", json=given, headers=admin)
            assert answer.json() == {"log_level": level}, answer.text
        refused = client.post("/configure_logging", json={"log_requests": True}, headers=admin)
        assert "log_requests: True is not possible with the level 'warning'" in refused.text
        root.setLevel(logging.WARNING)


def test_help_tells_the_defaults(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "port to listen on; 0 takes a free one. Default: 30000." in told
    assert "Default: None" not in told
