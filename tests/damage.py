"""Damaged files: what is done to them, and what a reader may do then.

A reader may give an error of ours, which names the file and has a hint, or read the file. It may
not raise anything else, end its process, hang, or take memory without bound. So cases run in a
process of their own: `tests.children.in_a_child`.
"""

from __future__ import annotations

import copy
import faulthandler
import random
import resource
import struct
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

from sglang_lite.protocol import SglError

HANGS_S = 120  # a case takes less than a second
# bytes that all cases of a process may take at their peak, beside what the first ones take
MEMORY = 600 << 20
HUGE = int("9" * 4000)
STRANGE: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 96, 1.5, -1e300, float("nan"), float("inf"), 2**31, 2**63, HUGE, "", "x", "\0",
    "a" * 9999, [], [1], ["x"], [None], [[1]], {}, {"a": 1}, {"type": "linear", "factor": 0}, [1, 2, 3], "silu", "float8",
    "default", "../x", "/etc/passwd", "(" * 50, "(a+)+$",
]  # fmt: skip
_NUMBERS = [0, 1, 2, 7, 96, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]


def strangely(draw: random.Random, value: Any) -> Any:
    """The JSON value with something in it replaced, removed, doubled or put elsewhere."""
    value = copy.deepcopy(value)
    place, path = value, []
    while isinstance(place, dict | list) and place and (not path or draw.random() < 0.6):
        key = draw.choice(list(place)) if isinstance(place, dict) else draw.randrange(len(place))
        path.append((place, key))
        place = place[key]
    for _ in range(draw.randrange(1, 3)):
        owner, key = draw.choice(path)
        other = draw.choice(path)
        action = draw.randrange(4)
        try:
            if action == 0:
                owner[key] = copy.deepcopy(other[0][other[1]])
            elif action == 1:
                del owner[key]
            else:
                owner[key] = copy.deepcopy(draw.choice(STRANGE))
        except (IndexError, KeyError):
            pass
    return value


def damaged(draw: random.Random, data: bytes, header: int | None = None) -> bytes:
    """Bytes of a file with some of them flipped, overwritten by a number, zeroed, doubled, removed,
    put in or cut off.

    Args:
        draw: what is drawn.
        data: the file.
        header: number of bytes at the beginning, which half of the damages are in; None for all.
    """
    made = bytearray(data)
    for _ in range(draw.randrange(1, 4)):
        end = min(header, len(made)) if header is not None and draw.random() < 0.7 else len(made)
        at, size = draw.randrange(max(end, 1)), draw.choice((1, 2, 4, 8, 16, 64))
        match draw.randrange(8):
            case 0:
                made[at : at + 1] = bytes(
                    [(made[at] if at < len(made) else 0) ^ 1 << draw.randrange(8)]
                )
            case 1:
                code = draw.choice(("<B", "<H", "<I", "<Q", ">H", ">I", ">Q"))
                width = struct.calcsize(code)
                made[at : at + width] = struct.pack(code, draw.choice(_NUMBERS) % (1 << 8 * width))
            case 2:
                made[at : at + size] = bytes(len(made[at : at + size]))
            case 3:
                made[at:at] = made[at : at + size]
            case 4:
                del made[at : at + size]
            case 5:
                made[at:at] = draw.randbytes(size)
            case 6:
                made[at : at + size] = b"\xff" * len(made[at : at + size])
            case _:
                if draw.random() < 0.3:
                    del made[draw.randrange(len(made) + 1) :]
    return bytes(made)


def examine(
    first: int, count: int, case: Callable[[random.Random], tuple[str, str]]
) -> dict[str, Any]:
    """Runs cases, and returns how many had each outcome, and what was wrong with some.

    Args:
        first, count: seeds of the cases, which are written to stderr, so that a crash tells its
            own.
        case: does one, and returns its outcome and what is wrong with it, "" for nothing. An error
            of ours is an outcome; its message must have what `where` says.
    """
    outcomes: Counter[str] = Counter()
    problems: list[str] = []
    peak = 0
    for seed in range(first, first + count):
        print(seed, file=sys.stderr, flush=True)
        faulthandler.dump_traceback_later(HANGS_S, exit=True)
        try:
            outcome, problem = case(random.Random(seed))
        except SglError as error:
            outcome, problem = type(error).__name__, "" if error.hint else f"no hint: {error}"
        except Exception:
            outcome, problem = "another error", traceback.format_exc()[-1500:]
        faulthandler.cancel_dump_traceback_later()
        outcomes[outcome] += 1
        if problem:
            problems.append(f"{seed}: {problem}")
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        if seed < first + 5 or not peak:
            peak = used  # modules are imported, and caches filled
        elif used > peak + MEMORY:
            problems.append(f"{seed}: {used - peak:,} bytes more than before")
            peak = used
    return {"outcomes": dict(outcomes), "problems": problems}


def in_file(error: SglError, *names: str) -> str:
    """What is wrong with an error of ours about a damaged file, "" for nothing.

    Args:
        error: the error.
        names: names of which one must be in the message.
    """
    if not any(name in str(error) for name in names):
        return f"no name of a file: {error}"
    if len(str(error)) > 1500:
        return f"{len(str(error)):,} characters: {error!s:.300}"
    return "" if error.hint else f"no hint: {error}"
