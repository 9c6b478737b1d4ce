"""Parser of command lines that reports errors in one line, with a suggestion of what was probably
meant.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn


class CommandParser(argparse.ArgumentParser):
    """Parser whose errors are one line. (argparse shows all flags first, for `serve` a hundred
    lines.)

    Attributes:
        unknown_note: sentence that ends the error about an unknown flag, unless it is nearly a
            known one.
    """

    unknown_note = ""

    def error(self, message: str) -> NoReturn:
        self.exit(
            2,
            f"{self.prog}: {message}{'' if message[-1] in '.?' else '.'} See {self.prog} --help.\n",
        )

    def reject_unknown(self, unknown: Sequence[str]) -> NoReturn:
        """Exits with status 2 and a message that suggests the flag that was probably meant."""
        flags = re.findall(r"--[\w-]+", self.format_help())
        word = unknown[0].partition("=")[0]
        near = suggest_near(word, flags)
        is_typing_mistake = bool(difflib.get_close_matches(word, flags, n=1, cutoff=0.75))
        note = ""
        if self.unknown_note and not is_typing_mistake:
            note = f"{'' if near else '.'} {self.unknown_note}"
        self.error(f"unrecognized arguments: {' '.join(unknown)}{near}{note}")


def suggest_near(word: str, known: Iterable[str]) -> str:
    """Returns the end of an error message about an unknown word: a question that suggests a similar
    known word, or "" if no word is similar.
    """
    found = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {found[0]}?" if found else ""


def split_file_and_function(text: str) -> tuple[Path, str | None]:
    """Splits FILE[:FUNCTION] into the file and the name of a program."""
    file, _, function = text.rpartition(":") if not text.endswith(".py") else (text, "", "")
    return Path(file or text), function or None


def add_file_argument(parser: argparse.ArgumentParser) -> None:
    """Adds the argument that names a program in a file."""
    told = "a Python file; it is imported, so all its code except the __main__ part runs"
    parser.add_argument("file", metavar="FILE[:FUNCTION]", help=told)


def add_model_flag(parser: argparse.ArgumentParser) -> None:
    """Adds the `--model` flag, which names the model to run a program with."""
    told = "a model, as for Engine (default: what the file has set, or the default model)"
    parser.add_argument("--model", help=told)
