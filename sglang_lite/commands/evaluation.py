"""Evaluates a program on labelled rows: runs it, records the result of each row, and computes the
scores.
"""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

from sglang_lite.commands import metrics
from sglang_lite.commands.metrics import Metric, Score
from sglang_lite.commands.parser import split_file_and_function
from sglang_lite.commands.run_file import load_program, outcome_to_json_data
from sglang_lite.lang.backend.default import BackendLike
from sglang_lite.lang.batches.batch import allow_equal_items
from sglang_lite.lang.function import SglFunction
from sglang_lite.lang.runs import files
from sglang_lite.lang.state import ProgramState
from sglang_lite.notebook.markup import Markup, element, notebook_html, table_of_rows
from sglang_lite.protocol import ParameterError, ProgramError
from sglang_lite.protocol.anything import Json


@dataclass(slots=True)
class _Row:
    """Row of the data.

    Attributes:
        number: number of its line.
        columns: its arguments and labels.
        arguments: arguments of the program.
        result: variables of its run; only `error` if it has failed.
        sure: confidence in each value that is checked for calibration, by the value's path.
        judged: scores by judge (FILE[:FUNCTION]).
    """

    number: int
    columns: Mapping[str, Json]
    arguments: Mapping[str, Json]
    result: Mapping[str, Json] | None = None
    sure: Mapping[str, float] = field(default_factory=dict)
    judged: dict[str, float] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return self.result is not None and [*self.result] == ["error"]


def evaluate(
    file: str,
    data: Path,
    asked: Sequence[Metric],
    *,
    model: str | None,
    seed: int | None,
    out: Path | None,
    page: Path | None,
) -> int:
    """Prints a table of scores and the rows that failed. Returns exit status 1 if a row is broken
    or its run has failed.

    Args:
        file: FILE[:FUNCTION] of the program.
        data: JSON Lines file with arguments of the program and labels.
        asked: the metrics.
        model: a model, as for Engine; None for the backend that the file sets, or the default
            model.
        seed: seed of the runs.
        out: file of results, from which a stopped evaluation continues.
        page: HTML file to write.

    Raises:
        ParameterError: a file can't be used, or a metric does not fit the results.
    """
    from sglang_lite.engine.engine import Engine

    with redirect_stdout(sys.stderr):  # output of the files, whose code runs
        program = load_program(*split_file_and_function(file))
        judges = {
            each.value: load_program(*split_file_and_function(each.value))
            for each in asked
            if each.kind == "judge"
        }
    rows, broken = _read_labelled_rows(data, program, [each.label for each in asked if each.label])
    if page is not None and not page.parent.is_dir():
        raise ParameterError("--page", f"there is no folder {page.parent}.")
    with contextlib.ExitStack() as stack:
        kept = (
            None
            if out is None
            else stack.enter_context(
                _open_results(out, _collect_evaluation_identity(file, model, seed), rows)
            )
        )
        engine = None if model is None else stack.enter_context(Engine(model))
        _run_rows(program, [row for row in rows if row.result is None], asked, engine, seed, kept)
        for name, judge in judges.items():
            _score_by_judge(
                judge,
                name,
                [row for row in rows if not row.failed and name not in row.judged],
                engine,
                kept,
            )
    scores = [_compute_score(metric, rows) for metric in asked]
    print(metrics.format_scores(scores), end="")
    failures = broken | {row.number: str((row.result or {})["error"]) for row in rows if row.failed}
    if failures:
        print(
            f"{len(failures)} of {len(rows) + len(broken)} rows failed; those that ran count as wrong:"
        )
    for number, why in sorted(failures.items()):
        print(f"  {data}:{number}: {' '.join(why.split())}")
    if page is not None:
        files.write(page, _render_evaluation(file, scores, asked, rows, broken).encode(), "--page")
    return 1 if failures else 0


def _read_labelled_rows(
    file: Path, program: SglFunction, labels: Sequence[str]
) -> tuple[list[_Row], dict[int, str]]:
    """Reads the valid rows of a file. Also returns the problem with each invalid row, by line
    number.

    Raises:
        ParameterError: the file can't be read, or no row is valid.
    """
    try:
        lines = file.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")
    except OSError as error:
        raise ParameterError("DATA", f"{file}: {error.strerror}.") from error
    rows = []
    broken = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            columns = json.loads(line.decode())
            if not isinstance(columns, dict):
                raise ValueError("it is not a JSON object.")  # like the decoder's own errors
            arguments = {
                name: value
                for name, value in columns.items()
                if name in program.signature.parameters
            }
            program.signature.bind(**program.bind_call((), arguments, ""))
            for label in labels:
                if label not in columns:
                    raise ValueError(f"it has no column {label!r}.")
        except (ValueError, TypeError, RecursionError, ParameterError) as error:
            problem = error.message if isinstance(error, ParameterError) else str(error)
            broken[number] = problem.removeprefix(": ")
        else:
            rows.append(_Row(number, columns, arguments))
    if not rows:
        first = next(iter(broken.items()), None)
        why = (
            "has no rows."
            if first is None
            else f"has no row that can run. Line {first[0]}: {first[1]}"
        )
        raise ParameterError(
            "DATA", f"{file} {why}", hint="Give a JSON object a line: arguments and labels by name."
        )
    return rows, broken


