"""Sessions of the native protocol: requests continue the tokens of earlier ones."""

import pytest

from tests.server.test_native import GREEDY

CAPACITY = {"capacity_of_str_len": 1000}


@pytest.fixture
def session(http):
    id = http.post("/open_session", json=CAPACITY).json()
    yield id
    http.post("/close_session", json={"session_id": id})


def ask(http, text, session=None, rid=None, **given):
    params = {} if session is None else {"session_params": {"id": session, "rid": rid, **given}}
    response = http.post("/generate", json={"text": text, "sampling_params": GREEDY, **params})
    assert response.status_code == 200, response.text
    return response.json()


def refused(http, **body):
    response = http.post("/generate", json={"text": "a", "sampling_params": GREEDY, **body})
    assert response.status_code in (400, 404)
    return response.json()["error"]["message"]


def continued(http, engine, *parts, new):
    """Output ids for the ids of some parts and new text."""
    ids = [*(token for part in parts for token in part), *engine.tokenizer.encode(new, first=False)]
    answer = http.post("/generate", json={"input_ids": ids, "sampling_params": GREEDY}).json()
    return answer["output_ids"]


def test_a_request_continues_an_earlier_one_of_its_session(http, engine, session):
    prompt = engine.tokenizer.encode("a quick")
    first = ask(http, "a quick", session)
    rid, output = first["meta_info"]["id"], first["output_ids"]
    assert output == ask(http, "a quick")["output_ids"]
    second = ask(http, " brown", session, rid)
    assert second["output_ids"] == continued(http, engine, prompt, output, new=" brown")
    beside = ask(http, " red", session, rid)  # the same request is continued in two ways
    assert beside["output_ids"] == continued(http, engine, prompt, output, new=" red")
    third = ask(http, " fox", session, second["meta_info"]["id"])
    before = (
        *prompt,
        *output,
        *engine.tokenizer.encode(" brown", first=False),
        *second["output_ids"],
    )
    assert third["output_ids"] == continued(http, engine, before, new=" fox")
    dropped = ask(http, " fox", session, rid, drop_previous_output=True)
    assert dropped["output_ids"] == continued(http, engine, prompt, new=" fox")
    cut = ask(http, " fox", session, rid, offset=1)
    assert cut["output_ids"] == continued(http, engine, prompt[:1], new=" fox")


def test_a_session_opens_and_closes_by_get_as_well(http, engine):
    id = http.request("GET", "/open_session", json=CAPACITY).json()
    assert ask(http, "a quick", id)["output_ids"] == ask(http, "a quick")["output_ids"]
    assert http.request("GET", "/close_session", json={"session_id": id}).status_code == 200
    assert "is open" in refused(http, session_params={"id": id})


def test_a_stream_is_continued_too(http, session):
    body = {"text": "a quick", "sampling_params": GREEDY, "rid": "one", "stream": True}
    with http.stream(
        "POST", "/generate", json={**body, "session_params": {"id": session}}
    ) as response:
        assert response.read().endswith(b"data: [DONE]\n\n")
    assert ask(http, " b", session, "one")["output_ids"]


def test_what_is_replaced_is_forgotten(http, session):
    first = ask(http, "a quick", session)["meta_info"]["id"]
    second = ask(http, " b", session, first)["meta_info"]["id"]
    other = ask(http, " c", session, first, replace=True)["meta_info"]["id"]
    assert "has no request" in refused(http, session_params={"id": session, "rid": second})
    ask(http, " d", session, other)
    ask(http, "e", session, replace=True)
    assert "has no request" in refused(http, session_params={"id": session, "rid": first})


def test_what_can_not_be_is_refused_by_name(http, session):
    assert "no session 'x' is open" in refused(http, session_params={"id": "x"})
    assert "has no request 'y'" in refused(http, session_params={"id": session, "rid": "y"})
    assert "one prompt" in refused(http, text=["a", "b"], session_params={"id": session})
    assert "negative" in refused(http, session_params={"id": session, "offset": -1})
    assert "session_params" in refused(http, session_params={"rid": "y"})
    assert "session_params" in refused(http, session_params={"id": session, "branch": 1})
    ask(http, "a", session)
    body = {"rid": "one", "session_params": {"id": session}}
    assert (
        http.post("/generate", json={"text": "a", "sampling_params": GREEDY, **body}).status_code
        == 200
    )
    assert "'one' already" in refused(http, **body)
    taken = http.post("/open_session", json={**CAPACITY, "session_id": session})
    assert (taken.status_code, "is open already" in taken.text) == (400, True)
    assert http.post("/open_session", json={"capacity_of_str_len": 0}).status_code == 400
    small = http.post(
        "/open_session", json={"capacity_of_str_len": 2, "session_id": "small"}
    ).json()
    assert "capacity_of_str_len" in refused(
        http, text="a quick brown fox jumps", session_params={"id": small}
    )
    assert http.post("/close_session", json={"session_id": small}).status_code == 200
    assert http.post("/close_session", json={"session_id": small}).status_code == 404


def test_a_request_that_still_runs_is_not_continued_and_ends_with_its_session(http):
    session = http.post("/open_session", json={**CAPACITY, "session_id": "busy"}).json()
    assert session == "busy"
    endless = {"temperature": 0, "max_new_tokens": 1900, "ignore_eos": True}
    body = {
        "text": "a",
        "sampling_params": endless,
        "rid": "one",
        "stream": True,
        "session_params": {"id": session},
    }
    with http.stream("POST", "/generate", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        assert "has not ended" in refused(http, session_params={"id": session, "rid": "one"})
        assert http.post("/close_session", json={"session_id": session}).status_code == 200
        assert '"abort"' in "".join(lines)
    assert "is open" in refused(http, session_params={"id": session})
