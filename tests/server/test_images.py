"""Images in requests of all protocols: answers are the engine's own, and each bad image is one
named error.
"""

import base64
import io
import struct
import zlib
from dataclasses import replace
from typing import Any

import anthropic
import httpx2
import numpy as np
import openai
import pytest
from PIL import Image as Picture
from PIL.PngImagePlugin import PngInfo

import sglang_lite as sgl
from sglang_lite.protocol import ParameterError, SamplingParams
from tests.runtime.media.seeing import CHAT, GREEDY, encoded, png, save_seeing, seen
from tests.server.conftest import Running
from tests.web import sends, web

TEXT_TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
PARAMS = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module", params=[CHAT, TEXT_TEMPLATE], ids=["parts", "text"])
def running(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("llava")
    save_seeing("llava", folder)
    with sgl.Engine(
        str(folder),
        in_process=True,
        dtype="float32",
        device="cpu",
        chat_template=request.param,
        served_model_name="default",
    ) as engine:
        server = Running(engine)
        yield server, engine
        server.stop()


def _url(image):
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


def test_each_protocol_gives_the_engines_answer(running):
    server, engine = running
    image, other = png(40, 30), png(30, 40, seed=1)
    expected = engine.complete(seen("u:", image, "hi;a:"), PARAMS)
    more = engine.complete(seen("u:", image, "hi", other, "yo;a:"), PARAMS)
    chat: Any = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x")
    ask = dict(model="default", max_tokens=4, temperature=0, extra_body={"ignore_eos": True})
    part = {"type": "image_url", "image_url": {"url": _url(image)}}
    second = {"type": "image_url", "image_url": {"url": _url(other), "detail": "low"}}
    content = [part, {"type": "text", "text": "hi"}]
    found = chat.chat.completions.create(messages=[{"role": "user", "content": content}], **ask)
    assert found.choices[0].message.content == expected.text
    assert found.usage.prompt_tokens == expected.usage.prompt_tokens
    content = [part, {"type": "text", "text": "hi"}, second, {"type": "text", "text": "yo"}]
    found = chat.chat.completions.create(messages=[{"role": "user", "content": content}], **ask)
    assert found.choices[0].message.content == more.text
    content = [
        {"type": "input_image", "image_url": _url(image)},
        {"type": "input_text", "text": "hi"},
    ]
    response = chat.responses.create(
        model="default", input=[{"role": "user", "content": content}], max_output_tokens=4, temperature=0,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert response.output_text == expected.text
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(image).decode()}
    messages: Any = anthropic.Anthropic(base_url=server.url, api_key="x")
    content = [{"type": "image", "source": source}, {"type": "text", "text": "hi"}]
    told = messages.messages.create(
        model="default",
        max_tokens=4,
        messages=[{"role": "user", "content": content}],
        extra_body={"temperature": 0},
    )
    assert (
        told.usage.input_tokens + told.usage.cache_read_input_tokens == expected.usage.prompt_tokens
    )
    assert (
        "".join(block.text for block in told.content)
        == engine.complete(
            seen("u:", image, "hi;a:"), SamplingParams(max_tokens=4, temperature=0)
        ).text
    )
    sampling = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
    body = {"text": "u:<image>hi;a:", "image_data": _url(image), "sampling_params": sampling}
    assert httpx2.post(f"{server.url}/generate", json=body).json()["text"] == expected.text
    own = engine.generate("u:<image>hi;a:", sampling, image_data=image)
    assert own["text"] == expected.text


def test_usage_counts_the_tokens_of_images_and_those_in_the_cache(running):
    server, engine = running
    engine.flush_cache()
    ask: dict[str, Any] = {"model": "default", "max_tokens": 1, "temperature": 0}
    ask["messages"] = [
        {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": _url(png(31, 31))}}],
        }
    ]
    counts = []
    for _ in range(2):
        answer = httpx2.post(f"{server.url}/v1/chat/completions", json=ask).json()["usage"]
        details = answer["prompt_tokens_details"]
        counts.append((details["image_tokens"], details["cached_image_tokens"]))
    assert counts == [(16, 0), (16, 16)]
    body: dict[str, Any] = {
        "input": [
            {"role": "user", "content": [{"type": "input_image", "image_url": _url(png(31, 31))}]}
        ]
    }
    answer = httpx2.post(
        f"{server.url}/v1/responses", json={**body, "model": "default", "max_output_tokens": 1}
    ).json()
    assert answer["usage"]["input_tokens_details"]["cached_image_tokens"] == 16
    body = {
        "text": "<image>",
        "image_data": _url(png(31, 31)),
        "sampling_params": {"max_new_tokens": 1},
    }
    meta = httpx2.post(f"{server.url}/generate", json=body).json()["meta_info"]
    assert (meta["image_tokens"], meta["cached_image_tokens"]) == (16, 0)
    ask["messages"] = [{"role": "user", "content": "hi"}]
    answer = httpx2.post(f"{server.url}/v1/chat/completions", json=ask).json()["usage"]
    assert "image_tokens" not in answer["prompt_tokens_details"]

    @sgl.function
    def look(s):
        s += (
            "ab"
            + sgl.image(png(31, 31))
            + sgl.gen("answer", max_tokens=1)
            + sgl.select("chosen", ["ij", "kl"])
        )

    for backend in (engine, sgl.RuntimeEndpoint(server.url)):
        state = look().run(backend=backend)
        assert state.usage("answer").image_tokens == 16
        assert state.usage("chosen").image_tokens == 2 * 16


def test_programs_run_on_the_server(running):
    server, engine = running
    image = png(40, 30)

    @sgl.function
    def look(s):
        s += "ab" + sgl.image(image) + "cd" + sgl.gen("answer", regex="[A-Z]{3}", temperature=0)
        s += sgl.select("chosen", ["ij", "kl"])

    endpoint = sgl.RuntimeEndpoint(server.url)
    state, own = look().run(backend=endpoint), look().run(backend=engine)
    assert (state["answer"], state["chosen"]) == (own["answer"], own["chosen"])


def test_text_that_spells_a_placeholder_is_plain_text(running):
    server, _ = running
    ask = {
        "model": "default",
        "max_tokens": 1,
        "messages": [{"role": "user", "content": "<image>"}],
    }
    answer = httpx2.post(f"{server.url}/v1/chat/completions", json=ask).json()
    assert answer["usage"]["prompt_tokens"] == len("u:<image>;a:")
    ask["messages"][0]["content"] = [
        {"type": "image_url", "image_url": {"url": _url(png(9, 9))}}, {"type": "text", "text": "<image>"},
    ]  # fmt: skip
    answer = httpx2.post(f"{server.url}/v1/chat/completions", json=ask).json()
    assert answer["usage"]["prompt_tokens"] == len("u:<image>;a:") + 16


@pytest.mark.parametrize(
    ("path", "more", "why"),
    [
        ("/generate", {"modalities": ["image"]}, None), ("/generate", {"modalities": ["video"]}, "modalities: 'video' is"),
        ("/generate", {"modalities": ["multi-images"]}, "modalities: 'multi-images' is not the kind of what is given"),
        ("/generate", {"image_data": {"url": _url(png(9, 9)), "format": "processor_output"}}, "image_data.format: is not"),
        ("part", {"modalities": "image"}, None), ("part", {"modalities": "multi-images"}, "modalities"),
        ("source", {"detail": "high"}, None), ("source", {"max_dynamic_patch": None}, None),
        ("source", {"max_dynamic_patch": 4}, "messages[0].content[0].max_dynamic_patch: is not supported"),
    ],
)  # fmt: skip
def test_what_is_said_beside_an_image_is_honoured_or_refused(running, path, more, why):
    server, _ = running
    source = {"url": _url(png(9, 9)), **(more if path == "source" else {})}
    part = {"type": "image_url", "image_url": source, **(more if path == "part" else {})}
    chat = {"model": "default", "max_tokens": 1, "messages": [{"role": "user", "content": [part]}]}
    native = {
        "text": "<image>",
        "image_data": source,
        "sampling_params": {"max_new_tokens": 1},
        **more,
    }
    native, path = (native, path) if path == "/generate" else (chat, "/v1/chat/completions")
    answer = httpx2.post(f"{server.url}{path}", json=native)
    assert answer.status_code == (200 if why is None else 400), answer.text
    assert why is None or why in answer.text


def test_an_image_that_is_a_file_is_told_when_it_is_not_there(running):
    server, engine = running
    with pytest.raises(ParameterError, match=r"'missing\.png' can't be read"):
        engine.generate("<image>", image_data="missing.png")
    for more, why in (
        ({"file_id": "file-1"}, "no files are stored here"),
        ({"crop": 1}, "unknown field `crop`"),
    ):
        content = [{"type": "input_image", "detail": "low", **more}]
        body = {"input": [{"role": "user", "content": content}], "model": "default"}
        answer = httpx2.post(f"{server.url}/v1/responses", json=body)
        assert (answer.status_code, why in answer.json()["error"]["message"]) == (400, True), (
            answer.text
        )


def test_a_photo_with_other_pictures_in_its_file_is_the_first(running):
    _, engine = running
    first, second = (Picture.open(io.BytesIO(png(30, 30, seed=seed))) for seed in (0, 1))
    photo = encoded(first, "MPO", save_all=True, append_images=[second])
    answers = [
        engine.complete(seen("u:", each, "hi"), GREEDY) for each in (photo, encoded(first, "JPEG"))
    ]
    assert answers[0].output_logprobs == answers[1].output_logprobs


def test_images_of_16_bits_of_grey_are_those_of_8(running):
    _, engine = running
    grey = np.random.default_rng(0).integers(0, 256, (30, 30)).astype(np.uint16)
    deep = encoded(Picture.fromarray(grey * 257), "PNG")
    assert Picture.open(io.BytesIO(deep)).mode.startswith("I")
    flat = encoded(Picture.fromarray(grey.astype(np.uint8)), "PNG")
    answers = [engine.complete(seen("u:", each, "hi"), GREEDY) for each in (deep, flat)]
    assert answers[0].output_logprobs == answers[1].output_logprobs


def _claiming(width, height):
    """A small PNG whose header claims a size."""
    data = bytearray(encoded(_TINY, "PNG"))
    data[16:24] = struct.pack(">II", width, height)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return bytes(data)


_TINY = Picture.new("RGB", (8, 8))
_LONG = PngInfo()
_LONG.add_text("comment", "a" * 2**21, zip=True)
BAD = {
    "empty": (b"", "is empty"),
    "truncated": (png(64, 64)[:900], "damaged or truncated"),
    "text": (b"no picture", "no image in a known format"),
    "SVG": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no image in a known format"),
    "animated": (
        encoded(_TINY, "GIF", save_all=True, append_images=[Picture.new("RGB", (8, 8), "red")]),
        "animated",
    ),
    "pages": (
        encoded(_TINY, "TIFF", save_all=True, append_images=[_TINY]),
        "several pages. Send each",
    ),
    "text of a file": (
        encoded(_TINY, "PNG", pnginfo=_LONG),
        "can't be read: Decompressed data too large",
    ),
    "32 bits": (encoded(Picture.new("F", (8, 8)), "TIFF"), "32 bits a pixel"),
    "CMYK": (encoded(Picture.new("CMYK", (8, 8)), "JPEG"), "CMYK"),
    "narrow": (encoded(Picture.new("L", (1, 10_000)), "PNG"), "200 times"),
    "huge": (_claiming(30_000, 30_000), "too large|the limit is"),
    "large": (_claiming(9_000, 9_000), "the limit is"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_images_are_refused_by_name_and_others_go_on(running, name):
    server, engine = running
    data, why = BAD[name]
    content = [
        {"type": "image_url", "image_url": {"url": _url(data)}},
        {"type": "text", "text": "hi"},
    ]
    chat: Any = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
    with pytest.raises(openai.BadRequestError, match=why):
        chat.chat.completions.create(
            model="default", messages=[{"role": "user", "content": content}], max_tokens=2
        )
    assert engine.complete(seen("u:", png(9, 9), "hi"), PARAMS).text


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://169.254.169.254/latest", "none is fetched"), ("https://example.com/cat.png", "none is fetched"),
        ("file:///etc/passwd", "none is fetched"), ("data:text/plain;base64,aGk=", "no image in base64"),
        ("data:image/svg+xml;base64,PHN2Zy8+", "SVG"), ("data:image/png;base64,####", "no base64"),
        ("data:image/png;base64,", "messages[0].content[0]: is empty"),
        ("data:image/png,abc", "no image in base64"), (7, "no data URL"),
    ],
)  # fmt: skip
def test_addresses_and_other_data_are_refused(running, url, why):
    server, _ = running
    content = [{"type": "image_url", "image_url": {"url": url}}]
    body = {"model": "default", "messages": [{"role": "user", "content": content}]}
    answer = httpx2.post(f"{server.url}/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert why in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("video_url", "the model reads no video_url"),
        ("input_audio", "the model reads no input_audio"),
    ],
)
def test_parts_that_nobody_reads_are_refused_as_such(running, kind, why):
    server, _ = running
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": [{"type": kind, kind: {"url": "u"}}]}],
    }
    assert (
        why
        in httpx2.post(f"{server.url}/v1/chat/completions", json=body).json()["error"]["message"]
    )


