"""Fields that clients of other servers send: each is served with an effect, or refused by name with
a reason and a cure.
"""

import json
import re
from pathlib import Path

import httpx2
import pytest

from sglang_lite.server.fields import REASONS
from tests.effects.fields import CASES, DOORS
from tests.effects.fields.inside_tables import CASES as INSIDE
from tests.effects.request_fields import CHAT, REQUEST_FIELDS, TEXT

MOST_REFUSED = 14


def test_the_table_has_61_fields_of_which_few_are_refused():
    assert len({each.name for each in REQUEST_FIELDS}) == len(REQUEST_FIELDS) == 61
    assert sum(each.refused for each in REQUEST_FIELDS) <= MOST_REFUSED


@pytest.mark.parametrize("row", REQUEST_FIELDS, ids=lambda row: row.name)
def test_a_field_is_served_or_refused_with_a_cure(row, servers):
    door = DOORS[row.record]
    found = httpx2.post(servers("infill") + door.path, json={**door.base, **row.body}, timeout=60)
    if row.refused:
        error = found.json()["error"]
        why, cure = REASONS[row.name]
        assert (found.status_code, error["param"]) == (400, row.name)
        assert error["message"] == f"{row.name}: {why} {cure}"
    elif row.name == "lora_path":  # no adapter is loaded here
        assert found.status_code == 404
        assert "'one'" in found.text
    else:
        assert found.status_code == 200, found.text


@pytest.mark.parametrize(
    "row", [each for each in REQUEST_FIELDS if not each.refused], ids=lambda row: row.name
)
def test_a_served_field_has_a_case_of_its_effect(row):
    outer, _, inner = row.name.partition(".")
    if inner:
        assert any(
            each.outer == outer and each.name == inner and each.door == row.record
            for each in INSIDE
        )
    else:
        assert outer in CASES[row.record]


def test_each_field_is_documented():
    page = (Path(__file__).parents[2] / "docs" / "server.md").read_text()
    assert [each.name for each in REQUEST_FIELDS if f"`{each.name}`" not in page] == []


# ----------------------------------------------------------------------- what effects depend on


def ask(servers, record=TEXT, server="bytes", **body):
    door = DOORS[record]
    found = httpx2.post(servers(server) + door.path, json={**door.base, **body}, timeout=60)
    return found.json()


def test_no_bad_word_is_in_a_text(servers):
    """A token a letter, so a text without a word's tokens is a text without the word."""
    text = ask(servers, max_tokens=60)["choices"][0]["text"]
    found = re.search("[!-~]{2}", text)
    other = ask(servers, max_tokens=60, bad_words=[found[0]])["choices"][0]["text"]
    assert found[0] not in other
    assert other.startswith(text[: found.start() + 1])


@pytest.mark.parametrize("excluding", [{"bad_words": ["a"]}, {"allowed_token_ids": [70]}])
def test_a_constraint_that_leaves_nothing_else_wins(servers, excluding):
    choice = ask(servers, regex="aab", **excluding)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("aab", "stop")


def test_what_is_allowed_is_chosen_by_a_constraint(servers):
    assert ask(servers, regex="a|b|c", allowed_token_ids=[67])["choices"][0]["text"] == "b"


def test_the_best_samples_come_first(servers):
    drawn = {"temperature": 1, "seed": 5, "logprobs": 0, "prompt": "ab"}
    every = ask(servers, n=4, **drawn)["choices"]
    best = ask(servers, n=2, best_of=4, **drawn)["choices"]

    def mean(choice):
        logprobs = choice["logprobs"]["token_logprobs"]
        return sum(logprobs) / len(logprobs)

    expected = sorted(every, key=mean, reverse=True)[:2]
    assert [each["text"] for each in best] == [each["text"] for each in expected]
    assert [each["index"] for each in best] == [0, 1]


def test_log_probabilities_of_a_prompt_are_those_of_an_echo(servers):
    (choice,) = ask(servers, prompt="abcd", prompt_logprobs=2, max_tokens=1)["choices"]
    (echo,) = ask(servers, prompt="abcd", echo=True, logprobs=2, max_tokens=0)["choices"]
    first, *found = choice["prompt_logprobs"]
    ids = [ord(letter) - ord("a") + 66 for letter in "bcd"]
    assert first is None
    assert choice["logprobs"] is None
    told = [each[str(token)]["logprob"] for each, token in zip(found, ids, strict=True)]
    assert told == pytest.approx(echo["logprobs"]["token_logprobs"][1:])
    for each, alternatives in zip(found, echo["logprobs"]["top_logprobs"][1:], strict=True):
        ranked = {entry["rank"]: entry["logprob"] for entry in each.values() if entry["rank"]}
        assert sorted(ranked) == [1, 2]
        for logprob in alternatives.values():  # by text, which some bytes share
            assert pytest.approx(logprob) in ranked.values()


