"""What constraints do to answers: right values, tokens and time of each way, on the same model and prompt.

    python -m benchmarks.answers MODEL [--tasks extraction tools …] [--ways masks ours …] [--cases N]
    python -m benchmarks.answers MODEL --half held_out|fresh [--tasks extraction tools …] [--ways masks ours …]
    python -m benchmarks.answers --show

Greedy, 16 rows at a time. The counts of each case go into benchmarks/answers/results, beside those of other ways that
were run before with the same model and half; the table shows all of them. Held-out and fresh cases are run once for
each model and way. `--cases` takes the first open cases of each task, for a try: its results go nowhere. README.md in
the folder describes the cases.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import sys
import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import machine
from serve import serving

import sglang_lite as sgl
from benchmarks.answers.cases import (
    FOLDER,
    HALVES,
    TASKS,
    Case,
    check_manifest,
    commit,
    load_cases,
    record_run,
    tasks_without_cases,
)
from benchmarks.answers.outcome import Outcome
from benchmarks.answers.scoring import SCORES
from benchmarks.answers.table import show
from benchmarks.answers.ways import READ_AGAIN, WAYS, Context

RESULTS = FOLDER / "results"
INSTRUCTOR = Path("build/clients_instructor/bin/python")


def name_case(task: str, case: Case) -> dict[str, str]:
    """Id of a case and, as several quotes have one text, the text's."""
    named = {"id": case["id"]}
    if task == "quotes":
        named["text"] = sha256(case["text"].encode()).hexdigest()[:8]
    return named


def result_of(task: str, cases: Sequence[Case], outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """Counts of each case, and what the way cost in all."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit(),
        "machine": machine.describe(),
        "seconds": round(seconds, 1),
        "prompt_tokens": sum(each.prompt_tokens for each in outcomes),
        "completion_tokens": sum(each.completion_tokens for each in outcomes),
        "cases": [
            {**name_case(task, case), **SCORES[task](case, each)} for case, each in zip(cases, outcomes, strict=True)
        ],
    }


def run_way(context: Context, task: str, way: str, cases: Sequence[Case], log: Path) -> dict[str, dict[str, Any]]:
    """Results by way: of this one, and of another reading of its texts if there is one."""
    began = time.monotonic()
    outcomes = WAYS[task][way](context, cases)
    seconds = time.monotonic() - began - sum(each.setup_seconds for each in outcomes)
    read = {way: outcomes}
    if (task, way) in READ_AGAIN:
        name, again = READ_AGAIN[task, way]
        read[name] = again(cases, outcomes)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file:
        for case, outcome in zip(cases, outcomes):
            file.write(json.dumps({"way": way, "id": case["id"], **vars(outcome)}, ensure_ascii=False) + "\n")
    return {name: result_of(task, cases, each, seconds) for name, each in read.items()}


def read_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="name or path; the default model without one")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, help="all that have cases in the half without it")
    parser.add_argument("--ways", nargs="+", help="names of ways; all of each task without it")
    parser.add_argument("--cases", type=int, help="how many open cases of each task to try; nothing is recorded")
    parser.add_argument("--half", choices=HALVES, default="open", help="cases to run: all but the open ones only once")
    parser.add_argument("--show", action="store_true", help="print the tables of what was run")
    parser.add_argument("--log", type=Path, default=Path("build/answers"), help="folder for the models' texts")
    parser.add_argument("--instructor", type=Path, default=INSTRUCTOR, help="Python that has instructor")
    return parser.parse_args(arguments)


def choose_ways(options: argparse.Namespace) -> dict[str, list[str]]:
    """Returns the ways to run, by task.

    Raises:
        SystemExit: the arguments name a task without cases in the half, a number of cases that are run whole, an
            unknown way, or a way whose Python isn't installed.
    """
    without_cases = tasks_without_cases(options.half)
    if refused := [task for task in options.tasks or () if task in without_cases]:
        raise SystemExit(
            f"--tasks {' '.join(refused)}: no {options.half} cases. Name other tasks, or leave --tasks out."
        )
    if options.cases is not None and options.half != "open":
        raise SystemExit(f"--cases tries the open half; {options.half} cases are run whole, once.")
    tasks = options.tasks or [task for task in TASKS if task not in without_cases]
    ways = {task: [way for way in WAYS[task] if not options.ways or way in options.ways] for task in tasks}
    known = {way for names in ways.values() for way in names}
    if unknown := [way for way in options.ways or () if way not in known]:
        names = "; ".join(dict.fromkeys(way for task in tasks for way in WAYS[task]))
        raise SystemExit(f"--ways {'; '.join(unknown)}: no such way of {', '.join(tasks)}. There are: {names}.")
    need_instructor = sorted(way for way in known if way.startswith("instructor"))
    if need_instructor and shutil.which(str(options.instructor)) is None:
        raise SystemExit(
            f"{options.instructor}: no such program, and it is needed for: {'; '.join(need_instructor)}. README.md "
            "says how to install it, --instructor names another Python, and --ways can leave these ways out."
        )
    return ways


def main(arguments: Sequence[str] | None = None) -> None:
    options = read_arguments(arguments)
    if options.show:
        print(show(RESULTS))
        return
    check_manifest()
    ways = choose_ways(options)
    half, name = options.half, Path(options.model or "default").stem
    tried = options.cases is not None
    path = RESULTS / f"{name}.{half}.json"
    kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() and not tried else {}
    engine = sgl.Engine(options.model) if options.model else sgl.Engine()
    with engine, serving(engine) as url:
        context = Context(engine, url, options.instructor)
        for task, chosen in ways.items():
            for way in chosen:
                if half != "open":
                    record_run(name, half, task, [way])
                engine.flush_cache()
                cases = load_cases(task, half)[: options.cases]
                results = run_way(context, task, way, cases, options.log / f"{name}.{half}.{task}.jsonl")
                for each, result in results.items():
                    kept.setdefault(task, {})[each] = result
                    print(f"{task}: {each}: {result['seconds']} s", file=sys.stderr, flush=True)
                if not tried:
                    path.parent.mkdir(exist_ok=True)  # empty folders are not in the repository
                    path.write_text(json.dumps(kept, indent=1) + "\n")
    print(show({f"{name}, {half}": kept}))


if __name__ == "__main__":
    main()
