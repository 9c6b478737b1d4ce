"""`sglang-lite save`: writes a model into files that each rank reads for itself."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a folder of safetensors or .bin, or a hub id")
    parser.add_argument(
        "--sharded", action="store_true", required=True, help='for load_format="sharded_state"'
    )
    parser.add_argument(
        "--tp", type=int, default=1, help="ranks, each of which gets files of its own (default: 1)"
    )
    parser.add_argument(
        "--out", type=Path, help="folder to be made (default: the model's last name and -sharded)"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from sglang_lite.runtime.host import startup_messages
    from sglang_lite.runtime.loading.save import save_sharded

    out = options.out or Path(f"{Path(options.model).resolve().name}-sharded")
    save_sharded(
        options.model,
        out,
        options.tp,
        progress=partial(startup_messages.show_loading_progress, level=None),
    )
    print(f"written to {out}")
    return 0
