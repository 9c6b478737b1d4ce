"""What constraints do to answers: right values, tokens and time of each way, on the same model and prompt.

    python -m benchmarks.answers MODEL [--tasks extraction tools …] [--ways masks ours …] [--cases N] [--held-out]
    python -m benchmarks.answers --show

Greedy, 16 rows at a time. The counts of each case go into benchmarks/answers/results, beside those of other ways that
were run before with the same model and half; the table shows all of them. `--cases` takes the first of each task, for
a try: its results go nowhere. README.md in the folder describes the cases.
"""

from __future__ import annotations

import argparse
import datetime
import json
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
from benchmarks.answers.cases import FOLDER, TASKS, Case, check_manifest, commit, load_cases, record_held_out
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
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--ways", nargs="+", help="names of ways; all of each task without them")
    parser.add_argument("--cases", type=int, help="how many of each task to try; nothing is recorded")
    parser.add_argument("--held-out", action="store_true", help="the other half, once")
    parser.add_argument("--show", action="store_true", help="print the tables of what was run")
    parser.add_argument("--log", type=Path, default=Path("build/answers"), help="folder for the models' texts")
    parser.add_argument("--instructor", type=Path, default=INSTRUCTOR, help="Python that has instructor")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = read_arguments(arguments)
    if options.show:
        print(show(RESULTS))
        return
    check_manifest()
    half, name = "held_out" if options.held_out else "open", Path(options.model or "default").stem
    ways = {task: [way for way in WAYS[task] if not options.ways or way in options.ways] for task in options.tasks}
    tried = options.cases is not None
    if tried and options.held_out:
        raise SystemExit("--cases tries the open half; the held-out half is run whole, once.")
    path = RESULTS / f"{name}.{half}.json"
    kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() and not tried else {}
    engine = sgl.Engine(options.model) if options.model else sgl.Engine()
    with engine, serving(engine) as url:
        context = Context(engine, url, options.instructor)
        for task in options.tasks:
            for way in ways[task]:
                if options.held_out:
                    record_held_out(name, task, [way])
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
