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

_COLORS = ("#1f6feb", "#8b949e", "#d29922", "#a371f7")  # this runtime first, then the peers
_LEFT, _WIDTH, _RIGHT = 90, 480, 110  # widths of names, of bars at 100 %, of figures
_BAR, _GAP, _TOP = 14, 10, 64


def picture(report: Mapping[str, Any]) -> str:  # JSON, as written by `Report.save`
    """SVG image of a report."""
    machine, rows = report["machine"], report["rows"]
    peers = {name: peer["seconds"] for name, peer in report["peers"].items() if peer["seconds"]}
    names = ["sglang_lite", *peers]
    parts, y = [], _TOP
    for row in rows:
        ours = row["requests"]["median"]
        took = [ours, *(seconds.get(row["workload"]) for seconds in peers.values())]
        limit = row["ideal"] or min(seconds for seconds in took if seconds is not None)
        parts.append(_text(_LEFT - 8, y + len(took) * _BAR / 2 + 4, row["workload"], "end"))
        for i, (name, seconds) in enumerate(zip(names, took)):
            parts.append(_bar(y + i * _BAR, name, seconds, limit, _COLORS[i % len(_COLORS)]))
        y += len(took) * _BAR + _GAP
    edge = _LEFT + _WIDTH
    against = "of what the hardware allows" if any(row["ideal"] for row in rows) else "of the fastest"
    parts += [
        f'<line x1="{edge}" x2="{edge}" y1="{_TOP - 8}" y2="{y}" stroke="currentColor" stroke-dasharray="4 3"/>',
        _text(edge, _TOP - 12, "100 %", "middle"),
        _text(_LEFT, 18, f"{machine['shape']}, {machine['numbers']}, {machine['device']}: share {against}"),
    ]
    for i, name in enumerate(names):
        x = _LEFT + i * 130
        parts.append(f'<rect x="{x}" y="30" width="12" height="12" fill="{_COLORS[i % len(_COLORS)]}"/>')
        parts.append(_text(x + 18, 40, name))
    width = edge + _RIGHT
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y + 8}" width="{width}" height="{y + 8}" '
            f'font-family="sans-serif" font-size="12" color="#57606a">',
            *parts,
            "</svg>\n",
        ]
    )


def _bar(y: float, name: str, seconds: float | None, limit: float, color: str) -> str:
    """Bar with its seconds next to it, or "not measured" if the peer has no time."""
    if seconds is None:
        return _text(_LEFT + 4, y + 11, f"{name}: not measured")
    share = limit / seconds
    return (
        f'<rect x="{_LEFT}" y="{y}" width="{_WIDTH * share:.1f}" height="{_BAR - 2}" fill="{color}">'
        f"<title>{escape(name)}: {seconds:.4g} s</title></rect>"
        + _text(_LEFT + _WIDTH * share + 4, y + 11, f"{share:.0%}, {seconds:.3g} s")
    )


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="currentColor">{escape(text)}</text>'


def main(source: str, target: str) -> None:
    report = json.loads(Path(source).read_text(encoding="utf-8"))
    Path(target).write_text(picture(report), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
