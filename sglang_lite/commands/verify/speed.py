"""Check `speed`: tokens per second, seconds to the first token, and memory of the engine's process.
Never fails.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

from sglang_lite.commands.verify.engines import ROWS, call_in_parallel
from sglang_lite.commands.verify.records import Check, Subject
from sglang_lite.commands.verify.texts import random_prose
from sglang_lite.engine.engine import Engine
from sglang_lite.protocol import SamplingParams, Usage

_TOKENS: Final = 64  # generated in each row
_SHORT: Final = 32  # tokens of the prompt before them
_LONG: Final = 600  # tokens of the prompt whose prefill is timed


def time_to_first_token(engine: Engine, started: float) -> float:
    """Returns the seconds from `started`, a time of `time.perf_counter`, to the first token of a
    new engine.
    """
    engine.complete("Hello", SamplingParams(max_tokens=1))
    return time.perf_counter() - started


def measure_speed(
    subject: Subject, engine: Engine, first_token_s: float, processes: Sequence[int]
) -> Check:
    """Measures the speed and peak memory of an engine that has already answered requests.

    Args:
        first_token_s: seconds from the engine's start to its first token.
        processes: ids of the engine's processes.
    """
    encode = subject.files.tokenizer.encode
    longest = subject.context_length - 1
    tokens = max(2, min(_TOKENS, longest // 4))
    prompts = [
        encode(random_prose(12, seed=100 + i))[: min(_SHORT, longest // 4)] for i in range(ROWS)
    ]
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    one = _decoding_rate(engine.complete(prompts[0], params).usage)
    found = [
        each.usage
        for each in call_in_parallel(
            partial(engine.complete, params=params), prompts[1:] + prompts[:1]
        )
    ]
    several = sum(each.completion_tokens - 1 for each in found) / max(
        each.total_s - each.first_token_s for each in found
    )
    long = encode(random_prose(120, seed=99))[: min(_LONG, longest // 2)]
    usage = engine.complete(long, SamplingParams(max_tokens=1, temperature=0)).usage
    prefill = (usage.prompt_tokens - usage.cached_tokens) / max(
        usage.first_token_s - usage.queue_s, 1e-9
    )
    memory = [peak for peak in map(_peak_bytes, processes) if peak is not None]
    told = (
        f"{sum(memory) / 1e9:,.2f} GB of memory at most"
        if memory
        else "memory not told by this system"
    )
    summary = (
        f"{one:,.1f} tokens/s in one row, {several:,.1f} in {ROWS} rows, prefill of {len(long)} tokens at "
        f"{prefill:,.0f} tokens/s; first token {first_token_s:.1f} s after the start; {told}"
    )
    figures = {
        "one_row": one,
        "rows": ROWS,
        "several_rows": several,
        "prefill_tokens": len(long),
        "prefill": prefill,
        "first_token_s": first_token_s,
        "peak_bytes": sum(memory) if memory else None,
    }
    return Check("speed", "passed", summary, figures)


def child_processes() -> set[int]:
    """Returns the ids of the processes started by this one, or an empty set if the system doesn't
    report them.
    """
    found: set[int] = set()
    for listed in Path("/proc/self/task").glob("*/children"):
        found.update(map(int, listed.read_text().split()))
    return found


def _decoding_rate(usage: Usage) -> float:
    """Returns the tokens per second of a generation. The first token and the time until it arrived
    are not counted.
    """
    return (usage.completion_tokens - 1) / max(usage.total_s - usage.first_token_s, 1e-9)


def _peak_bytes(process: int) -> int | None:
    """Returns the largest resident memory that a process has had, or None if the system doesn't
    report it.
    """
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")), None)
