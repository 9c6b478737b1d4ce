"""Whole programs on a server: what is sent, what is told, and connections that break."""

import asyncio
import threading
from urllib.parse import urlsplit

import pytest

import sglang_lite as sgl
from sglang_lite import Engine, wire
from sglang_lite.lang.backend.local import LocalBackend
from sglang_lite.lang.chat_template import get_chat_template
from sglang_lite.lang.concurrency.loop import executor
from sglang_lite.program.nodes import Gen, Mark, Rollback, Text
from sglang_lite.protocol import Delta, Generation, Played, ProgramResult, SamplingParams, Usage
from tests.conformance.test_random_programs import model
from tests.lang.backend.cutting_proxy import CuttingProxy
from tests.lang.backend.native_server import CUT, DONE, NativeServer, event
from tests.server.conftest import serving
from tests.waiting import until

OURS = {"sglang_lite": {"program": True, "output_ids": True, "records": True}}


@pytest.fixture
def server():
    server = NativeServer()
    # A program is closed in a request of its own if its last node is told of before it ends.
    server.answers |= {
        "/server_info": OURS,
        "GET /program": (405, {}),
        "POST /program/prog-1/answer": {"id": "prog-1"},
    }
    yield server
    server.close()


@pytest.fixture
def backend(server):
    backend = sgl.RuntimeEndpoint(server.url, retries=2)
    assert backend.plays_programs
    yield backend
    backend.shutdown()


def told(*messages):
    """Events of a program."""
    return [event(wire.encode(each)) for each in messages]


def played(place, text, name=None):
    return Played((place,), name, Generation(text, finish_reason="stop"))


@pytest.fixture
def two():
    """A program of two generations. The loop that sends them waits until both are added, however
    slow that is.
    """
    added = threading.Event()

    @sgl.function
    def two(s):
        s += "A" + sgl.gen("x", max_tokens=2) + "B" + sgl.gen("y", max_tokens=2)
        added.set()

    executor().post(added.wait, 60)
    return two


def test_what_is_there_at_once_is_one_request(server, backend, two):
    server.answers["POST /program"] = [
        *told(played(1, "x"), played(3, "y"), Usage(), ProgramResult("AxBy")),
        DONE,
    ]
    state = two.run(backend=backend)
    assert (state["x"], state["y"], state.text()) == ("x", "y", "AxBy")
    first = server.bodies("/program")[0]
    assert first["version"] == wire.VERSION
    assert [node["kind"] for node in first["program"]["nodes"]] == ["Text", "Gen", "Text", "Gen"]
    assert all("seed" in node["params"] for node in first["program"]["nodes"][1::2])


def test_what_comes_later_is_sent_to_the_program_in_order(server, backend):
    arrived = []

    def answer(body):
        arrived.append(body)
        return {"id": "prog-1"}

    def wait():
        while not arrived:
            pass
        return told(played(3, "y"))[0]

    server.answers["POST /program/prog-1/answer"] = answer
    server.answers["POST /program"] = [
        *told(played(1, "x")),
        wait,
        *told(ProgramResult("AxBy")),
        DONE,
    ]

    @sgl.function
    def program(s):
        s += "A" + sgl.gen("x", max_tokens=2)
        s += s["x"] * 2 + sgl.gen("y", max_tokens=2)

    state = program.run(backend=backend)
    assert state["y"] == "y"
    assert state.text() == "Axxxy"
    assert [node["kind"] for node in arrived[0]["answers"][0]["nodes"]] == ["Text", "Gen"]
    assert arrived[0]["answers"][0]["path"] == []
    assert server.bodies("/program")[0]["open"] is True


def test_a_program_that_breaks_off_is_played_again_and_nothing_is_told_twice(server, backend, two):
    parts = iter([
        [*told(Played((1,), "x", Delta("he")), Played((1,), "x", Delta("ll"))), CUT],
        [*told(Played((1,), "x", Delta("hel")), Played((1,), "x", Delta("lo")), played(1, "hello", "x")), CUT],
        [*told(Played((1,), "x", Delta("hello")), played(1, "hello", "x"), Played((3,), "y", Delta("y")),
               played(3, "y", "y"), ProgramResult("")), DONE],
    ])  # fmt: skip
    server.answers["POST /program"] = lambda body: next(parts)
    state = two.run(backend=backend, stream=True)
    assert list(state.text_iter()) == ["A", "he", "ll", "o", "B", "y"]
    first, *again = server.bodies("/program")
    assert again == [first] * 2


