"""Programs over HTTP: what the engine plays, as data."""

import json
import threading

import httpx2
import pytest

from sglang_lite import wire
from sglang_lite.program.nodes import (
    Fork,
    Gen,
    Join,
    Program,
    Select,
    Text,
)
from sglang_lite.protocol import (
    Delta,
    Generation,
    ParameterError,
    Played,
    ProgramResult,
    Prompt,
    SamplingParams,
    Span,
    Usage,
)
from tests.server.conftest import serving
from tests.waiting import until

FOUR = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
PROGRAM = Program((
    Gen("a", FOUR),
    Text(" and "),
    Fork(((Text("x"), Gen("b", FOUR)), (Text("y"), Gen("c", FOUR)))),
    Join(),
    Select("d", ("yes", "no")),
))  # fmt: skip


def data_of(record):
    return json.loads(wire.encode(record))["data"]


def body(program=PROGRAM, prompt="a quick", **more):
    return {"version": 1, "prompt": prompt, "program": data_of(program), **more}


def messages(response):
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [wire.decode(line.encode()) for line in lines[:-1]]


def without_times(event):
    """Content of an event, but for its usage, and why it was not cached: that depends on what was
    there.
    """
    told = data_of(event)["event"]
    told.pop("usage", None)
    told["meta"] = {
        name: value for name, value in told.get("meta", {}).items() if name != "cache_miss"
    }
    return event.path, event.name, told


def test_a_program_brings_what_the_engine_plays(http, engine):
    found = http.post("/program", json=body()).json()
    result, played = engine.play("a quick", PROGRAM)
    assert found["result"] == {"text": result.text}
    told = [wire.decode(json.dumps({"version": 1, "type": "Played", "data": each}).encode())
            for each in found["played"]]  # fmt: skip
    assert sorted(map(without_times, told), key=str) == sorted(map(without_times, played), key=str)


def test_usage_is_told_of_each_segment_and_in_total(http):
    usage = http.post("/program", json=body()).json()["usage"]
    segments = usage["segments"]
    assert next(each["name"] for each in segments) == "a"
    assert {each["name"] for each in segments} == {"a", "b", "c", "d"}
    assert usage["completion_tokens"] == 12
    assert usage["prompt_tokens"] == sum(each["prompt_tokens"] for each in segments)


def test_a_stream_has_deltas_then_usage_and_the_text(http, engine):
    response = http.post("/program", json=body(stream=True))
    *events, usage, result = messages(response)
    assert result == engine.play("a quick", PROGRAM)[0]
    assert isinstance(usage, Usage)
    assert usage.completion_tokens == 12
    assert response.headers["x-program-id"].startswith("prog-")
    for path in {each.path for each in events if isinstance(each.event, Generation)}:
        texts = [
            each.event.text
            for each in events
            if each.path == path and isinstance(each.event, Delta)
        ]
        (whole,) = [
            each.event.text
            for each in events
            if each.path == path and isinstance(each.event, Generation)
        ]
        assert whole.startswith("".join(texts))
    assert any(isinstance(each.event, Delta) for each in events)


def test_a_prompt_may_be_a_record(http, engine):
    prompt = Prompt((Span("a "), Span("quick", special=False)))
    program = Program((Gen("a", FOUR),))
    found = http.post("/program", json=body(program, data_of(prompt))).json()
    assert found["result"]["text"] == engine.play(prompt, program)[0].text


def test_a_failed_branch_is_told_and_the_rest_goes_on(http):
    odd = Gen("b", SamplingParams(max_tokens=3000))  # longer than the model takes
    program = Program((Fork(((Text("x" * 6000), odd), (Gen("c", FOUR),))),))
    found = http.post("/program", json=body(program))
    assert found.status_code == 200
    kinds = {each["name"]: each["event"]["kind"] for each in found.json()["played"]}
    assert kinds == {"b": "Error", "c": "Generation"}


def test_a_failed_main_branch_is_the_status_beside_what_was_played(http):
    program = Program((Gen("a", FOUR), Text("x" * 6000), Gen("b", FOUR)))
    response = http.post("/program", json=body(program))
    found = response.json()
    assert response.status_code == 400
    assert found["failure"]["type"] == "ParameterError"
    assert found["error"]["type"] == "invalid_request_error"
    assert [each["event"]["kind"] for each in found["played"]] == ["Generation", "Error"]
    streamed = messages(http.post("/program", json=body(program, stream=True)))
    assert type(streamed[-1]).__name__ == "ParameterError"


