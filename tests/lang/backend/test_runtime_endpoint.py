"""RuntimeEndpoint: programs on a server, this package's and SGLang's own."""

import asyncio
import json
import os
import random
import threading
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest

import sglang_lite as sgl
from sglang_lite.constraints.schema import json_schema
from sglang_lite.lang.backend.http import client as http_client
from sglang_lite.lang.backend.http.client import EventReader
from sglang_lite.lang.backend.local import LocalBackend
from sglang_lite.protocol import (
    Choices,
    Delta,
    Generation,
    Lark,
    Number,
    Prompt,
    Regex,
    SamplingParams,
    Span,
)
from tests.engine.conftest import SETTINGS
from tests.lang.backend.cutting_proxy import CuttingProxy
from tests.lang.backend.native_server import CUT, DONE, STOP, NativeServer, event, piece
from tests.server.conftest import serving
from tests.waiting import until

STREAMS = int(os.environ.get("SGLANG_LITE_STREAMS", "12"))


@pytest.fixture(scope="module")
def engine(folders):
    with sgl.Engine(folders[0], **SETTINGS, in_process=True) as engine:
        yield engine


@pytest.fixture(scope="module")
def url(engine):
    with serving(engine) as url:
        yield url


@pytest.fixture
def endpoint():
    """Makes endpoints, whose connections are closed at the end."""
    made = []

    def make(*arguments, **options):
        made.append(sgl.RuntimeEndpoint(*arguments, **options))
        return made[-1]

    yield make
    for each in made:
        each.shutdown()


@pytest.fixture
def server():
    server = NativeServer()
    yield server
    server.close()


def generated(backend, prompt="ab", params=SamplingParams(), constraint=None, *, stream=True):
    """Events of a backend: deltas, and the last events."""

    async def run():
        spans = prompt if isinstance(prompt, Prompt) else Prompt((Span(prompt),))
        try:
            return [
                event async for event in backend.agenerate(spans, params, constraint, stream=stream)
            ]
        finally:
            await backend.aclose()

    events = asyncio.run(run())
    return [e for e in events if isinstance(e, Delta)], [
        e for e in events if isinstance(e, Generation)
    ]


# ------------------------------------------------------------------------- a server of this package


REQUESTS = [
    (SamplingParams(max_tokens=30, ignore_eos=True), None),
    (SamplingParams(max_tokens=30, stop=("ab", "c", "[j"), ignore_eos=True), None),
    (
        SamplingParams(max_tokens=30, stop_regex=("[a-d]{2}",), include_stop=True, ignore_eos=True),
        None,
    ),
    (
        SamplingParams(max_tokens=30, frequency_penalty=1.2, repetition_penalty=1.3, min_tokens=9),
        None,
    ),
    (SamplingParams(max_tokens=30, return_logprob=True, top_logprobs_num=2, ignore_eos=True), None),
    (SamplingParams(max_tokens=30, return_logprob=True, logprob_start_len=0, stop=("q",)), None),
    (SamplingParams(max_tokens=40), Regex("[a-e]{4}hello[f-z]{9,20}")),
    (SamplingParams(max_tokens=60), json_schema({"type": "integer"})),
    (SamplingParams(max_tokens=60), json_schema({"enum": ["abcdefghijkl", "abcdefghijxy"]})),
    (SamplingParams(max_tokens=20), Number("float")),
    (SamplingParams(max_tokens=20), Choices(("abcdefgh", "abcdxyz"))),
    (SamplingParams(max_tokens=20), Lark('start: ("a" | "b" | "xyz")+')),
    (SamplingParams(max_tokens=30, logit_bias=((40, 3.0), (41, -2.0)), temperature=0.7), None),
    (SamplingParams(max_tokens=12, n=3, ignore_eos=True), None),
]


def same(found, whole):
    """Asserts that a generation is another, but for what a clock and a cache say."""
    for name in ("text", "token_ids", "spans", "finish_reason", "matched", "index", "output_logprobs",
                 "prompt_logprobs"):  # fmt: skip
        assert getattr(found, name) == getattr(whole, name), name
    assert found.usage.completion_tokens == whole.usage.completion_tokens
    assert found.usage.prompt_tokens == whole.usage.prompt_tokens
    told = {"cache_miss", "forced_text"}  # of the request that continued it
    assert found.meta.keys() - told == whole.meta.keys() - told


