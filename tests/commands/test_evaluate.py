"""`sglang-lite eval`: scores of programs on labelled rows."""

import fcntl
import json
import random

import pytest

from sglang_lite.cli import main
from sglang_lite.commands.metrics import Metric, calibration_error, has_right_value, mean_score

PROGRAM = """
import sglang_lite as sgl

sgl.set_default_backend(sgl.ScriptedBackend({"crash": " bug", "parcel": " delivery"}, default="<b>other"))


@sgl.function
def classify(s, text):
    if text == "fails":
        raise ValueError("bad text")
    s += text + " is" + sgl.gen("kind", max_tokens=3)
    with open(__file__ + ".calls", "a") as calls:
        calls.write(text + "\\n")
    return {"parts": [s["kind"].strip()]}


@sgl.function
def judge(s, text, kind, other=""):
    return 0.5 if "bug" in kind else text == "a parcel"
"""
ROWS = [
    {"text": "a crash", "kind": "Bug"},
    {"text": "a parcel", "kind": "delivery"},
    {"text": "a bill", "kind": "billing"},
    {"text": "fails", "kind": "bug"},
]
ACCURACY = "accuracy:kind"


@pytest.fixture
def files(tmp_path):
    """(program, data)"""
    program, data = tmp_path / "kinds_file.py", tmp_path / "rows.jsonl"
    program.write_text(PROGRAM)
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return program, data


def calls(program):
    made = program.with_name(program.name + ".calls")
    return made.read_text().split("\n")[:-1] if made.exists() else []


def evaluate(program, data, *more):
    return main(["eval", f"{program}:classify", str(data), *more])


def scores(out):
    """Score by metric, from the printed table."""
    lines = [line.split("  ") for line in out.split("\n")[1:] if "%" in line]
    return {line[0].strip(): next(each.strip() for each in line[1:] if each) for line in lines}


def test_a_run_that_failed_counts_as_wrong(files, capsys):
    program, data = files
    asked = [ACCURACY, "exact:kind", "accuracy:return.parts.0=kind", f"judge:{program}:judge"]
    assert evaluate(program, data, *(part for each in asked for part in ("--metric", each))) == 1
    out = capsys.readouterr().out
    assert scores(out) == {
        "accuracy of kind": "50.0%", "exact of kind": "0.0%", "accuracy of return.parts.0": "50.0%",
        f"judge {program}:judge": "37.5%",
    }  # fmt: skip
    assert (
        f"1 of 4 rows failed; those that ran count as wrong:\n  {data}:4: ValueError: bad text\n"
        in out
    )


def test_broken_lines_are_named_and_the_others_run(files, capsys):
    program, data = files
    broken = (
        b'{"text"\n[1]\n{"kind": "bug"}\n{"text": "a parcel"}\n{"text": "\xff", "kind": "bug"}\n'
    )
    data.write_bytes(b'\xef\xbb\xbf{"text": "a crash", "kind": "bug"}\n\n' + broken)
    assert evaluate(program, data, "--metric", ACCURACY) == 1
    out = capsys.readouterr().out
    assert scores(out) == {"accuracy of kind": "100.0%"}
    reasons = [line.partition(": ")[2] for line in out.split("\n") if line.startswith("  ")]
    assert reasons[1:4] == [
        "it is not a JSON object.", "classify: missing a required argument: 'text'.", "it has no column 'kind'.",
    ]  # fmt: skip
    assert "can't decode byte 0xff in position 10" in reasons[4]
    assert len(reasons) == 5


def test_a_stopped_run_goes_on_wherever_its_file_was_cut(files, tmp_path, capsys):
    program, data = files
    out = tmp_path / "results.jsonl"
    evaluate(program, data, "--metric", ACCURACY, "--out", str(out))
    whole, table = out.read_bytes(), capsys.readouterr().out
    ends = [at + 1 for at, byte in enumerate(whole) if byte == 10]
    for size in [0, 5, *ends, *(end + 7 for end in ends[:-1]), *(end - 1 for end in ends)]:
        out.write_bytes(whole[:size])
        before = len(calls(program))
        evaluate(program, data, "--metric", ACCURACY, "--out", str(out))
        kept = [json.loads(line)["arguments"]["text"] for line in whole[:size].split(b"\n")[1:-1]]
        assert sorted(calls(program)[before:]) == sorted(
            {"a crash", "a parcel", "a bill"} - {*kept}
        )
        assert capsys.readouterr().out == table
        assert sorted(out.read_bytes().split(b"\n")) == sorted(whole.split(b"\n"))


