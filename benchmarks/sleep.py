"""Sleep and new weights of a running engine, on a model of random weights: seconds and memory.

python benchmarks/sleep.py --shape llama-3.1-8b
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

import sglang_lite as sgl
from sglang_lite.bench.shapes import SHAPES, load_shape
from sglang_lite.bench.workloads import WORKLOADS, run_workload
from sglang_lite.protocol import SamplingParams
from sglang_lite.runtime.models.parameters import parameters

GIB = 1 << 30
PROMPT = [list(range(start, start + 128)) for start in range(200)]


def used(device: torch.device) -> float:
    """Memory of the device that is in use, in GiB; 0 on a CPU."""
    if device.type == "cpu":
        return 0.0
    free, total = torch.cuda.mem_get_info(device)
    return (total - free) / GIB


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def start(shape: str, *, saver: bool, room: int = 200_000, adapters: int = 0) -> sgl.Engine:
    more = (
        {"enable_lora": True, "max_loras_per_batch": adapters, "max_lora_rank": 64}
        if adapters
        else {}
    )
    settings = {"max_running": 256, "max_total_tokens": room, **more}
    return sgl.Engine.of(load_shape(shape), enable_memory_saver=saver, **settings)


def first_token(engine: sgl.Engine, number: int) -> float:
    """Seconds of a new request of 128 tokens until its first token."""
    return seconds(
        lambda: engine.complete(PROMPT[number], SamplingParams(max_tokens=1, ignore_eos=True))
    )


def tokens(engine: sgl.Engine) -> tuple[int, ...]:
    params = SamplingParams(max_tokens=16, ignore_eos=True, temperature=0)
    return engine.complete(PROMPT[0], params).token_ids


def w1_by_turns(shape: str, pairs: int, shorten: int) -> None:
    """Runs W1 on an engine with the saver and on one without, which are there at the same time."""
    work, room, ratios = WORKLOADS["w1"]().scaled_down(shorten), 200_000 // shorten, list[float]()
    with (
        start(shape, saver=False, room=room) as plain,
        start(shape, saver=True, room=room) as saving,
    ):
        for engine in (plain, saving):
            run_workload(engine, work)
        for turn in range(pairs):
            order = (plain, saving) if turn % 2 else (saving, plain)
            found = {engine: run_workload(engine, work).seconds for engine in order}
            ratios.append(found[plain] / found[saving])
    print(
        f"W1, tokens divided by {shorten}, {pairs} pairs, the last {found[plain]:.3f} and {found[saving]:.3f} s"
    )
    row("W1 with it: speed over that without, median", statistics.median(ratios), "x", ">= 0.995")
    row("  the least and the most", min(ratios), "x", f"{max(ratios):.3f}")


def row(what: str, value: float, unit: str, bar: str) -> None:
    print(f"{what:52}{value:>10.3f} {unit:5}{bar}")


def sleep_and_wake(engine: sgl.Engine, device: torch.device) -> None:
    before, awake = tokens(engine), used(device)
    warm = statistics.median(first_token(engine, number) for number in range(1, 8))
    row("awake: memory in use", awake, "GiB", "")
    for turn, bar in (
        ("first sleep, without memory that is pinned yet", "<= 5"),
        ("sleep, pinned before", "<= 1.5"),
    ):
        row(turn, seconds(engine.sleep), "s", bar)
        row("asleep: memory in use", used(device), "GiB", "<= 1.5, with the context")
        row("wake", seconds(engine.wake), "s", "<= 1.0")
        row(
            "first token after it, over a warm one",
            first_token(engine, 10 + len(turn)) / warm,
            "x",
            "<= 1.5",
        )
    row("the same tokens as before", float(tokens(engine) == before), "", "1")


def new_weights(engine: sgl.Engine, shape: str, device: torch.device) -> None:
    spec = engine.core.runner.model.spec  # type: ignore[attr-defined] # of this process
    draw = torch.Generator(device).manual_seed(1)
    given = {
        p.slices[0].name: torch.randn(p.shape, generator=draw, device=device, dtype=torch.bfloat16).mul_(0.02)
        if len(p.shape) > 1 else torch.ones(p.shape, device=device, dtype=torch.bfloat16)
        for p in parameters(spec)
    }  # fmt: skip
    before = tokens(engine)
    found = []
    for where in ("the same device", "pinned memory of the host", "the same device, again"):
        if where.startswith("pinned") and device.type == "cuda":
            source = {name: tensor.cpu().pin_memory() for name, tensor in given.items()}
        else:
            source = given
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            base = torch.cuda.memory_allocated()
        row(
            f"new weights from {where}", seconds(lambda source=source: engine.update_weights_from_tensor(source)), "s",
            "<= 1.0" if where.startswith("pinned") else "<= 0.3",
        )  # fmt: skip
        if device.type == "cuda":
            row(
                "  memory beside",
                (torch.cuda.max_memory_allocated() - base) / GIB,
                "GiB",
                "<= 1, of the device",
            )
        found.append(tokens(engine))
    row(
        "tokens differ from the old, and are alike",
        float(found[0] != before and len(set(found)) == 1),
        "",
        "1",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument(
        "--pairs", type=int, default=3, help="runs of W1 with and without the saver; 0 for none"
    )
    parser.add_argument("--shorten", type=int, default=1, help="divisor of its tokens")
    parser.add_argument(
        "--adapters", type=int, default=0, help="adapters of rank 64 that the engine has room for"
    )
    args = parser.parse_args()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    print(torch.cuda.get_device_name() if device.type == "cuda" else "a CPU", args.shape)
    if args.pairs:
        w1_by_turns(args.shape, args.pairs, args.shorten)
    with start(args.shape, saver=True, adapters=args.adapters) as engine:
        sleep_and_wake(engine, device)
        new_weights(engine, args.shape, device)


if __name__ == "__main__":
    main()
