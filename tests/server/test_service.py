"""Behaviour that all protocols of the server share."""

import asyncio

import httpx2
import pytest

from sglang_lite.protocol import EngineClosedError
from sglang_lite.server.service import Service
from sglang_lite.server.settings import ServerSettings
from tests.server.conftest import serving
from tests.server.scripted import Scripted


def test_a_lookup_that_is_cancelled_as_it_ends_is_cancelled(engine, monkeypatch):
    """A watcher that missed its cancellation would watch for ever, and the server's end would wait
    for it.
    """

    async def lookup():
        loop, post = asyncio.get_running_loop(), asyncio.get_running_loop().call_soon_threadsafe

        def settle_and_cancel(settle, *result):
            settle(*result)
            task.cancel()

        def posted(*call):
            post(settle_and_cancel, *call)

        monkeypatch.setattr(loop, "call_soon_threadsafe", posted)
        task = asyncio.ensure_future(Service(engine, ServerSettings()).call_engine(lambda: 1))
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(lookup())


def test_a_server_is_healthy_from_its_start_on_as_long_as_the_engine_may_give_no_sign(
    engine, monkeypatch
):
    """`/health` may be asked before the engine's loop has given its first sign."""

    async def started():
        service = Service(engine, ServerSettings())
        signs = asyncio.Event()

        async def call_engine(call, **_):
            await signs.wait()

        monkeypatch.setattr(service, "call_engine", call_engine)
        monkeypatch.setattr(service.async_engine, "results", lambda _: signs.wait())
        await service.start()
        service.check_health()
        await service.stop()
        # that has not been started
        with pytest.raises(EngineClosedError, match="does not respond"):
            Service(engine, ServerSettings()).check_health()

    asyncio.run(started())


MESSAGES = [{"role": "user", "content": "x"}]
PROTOCOLS = {
    "/v1/chat/completions": {"messages": MESSAGES, "stream_options": {"include_usage": True}},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9, "thinking": {"type": "adaptive"}},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", PROTOCOLS)
def test_the_loop_does_not_count_the_tokens_of_long_reasoning(engine, monkeypatch, route, stream):
    encode, on_loop = engine.tokenizer.encode_spans, []

    def watched(spans, **options):
        spans = list(spans)
        if sum(len(span.text) for span in spans) > 10_000:
            try:
                on_loop.append(asyncio.get_running_loop() is not None)
            except RuntimeError:
                on_loop.append(False)
        return encode(spans, **options)

    monkeypatch.setattr(engine.tokenizer, "encode_spans", watched)
    said = f"<think>{'so ' * 5000}</think>yes"
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{# <think> </think> #}"
    body = {
        key: value for key, value in PROTOCOLS[route].items() if stream or key != "stream_options"
    }
    with serving(Scripted(engine, [said[:700], said[700:]], template=template)) as url:
        text = httpx2.post(
            url + route, json={**body, "model": engine.model_name, "stream": stream}, timeout=60
        ).text
    assert '_tokens":15000' in text
    assert on_loop == [False]