@pytest.mark.parametrize("incremental", [False, True], ids=["cumulative", "incremental"])
def test_streams_that_are_cut_once_bring_what_uncut_ones_bring(engine, endpoint, incremental):
    draw = random.Random(1)
    with serving(engine, incremental_streaming_output=incremental) as url:
        plain = endpoint(url)
        most = 4000 if incremental else 12_000
        with CuttingProxy(urlsplit(url).port, most, seed=int(incremental)) as proxy:
            cut = endpoint(proxy.url)
            for i in range(STREAMS):
                params, constraint = REQUESTS[i % len(REQUESTS)]
                params = SamplingParams(
                    **{f: getattr(params, f) for f in params.__struct_fields__} | {"seed": 1000 + i}
                )
                prompt = "".join(draw.choice("abcxyz{}") for _ in range(draw.randrange(1, 9)))
                _, wholes = generated(plain, prompt, params, constraint, stream=False)
                deltas, ends = generated(cut, prompt, params, constraint)
                for end, whole in zip(sorted(ends, key=lambda e: e.index), wholes, strict=True):
                    same(end, whole)
                    mine = [d for d in deltas if d.index == end.index]
                    assert "".join(d.text for d in mine) == whole.text
                    logprobs = tuple(entry for d in mine for entry in d.logprobs)
                    assert logprobs == whole.output_logprobs[: len(logprobs)]
            assert proxy.cuts >= STREAMS // 4


def test_a_program_runs_as_on_the_engine(engine, url, endpoint):
    @sgl.function
    def program(s):
        s += sgl.system("be") + sgl.user("say <|im_end|>")
        s += sgl.assistant(sgl.gen("a", max_tokens=9, stop="b"))
        s += "and" + sgl.gen("n", dtype=int, max_tokens=4)
        s += sgl.gen("l", constraint=sgl.Grammar('start: "a" "b"+'), max_tokens=6)
        forks = s.fork(2)
        forks += sgl.gen("f", max_tokens=5)
        s += forks[0]["f"] + forks[1]["f"]
        s += sgl.gen("j", json_schema=json.dumps({"enum": [True, "abc"]}))

    local, remote = LocalBackend(engine), endpoint(url, chat_template_name="chatml")
    local.chat_template = remote.chat_template
    states = [
        program.run(backend=b, seed=3, temperature=1.0, push_down=False) for b in (local, remote)
    ]
    for name in "anlj":
        assert states[1][name] == states[0][name]
    assert states[1].text() == states[0].text()
    streamed = program.run(backend=remote, seed=3, temperature=1.0, push_down=False, stream=True)
    assert "".join(streamed.text_iter()) == states[0].text()
    assert remote.token_usage.completion_tokens > 20
    remote.token_usage.reset()
    assert remote.token_usage.prompt_tokens == 0


@sgl.function
def next_tokens(s):
    """The likeliest next tokens, and a text after each."""
    s += "ab"
    probe = s.fork(1)[0]
    forks = s.fork(3)
    probe += sgl.gen(
        "next", max_tokens=0, return_logprob=True, top_logprobs_num=3, return_text_in_logprobs=True
    )
    for fork, (_, _, text) in zip(forks, probe.get_meta_info("next")["output_top_logprobs"][0]):
        fork += text + sgl.gen(
            "rest", max_tokens=4, temperature=0, return_logprob=True, top_logprobs_num=2
        )
    s["texts"] = [fork.text() for fork in forks]


