"""Formats a verification report as text."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from sglang_lite.commands.verify.records import Check, Subject

_WIDTH = 110


def format_heading(subject: Subject) -> str:
    """Returns the heading: the model, its settings, and the digest of its largest file."""
    found = subject.description
    sums = subject.sha256
    folder = subject.path.parent if subject.path.is_file() else subject.path
    largest = max(sums, key=lambda name: (folder / name).stat().st_size, default="none")
    more = f" and {len(sums) - 1} more files" if len(sums) > 1 else ""
    given = ", ".join(f"{name}={value}" for name, value in subject.settings.items())
    settings = f" ({given})" if given else ""
    return (
        f"verify     {subject.name}: {found.architecture or 'no architecture named'}, "
        f"{', '.join(found.formats[:3])}, served in {found.dtype} on {found.device}{settings}\n"
        f"files      {largest} SHA-256 {sums.get(largest, 'none')}{more}"
    )


def format_check(check: Check) -> str:
    """Formats a check as a line, wrapped if it is long."""
    return textwrap.fill(
        f"{check.name:10} {check.status:9} {check.summary}",
        _WIDTH,
        subsequent_indent=" " * 21,
        break_long_words=False,
        break_on_hyphens=False,
    )


def format_result(checks: Sequence[Check], seconds: float) -> str:
    """Formats the last line: how many checks passed."""
    counts = {
        status: sum(check.status == status for check in checks)
        for status in ("passed", "failed", "left out")
    }
    told = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    return f"{'WRONG' if counts['failed'] else 'result':10} {told}, in {seconds:,.0f} s"
