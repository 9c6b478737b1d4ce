"""Programs of a file with other texts, without the page."""

import tempfile
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sglang_lite as sgl
from sglang_lite.page.constraint_report import ConstraintText, report_constraint
from sglang_lite.playground import programs
from sglang_lite.playground.programs import Playground, RerunRequest, RunRequest

SOURCE = '''
from __future__ import annotations

import sglang_lite as sgl
from pydantic import BaseModel

BRIEF = "Be brief."
SYSTEM = BRIEF + ""


class Person(BaseModel):
    name: str


person = sgl.gen("person", type=Person)


def helper(s):
    s += "the helper's text"


@sgl.function
def profile(s: sgl.ProgramState, text: str = "Ann", times=2):
    """A docstring."""
    label = {"key": "no prompt"}["key"]
    s += sgl.system(SYSTEM)
    for _ in range(times):
        s += sgl.user(f"Who is {text!r:>9}? {{}} {text}") + sgl.assistant(person)
    s += sgl.user("Age?" if times else "No age?") + sgl.assistant(sgl.gen("age", regex="[0-9]{2}"))
    s += inner()


@sgl.function
def inner(s):
    s += "Old: " + sgl.select("old", ["yes", "no"])


@sgl.function
async def failing(s):
    s += "a"
    raise KeyError("nothing")
'''


class Page:
    """A playground with a file, and what the page shows of it."""

    def __init__(self, folder, source=SOURCE, **options):
        self.file = folder / "prog.py"
        self.file.write_text(source)
        backend = sgl.ScriptedBackend({"Who": '{"name": "Ann"}', "Age": "34"}, default="yes")
        self.playground = Playground(self.file, backend=backend, **options)
        self.described: Any = self.playground.describe_programs()

    def run(self, program="profile", edits=None, **arguments):
        places = {each["text"]: place for place, each in enumerate(self.described["texts"])}
        numbered = {places[text]: new for text, new in (edits or {}).items()}
        return self.playground.run(
            RunRequest(self.described["version"], program, arguments, numbered)
        )


def text_of(shown):
    """Text of a run, without the chat template's."""
    assert shown["error"] is None
    nodes = shown["data"]["nodes"]
    return [
        text
        for node in nodes
        if (text := "".join(piece[0] for piece in node["pieces"])) and "<|im" not in text
    ]


@pytest.fixture
def page(tmp_path):
    return Page(tmp_path)


def test_prompts_and_constraints_are_found(page):
    found = [(each["kind"], each["program"], each["text"]) for each in page.described["texts"]]
    schema = next(text for kind, _, text in found if kind == "json_schema")
    assert '"name"' in schema
    assert found == [
        ("prompt", "", "Be brief."),
        ("json_schema", "", schema),
        ("prompt", "profile", "Who is {text!r:>9}? {} {text}"),
        ("prompt", "profile", "Age?"),
        ("prompt", "profile", "No age?"),
        ("regex", "profile", "[0-9]{2}"),
        ("prompt", "inner", "Old: "),
        ("prompt", "failing", "a"),
    ]
    assert page.described["programs"][0] == {
        "name": "profile", "parameters": [{"name": "text", "text": "Ann"}, {"name": "times", "text": "2"}],
    }  # fmt: skip


def test_a_run_has_the_texts_that_were_typed(page):
    edits = {
        "Be brief.": "Be long.", "Who is {text!r:>9}? {} {text}": "Who {text}, or {text!r:>9}? {1 + 1} {evil()}",
        "Old: ": "Aged: ", "[0-9]{2}": "3[0-9]",
    }  # fmt: skip
    shown = page.run(edits=edits, text="Bo", times="1")
    texts = text_of(shown)
    assert texts[0] == "Be long."
    assert texts[1] == "Who Bo, or      'Bo'? {1 + 1} {evil()}"
    assert texts[2:] == ['{"name": "Ann"}', "Age?", "34", "Aged: ", "yes"]
    assert dict(shown["data"]["arguments"]) == {"text": "Bo", "times": "1"}
    # the file's own stay
    assert text_of(page.run(times="1"))[:2] == ["Be brief.", "Who is     'Ann'? {} Ann"]


@settings(max_examples=30)
@given(
    st.lists(
        st.sampled_from(
            ["{text}", "{text!r:>9}", "{", "}", "{}", "{x}", "a", "\\", "'", '"', "\n", "é", "{te"]
        )
    )
)
def test_only_the_own_expressions_of_a_text_are_expressions(parts):
    typed = "".join(parts)
    with tempfile.TemporaryDirectory() as folder:
        page = Page(
            Path(folder),
            'import sglang_lite as sgl\n@sgl.function\ndef p(s, text):\n    s += f"{text} {text!r:>9}"\n',
        )
        shown = page.run("p", {"{text} {text!r:>9}": typed}, text="B")
    expected = typed.replace("{text}", "B").replace("{text!r:>9}", "      'B'")
    assert "".join(text_of(shown)) == expected