@pytest.mark.parametrize("push_down", [True, False])
def test_no_tokens_have_the_log_probabilities_of_the_next_one(engine, url, endpoint, push_down):
    whole = engine.complete(
        "ab", SamplingParams(max_tokens=1, return_logprob=True, top_logprobs_num=3)
    )
    starts = [
        "ab" + engine.tokenizer.decode([token]) for _, token, _ in whole.output_logprobs[0].top
    ]
    texts = next_tokens.run(backend=endpoint(url), push_down=push_down)["texts"]
    assert [text[: len(start)] for text, start in zip(texts, starts, strict=True)] == starts
    assert texts == next_tokens.run(backend=engine)["texts"]


def test_alternatives_without_a_token_are_read(server, endpoint):
    """SGLang's answer for no tokens."""
    tops = [[[-0.5, 7, "x"], [-1.5, 8, "y"]]]
    server.answers["/generate"] = piece(
        "", [], {"type": "length", "length": 0}, output_token_logprobs=[], output_top_logprobs=tops
    )
    params = SamplingParams(max_tokens=0, return_logprob=True, top_logprobs_num=2)
    _, (end,) = generated(endpoint(server.url), params=params, stream=False)
    (entry,) = end.output_logprobs
    assert (entry.top, entry.logprob, entry.token_id) == (((-0.5, 7, "x"), (-1.5, 8, "y")), -0.5, 7)


def test_what_the_server_is_can_be_asked(engine, url, endpoint):
    backend = endpoint(url)
    assert backend.get_model_name() == engine.config.model == backend.model_info["model_path"]
    assert sgl.get_server_info(backend)["vocab_size"] == engine.vocab_size
    assert sgl.flush_cache(backend) is True
    backend.cache_prefix("abcdefgh" * 20)
    assert engine.stats()["cached_tokens"] > 100


def test_a_reader_that_leaves_ends_the_request(engine, url, endpoint):
    async def leave():
        backend = endpoint(url)
        params = SamplingParams(max_tokens=1500, ignore_eos=True, n=64)
        events = backend.agenerate(Prompt((Span("ab"),)), params, None, stream=True)
        await anext(events)
        await events.aclose()
        await backend.aclose()

    before = engine.stats()["steps"]
    asyncio.run(leave())
    until(lambda: not engine.stats()["running"] and not engine.stats()["waiting"])
    assert engine.stats()["steps"] - before < 64 // 4 * 1500  # of four at a time


def test_an_error_of_the_server_has_its_type(url, endpoint):
    backend = endpoint(url)
    with pytest.raises(sgl.ParameterError, match="tokens") as caught:
        generated(backend, "a" * 2500)
    assert caught.value.parameter == "prompt"
    with pytest.raises(sgl.ConstraintError, match="regex"):
        generated(backend, params=SamplingParams(max_tokens=3), constraint=Regex("(ab"))
    with pytest.raises(sgl.ParameterError, match="token_ids_logprob") as caught:
        generated(backend, params=SamplingParams(return_logprob=True, token_ids_logprob=(5000,)))
    assert caught.value.parameter == "token_ids_logprob"


def test_a_key_is_sent_and_a_wrong_one_is_told_of_but_not_shown(engine, endpoint):
    with serving(engine, api_key=("secret-key-1",)) as url:
        assert generated(endpoint(url, "secret-key-1"), stream=False)[1]
        with pytest.raises(sgl.BackendError, match="api_key") as caught:
            endpoint(url, "wrong-key-of-mine")
        assert "wrong-key" not in str(caught.value)
        with pytest.raises(sgl.BackendError, match="api_key"):
            endpoint(url)


def test_a_server_that_has_gone_is_an_error(engine):
    with serving(engine) as url:
        backend = sgl.RuntimeEndpoint(url, retries=1)
    with pytest.raises(sgl.BackendError, match=r"connection failed.*the server runs"):
        generated(backend)
    with pytest.raises(sgl.BackendError, match="connection failed"):
        sgl.RuntimeEndpoint(url)


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "ftp://x", "http://", 7, None, ""])
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(sgl.ParameterError, match=r"base_url.*is not an address"):
        sgl.RuntimeEndpoint(url)


# ---------------------------------------------------------------------------------- SGLang's server


def told(*parts):
    return [*map(event, parts), DONE]


