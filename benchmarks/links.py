"""What GPUs' links give: peer access, copies, and sums over ranks by size, in CUDA graphs and
without.

    python benchmarks/links.py [--ranks 2] [--share]

Each sum is first compared with one in float64, after exchanges of random sizes. Microseconds are
those of one sum, the median over replays of a graph with 32 of them; "norm" is the sum fused into
`add_norm` of rows of 8 KB, "parts" that of `kernels.two_shot`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import multiprocessing

sys.path.insert(0, str(Path(__file__).parent.parent))

from sglang_lite.runtime.kernels.all_reduce import gather_ranks, sum_ranks
from sglang_lite.runtime.kernels.norm import add_norm
from sglang_lite.runtime.kernels.two_shot import sum_parts
from sglang_lite.runtime.models.gpu_ranks import GpuRanks, connect
from sglang_lite.runtime.parallel.collectives import GlooCollectives
from sglang_lite.runtime.parallel.layout import Parallel

ROW = 8192  # bytes of a row of Llama-8B's hidden states
SIZES = [ROW << i for i in (0, 1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 14)]
TOGETHER = 32  # sums in a graph


def drawn(
    rank: int, step: int, count: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(1000 * step + rank)
    return torch.randn(count, generator=generator, device=device).to(dtype)


def check(ranks: GpuRanks, device: torch.device, steps: int) -> None:
    """Compares sums of random sizes, types and forms with those in float64, and gathered numbers
    with what was sent.
    """
    peers, parallel = ranks.peers, ranks.parallel
    assert peers is not None
    dice = random.Random(0)
    worst = 0.0
    for step in range(steps):
        dtype = dice.choice([torch.bfloat16, torch.float32])
        rows = dice.choice([1, 1, 2, 7, 31, 64, 100, 500])
        count = rows * ROW // dtype.itemsize
        every = [drawn(rank, step, count, dtype, device) for rank in range(parallel.tp)]
        exact, own = torch.stack(every).double().sum(0), every[parallel.rank]
        fused = peers if rows * ROW <= peers.max_bytes else None
        match dice.choice(["sum", "parts", "norm", "gather"]):
            case "sum":
                found = ranks.sum(own.clone())
            case "parts" if ranks.parts is not None and ranks.parts.can_sum(own):
                found = sum_parts(own, ranks.parts)
            case "norm" if fused is not None:
                residual = torch.zeros_like(own).view(rows, -1)
                add_norm(
                    own.view(rows, -1), residual, torch.ones_like(residual[0]), 1e-5, None, fused
                )
                found = residual.view(-1)
            case _:
                assert torch.equal(ranks.stack(own), torch.stack(every)), (
                    f"step {step}: gathered numbers differ"
                )
                continue
        error = float((found.double() - exact).norm() / exact.norm())
        limit = 4e-3 if dtype == torch.bfloat16 else 1e-6
        assert error < limit, f"step {step}: {rows} rows of {dtype} are off by {error:.2e}"
        assert (
            len({bytes(each.cpu().numpy()) for each in ranks.stack(found.view(torch.uint8))}) == 1
        ), "ranks differ"
        worst = max(worst, error / limit)
    if parallel.rank == 0:
        print(f"{steps} exchanges are right; errors up to {worst:.0%} of the limit", flush=True)


def graph_us(run: Callable[[], object], repeat: int = 30) -> float:
    """Microseconds of a call, captured in a graph."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        for _ in range(TOGETHER):
            run()
    return us(graph.replay, repeat) / TOGETHER


def us(run: Callable[[], object], repeat: int = 30) -> float:
    times = []
    for _ in range(repeat):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        run()
        ended.record()
        ended.synchronize()
        times.append(1000 * began.elapsed_time(ended))
    return statistics.median(times)


def rank_main(rank: int, count: int, share: bool, meeting: str, small: bool) -> None:
    device = torch.device("cuda", 0 if share else rank)
    torch.cuda.set_device(device)
    host = GlooCollectives(Parallel(tp=count, rank=rank), Path(meeting), 120)
    ranks = connect(host, device, ROW)
    assert isinstance(ranks, GpuRanks)
    check(ranks, device, 10 if small else 300)
    peers, nccl = ranks.peers, GpuRanks(ranks.parallel, None, ranks.nccl)
    assert peers is not None
    if rank == 0:
        names = "stores", "gather", "norm", "parts", "NCCL"
        print(
            f"{'KB':>6}",
            *(f"{name:>8}" for name in names),
            f"{'NCCL, no graph':>15}  µs",
            flush=True,
        )
    weight = torch.ones(ROW // 2, dtype=torch.bfloat16, device=device)
    for size in SIZES[:2] if small else SIZES:
        x = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
        rows = x.view(-1, ROW // 2)
        found = ["-"] * 6
        if size <= peers.max_bytes:
            found[0] = f"{graph_us(partial(sum_ranks, x, peers)):.1f}"
            found[1] = f"{graph_us(partial(gather_ranks, x, peers)):.1f}"
            found[2] = (
                f"{graph_us(partial(add_norm, rows, torch.zeros_like(rows), weight, 1e-5, None, peers)):.1f}"
            )
        if ranks.parts is not None and ranks.parts.can_sum(x):
            found[3] = f"{graph_us(partial(sum_parts, x, ranks.parts)):.1f}"
        if ranks.nccl is not None:
            found[4] = f"{graph_us(partial(nccl.sum, x)):.1f}"
            found[5] = f"{us(partial(nccl.sum, x)):.1f}"
        if rank == 0:
            print(
                f"{size >> 10:>6}",
                *(f"{each:>8}" for each in found[:5]),
                f"{found[5]:>15}",
                flush=True,
            )


def links(count: int) -> None:
    """Prints access and copies between the GPUs."""
    print(f"{torch.cuda.get_device_name(0)}, {count} ranks, torch {torch.__version__}", flush=True)
    x = torch.zeros(1 << 28, dtype=torch.uint8, device="cuda:0")
    for other in range(1, min(count, torch.cuda.device_count())):
        access = torch.cuda.can_device_access_peer(0, other)
        y = torch.zeros_like(x, device=f"cuda:{other}")
        y.copy_(x)
        print(
            f"GPU 0 to {other}: access {access}, copy {len(x) / us(partial(y.copy_, x)) / 1000:.0f} GB/s",
            flush=True,
        )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--share", action="store_true", help="put all ranks on the first GPU, whose time they share"
    )
    parser.add_argument("--small", action="store_true", help="measure as little as possible")
    options = parser.parse_args(arguments)
    links(1 if options.share else options.ranks)
    with tempfile.TemporaryDirectory() as folder:
        arguments_of_ranks = (options.ranks, options.share, f"{folder}/meeting", options.small)
        multiprocessing.spawn(rank_main, arguments_of_ranks, options.ranks)


if __name__ == "__main__":
    main()
