"""Images, videos and sounds: from whatever users have, with the type they really are."""

import base64
import io
import struct
import sys
import zlib
from typing import Any

import numpy as np
import PIL.Image
import pytest

import sglang_lite as sgl
from sglang_lite.lang.media import extract_frames, load_image
from sglang_lite.protocol import Media
from tests.media_files import frames_in, mp4, wav

PNG = b"\x89PNG\r\n\x1a\n....."
KINDS = {
    "image/png": PNG,
    "image/jpeg": b"\xff\xd8\xff\xe0....",
    "image/gif": b"GIF89a....",
    "image/webp": b"RIFF\x10\0\0\0WEBPVP8 ",
    "image/bmp": b"BM....",
    "image/tiff": b"II*\0....",
}


def decoded(data):
    """Width, height and the pixels of a PNG file that has all its data in one chunk without
    filters.
    """
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, chunks = 8, {}
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        kind, content = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        assert struct.unpack(">I", data[at + 8 + length : at + 12 + length])[0] == zlib.crc32(
            kind + content
        )
        chunks[kind] = content
        at += 12 + length
    width, height, depth, colour = struct.unpack(">IIBB", chunks[b"IHDR"][:10])
    channels = {0: 1, 2: 3, 6: 4}[colour]
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(
        height, 1 + width * channels
    )
    assert depth == 8
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, channels)


@pytest.mark.parametrize("kind", KINDS)
def test_the_media_type_is_that_of_the_content_not_of_the_name(tmp_path, kind):
    path = tmp_path / "picture.jpg"
    path.write_bytes(KINDS[kind])
    for source in (path, str(path), KINDS[kind], bytearray(KINDS[kind]), memoryview(KINDS[kind])):
        assert load_image(source) == Media(KINDS[kind], kind)


@pytest.mark.parametrize("url", ["https://a.b/c.png", "http://a.b/c", "data:image/png;base64,AAAA"])
def test_an_address_stays_an_address(url):
    assert load_image(url) == Media(url=url)


PIXELS = np.arange(2 * 5 * 4, dtype=np.uint8).reshape(2, 5, 4)  # 2 high, 5 wide, 4 channels


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_an_array_is_read_by_rows_or_by_channels(channels):
    array = PIXELS[:, :, :channels]
    for source in (array, array.transpose(2, 0, 1), np.asfortranarray(array)):
        image = load_image(source)
        assert image.media_type == "image/png"
        assert (decoded(image.data) == array).all()


def test_an_array_without_channels_is_grey():
    assert (decoded(load_image(PIXELS[:, :, 0]).data)[:, :, 0] == PIXELS[:, :, 0]).all()


def test_a_tensor_is_an_array():
    torch = pytest.importorskip("torch")
    pixels = torch.from_numpy(PIXELS[:, :, :3].copy())
    for source in (pixels, pixels.permute(2, 0, 1), pixels.permute(2, 0, 1).contiguous()):
        assert (decoded(load_image(source).data) == PIXELS[:, :, :3]).all()


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 2, 3)), r"an array of float64 \[2, 2, 3\] is not an image"),
        (np.zeros((2, 2, 3, 1), np.uint8), "is not an image"),
        (np.zeros(3, np.uint8), "is not an image"),
        (np.zeros((0, 4, 3), np.uint8), "is not an image"),
        (np.zeros((5, 6, 7), np.uint8), "7 channels are not supported. Give 1, 3 or 4"),
        (np.zeros((5, 6, 2), np.uint8), "2 channels"),
    ],
)
def test_an_array_that_is_no_image_is_refused(array, message):
    with pytest.raises(sgl.ParameterError, match=f"image: .*{message}"):
        load_image(array)


class FakePicture:
    """Stand-in for a PIL image, as far as it is used."""

    def __init__(self, mode):
        self.mode = mode

    def convert(self, mode):
        return FakePicture(mode)

    def save(self, file, format):
        assert self.mode != "CMYK", "a PNG file has no such mode"
        file.write(KINDS[f"image/{format.lower()}"] + self.mode.encode())


@pytest.mark.parametrize(
    ("mode", "saved"), [("RGB", b"RGB"), ("RGBA", b"RGBA"), ("L", b"L"), ("CMYK", b"RGB")]
)
def test_a_picture_of_pil_is_saved_as_png(mode, saved):
    assert load_image(FakePicture(mode)) == Media(PNG + saved, "image/png")


