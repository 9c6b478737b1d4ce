"""Page of a trace: in the browser, in a notebook, as a file."""

from __future__ import annotations

import os
import tempfile
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_lite.kernel import Output, in_kernel
from sglang_lite.lang.runs import files
from sglang_lite.markup import Markup, element, fragment
from sglang_lite.page.data import run_data, title_of
from sglang_lite.page.render import page
from sglang_lite.protocol import ParameterError

if TYPE_CHECKING:
    from sglang_lite.lang.runs.trace import Trace  # whose `save` imports this module


def show(trace: Trace, path: str | os.PathLike[str] | None) -> Path:
    """Writes the page to a file (a temporary one if `path` is None), opens it in a browser, or in a
    notebook below the cell, and returns the file's path.
    """
    file = _temporary_file() if path is None else Path(path)
    try:
        files.write(file, as_html(trace).encode())
    except ParameterError:
        if path is None:
            files.remove_empty(file)
        raise
    if in_kernel():
        Output().show(inline(trace))
    else:
        webbrowser.open(file.absolute().as_uri())
    return file


def _temporary_file() -> Path:
    number, name = tempfile.mkstemp(prefix="trace-", suffix=".html")
    os.close(number)
    return Path(name)


def inline(trace: Trace) -> Markup:
    """Page in a frame of its own, for notebooks. The frame can't reach the notebook."""
    return fragment(
        element(
            "iframe", srcdoc=as_html(trace), sandbox="allow-scripts", width="100%", height="600"
        )
    )


def as_html(trace: Trace, beside: Trace | None = None) -> str:
    """Complete HTML page. `beside` is another run, of which the page shows the same nodes beside
    the first one's.
    """
    return page(
        title_of(trace.nodes),
        [run_data(each.head, each.nodes) for each in (trace, beside) if each is not None],
    )
