"""The cases are what they are said to be, runs with other files and second uses of the held-out half are refused, what
is right is counted so, and every way runs, on a model without meaning.
"""

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.answers.cases import (
    FOLDER,
    TASKS,
    ChangedFilesError,
    HeldOutError,
    check_manifest,
    load_cases,
    record_held_out,
)
from benchmarks.answers.outcome import Outcome
from benchmarks.answers.schemas import SCHEMAS
from benchmarks.answers.scoring import SCORES, interval, valid_call
from benchmarks.answers.table import show
from benchmarks.answers.toolbox import TOOLS, world_tools
from benchmarks.answers.ways import WAYS, fenced_calls, qwen_calls
from tests.server.conftest import TEMPLATE, folder  # noqa: F401 # a fixture

CASES = {task: [case for half in ("open", "held_out") for case in load_cases(task, half)] for task in TASKS}


def right_outcome(task, case):
    """Outcome that has the case's answer, the first one where several are right."""

    def first(values):
        return {name: value[0] if isinstance(value, list) else value for name, value in values.items()}

    answer = case["answer"]
    if task == "extraction":
        return Outcome(value=json.loads(SCHEMAS[case["schema"]](**first(answer)).model_dump_json()))
    if task == "tools":
        return Outcome(calls=[(call["name"], json.dumps(first(call["arguments"]))) for call in answer])
    return Outcome(value=answer)


def test_there_are_as_many_cases_as_documented():
    assert {task: len(cases) for task, cases in CASES.items()} == {
        "extraction": 120, "tools": 100, "labels": 200, "agents": 40, "quotes": 60,
    }  # fmt: skip
    counts = [SCORES["extraction"](case, Outcome()) for case in CASES["extraction"]]
    fields, stated = (sum(each[key] for each in counts) for key in ("fields", "stated"))
    assert (fields, fields - stated) == (416, 129)
    languages = Counter(case["language"] for case in CASES["extraction"])
    assert set(languages) == {"en", "de", "es"}
    assert min(languages.values()) >= 35
    for task, cases in CASES.items():
        assert len({case["id"] for case in cases}) == len(cases)
        assert abs(len(load_cases(task, "open")) - len(load_cases(task, "held_out"))) <= 4
    texts = {half: {case["text"] for case in load_cases("quotes", half)} for half in ("open", "held_out")}
    assert not texts["open"] & texts["held_out"]  # what is held out is new


@pytest.mark.parametrize("task", TASKS)
def test_the_answer_of_each_case_is_right_and_none_is_wrong(task):
    for case in CASES[task]:
        counts = SCORES[task](case, right_outcome(task, case))
        assert counts["right"] == counts.get("fields", counts.get("of")), case["id"]
        nothing = Outcome(value=case.get("world"), error="nothing")
        assert SCORES[task](case, nothing)["right"] == 0, case["id"]


def test_what_is_offered_fits_the_cases():
    for case in CASES["tools"]:
        assert {call["name"] for call in case["answer"]} <= set(case["tools"])
    assert all(case["text"].count(case["answer"]) == 1 for case in CASES["quotes"])
    assert all(case["answer"] in case["labels"] for case in CASES["labels"])
    assert all(len(case["labels"]) in range(3, 7) for case in CASES["labels"])


def test_a_run_with_other_files_is_refused(tmp_path):
    check_manifest()
    copy = Path(shutil.copytree(FOLDER, tmp_path / "answers"))
    check_manifest(copy)
    with (copy / "data" / "labels.open.jsonl").open("a") as file:
        file.write("\n")
    (copy / "data" / "more.jsonl").touch()
    with pytest.raises(ChangedFilesError, match=r"data/labels\.open\.jsonl, data/more\.jsonl: not what MANIFEST"):
        check_manifest(copy)


def test_the_held_out_half_is_run_once(tmp_path):
    record = tmp_path / "HELD_OUT.jsonl"
    record_held_out("a", "labels", ["select"], record)
    record_held_out("a", "labels", ["masked Literal"], record)
    record_held_out("b", "labels", ["select"], record)
    with pytest.raises(HeldOutError, match=r"labels, select: already run with a on \d{4}-"):
        record_held_out("a", "labels", ["free text", "select"], record)
    uses = [json.loads(line) for line in record.read_text().splitlines()]
    assert [(use["model"], use["ways"]) for use in uses] == [
        ("a", ["select"]), ("a", ["masked Literal"]), ("b", ["select"]),
    ]  # fmt: skip


