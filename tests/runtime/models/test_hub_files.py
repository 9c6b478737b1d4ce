"""Short names of single GGUF files: fetched from a hub on this machine, with a small file in the
place of the real one.
"""

import hashlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import sglang_lite as sgl
from sglang_lite.cli import main
from sglang_lite.runtime.models import whole_file
from sglang_lite.runtime.models.aliases import ALIASES, HubFile, PackagedModel
from tests.hub import ask, local_hub
from tests.runtime.models import small_gguf

NAME = "qwen2.5-coder-0.5b"
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def content(tmp_path_factory, model_file):
    return small_gguf.write(tmp_path_factory.mktemp("gguf") / "small.gguf", model_file).read_bytes()


def expect(content, monkeypatch):
    """Gives the alias the size and hash of a content."""
    real = ALIASES[NAME]
    assert isinstance(real, HubFile)
    digest = hashlib.sha256(content).hexdigest()
    monkeypatch.setitem(ALIASES, NAME, replace(real, file_bytes=len(content), file_sha256=digest))
    return real.hub_id, real.file


@pytest.fixture
def repository(content, tmp_path, monkeypatch):
    """Folder of the alias's repository at the hub that is asked; the caches are empty."""
    hub_id, file = expect(content, monkeypatch)
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / file).write_bytes(content)
    monkeypatch.setenv("SGLANG_LITE_CACHE", str(tmp_path / "ours"))
    with local_hub({hub_id: folder}) as url:
        ask(url, tmp_path / "cache", monkeypatch)
        yield folder


def kept(tmp_path):
    """Files of the hub's cache that have content."""
    return [
        each
        for each in (tmp_path / "cache").rglob("*")
        if each.is_file() and each.stat().st_size > 1000
    ]


def test_a_file_is_pulled_and_then_used_without_the_hub(
    repository, content, tmp_path, capsys, monkeypatch
):
    assert main(["models", "pull", NAME]) == 0
    pulled = Path(capsys.readouterr().out.strip())
    assert pulled.is_relative_to(tmp_path / "cache")
    assert pulled.read_bytes() == content
    ask(NOWHERE, tmp_path / "cache", monkeypatch)
    with sgl.Engine(NAME, in_process=True, dtype="float32", max_total_tokens=256) as engine:
        assert (
            engine.generate("abc", {"max_new_tokens": 4, "ignore_eos": True})["meta_info"][
                "completion_tokens"
            ]
            == 4
        )
        assert engine.model_name == NAME
    assert main(["models", NAME]) == 0
    assert "model    llama" in capsys.readouterr().out
    main(["models"])
    listed = capsys.readouterr().out.splitlines()
    assert ["*" in line for line in listed if line.startswith(NAME)] == [True]


def test_a_copy_that_another_program_has_cached_is_used_without_the_hub(
    repository, tmp_path, capsys, monkeypatch
):
    from huggingface_hub import hf_hub_download

    alias = ALIASES[NAME]
    assert isinstance(alias, HubFile)
    there = hf_hub_download(alias.hub_id, alias.file)
    ask(NOWHERE, tmp_path / "cache", monkeypatch)
    assert main(["models", "pull", NAME]) == 0
    assert capsys.readouterr().out == f"{there}\n"


def test_a_file_with_another_hash_is_refused_by_name_and_left_nowhere(
    repository, content, tmp_path, capsys
):
    other = content[:-1] + bytes([content[-1] ^ 1])
    (file,) = repository.iterdir()
    file.write_bytes(other)
    assert main(["models", "pull", NAME]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"the SHA-256 of {file.name} is {hashlib.sha256(other).hexdigest()}" in said
    assert f"{hashlib.sha256(content).hexdigest()} was expected; nothing was kept." in said
    assert kept(tmp_path) == []
    file.write_bytes(content)
    assert main(["models", "pull", NAME]) == 0


def test_a_damaged_copy_is_fetched_again_or_refused(
    repository, content, tmp_path, capsys, caplog, monkeypatch
):
    for _ in range(2):  # the second time by its note
        assert main(["models", "pull", NAME]) == 0
    pulled = Path(capsys.readouterr().out.splitlines()[-1])
    pulled.resolve().write_bytes(content[:-1])
    assert main(["models", "pull", NAME]) == 0
    assert pulled.read_bytes() == content
    assert "is damaged, or another file; fetching it again." in caplog.text
    pulled.resolve().write_bytes(content[:-1])
    ask(NOWHERE, tmp_path / "cache", monkeypatch)
    assert main(["models", "pull", NAME]) == 1
    assert "the hub did not give it" in capsys.readouterr().err


def test_a_repository_without_the_file_is_one_line(repository, tmp_path, capsys):
    (file,) = repository.iterdir()
    file.rename(repository / "other.gguf")
    assert main(["models", "pull", NAME]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "the hub did not give it: 404" in said
    assert f"give the path of {file.name}" in said


def test_a_disk_without_room_is_told_before_the_download(repository, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(whole_file.shutil, "disk_usage", lambda _: SimpleNamespace(free=1_000_000))
    assert main(["models", "pull", NAME]) == 1
    said = capsys.readouterr().err
    assert "1 MB free" in said
    assert "needed for Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF" in said
    assert kept(tmp_path) == []


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("name", ["gemma-3-270m", "gemma-3-1b"])
def test_a_licence_that_is_not_accepted_says_where_and_how(
    name, status, tmp_path, folders, capsys, monkeypatch
):
    alias = ALIASES[name]
    assert not isinstance(alias, PackagedModel)
    monkeypatch.setenv("SGLANG_LITE_CACHE", str(tmp_path / "ours"))
    with local_hub({alias.hub_id: Path(folders[0])}, gated={alias.hub_id: status}) as url:
        ask(url, tmp_path / "cache", monkeypatch)
        assert main(["models", "pull", name]) == 1
    said = capsys.readouterr().err.splitlines()[-1]  # behind the bar of a folder's files
    assert f"sglang-lite: {alias.hub_id}: the hub denies it: {status} " in said
    assert f"Accept its licence at https://huggingface.co/{alias.hub_id}, and set HF_TOKEN" in said