def test_a_real_picture_of_pil_is_saved_as_png():
    pil = pytest.importorskip("PIL.Image")
    for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "F", "I"):
        image = load_image(pil.new(mode, (3, 2)))
        assert pil.open(io.BytesIO(image.data)).size == (3, 2)


@pytest.mark.parametrize("data", [b"", b"hello", b"%PDF-1.7", b"RIFF\0\0\0\0WAVE", b"<svg/>"])
def test_data_that_is_no_image_is_refused(data):
    with pytest.raises(sgl.ParameterError, match="the data is not an image in a known format"):
        load_image(data)


@pytest.mark.parametrize("source", [None, 3, object(), ["a.png"]])
def test_what_is_no_image_at_all_is_refused(source):
    with pytest.raises(
        sgl.ParameterError, match=f"image: a {type(source).__name__} is not an image"
    ):
        load_image(source)


def test_an_image_has_a_size_limit(monkeypatch):
    monkeypatch.setattr("sglang_lite.lang.media.MAX_IMAGE_BYTES", len(PNG) - 1)
    with pytest.raises(sgl.ParameterError, match="13 bytes, the limit is 12"):
        load_image(PNG)


# -------------------------------------------------------------------------------------- in programs


@sgl.function
def look(s, *images):
    with s.user():
        s += "What are "
        for each in images:
            s += sgl.image(each)
        s += "?"
    s += sgl.assistant(sgl.gen("a"))


def test_a_message_has_any_number_of_images_between_its_texts():
    script = sgl.ScriptedBackend(default="cats")
    state = look.run(PNG, "https://a.b/c.png", KINDS["image/jpeg"], backend=script)
    assert state["a"] == "cats"
    prompt = script.calls[0].prompt
    assert [i.media_type or i.url for i in prompt.images] == [
        "image/png",
        "https://a.b/c.png",
        "image/jpeg",
    ]
    assert prompt.text.count("<image>") == 3
    content = state.messages()[0]["content"]
    assert [part["image_url"]["url"] for part in content if part["type"] == "image_url"] == [
        "data:image/png;base64," + base64.b64encode(PNG).decode(),
        "https://a.b/c.png",
        "data:image/jpeg;base64," + base64.b64encode(KINDS["image/jpeg"]).decode(),
    ]
    assert content[0] == {"type": "text", "text": "What are "}
    assert state.stream_executor.images_ == list(prompt.images)


def test_branches_see_the_images_before_them():
    script = sgl.ScriptedBackend(default="x")

    @sgl.function
    def program(s):
        s += sgl.image(PNG)
        fork = s.fork(2)
        fork[0] += sgl.image(KINDS["image/gif"])
        fork += sgl.gen("a")
        fork.join()
        s["a"]

    program.run(backend=script)
    assert sorted(len(call.prompt.images) for call in script.calls) == [1, 2]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere.png", "'nowhere.png' can't be read: No such file or directory"),
        (b"text", "not an image in a known format"),
    ],
)
def test_a_bad_image_is_refused_at_its_line(source, message):
    def body(s):
        s += "fine"
        s += sgl.image(source)

    with pytest.raises(sgl.ParameterError, match=message) as caught:
        sgl.function(body).run(backend=sgl.ScriptedBackend())
    assert caught.value.where.line == body.__code__.co_firstlineno + 2


def test_a_folder_is_no_image(tmp_path):
    with pytest.raises(sgl.ParameterError, match="can't be read"):
        load_image(tmp_path)


class Blind(sgl.ScriptedBackend):
    from sglang_lite.lang.backend.base_backend import Capabilities

    capabilities = Capabilities(images=False)


@pytest.mark.parametrize(
    "node", [sgl.image(PNG), sgl.user("see " + sgl.image(PNG))], ids=["alone", "in a turn"]
)
def test_a_backend_that_sees_no_images_refuses_at_the_line_and_before_anything_is_asked(node):
    def body(s):
        s += "fine"
        s += node
        s += sgl.gen("a")

    script = Blind()
    with pytest.raises(
        sgl.CapabilityError, match=r"Blind\('scripted'\) can't honour images"
    ) as caught:
        sgl.function(body).run(backend=script)
    assert caught.value.where.line == body.__code__.co_firstlineno + 2
    assert script.calls == []


# -------------------------------------------------------------------------------- videos and sounds


