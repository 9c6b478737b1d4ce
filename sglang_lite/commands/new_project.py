"""`sglang-lite init`: creates a folder with a program, its test and rows of data."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from sglang_lite.protocol import ParameterError
from sglang_lite.runtime.config import DEFAULT_MODEL
from sglang_lite.runtime.host.installed import NEEDED, is_installed


def write_project(folder: Path) -> list[Path]:
    """Writes the files of a new project and returns their paths. Overwrites nothing.

    Raises:
        ParameterError: one of the files exists, or the folder can't be written.
    """
    sources = sorted(
        files("sglang_lite.commands").joinpath("project").iterdir(), key=lambda each: each.name
    )
    targets = [folder / source.name.removesuffix(".txt") for source in sources]
    if there := [str(target) for target in targets if target.exists()]:
        raise ParameterError(
            "DIR", f"{', '.join(there)}: there already.", hint="Name another folder."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for source, target in zip(sources, targets, strict=True):
            target.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    except OSError as error:
        raise ParameterError("DIR", f"{folder} can't be written: {error.strerror}.") from error
    return targets


def proposed_model() -> str | None:
    """Returns the name of the model that is proposed for this machine. Returns None if the default
    model is proposed, if no model is proposed, or if no engine is installed.
    """
    if not all(map(is_installed, NEEDED)):
        return None
    # imports torch
    from sglang_lite.runtime.loading.model_choice import choose_model, measure_machine

    proposed = choose_model(measure_machine()).proposed
    return None if proposed is None or proposed.name == DEFAULT_MODEL else proposed.name
