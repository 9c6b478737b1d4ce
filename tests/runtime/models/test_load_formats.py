"""Each `load_format`: the same logits as "auto", and a named error for files that are missing,
damaged or elsewhere.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import sglang_lite as sgl
from sglang_lite.cli import main
from sglang_lite.runtime.host.cache_folder import cache_folder
from sglang_lite.runtime.loading.save import save_sharded
from sglang_lite.runtime.models.weights import numpy_copy, ranges
from tests.runtime.models.test_new_weights import engine, pair, told

SHARD = "model-rank-0-part-0.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return pair("llama-biases", tmp_path_factory.mktemp("llamas"))[0]


@pytest.fixture(scope="module")
def expected(folder):
    with engine(folder) as running:
        return told(running)


@pytest.fixture
def pickled(folder, tmp_path):
    """The same model with pickled tensors, half of them in bfloat16's numbers."""
    return pickled_folder(folder, tmp_path / "pickled")


def pickled_folder(folder: Path, out: Path) -> Path:
    shutil.copytree(folder, out)
    tensors = load_file(out / "model.safetensors")
    (out / "model.safetensors").unlink()
    torch.save(tensors, out / "pytorch_model.bin")
    return out


@pytest.fixture
def sharded(folder, tmp_path):
    save_sharded(str(folder), tmp_path / "sharded", part_bytes=10_000)
    return tmp_path / "sharded"


def logits(folder, load_format, **settings):
    with engine(folder, load_format=load_format, **settings) as running:
        return told(running)


def test_pickled_tensors_are_read_beside_safetensors(folder, pickled, expected):
    shutil.copy(folder / "model.safetensors", pickled)
    torch.save({}, pickled / "model.safetensors")  # which nobody may read
    assert logits(pickled, "pt") == expected
    (pickled / "pytorch_model.bin").rename(pickled / "weights.pt")
    assert logits(pickled, "pt") == expected


def test_a_copy_in_numpys_format_is_made_once(pickled, expected):
    assert logits(pickled, "npcache") == expected
    (pickled / "pytorch_model.bin").unlink()
    assert logits(pickled, "npcache") == expected
    names = json.loads((pickled / "np" / "weight_names.json").read_text())
    assert np.load(pickled / "np" / names[0]).dtype == np.float32


def test_numbers_of_bfloat16_keep_their_values_in_numpys_format(pickled):
    file = pickled / "pytorch_model.bin"
    torch.save({name: each.bfloat16() for name, each in torch.load(file).items()}, file)
    assert logits(pickled, "npcache", dtype="bfloat16") == logits(pickled, "pt", dtype="bfloat16")


def test_what_save_writes_has_the_same_weights(
    folder, expected, sharded, pickled, tmp_path, capsys
):
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert logits(sharded, "sharded_state") == expected
    assert main(["save", str(pickled), "--sharded", "--out", str(tmp_path / "one")]) == 0
    assert logits(tmp_path / "one", "sharded_state") == expected
    with engine(folder) as running:
        running.update_weights_from_disk(str(sharded), "sharded_state")
        assert told(running) == expected
    assert main(["save", str(folder), "--sharded", "--out", str(sharded)]) == 1
    assert "is there already" in capsys.readouterr().err


def without(name):
    return lambda folder: (folder / name).unlink()


def renamed(name, to):
    return lambda folder: (folder / name).rename(folder / to)


def written(name, text):
    return lambda folder: (folder / name).write_text(text)


def replaced(name, make):
    def change(folder):
        (folder / name).unlink()
        make(folder / name)

    return change


def stacked(folder):
    for file in folder.glob("*.safetensors"):
        tensors = {
            name.replace(".q_proj", ".qkv_proj"): each for name, each in load_file(file).items()
        }
        save_file(tensors, file)


