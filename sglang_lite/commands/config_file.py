"""A file with flags of a command: `serve --config FILE`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from sglang_lite.commands.parser import CommandParser
from sglang_lite.protocol.anything import Json, UserValue


class ConfigFile(argparse.Action):
    """Flag that names a YAML file with flags by their names, with `_` or `-`. Those of the command line win."""

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
            given = yaml.safe_load(Path(str(values)).read_text())
        except (OSError, ValueError, yaml.YAMLError) as error:
            parser.error(f"--config: {values} can't be read: {' '.join(str(error).split())}")
        if not isinstance(given, dict) or not all(isinstance(name, str) for name in given):
            parser.error(f"--config: {values} has no flags. Write lines like `port: 30000`")
        found, unknown = parser.parse_known_args([*_flags(given)])
        # A switch that has no opposite is off already.
        unknown = [flag for flag in unknown if not (flag.startswith("--no-") and _knows(parser, f"--{flag[5:]}"))]
        if unknown:
            parser.refuse(unknown)
        for name, value in vars(found).items():
            if value is not None and getattr(namespace, name, None) is None:
                setattr(namespace, name, value)


def _flags(given: Mapping[str, Json]) -> Iterator[str]:
    """Yields the command line that says the same."""
    for name, value in given.items():
        flag = name.replace("_", "-")
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, bool):
                yield f"--{flag}" if each else f"--no-{flag}"
            elif each is not None:
                yield f"--{flag}={json.dumps(each) if isinstance(each, dict) else each}"


def _knows(parser: CommandParser, flag: str) -> bool:
    return not parser.parse_known_args([flag])[1]
