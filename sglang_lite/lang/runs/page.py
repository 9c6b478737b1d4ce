"""HTML page of a trace, shown in the browser or in a notebook, or written to a file."""

from __future__ import annotations

import os
import tempfile
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_lite.lang.runs import files
from sglang_lite.notebook.markup import Markup, element, notebook_html
from sglang_lite.notebook.output import Output, in_kernel
from sglang_lite.page.data import format_run_title, run_data
from sglang_lite.page.render import render_page
from sglang_lite.protocol import ParameterError

if TYPE_CHECKING:
    from sglang_lite.lang.runs.trace import Trace  # whose `save` imports this module


def show_page(trace: Trace, path: str | os.PathLike[str] | None) -> Path:
    """Writes the page to a file (a temporary one if `path` is None), opens it in a browser or below
    the notebook's cell, and returns the file's path.
    """
    file = _temporary_file() if path is None else Path(path)
    try:
        files.write(file, as_html(trace).encode())
    except ParameterError:
        if path is None:
            files.remove_if_empty(file)
        raise
    if in_kernel():
        Output().show_html(page_in_frame(trace))
    else:
        webbrowser.open(file.absolute().as_uri())
    return file


def _temporary_file() -> Path:
    number, name = tempfile.mkstemp(prefix="trace-", suffix=".html")
    os.close(number)
    return Path(name)


def page_in_frame(trace: Trace) -> Markup:
    """Returns the page in a sandboxed iframe, for notebooks. It can't access the notebook."""
    return notebook_html(
        element(
            "iframe", srcdoc=as_html(trace), sandbox="allow-scripts", width="100%", height="600"
        )
    )


def as_html(trace: Trace, beside: Trace | None = None) -> str:
    """Returns the complete HTML page of a run. If `beside` is given, the page shows the nodes of
    that other run next to the matching nodes of the first.
    """
    return render_page(
        format_run_title(trace.nodes),
        [run_data(each.head, each.nodes) for each in (trace, beside) if each is not None],
    )
