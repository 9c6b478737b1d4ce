"""`sglang-lite quantize`: writes a model with weights of few bits."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a folder of safetensors, or a hub id")
    parser.add_argument(
        "--to", choices=("int4", "int8"), default="int4", help="bits of a weight (default: int4)"
    )
    parser.add_argument(
        "--group", type=int, default=128, help="inputs that share a scale (default: 128)"
    )
    parser.add_argument(
        "--calibrate",
        type=Path,
        metavar="JSONL",
        help="texts by line, whose products with the weights are to change little (default: none)",
    )
    parser.add_argument(
        "--out", type=Path, help="folder to be made (default: the model's last name and -int4)"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from sglang_lite.runtime.host import startup_messages
    from sglang_lite.runtime.loading.quantise import quantise

    out = options.out or Path(f"{Path(options.model).name}-{options.to}")
    bar = partial(startup_messages.show_loading_progress, level=None)
    quantise(
        options.model,
        out,
        to=options.to,
        group=options.group,
        texts=options.calibrate,
        progress=bar,
    )
    print(f"written to {out}")
    return 0