BAD_SHARDS = {
    "none": (
        lambda f: [each.unlink() for each in f.glob("*.safetensors")],
        "there is no model-rank-0-part-0",
    ),
    "another rank": (
        renamed(SHARD, "model-rank-1-part-0.safetensors"),
        r"rank-0-part-0.safetensors is missing \(",
    ),
    "a gap": (
        without("model-rank-0-part-1.safetensors"),
        r"model-rank-0-part-1.safetensors is missing",
    ),
    "the last": (lambda f: max(f.glob("model-rank*")).unlink(), "the tensor '.*' is missing"),
    "damage": (written(SHARD, "no"), "damaged or truncated"),
    "a pipe": (replaced(SHARD, os.mkfifo), "not a regular file"),
    "a folder": (replaced(SHARD, Path.mkdir), "not a regular file"),
    "a link to nothing": (
        replaced(SHARD, lambda file: file.symlink_to("nowhere")),
        "not a regular file",
    ),
    "many": (
        renamed(SHARD, f"model-rank-0-part-{10**10}.safetensors"),
        r"part-0.safetensors is missing \(.* of 10,000,000,001",
    ),
    "a rank": (
        renamed(SHARD, "model-rank-7-part-0.safetensors"),
        r"rank-0-part-0.safetensors is missing",
    ),
    "stacked": (stacked, "It is stacked with others, as SGLang's own"),
}


@pytest.mark.parametrize("case", BAD_SHARDS)
def test_shards_that_are_not_all_of_one_rank_are_refused(sharded, case):
    change, why = BAD_SHARDS[case]
    change(sharded)
    with pytest.raises(sgl.ModelError, match=why):
        engine(sharded, load_format="sharded_state")


def pickle_into(file):
    with open(file, "wb") as out:
        np.save(out, np.array([{}]), allow_pickle=True)


@pytest.mark.parametrize(
    "name", ["/above", "../above", "a/b", "a/", ".", "..", "", "weight_names.json", "a\0", 7]
)
def test_names_that_are_no_files_are_refused_before_a_byte_is_written(pickled, name):
    if name == "/above":
        name = f"{pickled.parent}/above"
    torch.save({"first": torch.ones(1), name: torch.ones(1)}, pickled / "pytorch_model.bin")
    before = sorted(pickled.parent.rglob("*"))
    with pytest.raises(sgl.ModelError, match="of which no file can be made"):
        engine(pickled, load_format="npcache")
    assert sorted(pickled.parent.rglob("*")) == before


def test_a_copy_is_made_again_when_its_origin_has_changed(pickled, folder):
    first, file = logits(pickled, "npcache"), pickled / "pytorch_model.bin"
    for note in (True, False):  # SGLang's copy has none
        tensors = torch.load(file)
        torch.save({name: each * 0.5 for name, each in tensors.items()}, file)
        if not note:
            (pickled / "np" / "sglang_lite_origin.json").unlink()
            os.utime(file, (2**32, 2**32))
        changed = logits(pickled, "npcache")
        assert changed == logits(pickled, "pt") != first
        first = changed
    assert [each.name for each in pickled.iterdir() if each.name.startswith(".")] == []


def test_a_folder_of_the_same_name_is_told_before_a_copy_is_made(pickled):
    (pickled / "np").mkdir()
    (pickled / "np" / "own").touch()
    with pytest.raises(
        sgl.ModelError, match=r"np: is there without weight_names.json.* Remove the folder"
    ):
        engine(pickled, load_format="npcache")
    assert [each.name for each in (pickled / "np").iterdir()] == ["own"]


def test_several_engines_may_make_the_copy_at_once(pickled, expected, monkeypatch):
    together, save, seen = threading.Barrier(3), np.save, set[int]()

    def waiting(*args, **settings):
        if threading.get_ident() not in seen:
            seen.add(threading.get_ident())
            together.wait(60)
        save(*args, **settings)

    monkeypatch.setattr(np, "save", waiting)
    with ThreadPoolExecutor(3) as pool:
        made = list(pool.map(lambda _: numpy_copy.prepare_numpy_files(pickled), range(3)))
    assert made[0] == made[1] == made[2]
    assert logits(pickled, "npcache") == expected


