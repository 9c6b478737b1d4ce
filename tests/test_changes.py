"""Notes on changes: a release shows each of them."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOTES = [path for path in (ROOT / "changes").iterdir() if path.name != "README.md"]


def test_a_release_shows_every_note():
    command = [sys.executable, "-m", "towncrier", "build", "--draft", "--version", "X"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    for path in NOTES:
        assert re.fullmatch(r"\+[a-z0-9-]+\.(changed|added|fixed)\.md", path.name), path.name
        first = path.read_text().split("\n")[0]
        assert first, path.name
        assert first in shown.stdout, path.name


def test_releases_begin_where_notes_are_put():
    page = (ROOT / "CHANGELOG.md").read_text()
    assert page.index("<!-- releases -->\n") < page.index("\n## ")
