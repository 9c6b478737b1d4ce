"""Files of the container in deploy/docker: what is installed is locked, and is what the package needs."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
DOCKER = ROOT / "deploy" / "docker"


def locked():
    lines = [line for line in (DOCKER / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
    found = [re.fullmatch(r"(\S+)==(\S+) --hash=sha256:[0-9a-f]{64}", line) for line in lines]
    assert all(found), "a line that pip would not hold to one file"
    versions = {canonicalize_name(each[1]): each[2] for each in found if each}
    assert len(versions) == len(lines)
    return versions


def needed(extra):
    """Requirements of an extra, and of those that it names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for text in project["optional-dependencies"][extra] if extra else project["dependencies"]:
        each = Requirement(text)
        if each.name == "sglang-lite":
            for inner in each.extras:
                yield from needed(inner)
        else:
            yield each


def test_the_lock_has_all_that_a_server_needs_in_versions_that_fit():
    versions = locked()
    for extra in ("", "server", "grpc", "tracing", "media"):
        for each in needed(extra):
            version = versions[canonicalize_name(each.name)].partition("+")[0]
            assert each.specifier.contains(version), f"{each} is locked at {version}: python deploy/docker/lock.py"


def test_what_the_image_copies_is_there():
    lines = (DOCKER / "Dockerfile").read_text().splitlines()
    copied = [name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]]
    assert copied
    assert all((ROOT / name).exists() for name in copied)
