"""Output in a notebook's kernel: replaceable HTML below the cell, and progress bars."""

from __future__ import annotations

import importlib
import io
import sys
import time
from collections.abc import Callable
from typing import Any

from sglang_lite.notebook.markup import Markup, element, notebook_html

_AT_ONCE = 20  # number of updates before some may be left out, so that all of a short run are seen
_INTERVAL_S = 0.1  # minimum time between two updates after that


def in_kernel() -> bool:
    """Returns True if this process is a notebook's kernel, and not a terminal or a script."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


class Output:
    """Area below a cell. Each HTML that is shown in it replaces the previous one."""

    def __init__(self) -> None:
        self._handle: Any = None  # IPython's; untyped, because IPython is not a dependency
        self._count = 0
        self._shown_at = 0.0

    def show_html(self, content: Markup) -> None:
        """Displays HTML."""
        ipython = importlib.import_module("IPython.display")
        html = ipython.HTML(content)
        if self._handle is None:
            self._handle = ipython.display(html, display_id=True)
        else:
            self._handle.update(html)
        self._count += 1
        self._shown_at = time.monotonic()

    def show_if_due(self, make: Callable[[], Markup]) -> None:
        """Displays HTML, but skips the update if there have been many and the last one was very
        recent. Display the final content with `show_html`, which never skips.
        """
        if self._count < _AT_ONCE or time.monotonic() - self._shown_at >= _INTERVAL_S:
            self.show_html(make())


# of tqdm, as it returns one
def progress_bar(below: Callable[[], Markup] = notebook_html, **options: Any) -> Any:
    """Creates a tqdm progress bar. It is shown on standard error or, in a notebook, below the cell.
    In a notebook, other HTML can be shown below the bar until the bar ends.

    Args:
        below: function that returns this HTML.
        options: tqdm's own arguments.
    """
    from tqdm import tqdm

    if not in_kernel():
        return tqdm(**options)

    class Bar(tqdm):  # type: ignore[type-arg] # of whatever it counts
        def __init__(self, **options: Any) -> None:
            self.output = Output()
            self.closed = False
            # `show_if_due` leaves some out
            super().__init__(**options, mininterval=0, miniters=1, file=io.StringIO())

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            if msg == "":  # it is gone
                return self.output.show_html(notebook_html())
            return (
                self.output.show_html(self._html())
                if self.closed
                else self.output.show_if_due(self._html)
            )

        def _html(self) -> Markup:
            counts = (
                f" {self.desc} {self.n:,} of {self.total or '?'} {self.unit}, {self.postfix or ''}"
            )
            bar = element("progress", value=self.n, max=self.total)
            return (
                notebook_html(bar, counts) if self.closed else notebook_html(bar, counts, below())
            )

        def close(self) -> None:
            self.closed = True
            super().close()

    return Bar(**options)
