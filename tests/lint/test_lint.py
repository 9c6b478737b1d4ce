"""`sglang-lite lint`: planted faults are found, and nothing else is."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_lite.cli import main
from tests.runtime.media.seeing import save_seeing

HERE = Path(__file__).parent
PROGRAMS = sorted(path for path in (HERE / "programs").glob("*.py") if path.name != "__init__.py")
EXAMPLES = sorted(
    path
    for path in (HERE.parent.parent / "examples").glob("*.py")
    if "@sgl.function" in path.read_text()
)


@pytest.fixture
def lint(capsys, model_file):
    """Runs the command on a file; gives its status, and its report as data."""

    def run(*arguments):
        status = main(
            ["lint", "--model", str(model_file), *map(str, arguments), "--format", "json"]
        )
        shown = capsys.readouterr()
        return status, json.loads(shown.out) if shown.out else shown.err

    return run


def planted(file):
    """The line of a file's fault, and its code."""
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if found := re.search(r"# fault: ([\w-]+)", line):
            return number + (line.strip().startswith("#")), found[1]
    raise AssertionError(file)


@pytest.mark.parametrize("file", PROGRAMS, ids=lambda file: file.stem)
def test_a_planted_fault_is_found_and_nothing_else(file, lint):
    status, report = lint(file)
    found = [(each["line"], each["code"]) for each in report["programs"][0]["findings"]]
    line, code = planted(file)
    assert [(abs(at - line) <= 1, which) for at, which in found] == [(True, code)]
    assert status == 1


def test_a_description_in_the_prompt_cures_hidden_fields(lint, tmp_path):
    text = (HERE / "programs" / "hidden_fields.py").read_text()
    (finding,) = lint(HERE / "programs" / "hidden_fields.py")[1]["programs"][0]["findings"]
    advised = re.search(r"write ({sgl\.describe\(Person\)}) into the turn", finding["advice"])[1]
    cured = tmp_path / "cured.py"
    cured.write_text(text.replace("and answer in JSON:", f"and answer in JSON: {advised}"))
    status, report = lint(cured)
    assert (status, report["programs"][0]["findings"]) == (0, [])
    rows = data(tmp_path, [{"text": "Ada Lovelace, 1815"}, {"text": "Her name is Ada."}])
    found = lint(HERE / "programs" / "hidden_fields.py", "--data", rows)[1]["programs"][0][
        "findings"
    ]
    # of the first row; the second has a field's name
    assert [each["code"] for each in found] == ["hidden-fields"]


def test_text_that_changes_with_every_run_is_not_counted_as_shared(lint, tmp_path):
    text = (
        "import random\nimport sglang_lite as sgl\n@sgl.function\ndef f(s):\n"
        "    s += f'Run {random.randrange(10**9)}: ' + 'go on with what was said, ' * 10 + 'so' + sgl.gen('a', max_tokens=1)\n"
    )
    (tmp_path / "prog.py").write_text(text)
    (report,) = lint(tmp_path / "prog.py")[1]["programs"]
    assert [each["code"] for each in report["findings"]] == ["changing-text"]
    further = report["sharing"]["a_further_run"]
    assert further["computed_tokens"] > further["prompt_tokens"] - len("Run 123456789: ") > 40
    assert report["sharing"]["ends_at"]["line"] == 5


# whose pages say that they are for a larger model than the default one, which was not trained with tools
FOR_LARGER_MODELS = ("coding_agent", "data_agent", "support_agent")


@pytest.mark.sampled(4)  # each is traced in a process of its own, too
@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_the_examples_are_accused_of_nothing(file, lint):
    status, report = lint(file)
    found = {each["code"] for report in report["programs"] for each in report["findings"]}
    assert found <= ({"hidden-tools"} if file.stem in FOR_LARGER_MODELS else set())
    assert file.stem in FOR_LARGER_MODELS or status == 0


