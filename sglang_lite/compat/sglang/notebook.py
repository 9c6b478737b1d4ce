"""Display in notebooks."""

from __future__ import annotations


def print_highlight(html_content: str) -> None:
    """Shows text highlighted in a notebook, or prints it."""
    try:
        from IPython.display import HTML, display  # type: ignore[import-not-found] # only in notebooks
    except ImportError:
        print(html_content)
        return
    display(HTML(f"<strong style='color: #00008B;'>{html_content}</strong>"))
