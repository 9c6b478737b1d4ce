"""Messages of an engine while it starts: a bar while weights are read, and one line when it is ready.

Both go to standard error where somebody watches it (a terminal or a notebook), unless `log_level` asks for warnings
and errors alone; the line is a log message of level "info" where those are shown.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from typing import Any, TypeVar

logger = logging.getLogger("sglang_lite")
_T = TypeVar("_T")


def set_level(level: str | None) -> None:
    """Shows this package's messages of a level and above, also where the caller has set up no logging."""
    if level is None:
        return
    logger.setLevel(level.upper())
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        handler.addFilter(lambda record: not logging.getLogger().handlers)  # the caller's, set up later, say it instead
        logger.addHandler(handler)


def progress(parts: Iterable[_T], level: str | None) -> Iterable[_T]:
    """The parts of a model that are loaded, with a bar that shows how far they are."""
    bar: Iterable[_T] = _bar(level, iterable=parts)
    return bar


def moved(bar: Any, done: int, total: int, level: str | None) -> Any:  # of tqdm
    """The bar of parts that are loaded elsewhere, moved on; a new one where there is none. It is closed at the end."""
    if bar is None and done < total:
        bar = _bar(level, total=total)
    if bar is not None:
        bar.update(done - bar.n)
        if done >= total:
            bar.close()
    return bar


def _bar(level: str | None, **options: Any) -> Any:  # of tqdm
    from tqdm.auto import tqdm

    return tqdm(desc="Loading", unit="layer", leave=False, delay=0.5, disable=not _watched(level), **options)


def say(line: str, level: str | None) -> None:
    """Logs or prints one line about the engine."""
    if logger.isEnabledFor(logging.INFO) and logger.hasHandlers():
        logger.info(line)
    elif _watched(level):
        print(line, file=sys.stderr)


def _watched(level: str | None) -> bool:
    if level not in (None, "debug", "info"):
        return False
    try:
        return sys.stderr.isatty() or "ipykernel" in sys.modules
    except (AttributeError, ValueError):  # it is closed, or there is none
        return False