BAD_COPIES = {
    "no list": (written("np/weight_names.json", "{}"), "not a list of names"),
    "elsewhere": (
        written("np/weight_names.json", '["../pytorch_model.bin"]'),
        "which is no file of the folder",
    ),
    "missing": (written("np/weight_names.json", '["x"]'), "the file x is missing"),
    "pickled": (lambda f: pickle_into(f / "np/model.norm.weight"), "norm.weight: damaged"),
}


@pytest.mark.parametrize("case", BAD_COPIES)
def test_a_copy_that_is_damaged_is_refused(pickled, case):
    engine(pickled, load_format="npcache").shutdown()
    change, why = BAD_COPIES[case]
    change(pickled)
    with pytest.raises(sgl.ModelError, match=why):
        engine(pickled, load_format="npcache")


@pytest.mark.parametrize(
    ("load_format", "why"),
    [
        ("pt", "no weights found in the format bin.* load_format=.auto"),
        ("npcache", "no weights found in the format bin.* load_format=.auto"),
        ("gguf", "load_format is 'gguf', and this is safetensors"),
    ],
)
def test_a_format_that_is_not_there_is_told(folder, load_format, why):
    with pytest.raises(sgl.ModelError, match=why):
        engine(folder, load_format=load_format)


def test_the_format_of_sharded_files_is_named(sharded, tmp_path, capsys):
    with pytest.raises(sgl.ModelError, match='load_format="sharded_state"'):
        engine(sharded)
    assert main(["save", str(sharded), "--sharded", "--out", str(tmp_path / "again")]) == 1
    assert 'load_format="sharded_state"' in capsys.readouterr().err


def test_what_save_writes_by_rank_has_each_number_once_and_the_same_weights(
    folder, expected, pickled, tmp_path
):
    out = tmp_path / "out"
    assert main(["save", str(pickled), "--sharded", "--tp", "2", "--out", str(out)]) == 0
    files = sorted(out.glob("*.safetensors"))
    assert [file.name for file in files] == [SHARD, "model-rank-1-part-0.safetensors"]
    stored = [
        sum(each.numel() for each in load_file(file).values())
        for file in (folder / "model.safetensors", *files)
    ]
    assert stored[0] == stored[1] + stored[2] < 2.1 * stored[2]
    assert logits(out, "sharded_state") == expected