def test_images_of_others_than_users_are_refused_as_such(running):
    server, _ = running
    image = {"type": "image_url", "image_url": {"url": _url(png(9, 9))}}
    messages = [
        {"role": "assistant", "content": "a"},
        {"role": "tool", "tool_call_id": "1", "content": [image]},
    ]
    answer = httpx2.post(
        f"{server.url}/v1/chat/completions", json={"model": "default", "messages": messages}
    )
    assert "can have images, not one of role 'tool'" in answer.json()["error"]["message"]
    output = [{"type": "input_image", "image_url": _url(png(9, 9))}]
    body = {
        "model": "default",
        "input": [{"type": "function_call_output", "call_id": "1", "output": output}],
    }
    answer = httpx2.post(f"{server.url}/v1/responses", json=body)
    assert "no input_image is read here" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("text", "images", "why"),
    [
        ("<image><image>", 1, "2 placeholders, and 1 image. Give an image for each <image>"),
        ("hi", 1, "0 placeholders, and 1 image. Write <image> where"),
        ("<image>", 0, "1 placeholder, and 0 images. Give an image for each"),
        ("<image>", 2, "and 2 images"),
    ],
)
def test_more_or_fewer_images_than_placeholders_are_refused(running, text, images, why):
    server, _ = running
    body = {
        "text": text,
        "image_data": [_url(png(9, 9))] * images,
        "sampling_params": {"max_new_tokens": 1},
    }
    answer = httpx2.post(f"{server.url}/generate", json=body)
    assert answer.status_code == 400
    assert why in answer.text