LONG = Program((Gen("a", SamplingParams(max_tokens=2000)),))


@pytest.mark.parametrize(
    ("changed", "parameter"),
    [
        ({"version": 2}, "/version"),
        ({"version": True}, "/version"),
        ({"version": None}, "version"),
        ({"promt": "a"}, "promt"),
        (
            {"program": {"nodes": [{"kind": "Text", "text": "a"}, {"kind": "Run"}]}},
            "/program/nodes/1/kind",
        ),
        ({"program": {"nodes": [{"kind": "Text", "text": 3}]}}, "/program/nodes/0/text"),
        (
            {"program": {"nodes": [{"kind": "Select", "name": None, "choices": []}]}},
            "/program/nodes/0/choices",
        ),
        ({"program": {"nodes": [{"kind": "ImagePart", "image": {}}]}}, "/program/nodes/0"),
        (
            {
                "program": data_of(
                    Program((Fork(((), (Gen(None, SamplingParams(logit_bias=((10**6, 1.0),))),))),))
                )
            },
            "/program/nodes/0/branches/1/0/params/logit_bias",
        ),
        ({"prompt": {"spans": [{"txt": ""}]}}, "/prompt/spans/0"),
        ({"limits": {"nodes": 2}}, "/program/nodes/2"),
        ({"limits": {"branches": 1}}, "/program/nodes/2/branches"),
        ({"limits": {"tokens": 7}}, "/program/nodes/2/branches/0/1/params/max_tokens"),
        ({"limits": {"tokens": 0}}, "/limits/tokens"),
        ({"open": True}, "/prompt"),
        ({"close": True}, "/close"),
    ],
)
def test_what_is_wrong_is_named_before_anything_starts(http, engine, changed, parameter):
    before = engine.stats()["programs_opened"]
    response = http.post("/program", json={**body(), **changed})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == parameter
    assert engine.stats()["programs_opened"] == before


def test_the_servers_own_limits_hold_above_the_clients(engine):
    with serving(engine, program_max_nodes=3) as url:
        response = httpx2.post(f"{url}/program", json=body(limits={"nodes": 100}), timeout=60)
        assert response.json()["error"]["param"] == "/program/nodes/2/branches/0/0"


def test_a_million_nodes_are_refused(http):
    nodes = [{"kind": "Mark"}] * 100_000
    assert http.post("/program", json=body() | {"program": {"nodes": nodes}}).status_code == 400


def test_a_program_that_takes_too_long_ends(http):
    program = Program((Gen("a", SamplingParams(max_tokens=1900, temperature=0, ignore_eos=True)),))
    response = http.post("/program", json=body(program, limits={"seconds": 0.05}))
    assert response.status_code == 504
    assert response.json()["failure"]["type"] == "RequestTimeoutError"


def test_a_client_that_leaves_ends_its_program(url, engine):
    params = SamplingParams(max_tokens=1900, temperature=0, ignore_eos=True)
    program = Program((Fork(tuple((Gen(f"a{i}", params),) for i in range(64))), Join()))
    before = engine.stats()["steps"]
    with httpx2.stream(
        "POST", f"{url}/program", json=body(program, stream=True), timeout=60
    ) as response:
        next(response.iter_bytes())
    until(lambda: not engine.stats()["running"] and not engine.stats()["waiting"])
    assert engine.stats()["steps"] - before < 64 // 8 * 1900  # of eight branches at a time


def test_a_program_is_a_field_of_completions(http, engine):
    result = engine.play("a quick", PROGRAM)[0]
    asked = {"model": engine.model_name, "prompt": "", "program": body()}
    assert http.post("/v1/completions", json=asked).json()["result"]["text"] == result.text
    # by gateways
    added = {"echo": False, "ignore_eos": False, "no_stop_trim": False, "skip_special_tokens": True}
    assert (
        http.post("/v1/completions", json={**asked, **added}).json()["result"]["text"]
        == result.text
    )
    streamed = http.post(
        "/v1/completions", json={**asked, "program": body(stream=True), "stream": True}
    )
    assert messages(streamed)[-1] == result
    for changed, parameter in (
        ({"stream": True}, "stream"),
        ({"temperature": 0.5}, "temperature"),
        ({"program": {**body(), "version": 2}}, "/program/version"),
        ({"program": {**body(), "limits": {"nodes": 1}}}, "/program/program/nodes/1"),
    ):
        response = http.post("/v1/completions", json={**asked, **changed})
        assert (response.status_code, response.json()["error"]["param"]) == (400, parameter)


