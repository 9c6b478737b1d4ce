"""Published attacks on servers of language models, sent to this one.

Of CVE-2026-9540 (vLLM 0.19.0, a denial of service over the routes of OpenAI's protocol by resources
that are not released) no published text says what is sent. What is tested here is its kind:
requests that fail or are left at any stage keep nothing open.
"""

import base64
import contextlib
import json
import os
import pickle
import socket
from pathlib import Path

import httpx2
import pytest
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

import sglang_lite as sgl
from sglang_lite.cli import main
from sglang_lite.lang.runs.trace import Trace
from sglang_lite.runtime.executor.step_record import read_steps
from sglang_lite.server.routes import ROUTES
from tests.runtime.media.seeing import CHAT, engine_of, png, save_seeing
from tests.runtime.models.test_hostile_files import (
    CONFIG,
    METADATA,
    SETTINGS,
    TINY,
    gguf_file,
    gguf_names,
    write,
)
from tests.runtime.models.tiny import randomise, tiny_tokenizer
from tests.server.conftest import Running, serving
from tests.server.test_process import children_of, launched
from tests.waiting import until
from tests.web import sends, web

USER = [{"role": "user", "content": "a"}]


# ------------------------------------------------------------ addresses of images and sounds (SSRF)

INSIDE = {
    "lan.example": "192.168.1.4", "metadata.example": "169.254.169.254", "here.example": "127.1.2.3",
    "mapped.example": "::ffff:10.0.0.1",
}  # fmt: skip
OUTSIDE = {"a.example": "93.184.215.14"}


def asked_by_image(url):
    part = {"type": "image_url", "image_url": {"url": url}}
    source = {"type": "image", "source": {"type": "url", "url": url}}
    return {
        "/v1/chat/completions": {
            "messages": [{"role": "user", "content": [part]}],
            "max_tokens": 2,
        },
        "/v1/responses": {
            "input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]
        },
        "/v1/messages": {"messages": [{"role": "user", "content": [source]}], "max_tokens": 2},
        "/generate": {
            "text": "<image>hi",
            "image_data": url,
            "sampling_params": {"max_new_tokens": 2},
        },
    }


def asked_by_sound(url):
    # which takes no addresses
    part = {"type": "input_audio", "input_audio": {"data": url, "format": "wav"}}
    return {
        "/v1/chat/completions": {
            "messages": [{"role": "user", "content": [part]}],
            "max_tokens": 2,
        },
        "/generate": {
            "text": "<|AUDIO|>hi",
            "audio_data": url,
            "sampling_params": {"max_new_tokens": 2},
        },
    }


@pytest.mark.parametrize(
    ("family", "asked_by"), [("llava", asked_by_image), ("qwen2_audio", asked_by_sound)]
)
def test_no_address_of_an_image_or_a_sound_leads_inside(family, asked_by, tmp_path):
    """Neither by its name, nor by its number, nor by a redirect of a public host."""
    save_seeing(family, tmp_path)
    pages = {
        f"/{host}": sends(b"", status, location=f"http://{host}/secret")
        for host, status in zip((*INSIDE, "127.0.0.1", "[::1]"), (301, 302, 303, 307, 308, 302))
    }
    with (
        engine_of(tmp_path, chat_template=CHAT) as engine,
        serving(engine, allowed_media_domains=("*",)) as url,
    ):
        for path in asked_by(""):
            direct = [
                f"http://{host}/secret"
                for host in (*INSIDE, "127.0.0.1", "[::1]", "2130706433", "0x7f.1")
            ]
            for address in (*direct, *(f"http://a.example{page}" for page in pages)):
                with web({**INSIDE, **OUTSIDE}, {**pages, "/secret": sends(b"secret")}) as asked:
                    answer = httpx2.post(f"{url}{path}", json=asked_by(address)[path], timeout=60)
                assert answer.status_code == 400, (path, address)
                assert "not at a public address" in answer.text or "input_audio" in str(
                    asked_by("")[path]
                )
                assert "/secret" not in asked


# ----------------------------------------------------------------------------------- CVE-2026-22773


@pytest.mark.parametrize("family", ["idefics3", "smolvlm", "qwen2_vl", "llava_next", "onevision"])
def test_an_image_of_a_few_pixels_ends_no_engine(family, tmp_path):
    """vLLM took 1 x 1 pixels of three colours for three rows, and its engine ended with an error of
    tensors' sizes.
    """
    save_seeing(family, tmp_path)
    with engine_of(tmp_path, chat_template=CHAT) as engine, serving(engine) as url:
        for width, height in ((1, 1), (1, 3), (3, 1), (3, 3), (2, 1), (1, 4)):
            data = f"data:image/png;base64,{base64.b64encode(png(width, height)).decode()}"
            content = [
                {"type": "image_url", "image_url": {"url": data}},
                {"type": "text", "text": "hi"},
            ]
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
            answer = httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=60)
            assert answer.status_code in (200, 400), answer.text
            assert answer.status_code == 200 or "pixels" in answer.json()["error"]["message"]
        body = {"messages": USER, "max_tokens": 2}
        assert httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=60).status_code == 200


