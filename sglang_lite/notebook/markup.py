"""HTML of objects in notebooks. The content of an element is escaped, unless it is itself an
element. So texts of programs, models and users stay text.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from typing import Final

LONGEST_TEXT: Final = 300  # maximum number of characters of a table's cell
_MAX_ROWS: Final = 100  # maximum number of rows of a table
_STYLE: Final = (
    ".sglang-lite table { border-collapse: collapse; }"
    ".sglang-lite :is(th, td) { text-align: left; vertical-align: top; padding: 2px 10px 2px 0; }"
    ".sglang-lite tr { border-bottom: 1px solid #8886; background: none; }"
    ".sglang-lite :is(pre, p) { margin: 4px 0; }"
    ".sglang-lite :is(pre, p, td) { white-space: pre-wrap; overflow-wrap: anywhere; }"
    ".sglang-lite .error { font-weight: bold; }"
)


class Markup(str):
    """Text that is already HTML, with everything in it escaped."""

    __slots__ = ()


def replace_unprintable(text: str) -> str:
    """Replaces lone surrogates and control characters with a visible sign. Line ends and tabs stay."""
    encodable = text.encode("utf-8", "replace").decode()
    return "".join(c if c.isprintable() or c in "\n\t" else "\u2423" for c in encodable)


def escape_content(content: object) -> Markup:
    """Escapes the content of an element or attribute. HTML stays as it is; anything else becomes
    text.
    """
    return (
        content
        if isinstance(content, Markup)
        else Markup(html.escape(replace_unprintable(str(content))))
    )


def element(tag: str, *content: object, **attributes: object) -> Markup:
    """Builds an element with content and with those attributes that are not None. `class_` stands
    for `class`, `stroke_width` for `stroke-width`.
    """
    given = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape_content(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{tag}{given}>{''.join(map(escape_content, content))}</{tag}>")


def shorten_text(text: str, longest: int = LONGEST_TEXT) -> str:
    """Shortens a text to `longest` characters, with an ellipsis if something is left out."""
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def table_of_rows(head: Iterable[str], rows: Iterable[Iterable[object]]) -> Markup:
    """Builds a table of at most `_MAX_ROWS` rows, followed by the number of rows left out. Long
    cells are shortened, with the whole text as a tooltip.
    """
    lines = [*rows]
    body = [element("tr", *map(_cell, line)) for line in lines[:_MAX_ROWS]]
    more = len(lines) - len(body)
    note = element("p", f"{more:,} more rows") if more else ""
    return Markup(
        element("table", element("tr", *(element("th", name) for name in head)), *body)
        + escape_content(note)
    )


def _cell(content: object) -> Markup:
    if isinstance(content, Markup):
        return element("td", content)
    text = str(content)
    return element(
        "td",
        shorten_text(text),
        title=shorten_text(text, 4000) if len(text) > LONGEST_TEXT else None,
    )


def definition_list(title: str, named: Mapping[str, object]) -> Markup:
    """Builds a title and a table with a row for each name and its value."""
    rows = [element("tr", element("th", name), _cell(value)) for name, value in named.items()]
    return notebook_html(element("b", title), element("table", *rows))


def share_meter(share: float) -> Markup:
    """Builds a bar for a share between 0 and 1, with the share in percent."""
    return Markup(
        element("meter", f"{share:.1%}", value=f"{share:.4f}") + escape_content(f" {share:.1%}")
    )


def notebook_html(*content: object, scope: str | None = None) -> Markup:
    """Builds the complete HTML of an object in a notebook. `scope` is an additional class that the
    object's styles can refer to.
    """
    return element(
        "div",
        element("style", Markup(_STYLE)),
        *content,
        class_=f"sglang-lite {scope or ''}".strip(),
    )
