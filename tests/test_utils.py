"""The helpers that SGLang's users import from utils, and build_regex_from_object."""

import asyncio
import base64
import gzip
import io
import json
import re
import subprocess
import sys
import threading
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import requests
from pydantic import BaseModel, Field

import sglang_lite as sgl
from sglang_lite import utils
from sglang_lite.srt.constrained.outlines_backend import build_regex_from_object


@pytest.fixture
def echo():
    """The address of a server that tells what it was asked."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_GET(self):
            data = self.rfile.read(int(self.headers.get("content-length") or 0))
            told = {"method": self.command, "body": json.loads(data) if data else None,
                    "authorization": self.headers.get("authorization")}  # fmt: skip
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(told).encode())

        def do_POST(self):
            self.do_GET()

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_read_jsonl_skips_comments_and_empty_lines(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('# a comment\n{"a": "ü"}\n\n[1, 2]\n', encoding="utf-8")
    values = utils.read_jsonl(str(path))
    assert next(values) == {"a": "ü"}
    assert list(values) == [[1, 2]]
    assert list(utils.read_jsonl(path)) == [{"a": "ü"}, [1, 2]]


def test_http_request_asks_as_sglangs_does(echo):
    answer = utils.http_request(f"{echo}/generate", json={"a": [1]}, api_key="secret")
    assert answer.status_code == 200
    assert answer.json() == {"method": "POST", "body": {"a": [1]}, "authorization": "Bearer secret"}
    assert utils.http_request(echo).json() == {"method": "GET", "body": None, "authorization": None}
    assert utils.http_request(echo, method="POST", stream=True).json()["method"] == "POST"
    with pytest.raises(sgl.protocol.BackendError, match="does not answer"):
        utils.http_request("http://127.0.0.1:9")


@pytest.mark.parametrize("url", ["localhost:30000/generate", "127.0.0.1", "http://", "ftp://a/b"])
def test_http_request_refuses_what_is_no_address(url):
    with pytest.raises(sgl.ParameterError, match=re.escape(f"url: {url!r}")) as caught:
        utils.http_request(url)
    assert "http://localhost:30000" in caught.value.hint


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (requests.ReadTimeout, sgl.protocol.RequestTimeoutError),
        (requests.ConnectTimeout, sgl.protocol.RequestTimeoutError),
        (requests.ConnectionError, sgl.protocol.BackendError),
        (requests.TooManyRedirects, sgl.protocol.BackendError),
        (requests.exceptions.ChunkedEncodingError, sgl.protocol.BackendError),
    ],
)
def test_http_request_limits_its_wait_and_raises_errors_of_this_package(monkeypatch, raised, kind):
    timeouts = []

    def request(*_, timeout, **__):
        timeouts.append(timeout)
        raise raised("no")

    monkeypatch.setattr(requests, "request", request)
    for options in ({}, {"timeout": 3}, {"timeout": None}):
        with pytest.raises(kind, match="http://a/b") as caught:
            utils.http_request("http://a/b", **options)
        assert isinstance(caught.value.__cause__, raised)
    assert timeouts == [600, 3, None]


def test_a_bad_line_is_an_error_when_it_is_reached(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("1\n{\n")
    values = utils.read_jsonl(path)
    assert next(values) == 1
    with pytest.raises(ValueError, match="Expecting"):
        next(values)


def test_dump_state_text_writes_states_texts_and_anything_else(tmp_path):
    path = tmp_path / "out.txt"
    state = sgl.function(lambda s: s.__iadd__("Zürich" + sgl.gen("a"))).run(
        backend=sgl.ScriptedBackend(default="!")
    )
    utils.dump_state_text(path, [state, "plain"])
    utils.dump_state_text(str(path), [ValueError("failed")], mode="a")
    line = "=" * 40
    assert path.read_text(encoding="utf-8") == (
        f"{line} 0 {line}\nZürich!\n{line * 2}\n\n{line} 1 {line}\nplain\n{line * 2}\n\n"
        f"{line} 0 {line}\nfailed\n{line * 2}\n\n"
    )


class Person(BaseModel):
    name: str = Field(pattern="[a-z]+")
    age: int


def test_a_schema_as_text():
    assert utils.convert_json_schema_to_str('{"type": "null"}') == '{"type": "null"}'
    assert utils.convert_json_schema_to_str({"type": "null"}) == '{"type": "null"}'
    assert json.loads(utils.convert_json_schema_to_str(Person)) == Person.model_json_schema()


@pytest.mark.parametrize("schema", [3, None, object(), int])
def test_what_is_no_schema_is_refused(schema):
    with pytest.raises(ValueError, match=r"json_schema: a .* is not a schema"):
        utils.convert_json_schema_to_str(schema)


def test_highlighting_prints_outside_a_notebook(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", None)
    monkeypatch.setitem(sys.modules, "IPython.display", None)
    utils.print_highlight("<b>hi</b>")
    assert capsys.readouterr().out == "<b>hi</b>\n"


def test_highlighting_shows_html_in_a_notebook(monkeypatch):
    import types

    shown = []
    fake = types.SimpleNamespace(HTML=lambda text: ("html", text), display=shown.append)
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(display=fake))
    monkeypatch.setitem(sys.modules, "IPython.display", fake)
    utils.print_highlight("hi")
    assert shown == [("html", "<strong style='color: #00008B;'>hi</strong>")]


# ------------------------------------------------------------------------------------------ servers

CONTENT = b'{"question": "1+1"}\n' * 2000


class Handler(BaseHTTPRequestHandler):
    """A server of files, of which some come compressed, cut short or not at all; and of /v1/models."""

    def do_GET(self):
        self.server.requests.append(self.path)
        body, headers = CONTENT, {}
        if self.path.startswith("/gzip") and "gzip" in self.headers.get("Accept-Encoding", ""):
            body, headers = gzip.compress(CONTENT), {"Content-Encoding": "gzip"}
        if self.path.startswith("/always-gzip"):
            body, headers = gzip.compress(CONTENT), {"Content-Encoding": "gzip"}
        missing = self.path.startswith("/missing") or (
            self.path == "/v1/models" and len(self.server.requests) < 3
        )
        self.send_response(404 if missing else 200)
        for name, value in headers.items():
            self.send_header(name, value)
        if not self.path.startswith("/unsized"):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:500] if self.path.startswith("/short") else body)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.requests = []
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.005,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    "name", ["plain.jsonl", "gzip.jsonl", "always-gzip.jsonl", "unsized.jsonl"]
)
def test_a_file_is_fetched_whole_and_once(server, tmp_path, name):
    target = tmp_path / "data.jsonl"
    for _ in range(2):
        assert utils.download_and_cache_file(f"{server.url}/{name}", str(target)) == str(target)
    assert target.read_bytes() == CONTENT
    assert server.requests == [f"/{name}"]
    assert [p.name for p in tmp_path.iterdir()] == ["data.jsonl"]


ADDRESSES = ["/folder/data.jsonl", "/other/data.jsonl", "/folder/data.jsonl?version=2", "/folder/"]


def test_a_file_is_kept_in_the_folder_for_temporary_files(server, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    paths = [utils.download_and_cache_file(server.url + path) for path in ADDRESSES]
    assert sorted(paths) == sorted(map(str, tmp_path.iterdir()))
    assert [path.rpartition("-")[2] for path in paths] == [
        "data.jsonl",
        "data.jsonl",
        "data.jsonl",
        "",
    ]
    assert paths == [utils.download_and_cache_file(server.url + path) for path in ADDRESSES]
    assert server.requests == ADDRESSES


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "404"),
        ("short", "Retry|Incomplete|broken|of 40,000 bytes came|complete message body"),
    ],
)
def test_a_file_that_does_not_come_whole_is_not_kept(server, tmp_path, name, message):
    with pytest.raises(sgl.DownloadError, match=message):
        utils.download_and_cache_file(f"{server.url}/{name}", str(tmp_path / "data"))
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_is_not_there_is_an_error(server, tmp_path):
    with pytest.raises(sgl.DownloadError, match="Check the address"):
        utils.download_and_cache_file("http://127.0.0.1:1/x", str(tmp_path / "x"))


def test_a_server_is_waited_for_until_it_lists_its_models(server, monkeypatch):
    monkeypatch.setattr("sglang_lite.compat.sglang.servers.time.sleep", lambda seconds: None)
    utils.wait_for_server(server.url, timeout=10)
    assert server.requests == ["/v1/models"] * 3


def test_waiting_ends_with_the_time_or_with_the_process(monkeypatch):
    monkeypatch.setattr("sglang_lite.compat.sglang.servers.time.sleep", lambda seconds: None)
    with pytest.raises(sgl.RequestTimeoutError, match="did not answer within 0 s"):
        utils.wait_for_server("http://127.0.0.1:1", timeout=0)
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    process.wait()
    with pytest.raises(sgl.BackendError, match="exit code 3"):
        utils.wait_for_server("http://127.0.0.1:1", process=process)


def test_a_server_command_is_started_on_a_free_port_and_ended():
    code = "import signal, sys; print(sys.argv[1:], flush=True); signal.pause()"
    process, port = utils.launch_server_cmd(f'{sys.executable} -c "{code}" --model x')
    assert process.poll() is None
    assert process.args[-6:] == ["--model", "x", "--host", "0.0.0.0", "--port", str(port)]
    assert 0 < port < 65536
    utils.terminate_process(process)
    assert process.returncode == -15
    utils.terminate_process(process)  # again is fine


def test_a_server_command_takes_host_and_port():
    process, port = utils.launch_server_cmd(
        f"{sys.executable} -c pass", host="127.0.0.1", port=12345
    )
    process.wait()
    assert port == 12345
    assert process.args[-4:] == ["--host", "127.0.0.1", "--port", "12345"]


def test_a_process_that_does_not_end_is_killed():
    class Stubborn:
        killed = False

        def terminate(self): ...

        def kill(self):
            self.killed = True

        def wait(self, timeout=None):
            if not self.killed:
                raise subprocess.TimeoutExpired("x", timeout)

    process = Stubborn()
    utils.terminate_process(process)  # type: ignore[arg-type]  # a fake
    assert process.killed


# ------------------------------------------------------------------------------- regexes of objects


@pytest.mark.parametrize(
    "source", [Person, Person.model_json_schema(), json.dumps(Person.model_json_schema())]
)
def test_a_regex_of_an_object_matches_its_json(source):
    regex = build_regex_from_object(source)
    assert re.fullmatch(regex, '{"name": "ann", "age": 42}')
    assert re.fullmatch(regex, '{"name":"ann","age":42}')
    for other in (
        '{"name": "Ann", "age": 42}',
        '{"age": 42, "name": "ann"}',
        '{"name": "ann"}',
        "{}",
    ):
        assert not re.fullmatch(regex, other)


def test_the_blanks_of_a_regex_can_be_chosen():
    regex = build_regex_from_object(Person, whitespace_pattern="_")
    assert re.fullmatch(regex, '{_"name"_:_"ann"_,_"age"_:_42_}')


def test_gen_takes_such_a_regex():
    program = sgl.function(
        lambda s: s.__iadd__(sgl.gen("p", regex=build_regex_from_object(Person)))
    )
    for seed in range(5):
        state = program.run(backend=sgl.ScriptedBackend(seed=seed))
        assert Person.model_validate_json(state["p"]).name.isalpha()


@pytest.mark.parametrize("source", ["{", '{"type": "nonsense"}', {"$ref": "#/nowhere"}])
def test_an_object_that_makes_no_regex_is_refused(source):
    with pytest.raises(sgl.ConstraintError, match="can't be turned into a regex"):
        build_regex_from_object(source)


# -------------------------------------------------------------------------------------------- texts


@pytest.mark.parametrize(
    ("text", "printable"),
    [
        ("", ""),
        ("word", ""),
        ("two words", "two "),
        ("a line\n", "a line\n"),
        ("你好", "你好"),
        ("你好a", "你好"),
        (" ", " "),
    ],
)
def test_the_printable_part_of_a_text_is_its_whole_words(text, printable):
    assert utils.find_printable_text(text) == printable


@pytest.mark.parametrize(
    ("text", "chunk", "new"),
    [
        ("", "ab", "ab"),
        ("ab", "abc", "c"),
        ("ab", "bc", "c"),
        ("ab", "cd", "cd"),
        ("aa", "aaa", "a"),
        ("ab", "", ""),
    ],
)
def test_an_overlap_is_trimmed(text, chunk, new):
    assert utils.trim_overlap(text, chunk) == new


class Streaming:
    """An engine whose stream is what it is given."""

    def __init__(self, *texts):
        self.texts, self.asked = texts, []

    def generate(self, *asked, **options):
        self.asked.append((asked, options))
        return iter([{"text": text} for text in self.texts])

    async def async_generate(self, *asked, **options):
        async def chunks():
            for each in self.generate(*asked, **options):
                yield each

        return chunks()


@pytest.mark.parametrize("texts", [("H", "Hel", "Hello"), ("H", "el", "lo")])
def test_the_text_of_a_stream_is_merged(texts):
    engine = Streaming(*texts)

    async def merged():
        return [piece async for piece in utils.async_stream_and_merge(engine, "Say", {"n": 1})]

    assert utils.stream_and_merge(engine, "Say", {"n": 1}) == "".join(asyncio.run(merged()))
    assert engine.asked == [(("Say", {"n": 1}), {"stream": True})] * 2
    assert utils.stream_and_merge(Streaming("H", "Hel", "Hello"), "Say", {}) == "Hello"


def test_an_image_is_encoded(tmp_path):
    from PIL import Image

    Image.new("RGB", (2, 1), (255, 0, 0)).save(tmp_path / "red.png")
    data = (tmp_path / "red.png").read_bytes()
    encoded = utils.encode_image_base64(str(tmp_path / "red.png"))
    assert base64.b64decode(encoded) == data
    assert utils.encode_image_base64(data) == encoded
    picture = Image.open(
        io.BytesIO(base64.b64decode(utils.encode_image_base64(Image.open(io.BytesIO(data)))))
    )
    assert picture.getpixel((1, 0)) == (255, 0, 0)
    with pytest.raises(sgl.ParameterError, match="an address has no bytes"):
        utils.encode_image_base64("https://example.com/a.png")


def test_a_lazy_import_loads_when_it_is_used():
    lazy = utils.LazyImport("decimal", "Decimal")
    assert lazy("1.5") == Decimal("1.5")
    assert lazy.from_float(0.5) == Decimal("0.5")
    absent = utils.LazyImport("no_such_module_at_all", "X")
    with pytest.raises(ModuleNotFoundError):
        absent()
    with pytest.raises(AttributeError):
        utils.LazyImport("decimal", "Nothing")()