def _collect_evaluation_identity(
    program: str, model: str | None, seed: int | None
) -> dict[str, Json]:
    """Returns the values that identify an evaluation in its results file: the program, a digest of
    its file, the model and the seed.
    """
    file, function = split_file_and_function(program)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    return {
        "program": f"{file.name}:{function or ''}",
        "sha256": digest,
        "model": model,
        "seed": seed,
    }


def _open_results(file: Path, identity: Mapping[str, Json], rows: Sequence[_Row]) -> FileIO:
    """Opens a file of results. Its first line identifies the evaluation, and each further line has
    the result of a row. Copies these results to the rows of the data.

    Raises:
        ParameterError: the file can't be read and written, or belongs to another evaluation.
    """
    by_row = {(row.number, _sorted_json(row.arguments)): row for row in rows}
    with contextlib.ExitStack() as stack:
        try:
            out = stack.enter_context(file.open("r+b" if file.exists() else "w+b", buffering=0))
            if sys.platform != "win32":  # Python has no file locks on Windows
                import fcntl

                fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
            *lines, cut = out.read().split(b"\n")
            if not lines and not _sorted_json(identity).encode().startswith(cut):
                raise ValueError("its first line is none of theirs")
            first, *results = (
                json.loads(line) for line in lines or [_sorted_json(identity).encode()]
            )
            for line in results:
                if (row := by_row.get((line["line"], _sorted_json(line["arguments"])))) is not None:
                    row.result = line["result"]
                    row.sure = line["sure"]
                    row.judged |= {
                        name: score
                        for name, (key, score) in line["judged"].items()
                        if key == _judge_digest(name, row)
                    }
        except (ValueError, LookupError, TypeError) as error:
            raise ParameterError(
                "--out", f"{file} has no results of an evaluation: {error!r}."
            ) from error
        except BlockingIOError as error:
            raise ParameterError("--out", f"{file} is open in another evaluation.") from error
        except OSError as error:
            raise ParameterError("--out", f"{file}: {error.strerror}.") from error
        if first != identity:
            raise ParameterError(
                "--out",
                f"{file} has results of another program, model or seed.",
                hint="Give another file.",
            )
        out.seek(-len(cut), 2)  # drops a line that was incomplete when the run was stopped
        out.truncate()
        if not lines:
            _append_result(out, identity)
        stack.pop_all()
        return out


def _append_result(out: FileIO, line: Mapping[str, Json]) -> None:
    files.append(out, str(out.name), _sorted_json(line).encode() + b"\n", parameter="--out")


def _save_row(out: FileIO | None, row: _Row) -> None:
    """Appends what is known about a row so far to the results file. A failed row is not saved, so
    that the next run tries it again.
    """
    if out is not None and not row.failed:
        known = {
            "line": row.number,
            "arguments": row.arguments,
            "result": row.result,
            "sure": row.sure,
        }
        judged = {name: (_judge_digest(name, row), score) for name, score in row.judged.items()}
        _append_result(out, known | {"judged": judged})


def _judge_digest(judge: str, row: _Row) -> str:
    """Returns a digest of a judge's file and a row's columns. A saved score is reused only while
    this digest is unchanged.
    """
    return hashlib.sha256(
        split_file_and_function(judge)[0].read_bytes() + _sorted_json(row.columns).encode()
    ).hexdigest()[:16]


def _sorted_json(value: Json) -> str:
    return json.dumps(value, sort_keys=True)


def _run_rows(
    program: SglFunction,
    rows: Sequence[_Row],
    asked: Sequence[Metric],
    backend: BackendLike | None,
    seed: int | None,
    out: FileIO | None,
) -> None:
    """Runs a program on rows and stores their results."""
    sure = [each.value for each in asked if each.kind == "calibration"]
    with allow_equal_items():
        outcomes = program.run_batch(
            [dict(row.arguments) for row in rows],
            backend=backend,
            seed=seed,
            on_error="return",
            generator_style=True,
            ordered=False,
        )
    for index, outcome in outcomes:
        row = rows[index]
        row.result = outcome_to_json_data(outcome)
        if not row.failed and not isinstance(outcome, Exception):
            row.sure = {
                path: share for path in sure if (share := _confidence_at(outcome, path)) is not None
            }
        _save_row(out, row)


