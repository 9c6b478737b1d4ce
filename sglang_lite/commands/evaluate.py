"""`sglang-lite eval`: measures how often a program is right on labelled rows."""

from __future__ import annotations

import argparse
from pathlib import Path

from sglang_lite.commands.parser import add_file_argument, add_model_flag


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_file_argument(parser)
    parser.add_argument(
        "data",
        type=Path,
        metavar="DATA.jsonl",
        help="a JSON object a line: arguments of the program, and labels",
    )
    parser.add_argument(
        "--metric",
        action="append",
        required=True,
        metavar="KIND:VARIABLE=COLUMN",
        help="exact, accuracy or calibration of a variable by a column; or judge:FILE[:FUNCTION] (no default)",
    )
    add_model_flag(parser)
    parser.add_argument(
        "--seed", type=int, help="seed of the draws (default: another one each time)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="file of results, from which a stopped run goes on (default: none)",
    )
    parser.add_argument(
        "--page", type=Path, metavar="FILE.html", help="also write a page (default: none)"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from sglang_lite.commands.evaluation import evaluate
    from sglang_lite.commands.metrics import parse_metric

    return evaluate(
        options.file,
        options.data,
        [parse_metric(text) for text in options.metric],
        model=options.model,
        seed=options.seed,
        out=options.out,
        page=options.page,
    )
