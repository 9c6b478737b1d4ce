"""The recount of the cache's pages while an engine is idle."""

import logging

import pytest

from sglang_lite import Engine
from sglang_lite.runtime.core import recount
from tests.runtime.scripted import SteppedEngine, loaded
from tests.waiting import until

SIZES = dict(max_running=2, max_total_tokens=256, page_size=4)


@pytest.fixture
def often(monkeypatch):
    """Recounts without the pauses between them."""
    monkeypatch.setattr(recount, "EVERY_S", 0.0)
    monkeypatch.setattr(recount, "QUIET_S", 0.001)


def test_an_idle_engine_tells_of_pages_without_an_owner_and_logs_them_once(often, caplog):
    with Engine.of(loaded(), **SIZES) as engine:
        engine.generate("abc", {"max_new_tokens": 4})
        assert engine.stats()["pages_without_owner"] == 0
        loop = engine.core.loop
        with caplog.at_level(logging.ERROR, "sglang_lite"):
            loop.inbox.call_and_wait(lambda: loop.scheduler.store.pool.allocate(3))
            until(lambda: engine.stats()["pages_without_owner"] == 3)
            engine.generate("abc", {"max_new_tokens": 4})
            until(lambda: engine.stats()["pages_without_owner"] == 3)
    (line,) = [each.getMessage() for each in caplog.records if "owner" in each.getMessage()]
    assert line.startswith("3 of 64 pages")


@pytest.mark.parametrize("window", [None, 8])
def test_pages_of_running_requests_and_of_prefixes_have_owners(window):
    engine = SteppedEngine(model=loaded(window=window), **SIZES)
    events = [engine.start(prompt)[1] for prompt in ("abcabcabc", "abcabcd", "efghij")]
    while engine.step():
        engine.loop.recount.run()
        assert engine.loop.recount.lost == 0
    assert all(events)
    engine.check_empty()
    (engine.store.windows or engine.store).pool.allocate(1)
    engine.loop.recount.run()
    assert engine.loop.recount.lost == 1
