"""The cases are what they are said to be, runs with other files and second runs of held-out or
fresh cases are refused, what is right is counted so, and every way runs, on a model without
meaning.
"""

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.answers.__main__ import main
from benchmarks.answers.cases import (
    FOLDER,
    TASKS,
    ChangedFilesError,
    HeldOutError,
    check_manifest,
    hashes,
    load_cases,
    record_run,
    tasks_without_cases,
)
from benchmarks.answers.outcome import Outcome
from benchmarks.answers.schemas import SCHEMAS
from benchmarks.answers.scoring import SCORES, interval, valid_call
from benchmarks.answers.table import show
from benchmarks.answers.toolbox import TOOLS, world_tools
from benchmarks.answers.ways import WAYS, fenced_calls, qwen_calls
from tests.server.conftest import TEMPLATE, folder  # noqa: F401 # a fixture

CASES = {
    task: [case for half in ("open", "held_out") for case in load_cases(task, half)]
    for task in TASKS
}
FRESH = load_cases("extraction", "fresh")


def right_outcome(task, case):
    """Outcome that has the case's answer, the first one where several are right."""

    def first(values):
        return {
            name: value[0] if isinstance(value, list) else value for name, value in values.items()
        }

    answer = case["answer"]
    if task == "extraction":
        return Outcome(value=json.loads(SCHEMAS[case["schema"]](**first(answer)).model_dump_json()))
    if task == "tools":
        return Outcome(
            calls=[(call["name"], json.dumps(first(call["arguments"]))) for call in answer]
        )
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
    texts = {
        half: {case["text"] for case in load_cases("quotes", half)} for half in ("open", "held_out")
    }
    assert not texts["open"] & texts["held_out"]  # what is held out is new


def test_the_fresh_set_is_as_documented():
    counts = [SCORES["extraction"](case, Outcome()) for case in FRESH]
    fields, stated = (sum(each[key] for each in counts) for key in ("fields", "stated"))
    assert (len(FRESH), fields, fields - stated) == (240, 840, 267)
    kinds = Counter((case["schema"], case["language"]) for case in FRESH)
    assert set(kinds) == {
        (schema, language) for schema in SCHEMAS for language in ("en", "de", "es")
    }
    assert set(kinds.values()) == {10}
    others = CASES["extraction"]
    for key in ("id", "text"):
        assert len({case[key] for case in [*others, *FRESH]}) == len(others) + len(FRESH)
    assert all(set(case["answer"]) <= set(SCHEMAS[case["schema"]].model_fields) for case in FRESH)
    assert tasks_without_cases("fresh") == [task for task in TASKS if task != "extraction"]
    assert tasks_without_cases("open") == tasks_without_cases("held_out") == []


@pytest.mark.parametrize("task", TASKS)
def test_the_answer_of_each_case_is_right_and_none_is_wrong(task):
    for case in CASES[task] + (FRESH if task == "extraction" else []):
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
    with pytest.raises(
        ChangedFilesError, match=r"data/labels\.open\.jsonl, data/more\.jsonl: not what MANIFEST"
    ):
        check_manifest(copy)


def test_held_out_and_fresh_cases_are_run_once(tmp_path):
    record = tmp_path / "HELD_OUT.jsonl"
    first = {
        "date": "2026-11-28",
        "commit": "",
        "model": "a",
        "task": "labels",
        "ways": ["free text"],
    }
    record.write_text(json.dumps(first) + "\n")  # as lines were before they named a half
    record_run("a", "held_out", "labels", ["select"], record)
    record_run("a", "held_out", "labels", ["masked Literal"], record)
    record_run("b", "held_out", "labels", ["select"], record)
    record_run("a", "fresh", "labels", ["free text", "select"], record)
    for half, ways in (
        ("held_out", ["free text"]),
        ("held_out", ["other", "select"]),
        ("fresh", ["select"]),
    ):
        with pytest.raises(
            HeldOutError,
            match=rf"{half} labels, {ways[-1]}: already run with a on \d{{4}}-.*--show",
        ):
            record_run("a", half, "labels", ways, record)
    uses = [json.loads(line) for line in record.read_text().splitlines()]
    assert [(use["model"], use["half"], use["ways"]) for use in uses[1:]] == [
        ("a", "held_out", ["select"]), ("a", "held_out", ["masked Literal"]), ("b", "held_out", ["select"]),
        ("a", "fresh", ["free text", "select"]),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--half", "fresh", "--tasks", "extraction", "tools", "quotes"),
            "--tasks tools quotes: no fresh cases. Name other tasks, or leave --tasks out.",
        ),
        (
            ("--half", "fresh", "--cases", "1"),
            "--cases tries the open half; fresh cases are run whole, once.",
        ),
        (
            ("--half", "held_out", "--cases", "1"),
            "--cases tries the open half; held_out cases are run whole, once.",
        ),
        (
            ("--half", "fresh", "--ways", "instructor, JSON", "--instructor", "no/python"),
            "no/python: no such program, and it is needed for: instructor, JSON. README.md says how to install it, "
            "--instructor names another Python, and --ways can leave these ways out.",
        ),
        (
            ("--half", "fresh", "--ways", "masks", "selected", "Ours"),
            "--ways selected; Ours: no such way of extraction. There are: "
            + "; ".join(WAYS["extraction"])
            + ".",
        ),
    ],
)
def test_a_run_that_cannot_be_whole_is_refused_before_it_is_recorded(arguments, message):
    record = FOLDER / "HELD_OUT.jsonl"
    before = record.read_text()
    with pytest.raises(SystemExit) as refusal:
        main(["no model", *arguments])
    assert refusal.value.code == message
    assert record.read_text() == before


