"""Checks what a release is about to publish.

    python -m tests.release files DIST [--tag v0.3.0]
    python -m tests.release installs DIST [EXTRA …] [--uv PATH]

`files` checks the wheel and the source distribution in the folder DIST: their version, that of the
tag and of the changelog, their contents, and the wheel's size. `installs` installs the wheel with
each extra into an empty environment, imports the package there, and runs the quickstart where an
engine is; it needs `uv` and a package index.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from email.parser import Parser
from pathlib import Path

from tests.ranges import ROOT, read_extras

MOST_MB = 3.0  # of a wheel
ENGINES = ("local", "cpu", "server", "all")  # extras with which the quickstart runs
NEEDED = ("py.typed", "cli.py", "version.py")
STRAY = re.compile(
    r"(^|/)(tests|benchmarks|build|__pycache__|\.venv|\.git)/|\.(pyc|gguf|safetensors)$"
)


def check_files(dist: Path, tag: str | None) -> Iterator[str]:
    """Yields what is wrong with the files of a release."""
    wheels = sorted(dist.glob("*.whl"))
    sources = sorted(dist.glob("*.tar.gz"))
    if len(wheels) != 1 or len(sources) != 1:
        yield f"{dist} has {len(wheels)} wheels and {len(sources)} source distributions, not one of each"
        return
    with zipfile.ZipFile(wheels[0]) as wheel:
        names = wheel.namelist()
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        version = Parser().parsestr(wheel.read(metadata).decode())["Version"]
    for name in NEEDED:
        if f"sglang_lite/{name}" not in names:
            yield f"the wheel lacks sglang_lite/{name}"
    for name in names:
        if STRAY.search(name) or not name.startswith(("sglang_lite/", "sglang_lite-")):
            yield f"the wheel has {name}"
    size = wheels[0].stat().st_size / 1e6
    if size > MOST_MB:
        yield f"the wheel has {size:.1f} MB, more than {MOST_MB:.0f}"
    if not sources[0].name.startswith(f"sglang_lite-{version}.tar"):
        yield f"{sources[0].name} is not of the wheel's version {version}"
    with tarfile.open(sources[0]) as source:
        inside = {member.name.partition("/")[2] for member in source.getmembers()}
    for name in ("pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md"):
        if name not in inside:
            yield f"the source distribution lacks {name}"
    if tag is None:
        return
    if tag != f"v{version}":
        yield f"the tag is {tag}, and the version {version}: correct sglang_lite/version.py, or the tag"
    if not re.search(
        rf"^## {re.escape(version)} \(", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    ):
        yield f"CHANGELOG.md has no section of {version}: towncrier build --version {version}"
    if left := [path.name for path in (ROOT / "changes").glob("+*.md")]:
        yield f"{len(left)} notes are in no section of the changelog: towncrier build --version {version}"


def check_install(uv: str, wheel: Path, extra: str) -> str:
    """Installs the wheel with an extra into an empty environment, and runs it there. Returns what
    went wrong, or an empty text.
    """
    wanted = f"sglang-lite{f'[{extra}]' if extra else ''} @ {wheel.resolve().as_uri()}"
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder, "empty", "bin", "python")
        program = Path(folder, "quickstart.py")
        program.write_text((ROOT / "examples" / "quickstart.py").read_text())
        commands: list[Sequence[str]] = [
            [uv, "venv", "--quiet", str(python.parents[1])],
            [uv, "pip", "install", "--quiet", "--python", str(python), wanted],
            [str(python), "-c", "import sglang_lite as sgl; sgl.gen('a', type=int)"],
        ]
        if extra in ENGINES:
            commands.append([str(python), str(program)])
        for command in commands:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            if done.returncode:
                return f"{' '.join(command)}\n{(done.stderr or done.stdout).strip()[-2000:]}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("files", "installs"))
    parser.add_argument("dist", type=Path)
    parser.add_argument("extras", nargs="*")
    parser.add_argument("--tag")
    parser.add_argument("--uv", default="uv")
    asked = parser.parse_args()
    wrong = 0
    if asked.what == "files":
        for problem in check_files(asked.dist, asked.tag):
            print(problem)
            wrong += 1
    else:
        (wheel,) = asked.dist.glob("*.whl")
        for extra in asked.extras or ("", *read_extras()):
            problem = check_install(asked.uv, wheel, extra)
            print(f"sglang-lite[{extra}]: {problem or 'installed and run'}", flush=True)
            wrong += bool(problem)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
