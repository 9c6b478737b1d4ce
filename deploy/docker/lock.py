"""Writes requirements.lock: all packages of a server, each of one version with the SHA-256 of its file, as pip chooses
them now for this Python and machine.

    python deploy/docker/lock.py
"""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOCK = Path(__file__).with_name("requirements.lock")
HEAD = "# Written by `python deploy/docker/lock.py`, for CPython {python} on Linux, x86-64.\n"


def main() -> None:
    """Writes the lock."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    wanted = [f"{ROOT}[server,grpc,tracing,media]", "hatchling"]  # which builds this package
    told = subprocess.run([*command, *wanted], capture_output=True, text=True, check=True)
    report = json.loads(told.stdout)
    lines = [
        f"{each['metadata']['name']}=={each['metadata']['version']}"
        f" --hash=sha256:{each['download_info']['archive_info']['hashes']['sha256']}\n"
        for each in report["install"]
        if "archive_info" in each["download_info"]  # this package itself is a folder
    ]
    python = ".".join(report["environment"]["python_version"].split(".")[:2])
    LOCK.write_text(HEAD.format(python=python) + "".join(sorted(lines, key=str.lower)))


if __name__ == "__main__":
    main()