def _confidence_at(state: ProgramState, path: str) -> float | None:
    """Returns the model's confidence in a variable or in a member of its value. For a selection,
    this is the probability of the picked choice. Returns None if the confidence is not known.
    """
    name, *members = path.split(".")
    try:
        selection = state.selection(name)
        return None if members else selection.probs[str(selection.picked)]
    except ProgramError:
        pass
    try:
        found = state.confidence(name)
        for member in members:
            found = found[int(member) if member.isdecimal() else member]
    except (ProgramError, LookupError):
        return None
    return found.prob


def _score_by_judge(
    judge: SglFunction,
    name: str,
    rows: Sequence[_Row],
    backend: BackendLike | None,
    out: FileIO | None,
) -> None:
    """Scores the results of rows with a judge, which is a program. The program's arguments are
    columns of a row and variables of the row's run, by name. The score is the value that the
    program returns, or its variable `score`.

    Raises:
        ParameterError: the program needs arguments that a row does not have, or gives no score from
            0 to 1.
    """
    items = []
    for row in rows:
        known = {**row.columns, **(row.result or {})}
        items.append({each: known[each] for each in judge.signature.parameters if each in known})
    with allow_equal_items():
        outcomes = judge.run_batch(
            items, backend=backend, seed=0, on_error="return", generator_style=True
        )
    for row, outcome in zip(rows, outcomes):
        result = outcome_to_json_data(outcome)
        if isinstance(outcome, Exception):
            raise ParameterError(
                "--metric", f"judge {name} failed for line {row.number}: {result['error']}"
            )
        score = result.get("return", result.get("score"))
        if isinstance(score, str):
            with contextlib.suppress(ValueError):
                score = json.loads(score)
        if not isinstance(score, bool | int | float) or not 0 <= score <= 1:
            raise ParameterError(
                "--metric",
                f"judge {name} gave {score!r:.80} for line {row.number}.",
                hint="Let it return a boolean or a number from 0 to 1, or set a variable score.",
            )
        row.judged[name] = float(score)
        _save_row(out, row)


def _compute_score(metric: Metric, rows: Sequence[_Row]) -> Score:
    if metric.kind == "judge":
        return metrics.mean_score(metric.name, [row.judged.get(metric.value, 0.0) for row in rows])
    ran = [row for row in rows if not row.failed]
    if metric.kind == "calibration":
        ran = [row for row in ran if metric.value in row.sure]
        if not ran:
            raise ParameterError(
                "--metric",
                f"no result has a confidence in {metric.value!r}.",
                hint="Evaluate a select, or a gen(confidence=True); results of an --out without it give another file.",
            )
        return metrics.calibration_error(
            metric.name, [(row.sure[metric.value], _is_right(metric, row)) for row in ran]
        )
    if ran and all(_lacks_value(metric, row) for row in ran):
        names = ", ".join(dict.fromkeys(name for row in ran for name in row.result or {})) or "none"
        raise ParameterError(
            "--metric", f"no result has {metric.value!r}; variables of the results: {names}."
        )
    return metrics.mean_score(metric.name, [float(_is_right(metric, row)) for row in rows])


def _lacks_value(metric: Metric, row: _Row) -> bool:
    try:
        metrics.value_at(row.result or {}, metric.value)
    except LookupError:
        return True
    return False


def _is_right(metric: Metric, row: _Row) -> bool:
    try:
        return not row.failed and metrics.has_right_value(metric, row.result or {}, row.columns)
    except LookupError:  # its run took a path that sets no such variable
        return False


def _render_evaluation(
    title: str,
    scores: Sequence[Score],
    asked: Sequence[Metric],
    rows: Sequence[_Row],
    broken: Mapping[int, str],
) -> str:
    """Renders the HTML page of an evaluation."""
    checked = [each for each in asked if each.kind in ("exact", "accuracy")]
    wrong = {
        row.number: [each.name for each in checked if not _is_right(each, row)] for row in rows
    }
    ordered = sorted(rows, key=lambda row: -len(wrong[row.number]))
    lines = (
        (
            row.number,
            ", ".join(wrong[row.number]),
            *map(_sorted_json, (row.columns, row.result, {**row.judged, **row.sure})),
        )
        for row in ordered
    )
    body = notebook_html(
        element("h1", title),
        table_of_rows(
            ("metric", "score", "95 % interval", "rows"), map(metrics.format_score_cells, scores)
        ),
        element("h2", "Rows"),
        table_of_rows(("line", "wrong", "columns", "result", "scores and confidence"), lines),
        *(
            [element("h2", "Broken lines"), table_of_rows(("line", "why"), sorted(broken.items()))]
            if broken
            else []
        ),
    )
    head = Markup('<meta charset="utf-8">'), element("title", title)
    return f"<!doctype html>{element('html', element('head', *head), element('body', body))}"
