"""The experts of one layer on one GPU: our kernels, torch's grouped products, and a loop over
experts.

    python benchmarks/experts.py [--small] [--tokens 1 8 64 256 8192]

Qwen3-30B-A3B's layer (hidden 2,048, 128 experts of 768, 8 a token) with random weights and a random
router. Ours has the routing in it, the others do not. All but the loop are replayed as one CUDA
graph of several calls with routings of their own, so that no expert's weights stay in a cache;
medians of replays. "limit": the weights of the chosen experts at the rate of a large copy, or the
products at the rate of a large one, whichever takes longer; both are measured here. `--small` is a
tiny layer, which also runs under Triton's interpreter (`TRITON_INTERPRET=1`), where times mean
nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.nn.functional as F
import triton

from sglang_lite.runtime.kernels.experts import ExpertMatrices, apply_experts
from sglang_lite.runtime.kernels.experts_route import experts_route

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPE = torch.bfloat16 if GPU else torch.float16


@dataclass(frozen=True)
class Shape:
    hidden: int
    inner: int
    experts: int
    top: int


SHAPES = {"qwen3-30b-a3b": Shape(2048, 768, 128, 8), "small": Shape(128, 128, 4, 2)}
Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # of x, ids and weights


def make_matrices(shape: Shape, *, eight: bool) -> ExpertMatrices:
    """Random weights; in 8 bits with scales by blocks of 128 by 128."""

    def matrix(rows: int, columns: int) -> torch.Tensor:
        made = torch.empty((shape.experts, rows, columns), device=DEVICE, dtype=DTYPE)
        made.normal_(std=columns**-0.5)
        return made.to(torch.float8_e4m3fn) if eight else made

    def scales(rows: int, columns: int) -> torch.Tensor | None:
        return (
            torch.rand((shape.experts, rows // 128, columns // 128), device=DEVICE) + 0.5
            if eight
            else None
        )

    first, second = (2 * shape.inner, shape.hidden), (shape.hidden, shape.inner)
    return ExpertMatrices(
        matrix(*first), matrix(*second), gate_up_scales=scales(*first), down_scales=scales(*second)
    )


def grouped(matrices: ExpertMatrices) -> Layer:
    """torch's grouped products over tokens sorted by expert."""
    gate_up, down = matrices.gate_up.transpose(1, 2), matrices.down.transpose(1, 2)
    experts = torch.arange(len(gate_up), device=DEVICE, dtype=torch.int32)

    def run(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        by_expert, order = ids.flatten().sort(stable=True)
        ends = torch.searchsorted(by_expert, experts, right=True).int()
        gate, up = torch._grouped_mm(x[order // ids.shape[1]], gate_up, offs=ends).chunk(2, -1)  # noqa: SLF001 # so named
        y = torch._grouped_mm(F.silu(gate) * up, down, offs=ends)  # noqa: SLF001
        unsorted = torch.empty_like(y)
        unsorted[order] = y * weights.flatten()[order].unsqueeze(-1).to(y.dtype)
        return unsorted.view(*ids.shape, -1).sum(1)

    return run


def loop(matrices: ExpertMatrices) -> Layer:
    """An expert after the other, as transformers does."""

    def run(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for expert in ids.unique().tolist():
            token, place = (ids == expert).nonzero(as_tuple=True)
            gate, up = F.linear(x[token], matrices.gate_up[expert]).chunk(2, -1)
            y = F.linear(F.silu(gate) * up, matrices.down[expert])
            out.index_add_(0, token, y * weights[token, place].unsqueeze(-1).to(y.dtype))
        return out

    return run


def replayed(run: Callable[[], object], repeats: int) -> float:
    """Seconds of a replay of `run`'s graph; without a GPU of a call."""
    if not GPU:
        return called(run, 1)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()  # compiles
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return called(graph.replay, repeats)


def called(run: Callable[[], object], repeats: int) -> float:
    """The median time of a call in seconds, by the device's clock where there is one."""
    times = []
    for _ in range(repeats + 1):
        if GPU:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        else:
            began = time.perf_counter()
            run()
            times.append(time.perf_counter() - began)
    return median(times[1:])


def rates() -> tuple[float, float]:
    """Bytes a second of a large copy, and operations a second of a large product."""
    size = 8192 if GPU else 128
    a, b = (torch.randn((size, size), device=DEVICE).to(torch.bfloat16) for _ in range(2))
    source = torch.randn(2**30 if GPU else 2**10, device=DEVICE)
    target = torch.empty_like(source)
    copy = called(lambda: target.copy_(source), 10)
    return 2 * source.nbytes / copy, 2 * size**3 / called(lambda: a @ b, 10)


def measure(
    shape: Shape,
    tokens: int,
    matrices: ExpertMatrices,
    peers: dict[str, Layer],
    limits: tuple[float, float],
) -> str:
    """A line of figures."""
    rounds = (1 if tokens > 1024 else 16) if GPU else 1
    repeats = 20 if tokens > 1024 else 50
    inputs = []
    for _ in range(rounds):
        logits = torch.randn((tokens, shape.experts), device=DEVICE)
        inputs.append((torch.randn((tokens, shape.hidden), device=DEVICE).to(DTYPE), logits))
    choices = [experts_route(logits, shape.top) for _, logits in inputs]
    chosen = sum(len(ids.unique()) for ids, _ in choices) / rounds
    expert_bytes = 3 * shape.hidden * shape.inner * matrices.gate_up.element_size()
    operations = 6 * shape.hidden * shape.inner * shape.top * tokens

    def ours() -> None:
        for x, logits in inputs:
            apply_experts(x, *experts_route(logits, shape.top), matrices, "silu")

    def others(layer: Layer) -> Callable[[], None]:
        def run() -> None:
            for (x, _), (ids, weights) in zip(inputs, choices, strict=True):
                layer(x, ids, weights)

        return run

    found = replayed(ours, repeats) / rounds
    limit = max(chosen * expert_bytes / limits[0], operations / limits[1])
    columns = [
        f"{tokens:>7}{chosen:>9.1f}{chosen * expert_bytes / 1e6:>9.1f}{limit * 1e6:>9.1f}{found * 1e6:>10.1f}",
        f"{chosen * expert_bytes / found / limits[0]:>8.0%}{operations / found / 1e12:>9.1f}{limit / found:>9.0%}",
    ]
    for name, layer in peers.items():
        seconds = called(others(layer), 3) if name == "loop" else replayed(others(layer), repeats)
        columns.append(f"{seconds / rounds * 1e6:>11.1f}")
    return "".join(columns)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--tokens", type=int, nargs="+")
    options = parser.parse_args()
    torch.manual_seed(0)
    shape = SHAPES["small" if options.small else "qwen3-30b-a3b"]
    all_tokens = options.tokens or ([1, 6] if options.small else [1, 8, 64, 256, 8192])
    limits = rates()
    device = torch.cuda.get_device_name() if GPU else "interpreted"
    print(f"{device}, torch {torch.__version__}, Triton {triton.__version__}; {shape}")
    print(
        f"copies {limits[0] / 1e12:.2f} TB/s, products {limits[1] / 1e12:.0f} TFLOP/s, both in bfloat16"
    )
    for eight in (False, True):
        matrices = make_matrices(shape, eight=eight)
        peers = (
            {"grouped_mm": grouped(matrices), "loop": loop(matrices)} if GPU and not eight else {}
        )
        print(f"weights in {'8 bits' if eight else '16 bits'}")
        header = " tokens  experts       MB limit us   ours us of copy  TFLOP/s of limit"
        print(header + "".join(f"{name:>11}" for name in peers))
        for tokens in all_tokens:
            print(measure(shape, tokens, matrices, peers, limits), flush=True)
        del matrices, peers


if __name__ == "__main__":
    main()