def test_what_is_added_after_the_body_is_streamed_although_the_program_is_not(server, backend):
    deltas = [Played((3,), "y", Delta(text)) for text in ("he", "llo")]
    events = told(played(1, "x", "x"), *deltas, played(3, "hello", "y"), ProgramResult("AxBhello"))
    server.answers["POST /program"] = [*events, DONE]

    @sgl.function
    def program(s):
        s += "A" + sgl.gen("x", max_tokens=2)

    added = threading.Event()
    executor().post(added.wait, 60)  # the loop that sends the program
    state = program.run(backend=backend)
    state += "B" + sgl.gen("y", max_tokens=2)
    added.set()
    assert list(state.text_iter("y")) == ["he", "llo"]
    assert state.text() == "AxBhello"
    body = server.bodies("/program")[0]
    assert body["stream"] is False
    assert [node.get("stream", False) for node in body["program"]["nodes"]] == [
        False,
        False,
        False,
        True,
    ]


def test_a_server_that_stays_away_fails_what_is_read(server, backend, two):
    server.answers["POST /program"] = [CUT]
    with pytest.raises(sgl.BackendError, match="connection failed"):
        two.run(backend=backend)["x"]
    assert len(server.bodies("/program")) == 3


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ([event(b"{"), DONE], "wire"),
        (
            [event({"version": 1, "type": "Prompt", "data": {"spans": []}}), DONE],
            "not an event of a program",
        ),
        ([event({"version": 9, "type": "Played", "data": {}}), DONE], "version 9"),
        ([DONE], "ended before"),
        (
            (
                400,
                {
                    "error": {
                        "message": "nodes: too many",
                        "param": "nodes",
                        "err_type": "ParameterError",
                    }
                },
            ),
            "too many",
        ),
        ([*told(sgl.ModelError("broken weights")), DONE], "broken weights"),
    ],
)
def test_what_is_no_answer_fails_what_is_read(server, backend, two, answer, said):
    server.answers["POST /program"] = answer
    with pytest.raises(sgl.SglError, match=said):
        two.run(backend=backend)["x"]


def test_a_node_that_fails_fails_its_readers(server, backend, two):
    failed = Played((1,), "x", sgl.ConstraintError("no continuation"))
    server.answers["POST /program"] = [*told(failed, sgl.ConstraintError("no continuation")), DONE]
    with pytest.raises(sgl.SglError, match="no continuation"):
        two.run(backend=backend)["x"]


def test_a_selection_by_itself_is_a_program_of_one_node(server, backend):
    scores = [
        {"text": c, "token_ids": [1], "logprobs": [-float(i)]} for i, c in enumerate(["a", "b"])
    ]
    message = {"version": 1, "type": "Played", "data": {
        "path": [0], "name": None, "event": {"kind": "Selection", "scores": scores}}}  # fmt: skip
    server.answers["POST /program"] = [event(message), *told(ProgramResult("")), DONE]

    @sgl.function
    def program(s):
        s += "Q" + sgl.select("c", ["b", "a"])

    assert program.run(backend=backend, push_down=False)["c"] in ("a", "b")
    (body,) = server.bodies("/program")
    assert body["prompt"] == {"spans": [{"text": "Q"}]}
    assert body["program"]["nodes"][0]["method"] is None


@sgl.function
def long_program(s, i):
    s += (
        f"a{i}"
        + sgl.gen("a", max_tokens=8)
        + "b"
        + sgl.gen("b", regex="[ab]{3,9}", temperature=1.0)
    )
    s += sgl.select("c", ["ab", "ba", "b"])
    forks = s.fork(2)
    forks += "f" + sgl.gen("f", max_tokens=6, temperature=1.0, ignore_eos=True)
    s += forks[0]["f"] + "+" + forks[1]["f"]
    s += sgl.gen("n", dtype=int, max_tokens=4)
    s += sgl.gen(
        "r",
        max_tokens=3,
        temperature=1.0,
        ignore_eos=True,
        check=lambda text: len(set(text)) > 2,
        retries=9,
    )
    s += sgl.select("m", ["k", "l", "o"], multi=True) + sgl.gen("e", max_tokens=4)