# --------------------------------------------------- CVE-2026-3059, CVE-2026-3060 and CVE-2026-3989


class Canary:
    """Pickle that makes a folder where it is read."""

    def __init__(self, folder):
        self._folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self._folder),)


def listening(pid):
    """Ports of TCP on which a process listens."""
    sockets = set()
    for each in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            sockets.add(os.readlink(each.path))
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
    ]
    return {
        int(line[1].rpartition(":")[2], 16)
        for line in lines
        if line[3] == "0A" and f"socket:[{line[9]}]" in sockets
    }


def test_no_process_of_a_server_listens_anywhere_but_at_its_address(folder):
    """SGLang's brokers of images and of separate encoders took pickles at ports of their own, of
    all networks.
    """
    with launched(folder) as (process, url):
        port = int(url.rpartition(":")[2])
        httpx2.post(
            f"{url}/generate",
            json={"text": "a", "sampling_params": {"max_new_tokens": 2}},
            timeout=60,
        )
        family = [process.pid, *children_of(process.pid)]
        assert len(family) > 1
        assert {pid: listening(pid) for pid in family} == {
            pid: {port} if pid == process.pid else set() for pid in family
        }


def test_a_pickle_that_is_sent_anywhere_runs_nothing(engine, tmp_path):
    canary = tmp_path / "canary"
    data = pickle.dumps(Canary(canary))
    text = base64.b64encode(data).decode()
    with serving(engine) as url:
        for route in ROUTES:
            path = route.path.replace("{", "").replace("}", "").replace(":path", "")
            for kind in ("application/octet-stream", "application/json", "application/x-pickle"):
                answer = httpx2.request(
                    route.methods[0],
                    f"{url}{path}",
                    content=data,
                    headers={"content-type": kind},
                    timeout=60,
                )
                assert answer.status_code < 500 or answer.status_code == 501, (path, answer.text)
        for load_format in (None, "flattened_bucket"):
            body = {"serialized_named_tensors": [text], "load_format": load_format}
            assert (
                httpx2.post(f"{url}/update_weights_from_tensor", json=body, timeout=60).status_code
                == 400
            )
        for field in ("custom_logit_processor", "input_embeds", "image_data", "session_params"):
            asked = {"text": "a", field: text, "sampling_params": {"max_new_tokens": 1}}
            assert httpx2.post(f"{url}/generate", json=asked, timeout=60).status_code == 400
        with socket.create_connection(
            ("127.0.0.1", int(url.rpartition(":")[2])), timeout=60
        ) as connection:
            connection.sendall(b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f" + data)  # ZMQ's greeting
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(4096).startswith(b"HTTP/1.1 400")
        assert httpx2.get(f"{url}/health", timeout=60).status_code == 200
    assert not canary.exists()


def test_a_pickle_as_a_saved_run_runs_nothing(tmp_path):
    """SGLang's replay_request_dump.py unpickled the file that it was given."""
    canary, file = tmp_path / "canary", tmp_path / "dump"
    file.write_bytes(pickle.dumps(Canary(canary)))

    @sgl.function
    def program(s, x):
        s += x + sgl.gen("y")

    for read in (
        sgl.load,
        Trace.load,
        read_steps,
        lambda path: program.run_batch([{"x": "a"}], checkpoint=path),
    ):
        with pytest.raises(sgl.SglError):
            read(file)
    for command in (["replay", str(file)], ["trace", str(file)]):
        assert main(command) != 0
    assert not canary.exists()


# --------------------------------------------------------------------- templates in files of models

REACHING = "accesses|is unsafe|undefined|not callable|Encountered unknown tag|no loader|not for templates|has no attribute"
TEMPLATES = {
    "an endless loop": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "steps"),
    "gigabytes of text": ("{{ 'a' * 10 ** 10 }}", "makes a text of"),
    "gigabytes of values": ("{% set l = [1] * 10 ** 10 %}", "makes a value of"),
    "doubling": (
        "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}", "makes a text of",
    ),
    "a class": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", REACHING),
    "a class by a filter": ("{{ (''|attr('__class__')).__mro__ }}", REACHING),
    "a class by a format": ("{{ '{0.__class__.__init__.__globals__}'.format(messages) }}", REACHING),
    "globals": ("{{ cycler.__init__.__globals__.os.mkdir('CANARY') }}", REACHING),
    "globals of a macro": ("{% macro m() %}{% endmacro %}{{ m.__globals__['os'].mkdir('CANARY') }}", REACHING),
    "a module": ("{% import 'os' as os %}{{ os.mkdir('CANARY') }}", REACHING),
    "a file": ("{% include '/etc/passwd' %}", REACHING),
}  # fmt: skip


