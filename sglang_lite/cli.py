"""`sglang-lite`: the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from sglang_lite.protocol import SglError
from sglang_lite.version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status. Errors of the package are one line on stderr, and 1."""
    parser = argparse.ArgumentParser(prog="sglang-lite", description="Programs for language models.")
    parser.add_argument("--version", action="version", version=f"sglang-lite {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    models = commands.add_parser("models", help="the models that go by a short name")
    actions = models.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("list", help="show them")
    pull = actions.add_parser("pull", help="fetch one into the cache folder")
    pull.add_argument("name")
    options = parser.parse_args(arguments)
    try:
        return _models(options)
    except SglError as error:
        print(f"sglang-lite: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("sglang-lite: interrupted", file=sys.stderr)
        return 130


def _models(options: argparse.Namespace) -> int:
    from sglang_lite.runtime.models.resolve import ALIASES, cache_folder, resolve

    if options.action == "pull":
        print(resolve(options.name))
    else:
        for name, model in ALIASES.items():
            there = (cache_folder() / "models" / name).exists()
            print(f"{name:20} {model.description} ({model.file_bytes / 1e6:.0f} MB{', fetched' if there else ''})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
