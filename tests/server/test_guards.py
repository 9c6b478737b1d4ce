"""Who may use a server: no web page, nobody under another name, and tenants only what is theirs."""

import argparse
import re

import httpx2
import pytest

import sglang_lite as sgl
from sglang_lite.server import flags
from sglang_lite.server.known_texts import KnownTexts
from sglang_lite.server.replicas.gateway import Gateway
from sglang_lite.server.request_metrics import RequestMetrics
from sglang_lite.server.settings import ReplicaSettings, ServerSettings
from tests.server.conftest import serving

ACTING = [("GET", "/open_session"), ("GET", "/close_session"), ("GET", "/configure_logging"),
          ("GET", "/release_memory_occupation"), ("GET", "/resume_memory_occupation"), ("GET", "/flush_cache"), ("HEAD", "/flush_cache"), ("POST", "/flush_cache"), ("GET", "/freeze_gc"), ("GET", "/start_profile"),
          ("GET", "/stop_profile"), ("GET", "/health_generate")]  # fmt: skip
OWNERS = ["/start_profile", "/stop_profile", "/update_weights_from_disk", "/update_weights_from_tensor",
          "/update_weight_version", "/get_weights_by_name", "/weights_checker", "/pause_generation", "/continue_generation", "/begin_weight_update", "/end_weight_update", "/sleep", "/wake_up",
          "/release_memory_occupation", "/resume_memory_occupation"]  # fmt: skip


def status(url, method, path, **headers):
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx2.request(method, f"{url}{path}", headers=given).status_code


# ---------------------------------------------------------------------------------------- web pages


@pytest.mark.parametrize(("method", "path"), ACTING)
@pytest.mark.parametrize(
    "of_a_page",
    [{"sec_fetch_site": "cross-site"}, {"referer": "http://example.org/"}, {"origin": "null"}],
)
def test_an_image_in_a_web_page_changes_nothing(url, method, path, of_a_page):
    assert status(url, method, path, **of_a_page) == 403


def test_an_address_bar_may_read_but_not_change(url):
    assert status(url, "GET", "/v1/models", sec_fetch_site="none") == 200
    assert status(url, "GET", "/flush_cache", sec_fetch_site="none") == 403


def test_a_program_may_change_by_get_and_so_may_a_page_with_a_key(url, engine):
    assert status(url, "GET", "/flush_cache") == 200
    assert status(url, "GET", "/health_generate") == 200
    with serving(engine, api_key=("key",)) as keyed:
        assert (
            status(keyed, "GET", "/flush_cache", x_api_key="key", sec_fetch_site="same-site") == 200
        )


def test_generating_for_health_needs_a_key(engine):
    with serving(engine, api_key=("key",)) as url:
        assert [status(url, "GET", path) for path in ("/health_generate", "/health")] == [401, 200]
        assert status(url, "GET", "/health_generate", x_api_key="key") == 200


def test_a_page_of_an_allowed_origin_may_use_the_server_and_read_its_answers(engine):
    mine, other = "https://chat.lan:8080", "https://other.lan"
    body = {"text": "a", "sampling_params": {"max_new_tokens": 1}}
    asks = {
        "access-control-request-method": "POST", "access-control-request-headers": "content-type, x-api-key",
        "access-control-request-private-network": "true",
    }  # fmt: skip
    with (
        serving(engine, allowed_origin=(mine,)) as url,
        httpx2.Client(base_url=url, timeout=60) as client,
    ):
        before = client.options("/generate", headers={"origin": mine, **asks})
        answer = client.post("/generate", json=body, headers={"origin": mine})
        refused = client.post("/generate", json=body, headers={"origin": other})
        assert client.options("/generate", headers={"origin": other, **asks}).status_code == 400
        assert client.post("/generate", json=body).status_code == 200
    assert (before.status_code, before.headers["access-control-allow-origin"]) == (200, mine)
    assert before.headers["access-control-allow-private-network"] == "true"
    assert "x-api-key" in before.headers["access-control-allow-headers"]
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, mine)
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    assert (refused.status_code, "access-control-allow-origin" in refused.headers) == (403, False)


