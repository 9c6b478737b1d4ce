"""`sglang-lite replay`: recomputes an engine's steps, and writes the output of each layer to files."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "steps", type=Path, help="file of an engine with --debug-tensor-dump-output-folder"
    )
    parser.add_argument(
        "--model", default="smollm2-135m", help="as for Engine (default: smollm2-135m)"
    )
    parser.add_argument(
        "--out",
        default="replayed",
        help="folder of a folder for each process, with a file for each step (default: replayed)",
    )
    parser.add_argument(
        "--layers", type=int, nargs="+", help="numbers of the layers to write (default: all)"
    )
    parser.add_argument("--device", default="auto", help="as for Engine (default: auto)")
    parser.add_argument("--dtype", default="auto", help="as for Engine (default: auto)")
    parser.add_argument(
        "--tp", type=int, default=1, metavar="N", help="ranks that share each layer (default: 1)"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    import numpy as np

    from sglang_lite.engine.child.ranks import RankProcesses
    from sglang_lite.protocol import ParameterError
    from sglang_lite.runtime.config import EngineConfig
    from sglang_lite.runtime.executor import make_runner
    from sglang_lite.runtime.executor.sampler import Draws
    from sglang_lite.runtime.executor.step_record import read_steps
    from sglang_lite.runtime.loading.load_model import LoadedModel, load
    from sglang_lite.runtime.models.resolve import resolve

    capacity, records = read_steps(options.steps)
    for record in records:
        if record.has_ready_embeddings or record.columns:
            problem = (
                f"step {record.step} has rows of images or of adapters, which are not in the file."
            )
            raise ParameterError("steps", problem, hint="Write steps of text alone.")
    config = EngineConfig.make(
        model=options.model,
        device=options.device,
        dtype=options.dtype,
        tp_size=options.tp,
        debug_tensor_dump_output_folder=options.out,
        debug_tensor_dump_layers=options.layers,
    )
    path = resolve(options.model)
    links = None if options.tp == 1 else RankProcesses(config, path, print)
    loaded = load(config, path, ranks=links)
    if not isinstance(loaded, LoadedModel):
        raise ParameterError("--model", f"{options.model} does not generate.")
    runner = make_runner(loaded.model, capacity, config, loaded.compiling, links=links)
    for record in records:
        forward = runner.forward(record)
    if records:  # sampling waits for the other ranks, which have then written their files
        runner.sample(forward, Draws(np.zeros(1, dtype=np.int64))).wait_for_tokens()
    runner.close()
    print(f"{len(records):,} steps written to {options.out}")
    return 0