def test_a_stream_of_either_mode_is_read(server, endpoint):
    ends = piece("abc", [1, 2, 3], STOP)
    server.answers["/generate"] = told(piece("a", [1]), piece("ab", [1, 2]), ends)
    deltas, (end,) = generated(endpoint(server.url))
    assert [(d.text, d.token_ids) for d in deltas] == [("a", (1,)), ("b", (2,)), ("c", (3,))]
    assert (end.text, end.token_ids, end.usage.prompt_tokens) == ("abc", (1, 2, 3), 3)
    server.answers["/server_info"] = {"incremental_streaming_output": True}
    server.answers["/generate"] = told(piece("a", [1]), piece("b", [2]), piece("c", [3], STOP))
    deltas, (end,) = generated(endpoint(server.url))
    assert ["".join(d.text for d in deltas), end.text, end.token_ids] == ["abc", "abc", (1, 2, 3)]


def test_events_are_split_where_they_end_and_comments_are_passed_over(server, endpoint):
    whole = (
        b": keep-alive\n\n"
        + event(piece("é", [1]))
        + b":\r\n\r\n"
        + event(piece("é\n", [1, 2], STOP))
        + DONE
    )
    whole = whole.replace(b"\n\ndata", b"\r\n\r\ndata", 1)
    server.answers["/generate"] = [whole[i : i + 1] for i in range(len(whole))]
    deltas, (end,) = generated(endpoint(server.url))
    assert ["".join(d.text for d in deltas), end.text] == ["é\n", "é\n"]


def test_a_reader_of_events_gives_the_same_for_any_cuts():
    draw = random.Random(0)
    data = b"\xef\xbb\xbfdata: 1\n\ndata:\n\ndata:2\r\n\r\n: x\ndata: a\rdata: b\r\revent: e\nid: 3\n\n\n\ndata: \xc3\xa9\n\n"
    for _ in range(300):
        reader, found, at = EventReader(), [], 0
        while at < len(data):
            step = draw.randrange(1, 6)
            found += reader.feed(data[at : at + step])
            at += step
        assert found == ["1", "2", "a\nb", "é"]


@pytest.mark.parametrize(
    ("answer", "kind", "said"),
    [
        ((400, {"error": {"message": "bad thing"}}), sgl.BackendError, "bad thing .HTTP 400"),
        ((500, {"error": {"message": "bad model", "err_type": "BackendError"}}), sgl.BackendError, "bad model .HTTP 500"),
        ((400, {"error": "contract text"}), sgl.BackendError, "contract text"),
        ((400, {"object": "error", "message": "no field", "code": 400}), sgl.BackendError, "no field"),
        ((401, b"<html>no</html>"), sgl.BackendError, "api_key"),
        ((429, {"error": {"message": "slow"}}), sgl.OverloadedError, "slow"),
        (b"not an event", sgl.BackendError, "ended before the answer was complete"),
        ([event(b"{half"), DONE], sgl.BackendError, "can't? be read|can be read"),
        ([event(b"[1]"), DONE], sgl.BackendError, "an event is"),
        ([event({"text": 1}), DONE], sgl.BackendError, "can't be read"),
        ([event({"text": "a", "meta_info": 5}), DONE], sgl.BackendError, "can't be read"),
        ([event(piece("a", [1], index=7)), DONE], sgl.BackendError, "index 7"),
        ([event(piece("a", [1])), DONE], sgl.BackendError, "ended before"),
        ([event({"error": {"message": "too long", "code": 400}}), DONE], sgl.BackendError, "too long"),
        (told(piece("a", [1], {"type": "abort", "message": "gone", "status_code": 499})), sgl.RequestAbortedError, "gone"),
        (told(piece("", [], {"type": "abort", "message": "x: bad", "err_type": "ConstraintError"})), sgl.ConstraintError, "bad"),
        ([event(piece("abc", [1])), b'data: {"text": "abcd', CUT], sgl.BackendError, "connection failed"),
    ],
)  # fmt: skip
def test_what_is_no_answer_is_an_error(server, endpoint, answer, kind, said):
    server.answers["/generate"] = answer
    with pytest.raises(kind, match=said):
        generated(endpoint(server.url, retries=1))