@pytest.mark.parametrize(
    "origin", ["*", "chat.lan", "https://chat.lan/", "https://CHAT.lan", "null"]
)
def test_what_is_no_origin_is_refused_at_the_start(origin):
    with pytest.raises(sgl.ParameterError, match="is not an origin"):
        ServerSettings(allowed_origin=(origin,))


# -------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:80", "127.0.0.1:30000", "[::1]:30000", "10.0.0.7", "box.lan:1"]
)
def test_a_server_is_reached_by_address_and_by_its_own_names(engine, host):
    with serving(engine, allowed_host=("Box.lan",)) as url:
        assert status(url, "GET", "/server_info", host=host) == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:30000",
        "127.0.0.1.nip.io",
        "localhost.evil.example",
        "[",
        "::1",
    ],
)
@pytest.mark.parametrize("path", ["/server_info", "/metrics", "/health", "/openapi.json"])
def test_a_foreign_name_that_leads_here_is_refused(url, host, path):
    response = httpx2.get(f"{url}{path}", headers={"host": host}, timeout=60)
    assert response.status_code == 403
    assert "--allowed-host" in response.json()["error"]["message"]


def test_names_are_free_for_a_server_that_others_reach_unless_some_are_given():
    from sglang_lite.server.app import application
    from tests.server.test_app import NO_ENGINE, asked

    for settings, expected in (
        ({"host": "0.0.0.0"}, 200),
        ({"host": "0.0.0.0", "allowed_host": ("box.lan",)}, 403),
        ({"host": "::1"}, 403),
        ({"host": "127.0.0.2"}, 403),
    ):
        app = application(NO_ENGINE, ServerSettings(**settings))
        app.state.service = type(
            "Service",
            (),
            {
                "settings": ServerSettings(),
                "shutting_down": False,
                "spans": None,
                "metrics": RequestMetrics(""),
                "texts": KnownTexts(),
            },
        )
        assert asked(app, "GET", "/ping", [(b"host", b"pod-7.cluster.local")])[0] == expected, (
            settings
        )


def test_a_name_with_a_port_is_no_name():
    with pytest.raises(sgl.ParameterError, match=r"allowed_host: 'box\.lan:80' is not a host name"):
        ServerSettings(allowed_host=("box.lan:80",))


@pytest.mark.parametrize(
    "setting",
    [{"allowed_host": ("box.lan",)}, {"allowed_origin": ("https://chat.lan",)}, {"grpc_port": 0}],
)
def test_a_gateway_refuses_what_it_does_not_check_or_share(setting):
    (name,) = setting
    with pytest.raises(sgl.SglError, match=f"{name}: "):
        Gateway(
            ServerSettings(**setting), ReplicaSettings(replicas=1, gateway="auto"), "127.0.0.1", 1
        )


# ----------------------------------------------------------------------------------- administrators


@pytest.mark.parametrize("path", OWNERS)
def test_tenants_name_no_folders_of_the_machine(engine, path, tmp_path):
    body = (
        {"model_path": str(tmp_path)}
        if path == OWNERS[2]
        else {"output_dir": str(tmp_path / "new")}
    )
    with serving(engine, api_key=("tenant",)) as url:
        assert httpx2.post(f"{url}{path}", json=body, timeout=60).status_code == 401
        refused = httpx2.post(
            f"{url}{path}", json=body, headers={"x-api-key": "tenant"}, timeout=60
        )
    assert refused.status_code == 403
    assert "--admin-api-key" in refused.json()["error"]["message"]
    assert str(tmp_path) not in refused.text
    assert not (tmp_path / "new").exists()


