"""What tiers of the KV cache take and give: files, copies, first tokens, sessions, documents, and
loads.

    python benchmarks/cache_tiers.py [--parts read rates first session documents none chats]
    [--shape llama-3.1-8b]

"read": a file of `--mib` MiB in the page cache, pages of 2 MiB, to memory (pinned with a GPU) by
some threads: bytes alone, their checksums alone, and `PageFile.read_with_threads`, which does both; needs no
model. "rates": pages of Llama-8B's cache, scattered on both sides, as a share of a plain copy
between pinned memory and the device of as many bytes; events around ten copies. "first": the first
token of a prompt of random tokens that is computed, found on the device, on the host (after other
prompts have taken its place), and with `--folder /tmp/kv` in files (after `flush_cache`, which
empties the host); medians of `--repeat` prompts after one that warms up. "session": `export_prefix`
of one engine, then `import_prefix` and the first token of another. "documents": `--documents`
prompts in an engine with files, and again in a new one that finds these, by processor time. "none":
the workload W1, which has nothing to reuse, with tokens divided by `--less`, in an engine without
tiers and one with, by turns. "chats": `--chats` of ten turns with pauses in between, in a third of
the memory that they need: as requests without tiers, as requests with tiers of `--ratio` times that
memory on the host, and as open programs with these tiers. Weights are random, unless `--model`
names a model.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.machine import describe
from sglang_lite import Engine
from sglang_lite.bench.agents import AgentTurn, run_agents, total_tokens_at_end
from sglang_lite.bench.shapes import SHAPES, load_shape
from sglang_lite.bench.workloads import WORKLOADS, run_workload
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.executor.page_memory import GpuPageMemory, page_bytes
from sglang_lite.runtime.kernels import blocks
from sglang_lite.runtime.kernels.kv_cache import KVCache
from sglang_lite.runtime.kernels.kv_layout import KVLayout, Plane
from sglang_lite.runtime.kernels.pinned_memory import pin_memory, unpin_memory
from sglang_lite.runtime.kv_cache.page_file import THREADS, open_pages, write_pages
from sglang_lite.runtime.kv_cache.page_sums import compute_page_sums
from sglang_lite.runtime.loading.load_model import LoadedModel, load_model
from sglang_lite.runtime.models.resolve import resolve

PAGE, COPIES = 16, 10


def seconds(copy: Callable[[], object]) -> float:
    """Time of a copy on the device: ten between two events."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    copy()
    torch.cuda.synchronize()
    began.record()
    for _ in range(COPIES):
        copy()
    ended.record()
    torch.cuda.synchronize()
    return began.elapsed_time(ended) / 1000 / COPIES


def rates(layers: int, heads: int, size: int, tokens: int) -> None:
    device, dtype = torch.device("cuda"), torch.bfloat16
    pages = tokens // PAGE
    layout = KVLayout(((Plane(heads, size), Plane(heads, size)),) * layers)
    cache = KVCache.allocate(layout, 2 * pages * PAGE, dtype, device)
    for plane in cache.planes:
        plane.normal_()
    memory = GpuPageMemory(cache.planes, PAGE, 2 * pages)
    total = pages * page_bytes(cache.planes, PAGE)
    plain = torch.empty(total, dtype=torch.uint8, device=device)
    pinned = torch.empty(total, dtype=torch.uint8, pin_memory=True)
    down = seconds(lambda: pinned.copy_(plain, non_blocking=True))
    up = seconds(lambda: plain.copy_(pinned, non_blocking=True))
    gb = total / 1e9
    print(
        f"plain copy of {gb:.2f} GB: to the host {gb / down:.1f} GB/s, back {gb / up:.1f}",
        flush=True,
    )
    draw = np.random.default_rng(0)
    drawn = [draw.permutation(2 * pages)[:pages].astype(np.int32) for _ in range(2)]
    at, slots = (torch.from_numpy(each).to(device) for each in drawn)
    copy = blocks.BlockCopy(cache.planes, torch.from_numpy(memory.rows.reshape(-1)), PAGE)
    for programs in PROGRAMS:
        blocks.PROGRAMS = blocks.PROGRAMS_TO_HOST = programs
        read, write = (seconds(partial(copy, at, slots, to_host=way)) for way in (True, False))
        print(
            f"{programs} programs: to the host {gb / read:.1f} GB/s ({down / read:.2f}), back {gb / write:.1f} "
            f"({up / write:.2f})", flush=True,
        )  # fmt: skip
    before = [plane.clone() for plane in cache.planes]
    copy(at, slots, to_host=True)
    for plane in cache.planes:
        plane.view(plane.shape[0], -1, PAGE * plane.shape[2])[:, at.long()] = 0
    copy(at, slots, to_host=False)
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(before, cache.planes))
    print("bit for bit", flush=True)


