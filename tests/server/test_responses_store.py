"""The store of responses, by its limits."""

import pytest

from sglang_lite.server.errors import NotFoundError
from sglang_lite.server.http.event_log import EventLog
from sglang_lite.server.responses_store import PACK, ResponseStore, StoredResponse


def response(id, log=None):
    return StoredResponse({"id": id, "status": "in_progress", "output": []}, PACK([]), 0, log)


def test_the_events_of_a_running_stream_count_for_the_limit():
    store, streamed = ResponseStore(10, 1000), response("streamed", EventLog())
    store.add_response("key", response("old"))
    store.add_response("key", streamed)
    store.add_events("key", streamed, [b"x" * 500])
    assert store.find_response("key", "old").id == "old"
    store.find_response("key", "streamed")
    store.add_events("key", streamed, [b"x" * 300, b"x" * 120])
    with pytest.raises(NotFoundError):
        store.find_response("key", "old")
    assert store.find_response("key", "streamed") is streamed
    store.add_events("key", streamed, [b"x" * 500])
    assert len(store) == 0
    store.add_events("key", streamed, [b"x" * 500])  # its reader still gets it
    assert streamed.log.size == 1920


def test_a_stream_that_has_ended_counts_once():
    store, streamed = ResponseStore(10, 1000), response("streamed", EventLog())
    store.add_response("key", streamed)
    store.add_events("key", streamed, [b"x" * 800])
    store.update_content("key", streamed, streamed.content)
    assert streamed.bytes < 1000
    assert store.find_response("key", "streamed") is streamed