# ------------------------------------------------------------------------------- programs that grow


class Growing:
    """A client of a program that is open."""

    def __init__(self, http, program, **more):
        self._http = http
        self._stream = http.stream("POST", "/program", json=body(program, "", open=True, **more))
        self._response = self._stream.__enter__()
        self.id = self._response.headers["x-program-id"]
        self._lines = self._response.iter_lines()

    def next(self):
        line = next(line for line in self._lines if line)
        return None if line == "data: [DONE]" else wire.decode(line.removeprefix("data: ").encode())

    def answer(self, *answers, **more):
        return self._http.post(
            f"/program/{self.id}/answer", json={"version": 1, "answers": answers, **more}
        )

    def leave(self):
        self._stream.__exit__(None, None, None)


def nodes(*given):
    return data_of(Program(given))["nodes"]


def test_a_judged_node_waits_for_its_verdict(http, engine):
    growing = Growing(
        http,
        Program(
            (Text("a quick"), Gen("a", FOUR, judged=True), Text(" "), Fork(((Gen("b", FOUR),),)))
        ),
    )
    judged = growing.next()
    assert isinstance(judged, Played)
    assert judged.path == (1,)
    verdict = {"path": [], "place": 1, "verdict": {"text": [{"text": " [ok]"}]}}
    assert growing.answer(verdict).json() == {"id": growing.id}
    assert growing.next().name == "b"
    assert (
        growing.answer({"path": [3, 0], "nodes": nodes(Text("!"))}, close=True).status_code == 200
    )
    usage = growing.next()
    assert isinstance(usage, Usage)
    assert usage.completion_tokens == 8
    assert [growing.next(), growing.next()] == [ProgramResult("a quick [ok] "), None]
    growing.leave()
    assert growing.answer().status_code == 404


def test_a_node_is_streamed_although_its_program_is_not(http, engine):
    growing = Growing(
        http, Program((Text("a quick"), Gen("a", FOUR), Gen("b", FOUR, stream=True))), close=True
    )
    told = list(iter(growing.next, None))
    growing.leave()
    whole = {
        each.name: each.event.text
        for each in told
        if isinstance(getattr(each, "event", None), Generation)
    }
    deltas = [each for each in told if isinstance(getattr(each, "event", None), Delta)]
    assert {each.name for each in deltas} == {"b"}
    assert "".join(each.event.text for each in deltas) == whole["b"]


def test_a_parameter_out_of_range_fails_its_branch_of_an_open_program(http):
    odd = Gen("a", SamplingParams(temperature=5000))
    growing = Growing(http, Program((Text("a quick"), Fork(((odd,), ())))))
    found = growing.next()
    assert (found.path, type(found.event)) == ((1, 0, 0), ParameterError)
    more = [{"path": [1, 1], "nodes": nodes(odd)}, {"path": [], "nodes": nodes(Gen("b", FOUR))}]
    assert growing.answer(*more, close=True).status_code == 200
    kinds = {each.name: type(each.event) for each in (growing.next(), growing.next())}
    assert kinds == {"a": ParameterError, "b": Generation}
    growing.leave()


def test_an_open_program_may_be_whole(http):
    growing = Growing(http, Program((Text("a quick"), Gen("a", FOUR))), close=True)
    assert growing.next().name == "a"
    assert isinstance(growing.next(), Usage)
    assert isinstance(growing.next(), ProgramResult)
    growing.leave()


def test_a_program_that_told_its_pause_continues(http):
    growing = Growing(http, Program((Text("a quick"), Gen("a", FOUR))))
    assert growing.next().name == "a"
    assert growing.answer({"path": [], "pause": 5}).status_code == 200
    assert (
        growing.answer(
            {"path": [], "nodes": nodes(Text("b"), Gen("b", FOUR))}, close=True
        ).status_code
        == 200
    )
    assert growing.next().name == "b"
    assert isinstance(growing.next(), Usage)
    assert isinstance(growing.next(), ProgramResult)
    growing.leave()