def test_a_prompt_whose_images_exceed_the_context_is_refused(running):
    server, engine = running
    count = engine.context_length // 16 + 1
    content = [{"type": "image_url", "image_url": {"url": _url(png(9, 9))}}] * count
    body = {"model": "default", "messages": [{"role": "user", "content": content}]}
    answer = httpx2.post(f"{server.url}/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "tokens long" in answer.json()["error"]["message"]


@pytest.fixture
def fetching(running):
    """A server of the same engine that fetches images from one host."""
    server = Running(running[1], allowed_media_domains=("pictures.example",))
    yield server
    server.stop()


def test_images_at_allowed_addresses_are_fetched_in_each_protocol(running, fetching):
    _, engine = running
    image = png(40, 30)
    expected = engine.complete(seen("u:", image, "hi;a:"), PARAMS)
    url = "http://pictures.example/a.png"
    ask = {"model": "default", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "hi"}]
    parts = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "hi"}]
    blocks = [
        {"type": "image", "source": {"type": "url", "url": url}},
        {"type": "text", "text": "hi"},
    ]
    tokens = expected.usage.prompt_tokens
    with web({"pictures.example": "93.184.215.14"}, {"/a.png": sends(image)}) as asked:

        def post(path, **body):
            answer = httpx2.post(f"{fetching.url}{path}", json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()

        found = post("/v1/chat/completions", messages=[{"role": "user", "content": content}], **ask)
        assert found["choices"][0]["message"]["content"] == expected.text
        body = {**ask, "input": [{"role": "user", "content": parts}]}
        del body["max_tokens"]
        found = post("/v1/responses", max_output_tokens=4, **body)
        assert found["output"][0]["content"][0]["text"] == expected.text
        assert (
            post("/v1/responses/input_tokens", input=body["input"], model="default")["input_tokens"]
            == tokens
        )
        body = {"model": "default", "messages": [{"role": "user", "content": blocks}]}
        usage = post("/v1/messages", max_tokens=4, **body)["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == tokens
        assert post("/v1/messages/count_tokens", **body)["input_tokens"] == tokens
        sampling = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
        texts = ["u:<image>hi;a:", "u:<image>ho;a:"]
        found = post(
            "/generate", text=texts, image_data=[{"url": url}, url], sampling_params=sampling
        )
        assert found[0]["text"] == expected.text

        @sgl.function
        def look(s: sgl.ProgramState) -> None:
            s += "u:" + sgl.image(url)
            (fork,) = s.fork(1)
            fork += "hi;a:" + sgl.gen("said", max_tokens=4, temperature=0, ignore_eos=True)
            s["said"] = fork["said"]

        for backend in (engine, sgl.RuntimeEndpoint(fetching.url)):
            assert look().run(backend=backend)["said"] == expected.text
        body = {**sampling, "max_new_tokens": 4}
        assert engine.generate(texts[0], body, image_data=url)["text"] == expected.text
    assert asked == ["/a.png"] * 9


def test_the_files_of_all_open_requests_are_bounded(running):
    image, other = png(40, 30), png(30, 40, seed=1)
    most = (len(image) + len(other) - 1) / 2**20
    server = Running(
        running[1], allowed_media_domains=("pictures.example",), media_url_max_total_mb=most
    )
    pages = {"/a.png": sends(image), "/b.png": sends(other)}
    first, second = (f"http://pictures.example{path}" for path in pages)
    try:
        with web({"pictures.example": "93.184.215.14"}, pages):
            for urls, status in (
                ([first], 200),
                ([second], 200),
                ([first, second], 503),
                ([first], 200),
            ):
                content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
                body = {
                    "model": "default",
                    "max_tokens": 1,
                    "messages": [{"role": "user", "content": content}],
                }
                answer = httpx2.post(f"{server.url}/v1/chat/completions", json=body)
                assert answer.status_code == status, answer.text
                assert ("raise media_url_max_total_mb" in answer.text) == (status == 503)
    finally:
        server.stop()


def test_the_files_of_a_request_are_bounded(running):
    images = [png(40, 30), png(30, 40, seed=1)]
    most = (sum(map(len, images)) - 1) / 2**20
    server = Running(
        running[1], allowed_media_domains=("pictures.example",), media_url_max_file_size_mb=most
    )
    pages = {f"/{i}.png": sends(image) for i, image in enumerate(images)}
    content = [
        {"type": "image_url", "image_url": {"url": f"http://pictures.example{path}"}}
        for path in pages
    ]
    try:
        with web({"pictures.example": "93.184.215.14"}, pages):
            for count, status in ((1, 200), (2, 400)):
                body = {"max_tokens": 1, "messages": [{"role": "user", "content": content[:count]}]}
                answer = httpx2.post(
                    f"{server.url}/v1/chat/completions", json={"model": "default", **body}
                )
                assert answer.status_code == status, answer.text
    finally:
        server.stop()


def test_nothing_is_fetched_for_a_model_that_takes_no_or_fewer_images(engine, running, monkeypatch):
    url = "http://pictures.example/a.png"
    content = [{"type": "image_url", "image_url": {"url": f"{url}?{i}"}} for i in range(2)]
    body = {"model": "default", "messages": [{"role": "user", "content": content}]}
    native = {"text": "<image><image>", "image_data": [f"{url}?0", f"{url}?1"]}
    seeing = running[1]
    media = seeing.core.builder.media
    one = {"image": replace(media.kinds["image"], most=1)}
    monkeypatch.setattr(seeing.core.builder, "media", replace(media, kinds=one))
    with web({"pictures.example": "93.184.215.14"}, {}) as asked:
        for each, why in (
            (engine, "can't see images"),
            (seeing, "has 2 images, and 1 is the limit"),
        ):
            server = Running(each, allowed_media_domains=("*",))
            try:
                answer = httpx2.post(f"{server.url}/generate", json=native)
                assert (answer.status_code, why in answer.text) == (400, True), answer.text
                answer = httpx2.post(f"{server.url}/v1/chat/completions", json=body)
                assert answer.status_code == 400
            finally:
                server.stop()
    assert asked == []


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://others.example/a.png", "not of an allowed domain"), ("file:///etc/passwd", "none is fetched"),
        ("http://pictures.example/b.png", "answers 404"), ("http://pictures.example/page", "no image in a known format"),
    ],
)  # fmt: skip
def test_what_cannot_be_fetched_is_refused_by_name(fetching, url, why):
    content = [{"type": "image_url", "image_url": {"url": url}}]
    body = {"model": "default", "messages": [{"role": "user", "content": content}]}
    with web({"pictures.example": "93.184.215.14"}, {"/page": sends(b"<html>")}):
        answer = httpx2.post(f"{fetching.url}/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert why in answer.json()["error"]["message"]
