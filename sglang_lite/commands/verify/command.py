"""`sglang-lite verify`: checks whether a model can be trusted on this machine."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from sglang_lite.commands.verify.check_names import CHECKS
from sglang_lite.protocol import ParameterError


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="a model, as for Engine")
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="also write all figures to FILE, as JSON (default: none)",
    )
    parser.add_argument(
        "--long",
        action="store_true",
        help="let the long prompt fill the whole context (default: 8,000 tokens)",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=CHECKS,
        default=list(CHECKS),
        metavar="CHECK",
        help=f"make these checks alone: {', '.join(CHECKS)} (default: all)",
    )
    parser.add_argument(
        "--dtype",
        metavar="DTYPE",
        help="type that the served engine computes in, as for Engine (default: auto)",
    )
    parser.add_argument(
        "--quantization",
        metavar="NAME",
        help="format of the served engine's weights, as for Engine (default: the model's own)",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    """Prints each check as it is made. Returns exit status 1 if one has failed."""
    if options.report is not None:
        _check_writable(options.report)
    from sglang_lite.runtime.host.installed import check_engine_packages

    check_engine_packages("a verification")
    from sglang_lite.commands.verify import machine, page
    from sglang_lite.commands.verify.records import Check, VerifyReport
    from sglang_lite.commands.verify.session import run_checks
    from sglang_lite.commands.verify.subject import find_subject

    started = time.perf_counter()
    given = {"dtype": options.dtype, "quantization": options.quantization}
    settings = {name: value for name, value in given.items() if value is not None}
    subject = find_subject(options.name, settings)
    print(page.format_heading(subject), flush=True)
    checks: list[Check] = []
    for check in run_checks(subject, options.only, long=options.long):
        checks.append(check)
        print(page.format_check(check), flush=True)
    print(page.format_result(checks, time.perf_counter() - started), flush=True)
    if options.report is not None:
        report = VerifyReport(
            subject.path.name if subject.path == Path(options.name).expanduser() else options.name,
            subject.description.architecture or "",
            subject.sha256,
            settings,
            f"{datetime.now(UTC):%Y-%m-%d}",
            options.long,
            machine.package_versions(),
            machine.describe_machine(subject.description.device or "cpu"),
            tuple(checks),
        )
        _write_report(
            options.report, json.dumps(report.as_json(), ensure_ascii=False, indent=1) + "\n"
        )
        print(f"report     {options.report}")
    return 1 if any(check.status == "failed" for check in checks) else 0


def _check_writable(report: Path) -> None:
    """Checks that a report can be written.

    Raises:
        ParameterError: a file can't be written there.
    """
    folder = report.parent
    if report.is_dir() or not folder.is_dir():
        problem = "it is a folder" if report.is_dir() else f"there is no folder {folder}"
        raise ParameterError("--report", f"{report} can't be written: {problem}.")
    try:
        # permissions say too little in containers and on read-only disks
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ParameterError("--report", f"{report} can't be written: {error}") from error


def _write_report(report: Path, text: str) -> None:
    """Writes the whole report or nothing.

    Raises:
        ParameterError: the report can't be written, for example because the disk is full.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=".report-", dir=report.parent) as folder:
            part = Path(folder, report.name)
            part.write_text(text, encoding="utf-8")
            os.replace(part, report)
    except OSError as error:
        raise ParameterError("--report", f"{report} can't be written: {error}") from error
