"""Videos and sounds in requests: answers are the engine's own, and each bad one is one named error."""

import base64
from typing import Any

import httpx2
import openai
import pytest

import sglang_lite as sgl
from sglang_lite.protocol import SamplingParams
from tests.media_files import mp4, wav
from tests.runtime.media.seeing import png, save_seeing, seen
from tests.server.conftest import Running
from tests.web import sends, web

PARTS = (
    "{% for m in messages %}{{ m.role[0] }}:{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% elif part.type == 'video' %}<|video_pad|>{% elif part.type in ('image', 'audio') %}<image>{% endif %}"
    "{% endfor %};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
TEXT = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
PARAMS = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
ASK: dict[str, Any] = {"model": "default", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
SAMPLING = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}


def _served(family, folder, template, **settings):
    save_seeing(family, folder)
    return sgl.Engine(
        str(folder), in_process=True, dtype="float32", device="cpu", chat_template=template,
        served_model_name="default", **settings,
    )  # fmt: skip


@pytest.fixture(scope="module", params=[PARTS, TEXT], ids=["parts", "text"])
def watching(request, tmp_path_factory):
    with _served("qwen2_vl", tmp_path_factory.mktemp("qwen2_vl"), request.param) as engine:
        server = Running(engine, allowed_media_domains=("videos.example",))
        yield server, engine
        server.stop()


@pytest.fixture(scope="module")
def hearing(tmp_path_factory):
    with _served("qwen2_audio", tmp_path_factory.mktemp("qwen2_audio"), PARTS) as engine:
        server = Running(engine)
        yield server, engine
        server.stop()


def _url(medium):
    return f"data:{medium.media_type};base64,{base64.b64encode(medium.data).decode()}"


def _asked(server, content):
    return httpx2.post(
        f"{server.url}/v1/chat/completions",
        json={**ASK, "messages": [{"role": "user", "content": content}]},
    )


def test_a_video_in_a_chat_is_the_engines_own(watching):
    server, engine = watching
    video, image = mp4(8, 48, 32), png(40, 30)
    expected = engine.complete(seen("u:", video, "hi;a:"), PARAMS)
    part = {"type": "video_url", "video_url": {"url": _url(video)}}
    content = [part, {"type": "text", "text": "hi"}]
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x")
    answer: Any = client.chat.completions.create(
        messages=[{"role": "user", "content": content}], model="default", max_tokens=4, temperature=0,  # type: ignore[list-item] # no part of OpenAI's
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert answer.choices[0].message.content == expected.text
    assert answer.usage.prompt_tokens == expected.usage.prompt_tokens
    more = engine.complete(seen("u:", image, "hi", video, ";a:"), PARAMS)
    picture = {
        "type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{base64.b64encode(image).decode()}"},
    }
    found = _asked(server, [picture, {"type": "text", "text": "hi"}, part]).json()
    assert found["choices"][0]["message"]["content"] == more.text
    with web({"videos.example": "93.184.215.14"}, {"/a.mp4": sends(video.data)}):
        fetched = _asked(
            server,
            [
                {"type": "video_url", "video_url": {"url": "http://videos.example/a.mp4"}},
                content[1],
            ],
        )
    assert fetched.json()["choices"][0]["message"]["content"] == expected.text


def test_a_video_in_a_native_request_and_in_a_program(watching):
    server, engine = watching
    video = mp4(8, 48, 32)
    expected = engine.complete(seen("u:", video, "hi"), PARAMS)
    body = {"text": "u:<|video_pad|>hi", "video_data": _url(video), "sampling_params": SAMPLING}
    assert httpx2.post(f"{server.url}/generate", json=body).json()["text"] == expected.text

    @sgl.function
    def watch(s):
        s += (
            "u:"
            + sgl.video(video.data, 4)
            + "hi"
            + sgl.gen("answer", max_tokens=4, temperature=0, ignore_eos=True)
        )

    endpoint = sgl.RuntimeEndpoint(server.url)
    answers = [watch().run(backend=backend) for backend in (engine, endpoint)]
    assert answers[0]["answer"] == answers[1]["answer"]
    assert (
        answers[0].usage("answer").image_tokens
        == answers[1].usage("answer").image_tokens
        == 2 * 4 * 6
    )


def test_a_sound_in_a_chat_in_a_native_request_and_in_a_program(hearing):
    server, engine = hearing
    sound = wav(0.5)
    expected = engine.complete(seen("u:", sound, "hi;a:"), PARAMS)
    encoded = base64.b64encode(sound.data).decode()
    part = {"type": "input_audio", "input_audio": {"data": encoded, "format": "wav"}}
    answer = _asked(server, [part, {"type": "text", "text": "hi"}]).json()
    assert answer["choices"][0]["message"]["content"] == expected.text
    body = {"text": "u:<image>hi;a:", "audio_data": encoded, "sampling_params": SAMPLING}
    assert httpx2.post(f"{server.url}/generate", json=body).json()["text"] == expected.text

    @sgl.function
    def listen(s):
        s += (
            "u:"
            + sgl.audio(sound.data)
            + "hi;a:"
            + sgl.gen("answer", max_tokens=4, temperature=0, ignore_eos=True)
        )

    assert listen().run(backend=sgl.RuntimeEndpoint(server.url))["answer"] == expected.text


@pytest.mark.parametrize(
    ("part", "why"),
    [
        (
            {"type": "video_url", "video_url": {"url": "data:image/png;base64,aGk="}},
            "is no video in base64",
        ),
        (
            {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,aGk="}},
            "in no known format",
        ),
        (
            {"type": "video_url", "video_url": {"url": "ftp://a.example/b.mp4"}},
            "is an address, and none is fetched here",
        ),
        ({"type": "video_url", "video_url": 7}, "7 is no data URL"),
        (
            {"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}},
            "the model reads no input_audio",
        ),
    ],
)
def test_a_bad_part_is_one_error(watching, part, why):
    answer = _asked(watching[0], [part])
    assert (answer.status_code, why in answer.text) == (400, True), answer.text


def test_a_model_that_hears_sees_nothing(hearing):
    server, _ = hearing
    answer = _asked(
        server, [{"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}]
    )
    assert (answer.status_code, "the model reads no image_url" in answer.text) == (400, True)
    info = httpx2.get(f"{server.url}/get_model_info").json()
    kinds = [info[f"has_{kind}_understanding"] for kind in ("image", "video", "audio")]
    assert kinds == [False, False, True]
