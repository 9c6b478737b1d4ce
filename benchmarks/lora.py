"""Adapters on a GPU: time of decoding steps whose rows have adapters, beside that of rows without.

    python benchmarks/lora.py [--shape llama-3.1-8b] [--rank 16] [--context 1024] [--pairs 7]
    [--launches]

Steps are those of the engine's runner: captured graphs, one token a row behind `--context` tokens,
weights and adapters random, adapters of all projections. Each pair is measured by turns, 20 steps
each; medians of the pairs, device time by events. "floor" is the share of bytes that the adapters
add to weights, keys and values. Host time is that of launching a step on an idle device, more than
without. `--launches` prints the kernels of a step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch

from sglang_lite.bench.shapes import SHAPES
from sglang_lite.runtime.executor.gpu_adapters import GpuAdapters, pool_bytes
from sglang_lite.runtime.executor.gpu_runner import GpuRunner
from sglang_lite.runtime.executor.step_record import (
    SAMPLING,
    ColumnChanges,
    SlotPages,
    StepRecord,
)
from sglang_lite.runtime.kernels.lora_weights import RANKS
from sglang_lite.runtime.loading.load_model import precision
from sglang_lite.runtime.models.gpu_decoder import GpuDecoder
from sglang_lite.runtime.models.lora.adapter import Adapter
from sglang_lite.runtime.models.lora.pool import COLUMN, PoolSize
from sglang_lite.runtime.models.weights.dummy import DummySource

PAGE, STEPS = 16, 20
NOTHING = np.zeros(0, dtype=np.int32)


class Steps:
    """Decoding steps of a runner, one token a row.

    Args:
        model: the model.
        rows: most rows of a step.
        context: tokens before each row's new one.
        adapters: memory of adapters, or None for a runner without.
    """

    def __init__(
        self, model: GpuDecoder, rows: int, context: int, adapters: GpuAdapters | None
    ) -> None:
        slot_pages, self._context = SlotPages(rows, context + 1, PAGE), context
        self._per_row = slot_pages.pages.shape[1]
        self.runner = GpuRunner(
            model,
            slot_pages,
            rows * self._per_row,
            2048,
            graphs=tuple({1, rows}),
            adapters=adapters,
        )
        self._pages = np.arange(rows * self._per_row, dtype=np.int32)
        np.random.default_rng(0).shuffle(self._pages)

    def record(self, adapters: list[int], *, first: bool = False) -> StepRecord:
        """A step of one row for each of the adapters, -1 for none."""
        rows = len(adapters)
        slots = np.arange(rows, dtype=np.int32)
        pages = self._pages[: rows * self._per_row] if first else NOTHING
        return StepRecord(
            step=0, slots=slots, epochs=slots, starts=slots * 0 + self._context, ends=slots * 0 + self._context + 1,
            decoding=rows, singles=rows, ids=slots % 1000 + 5, positions=slots * 0 + self._context,
            copies=np.zeros((2, 0), dtype=np.int32), page_indices=np.arange(len(pages), dtype=np.int32), pages=pages,
            started=slots if first else NOTHING, sampling=np.zeros(rows if first else 0, dtype=SAMPLING),
            columns={COLUMN: ColumnChanges(
                slots if first else NOTHING,
                np.array(adapters, dtype=np.int32) if first else NOTHING,
                len({*adapters} - {-1}),
            )},
        )  # fmt: skip

    def start(self, adapters: list[int]) -> None:
        for first in (True, False):
            self.runner.forward(self.record(adapters, first=first))
        torch.cuda.synchronize()

    def milliseconds(self, adapters: list[int]) -> float:
        """Device time of a step."""
        self.start(adapters)
        record, began, ended = (
            self.record(adapters),
            *(torch.cuda.Event(enable_timing=True) for _ in range(2)),
        )
        began.record()
        for _ in range(STEPS):
            self.runner.forward(record)
        ended.record()
        ended.synchronize()
        return began.elapsed_time(ended) / STEPS

    def host_milliseconds(self, adapters: list[int]) -> float:
        """Time of launching a step on an idle device."""
        self.start(adapters)
        record, took = self.record(adapters), []
        for _ in range(2 * STEPS):
            torch.cuda.synchronize()
            began = time.perf_counter()
            self.runner.forward(record)
            took.append(time.perf_counter() - began)
        return 1000 * statistics.median(took)

    def kernels(self, adapters: list[int]) -> Counter[str]:
        """Microseconds of each kernel of a step, and its launches."""
        self.start(adapters)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            self.runner.forward(self.record(adapters))
            torch.cuda.synchronize()
        return Counter(
            {
                f"{e.key[:40]} x {e.count}": round(e.self_device_time_total)
                for e in profile.key_averages()
            }
        )


def filled(model: GpuDecoder, count: int, rank: int) -> GpuAdapters:
    """Adapters of random numbers."""
    pages = rank // RANKS
    adapters = GpuAdapters(
        model.spec, PoolSize(count, count * pages, pages), torch.bfloat16, model.device
    )
    width = pool_bytes(model.spec, 1, torch.bfloat16) // 2
    torch.manual_seed(0)
    matrices = (
        (torch.randn((pages, width), device="cuda", dtype=torch.bfloat16) * 0.02).cpu().pin_memory()
    )
    one = Adapter("random", 1, rank, (), "", pages=matrices)
    for number in range(count):
        adapters.write_adapter_slot(number, range(number * pages, (number + 1) * pages), one)
    return adapters


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="llama-3.1-8b", choices=SHAPES)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--launches", action="store_true")
    options = parser.parse_args()
    spec, rows, device = SHAPES[options.shape], options.rows, torch.device("cuda:0")
    with torch.inference_mode():
        model = GpuDecoder(
            spec, DummySource(device), precision("auto", device), device, spec.max_positions
        )
    without = Steps(model, rows, options.context, None)
    having = Steps(model, rows, options.context, filled(model, rows, options.rank))
    read = 2 * model.active_parameters + rows * (options.context + 1) * model.token_bytes
    adapter = pool_bytes(spec, options.rank // RANKS, torch.bfloat16)
    none, one, all_ = [-1] * rows, [0] * rows, [*range(rows)]
    cases = [
        (f"{rows} rows, none with an adapter", none, none, 0),
        (f"{rows} rows, one adapter", none, one, adapter),
        (f"{rows} rows, {rows} adapters", none, all_, rows * adapter),
        (f"{rows} rows, half of them with one", none, [-1, 0] * (rows // 2), adapter),
        ("1 row without", [-1], [-1], 0),
        ("1 row with one", [-1], [0], adapter),
    ]
    lines = []
    for name, plain, adapted, added in cases:
        pairs = [
            (without.milliseconds(plain), having.milliseconds(adapted))
            for _ in range(options.pairs)
        ]
        base, own = (statistics.median(each) for each in zip(*pairs))
        ratio = statistics.median(b / a for a, b in pairs)
        floor = added / (read if len(plain) > 1 else 2 * model.active_parameters)
        hosts = [
            having.host_milliseconds(adapted) - without.host_milliseconds(plain)
            for _ in range(options.pairs)
        ]
        lines.append(
            f"{name:34} {base:7.3f} {own:7.3f} ms  {ratio - 1:+7.1%}  floor {floor:+6.1%}"
            f"  host {statistics.median(hosts):+.3f} ms"
        )
    if options.launches:
        for numbers in ([-1], [0], one, all_):
            of = having if max(numbers) >= 0 else without
            print(
                len(numbers),
                "rows,",
                len({*numbers} - {-1}),
                "adapters:",
                of.kernels(numbers).most_common(16),
            )
    print(
        f"{torch.cuda.get_device_name()}, {options.shape}, rank {options.rank}, behind {options.context} tokens"
    )
    print("step                             without    with", *lines, sep="\n")


if __name__ == "__main__":
    main()