PROGRAMS = (16, 32, 64, 128, 264)


def reading(folder: str | None, mib: int) -> None:
    pages, size = max(mib // 2, 1), 2 << 20
    memory = (
        pin_memory(pages * size)
        if torch.cuda.is_available()
        else torch.zeros(pages * size, dtype=torch.uint8)
    )
    rows = memory.numpy().reshape(pages, size)
    rows[:] = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    scattered = np.random.default_rng(1).permutation(pages).astype(np.int32)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        path = Path(f"{place}/pages")
        in_order = np.arange(pages, dtype=np.int32)
        write_pages(path, b"", rows, in_order)
        at, part = path.stat().st_size - pages * size, 8  # pages
        with open_pages(path) as file, path.open("rb", buffering=0) as raw:

            def fill(first: int) -> object:
                return os.preadv(
                    raw.fileno(), [rows[first : first + part].data.cast("B")], at + first * size
                )

            ways: dict[str, Callable[[Executor], object]] = {
                "bytes": lambda threads: list(threads.map(fill, range(0, pages, part))),
                "checksums": lambda threads: list(
                    threads.map(
                        lambda i: compute_page_sums(rows, in_order[i : i + part]),
                        range(0, pages, part),
                    )
                ),
                "both": lambda threads: list(file.read_with_threads(threads, rows, in_order)),
                "both, scattered": lambda threads: list(
                    file.read_with_threads(threads, rows, scattered)
                ),
            }
            for count in sorted({1, 4, 8, THREADS} & set(range(1, THREADS + 1))):
                with ThreadPoolExecutor(count) as threads:
                    for name, way in ways.items():
                        wall, used = min(timed(partial(way, threads)) for _ in range(3))
                        rate, each = (pages * size / took / 1e9 for took in (wall, used))
                        print(
                            f"{count:2} threads, {name:15}: {rate:5.1f} GB/s, {each:4.1f} a busy core",
                            flush=True,
                        )
    if torch.cuda.is_available():
        unpin_memory(memory.data_ptr())


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds of a call: of the clock, and of processors."""
    began, used = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - began, time.process_time() - used


Asked = Callable[[Engine, int], tuple[float, int]]


def asker(words: int, tokens: int) -> Asked:
    """Function that asks an engine for one token after a seed's random prompt: its seconds, and the
    cached tokens.
    """

    def asked(engine: Engine, seed: int) -> tuple[float, int]:
        ids = prompt(words, tokens, seed)
        began = time.perf_counter()
        answer: Any = engine.generate(input_ids=ids, sampling_params=ONE)
        return time.perf_counter() - began, answer["meta_info"]["cached_tokens"]

    return asked


def prompt(words: int, tokens: int, seed: int) -> list[int]:
    """Random tokens of a vocabulary."""
    drawn = random.Random(seed)
    return [drawn.randrange(10, words - 10) for _ in range(tokens)]


def sizes(tokens: int) -> dict[str, Any]:
    return {
        "max_total_tokens": 2 * tokens + 2048,
        "context_length": tokens + 1024,
        "max_running": 4,
        **TIERS,
    }


TIERS: dict[str, Any] = {"enable_hierarchical_cache": True, "hicache_ratio": 2.0}


def first_tokens(loaded: LoadedModel, tokens: int, folder: str | None, repeat: int) -> None:
    files = {} if folder is None else in_files(folder)
    asked = asker(loaded.vocab_size, tokens)
    with Engine.of(loaded, **sizes(tokens), **files) as engine:
        found: dict[str, list[tuple[float, int]]] = {}
        for i in range(repeat + 1):
            one = {"computed": asked(engine, 10 * i), "device": asked(engine, 10 * i)}
            asked(engine, 10 * i + 1), asked(engine, 10 * i + 2)
            if folder is not None:
                time.sleep(3.0)  # until the files are written
            one["host"] = asked(engine, 10 * i)
            if folder is not None:
                engine.flush_cache()
                one["files"] = asked(engine, 10 * i)
            if i:
                for name, value in one.items():
                    found.setdefault(name, []).append(value)
        base = statistics.median(x for x, _ in found["computed"])
        for name, values in found.items():
            took = statistics.median(x for x, _ in values)
            print(
                f"{name:9} {1000 * took:8.1f} ms  {took / base:.3f} of computing  cached {values[-1][1]}",
                flush=True,
            )
        print({k: v for k, v in engine.stats().items() if "token" in k}, flush=True)


def in_files(folder: str) -> dict[str, Any]:
    return {"hicache_storage_backend": "file", "hicache_storage_dir": folder}


def documents(loaded: LoadedModel, count: int, tokens: int) -> None:
    texts = [prompt(loaded.vocab_size, tokens, seed) for seed in range(count)]
    config = {
        "max_total_tokens": 16 * tokens + 2048,
        "context_length": tokens + 16,
        "max_running": 4,
        **TIERS,
    }
    base = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for name in ("computed", "again after a restart"):
            with Engine.of(loaded, **config, **in_files(folder)) as engine:
                engine.generate(input_ids=texts[0][:8], sampling_params=ONE)  # warms up
                wall, used = timed(
                    lambda: [engine.generate(input_ids=each, sampling_params=ONE) for each in texts]
                )
                read = engine.stats()["disk_tokens_read"]
            base = base or used
            print(
                f"{count} documents of {tokens} tokens, {name}: {wall:.1f} s, processor time {used:.1f} s "
                f"({base / used:.1f}x), read from files {read:,} tokens", flush=True,
            )  # fmt: skip


ONE: dict[str, Any] = {"max_new_tokens": 1, "ignore_eos": True, "temperature": 0}


def session(loaded: LoadedModel, tokens: int, repeat: int) -> None:
    asked = asker(loaded.vocab_size, tokens)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/prefix"
        with Engine.of(loaded, **sizes(tokens)) as engine:
            asked(engine, 1)  # warms up
            base, _ = asked(engine, 0)
            began = time.perf_counter()
            engine.export_prefix(prompt(loaded.vocab_size, tokens, 0), path)
            print(
                f"session: computed {1000 * base:.1f} ms, written in {time.perf_counter() - began:.2f} s",
                flush=True,
            )
        for _ in range(repeat):
            with Engine.of(loaded, **sizes(tokens)) as engine:
                asked(engine, 1)  # warms up
                # until it has been copied to the host, which a new process has no need of
                time.sleep(0.5)
                began = time.perf_counter()
                engine.import_prefix(path, trust_cache=True)
                read = time.perf_counter() - began
                first, cached = asked(engine, 0)
                print(
                    f"read in {1000 * read:.1f} ms, first token {1000 * first:.1f} ms, cached {cached}: "
                    f"{(read + first) / base:.3f} of computing", flush=True,
                )  # fmt: skip


def no_reuse(loaded: LoadedModel, less: int, repeat: int) -> None:
    work = WORKLOADS["w1"]().scaled_down(less)
    total = sum(work.suffix_lengths) + sum(work.output_lengths)
    config = {"max_total_tokens": total, **TIERS, "hicache_ratio": 1.0}
    with Engine.of(loaded, max_total_tokens=total) as without, Engine.of(loaded, **config) as tiers:
        rates: list[list[float]] = [[], []]
        for i in range(repeat + 1):
            for engine, found in zip((without, tiers), rates):
                measured = run_workload(engine, work)
                if i:
                    found.append(sum(work.output_lengths) / measured.seconds)
    plain, with_tiers = (statistics.median(each) for each in rates)
    print(
        f"W1 / {less}: {plain:.0f} tokens/s, with tiers {with_tiers:.0f} = {with_tiers / plain:.3f}",
        rates,
        flush=True,
    )


def chats(
    loaded: LoadedModel, count: int, reads: int, writes: int, pause: float, ratio: float
) -> None:
    turns = [chat(number, reads, writes, pause) for number in range(count)]
    size = total_tokens_at_end(turns) // 3
    base = 0.0
    for name, as_program, tiers in (
        ("requests, no tier", False, {}),
        ("requests, tiers", False, {**TIERS, "hicache_ratio": ratio}),
        ("programs, tiers", True, {**TIERS, "hicache_ratio": ratio}),
    ):
        with Engine.of(loaded, max_total_tokens=size, **tiers) as engine:
            run_agents(engine, turns[: -(-count // 16)], as_program=as_program)  # warms up
            got = run_agents(engine, turns, as_program=as_program)
            base = base or got.seconds
            fetched = engine.stats().get("host_tokens_fetched", 0)
            print(
                f"{count} chats in {size:,} tokens, {name}: {got.seconds:.1f} s ({base / got.seconds:.2f}x), "
                f"computed / needed {got.again:.2f}, from the host {fetched:,}", flush=True,
            )  # fmt: skip


def chat(number: int, reads: int, writes: int, pause: float) -> tuple[AgentTurn, ...]:
    """Ten turns of some tokens that are read and some that are written, and some `pause` seconds in
    between.
    """
    draw = random.Random(number)

    def about(middle: float) -> float:
        return middle * min(draw.lognormvariate(0, 0.5), 3.0)

    def tokens(middle: float) -> int:
        return max(round(about(middle)), 1)

    return tuple(AgentTurn(tokens(reads), tokens(writes), about(pause)) for _ in range(10))


PARTS = ("read", "rates", "first", "session", "documents", "none", "chats")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--shape", default="llama-3.1-8b", choices=SHAPES)
    parser.add_argument("--model", help="file or alias of a model, in place of a shape, on a CPU")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--folder")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--mib", type=int, default=1024, help="size of the file that is read")
    parser.add_argument("--documents", type=int, default=500)
    parser.add_argument("--less", type=int, default=1)
    parser.add_argument("--chats", type=int, default=256)
    parser.add_argument("--reads", type=int, default=80, help="tokens that a turn of a chat reads")
    parser.add_argument("--writes", type=int, default=16, help="tokens that it writes")
    parser.add_argument(
        "--ratio", type=float, default=3.0, help="memory of the host over the device's, of chats"
    )
    parser.add_argument(
        "--pause", type=float, default=0.2, help="seconds between the turns of a chat"
    )
    options = parser.parse_args()
    print(describe(), torch.cuda.get_device_name() if torch.cuda.is_available() else "")
    if "read" in options.parts:
        reading(options.folder, options.mib)
    if torch.cuda.is_available() and "rates" in options.parts:
        rates(32, 8, 128, options.tokens)
    if not {*options.parts} - {"read", "rates"}:
        return
    if options.model is None:
        loaded = load_shape(options.shape)
    else:
        loaded = load_model(EngineConfig(device="cpu"), resolve(options.model))
    if "first" in options.parts:
        first_tokens(loaded, options.tokens, options.folder, options.repeat)
    if "session" in options.parts:
        session(loaded, options.tokens, options.repeat)
    if "documents" in options.parts:
        documents(loaded, options.documents, options.tokens)
    if "none" in options.parts:
        no_reuse(loaded, options.less, options.repeat)
    if "chats" in options.parts:
        chats(loaded, options.chats, options.reads, options.writes, options.pause, options.ratio)


if __name__ == "__main__":
    main()
