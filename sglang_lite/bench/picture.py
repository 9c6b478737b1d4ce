"""Picture of a measurement: bars for the workloads of this runtime and of peers, against the hardware's limit.

    sglang-lite bench --json report.json
    python -m sglang_lite.bench.picture report.json report.svg

A bar's length is the share of the limit that a workload reaches; the line at 100 % is the limit. The limit is not
measured on a CPU, so there 100 % is the fastest.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

# Workloads (`workloads.py`) in words, a line each.
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
_LEFT, _WIDTH, _RIGHT = 256, 380, 112  # widths of names, of bars at 100 %, of figures
_BAR, _GAP, _TOP = 15, 14, 104

# Text, a second line and the panel, then the bars: this runtime first, then the peers; each on light and on dark.
_STYLE = """<style>
text { fill: #1f2328; font: 13px system-ui, sans-serif } .small { fill: #57606a; font-size: 11px } .head { font-weight: 600; font-size: 15px }
.ours { font-weight: 600 } .panel { fill: #ffffff } .limit { stroke: #57606a; stroke-dasharray: 4 3 }
.c0 { fill: #0969da } .c1 { fill: #bc4c00 } .c2 { fill: #8250df } .c3 { fill: #57606a }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .small { fill: #9198a1 } .panel { fill: #0d1117 } .limit { stroke: #9198a1 }
.c0 { fill: #58a6ff } .c1 { fill: #f0883e } .c2 { fill: #bc8cff } .c3 { fill: #9198a1 } }
</style>"""  # noqa: E501


def picture(report: Mapping[str, Any]) -> str:  # JSON, as written by `Report.save`
    """SVG image of a report."""
    machine, rows = report["machine"], report["rows"]
    peers = {name: peer["seconds"] for name, peer in report["peers"].items() if peer["seconds"]}
    names = ["sglang_lite", *(_NAMES.get(name, name) for name in peers)]
    parts, y = [], _TOP
    for row in rows:
        took = [row["requests"]["median"], *(seconds.get(row["workload"]) for seconds in peers.values())]
        limit = row["ideal"] or min(seconds for seconds in took if seconds is not None)
        words = _WORDS.get(row["workload"], (row["workload"],))
        for i, line in enumerate(words):
            middle = y + len(took) * _BAR / 2 - 8 * len(words) + 16 * i + 12
            parts.append(_text(_LEFT - 12, middle, line, "end", "small" if i else ""))
        for i, (name, seconds) in enumerate(zip(names, took)):
            parts.append(_bar(y + i * _BAR, name, seconds, limit, i))
        y += len(took) * _BAR + _GAP
    edge, width = _LEFT + _WIDTH, _LEFT + _WIDTH + _RIGHT
    against = "what the hardware allows" if any(row["ideal"] for row in rows) else "the fastest"
    told = f"A model of {machine['shape']}'s shape, {machine['numbers']}, on {machine['device']}"
    parts += [
        f'<line class="limit" x1="{edge}" x2="{edge}" y1="{_TOP - 8}" y2="{y - _GAP}"/>',
        _text(edge, _TOP - 14, "100 %", "middle", "small"),
        _text(16, 28, told, style="head"),
        _text(16, 48, f"Length: share of {against}; longer is better. Figures: seconds, share.", style="small"),
    ]
    for i, name in enumerate(names):
        x = 16 + i * 120
        parts.append(f'<rect class="c{i % 4}" x="{x}" y="62" width="12" height="12" rx="2"/>')
        parts.append(_text(x + 18, 73, name, style="" if i else "ours"))
    size = f'viewBox="0 0 {width} {y}" width="{width}" height="{y}"'
    panel = f'<rect class="panel" width="{width}" height="{y}" rx="8"/>'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', _STYLE, panel, *parts, "</svg>\n"])


def _bar(y: float, name: str, seconds: float | None, limit: float, place: int) -> str:
    """Bar, with its figures behind the line of the limit; "not measured" if the peer has no time."""
    if seconds is None:
        return _text(_LEFT + 4, y + 11, f"{name}: not measured", style="small")
    share = limit / seconds
    return (
        f'<rect class="c{place % 4}" x="{_LEFT}" y="{y}" width="{_WIDTH * share:.1f}" height="{_BAR - 2}" rx="2">'
        f"<title>{escape(name)}: {seconds:.4g} s</title></rect>"
        + _text(_LEFT + _WIDTH + 10, y + 11, f"{seconds:.3g} s, {share:.0%}", style="" if place else "ours")
    )


def _text(x: float, y: float, text: str, anchor: str = "start", style: str = "") -> str:
    name = f' class="{style}"' if style else ""
    return f'<text{name} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def main(source: str, target: str) -> None:
    report = json.loads(Path(source).read_text(encoding="utf-8"))
    Path(target).write_text(picture(report), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