ENDLESS = {"stream": True, "rid": "mine"}
DOORS = {
    "/generate": ENDLESS
    | {"text": "a", "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True}},
    "/v1/chat/completions": ENDLESS
    | {
        "model": "",
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 1500,
        "ignore_eos": True,
    },
}


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
@pytest.mark.parametrize("what", [{"abort_all": True}, {"rid": "mine"}])
@pytest.mark.parametrize("who", ["mine", "root"])
def test_a_tenant_ends_no_request_of_another(engine, path, what, who):
    def post(key, path, body):
        return httpx2.post(f"{url}{path}", json=body, headers={"x-api-key": key}, timeout=60)

    def open_requests():
        load = httpx2.get(f"{url}/v1/loads", headers={"x-api-key": "root"}).json()
        return load["loads"][0]["num_total_reqs"]

    with serving(engine, api_key=("mine", "other"), admin_api_key="root") as url:
        headers = {"x-api-key": "mine"}
        with httpx2.stream(
            "POST", f"{url}{path}", json=DOORS[path], headers=headers, timeout=60
        ) as stream:
            lines = stream.iter_lines()
            next(lines)
            assert post("other", "/abort_request", what).status_code == 200
            short = {"text": "b", "sampling_params": {"max_new_tokens": 3}}
            # behind what would have ended the request
            assert post("other", "/generate", short).status_code == 200
            assert open_requests() == 1
            assert post(who, "/abort_request", what).status_code == 200
            *_, last = (line for line in lines if line.startswith("data: {"))
        assert "abort" in last
        assert open_requests() == 0


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
def test_the_name_of_a_request_is_its_tenants_own(engine, path):
    def post(key, path, body):
        return httpx2.post(f"{url}{path}", json=body, headers={"x-api-key": key}, timeout=60)

    with serving(engine, api_key=("mine", "other"), admin_api_key="root") as url:
        headers = {"x-api-key": "mine"}
        with httpx2.stream(
            "POST", f"{url}{path}", json=DOORS[path], headers=headers, timeout=60
        ) as stream:
            lines = stream.iter_lines()
            next(lines)
            short = {"text": "b", "rid": "mine", "sampling_params": {"max_new_tokens": 3}}
            taken = post("other", "/generate", short)
            assert (taken.status_code, taken.json()["meta_info"]["id"]) == (200, "mine")
            own = post("mine", "/generate", short)
            assert own.status_code == 400
            assert (
                "'mine' is the name of a request that has not ended"
                in own.json()["error"]["message"]
            )
            assert post("root", "/abort_request", {"rid": "mine"}).status_code == 200
            assert "abort" in [line for line in lines if line.startswith("data: {")][-1]


def test_a_session_is_its_tenants_own(engine):
    def post(key, path, **body):
        return httpx2.post(f"{url}{path}", json=body, headers={"x-api-key": key}, timeout=60)

    opened = {"capacity_of_str_len": 100, "session_id": "work"}
    with serving(engine, api_key=("mine", "other")) as url:
        greedy = {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True}
        for key, text in (("mine", "a quick"), ("other", "brown fox")):
            assert post(key, "/open_session", **opened).json() == "work"
            assert post(key, "/open_session", **opened).status_code == 400
            given = {"session_params": {"id": "work"}, "rid": "first", "sampling_params": greedy}
            assert post(key, "/generate", text=text, **given).json()["meta_info"]["id"] == "first"
        assert post("other", "/close_session", session_id="work").status_code == 200
        assert post("other", "/close_session", session_id="work").status_code == 404
        later = {"session_params": {"id": "work", "rid": "first"}, "sampling_params": greedy}
        answer = post("mine", "/generate", text=" jumps", **later).json()
        assert answer["meta_info"]["prompt_tokens"] == len("a quick") + 3 + len(" jumps")


def test_a_server_for_other_machines_has_an_administrator_by_key_alone():
    from sglang_lite.server.app import application
    from tests.server.test_app import NO_ENGINE, asked

    app = application(NO_ENGINE, ServerSettings(host="0.0.0.0"))
    app.state.service = type(
        "Service",
        (),
        {
            "settings": ServerSettings(),
            "shutting_down": False,
            "spans": None,
            "metrics": RequestMetrics(""),
            "texts": KnownTexts(),
        },
    )
    assert [asked(app, "POST", path)[0] for path in OWNERS] == [403] * len(OWNERS)


# --------------------------------------------------------------------------------------------- keys


def read(*arguments):
    parser = argparse.ArgumentParser()
    flags.add_serve_flags(parser)
    return flags.read_serve_flags(parser.parse_args(["--model", "m", *arguments]))[0]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in ("API_KEY", "ADMIN_API_KEY"):
        monkeypatch.delenv(f"SGLANG_LITE_{name}", raising=False)


def test_keys_come_from_files_and_from_the_environment(monkeypatch, tmp_path):
    file, root = tmp_path / "keys", tmp_path / "root"
    file.write_text("one\n\n  two  \r\n")
    root.write_text("boss\n")
    found = read(
        "--api-key", "zero", "--api-key-file", str(file), "--admin-api-key-file", str(root)
    )
    assert (found.api_key, found.admin_api_key) == (("zero", "one", "two"), "boss")
    monkeypatch.setenv("SGLANG_LITE_API_KEY", "three\nfour")
    monkeypatch.setenv("SGLANG_LITE_ADMIN_API_KEY", "chief")
    found = read()
    assert (found.api_key, found.admin_api_key) == (("three", "four"), "chief")
    assert read("--api-key", "zero").api_key == ("zero",)
    assert read("--admin-api-key", "x").admin_api_key == "x"


def test_what_has_no_key_is_refused_and_no_error_shows_one(monkeypatch, tmp_path):
    file = tmp_path / "keys"
    file.write_text("\n")
    with pytest.raises(sgl.ParameterError, match=r"api_key_file: .*keys has no key"):
        read("--api-key-file", str(file))
    with pytest.raises(
        sgl.ParameterError, match=r"api_key_file: .*missing can't be read: No such file"
    ):
        read("--api-key-file", str(tmp_path / "missing"))
    file.write_text("a secret\n")
    with pytest.raises(sgl.ParameterError, match="without spaces") as caught:
        read("--api-key-file", str(file))
    assert "secret" not in str(caught.value)
    file.write_text("one\ntwo\n")
    with pytest.raises(sgl.ParameterError, match="admin_api_key: there are 2 keys"):
        read("--admin-api-key-file", str(file))
    file.write_text("one\ntwo\n")
    with pytest.raises(sgl.ParameterError, match="admin_api_key: it is an API key, too"):
        read("--api-key-file", str(file), "--admin-api-key", "two")
    file.write_text("one\ntwo\none\n")
    with pytest.raises(sgl.ParameterError, match="api_key: a key is given twice"):
        read("--api-key-file", str(file))
    monkeypatch.setenv("SGLANG_LITE_API_KEY", "")
    with pytest.raises(
        sgl.ParameterError, match="api_key: the variable SGLANG_LITE_API_KEY has no key"
    ):
        read()


# ----------------------------------------------------------------------------- a key's own prefixes


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(("path", "body"), [
    ("/generate", {"text": "a text of its own", "sampling_params": {"max_new_tokens": 1}}),
    ("/v1/completions", {"model": "", "prompt": "a text of its own", "max_tokens": 1}),
    ("/program", {"version": 1, "prompt": "a text of its own", "program": {"nodes": [
        {"kind": "Gen", "name": "a", "params": {"max_tokens": 1}}]}}),
])  # fmt: skip
def test_a_key_reuses_its_own_prefixes_and_with_a_salt_no_others(engine, path, body, apart):
    def cached(key):
        answer = client.post(path, json=body, headers={"x-api-key": key})
        return max(map(int, re.findall(r'"cached_tokens":(\d+)', answer.text)), default=0)

    settings = dict(api_key=("one", "two"), cache_salt_by_key=apart)
    with serving(engine, **settings) as url, httpx2.Client(base_url=url, timeout=60) as client:
        engine.flush_cache()
        assert [cached(key) > 0 for key in ("one", "one", "two", "two")] == [
            False,
            True,
            not apart,
            True,
        ]


def test_a_salt_by_key_needs_keys():
    with pytest.raises(sgl.ParameterError, match="there are no keys"):
        ServerSettings(cache_salt_by_key=True)