@pytest.mark.parametrize("answer", [b"", b"{", b"[]", {"text": "a"}, [piece("a", [1], STOP)] * 2])
def test_a_whole_answer_that_is_none_is_an_error(server, endpoint, answer):
    server.answers["/generate"] = (200, answer)
    with pytest.raises(sgl.BackendError):
        generated(endpoint(server.url), stream=False)


def test_what_broke_off_before_anything_came_is_asked_again(server, endpoint):
    parts = iter(
        [[CUT], (503, {"error": {"message": "no workers"}}), [CUT], told(piece("ab", [1, 2], STOP))]
    )
    server.answers["/generate"] = lambda body: next(parts)
    assert generated(endpoint(server.url))[1][0].text == "ab"
    assert len(server.bodies()) == 4


def busy(seconds):
    return 503, {"error": {"message": "no room"}}, {"Retry-After": str(seconds)}


@pytest.fixture
def pauses(monkeypatch):
    """Pauses between tries, which nobody waits for."""
    found = []

    async def sleep(seconds):
        found.append(seconds)

    monkeypatch.setattr(
        http_client, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep})
    )
    return found


@pytest.mark.parametrize("stream", [True, False])
def test_tries_wait_for_as_long_as_the_server_asks(server, endpoint, pauses, stream):
    whole = told(piece("ab", [1, 2], STOP)) if stream else piece("ab", [1, 2], STOP)
    parts = iter(
        [busy(7), (429, {"error": {"message": "slowly"}}, {"Retry-After": "3"}), (503, {}), whole]
    )
    server.answers["/generate"] = lambda body: next(parts)
    assert generated(endpoint(server.url), stream=stream)[1][0].text == "ab"
    # and a little, which differs between branches
    assert [int(pause) for pause in pauses] == [7, 3, 0]


def test_a_wait_beyond_the_limit_of_a_request_is_an_error_at_once(server, endpoint, pauses):
    server.answers["/generate"] = busy(60)
    with pytest.raises(sgl.BackendError, match=r"no room.* after 60 s.*timeout") as caught:
        generated(endpoint(server.url, timeout=30))
    assert caught.value.retry_after == 60
    assert (len(server.bodies()), pauses) == (1, [])


@pytest.mark.parametrize(
    "limits", [({"timeout": 30}, {}), ({}, {"timeout": 30}), ({"timeout": 90}, {"timeout": 30})]
)
def test_a_wait_beyond_the_limit_of_a_run_or_a_node_is_an_error_at_once(
    server, endpoint, pauses, limits
):
    of_run, of_node = limits

    @sgl.function
    def program(s):
        s += "ab" + sgl.gen("x", **of_node)

    server.answers["/generate"] = busy(60)
    with pytest.raises(sgl.BackendError, match=r"no room.* after 60 s.*timeout") as caught:
        program.run(backend=endpoint(server.url), **of_run)["x"]
    assert caught.value.retry_after == 60
    assert (len(server.bodies()), pauses) == (1, [])


def test_a_stream_that_has_begun_is_not_asked_again_where_the_server_can_not_continue_it(
    server, endpoint
):
    server.answers["/generate"] = [event(piece("ab", [1, 2])), CUT]
    with pytest.raises(sgl.BackendError, match="connection failed"):
        generated(endpoint(server.url))
    assert len(server.bodies()) == 1


def test_a_stream_that_breaks_off_is_continued_with_its_ids_and_its_seed(server, endpoint):
    server.answers["/server_info"] = {"sglang_lite": {"output_ids": True}}
    parts = iter([
        [event(piece("ab", [1, 2])), event(piece("abc", [1, 2, 3])), CUT],
        [event(piece("abc", [1, 2, 3])), event({"error": {"message": "engine died", "code": 503}}), DONE],
        told(piece("abc", [1, 2, 3]), piece("abcd", [1, 2, 3, 4], STOP)),
    ])  # fmt: skip
    server.answers["/generate"] = lambda body: next(parts)
    deltas, (end,) = generated(endpoint(server.url))
    assert [d.text for d in deltas] == ["ab", "c", "d"]
    assert [d.token_ids for d in deltas] == [(1, 2), (3,), (4,)]
    assert end.text == "abcd"
    first, *again = server.bodies()
    assert "output_ids" not in first
    assert [body.pop("output_ids") for body in again] == [[1, 2, 3]] * 2
    assert again == [first] * 2
    assert isinstance(first["sampling_params"]["sampling_seed"], int)


