"""What SGLang's users can name, compared with this package.

`python -m tests.server.sglang.watch FOLDER` reads an unpacked wheel, and prints each name that is
neither here nor in `decisions.tsv`, each default that differs, each decision that is out of date, and
how `data/surface.json` differs from the wheel. It fails if anything differs. With `--write`, it
writes the wheel's names to `data/surface.json`, which the tests read.
"""

import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import sglang_lite as sgl
from sglang_lite.compat.sglang import absent_calls
from sglang_lite.server.absent import unsupported_path_error
from sglang_lite.server.routes import ROUTES
from sglang_lite.server.sglang.server_args import server_args, translate_engine_settings
from sglang_lite.text.reasoning import reasoning_format
from sglang_lite.text.tool_formats import tool_format
from tests.server.sglang.surface import (
    DECISIONS,
    SURFACE,
    Names,
    read_decisions,
    read_surface,
    write_surface,
)
from tests.server.sglang.wheel import MovedError, read_wheel


def is_here(table: str, name: str) -> bool:
    """Returns whether this package has what SGLang calls so."""
    return CHECKS[table](name)


def _is_method(name: str) -> bool:
    return hasattr(sgl.Engine, name) and not hasattr(absent_calls, name)


def _is_route(path: str) -> bool:
    """Returns whether a route is served, or answered with the feature that it needs."""
    served = {re.sub("{.*?}", "{}", route.path) for route in ROUTES}
    return re.sub("{.*?}", "{}", path) in served or unsupported_path_error(path) is not None


def _raises_nothing(read: Callable[[str], object], name: str) -> bool:
    try:
        read(name)
    except sgl.SglError:
        return False
    return True


def make_engine_config(setting: str, value: str) -> sgl.EngineConfig:
    """Returns the settings of an engine with one of SGLang's values."""
    settings: dict[str, Any] = translate_engine_settings({setting: value, "model_path": "m"})
    return sgl.EngineConfig.make(**settings)


CHECKS: Mapping[str, Callable[[str], bool]] = {
    "names": lambda name: name in sgl.__all__,
    "routes": _is_route,
    "engine_methods": _is_method,
    "tool_call_parsers": partial(_raises_nothing, tool_format),
    "reasoning_parsers": partial(_raises_nothing, reasoning_format),
    "quantizations": partial(_raises_nothing, partial(make_engine_config, "quantization")),
    "load_formats": partial(_raises_nothing, partial(make_engine_config, "load_format")),
    "server_args": lambda name: name.startswith("_") or name in server_args(),
}


def differences(table: str, theirs: Names) -> list[str]:
    """Returns a line for each name of SGLang's that needs a decision, and each decision that is out
    of date.
    """
    decided = read_decisions(table)
    here = {name for name in theirs if is_here(table, name)}
    lines = [f"{table}: {name} is new" for name in theirs if name not in here | decided.keys()]
    lines += [
        f"{table}: {name} is {'here' if name in here else 'gone'}, but {DECISIONS.name} has it"
        for name in decided
        if name in here or name not in theirs
    ]
    return lines + (_argument_differences(theirs) if table == "server_args" else [])


def _argument_differences(theirs: Names) -> list[str]:
    ours = {name: [] if arg.required else [arg.default] for name, arg in server_args().items()}
    lines = [f"server_args: {name} is gone" for name in ours.keys() - theirs.keys()]
    lines += [
        f"server_args: {name} has the default {theirs[name]}, and here {default}"
        for name, default in ours.items()
        if name in theirs and repr(theirs[name]) != repr(default)  # True is not 1
    ]
    return lines


def main(folder: Path, *, write: bool = False) -> list[str]:
    """Compares a wheel, prints a line for each table and difference, and returns the differences."""
    surface = read_wheel(folder)
    if write:
        write_surface(surface)
    print(*(each.stem for each in folder.glob("sglang-*.dist-info")))
    found = []
    for table, theirs in surface.items():
        here = sum(is_here(table, name) for name in theirs)
        print(f"{table}: {len(theirs)} names, {here} of them here, {len(theirs) - here} are not")
        found += differences(table, theirs)
        if theirs != read_surface().get(table):
            found.append(f"{table}: {SURFACE.name} differs from the wheel; --write corrects it")
    print(*found, sep="\n")
    return found


if __name__ == "__main__":
    try:
        left = main(Path(sys.argv[1]), write="--write" in sys.argv)
    except MovedError as error:
        sys.exit(f"{error}: correct {read_wheel.__module__}.")
    if left:
        sys.exit("Support each name, or write in decisions.tsv why it is not here.")