def test_a_program_that_winds_down_gets_its_shortest_answers(http):
    endless = SamplingParams(max_tokens=1900, temperature=0, ignore_eos=True)
    growing = Growing(http, Program((Text("a quick"), Gen("a", endless))))
    assert growing.answer({"path": [], "wind_down": True}).status_code == 200
    assert (
        growing.answer({"path": [], "nodes": nodes(Gen("b", endless))}, close=True).status_code
        == 200
    )
    first, second = growing.next().event, growing.next().event
    assert (first.finish_reason, second.finish_reason, second.usage.completion_tokens) == (
        "length",
        "length",
        1,
    )
    assert first.usage.completion_tokens < 1900
    assert isinstance(growing.next(), Usage)
    assert isinstance(growing.next(), ProgramResult)
    growing.leave()


def test_a_branch_that_was_dropped_is_no_more(http, engine):
    endless = Gen("a", SamplingParams(max_tokens=1900, temperature=0, ignore_eos=True))
    growing = Growing(http, Program((Text("a quick"), Fork(((endless,),)))))
    assert growing.answer({"path": [1, 0], "drop": True}, close=True).status_code == 200
    assert isinstance(growing.next(), Usage)
    assert growing.next() == ProgramResult("a quick")
    growing.leave()


def test_answers_are_checked_before_any_is_taken(http):
    growing = Growing(http, Program((Text("a"), Gen("a", FOUR))), limits={"nodes": 4, "tokens": 8})
    for answers, parameter in (
        ([{"path": [0], "drop": True}], "/answers/0/path"),
        ([{"path": []}], "/answers/0"),
        ([{"path": [], "pause": 1.0, "drop": True}], "/answers/0"),
        ([{"path": [], "pause": -1.0}], "/answers/0/pause"),
        ([{"path": [], "wind_down": True, "drop": True}], "/answers/0"),
        ([{"path": [1, 0], "wind_down": True}], "/answers/0/path"),
        ([{"path": [], "drop": True, "place": 1, "verdict": {}}], "/answers/0"),
        ([{"path": [], "verdict": {}}], "/answers/0/place"),
        ([{"path": [], "place": -1, "verdict": {}}], "/answers/0/place"),
        ([{"path": [], "place": 1, "verdict": {"text": "x"}}], "/answers/0/verdict/text"),
        ([{"path": [], "nodes": nodes(Text("a"), Text("b"), Text("c"))}], "/answers/0/nodes/2"),
        (
            [{"path": [], "nodes": nodes(Text("a"))}, {"path": [], "nodes": [{"kind": "X"}]}],
            "/answers/1/nodes/0/kind",
        ),
    ):
        response = growing.answer(*answers)
        assert (response.status_code, response.json()["error"]["param"]) == (400, parameter)
    assert (
        growing.answer({"path": [], "nodes": nodes(Gen("b", FOUR))}, close=True).status_code == 200
    )
    assert [growing.next().name, growing.next().name] == ["a", "b"]
    assert growing.answer({"path": [], "nodes": nodes(Text("b"))}).status_code in (400, 404)
    growing.leave()


def test_a_program_is_answered_by_its_own_key_alone(engine):
    with serving(engine, api_key=("one", "two")) as url:
        first = httpx2.Client(base_url=url, headers={"authorization": "Bearer one"}, timeout=60)
        second = httpx2.Client(base_url=url, headers={"authorization": "Bearer two"}, timeout=60)
        with first, second:
            growing = Growing(first, Program((Text("a"),)))
            other = second.post(f"/program/{growing.id}/answer", json={"version": 1, "close": True})
            assert other.status_code == 404
            assert growing.answer(close=True).status_code == 200
            assert [type(growing.next()) for _ in range(2)] == [Usage, ProgramResult]
            growing.leave()


def test_many_programs_at_once_have_each_its_own_events(http, engine):
    results = {}

    def run(i):
        program = Program((Text(f"{i} a"), Gen("a", FOUR)))
        results[i] = http.post("/program", json=body(program, "")).json()["result"]["text"]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(8):
        assert results[i] == engine.play("", Program((Text(f"{i} a"), Gen("a", FOUR))))[0].text


def test_what_earlier_versions_sent_is_refused_with_the_cure(http):
    found = http.post(
        "/program/rows", json={"version": 1, "program": {"name": "ask", "nodes": []}, "rows": [{}]}
    )
    assert found.status_code == 400
    assert "run_batch sends each row's program to POST /program" in found.json()["error"]["message"]
    decides = {"nodes": [], "decision": {"parts": [0]}, "parts": [{}]}
    found = http.post("/program", json={"version": 1, "prompt": "", "program": decides})
    assert found.status_code == 400
    assert "decision" in found.json()["error"]["message"]