@pytest.mark.slow
def test_a_fresh_run_is_recorded_and_has_results_of_its_own(folder, tmp_path):  # noqa: F811 # the fixture
    """In a copy, whose fresh set is an open case: nothing here reads the fresh texts into a model."""
    ignored = shutil.ignore_patterns("results", "pictures", "__pycache__", "*.md")
    answers = (
        Path(shutil.copytree(FOLDER.parent, tmp_path / "benchmarks", ignore=ignored)) / "answers"
    )
    line = (answers / "data" / "extraction.open.jsonl").read_text().splitlines()[0]
    (answers / "data" / "extraction.fresh.jsonl").write_text(line + "\n")
    (answers / "MANIFEST").write_text(
        "".join(f"{digest}  {name}\n" for name, digest in hashes(answers).items())
    )
    command = [
        sys.executable,
        "-m",
        "benchmarks.answers",
        folder,
        "--half",
        "fresh",
        "--ways",
        "masks",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    use = json.loads((answers / "HELD_OUT.jsonl").read_text().splitlines()[-1])
    model = Path(folder).stem
    assert [use[key] for key in ("model", "half", "task", "ways")] == [
        model,
        "fresh",
        "extraction",
        ["masks"],
    ]
    assert [path.name for path in (answers / "results").iterdir()] == [f"{model}.fresh.json"]
    assert done.stdout.strip() == show(answers / "results")
    assert f"| extraction: {model}, fresh |" in done.stdout


def test_each_half_has_tables_of_its_own(tmp_path):
    for half in ("open", "fresh"):
        (tmp_path / f"a-1.5b.{half}.json").write_text(
            json.dumps({"extraction": {"masks": _extraction_result()}})
        )
    shown = show(tmp_path)
    assert [line.split("|")[1].strip() for line in shown.splitlines() if "| valid |" in line] == [
        "extraction: a-1.5b, fresh", "extraction: a-1.5b, open",
    ]  # fmt: skip
    assert (
        shown.count("a-1.5b, fresh: there are no fresh cases for tools, labels, agents, quotes.")
        == 1
    )
    assert shown.count("there are no") == 1


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
    assert (
        tools["add_event"]("Tea", "May 1", "5 pm")
        == "the date must be YYYY-MM-DD and the time HH:MM"
    )
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


@pytest.mark.slow
def test_every_way_runs(folder, tmp_path):  # noqa: F811 # the fixture
    (Path(folder) / "chat_template.jinja").write_text(TEMPLATE)
    # which is not installed here
    ways = [way for ways in WAYS.values() for way in ways if "instructor" not in way]
    command = [
        sys.executable,
        "-m",
        "benchmarks.answers",
        folder,
        "--cases",
        "1",
        "--log",
        str(tmp_path),
        "--ways",
    ]
    done = subprocess.run([*command, *ways], cwd=FOLDER.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [line.split("|")[1].strip() for line in done.stdout.splitlines() if line.startswith("|")]
    assert set(rows) >= set(ways)
    assert {path.name.split(".")[-2] for path in tmp_path.iterdir()} == set(TASKS)
    assert "labels" in show({"a": {"labels": {"select": _result()}}})


def _result():
    cases = [{"id": "1", "right": 1, "of": 1, "valid": 1}]
    return {"seconds": 1.0, "prompt_tokens": 5, "completion_tokens": 0, "cases": cases}


def _extraction_result():
    counts = {
        "valid": 1,
        "fields": 3,
        "right": 1,
        "stated": 2,
        "found": 1,
        "null": 1,
        "invented": 1,
    }
    return {**_result(), "cases": [{"id": "1", **counts}]}
