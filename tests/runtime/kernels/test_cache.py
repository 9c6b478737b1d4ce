"""The folder of compiled kernels: damaged, not to be written, or as it should be."""

import os
import struct
import tempfile
from pathlib import Path

import pytest

from sglang_lite.runtime.kernels.cache import prepare_cache

# a table of two sections
ELF = struct.pack("<4s36xQ", b"\x7fELF", 64) + struct.pack("<10xHH2x", 64, 2) + bytes(128)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    folder = tmp_path / "kernels"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "temporary"


def refuse(*args, **kwargs):
    raise PermissionError("read-only")


def entry(folder: Path, name: str, *, cubin: bytes = ELF, told: bytes = b"{}") -> Path:
    (folder / name).mkdir(parents=True)
    (folder / name / "_decode.cubin").write_bytes(cubin)
    (folder / name / "_decode.json").write_bytes(told)
    return folder / name


def test_what_is_whole_stays(folder, caplog):
    kept = [entry(folder, "a"), entry(folder, "b")]
    assert prepare_cache() == folder
    assert all(path.is_dir() for path in kept)
    assert caplog.text == ""


@pytest.mark.parametrize(
    "damage",
    [
        {"cubin": b""},
        {"cubin": ELF[:100]},
        {"cubin": b"#" * 200},
        {"told": b""},
        {"told": b'{"name": "_dec'},
    ],
)
def test_what_was_cut_off_is_compiled_anew(folder, caplog, damage):
    kept, damaged = entry(folder, "a"), entry(folder, "b", **damage)
    assert prepare_cache() == folder
    assert kept.is_dir()
    assert not damaged.exists()
    assert f"1 damaged kernels in {folder} are compiled anew." in caplog.text


def test_a_folder_that_is_not_there_is_made(folder):
    assert prepare_cache() == folder
    assert folder.is_dir()


def test_where_nothing_can_be_written_another_folder_has_what_is_there(
    folder, temporary, caplog, monkeypatch
):
    whole, damaged = entry(folder, "a"), entry(folder, "b", cubin=b"")
    monkeypatch.setattr("sglang_lite.runtime.kernels.cache.shutil.rmtree", refuse)
    own = prepare_cache()
    assert own != folder
    assert os.environ["TRITON_CACHE_DIR"] == str(own)
    assert [path.name for path in own.iterdir()] == ["a"]
    assert (own / "a" / "_decode.cubin").read_bytes() == (whole / "_decode.cubin").read_bytes()
    assert damaged.is_dir()
    assert "Set TRITON_CACHE_DIR to a folder that can be written." in caplog.text


def test_starts_where_nothing_can_be_written_share_one_folder(folder, temporary, monkeypatch):
    """Whatever becomes of their processes, one folder is left, with what each of them has compiled."""
    whole, gone = entry(folder, "a"), entry(folder, "b")
    monkeypatch.setattr("sglang_lite.runtime.kernels.cache.tempfile.TemporaryFile", refuse)
    own = prepare_cache()
    assert own.stat().st_mode & 0o777 == 0o700
    entry(own, "c")
    entry(own, "d", cubin=b"")
    for file in gone.iterdir():
        file.unlink()
    gone.rmdir()
    entry(folder, "e")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))  # as the next process finds it
    assert prepare_cache() == own
    assert list(temporary.iterdir()) == [own]
    assert sorted(path.name for path in own.iterdir()) == ["a", "c", "e"]
    assert (own / "a").resolve() == whole.resolve()


@pytest.mark.parametrize("is_open", [True, False])
def test_a_folder_that_others_can_write_is_not_trusted(folder, temporary, monkeypatch, is_open):
    monkeypatch.setattr("sglang_lite.runtime.kernels.cache.tempfile.TemporaryFile", refuse)
    taken = temporary / f"sglang_lite-kernels-{os.getuid()}"
    if is_open:
        taken.mkdir()
        taken.chmod(0o777)
    else:
        (temporary / "others").mkdir(mode=0o700)
        taken.symlink_to(temporary / "others")
    own = prepare_cache()
    assert own != taken
    assert own.stat().st_mode & 0o777 == 0o700


def test_a_file_in_the_folders_place_is_no_end_of_the_start(
    tmp_path, temporary, monkeypatch, caplog
):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    assert prepare_cache().is_dir()
    assert "kernels can't be kept" in caplog.text
