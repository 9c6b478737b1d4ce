"""Models from the Hugging Face hub: folders and single GGUF files, downloaded once and then used
from the hub's cache.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_lite.protocol import DownloadError
from sglang_lite.runtime.host.cache_folder import cache_folder
from sglang_lite.runtime.host.installed import is_installed
from sglang_lite.runtime.models import modelscope
from sglang_lite.runtime.models.aliases import HubFile
from sglang_lite.runtime.models.folder_config import has_config
from sglang_lite.runtime.models.whole_file import (
    check_disk_space,
    describe_proxies,
    has_expected_hash,
    hash_file,
)

if TYPE_CHECKING:
    from huggingface_hub import SafetensorsRepoMetadata

logger = logging.getLogger("sglang_lite")
ADAPTER = "adapter_config.json"  # written by peft


def is_cached(hub_id: str, file: str) -> bool:
    """Returns whether the hub's cache has a file of a repository."""
    if not is_installed("huggingface_hub"):
        return False
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(hub_id, file), str)


def read_hub_headers(hub_id: str, revision: str | None) -> SafetensorsRepoMetadata | None:
    """Reads the headers of a repository's safetensors files. Returns None if the hub does not
    provide them.
    """
    from huggingface_hub import HfApi

    if modelscope.should_use_modelscope():
        return None
    try:
        return HfApi().get_safetensors_metadata(hub_id, revision=revision)
    # no common base, as below; or the weights have another format, and may be in the cache
    except Exception:
        return None


def fetch_folder(model: str, revision: str | None, *, weights: bool) -> Path:
    """Returns the folder of a model in the hub's cache, downloading the missing files.

    Args:
        model: its name on the hub, `owner/name`.
        revision: branch, tag or commit.
        weights: whether to download the weights, too, and not only the files that describe the
            model.

    Raises:
        DownloadError: the download fails and the cache does not have the complete model.
    """
    patterns = ["*.json", "*.jinja", "*.model", "*.txt"]
    if modelscope.should_use_modelscope():
        kinds = ("*.safetensors", "*.bin") if weights else ()
        return modelscope.fetch_from_modelscope(
            model, revision, (*patterns, *kinds), cache_folder() / "modelscope"
        )
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        if weights:
            files = HfApi().model_info(model, revision=revision, timeout=20).siblings or []
            patterns.append(
                "*.safetensors"
                if any(f.rfilename.endswith(".safetensors") for f in files)
                else "*.bin"
            )
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except Exception as error:  # offline mode, HTTP and connection errors have no common base
        try:
            folder = Path(snapshot_download(model, revision=revision, local_files_only=True))
        except LocalEntryNotFoundError:
            raise _download_error(
                model, error, "the path of a folder that has the model"
            ) from error
        if not has_config(folder) and not (folder / ADAPTER).exists():
            if is_access_denied(error):
                raise _download_error(model, error, "") from error
            raise DownloadError(
                f"{model}: only a part is in the Hugging Face cache ({folder})."
            ) from error
        return folder


def fetch_file(model: HubFile, revision: str | None, note: Path) -> Path:
    """Returns the path of a GGUF file in the hub's cache, after checking its hash.

    Downloads the file if it is missing or damaged. An intact copy is used without contacting
    the hub.

    Args:
        model: the file.
        revision: branch, tag or commit.
        note: path of a note, which records that the hash of the copy was right.

    Raises:
        DownloadError: the download fails, the disk has too little room, or the file has
            another hash; such a file is deleted.
    """
    if modelscope.should_use_modelscope():
        found = modelscope.fetch_from_modelscope(
            model.hub_id, revision, (model.file,), cache_folder() / "modelscope"
        )
        return _verify_file(found / model.file, model, note)
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache

    cached = try_to_load_from_cache(model.hub_id, model.file, revision=revision)
    is_damaged = isinstance(cached, str) and not has_expected_hash(
        Path(cached), model.file_sha256, note
    )
    if isinstance(cached, str) and not is_damaged:
        return Path(cached)
    if is_damaged:
        logger.warning("%s is damaged, or another file; fetching it again.", cached)
    check_disk_space(Path(constants.HF_HUB_CACHE), model.file_bytes, model.description, "HF_HOME")
    try:
        path = hf_hub_download(
            model.hub_id, model.file, revision=revision, force_download=is_damaged
        )
    except Exception as error:  # as for folders
        raise _download_error(model.hub_id, error, f"the path of {model.file}") from error
    return _verify_file(Path(path), model, note)


def _verify_file(path: Path, model: HubFile, note: Path) -> Path:
    """Returns the path of a downloaded file if its hash is right. Otherwise deletes the file and
    raises an error.

    Raises:
        DownloadError: the hash is wrong, or there is no file.
    """
    if has_expected_hash(path, model.file_sha256, note):
        return path
    hint = f"Try again; or find the file with that SHA-256 elsewhere, and give its path as model= ({model.licence})."
    if not path.exists():
        raise DownloadError(f"{model.hub_id}: there is no file {model.file}.", hint=hint)
    digest = hash_file(path)
    stored = path.resolve()
    path.unlink()
    stored.unlink(missing_ok=True)  # the cache has a link to it
    raise DownloadError(
        f"{model.hub_id}: the SHA-256 of {model.file} is {digest}, {model.file_sha256} was expected; nothing was kept.",
        hint=hint,
    )


def is_access_denied(error: Exception) -> bool:
    """Returns whether the hub has a model but denies access to this account, or to anonymous
    callers.
    """
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError

    if isinstance(error, GatedRepoError):
        return True
    return (
        isinstance(error, HfHubHTTPError)
        and error.response is not None
        and error.response.status_code in (401, 403)
    )


def _download_error(model: str, error: Exception, instead: str) -> DownloadError:
    """Returns the error for a model that is not on this machine and could not be downloaded.

    Args:
        model: its name on the hub.
        error: error of the hub's library.
        instead: what the caller can give instead, for the hint.
    """
    if is_access_denied(error):
        page = f"https://huggingface.co/{model}"
        return DownloadError(
            f"{model}: the hub denies it: {_error_line(error)}",
            hint=f"Accept its licence at {page}, and set HF_TOKEN to a token of the account that has "
            "(https://huggingface.co/settings/tokens). If there is no such page, check the name.",
        )
    return DownloadError(
        f"{model}: no folder here, not in the Hugging Face cache, and the hub did not give it: {_error_line(error)}",
        hint=f"Check the name or path, and the network{describe_proxies()}; set HF_TOKEN for a gated model, HF_HOME "
        f"for another cache folder; unset HF_HUB_OFFLINE to allow downloads; or give {instead}.",
    )


def _error_line(error: Exception) -> str:
    """Returns the hub library's error as one line: a status with its meaning, or a connection
    error. Leaves out the library's advice, since our hint replaces it.
    """
    from huggingface_hub.errors import HfHubHTTPError

    lines = [line.strip() for line in str(error).removeprefix("Got: ").splitlines() if line.strip()]
    return " ".join(lines[: 2 if isinstance(error, HfHubHTTPError) else 1])
