"""A file with flags of a command: `serve --config FILE`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from sglang_lite.commands.parser import CommandParser
from sglang_lite.protocol.anything import Json, UserValue


class ConfigFile(argparse.Action):
    """Flag that names a YAML file with further flags, whose names may be written with `_` or `-`.
    Flags on the command line take precedence.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[UserValue] | None,
        option_string: str | None = None,
    ) -> None:
        import yaml

        assert isinstance(parser, CommandParser)
        try:
            text = Path(str(values)).read_text()
            given = yaml.safe_load(text)
            node = yaml.compose(text, yaml.SafeLoader)
        except (OSError, ValueError, yaml.YAMLError) as error:
            parser.error(f"--config: {values} can't be read: {' '.join(str(error).split())}")
        if not isinstance(given, dict) or not all(isinstance(name, str) for name in given):
            parser.error(f"--config: {values} has no flags. Write lines like `port: 30000`")
        names = [key.value for key, _ in node.value]
        if twice := next((name for name in names if names.count(name) > 1), None):
            parser.error(f"--config: {twice} is given twice")
        told: dict[str, str] = {}
        for name, value in given.items():
            found = _parse_line(parser, name, value)
            for dest, each in vars(found).items():
                if each is None or each == parser.get_default(dest):  # not set by a flag
                    continue
                if dest in told:
                    parser.error(
                        f"--config: {name} and {told[dest]} are one setting. Give one of them"
                    )
                if isinstance(value, list) and not isinstance(each, list):
                    parser.error(f"--config: {name} takes one value")
                told[dest] = name
                if getattr(namespace, dest, None) is None:
                    setattr(namespace, dest, each)


def _parse_line(parser: CommandParser, name: str, value: Json) -> argparse.Namespace:
    """Parses one entry of the file. Exits with a message if its name is not a known flag."""
    abbreviates = parser.allow_abbrev
    parser.allow_abbrev = False
    try:
        found, unknown = parser.parse_known_args([*_convert_to_flags(name, value)])
        # A switch without an opposite is already off.
        unknown = [
            flag
            for flag in unknown
            if not (flag.startswith("--no-") and _is_known_flag(parser, f"--{flag[5:]}"))
        ]
        if unknown:
            parser.reject_unknown(unknown)
    finally:
        parser.allow_abbrev = abbreviates
    return found


def _convert_to_flags(name: str, value: Json) -> Iterator[str]:
    """Yields the command-line flags for one entry of the file: one flag, or one per item if the
    value is a list.
    """
    flag = name.replace("_", "-")
    for each in value if isinstance(value, list) else [value]:
        if isinstance(each, bool):
            yield f"--{flag}" if each else f"--no-{flag}"
        elif each is not None:
            yield f"--{flag}={json.dumps(each) if isinstance(each, dict) else each}"


def _is_known_flag(parser: CommandParser, flag: str) -> bool:
    return not parser.parse_known_args([flag])[1]
