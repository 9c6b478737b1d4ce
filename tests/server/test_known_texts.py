"""A long schema travels once: then its hash stands for it."""

import asyncio
import hashlib
import json
from typing import Annotated

import httpx2
import pytest

import sglang_lite as sgl
from sglang_lite.lang.backend.http.client import ServerClient
from sglang_lite.server import endpoint
from sglang_lite.server.known_texts import KnownTexts
from sglang_lite.wire.long_texts import LONG, replace_long_schemas
from tests.server.conftest import serving

DOCUMENT = " ".join(f"{number} is the number after {number - 1}." for number in range(1, 2_200))
Evidence = Annotated[str, sgl.quote(DOCUMENT)]


@pytest.fixture
def received(monkeypatch):
    """Sizes of the bodies that a server receives."""
    sizes, read = [], endpoint.read_bytes

    async def reading(*args):
        data = await read(*args)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(endpoint, "read_bytes", reading)
    return sizes


@pytest.mark.parametrize("alone", [True, False], ids=["generate", "program"])
def test_a_document_is_sent_once(engine, received, alone):
    @sgl.function
    def quoting(s, number):
        s += f"{number}: "
        s += sgl.gen("quote", type=Evidence, max_tokens=30, temperature=1.0, seed=number)

    with serving(engine) as url:
        backend = sgl.RuntimeEndpoint(url)
        backend.plays_programs = backend.plays_programs and not alone
        assert all(quoting.run(number, backend=backend)["quote"] in DOCUMENT for number in range(3))
        backend.shutdown()
    sizes = [size for size in received if size]
    assert sum(size > len(DOCUMENT) for size in sizes) == 1
    assert sum(sizes) < 1.2 * len(DOCUMENT)


def test_a_server_that_has_forgotten_a_schema_says_so(http):
    schema = json.dumps({"type": "string", "x-quote": DOCUMENT})
    digest = hashlib.sha256(json.dumps(schema).encode()).hexdigest()
    ask = {"text": "a", "sampling_params": {"max_new_tokens": 40, "sampling_seed": 1}}
    constraint = {"kind": "JsonSchema", "schema": {"$sha256": digest}}
    short = json.dumps({**ask, "constraint": constraint}, separators=(",", ":"))
    refused = http.post("/generate", content=short)
    assert refused.status_code == 424
    assert refused.json()["error"]["err_type"] == "UnknownTextError"
    whole = json.dumps(
        {**ask, "constraint": {**constraint, "schema": schema}}, separators=(",", ":")
    )
    first = http.post("/generate", content=whole, headers={"x-keep-texts": "1"})
    again = http.post("/generate", content=short)
    assert first.status_code == 200, first.text
    assert first.json()["text"] == again.json()["text"]
    assert json.loads(again.json()["text"]) in DOCUMENT


def test_texts_that_look_like_names_are_texts(http):
    text = '{"$sha256":"' + "0" * 64 + '"} "schema":"' + "x" * LONG + '"'
    body = json.dumps({"text": text}, separators=(",", ":")).encode()
    assert replace_long_schemas(body) == KnownTexts().expand_body(body, 1 << 20) == body


def test_objects_that_are_no_schemas_are_left_alone():
    body = b'{"arguments":{"$sha256":"' + b"0" * 64 + b'"}}'
    assert KnownTexts().expand_body(body, 1 << 20) == body


def test_a_stream_that_names_an_unknown_text_is_one_error(engine):
    async def read(client):
        return [
            event
            async for event in client.stream_events("/generate", {"schema": {"$sha256": "0" * 64}})
        ]

    with serving(engine) as url, pytest.raises(sgl.SglError, match="is not known"):
        asyncio.run(read(ServerClient(url, None, None, 60, 0)))


def test_a_body_is_not_larger_than_allowed_with_its_schemas(engine):
    schema = json.dumps("x" * LONG)
    body = f'{{"a":{{"schema":{schema}}}}}'.encode()
    with serving(engine, max_body_mb=1) as url, httpx2.Client(base_url=url) as client:
        client.post("/generate", content=body, headers={"x-keep-texts": "1"})
        one = replace_long_schemas(body).decode()
        # it is read, and has no prompt
        assert client.post("/generate", content=one).status_code == 400
        large = client.post("/generate", content="[" + ",".join([one] * 20) + "]")
        assert large.status_code == 413
        assert "with the schemas that it names" in large.json()["error"]["message"]
