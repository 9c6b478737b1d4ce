"""Command-line flags of `serve`: one for each field of the settings. If SGLang has the same
setting, the flag can also be given under SGLang's name.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

from sglang_lite.protocol import ParameterError
from sglang_lite.protocol.anything import UserValue
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.server.settings import ReplicaSettings, ServerSettings
from sglang_lite.server.sglang.server_args import (
    FLAG_OPTIONS,
    OTHER_NAMES,
    ServerArg,
    server_args,
    sglang_names_for_setting,
    translate_setting_value,
)
from sglang_lite.server.sglang.server_args import (
    unknown_name_note as unknown_name_note,
)

_NOT_FLAGS = {
    "in_process",
    "log_level",
    "served_model_name",
    "stream_interval_s",
}  # fields of an engine that follow from the server's settings
_SERVED = {"tokenizer_worker_num": "body_processes"}  # SGLang's names of settings of the server
_KEYS = ("api_key", "admin_api_key")
_GATEWAYS = {"policy"}  # the gateway's names; the engine's fields have SGLang's names only


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags to a parser."""
    for kind, title in _GROUPS:
        group = parser.add_argument_group(title)
        hints = get_type_hints(kind)
        texts = _read_field_help(kind)
        for each in fields(kind):
            if kind is EngineConfig and each.name in _NOT_FLAGS:
                continue
            names = [
                f"--{name.replace('_', '-')}" for name in (each.name, *_sglang_names(each.name))
            ]
            if kind is EngineConfig:
                names = [] if each.name in _GATEWAYS else names
                others = (name for name, of in OTHER_NAMES.items() if of == each.name)
                names += [
                    f"--{name.replace('_', '-')}"
                    for name in (*sglang_names_for_setting(each.name), *others)
                ]
            how = _type(hints[each.name])
            if kind is EngineConfig and ("choices" in how or each.name == "load_threads"):
                how["type"] = partial(
                    _convert_sglang_flag_value, (*sglang_names_for_setting(each.name), each.name)[0]
                )
            if (how.get("type") and "choices" not in how) or how.get("action") == "extend":
                how["metavar"] = each.name.upper()
            group.add_argument(
                *names,
                dest=_flag_destination(kind, each.name),
                default=None,
                help=f"{texts[each.name]}{_default_sentence(each)}",
                **how,
            )
    group = parser.add_argument_group(
        "files with keys, which a command line would show to all users of this machine"
    )
    for name in _KEYS:
        variable = _variable(name)
        flag = f"--{name.replace('_', '-')}"
        told = f"file with keys as for {flag}, one a line; without either, the environment's {variable} counts"
        group.add_argument(f"{flag}-file", metavar="FILE", help=told)
    group = parser.add_argument_group(
        "SGLang's switches",
        "Its other flags are accepted if they ask for what this server does anyway (docs/compatibility.md).",
    )
    for arg in _sglang_only_flags():
        how = FLAG_OPTIONS.get(arg.kind, {})
        text = None if arg.inverted_setting else argparse.SUPPRESS
        names = [arg.name, *(other for other, name in OTHER_NAMES.items() if name == arg.name)]
        flags = [f"--{name.replace('_', '-')}" for name in names]
        group.add_argument(*flags, dest=arg.name, default=None, help=text, **how)


def read_serve_flags(
    options: argparse.Namespace,
) -> tuple[ServerSettings, Mapping[str, UserValue], ReplicaSettings]:
    """Returns the settings of the server, the keywords of its engine, and the settings of replicas,
    from parsed flags.

    Raises:
        ParameterError: a value is invalid or not supported.
    """
    given = {name: value for name, value in vars(options).items() if value is not None}

    def of(kind: type) -> dict[str, Any]:
        found = {
            each.name: given[name]
            for each in fields(kind)
            if (name := _flag_destination(kind, each.name)) in given
        }
        return {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in found.items()
        }

    replicas = of(ReplicaSettings)
    if "workers" in replicas:
        replicas["workers"] = tuple(
            url for value in replicas["workers"] for url in value.split(",") if url
        )
    switches = {arg.name: given[arg.name] for arg in _sglang_only_flags() if arg.name in given}
    keys = {name: found for name in _KEYS if (found := _read_keys_setting(name, options))}
    if len(admin := keys.pop("admin_api_key", ())) > 1:
        raise ParameterError("admin_api_key", f"there are {len(admin)} keys. Give one.")
    server = ServerSettings(
        **{**of(ServerSettings), **keys, **({"admin_api_key": admin[0]} if admin else {})}
    )
    if switches.pop("log_requests", False) and server.log_level not in ("debug", "info"):
        raise ParameterError(
            "log_requests", f"log_level={server.log_level!r} hides them.", hint='Use "info".'
        )
    engine = {
        "explain_cache_misses": False,
        **of(EngineConfig),
        **switches,
        "stream_interval_s": server.stream_interval_ms / 1000,
    }
    return server, engine, ReplicaSettings(**replicas)