@pytest.fixture(scope="module")
def tensors():
    return {
        name: each.contiguous()
        for name, each in randomise(LlamaForCausalLM(_config())).state_dict().items()
    }


def _config():
    from transformers import LlamaConfig

    return LlamaConfig(**TINY)


def in_settings(place, template, tensors):
    return in_folder(place, tensors, {**SETTINGS, "chat_template": template})


def in_its_file(place, template, tensors):
    (place / "chat_template.jinja").write_text(template)
    return in_folder(
        place, tensors, {name: each for name, each in SETTINGS.items() if name != "chat_template"}
    )


def in_folder(place, tensors, settings):
    save_file(tensors, place / "model.safetensors")
    for name, content in {
        "config.json": CONFIG, "tokenizer.json": tiny_tokenizer(96), "tokenizer_config.json": settings,
        "generation_config.json": {"eos_token_id": [1]},
    }.items():  # fmt: skip
        write(place / name, content)
    return place


def in_gguf(place, template, tensors):
    path = place / "m.gguf"
    path.write_bytes(
        gguf_file({**METADATA, "tokenizer.chat_template": template}, gguf_names(tensors))
    )
    return path


@pytest.mark.parametrize("write_model", [in_settings, in_its_file, in_gguf])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_poisoned_template_in_a_models_file_fails_alone(tmp_path, tensors, write_model, name):
    template, told = TEMPLATES[name]
    canary = tmp_path / "canary"
    model = write_model(tmp_path, template.replace("CANARY", str(canary)), tensors)
    with (
        sgl.Engine(str(model), dtype="float32", max_running=2, in_process=True) as engine,
        serving(engine) as url,
    ):
        for path in ("/v1/chat/completions", "/v1/messages"):
            body = {"messages": USER, "max_tokens": 2}
            answer = httpx2.post(f"{url}{path}", json=body, timeout=60)
            assert answer.status_code == 400, answer.text
            message = answer.json()["error"]["message"]
            assert "chat template" in message
            assert any(each in message for each in told.split("|")), message
            assert "root:" not in message
        body = {"text": "a", "sampling_params": {"max_new_tokens": 2}}
        assert httpx2.post(f"{url}/generate", json=body, timeout=60).status_code == 200
    assert not canary.exists()


# ------------------------------------------------------------------------------------ CVE-2026-9540

OPENAI = {
    "/v1/chat/completions": {"messages": USER, "max_tokens": 1500},
    "/v1/completions": {"prompt": ["a", "b"], "max_tokens": 1500},
    "/v1/responses": {"input": "a", "max_output_tokens": 1500},
}


@pytest.mark.parametrize("path", OPENAI)
def test_requests_that_fail_or_are_left_at_any_stage_keep_nothing_open(engine, path):
    running = Running(engine)
    try:
        with httpx2.Client(base_url=running.url, timeout=60) as http:
            until(lambda: http.get("/ready").status_code == 200)
            engine.flush_cache()
            before = engine.stats()["free_tokens"]
            for change in (
                {"n": 10**9},
                {"n": -1},
                {"temperature": -1},
                {"model": "none"},
                {"stop": [1]},
                {"max_tokens": 10**400},
            ):
                body = json.dumps({**OPENAI[path], **change})
                assert 400 <= http.post(path, content=body).status_code < 500, change
            for stream in (True, False):
                streamed = {**OPENAI[path], "stream": stream, "ignore_eos": True}
                for parts in range(4):
                    content = json.dumps(streamed).encode()
                    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n".encode()
                    sent = (head + content)[: (len(head) // 2, len(head), -3, None)[parts]]
                    port = int(running.url.rpartition(":")[2])
                    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
                        connection.sendall(sent)
                        if sent.endswith(content) and stream:
                            connection.recv(100)
            state = running.service
            until(
                lambda: (
                    not state.async_engine.open
                    and not engine.stats()["running"]
                    and not engine.stats()["waiting"]
                )
            )
            until(lambda: http.get("/v1/loads").json()["loads"][0]["num_total_reqs"] == 0)
            engine.flush_cache()
            assert engine.stats()["free_tokens"] == before
    finally:
        running.stop()
