"""Messages of a starting engine: a progress bar while weights are read, and one line when it is
ready.

Both go to standard error if it is a terminal, or below the cell of a notebook, unless `log_level`
is "warning" or above. The line becomes a log message of level "info" if the logger shows that
level. The same applies to a line of advice, shown once.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterable
from typing import Any, TypeVar

from sglang_lite.notebook.output import in_kernel, progress_bar

logger = logging.getLogger("sglang_lite")
_T = TypeVar("_T")
_suggested = threading.Lock()  # taken by the first suggestion, and never released


def set_up_logging(level: str | None) -> None:
    """Sets the level of this package's logger, and adds a handler for standard error if the caller
    has set up no logging.
    """
    if level is None:
        return
    logger.setLevel(level.upper())
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        # silent once the caller has set up logging
        handler.addFilter(lambda record: not logging.getLogger().handlers)
        logger.addHandler(handler)


def show_loading_progress(parts: Iterable[_T], level: str | None) -> Iterable[_T]:
    """Wraps the parts of a model to load in a progress bar."""
    bar: Iterable[_T] = _make_progress_bar(level, iterable=parts)
    return bar


def update_progress_bar(bar: Any, done: int, total: int, level: str | None) -> Any:  # a tqdm bar
    """Updates the progress bar of parts that another process loads. Creates a bar if `bar` is None,
    and closes it when all parts are done.
    """
    if bar is None and done < total:
        bar = _make_progress_bar(level, total=total)
    if bar is not None:
        bar.update(done - bar.n)
        if done >= total:
            bar.close()
    return bar


def _make_progress_bar(level: str | None, **options: Any) -> Any:  # a tqdm bar
    return progress_bar(
        desc="Loading",
        unit="layer",
        leave=False,
        delay=0.5,
        disable=not _is_shown(level),
        **options,
    )


def announce_line(line: str, level: str | None) -> None:
    """Logs one line about the engine at level "info", or prints it to standard error (in a
    notebook, to standard output) if that level is not logged.
    """
    if logger.isEnabledFor(logging.INFO) and logger.hasHandlers():
        logger.info(line)
    elif _is_shown(level):
        # notebooks show standard error in red
        print(line, file=sys.stdout if in_kernel() else sys.stderr)


def suggest_once(line: str, level: str | None) -> None:
    """Logs one line of advice at level "info". If that level is not logged, prints the line to
    standard error, provided that this is a terminal. Only the first call in a process has an
    effect. Never prints to standard output.
    """
    if not line or not _suggested.acquire(blocking=False):
        return
    if logger.isEnabledFor(logging.INFO) and logger.hasHandlers():
        logger.info(line)
    elif _is_shown(level) and not in_kernel():
        print(line, file=sys.stderr)


def _is_shown(level: str | None) -> bool:
    if level not in (None, "debug", "info"):
        return False
    try:
        return in_kernel() or sys.stderr.isatty()
    except (AttributeError, ValueError):  # standard error is closed or None
        return False
