"""Picture of a measurement: bars for the workloads of this runtime and of peers, against the
hardware's limit.

    sglang-lite bench --json report.json
    python benchmarks/picture.py report.json report.svg

A bar's length is the share of the limit that a workload reaches; the line at 100 % is the limit.
The limit is not measured on a CPU, so there 100 % is the fastest. A file with a `title` is a table
of figures in other units:

    {"title": …, "note": …, "rows": [{"words": ["One answer", "256 tokens"], "unit": "tokens/s",
     "figures": {"sglang_lite": 70, "llama.cpp": 98}, "limit": …}]}

100 % is the row's limit, or else the best of the row. With `"less": true` less is better.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

# Workloads (sglang_lite/bench/workloads.py) in words, a line each.
_WORDS = {
    "w1": ("256 requests of all lengths", "100 to 1,024 tokens in and out"),
    "decode1": ("One answer alone", "256 tokens"),
    "fork64": ("64 branches of one text", "8,192 tokens shared, 256 out each"),
    "fewshot": ("256 questions after examples", "2,048 tokens shared, 128 out each"),
    "prefix": ("The same with shorter answers", "64 tokens out each"),
    "plain64": ("64 answers, nothing shared", "128 tokens in, 256 out each"),
    "prefill": ("Reading a long text", "8,192 tokens"),
}
_NAMES = {"vllm": "vLLM", "sglang": "SGLang"}
_LEFT, _WIDTH = 256, 380  # widths of names, of bars at 100 %
_LETTER = 7.2  # width of a letter, about
_BAR, _GAP, _TOP = 15, 14, 104

# Text, a second line and the panel, then the bars: this runtime first, then the peers; each on
# light and on dark.
_STYLE = """<style>
text { fill: #1f2328; font: 13px system-ui, sans-serif } .small { fill: #57606a; font-size: 11px } .head { font-weight: 600; font-size: 15px }
.ours { font-weight: 600 } .panel { fill: #ffffff } .limit { stroke: #57606a; stroke-dasharray: 4 3 }
.c0 { fill: #0969da } .c1 { fill: #bc4c00 } .c2 { fill: #8250df } .c3 { fill: #57606a }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .small { fill: #9198a1 } .panel { fill: #0d1117 } .limit { stroke: #9198a1 }
.c0 { fill: #58a6ff } .c1 { fill: #f0883e } .c2 { fill: #bc8cff } .c3 { fill: #9198a1 } }
</style>"""  # noqa: E501


class _Bar(NamedTuple):
    """Bar of one runtime, of which `place` is the number: its share of the limit, None if it was
    not measured; text behind it and hint.
    """

    place: int
    share: float | None
    text: str
    hint: str


class _Row(NamedTuple):
    words: Sequence[str]  # what was measured, a line each
    bars: Sequence[_Bar]


def picture(report: Mapping[str, Any]) -> str:  # JSON, as written by `Report.save`, or a table
    """SVG image of a report, or of a table."""
    if "title" in report:
        names = list(dict.fromkeys(name for row in report["rows"] for name in row["figures"]))
        return _drawn(
            report["title"],
            report["note"],
            names,
            [_of_table(row, names) for row in report["rows"]],
        )
    machine, rows = report["machine"], report["rows"]
    peers = {name: peer["seconds"] for name, peer in report["peers"].items() if peer["seconds"]}
    names = ["sglang_lite", *(_NAMES.get(name, name) for name in peers)]
    drawn = []
    for row in rows:
        took = [
            row["requests"]["median"],
            *(seconds.get(row["workload"]) for seconds in peers.values()),
        ]
        limit = row["ideal"] or min(seconds for seconds in took if seconds is not None)
        bars = [
            _Bar(i, None, f"{name}: not measured", "") if seconds is None
            else _Bar(i, limit / seconds, f"{seconds:.3g} s, {limit / seconds:.0%}", f"{name}: {seconds:.4g} s")
            for i, (name, seconds) in enumerate(zip(names, took))
        ]  # fmt: skip
        drawn.append(_Row(_WORDS.get(row["workload"], (row["workload"],)), bars))
    against = "what the hardware allows" if any(row["ideal"] for row in rows) else "the fastest"
    title = f"A model of {machine['shape']}'s shape, {machine['numbers']}, on {machine['device']}"
    note = f"Length: share of {against}; longer is better. Figures: seconds, share."
    return _drawn(title, note, names, drawn)


def _of_table(row: Mapping[str, Any], names: Sequence[str]) -> _Row:
    figures, unit, less = row["figures"], row["unit"], row.get("less", False)
    best = row.get("limit") or (min if less else max)(figures.values())
    bars = []
    for name, figure in figures.items():
        text = f"{figure:,.0f} {unit}" if figure >= 100 else f"{figure:g} {unit}"
        bars.append(
            _Bar(
                names.index(name), best / figure if less else figure / best, text, f"{name}: {text}"
            )
        )
    return _Row(row["words"], bars)


def _drawn(title: str, note: str, names: Sequence[str], rows: Sequence[_Row]) -> str:
    parts, y = [], _TOP
    for row in rows:
        high = max(len(row.bars) * _BAR, 16 * len(row.words))
        for i, line in enumerate(row.words):
            middle = y + high / 2 - 8 * len(row.words) + 16 * i + 12
            parts.append(_text(_LEFT - 12, middle, line, "end", "small" if i else ""))
        first = y + (high - len(row.bars) * _BAR) / 2
        parts += [_bar(first + i * _BAR, bar) for i, bar in enumerate(row.bars)]
        y += high + _GAP
    edge = _LEFT + _WIDTH
    width = edge + 32 + _LETTER * max(len(bar.text) for row in rows for bar in row.bars)
    parts += [
        f'<line class="limit" x1="{edge}" x2="{edge}" y1="{_TOP - 8}" y2="{y - _GAP}"/>',
        _text(edge, _TOP - 14, "100 %", "middle", "small"),
        _text(16, 28, title, style="head"),
        _text(16, 48, note, style="small"),
    ]
    x = 16.0
    for i, name in enumerate(names):
        parts.append(f'<rect class="c{i % 4}" x="{x:.0f}" y="62" width="12" height="12" rx="2"/>')
        parts.append(_text(x + 18, 73, name, style="" if i else "ours"))
        x += 42 + _LETTER * len(name)
    size = f'viewBox="0 0 {width:.0f} {y}" width="{width:.0f}" height="{y}"'
    panel = f'<rect class="panel" width="{width:.0f}" height="{y}" rx="8"/>'
    return "\n".join(
        [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', _STYLE, panel, *parts, "</svg>\n"]
    )


def _bar(y: float, bar: _Bar) -> str:
    """Bar, with its text behind the line of the limit; without a share the text alone."""
    if bar.share is None:
        return _text(_LEFT + 4, y + 11, bar.text, style="small")
    size = f'width="{_WIDTH * bar.share:.1f}" height="{_BAR - 2}"'
    return (
        f'<rect class="c{bar.place % 4}" x="{_LEFT}" y="{y:g}" {size} rx="2"><title>{escape(bar.hint)}</title></rect>'
        + _text(_LEFT + _WIDTH + 10, y + 11, bar.text, style="" if bar.place else "ours")
    )


def _text(x: float, y: float, text: str, anchor: str = "start", style: str = "") -> str:
    name = f' class="{style}"' if style else ""
    return f'<text{name} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def draw(source: str, target: str) -> None:
    """Draws the picture of a file of figures."""
    report = json.loads(Path(source).read_text(encoding="utf-8"))
    Path(target).write_text(picture(report), encoding="utf-8")


if __name__ == "__main__":
    draw(*sys.argv[1:])