def test_results_of_something_else_are_refused(files, tmp_path, capsys):
    program, data = files
    out = tmp_path / "results.jsonl"
    evaluate(program, data, "--metric", ACCURACY, "--out", str(out))
    kept = out.read_bytes()
    program.write_text(PROGRAM + "\n# changed\n")
    assert evaluate(program, data, "--metric", ACCURACY, "--out", str(out)) == 1
    assert (
        "has results of another program, model or seed. Give another file."
        in capsys.readouterr().err
    )
    for content in (b"notes", b'{"text": "a"}', b"no results\n", b"[]\n", b'{"a": 1}\n{"b": 2}\n'):
        out.write_bytes(content)
        assert evaluate(program, data, "--metric", ACCURACY, "--out", str(out)) == 1
        assert capsys.readouterr().err.startswith("sglang-lite: --out")
        assert out.read_bytes() == content
    assert kept.count(b"\n") == 4


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        ("kind", "'kind' is no metric"),
        ("exact:", "'exact:' is no metric"),
        ("exact:kind=", "names no column"),
        ("exact:=kind", "names no variable"),
        ("accuracy:knd=kind", "no result has 'knd'; variables of the results: kind, return."),
        ("accuracy:kind=knd", "has no row that can run. Line 1: it has no column 'knd'"),
        ("judge:nowhere.py", "there is no file nowhere.py"),
        ("calibration:kind", "kind"),
    ],
)
def test_a_metric_that_does_not_fit_is_refused(metric, said, files, capsys):
    assert evaluate(*files, "--metric", metric) == 1
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert not captured.out


def test_one_file_of_results_has_one_writer(files, tmp_path, capsys):
    out = tmp_path / "results.jsonl"
    with out.open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert evaluate(*files, "--metric", ACCURACY, "--out", str(out)) == 1
    assert "is open in another evaluation." in capsys.readouterr().err


def test_a_judge_scores_again_what_it_scored_by_another_label_or_code(files, tmp_path, capsys):
    program, data = files
    judge, out = tmp_path / "judge_file.py", tmp_path / "results.jsonl"
    asked = ["--metric", f"judge:{judge}", "--out", str(out)]
    body = (
        "import sglang_lite as sgl\n@sgl.function\ndef agrees(s, want):\n    return want == {!r}\n"
    )
    judge.write_text(body.format("yes"))
    for want, answer, share in (
        ("no", "yes", "0.0%"),
        ("yes", "yes", "75.0%"),
        ("yes", "no", "0.0%"),
    ):
        judge.write_text(body.format(answer))
        data.write_text("".join(json.dumps({**row, "want": want}) + "\n" for row in ROWS))
        before = len(calls(program))
        evaluate(program, data, *asked)
        assert [*scores(capsys.readouterr().out).values()] == [share]
        assert len(calls(program)) - before in (0, 3)


def test_a_judge_that_gives_no_score_is_refused(files, capsys):
    program, data = files
    program.write_text(PROGRAM.replace("return 0.5", "return 1.5"))
    assert evaluate(program, data, "--metric", f"judge:{program}:judge") == 1
    assert "gave 1.5 for line 1" in capsys.readouterr().err


def test_the_page_has_wrong_rows_first_and_texts_stay_texts(files, tmp_path):
    page = tmp_path / "page.html"
    evaluate(*files, "--metric", ACCURACY, "--page", str(page))
    html = page.read_text()
    assert max(html.index("a bill"), html.index("bad text")) < html.index("a crash")
    assert "&lt;b&gt;other" in html
    assert "<b>other" not in html


def test_select_has_its_shares_as_confidence(files, capsys):
    program, data = files
    program.write_text(
        PROGRAM.replace('sgl.gen("kind", max_tokens=3)', 'sgl.select("kind", [" bug", " bill"])')
    )
    assert evaluate(program, data, "--metric", "calibration:kind") == 1
    assert "calibration of kind" in capsys.readouterr().out


def test_an_interval_has_the_ends_that_the_mean_is_1_96_deviations_from():
    for n in range(1, 40):
        for k in range(n + 1):
            score = mean_score("", [1.0] * k + [0.0] * (n - k))
            for end in (score.low, score.high):
                assert end is not None
                assert (score.value - end) ** 2 == pytest.approx(
                    1.96**2 * end * (1 - end) / n, abs=1e-12
                )


def test_calibration_is_the_mean_gap_of_ten_bins():
    dice = random.Random(0)
    for _ in range(50):
        judged = [
            (dice.choice([dice.random(), 0.0, 0.5, 1.0]), dice.random() < 0.5)
            for _ in range(dice.randint(1, 60))
        ]
        expected = 0.0
        for low in range(10):
            held = [
                each
                for each in judged
                if low <= each[0] * 10 < low + 1 or (low == 9 and each[0] == 1)
            ]
            if held:
                gap = sum(sure for sure, _ in held) / len(held) - sum(was for _, was in held) / len(
                    held
                )
                expected += abs(gap) * len(held) / len(judged)
        assert calibration_error("", judged).value == pytest.approx(expected)


@pytest.mark.parametrize(
    ("value", "label", "exact", "accurate"),
    [
        (" Billing\n", "billing", False, True),
        (3, "3.0", False, True),
        (3, 3, True, True),
        (True, "true", False, True),
        ({"b": 1, "a": 2}, {"a": 2, "b": 1}, True, True),
        ("ab", "a b", False, False),
        (None, "", False, False),
        ("nan", "NaN", False, True),
        (["A ", 1], ["a", 1.0], False, True),
        (12345678901234567890, 12345678901234567891, False, False),
        ("1_000", 1000, False, False),
    ],
)
def test_accuracy_passes_over_form(value, label, exact, accurate):
    for kind, expected in (("exact", exact), ("accuracy", accurate)):
        assert has_right_value(Metric(kind, "x", "y"), {"x": value}, {"y": label}) is expected
