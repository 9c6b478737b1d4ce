"""Time that rank 0's loop spends in a step's forward and draws, of one process and of ranks that
share a GPU.

    python benchmarks/host_ranks.py [--tp 1 2] [--shape llama-3.1-8b] [--rows 1 32] [--tokens 300]
    [--device cuda]

On a GPU both calls only launch kernels, so their time is the host's, however slowly the ranks'
kernels take turns. "told" is what telling the other ranks takes of it: records as bytes, and their
way into a socket; on a CPU it alone is the host's. Random weights; the median and the 90th
percentile of the steps that decode all rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import sglang_lite as sgl
from benchmarks.machine import describe
from sglang_lite.bench.shapes import SHAPES, hf_config
from sglang_lite.engine.child.ranks import RankProcesses
from sglang_lite.protocol import SamplingParams
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.loading.load_model import load_model
from sglang_lite.runtime.parallel.collectives import ONE_PROCESS


def timed(owner: Any, name: str) -> list[float]:
    """Seconds of each call of a method, from now on."""
    method: Callable[..., Any] = getattr(owner, name)
    found: list[float] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            found.append(time.perf_counter() - began)

    setattr(owner, name, call)
    return found


def measure(tp: int, folder: str, options: argparse.Namespace) -> None:
    fixed: dict[str, Any] = {
        "model": folder, "load_format": "dummy", "skip_tokenizer_init": True, "device": options.device,
        "max_total_tokens": 60_000, "max_running": max(options.rows),
    }  # fmt: skip
    config = EngineConfig.make(
        **fixed, tp_size=tp, **({} if options.device == "cpu" else {"gpu_id_step": 0})
    )
    links = (
        None
        if tp == 1
        else RankProcesses(config, Path(folder), lambda error: print(error, flush=True))
    )
    loaded = load_model(
        config, Path(folder), iter, ranks=ONE_PROCESS if links is None else links.collectives
    )
    with sgl.Engine.of(replace(loaded, ranks=links), **fixed) as engine:
        forward, draw = (timed(engine.core.runner, name) for name in ("forward", "sample"))
        told = [] if links is None else timed(links, "send")
        for rows in options.rows:
            for times in (forward, draw, told):
                times.clear()
            futures: list[Future[Any]] = [Future() for _ in range(rows)]
            params = SamplingParams(temperature=0.6, max_tokens=options.tokens, ignore_eos=True)
            for i, future in enumerate(futures):
                engine.submit([5 + i, 9, 17, 30], params, sink=future.set_result)
            for future in futures:
                future.result()
            steps = [1e3 * (a + b) for a, b in zip(forward, draw)][20:-20]
            words = [1e3 * (a + b) for a, b in zip(told[::2], told[1::2])][20:-20] or [0.0, 0.0]
            print(
                f"tp {tp}, {rows:3} rows: {statistics.median(steps):.3f} ms a step, "
                f"p90 {statistics.quantiles(steps, n=10)[-1]:.3f}; told {statistics.median(words):.3f}, "
                f"p90 {statistics.quantiles(words, n=10)[-1]:.3f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--shape", default="llama-3.1-8b", choices=SHAPES)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    print(describe())
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(hf_config(options.shape)))
        for tp in options.tp:
            measure(tp, folder, options)


if __name__ == "__main__":
    main()
