"""Reports on programs, as text or JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from sglang_lite.lang.symbolic.graph_checks import Finding
from sglang_lite.lint.sharing import Sharing
from sglang_lite.program.drawing import label

Format: TypeAlias = Literal["text", "json"]


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices of one million prompt tokens.

    Attributes:
        computed: price of tokens that the cache does not serve, or None to report no costs.
        cached: price of tokens that the cache serves.
    """

    computed: float | None = None
    cached: float = 0.0


@dataclass(frozen=True, slots=True)
class LintReport:
    """Report on a program.

    Attributes:
        program: name of the program.
        rows: number of rows of arguments.
        findings: faults of the program.
        notes: parts that could not be checked, and why.
        sharing: prefixes that runs share, or None if tokens are not counted.
        prices: prices of prompt tokens.
    """

    program: str
    rows: int
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    sharing: Sharing | None
    prices: Prices = Prices()


def format_reports(reports: Sequence[LintReport], form: Format) -> str:
    """Formats reports as text or JSON. The result ends with a newline."""
    if form == "text":
        return "\n".join(line for report in reports for line in _report_lines(report)) + "\n"
    return (
        json.dumps(
            {"programs": [_report_data(report) for report in reports]}, indent=2, ensure_ascii=False
        )
        + "\n"
    )


def _report_lines(report: LintReport) -> Iterator[str]:
    found = report.findings
    yield f"{report.program}: {len(found)} finding{'s' * (len(found) != 1)}"
    yield from (f"  {finding}" for finding in found)
    if report.sharing is not None:
        yield from (f"  {line}" for line in _sharing_lines(report.sharing, report.prices))
    yield from (f"  note: {note}" for note in report.notes)


def _sharing_lines(shared: Sharing, prices: Prices) -> Iterator[str]:
    tree = shared.tree
    computed, all_of_it = shared.last_run
    if shared.has_rows:
        yield (
            f"{tree.runs:,} rows, {tree.prompts:,} prompts of {tree.tokens:,} tokens: {tree.unique:,} are computed, "
            f"{tree.shared:.0%} come from the cache"
        )
    else:
        yield (
            f"a further run, with other arguments, computes {computed:,} of its {all_of_it:,} known prompt tokens; "
            f"{all_of_it - computed:,} come from the cache"
        )
    if shared.divergence is not None:
        node = shared.divergence.node
        place = "" if node.where is None else f" (line {node.where.line})"
        yield f"sharing ends at {label(node)}{place}, after {shared.divergence.shared_characters:,} characters"
    if prices.computed is not None and shared.has_rows:
        costs = _costs(shared, prices)
        yield f"cost of prompts: {costs['shared']:.4g}, without sharing {costs['alone']:.4g}"


def _costs(shared: Sharing, prices: Prices) -> dict[str, float]:
    tree = shared.tree
    price = prices.computed or 0.0
    with_cache = tree.unique * price + (tree.tokens - tree.unique) * prices.cached
    return {"shared": with_cache / 1e6, "alone": tree.tokens * price / 1e6}


def _report_data(report: LintReport) -> dict[str, Any]:
    data: dict[str, Any] = {
        "program": report.program,
        "rows": report.rows,
        "findings": [
            {
                "code": each.code,
                "message": each.message,
                "advice": each.advice,
                "file": each.where and each.where.file,
                "line": each.where and each.where.line,
            }
            for each in report.findings
        ],
        "notes": list(report.notes),
    }
    shared = report.sharing
    if shared is not None:
        tree = shared.tree
        broken = shared.divergence
        where = None if broken is None else broken.node.where
        data["sharing"] = {
            "over_rows": shared.has_rows, "runs": tree.runs, "prompts": tree.prompts, "prompt_tokens": tree.tokens,
            "computed_tokens": tree.unique, "cached_share": round(tree.shared, 4),
            "a_further_run": {"computed_tokens": shared.last_run[0], "prompt_tokens": shared.last_run[1]},
            "ends_at": None if broken is None else {
                "node": label(broken.node), "line": where and where.line, "shared_characters": broken.shared_characters,
            },
            "moves": [
                {"line": each.line, "above": each.above, "tokens_a_row": each.tokens, "less_prefill": each.less}
                for each in shared.moves
            ],
        }  # fmt: skip
        if report.prices.computed is not None and shared.has_rows:
            data["sharing"]["cost"] = _costs(shared, report.prices)
    return data
