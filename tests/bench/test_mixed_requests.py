"""The soak of the server runs, on a model without meaning, and counts what it has seen, and what
the server has.
"""

import re
import subprocess
import sys
from pathlib import Path

from tests.server.conftest import TEMPLATE, folder  # noqa: F401 # a fixture

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "mixed_requests.py"


def test_answers_are_counted_and_all_is_given_back(folder):  # noqa: F811 # the fixture
    (Path(folder) / "chat_template.jinja").write_text(TEMPLATE)
    command = [
        sys.executable,
        str(SCRIPT),
        "--model",
        folder,
        "--seconds",
        "0.5",
        "--warm",
        "0",
        "--clients",
        "2",
    ]
    shown = subprocess.run(command, capture_output=True, text=True).stdout
    statuses = dict(re.findall(r"^  (\w+: .*?)  +(.*?)  +\d+$", shown, re.MULTILINE))
    assert len(statuses) == 41
    refused = {
        kind.partition(":")[0] for kind, status in statuses.items() if status.startswith("4")
    }
    assert refused - {"hostile"} == {"invalid"}
    assert "; wrong: 0\n" in shown
    assert re.search(r"requests under way +0 +0 +0\n +tokens of room in use +0 +0 +0\n", shown)
    assert re.search(
        r"counted otherwise by the server: nothing; .* [1-9]\d* prompt and [1-9]\d* completion tokens",
        shown,
    )