def test_programs_whose_connections_are_cut_come_to_the_same():
    with Engine.of(model(), deterministic=True) as engine, serving(engine) as url:
        local = LocalBackend(engine)
        with CuttingProxy(urlsplit(url).port, 6000) as proxy:
            remote = sgl.RuntimeEndpoint(proxy.url)
            local.chat_template = remote.chat_template = get_chat_template("chatml")
            for i in range(8):
                expected = long_program.run(i, backend=local, seed=i)
                state = long_program.run(i, backend=remote, seed=i, stream=i % 2 == 0)
                if i % 2 == 0:
                    assert "".join(state.text_iter()) == expected.text()
                assert state.text() == expected.text()
                assert {n: state[n] for n in "abcnrme"} == {n: expected[n] for n in "abcnrme"}
            assert proxy.cuts >= 3
            remote.shutdown()


def test_a_program_that_is_cancelled_ends_at_the_server():
    with Engine.of(model(), deterministic=True, max_running=4) as engine, serving(engine) as url:
        remote = sgl.RuntimeEndpoint(url)

        @sgl.function
        async def program(s):
            s += "ab" + sgl.gen(
                "x", max_tokens=900, ignore_eos=True, n=64
            )  # has not ended, however late it is looked for
            await s.get("x")

        async def cancel():
            task = asyncio.ensure_future(program.arun(backend=remote))
            await asyncio.to_thread(until, lambda: engine.stats()["running"])
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(cancel())
        until(lambda: engine.stats()["running"] == 0)
        remote.shutdown()


def test_behind_a_gateway_that_forwards_no_other_fields_a_node_is_a_program_of_completions(server):
    del server.answers["/server_info"], server.answers["GET /program"]
    server.answers["/get_server_info"] = {"workers_count": 2}
    server.answers["/get_model_info"] = {"model_path": "m-chatml", **OURS}
    parts = iter([
        [*told(Played((0,), None, Delta("he"))), event({"error": {"message": "worker gone", "code": 502}}), DONE],
        (503, {"error": {"message": "no workers"}}),
        [*told(Played((0,), None, Delta("hello")), played(0, "hello"), Usage(), ProgramResult("hello")), DONE],
        [*told(played(0, "ab"), ProgramResult("ab")), DONE],
    ])  # fmt: skip
    server.answers["/v1/completions"] = lambda body: next(parts)
    backend = sgl.RuntimeEndpoint(server.url)
    assert not backend.plays_programs

    @sgl.function
    def program(s):
        s += (
            "A"
            + sgl.gen("x", max_tokens=2)
            + "B"
            + sgl.gen("y", constraint=sgl.Grammar('start: "ab"'))
        )

    state = program.run(backend=backend, stream=True)
    assert list(state.text_iter()) == ["A", "he", "llo", "B", "ab"]
    first, again, *_ = bodies = server.bodies("/v1/completions")
    assert len(bodies) == 4
    assert first == again
    assert (first["model"], first["prompt"], first["stream"]) == ("m-chatml", "A", True)
    assert first["program"]["prompt"]["spans"] == [{"text": "A"}]
    assert first["program"]["program"]["nodes"][0]["kind"] == "Gen"
    backend.shutdown()


def test_a_drop_before_the_first_request_ends_only_what_stands_before_it():
    """The first request is sent a moment later, with all that was added meanwhile."""
    events, ended = [], threading.Event()

    def sink(event):
        events.append(event)
        if not isinstance(event, Played):
            ended.set()

    params = SamplingParams(max_tokens=4, ignore_eos=True)
    with Engine.of(model()) as engine, serving(engine) as url:
        backend = sgl.RuntimeEndpoint(url)
        program = backend.open_program(sink, stream=False)
        program.extend((), (Text("ab"), Mark(), Gen("x", params)))
        program.drop_branch(())
        program.extend((), (Rollback(1), Gen("y", params)))
        program.close()
        assert ended.wait(60)
        backend.shutdown()
    assert isinstance(events[-1], ProgramResult), events
    assert (4,) in [each.path for each in events[:-1]]
