"""HTML pages that show runs: one self-contained file each.

Texts are data in a page: they are in a block of JSON that is not executed, and the script turns
them into text nodes. The Content-Security-Policy allows only the page's own script and style, by
hash.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from string import Template
from typing import Final

import msgspec

ORIGINS: Final = ("constant", "cached", "generated", "forced", "chosen", "joined", "rejected")


def render_page(
    title: str, runs: Sequence[Mapping[str, object]], edited_by: str | None = None
) -> str:
    """Renders a complete HTML page.

    Args:
        runs: at most two runs, shown side by side, in the form that page.js reads.
        edited_by: name of a panel above the runs, with files NAME.html and NAME.js here; None for
            none. Its script may send requests to the page's origin.
    """
    panel = "" if edited_by is None else read_resource(f"{edited_by}.html")
    style = read_resource("origins.css") + read_resource("page.css")
    script = read_resource("page.js")
    if edited_by is not None:
        style += read_resource("editor.css")
        script += read_resource("editor.js") + read_resource(f"{edited_by}.js")
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data:; "
        f"connect-src '{'none' if edited_by is None else 'self'}'; base-uri 'none'; form-action 'none'"
    )
    legend = "".join(f'<li><span class="{origin}">{origin}</span></li>' for origin in ORIGINS)
    return Template(read_resource("page.html")).substitute(
        policy=policy,
        title=html.escape(title),
        legend=legend,
        style=style,
        script=script,
        panel=panel,
        runs=_embed_json(runs),
    )


def _embed_json(data: object) -> str:
    """Encodes data as JSON for an HTML script block. The JSON contains no `<`, which could end the
    block.
    """
    text = msgspec.json.encode(data).decode()
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


@cache
def read_resource(name: str) -> str:
    """Reads the text of a file in this folder."""
    return files("sglang_lite.page").joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
