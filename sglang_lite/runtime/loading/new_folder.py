"""Creates model folders that are written completely or not at all."""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from sglang_lite.protocol import ModelError, ParameterError

# suffixes of files that are copied along with the weights
_DESCRIBING = (".json", ".jinja", ".model", ".txt")
_MODULE = re.compile(r"\d+_\w+")  # folder of a module of sentence-transformers
_TEMPLATES = "additional_chat_templates"


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yields a scratch folder that is renamed to `out` when the context ends. Leaves nothing behind
    after an exception.

    Raises:
        ParameterError: `out` already exists or is below a file.
        ModelError: it can't be written.
    """
    if out.exists():
        raise ParameterError("out", f"{out} is there already.", hint="Give a folder that is not.")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
            written = Path(scratch) / "model"
            written.mkdir()
            yield written
            written.rename(out)
    except (FileExistsError, NotADirectoryError) as error:
        raise ParameterError(
            "out", f"{out} is below a file.", hint="Give a folder that is not."
        ) from error
    except OSError as error:
        raise ModelError(
            f"{out}: can't be written: {error}", hint="Give a folder on another disk."
        ) from error


def write_tensors(tensors: Mapping[str, torch.Tensor], file: Path) -> None:
    """Writes a file of tensors. Raises OSError if it can't be written."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), file, metadata={"format": "pt"})
    except SafetensorError as error:  # never an OSError, whatever its cause
        raise OSError(str(error)) from error


def copy_supporting_files(folder: Path, out: Path) -> None:
    """Copies the files that describe a model (config, tokenizer and templates) and the modules that
    follow an encoder.
    """
    for other in folder.iterdir():
        if other.is_file() and other.suffix in _DESCRIBING:
            shutil.copy(other, out / other.name)
        elif other.is_dir() and (_MODULE.fullmatch(other.name) or other.name == _TEMPLATES):
            shutil.copytree(other, out / other.name)