def test_a_stream_through_a_gateway_that_hands_on_whole_requests_continues_by_ids(server, endpoint):
    del server.answers["/server_info"]
    server.answers["/get_server_info"] = {
        "sglang_lite": {"output_ids": True, "records": True, "program": True}
    }
    parts = iter([
        [event(piece("ab", [1, 2])), CUT],
        told(piece("abcd", [1, 2, 3, 4], STOP)),
    ])  # fmt: skip
    server.answers["/generate"] = lambda body: next(parts)
    deltas, (end,) = generated(endpoint(server.url))
    assert [d.text for d in deltas] == ["ab", "cd"]
    assert end.token_ids == (1, 2, 3, 4)
    first, again = server.bodies()
    assert again.pop("output_ids") == [1, 2]
    assert again == first
    assert first["prompt"] == {"spans": [{"text": "ab"}]}


def test_another_text_on_a_later_connection_is_an_error(server, endpoint):
    server.answers["/server_info"] = {"sglang_lite": {"output_ids": True}}
    parts = iter([[event(piece("ab", [1, 2])), CUT], told(piece("xb", [1, 2], STOP))])
    server.answers["/generate"] = lambda body: next(parts)
    with pytest.raises(sgl.BackendError, match="the output differs from what had arrived"):
        generated(endpoint(server.url))


def test_log_probabilities_of_all_connections_are_one_list(server, endpoint):
    server.answers["/server_info"] = {"sglang_lite": {"output_ids": True}}

    def entries(*ids):
        return [[-float(i), i, None] for i in ids]

    parts = iter([
        [event(piece("ab", [1, 2], output_token_logprobs=entries(1, 2))), CUT],
        told(piece("abcd", [1, 2, 3, 4], STOP, output_token_logprobs=entries(3, 4))),
    ])  # fmt: skip
    server.answers["/generate"] = lambda body: next(parts)
    deltas, (end,) = generated(endpoint(server.url), params=SamplingParams(return_logprob=True))
    assert [e.token_id for e in end.output_logprobs] == [1, 2, 3, 4]
    assert [[e.token_id for e in d.logprobs] for d in deltas] == [[1, 2], [3, 4]]


def test_what_is_asked_of_sglangs_server(server, endpoint):
    server.answers["/generate"] = piece("abc", [1], STOP)
    params = SamplingParams(
        max_tokens=5, stop=("x",), temperature=0.5, return_logprob=True, top_logprobs_num=2, logit_bias=((3, 1.5),),
        include_stop=True,
    )  # fmt: skip
    generated(endpoint(server.url), "text", params, Choices(("a.", "b")), stream=False)
    assert server.bodies() == [{
        "text": "text", "return_logprob": True, "top_logprobs_num": 2,
        "sampling_params": {"max_new_tokens": 5, "stop": ["x"], "temperature": 0.5, "no_stop_trim": True,
                            "logit_bias": {"3": 1.5}, "regex": "(a\\.|b)"},
    }]  # fmt: skip


def test_a_number_ends_before_what_ends_it(server, endpoint):
    server.answers["/generate"] = piece("12,", [1, 2], STOP)
    assert (
        generated(endpoint(server.url), constraint=Number("integer"), stream=False)[1][0].text
        == "12"
    )


def test_what_sglangs_protocol_can_not_say_is_refused_at_the_line(server, endpoint):
    @sgl.function
    def program(s):
        s += sgl.gen("a", constraint=sgl.Grammar('start: "a"'))

    with pytest.raises(sgl.CapabilityError, match="a Lark grammar"):
        program.run(backend=endpoint(server.url))
    assert server.asked == []


