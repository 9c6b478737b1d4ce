"""A compiled program and its rows in one request."""

import json
import threading

import msgspec
import pytest

import sglang_lite as sgl
from sglang_lite import wire
from sglang_lite.engine.engine import Engine
from sglang_lite.lang.backend.http_client import ServerClient
from sglang_lite.protocol import Generation, Played, ProgramResult, SamplingParams
from sglang_lite.wire.rows import ROWS_MEDIA_TYPE, FrameReader
from tests.children import in_a_child
from tests.constraints.test_generation import random_model
from tests.server.conftest import serving
from tests.server.programs.writing import LONG, endpoint, interrupted_batch, write
from tests.waiting import until


@sgl.function
def ask(s, question, length=3):
    s += f"Q: {question} A: " + sgl.gen("a", max_tokens=length, ignore_eos=True)
    s += " and " + s["a"] + sgl.gen("b", max_tokens=2, ignore_eos=True)


ROWS = [{"question": f"What is {i}?", "length": i % 3 + 1} for i in range(20)]
PROGRAM = json.loads(wire.encode(ask.compile().compiled.program, form="json"))["data"]


def body(rows, **more):
    return {"version": 1, "program": PROGRAM, "rows": rows, **more}


def told(response):
    """Events by row."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    found = {}
    for line in lines[:-1]:
        data = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
        events = msgspec.json.decode(data["events"], type=list[msgspec.Raw])
        found[int(bytes(data["row"]))] = [wire.decode(bytes(raw), form="json") for raw in events]
    return found


def test_each_row_is_played_and_told_whole(http):
    found = told(http.post("/program/rows", json=body(ROWS, seeds=[7] * 20, window=4)))
    assert sorted(found) == list(range(20))
    for i, events in found.items():
        *played, ended = events
        assert isinstance(ended, ProgramResult)
        assert ROWS[i]["question"] in ended.text or "Q:" not in ended.text
        generations = [each.event for each in played if isinstance(each, Played)]
        assert [type(each) for each in generations] == [Generation] * 2
        assert generations[0].usage.completion_tokens == ROWS[i]["length"]


def test_what_is_wrong_with_a_row_is_its_own(http):
    rows = [{"question": "a"}, {"other": "a"}, {}, {"question": "a", "length": -1}, {"question": "b"}]
    found = told(http.post("/program/rows", json=body(rows)))
    assert [type(found[i][-1]) for i in range(5)] == [
        ProgramResult, sgl.ParameterError, sgl.ParameterError, sgl.ParameterError, ProgramResult,
    ]  # fmt: skip
    assert "/rows/1" in str(found[1][-1])
    assert "max_tokens" in str(found[3][-1])


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"version": 2}, "version"),
        ({"seeds": [1]}, "1 seeds for 2 rows"),
        ({"window": 0}, "not greater than 0"),
        ({"rows": "all"}, "rows"),
        ({"program": {"name": "p", "nodes": [{"kind": "Fill", "argument": "z"}]}}, "not a parameter"),
        ({"program": {"name": "p", "nodes": [{"kind": "Code", "text": "z"}]}}, "/program"),
        ({"program": {"name": "p", "nodes": [], "held": [0]}}, "Python on the caller's side"),
    ],
)  # fmt: skip
def test_a_bad_request_is_refused_before_anything_is_played(http, changes, match):
    response = http.post("/program/rows", json={**body([{"question": "a"}] * 2), **changes})
    assert response.status_code == 400
    assert match in response.text


def test_no_rows_are_no_trouble(http):
    assert told(http.post("/program/rows", json=body([]))) == {}


def test_limits_are_those_of_each_row(http):
    found = told(http.post("/program/rows", json=body([{"question": "a"}] * 3, limits={"tokens": 5})))
    assert {type(events[-1]) for events in found.values()} == {ProgramResult}
    found = told(http.post("/program/rows", json=body([{"question": "a"}] * 3, limits={"tokens": 4})))
    assert {type(events[-1]) for events in found.values()} == {sgl.ParameterError}


@pytest.fixture(scope="module")
def small():
    with Engine.of(random_model(), max_running=8) as engine:
        yield engine


@pytest.fixture(scope="module")
def small_url(small):
    with serving(small) as url:
        yield url


@pytest.fixture(scope="module")
def remote(small_url):
    remote = endpoint(small_url)
    yield remote
    remote.shutdown()


@pytest.mark.slow
def test_an_endpoint_sends_a_batch_as_one_request(remote, monkeypatch):
    asked = []
    pieces = ServerClient.stream_bytes
    monkeypatch.setattr(
        ServerClient, "stream_bytes", lambda self, path, *body: asked.append(path) or pieces(self, path, *body)
    )
    compiled = ask.compile(remote)
    found = compiled.run_batch(ROWS, backend=remote, seed=3)
    assert asked == ["/program/rows"]
    want = ask.run_batch(ROWS, backend=remote, seed=3)
    assert [(s.text(), s["a"], s["b"]) for s in found] == [(s.text(), s["a"], s["b"]) for s in want]


def test_a_compiled_run_is_one_request(remote, monkeypatch):
    asked = []
    events = ServerClient.stream_events

    def noted(self, path, body, *more):
        asked.append((path, body["open"], len(body["program"]["nodes"])))
        return events(self, path, body, *more)

    monkeypatch.setattr(ServerClient, "stream_events", noted)
    found = ask.compile(remote).run("Why", backend=remote, seed=3).text()
    assert asked == [("/program", False, 7)]  # it takes nothing more
    assert found == ask.run("Why", backend=remote, seed=3).text()


@pytest.mark.slow
def test_a_batch_may_be_read_slowly_in_order_or_left(remote):
    compiled = ask.compile(remote)
    want = [s.text() for s in ask.run_batch(ROWS, backend=remote, seed=3)]
    slow = compiled.run_batch(ROWS, backend=remote, seed=3, generator_style=True, num_threads=2)
    assert [s.text() for s in slow] == want
    left = compiled.run_batch(ROWS, backend=remote, seed=3, generator_style=True, num_threads=2)
    assert next(left).text() == want[0]
    left.close()
    assert ask.run("a", backend=remote, seed=3).text()


def test_a_bad_row_and_a_timeout_are_outcomes_of_rows(remote):
    compiled = ask.compile(remote)
    rows = [{"question": "a"}, {"question": "a", "length": "many"}, {"question": "b"}]
    good, bad, other = compiled.run_batch(rows, backend=remote, on_error="return")
    assert isinstance(bad, sgl.ParameterError)
    assert isinstance(good["a"], str)
    assert isinstance(other["b"], str)
    late = compiled.run_batch(rows[:1], backend=remote, on_error="return", timeout=1e-6)
    assert isinstance(late[0], sgl.RequestTimeoutError)


def when_running(engine, call):
    """Calls, on a thread, when the engine has something to do."""

    def wait():
        until(lambda: engine.stats()["running"])
        call()

    threading.Thread(target=wait).start()


def test_an_interrupt_ends_a_batch_there(small_url, small):
    assert in_a_child(interrupted_batch, small_url)
    until(lambda: not small.stats()["running"])


@sgl.function
def around(s, found):
    found += write.compile(s.branch.backend).run_batch(LONG, on_error="return", max_new_tokens=400)


def test_a_batch_inside_a_body_ends_with_the_run(remote, small):
    found = []
    state = around.run(found, backend=remote, stream=True)
    when_running(small, state.cancel)
    until(lambda: len(found) == len(LONG))
    assert sgl.RequestAbortedError in {type(each) for each in found}
    until(lambda: not small.stats()["running"])
    late = []
    around.run(late, backend=remote, timeout=0.01)
    assert {type(each) for each in late} == {sgl.RequestTimeoutError}
    until(lambda: not small.stats()["running"])


@pytest.mark.slow
def test_rows_wait_for_room_and_take_no_more_than_there_is():
    """Of an engine that takes two requests, which others have first."""
    with Engine.of(random_model(), max_running=1, max_queued=1) as engine, serving(engine) as url:
        remote = sgl.RuntimeEndpoint(url, retries=0)
        compiled = write.compile(remote)
        held = [engine.submit("ab", SamplingParams(max_tokens=400, ignore_eos=True), sink=print) for _ in range(2)]
        states: list = []
        batch = threading.Thread(
            target=lambda: states.extend(compiled.run_batch(LONG[:6], backend=remote, max_new_tokens=3, seed=1))
        )
        batch.start()
        for ticket in held:
            ticket.abort()
        batch.join()
        assert len({state.text() for state in states}) == 1
        assert len(states) == 6
        remote.shutdown()


@pytest.mark.slow
def test_rows_are_told_as_events_and_in_frames(http):
    asked = body(ROWS, seeds=[7] * 20, window=4)
    events = told(http.post("/program/rows", json=asked))
    response = http.post("/program/rows", json={**asked, "form": "frames"})
    assert response.headers["content-type"] == ROWS_MEDIA_TYPE
    reader = FrameReader()
    frames = dict(reader.feed(response.content))
    assert reader.ended
    assert frames.keys() == events.keys()
    for i in range(20):
        texts, same = ([each.event.text for each in found[i] if isinstance(each, Played)] for found in (events, frames))
        assert texts == same
    assert http.post("/program/rows", json={**asked, "form": "xml"}).status_code == 400