def test_tools_that_an_argument_has_are_followed_no_further(lint, tmp_path):
    text = (
        "import sglang_lite as sgl\n@sgl.function\ndef ask(s, at):\n    s += sgl.user('Go.')\n"
        "    return sgl.use_tools(s, (at.read, at.write), max_tokens=9)\n"
    )
    (tmp_path / "prog.py").write_text(text)
    status, report = lint(tmp_path / "prog.py")
    (program,) = report["programs"]
    assert (status, program["findings"]) == (0, [])
    assert any("which only a run knows" in note for note in program["notes"])


def test_media_that_the_model_does_not_take(lint, tmp_path, capsys):
    text = (
        "import sglang_lite as sgl\n@sgl.function\ndef look(s, picture):\n"
        "    s += sgl.user('What is this?')\n    s += sgl.assistant(sgl.gen('a', max_tokens=4))\n"
        "    s += sgl.user(\n        sgl.image(picture)\n        + sgl.video('a.mp4', 2))\n"
        "    s += sgl.assistant(sgl.gen('b', max_tokens=4))\n"
    )
    file = tmp_path / "prog.py"
    file.write_text(text)
    status, report = lint(file)
    found = [
        (each["code"], each["line"], each["message"]) for each in report["programs"][0]["findings"]
    ]
    assert found == [
        ("refused", 6, "the model of --model takes no images."),
        ("refused", 6, "the model of --model takes no videos."),
    ]
    assert status == 1
    save_seeing("llava", tmp_path / "llava")  # which is shown a video's frames
    assert main(["lint", "--model", str(tmp_path / "llava"), str(file)]) == 0
    capsys.readouterr()


ROWS = [{"text": f"{word} " * 12} for word in ("Good", "Bad", "Cold", "Warm")]


def data(tmp_path, rows):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_a_move_brings_what_is_promised(lint, tmp_path):
    file = HERE / "programs" / "behind.py"
    rows = data(tmp_path, ROWS)
    _, report = lint(file, "--data", rows)
    before = report["programs"][0]["sharing"]
    (move,), (finding,) = before["moves"], report["programs"][0]["findings"]
    lines = file.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if "# fault" in line) + 1
    last = next(i for i, line in enumerate(lines) if line == "        )")
    text, own = (
        lines[first : last + 1],
        next(i for i, line in enumerate(lines) if "Review:" in line),
    )
    moved = [*lines[:own], *text, *lines[own:first], *lines[last + 1 :]]
    (tmp_path / "moved.py").write_text("\n".join(moved))
    status, report = lint(tmp_path / "moved.py", "--data", rows)
    after = report["programs"][0]["sharing"]
    assert status == 0
    assert after["moves"] == []
    gain = before["computed_tokens"] - after["computed_tokens"]
    assert gain // (len(ROWS) - 1) == move["tokens_a_row"] > 40
    assert gain / before["computed_tokens"] == move["less_prefill"]
    promised = f"+{move['tokens_a_row']} shared tokens a row, -{move['less_prefill']:.0%} prefill"
    assert promised in finding["message"]


def test_a_share_that_is_wanted(lint, tmp_path):
    file, rows = (
        HERE.parent.parent / "examples" / "batch.py",
        data(tmp_path, [{"word": w} for w in ("dog", "oak", "eagle")]),
    )
    status, report = lint(file, "--data", rows, "--fail-under", 50)
    shared = report["programs"][0]["sharing"]
    assert status == 0
    assert shared["prompts"] == 3
    assert shared["computed_tokens"] < shared["prompt_tokens"]
    assert (
        0.5
        < shared["cached_share"]
        == round(1 - shared["computed_tokens"] / shared["prompt_tokens"], 4)
    )
    status, report = lint(file, "--data", rows, "--fail-under", 99.9)
    assert status == 1
    assert report["programs"][0]["findings"][0]["code"] == "low-sharing"
    assert shared["ends_at"]["line"] == 12


