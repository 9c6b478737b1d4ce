"""Encoders on servers of their own: answers are those of one engine with all parts, whichever
server encodes.
"""

import base64
import contextlib
from typing import Any

import grpc
import httpx2
import pytest
import torch
from safetensors.torch import load
from smg_grpc_proto import sglang_encoder_pb2 as pb
from smg_grpc_proto import sglang_encoder_pb2_grpc as services
from smg_grpc_proto import sglang_scheduler_pb2 as of_scheduler
from smg_grpc_proto import sglang_scheduler_pb2_grpc as scheduler

import sglang_lite as sgl
from sglang_lite.protocol import BackendError, CapabilityError, Media, ParameterError
from sglang_lite.runtime.calls import EncodeMedia
from tests.media_files import mp4
from tests.runtime.media.seeing import GREEDY, png, save_seeing, seen
from tests.server.conftest import Running

KEY = "secret"


def _url(data, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _engine(model, **config):
    device: dict[str, Any] = {"device": "cpu"}
    if torch.cuda.is_available():
        device = (
            {"device": "cuda"}
            if config.get("encoder_only")
            else {"device": "cuda", "max_total_tokens": 2048}
        )
    return sgl.Engine(str(model), **{"dtype": "float32", "in_process": True, **device, **config})


@contextlib.contextmanager
def _encoder(model, **config):
    """An engine that encodes, and its server."""
    with _engine(model, encoder_only=True, **config) as engine:
        server = Running(engine, api_key=(KEY,), grpc_port=0)
        try:
            yield engine, server
        finally:
            server.stop()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    found = tmp_path_factory.mktemp("qwen3_vl")
    save_seeing("qwen3_vl", found)
    return found


@pytest.fixture(scope="module")
def encoder(model):
    with _encoder(model) as found:
        yield found


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("SGLANG_LITE_ENCODER_KEY", KEY)


def _posted(server, body, **more):
    headers = {"Authorization": f"Bearer {KEY}"}
    return httpx2.post(f"{server.url}/encode", json=body, **{"headers": headers, **more})


def test_answers_are_those_of_one_engine_and_a_lost_encoder_is_replaced(model, encoder):
    image, other_image, video = png(50, 40), png(30, 40, seed=1), mp4(8, 48, 32)
    prompts = [
        seen("ab", image, "cd"),
        seen("ab", other_image, "x", video, "cd"),
        seen("e", image, "f"),
    ]
    later = [seen("ab", png(40, 30, seed=seed), "cd") for seed in range(5, 9)]
    with _engine(model) as whole:
        expected = [whole.complete(each, GREEDY).token_ids for each in (*prompts, *later)]
    (engine, server), runs = encoder, encoder[0].stats()["images_encoded"]
    with _encoder(model) as (other, other_server):
        urls = [server.url, f"{other_server.url}/"]
        with _engine(model, language_only=True, encoder_urls=urls) as language:
            found = [language.complete(each, GREEDY).token_ids for each in prompts]
            asked = engine.stats()["images_encoded"] - runs + other.stats()["images_encoded"]
            assert asked == language.stats()["images_encoded"] == 3
            other_server.stop()
            found += [language.complete(each, GREEDY).token_ids for each in later]
            assert found == expected


def test_without_an_encoder_a_request_about_an_image_fails_and_others_go_on(model):
    nowhere = "http://127.0.0.1:9"
    with _engine(model, language_only=True, encoder_urls=[nowhere]) as language:
        with pytest.raises(BackendError, match=f"image is encoded nowhere: {nowhere}: .*refused"):
            language.complete(seen("ab", png(50, 40), "cd"), GREEDY)
        assert len(language.complete("ab", GREEDY).token_ids) == 6
        assert language.stats()["images_stored"] == 0


def test_features_are_named_by_their_hash_and_made_once(encoder):
    (engine, server), image = encoder, png(33, 47)
    first = load(
        _posted(server, {"mm_items": [_url(image), _url(mp4(4, 32, 32).data, "video/mp4")]}).content
    )
    runs = engine.stats()["images_encoded"]
    ((name, features),) = load(
        _posted(server, {"mm_items": [base64.b64encode(image).decode()]}).content
    ).items()
    assert torch.equal(first[name], features)
    assert features.shape == (first[name].shape[0], 3 * 64)  # of DeepStack
    few = load(
        _posted(
            server, {"mm_items": [_url(mp4(4, 32, 32).data, "video/mp4")], "num_frames": 2}
        ).content
    )
    assert not few.keys() & first.keys()
    assert engine.stats()["images_encoded"] == runs + 1
    engine.flush_cache()
    assert engine.stats()["images_stored"] == 0


def test_sglangs_service_makes_features_that_http_gives(encoder):
    engine, server = encoder
    with grpc.insecure_channel(f"127.0.0.1:{server.service.grpc_port}") as channel:
        stub, metadata = services.SglangEncoderStub(channel), (("authorization", f"Bearer {KEY}"),)
        image = png(60, 30, seed=3)
        told = stub.Encode(
            pb.EncodeRequest(mm_items=[_url(image)], req_id="mine"), metadata=metadata
        )
        runs = engine.stats()["images_encoded"]
        (features,) = load(
            _posted(server, {"mm_items": [_url(image)], "req_id": "mine"}).content
        ).values()
        assert (told.embedding_len, told.embedding_dim) == tuple(features.shape)
        assert told.embedding_size == features.nbytes
        assert engine.stats()["images_encoded"] == runs
        loads = (
            scheduler.SglangSchedulerStub(channel)
            .GetLoads(of_scheduler.GetLoadsRequest(), metadata=metadata)
            .loads
        )
        assert [each.num_running_reqs for each in loads] == [0]
        for request, code in [
            (
                pb.EncodeRequest(mm_items=[_url(image)], prefill_host="10.0.0.2"),
                grpc.StatusCode.INVALID_ARGUMENT,
            ),
            (pb.EncodeRequest(), grpc.StatusCode.INVALID_ARGUMENT),
        ]:
            with pytest.raises(grpc.RpcError) as failed:
                stub.Encode(request, metadata=metadata)
            assert failed.value.code() == code
        with pytest.raises(grpc.RpcError) as failed:
            stub.Send(pb.SendRequest(), metadata=metadata)
        assert failed.value.code() == grpc.StatusCode.UNIMPLEMENTED
        with pytest.raises(grpc.RpcError) as failed:
            stub.Encode(pb.EncodeRequest(mm_items=[_url(image)]))
        assert failed.value.code() == grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(("body", "problem"), [
    ({"mm_items": []}, "mm_items: has 0 media"),
    ({"mm_items": ["AAAA"]}, "no image in a known format"),
    ({"mm_items": [_url(b"<svg/>", "image/svg+xml")]}, "SVG"),
    ({"mm_items": ["data:text/plain;base64,AAAA"]}, "is no image in base64"),
    ({"mm_items": [_url(b"RIFF", "audio/wav")]}, "can't hear sounds"),
    ({"mm_items": ["https://pictures.example/a.png"]}, "none is fetched here"),
    ({"mm_items": [_url(png(9, 9))], "modality": "smell"}, "'smell' is not one of image, video, audio"),
    ({"mm_items": [_url(png(9, 9))], "prefill_host": "10.0.0.2"}, "prefill_host: is not supported"),
    ({"text": "a"}, "text"),
    ({}, "mm_items: is missing"),
])  # fmt: skip
def test_what_cant_be_encoded_is_one_named_error(encoder, body, problem):
    _, server = encoder
    found = _posted(server, body)
    assert found.status_code == 400
    assert problem in found.json()["error"]["message"]


def test_a_server_that_encodes_does_nothing_else(encoder):
    _, server = encoder
    headers = {"Authorization": f"Bearer {KEY}"}
    for path, body in [
        ("/generate", {"text": "a"}),
        ("/v1/completions", {"prompt": "a", "model": "default"}),
        ("/v1/embeddings", {"input": "a", "model": "default"}),
    ]:
        found = httpx2.post(
            f"{server.url}{path}",
            json={**body, "model": server.service.model_name},
            headers=headers,
        )
        assert (found.status_code, "encoder of media alone" in found.text) == (400, True)
    assert httpx2.get(f"{server.url}/health").status_code == 200
    assert httpx2.get(f"{server.url}/health_generate", headers=headers).status_code == 200
    assert "images_encoded" in httpx2.get(f"{server.url}/metrics").text
    info = httpx2.get(f"{server.url}/model_info", headers=headers).json()
    assert (info["is_generation"], info["has_image_understanding"]) == (False, True)
    assert _posted(server, {"mm_items": [_url(png(9, 9))]}, headers={}).status_code == 401


def test_other_settings_of_the_encoder_are_found(model, encoder):
    url, settings = encoder[1].url, {"image": {"do_convert_rgb": False}}
    with (
        _engine(
            model, language_only=True, encoder_urls=[url], mm_process_config=settings
        ) as language,
        pytest.raises(BackendError, match="prepares it in another way"),
    ):
        language.complete(seen("ab", png(50, 40), "cd"), GREEDY)


def test_an_image_that_an_encoder_refuses_fails_alone(model, encoder):
    _, server = encoder
    damaged = png(200, 200)[:-2000]
    with _engine(model, language_only=True, encoder_urls=[server.url]) as language:
        with pytest.raises(ParameterError, match="refuses it: image: is damaged or truncated"):
            language.complete(seen("ab", damaged, "cd"), GREEDY)
        assert language.complete(seen("ab", png(50, 40), "cd"), GREEDY)


def test_an_encoder_in_a_process_of_its_own(model):
    with _engine(model, encoder_only=True, in_process=False) as engine:
        assert engine.media_kinds == {"image", "video"}
        data = engine.core.submit_call(EncodeMedia((Media(png(50, 40), "image/png"),))).result()
        assert [each.shape[1] for each in load(data).values()] == [192]
        with pytest.raises(CapabilityError, match="encoder of media alone"):
            engine.complete("ab", GREEDY)
        with pytest.raises(ParameterError, match="are none"):
            engine.core.submit_call(EncodeMedia(())).result()


@pytest.mark.parametrize(("config", "problem"), [
    ({"language_only": True}, "language_only: needs servers that encode"),
    ({"encoder_urls": ["http://10.0.0.2:30000"]}, "encoder_urls: are asked with language_only alone"),
    ({"language_only": True, "encoder_urls": ["10.0.0.2"]}, "is no address of a server"),
    ({"language_only": True, "encoder_urls": 3}, "is no list of addresses"),
    ({"language_only": True, "encoder_urls": ["http://a"], "encoder_only": True}, "and language_only are both given"),
    ({"encoder_only": True, "enable_multimodal": False}, "encoder_only: is for images"),
    ({"encoder_only": True, "tp_size": 2}, "encoder_only: is not here with tp_size=2"),
    ({"encoder_only": True, "max_running": 2}, "max_running: is for models that generate text"),
    ({"encoder_only": True, "expert_distribution_recorder_mode": "stat"}, "recorder_mode: is for models that generate"),
])  # fmt: skip
def test_settings_that_do_not_fit_are_refused(model, config, problem):
    with pytest.raises(ParameterError, match=problem):
        _engine(model, **{"in_process": "tp_size" not in config, **config})


@pytest.mark.parametrize(
    "config", [{"encoder_only": True}, {"language_only": True, "encoder_urls": ["http://a"]}]
)
def test_a_model_of_text_is_refused(folder, config):
    with pytest.raises(ParameterError, match=f"{next(iter(config))}: .* reads no images"):
        _engine(folder, **config)
