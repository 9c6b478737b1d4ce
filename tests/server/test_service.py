"""Behaviour that all protocols of the server share."""

import asyncio

import pytest

from sglang_lite.protocol import EngineClosedError
from sglang_lite.server.service import Service
from sglang_lite.server.settings import ServerSettings


def test_a_lookup_that_is_cancelled_as_it_ends_is_cancelled(engine, monkeypatch):
    """A watcher that missed its cancellation would watch for ever, and the server's end would wait for it."""

    async def lookup():
        loop, post = asyncio.get_running_loop(), asyncio.get_running_loop().call_soon_threadsafe

        def settle_and_cancel(settle, *result):
            settle(*result)
            task.cancel()

        def posted(*call):
            post(settle_and_cancel, *call)

        monkeypatch.setattr(loop, "call_soon_threadsafe", posted)
        task = asyncio.ensure_future(Service(engine, ServerSettings()).ask(lambda: 1))
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(lookup())


def test_a_server_is_healthy_from_its_start_on_as_long_as_the_engine_may_give_no_sign(engine, monkeypatch):
    """`/health` may be asked before the engine's loop has given its first sign."""

    async def started():
        service = Service(engine, ServerSettings())
        signs = asyncio.Event()

        async def ask(call, **_):
            await signs.wait()

        monkeypatch.setattr(service, "ask", ask)
        monkeypatch.setattr(service, "_warm_up", signs.wait)
        await service.start()
        service.check_health()
        await service.stop()
        with pytest.raises(EngineClosedError, match="no sign"):  # that has not been started
            Service(engine, ServerSettings()).check_health()

    asyncio.run(started())