def test_fields_are_right_invented_or_missing():
    case = {"schema": "invoice", "answer": {"total": 3.0, "due": "2025-01-02"}}
    value = {"total": 3, "due": None, "order_number": "7"}
    assert SCORES["extraction"](case, Outcome(value=value)) == {
        "valid": 1, "fields": 3, "right": 1, "stated": 2, "found": 1, "null": 1, "invented": 1,
    }  # fmt: skip
    assert SCORES["extraction"](case, Outcome(error="no"))["right"] == 0


def test_calls_are_read_and_checked():
    call = '{"name": "set_timer", "arguments": {"minutes": 5}}'
    read = [("set_timer", '{"minutes": 5}')]
    tools = [TOOLS["set_timer"]]
    assert qwen_calls(f"Sure.\n<tool_call>\n{call}\n</tool_call>", tools) == read
    assert qwen_calls(f"```json\n{call}\n```", tools) == []
    assert fenced_calls(f"```json\n{call}\n```", tools) == read
    assert fenced_calls('{"name": "other", "arguments": {}}', tools) == []
    assert qwen_calls("<tool_call>{</tool_call>", tools) == [("", "{")]
    assert valid_call("set_timer", '{"minutes": 5}', tools) == {"minutes": 5}
    for arguments in ('{"minutes": "5"}', "{}", '{"minutes": 5, "x": 1}', "["):
        assert valid_call("set_timer", arguments, tools) is None
    assert valid_call("weather", "{}", tools) is None
    case = {"tools": ["set_timer"], "answer": [{"name": "set_timer", "arguments": {"minutes": 5}}]}
    wrong = Outcome(calls=[*read, ("set_timer", '{"minutes": "5"}')])
    assert SCORES["tools"](case, wrong) == {"right": 0, "of": 1, "invalid": 1}


def test_tools_change_their_world():
    world = {"stock": {"tea": 2}, "calendar": {}}
    tools = {tool.__name__: tool for tool in world_tools(world)}
    assert (tools["change_stock"]("tea", -1), tools["change_stock"]("milk", 1)) == (
        "1 left", "no such item; there are tea",
    )  # fmt: skip
    assert tools["add_event"]("Tea", "May 1", "5 pm") == "the date must be YYYY-MM-DD and the time HH:MM"
    tools["add_event"]("Tea", "2025-05-01", "17:00")
    assert world == {"stock": {"tea": 1}, "calendar": {"Tea": "2025-05-01 17:00"}}


def test_an_interval_of_equal_ways_is_zero_and_of_better_ones_above():
    better = [{"right": 2, "fields": 3}] * 20
    worse = [{"right": index % 2, "fields": 3} for index in range(20)]
    assert interval(better, better) == (0.0, 0.0, 0.0)
    gain, low, high = interval(better, worse)
    assert gain == pytest.approx(50)
    assert 33.4 < low < gain < high < 66.7


def test_cases_with_one_text_are_drawn_together():
    """Thirty cases of two texts, of which one is all right: as uncertain as two cases are."""
    cases = [{"right": index % 2, "of": 1, "text": str(index % 2)} for index in range(30)]
    nothing = [{"right": 0, "of": 1, "text": str(index % 2)} for index in range(30)]
    assert interval(cases, nothing) == (50.0, 0.0, 100.0)


def test_an_event_that_was_left_in_place_is_seen():
    case = {"answer": {"calendar": {"Haircut": "2025-04-02 16:00"}}}
    left = {"calendar": {"Haircut": "2025-04-02 15:00", "haircut": "2025-04-02 16:00"}}
    assert SCORES["agents"](case, Outcome(value=left))["right"] == 0


def test_every_way_runs(folder, tmp_path):  # noqa: F811 # the fixture
    (Path(folder) / "chat_template.jinja").write_text(TEMPLATE)
    ways = [way for ways in WAYS.values() for way in ways if "instructor" not in way]  # which is not installed here
    command = [sys.executable, "-m", "benchmarks.answers", folder, "--cases", "1", "--log", str(tmp_path), "--ways"]
    done = subprocess.run([*command, *ways], cwd=FOLDER.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [line.split("|")[1].strip() for line in done.stdout.splitlines() if line.startswith("|")]
    assert set(rows) >= set(ways)
    assert {path.name.split(".")[-2] for path in tmp_path.iterdir()} == set(TASKS)
    assert "labels" in show({"a": {"labels": {"select": _result()}}})


def _result():
    cases = [{"id": "1", "right": 1, "of": 1, "valid": 1}]
    return {"seconds": 1.0, "prompt_tokens": 5, "completion_tokens": 0, "cases": cases}
