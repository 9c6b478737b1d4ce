"""The table of verified models in docs/models.md is made from the reports in docs/verified.

`python -m tests.docs.test_verified` writes it.
"""

import json
import re
from pathlib import Path

from sglang_lite.commands.verify.check_names import CHECKS
from sglang_lite.runtime.models.aliases import ALIASES, HubFile, PackagedModel

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "models.md"
TABLE = re.compile(r"(?<=<!-- verified -->\n).*?(?=<!-- end -->)", re.DOTALL)
SEND = "`sglang-lite verify NAME --report NAME.json`"


def reports():
    return {
        file.stem: json.loads(file.read_text())
        for file in sorted((ROOT / "docs" / "verified").glob("*.json"))
    }


def alias_of(report):
    """The short name of a model: as it was given, or that of a packaged file with the same sum."""
    sums = report["sha256"].values()
    same = (
        name
        for name, each in ALIASES.items()
        if isinstance(each, PackagedModel | HubFile) and each.file_sha256 in sums
    )
    return report["model"] if report["model"] in ALIASES else next(same, None)


def table():
    found = reports()
    lines = [
        "| model | date, machine | versions | float32 | checks | served format | report |",
        "|---|---|---|---|---|---|---|",
        *(row(name, report) for name, report in found.items()),
    ]
    sent = {alias_of(report) for report in found.values()}
    generating = [name for name, alias in ALIASES.items() if alias.token_numbers]
    others = ", ".join(f"`{name}`" for name in generating if name not in sent)
    told = (
        f"Of these short names nobody has sent a report yet: {others}. To send one, run {SEND} and add the file to `docs/verified` "
        "in a pull request. Embedding models generate nothing, so they have none."
    )
    return "\n".join(lines) + f"\n\n{told}\n"


def row(name, report):
    checks = {check["name"]: check for check in report["checks"]}
    counts = {
        status: [check["name"] for check in report["checks"] if check["status"] == status]
        for status in ("passed", "failed", "left out")
    }
    told = [f"{len(names)} {status}" for status, names in counts.items() if names]
    told += [
        f"({', '.join(names)})" for status, names in counts.items() if names and status != "passed"
    ]
    greedy, served = checks["greedy"]["figures"], checks["served"]["figures"]
    exact = (
        f"{greedy['equal']} of {greedy['prompts']} equal, {greedy['largest_difference']:.1e}"
        if greedy
        else "–"
    )
    settings = "".join(f", `{key}={value}`" for key, value in report.get("settings", {}).items())
    distance = (
        f"{served['dtype']}{settings}: {served['equal_share']:.1%} of tokens" if served else "–"
    )
    machine, versions = report["machine"], report["versions"]
    where = machine.get("gpu") or f"{machine['processor']}, {machine['cores']} cores"
    cells = [
        f"`{alias_of(report) or report['model']}`", f"{report['date']}, {where}",
        f"torch {versions['torch']}, transformers {versions['transformers']}", exact, " ".join(told), distance,
        f"[{name}.json](verified/{name}.json)",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def test_the_table_is_that_of_the_reports():
    assert TABLE.search(PAGE.read_text())[0] == table()


def test_reports_are_whole_and_name_no_folder():
    """A report of a part of the checks, or one with a path of the sender's, is not to be checked
    in.
    """
    for name, report in reports().items():
        assert sorted(check["name"] for check in report["checks"]) == sorted(CHECKS), name
        assert all("--only" not in check["summary"] for check in report["checks"]), name
        assert "/" not in report["model"] or report["model"].count("/") == 1, name
        assert all(re.fullmatch("[0-9a-f]{64}", each) for each in report["sha256"].values()), name
        assert report["sha256"], name


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda _: table(), PAGE.read_text()))