def scored(body):
    """A model of one token a letter that likes vowels."""

    def meta(ids, start):
        entries = [[None if at == start else (-0.1 if chr(i) in "aeiou" else -2.0), i, chr(i)] for at, i in
                   enumerate(ids) if at >= start]  # fmt: skip
        return {"text": "", "meta_info": {"prompt_tokens": len(ids), "input_token_logprobs": entries,
                                          "finish_reason": {"type": "length", "length": 0}}}  # fmt: skip

    asked = body.get("text") if "text" in body else body["input_ids"]
    start = body.get("logprob_start_len", 0)
    if isinstance(asked, str):
        return meta([ord(c) for c in asked], start)
    return 200, [
        meta([ord(c) for c in each] if isinstance(each, str) else each, start) for each in asked
    ]


@pytest.mark.parametrize(
    ("method", "best"),
    [
        (None, "aea"),
        (sgl.greedy_token_selection, "aea"),
        (sgl.unconditional_likelihood_normalized, "aea"),
    ],
)
def test_a_selection_by_log_probabilities(server, endpoint, method, best):
    server.answers["/generate"] = scored

    @sgl.function
    def program(s):
        s += "Say: "
        s += sgl.select(
            "c", ["xy", "aea", "ab"], **({} if method is None else {"choices_method": method})
        )

    state = program.run(backend=endpoint(server.url))
    assert state["c"] == best
    meta = state.get_meta_info("c")
    assert [[entry[2] is None or entry[1] for entry in row] for row in meta["input_token_logprobs"]]
    first, second, *third = server.bodies()
    assert first == {"text": "Say: ", "sampling_params": {"max_new_tokens": 0}}
    assert second["text"] == ["Say: xy", "Say: aea", "Say: ab"]
    assert (second["logprob_start_len"], second["return_logprob"]) == (3, True)
    assert [body["input_ids"] for body in third] == [[[120, 121], [97, 101, 97], [97, 98]]] * len(
        third
    )


def test_with_an_empty_choice_the_prompts_last_token_is_scored_too(server, endpoint):
    server.answers["/generate"] = scored
    with pytest.warns(UserWarning, match="'xy' is given twice"):
        choice = sgl.select("c", ["xy", "", "xy"])
    selection = sgl.function(lambda s: s.__iadd__("Saa" + choice)).run(backend=endpoint(server.url))
    assert selection["c"] == ""
    assert [score.token_ids for score in selection.selection("c").scores] == [
        (97, 120, 121),
        (97,),
        (97, 120, 121),
    ]


def test_many_programs_share_one_pool_of_connections(server, endpoint):
    server.answers["/generate"] = piece("ab", [1, 2], STOP)

    @sgl.function
    def program(s, i):
        s += str(i) + sgl.gen("x", max_tokens=2)

    states = program.run_batch(
        [{"i": i} for i in range(40)], backend=endpoint(server.url), num_threads=8
    )
    assert [state["x"] for state in states] == ["ab"] * 40


def test_an_image_goes_with_the_prompt_where_the_model_sees(server, endpoint):
    server.answers["/get_model_info"] = {"model_path": "llava", "has_image_understanding": True}
    server.answers["/generate"] = piece("a cat", [1], STOP)

    @sgl.function
    def program(s):
        s += sgl.user(sgl.image(b"\x89PNG\r\n\x1a\n" + b"0" * 30) + "what?")
        s += sgl.assistant(sgl.gen("x", max_tokens=2))

    assert (
        program.run(backend=endpoint(server.url, chat_template_name="chatml-llava"))["x"] == "a cat"
    )
    assert server.bodies()[0]["image_data"][0].startswith("iVBORw0KGgo")


def test_endpoints_are_used_by_threads_at_the_same_time(server, endpoint):
    server.answers["/generate"] = piece("ab", [1, 2], STOP)
    backend, found = endpoint(server.url), []

    @sgl.function
    def program(s):
        s += "a" + sgl.gen("x", max_tokens=2)

    threads = [
        threading.Thread(target=lambda: found.append(program.run(backend=backend)["x"]))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["ab"] * 8
