"""`ServerArgs`: SGLang's settings as a record, whose fields `Engine` takes."""

from __future__ import annotations

import argparse
from dataclasses import field, make_dataclass
from typing import Any

from sglang_lite.engine.server_args import FLAG_OPTIONS, server_args


class _CommandLine:
    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        """Adds a flag for each field."""
        for arg in server_args().values():
            options = FLAG_OPTIONS.get(arg.kind)
            if options is not None:
                flag = f"--{arg.name.replace('_', '-')}"
                text = arg.setting.replace("%", "%%")
                parser.add_argument(flag, default=arg.default, required=arg.required, help=text, **options)

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Any:
        """The record of what a parser has read that `add_cli_args` has prepared."""
        return cls(**{name: value for name, value in vars(args).items() if name in server_args()})


def _fields() -> list[tuple[str, Any, Any]]:
    found = []
    for arg in sorted(server_args().values(), key=lambda arg: not arg.required):
        given: dict[str, Any] = {} if arg.required else {"kw_only": True, "default": arg.default}
        if isinstance(arg.default, list):
            given = {"kw_only": True, "default_factory": list}
        found.append((arg.name, Any, field(**given)))
    return found


_DOC = """SGLang's settings: `sgl.Engine(**dataclasses.asdict(ServerArgs("model")))`. docs/compatibility.md says of each
what it means here."""
ServerArgs: Any = make_dataclass("ServerArgs", _fields(), bases=(_CommandLine,), namespace={"__doc__": _DOC})
ServerArgs.__module__ = __name__  # where pickle looks for it