@pytest.fixture(scope="module")
def ten(tmp_path_factory):
    """Path of a video of ten frames."""
    path = tmp_path_factory.mktemp("videos") / "ten.mp4"
    path.write_bytes(mp4(10, 32, 16).data)
    return path


@pytest.mark.parametrize(
    ("frames", "taken"),
    [(1, [0]), (2, [0, 9]), (3, [0, 4, 9]), (10, [*range(10)]), (40, [*range(10)])],
)
def test_the_frames_of_a_video_are_evenly_spread(ten, frames, taken):
    shown = frames_in(Media(ten.read_bytes()))
    images = extract_frames(sgl.video(ten, frames).load_media())
    assert [np.asarray(PIL.Image.open(io.BytesIO(each.data))).tolist() for each in images] == [
        np.asarray(shown[i]).tolist() for i in taken
    ]


def test_a_video_is_its_frames_in_a_message(ten):
    script = sgl.ScriptedBackend()
    state = sgl.function(lambda s: s.user("see " + sgl.video(str(ten), 3))).run(backend=script)
    assert [part["type"] for part in state.messages()[0]["content"]] == ["text"] + [
        "image_url",
        "text",
    ] * 3


def test_a_video_or_a_sound_is_loaded_from_whatever_has_its_bytes(ten):
    data = ten.read_bytes()
    url = f"data:video/mp4;base64,{base64.b64encode(data).decode()}"
    for source in (ten, str(ten), data, bytearray(data), url):
        assert sgl.video(source, 4).load_media() == Media(data, "video/mp4", frames=4)
    sound = wav(0.1).data
    assert sgl.audio(sound).load_media() == Media(sound, "audio/wav")
    assert sgl.video("https://a.b/c.mp4", 4).load_media() == Media(
        url="https://a.b/c.mp4", media_type="video/*", frames=4
    )


def test_a_sound_is_a_part_of_a_message():
    sound = wav(0.1).data
    script = sgl.ScriptedBackend(default="x")

    @sgl.function
    def hear(s):
        s += sgl.user("hear " + sgl.audio(sound)) + sgl.assistant(sgl.gen("a"))

    state = hear.run(backend=script)
    (part,) = [each for each in state.messages()[0]["content"] if each["type"] != "text"]
    assert part == {
        "type": "input_audio",
        "input_audio": {"data": base64.b64encode(sound).decode(), "format": "wav"},
    }
    assert [each.kind for each in script.calls[0].prompt.images] == ["audio"]


WRONG: Any = (0, -1, 1.5, True, None)  # numbers of frames


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (sgl.video("nowhere.mp4", 2), "video: 'nowhere.mp4' can't be read: No such file"),
        (sgl.video(b"text", 2), "video: begins with b'text': in no known format. Known: MP4"),
        (sgl.video(7, 2), "video: a int is not a file. Give a path, an address or bytes."),
        (sgl.audio("data:audio/wav;base64,!"), "audio: is no base64"),
        (sgl.audio(PNG), "audio: begins with .* in no known format. Known: WAV"),
        *((sgl.video(b"", frames), "num_frames") for frames in WRONG),
    ],
)
def test_a_bad_video_or_sound_is_refused_at_its_line(node, message):
    def body(s):
        s += "fine"
        s += node

    with pytest.raises(sgl.ParameterError, match=message) as caught:
        sgl.function(body).run(backend=sgl.ScriptedBackend()).sync()
    assert caught.value.where.line == body.__code__.co_firstlineno + 2


def test_a_damaged_video_is_refused_at_its_line():
    def body(s):
        s += sgl.video(b"\0\0\0\x18ftypisom" + b"\0" * 50, 2)

    with pytest.raises(sgl.ParameterError, match="video: is damaged or truncated") as caught:
        sgl.function(body).run(backend=sgl.ScriptedBackend()).sync()
    assert caught.value.where.line == body.__code__.co_firstlineno + 1


def test_a_backend_that_hears_nothing_refuses_a_sound():
    with pytest.raises(sgl.CapabilityError, match=r"can't honour sounds. Describe what it says"):
        sgl.function(lambda s: s.user(sgl.audio(wav(0.1).data))).run(backend=Blind()).sync()


def test_a_video_without_av_says_what_to_install(monkeypatch, ten):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(
        sgl.ParameterError, match=r"needs the package av\. pip install 'sglang-lite\[media\]'"
    ):
        extract_frames(sgl.video(ten, 2).load_media())