def test_a_matrix_of_another_shape_is_saved_whole_and_refused(folder, tmp_path):
    model = shutil.copytree(folder, tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    tensors[Q] = torch.cat((tensors[Q], tensors[Q][:1]))
    save_file(tensors, model / "model.safetensors")
    save_sharded(str(model), tmp_path / "out", 2)
    with pytest.raises(
        sgl.ModelError, match=r"q_proj.weight has shape \(49, 32\), the config says \(48, 32\)"
    ):
        engine(tmp_path / "out", load_format="sharded_state")


def edited(change):
    """Changes the tensors of rank 1."""

    def apply(folder):
        file = folder / "model-rank-1-part-0.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)

    return apply


Q, DOWN = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight:columns"
BAD_RANKS = {
    "a rank": (without(SHARD), "model-rank-0-part-0.safetensors is missing"),
    "a part": (
        edited(lambda tensors: tensors.pop(Q)),
        r"q_proj.weight has shape \(24, 32\), the config says",
    ),
    "columns": (
        edited(lambda tensors: tensors.update({Q: tensors[Q][:, :-1].clone()})),
        "don't fit together",
    ),
    "a type": (
        edited(lambda tensors: tensors.update({DOWN: tensors[DOWN].double()})),
        "don't fit together",
    ),
    "twice": (
        lambda f: shutil.copy(
            f / "model-rank-1-part-0.safetensors", f / "model-rank-1-part-1.safetensors"
        ),
        "too",
    ),
}


@pytest.mark.parametrize("case", BAD_RANKS)
def test_parts_of_ranks_that_do_not_fit_are_refused(folder, tmp_path, case):
    save_sharded(str(folder), tmp_path / "out", 2)
    change, why = BAD_RANKS[case]
    change(tmp_path / "out")
    with pytest.raises(sgl.ModelError, match=why):
        engine(tmp_path / "out", load_format="sharded_state")


@pytest.mark.parametrize(
    ("tp", "why"), [("0", "0 is no number of ranks"), ("3", "3 ranks can't share .* can be 1, 2")]
)
def test_numbers_of_ranks_that_do_not_share_a_model_are_refused(folder, tmp_path, capsys, tp, why):
    assert main(["save", str(folder), "--sharded", "--tp", tp, "--out", str(tmp_path / "out")]) == 1
    assert re.search(why, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_where_nothing_can_be_saved_is_told(folder, capsys):
    assert (
        main(["save", str(folder), "--sharded", "--out", str(folder / "config.json" / "out")]) == 1
    )
    assert "is below a file" in capsys.readouterr().err


def test_a_folder_that_is_worked_in_is_saved_by_its_name(folder, tmp_path, monkeypatch):
    model = shutil.copytree(folder, tmp_path / "model")
    monkeypatch.chdir(model)
    assert main(["save", ".", "--sharded"]) == 0
    assert (model / "model-sharded" / SHARD).is_file()


def test_modules_and_templates_are_saved_too(folder, tmp_path):
    model = shutil.copytree(folder, tmp_path / "model")
    for name in (
        "1_Pooling/config.json",
        "2_Dense/model.safetensors",
        "additional_chat_templates/tools.jinja",
    ):
        (model / name).parent.mkdir()
        (model / name).write_text("{}")
    save_sharded(str(model), tmp_path / "saved")
    found = {
        each.relative_to(tmp_path / "saved").as_posix() for each in (tmp_path / "saved").glob("*/*")
    }
    assert found == {
        "1_Pooling/config.json",
        "2_Dense/model.safetensors",
        "additional_chat_templates/tools.jinja",
    }


class _Code:
    def __reduce__(self):
        return print, ("code",)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (_Code(), "holds more than tensors, which is not loaded.* take safetensors"),
        ([1], "Move it elsewhere if it holds no"),
    ],
)
def test_pickles_of_other_things_are_refused(pickled, content, why, capsys):
    (pickled / "pytorch_model.bin").rename(pickled / "model.pt")
    torch.save(content, pickled / "optimizer.pt")
    with pytest.raises(sgl.ModelError, match=why) as error:
        engine(pickled, load_format="pt")
    assert "weights_only" not in str(error.value)
    assert capsys.readouterr().out == ""


# ---------------------------------------------------------------------------------------- checksums


def sums(folder: Path) -> dict[str, str]:
    files = [each.name for each in folder.iterdir() if each.is_file()]
    done = subprocess.run(
        ["sha256sum", *files], cwd=folder, capture_output=True, text=True, check=True
    )
    return {line[66:]: line[:64] for line in done.stdout.splitlines()}