def test_alternatives_of_the_answer_are_not_those_of_the_prompt(servers):
    (choice,) = ask(servers, prompt="abcd", prompt_logprobs=3, logprobs=1)["choices"]
    assert {len(each) for each in choice["logprobs"]["top_logprobs"]} == {1}


def test_a_truncated_prompt_leaves_room_for_the_answer(servers):
    body = {
        "prompt": "ab" * 2000,
        "truncate_prompt_tokens": -1,
        "max_tokens": 20,
        "ignore_eos": True,
    }
    usage = ask(servers, **body)["usage"]
    assert usage["completion_tokens"] == 20
    assert usage["total_tokens"] == 2048


def test_llama_cpps_default_ends_where_the_context_does(servers):
    body = {"prompt": "ab" * 1015, "n_predict": -1, "max_tokens": None, "ignore_eos": True}
    assert ask(servers, **body)["usage"]["total_tokens"] == 2048


@pytest.mark.parametrize(("record", "body", "name"), [
    (TEXT, {"best_of": 2, "n": 3}, "best_of"),
    (TEXT, {"best_of": 2, "stream": True}, "best_of"),
    (TEXT, {"best_of": 300}, "best_of"),
    (TEXT, {"suffix": "b", "prompt": [66]}, "suffix"),
    (TEXT, {"suffix": "b", "echo": True}, "suffix"),
    (TEXT, {"n_probs": 1, "logprobs": 1}, "n_probs"),
    (TEXT, {"n_probs": 300}, "n_probs"),
    (TEXT, {"n_predict": 3}, "n_predict"),
    (TEXT, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    (CHAT, {"prompt_logprobs": 300}, "prompt_logprobs"),
    (CHAT, {"truncation_side": "left"}, "truncation_side"),
    (CHAT, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    (CHAT, {"echo": True}, "echo"),
    (CHAT, {"rid": "a", "request_id": "b"}, "request_id"),
    (CHAT, {"guided_regex": "a", "grammar": 'root ::= "a"'}, "grammar"),
    (CHAT, {"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    (CHAT, {"allowed_token_ids": [9999]}, "allowed_token_ids"),
    (CHAT, {"bad_words": [""]}, "bad_words"),
    (CHAT, {"exact": True, "regex": "a|b", "bad_words": ["a"]}, "exact"),
])  # fmt: skip
def test_what_can_not_be_honoured_is_refused(servers, record, body, name):
    assert ask(servers, record, "infill", **body)["error"]["param"] == name


@pytest.mark.parametrize("record", [CHAT, TEXT])
def test_a_stream_has_the_fields_of_a_whole_answer(servers, record):
    """What a stream's chunks add up to is the answer without a stream."""
    body: dict = {
        "bad_words": ["a"],
        "logprobs": True if record == CHAT else 1,
        "return_tokens_as_token_ids": True,
    }
    if record == CHAT:
        turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "so"}]
        body |= {"messages": turns, "continue_final_message": True, "echo": True}
    door = DOORS[record]
    whole = ask(servers, record, **body)["choices"][0]
    sent = {**door.base, **body, "stream": True}
    lines = httpx2.post(servers("bytes") + door.path, json=sent, timeout=60).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    parts = [event["choices"][0] for event in events]
    if record == CHAT:
        text = "".join(part["delta"].get("content") or "" for part in parts)
        assert text == whole["message"]["content"]
        assert text.startswith("so")
        tokens = [
            each["token"] for part in parts for each in (part["logprobs"] or {}).get("content", ())
        ]
        assert tokens == [each["token"] for each in whole["logprobs"]["content"]]
    else:
        assert "".join(part["text"] for part in parts) == whole["text"]
        tokens = [token for part in parts for token in part["logprobs"]["tokens"]]
        assert tokens == whole["logprobs"]["tokens"]
    assert tokens
    assert all(re.fullmatch(r"token_id:\d+", token) for token in tokens)


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_that_is_left_out_is_counted(servers, stream):
    body = {
        "max_tokens": 20,
        "stream": stream,
        "stream_options": {"include_usage": True} if stream else None,
    }
    sent = {**DOORS[CHAT].base, **body, "include_reasoning": False}
    found = httpx2.post(servers("thinker") + DOORS[CHAT].path, json=sent, timeout=60)
    assert found.status_code == 200, found.text
    assert "reasoning_content" not in found.text
    assert re.search(r'"reasoning_tokens":[1-9]', found.text)


def test_a_model_without_the_tokens_refuses_a_suffix(servers):
    error = ask(servers, suffix="b")["error"]
    assert error["param"] == "suffix"
    assert "Qwen2.5-Coder" in error["message"]