def test_an_engine_has_prompts_of_as_many_tokens_as_are_counted(lint, tmp_path, engine):
    text = (
        "import sglang_lite as sgl\n@sgl.function\ndef f(s, x):\n    s += sgl.user(f'Say {x}.')\n"
        "    s += sgl.assistant('Well, ' + sgl.gen('a', max_tokens=1))\n"
    )
    (tmp_path / "prog.py").write_text(text)
    row = {"x": "<|im_end|> and more"}  # which is no special token
    shared = lint(tmp_path / "prog.py", "--data", data(tmp_path, [row]))[1]["programs"][0][
        "sharing"
    ]
    names: dict = {}
    exec(compile(text, "prog.py", "exec"), names)
    assert names["f"].run(**row, backend=engine).usage("a").prompt_tokens == shared["prompt_tokens"]


def test_costs_are_told_where_prices_are_given(capsys, tmp_path, model_file):
    file, rows = (
        HERE.parent.parent / "examples" / "batch.py",
        data(tmp_path, [{"word": "dog"}, {"word": "oak"}]),
    )
    assert (
        main(
            [
                "lint",
                str(file),
                "--data",
                str(rows),
                "--price",
                "1000000",
                "--cached-price",
                "500000",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    counts = re.search(r"2 rows, 2 prompts of (\d+) tokens: (\d+) are computed", out)
    tokens, computed = int(counts[1]), int(counts[2])
    assert (
        f"cost of prompts: {computed + (tokens - computed) / 2:.4g}, without sharing {tokens}"
        in out
    )


def test_rows_may_decide_what_the_body_does(lint, tmp_path):
    file = HERE.parent.parent / "examples" / "quickstart.py"
    rows = data(tmp_path, [{"places": ["Venice", "Japan"]}, {"places": ["Rome", "Japan", "Oslo"]}])
    status, report = lint(f"{file}:compare", "--data", rows)
    assert status == 0
    assert report["programs"][0]["sharing"]["prompts"] == 5
    assert report["programs"][0]["notes"] == []


# ------------------------------------------------------------------------------------------ formats


def test_text_names_file_and_line(capsys, model_file):
    file = HERE / "programs" / "stop.py"
    assert main(["lint", f"{file}:year"]) == 1
    out = capsys.readouterr().out
    assert f"{file}:{planted(file)[0]}: stop-never-comes: 'year' can never reach stop='\\n'" in out
    assert "sharing ends at value {event}" in out


# ---------------------------------------------------------------------------------------- bad usage


def test_what_makes_no_sense_is_told_with_file_and_line(tmp_path, lint):
    def file(name, text):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    program = "import sglang_lite as sgl\n@sgl.function\ndef f(s, x):\n    s += x\n"
    fine = file("fine.py", program)
    two = file("two.py", program + "@sgl.function\ndef g(s):\n    s += 'x'\n")
    rows = file("rows.jsonl", '{"x": "a"}\n')
    for arguments, words in (
        (["none.py"], "there is no file none.py"),
        ([file("broken.py", "x = (\n")], "broken.py:1: '(' was never closed"),
        ([file("fails.py", "x = 1\ny = x / 0\n")], "fails.py:2: ZeroDivisionError"),
        ([file("exits.py", "import sys\nsys.exit(3)\n")], "exits.py:2: SystemExit: 3"),
        ([file("empty.py", "")], "has no program"),
        ([f"{fine}:g"], "has no program 'g'; it has: f"),
        ([two, "--data", rows], "has 2 programs. Name one: "),
        ([fine, "--data", tmp_path / "none.jsonl"], "none.jsonl: No such file"),
        ([fine, "--data", file("a.jsonl", '{"x": 1}\n{"x"\n')], "a.jsonl:2: "),
        ([fine, "--data", file("b.jsonl", "[1]\n")], "b.jsonl:1: [1] is not an object"),
        ([fine, "--data", file("c.jsonl", "\n")], "c.jsonl has no rows"),
        (
            [fine, "--data", file("d.jsonl", '{"y": 1}\n')],
            "d.jsonl: row 1: f: missing a required argument: 'x', and was given 'y'",
        ),
        (
            [fine, "--fail-under", "5"],
            "--fail-under: needs rows to measure. Give --data rows.jsonl",
        ),
        ([fine, "--price", "3"], "--price: needs rows to measure. Give --data rows.jsonl"),
        (
            [fine, "--data", rows, "--fail-under", "200"],
            "--fail-under: 200 is not between 0 and 100.",
        ),
        ([fine, "--data", rows, "--price=-3"], "--price: -3 is not a number of at least 0."),
        (
            [fine, "--data", rows, "--cached-price", "nan"],
            "--cached-price: nan is not a number of at least 0.",
        ),
        ([fine, "--model", tmp_path / "no model"], "model"),
    ):
        status, message = lint(*arguments)
        assert status == 2
        assert words in message, message
        assert message.startswith("sglang-lite: ")


def test_without_a_model_faults_are_found_and_tokens_are_not_counted(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("SGLANG_LITE_CACHE", str(tmp_path))
    file = HERE / "programs" / "stop.py"
    assert main(["lint", str(file)]) == 1
    out = capsys.readouterr().out
    assert "stop-never-comes" in out
    assert "tokens are not counted: smollm2-135m has not been fetched. Give --model" in out


def test_a_file_is_imported_and_its_main_part_does_not_run(tmp_path, model_file):
    (tmp_path / "helper.py").write_text("TEXT = 'from beside it'\n")
    (tmp_path / "prog.py").write_text(
        "import sglang_lite as sgl\nfrom helper import TEXT\n@sgl.function\ndef f(s):\n    s += TEXT + sgl.gen('a')\n"
        "print('imported')\nif __name__ == '__main__':\n    raise SystemExit('ran')\n"
    )
    command = [sys.executable, "-m", "sglang_lite.cli", "lint", "prog.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "imported\n")
    assert done.stdout.startswith("f: 0 findings\n")


def test_arguments_that_name_control_tokens_outside_turns_are_found(lint, tmp_path):
    (tmp_path / "prog.py").write_text(
        "import sglang_lite as sgl\n\n\n"
        "@sgl.function\ndef loose(s, query):\n"
        "    s += sgl.user(query)\n"
        "    s += 'Query: ' + query + sgl.gen('words')\n"
        "    s += sgl.plain(query) + sgl.gen('more')\n"
    )
    (tmp_path / "rows.jsonl").write_text('{"query": "tea"}\n{"query": "a<|im_end|>b"}\n')

    def found():
        (program,) = lint(tmp_path / "prog.py", "--data", tmp_path / "rows.jsonl")[1]["programs"]
        return [(each["code"], each["line"], each["message"]) for each in program["findings"]]

    said = (
        "the argument 'query' spells <|im_end|>, and outside turns this is a control token. (row 2)"
    )
    assert [each for each in found() if each[0] == "control-token"] == [("control-token", 7, said)]
    text = (tmp_path / "prog.py").read_text()
    (tmp_path / "prog.py").write_text(
        text.replace("@sgl.function", "@sgl.function(untrusted_arguments=True)")
    )
    assert [each for each in found() if each[0] == "control-token"] == []


LOOP = """
import sglang_lite as sgl

def look(city: str) -> int:
    "Population."
    return 1

def compact(s):
    s.compact(keep=2, max_tokens=50)

def step(s):
    s += sgl.user("Go on.")
    s += sgl.assistant(sgl.gen("b", max_tokens=100))

@sgl.function
def f(s, question="Go on."):
    s += sgl.system("Be kind.")
    LOOP
        s += sgl.user(question)
        s += sgl.assistant(sgl.gen("a", max_tokens=100))
        END
"""
STOPS = "if s['a'] == 'stop': break"


@pytest.mark.parametrize(
    ("loop", "end", "turn"),
    [
        ("for i in range(50):", "", range(8, 11)),
        ("for i in range(5):", "", None),
        ("for i in range(50):", "if i % 4 == 3: s.compact(keep=2, max_tokens=50)", None),
        ("for i in range(50):", "s.compact(keep=2)", range(0)),  # its own limit is 512 tokens
        ("while True:", STOPS, range(8, 11)),
        ("while True:", f"s.compact(keep=0, max_tokens=50)\n        {STOPS}", None),
        ("while True:", "break", None),
        ("while 'a' not in s or s['a'] != 'stop':", "", range(8, 11)),
        ("for i in range(9):", "f = s.fork(2)\n        f += sgl.user('x' * 900)", None),
        ("for i in range(50):", "sgl.use_tools(s, [look], max_tokens=100)", range(4, 7)),
        ("while True:", f"compact(s)\n        {STOPS}", None),
        ("for i in range(50):", "step(s)", range(4, 7)),
    ],
    ids=str,
)
def test_a_loop_that_outgrows_the_context_is_predicted(lint, tmp_path, loop, end, turn):
    (tmp_path / "prog.py").write_text(LOOP.replace("LOOP", loop).replace("END", end))
    (report,) = lint(tmp_path / "prog.py", "--context", 1024)[1]["programs"]
    found = [each for each in report["findings"] if each["code"] == "outgrows-context"]
    if not turn:
        assert found == []
        return
    (finding,) = found
    assert finding["line"] == 18
    assert "the context of 1,024" in finding["message"]
    growth, full = re.search(
        r"up to (\d+) tokens; .* in iteration (\d+)", finding["message"]
    ).groups()  # type: ignore[union-attr] # it matches
    assert int(full) in turn
    assert 100 < int(growth) < 400
    advice = "Lower keep=" if "s.compact" in end else "s.compact(keep=…)"
    assert advice in finding["advice"]


@pytest.mark.parametrize(
    ("block", "line"),
    [
        ("for i in range(50):\n        step(s)", 6),
        ("step(s)\n    for i in range(5):\n        step(s)", 0),
        ("def ask():\n        step(s)\n    for i in range(5):\n        ask()", 0),
        ("for i in range(400):\n        s += sgl.select('a', choices=['yes ' * 9, 'no'])", 6),
    ],
)
def test_turns_of_a_helper_belong_to_the_loop_that_calls_it(lint, tmp_path, block, line):
    (tmp_path / "prog.py").write_text(
        "import sglang_lite as sgl\n\n"
        f"@sgl.function\ndef f(s):\n    s += 'Go on: '\n    {block}\n\n"
        "def step(s):\n    s += 'More: ' + sgl.gen('a', max_tokens=100)\n"
    )
    (report,) = lint(tmp_path / "prog.py", "--context", 1024)[1]["programs"]
    found = [each["line"] for each in report["findings"] if each["code"] == "outgrows-context"]
    assert found == [line] * bool(line)


def test_a_long_loop_is_predicted_from_its_first_iterations(lint, tmp_path):
    (tmp_path / "prog.py").write_text(LOOP.replace("LOOP", "while True:").replace("END", STOPS))
    (report,) = lint(tmp_path / "prog.py", "--context", 100_000)[1]["programs"]
    (finding,) = [each for each in report["findings"] if each["code"] == "outgrows-context"]
    growth, full = map(
        int,
        re.search(r"up to (\d+) tokens; .* in iteration (\d+)", finding["message"]).groups(),  # type: ignore[union-attr] # it matches
    )
    assert (full - 2) * growth < 100_000 <= (full + 1) * growth


def test_a_context_is_a_positive_number(lint):
    status, error = lint(HERE / "programs" / "dead.py", "--context", 0)
    assert status == 2
    assert "--context: 0 is not" in error
