"""What is checked before a release is published, on distributions that a test writes."""

import tarfile
import zipfile

import pytest

from tests.release import check_files

FILES = ("sglang_lite/py.typed", "sglang_lite/cli.py", "sglang_lite/version.py")
SOURCES = ("pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md")


def write_distributions(folder, files=FILES, sources=SOURCES, version="0.2.0"):
    with zipfile.ZipFile(folder / f"sglang_lite-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"sglang_lite-{version}.dist-info/METADATA", f"Version: {version}\n")
        for name in files:
            wheel.writestr(name, "x")
    (folder / "x").write_text("x")
    with tarfile.open(folder / f"sglang_lite-{version}.tar.gz", "w:gz") as source:
        for name in sources:
            source.add(folder / "x", f"sglang_lite-{version}/{name}")


def test_whole_distributions_pass(tmp_path):
    write_distributions(tmp_path)
    assert list(check_files(tmp_path, None)) == []


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"files": FILES[1:]}, "the wheel lacks sglang_lite/py.typed"),
        ({"files": (*FILES, "sglang_lite/tests/x.py")}, "the wheel has sglang_lite/tests/x.py"),
        ({"files": (*FILES, "tests/x.py")}, "the wheel has tests/x.py"),
        ({"sources": SOURCES[1:]}, "the source distribution lacks pyproject.toml"),
    ],
)
def test_what_lacks_or_strays_is_named(tmp_path, changed, problem):
    write_distributions(tmp_path, **changed)
    assert list(check_files(tmp_path, None)) == [problem]


def test_a_tag_is_of_the_version_and_the_changelog_is_written(tmp_path):
    write_distributions(tmp_path, version="9.9.9")
    told = "\n".join(check_files(tmp_path, "v9.9.8"))
    assert "the tag is v9.9.8, and the version 9.9.9" in told
    assert "CHANGELOG.md has no section of 9.9.9: towncrier build --version 9.9.9" in told


def test_one_of_each_is_published(tmp_path):
    assert "0 wheels and 0 source distributions" in next(check_files(tmp_path, None))