def test_a_schema_replaces_the_type(page):
    schema = next(each["text"] for each in page.described["texts"] if each["kind"] == "json_schema")
    new = '{"type": "object", "properties": {"name": {"const": "Ann"}}, "additionalProperties": false}'
    assert '{"name": "Ann"}' in text_of(page.run(edits={schema: new}))
    refused = page.run(edits={schema: new.replace("Ann", "Bo")})["error"]
    assert "does not satisfy JsonSchema" in refused["text"]
    assert "assistant(person)" in refused["code"]
    assert "Give a JSON schema" in page.run(edits={schema: "{"})["error"]["text"]
    assert "Give a JSON schema" in page.run(edits={schema: "3"})["error"]["text"]


def test_another_answer_runs_what_depends_on_it(page):
    first = page.run(times="1")
    again = page.playground.rerun(RerunRequest(first["run"], "age", "77"))
    assert text_of(again)[4:] == ["77", *text_of(first)[5:]]
    wrong = page.playground.rerun(RerunRequest(first["run"], "age", "x"))
    assert "age" in wrong["error"]["text"]
    assert "forgotten" in page.playground.rerun(RerunRequest(99, "age"))["error"]["text"]


def test_an_error_is_shown_at_its_line(page):
    shown = page.run("failing")
    failed = shown["error"]
    assert failed["text"].startswith("KeyError: 'nothing'")
    assert [piece[0] for node in shown["data"]["nodes"] for piece in node["pieces"]] == ["a"]
    assert failed["code"] == '    raise KeyError("nothing")'
    assert page.file.read_text().split("\n")[failed["line"] - 1] == failed["code"]
    assert text_of(page.run())  # and the next run is as if nothing had been


@pytest.mark.parametrize(
    ("source", "line", "text"),
    [
        ("import sglang_lite\n\n1 / 0\n", 3, "ZeroDivisionError"),
        ("import sglang_lite\ndef f(:\n", 2, "invalid syntax"),
        ("import sglang_lite\n", None, "has no program"),
    ],
)
def test_a_file_with_an_error_can_be_mended(tmp_path, source, line, text):
    page = Page(tmp_path, source)
    error = page.described["error"]
    assert text in error["text"]
    assert error["line"] == line
    page.file.write_text(SOURCE)
    page.described = page.playground.describe_programs()
    assert text_of(page.run())


def test_a_changed_file_is_read_again_and_old_texts_refused(page):
    page.file.write_text(SOURCE.replace("Be brief.", "Be brief, please."))
    shown = page.run()
    assert shown["changed"]
    assert "has changed" in shown["error"]["text"]
    page.described = page.playground.describe_programs()
    assert text_of(page.run())[0] == "Be brief, please."


def test_wrong_arguments_are_told(page):
    assert "Did you mean text=" in page.run(txt="1")["error"]["text"]


def test_a_program_that_is_not_shown_is_not_run(tmp_path):
    page = Page(tmp_path, function="inner")
    assert [each["name"] for each in page.described["programs"]] == ["inner"]
    assert "no program 'profile'" in page.run("profile")["error"]["text"]


@pytest.mark.parametrize(
    ("kind", "text", "refused"),
    [
        ("json_schema", '{"type": "integer"}', False),
        ("json_schema", '{"type": "intege"}', True),
        ("json_schema", "{", True),
        ("regex", "(a", True),
        ("regex", "[ab]+", False),
        ("ebnf", 'root ::= "a"', False),
        ("ebnf", "root ::= b", True),
        ("nothing", "", True),
    ],
)
def test_a_constraint_is_reported_on(kind, text, refused):
    found = report_constraint(ConstraintText(kind, text))
    assert bool(found["refused"]) == refused
    assert (found["example"] is None) == refused


def test_texts_are_shown_while_the_engine_starts(tmp_path, monkeypatch):
    page = Page(tmp_path).playground
    starting, shown, ended = threading.Event(), threading.Event(), []

    def start(backend):
        starting.set()
        ended.append(shown.wait(30))

    monkeypatch.setattr(programs, "backend_for", start)
    thread = threading.Thread(target=page.prepare)
    thread.start()
    starting.wait(30)
    assert page.describe_programs()["texts"]
    shown.set()
    thread.join()
    assert ended == [True]


def test_halves_of_surrogate_pairs_reach_the_page_as_signs(tmp_path):
    source = 'import sglang_lite as sgl\n@sgl.function\ndef p(s, a="\\ud800"):\n    s += "x\\ud800"\n    raise KeyError(a)\n'
    page = Page(tmp_path, source)
    assert page.described["texts"][0]["text"] == "x?"
    assert page.described["programs"][0]["parameters"] == [{"name": "a", "text": "?"}]
    msgspec.json.encode([page.described, page.run("p")])