def _read_keys_setting(name: str, options: argparse.Namespace) -> tuple[str, ...]:
    """Returns the keys of a setting: from its flags and its file, or else from the environment.

    Raises:
        ParameterError: a file or variable can't be read, or has no key.
    """
    flag = getattr(options, _flag_destination(ServerSettings, name))
    file = getattr(options, f"{name}_file")
    variable = _variable(name)
    found = [flag] if isinstance(flag, str) else list(flag or ())
    if file is not None:
        try:
            found += _nonempty_key_lines(
                Path(file).read_text(errors="replace"), f"{name}_file", file
            )
        except OSError as error:
            raise ParameterError(
                f"{name}_file", f"{file} can't be read: {error.strerror}."
            ) from error
    elif not found and variable in os.environ:
        found = _nonempty_key_lines(os.environ[variable], name, f"the variable {variable}")
    return tuple(found)


def _nonempty_key_lines(text: str, parameter: str, source: str) -> list[str]:
    found = [line.strip() for line in text.splitlines() if line.strip()]
    if not found:
        raise ParameterError(parameter, f"{source} has no key.")
    return found


def _variable(name: str) -> str:
    """Returns the environment variable of a setting."""
    return f"SGLANG_LITE_{name.upper()}"


_GROUPS: tuple[tuple[type, str], ...] = (
    (ServerSettings, "the server"),
    (ReplicaSettings, "several servers"),
    (EngineConfig, "the engine"),
)


def _sglang_names(setting: str) -> Iterator[str]:
    """Returns SGLang's names for a setting of the server."""
    return (name for name, of in _SERVED.items() if of == setting)


def _sglang_only_flags() -> list[ServerArg]:
    """Returns SGLang's flags that are accepted but don't name one of this server's settings."""
    ours = {*_SERVED, *(each.name for kind, _ in _GROUPS for each in fields(kind))}
    return [
        arg
        for arg in server_args().values()
        if arg.name not in ours
        and (arg.inverted_setting or arg.support in ("always", "served", "neutral"))
    ]


def _convert_sglang_flag_value(name: str, value: str) -> UserValue:
    try:
        return translate_setting_value(name, value)
    except ParameterError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _default_sentence(setting: Field[Any]) -> str:
    """Returns the sentence with a setting's default, which ends the setting's help text. Returns ""
    if there is no default to show, such as for None or False.
    """
    value = setting.default
    if value in (None, "", (), MISSING) or value is False:
        return ""
    return f" Default: {'on' if value is True else value}.".replace("%", "%%")


def _flag_destination(kind: type, name: str) -> str:
    return f"{kind.__name__}.{name}"


def _type(hint: Any) -> dict[str, Any]:
    """Returns argparse's options for a flag whose field has this type."""
    options = [each for each in get_args(hint) if each is not type(None)] or [hint]
    if bool in options:
        return {"action": argparse.BooleanOptionalAction}
    for many in (hint, *options):
        if get_args(many)[1:] == (...,):
            return {"action": "extend", "nargs": "+", "type": get_args(many)[0]}
    texts = [
        value for each in options for value in (get_args(each) or (each,)) if isinstance(value, str)
    ]
    if texts:
        return {"choices": texts}
    return {"type": next((kind for kind in (float, int) if kind in options), str)}


def _read_field_help(kind: type) -> dict[str, str]:
    """Returns the help text of each field of a settings class, from its docstring."""
    attributes = (kind.__doc__ or "").partition("Attributes:\n")[2]
    found = re.findall(r"^ {8}(\w+(?:, \w+)*): (.*(?:\n {9,}.*)*)", attributes, re.MULTILINE)
    return {
        name: " ".join(text.split()).replace("%", "%%")
        for names, text in found
        for name in names.split(", ")
    }
