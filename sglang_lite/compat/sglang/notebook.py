"""Output in notebooks."""

from __future__ import annotations


def print_highlight(html_content: str) -> None:
    """Shows HTML in bold blue in a notebook; prints it if IPython is not installed."""
    try:
        from IPython.display import HTML, display  # only in notebooks
    except ImportError:
        print(html_content)
        return
    display(HTML(f"<strong style='color: #00008B;'>{html_content}</strong>"))
