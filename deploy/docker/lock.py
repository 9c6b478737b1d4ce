"""Writes the locks of the images: all packages of a server, each of one version with the SHA-256 of its file, as pip
chooses them now for this Python and machine. requirements.lock is for CPUs, with pip's own configuration (which should
find a CPU build of torch); requirements-gpu.lock has PyPI's torch, which brings CUDA.

    python deploy/docker/lock.py
"""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HEAD = "# Written by `python deploy/docker/lock.py`, for CPython {python} on Linux, x86-64.\n"
LOCKS = {  # file: options of pip, and lines that pip reads before the packages
    "requirements.lock": ([], "--extra-index-url https://download.pytorch.org/whl/cpu\n"),
    "requirements-gpu.lock": (["--isolated"], ""),
}


def main() -> None:
    """Writes the locks."""
    for name, (options, lines) in LOCKS.items():
        Path(__file__).with_name(name).write_text(_locked(options, lines))


def _locked(options: list[str], lines: str) -> str:
    command = [
        sys.executable,
        "-m",
        "pip",
        *options,
        "install",
        "--dry-run",
        "--ignore-installed",
        "--quiet",
    ]
    wanted = [
        f"{ROOT}[server,grpc,tracing,media,gateway]",
        "hatchling",
    ]  # which builds this package
    told = subprocess.run(
        [*command, "--report", "-", *wanted], capture_output=True, text=True, check=True
    )
    report = json.loads(told.stdout)
    packages = [
        f"{each['metadata']['name']}=={each['metadata']['version']}"
        f" --hash=sha256:{each['download_info']['archive_info']['hashes']['sha256']}\n"
        for each in report["install"]
        if "archive_info" in each["download_info"]  # this package itself is a folder
    ]
    python = ".".join(report["environment"]["python_version"].split(".")[:2])
    return HEAD.format(python=python) + lines + "".join(sorted(packages, key=str.lower))


if __name__ == "__main__":
    main()