FORMS: dict[str, Callable[[dict[str, str]], str]] = {
    "sha256sum": lambda found: "\n".join(f"{each}  {name}" for name, each in found.items()),
    "JSON": json.dumps,
    "SGLang's": lambda found: json.dumps({"files": {name: {"sha256": each, "size": 1} for name, each in found.items()}}),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_files_with_the_sums_of_a_list_are_loaded(folder, tmp_path, expected, form):
    listed = tmp_path / "sums"
    listed.write_text(FORMS[form](sums(folder)))
    with engine(folder, model_checksum=str(listed)) as running:
        assert told(running) == expected
        running.update_weights_from_disk(str(folder.parent / "new"))  # which the list is not of


BAD_SUMS = {
    "differs": (lambda s: s | {"config.json": "0" * 64}, r"config.json: its SHA-256 is .* says 000"),
    "missing": (lambda s: s | {"more.txt": "0" * 64}, "more.txt is missing"),
    "unlisted": (lambda s: {"config.json": s["config.json"]}, "has no sum of model.safetensors"),
    "elsewhere": (lambda s: s | {"../config.json": "0" * 64}, "which is no file of the folder"),
    "absolute": (lambda s: s | {"/etc/passwd": "0" * 64}, "which is no file of the folder"),
    "no sum": (lambda s: s | {"config.json": "abc"}, "'abc' is no SHA-256 of config.json"),
    "empty": (lambda s: {}, "no list of SHA-256 sums"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_SUMS)
def test_files_with_other_sums_are_refused(folder, tmp_path, case):
    change, why = BAD_SUMS[case]
    listed = tmp_path / "sums.json"
    listed.write_text(json.dumps(change(sums(folder))))
    with pytest.raises(sgl.ModelError, match=why):
        engine(folder, model_checksum=str(listed))


def sums_of_all(folder: Path) -> dict[str, str]:
    files = [each for each in folder.rglob("*") if each.is_file()]
    return {
        each.relative_to(folder).as_posix(): hashlib.sha256(each.read_bytes()).hexdigest()
        for each in files
    }


def indexed(folder: Path, shard: str) -> None:
    names = dict.fromkeys(load_file(folder / "model.safetensors"), shard)
    (folder / shard).parent.mkdir(exist_ok=True)
    (folder / "model.safetensors").rename(folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def numpy_copied(folder: Path) -> None:
    pickled_folder(folder, folder / "pickled")
    numpy_copy.prepare_numpy_files(folder / "pickled")
    (folder / "pickled" / "np").rename(folder / "np")


UNLISTED = {
    "another suffix": (lambda f: indexed(f, "evil.dat"), "auto", "evil.dat"),
    "below": (lambda f: indexed(f, "w/model.safetensors"), "auto", "w/model.safetensors"),
    "the index": (lambda f: indexed(f, "a.safetensors"), "auto", "model.safetensors.index.json"),
    "a copy": (numpy_copied, "npcache", "np/model.norm.weight"),
    "a copy's list": (numpy_copied, "npcache", "np/weight_names.json"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNLISTED)
def test_each_file_that_the_format_reads_must_be_listed(folder, tmp_path, expected, case):
    change, load_format, name = UNLISTED[case]
    change(shutil.copytree(folder, tmp_path / "model"))
    listed = tmp_path / "model" / "sums.json"  # in the folder itself
    found = sums_of_all(tmp_path / "model")
    listed.write_text(json.dumps(found | {"sums.json": "0" * 64}))
    assert logits(tmp_path / "model", load_format, model_checksum=str(listed)) == expected
    del found[name]
    listed.write_text(json.dumps(found))
    with pytest.raises(sgl.ModelError, match=f"has no sum of {name}"):
        engine(tmp_path / "model", load_format=load_format, model_checksum=str(listed))


@pytest.mark.parametrize("json_too", [False, True])
def test_two_sums_of_a_file_are_refused(folder, tmp_path, json_too):
    pairs = [*sums(folder).items(), ("config.json", "0" * 64)]
    lines = "\n".join(f"{each}  {name}" for name, each in pairs)
    members = ", ".join(f'"{name}": "{each}"' for name, each in pairs)
    text = f"{{{members}}}" if json_too else lines
    (tmp_path / "sums").write_text(text)
    with pytest.raises(sgl.ModelError, match=r"has two sums of config.json"):
        engine(folder, model_checksum=str(tmp_path / "sums"))
    with pytest.raises(sgl.ParameterError, match="model_checksum: names no file"):
        engine(folder, model_checksum="")


@pytest.mark.parametrize("text", ["", "what", f"{'0' * 64} config.json\nwhat"])
def test_a_list_of_another_form_is_refused(folder, tmp_path, text):
    (tmp_path / "sums").write_text(text)
    with pytest.raises(sgl.ModelError, match="no list of SHA-256 sums"):
        engine(folder, model_checksum=str(tmp_path / "sums"))
    with pytest.raises(sgl.ModelError, match="nowhere: is not there"):
        engine(folder, model_checksum=str(tmp_path / "nowhere"))


# --------------------------------------------------------------------------- threads, and addresses


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_several_threads_read_the_same_weights(folder, sharded, dtype, monkeypatch):
    monkeypatch.setattr(ranges, "_PIECE", 100)  # bytes
    expected = logits(folder, "auto", dtype=dtype)
    assert logits(folder, "auto", dtype=dtype, load_threads=3) == expected
    assert logits(sharded, "sharded_state", dtype=dtype, load_threads=3) == expected


def test_as_many_threads_read_at_the_same_time_as_the_engine_is_told(folder, monkeypatch):
    """The first parts of tensors wait until three are read at the same time."""
    monkeypatch.setattr(ranges, "_PIECE", 100)  # bytes
    together, read, started = (
        threading.Barrier(3),
        ranges.LocalRanges.read_bytes_into,
        itertools.count(),
    )

    def read_together(*arguments):
        if threading.current_thread().name.startswith("sglang_lite-weights") and next(started) < 3:
            together.wait(20)
        read(*arguments)

    monkeypatch.setattr(ranges.LocalRanges, "read_bytes_into", read_together)
    with engine(folder, load_threads=3):
        assert not together.broken


@pytest.fixture(autouse=True, scope="module")
def _cache(tmp_path_factory):
    """A cache for all tests, with the libraries that are compiled on this machine."""
    cache, compiled = tmp_path_factory.mktemp("cache"), cache_folder() / "compiled"
    compiled.mkdir(exist_ok=True, parents=True)
    (cache / "compiled").symlink_to(compiled)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_LITE_CACHE", str(cache))
        yield


@pytest.fixture
def address(folder):
    """The model at an address."""
    root = f"/{folder.parent.name}"
    system = fsspec.filesystem("memory")
    system.put(str(folder), root, recursive=True)
    yield f"memory:/{root}"
    system.rm(root, recursive=True)


def test_weights_at_an_address_are_read_by_ranges(folder, address, expected):
    for load_format in ("auto", "remote"):
        assert logits(address, load_format) == expected
    with engine(folder.parent / "new") as running:
        running.update_weights_from_disk(address)
        assert told(running) == expected


def test_shards_at_an_address_are_those_of_its_index(folder, address, expected):
    system, root = fsspec.core.url_to_fs(address)
    system.mv(f"{root}/model.safetensors", f"{root}/first.safetensors")
    names = list(load_file(folder / "model.safetensors"))
    index = f"{root}/model.safetensors.index.json"
    system.pipe_file(
        index, json.dumps({"weight_map": dict.fromkeys(names, "first.safetensors")}).encode()
    )
    assert logits(address, "auto") == expected
    for other, why in (
        ("../first.safetensors", "which is no file of the folder"),
        ("no.safetensors", "is missing"),
    ):
        system.pipe_file(index, json.dumps({"weight_map": dict.fromkeys(names, other)}).encode())
        with pytest.raises(sgl.ModelError, match=why):
            engine(address)


def test_an_address_of_files_is_that_of_their_folder(folder, expected):
    # in its own process
    with sgl.Engine(f"file://{folder}", dtype="float32", max_running=4) as running:
        assert told(running) == expected


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("s3://bucket/model", "s3://bucket/model: a package is missing: .*s3fs"),
        ("redis://host/model", "redis:// is SGLang's, and not here"),
        ("what://host/model", "what://host/model: Protocol not known: what"),
        ("memory://nowhere", "memory://nowhere: can't be read"),
    ],
)
def test_an_address_that_cannot_be_read_is_told(model, why):
    with pytest.raises(sgl.ModelError, match=why):
        sgl.Engine(model, in_process=True)


def test_what_an_address_lacks_is_told(folder, address):
    system, root = fsspec.core.url_to_fs(address)
    with pytest.raises(sgl.ModelError, match="load_format is 'pt', and an address has safetensors"):
        engine(address, load_format="pt")
    with pytest.raises(sgl.ModelError, match="load_format is 'remote', and this is no address"):
        engine(folder, load_format="remote")
    data = system.cat_file(f"{root}/model.safetensors")
    system.pipe_file(f"{root}/model.safetensors", data[:-10])
    with pytest.raises(
        sgl.ModelError, match=r"model.safetensors: damaged or truncated: .* is not within it"
    ):
        engine(address)
    system.rm(f"{root}/model.safetensors")
    with pytest.raises(sgl.ModelError, match="no weights found in the format safetensors"):
        engine(address)
    system.rm(f"{root}/config.json")
    with pytest.raises(sgl.ModelError, match=r"the folder has no config.json"):
        engine(address)
