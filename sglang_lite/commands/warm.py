"""`sglang-lite warm`: loads a model once, so that everything it compiles is cached."""

from __future__ import annotations

import argparse
import time


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="a model, as for Engine (default: the default model)")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from sglang_lite.engine.engine import Engine

    started = time.perf_counter()
    with Engine(**({"model": options.model} if options.model else {})) as engine:
        print(f"{engine.model_name}: ready after {time.perf_counter() - started:.1f} s")
    return 0
