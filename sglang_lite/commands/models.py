"""`sglang-lite models`: lists and fetches models with a short name, and describes any model without
loading it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.host.installed import check_engine_packages

if TYPE_CHECKING:
    from sglang_lite.runtime.loading.model_choice import ModelChoice, ModelFit

_LISTED_TOKENS = 8192  # tokens for which the list shows the memory of keys and values


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.usage = "sglang-lite models [NAME [--revision REVISION] [--json] | [list] [--fits [--json]] | pull NAME]"
    told = "a model, as for Engine; exit status 1 if it is not supported"
    parser.add_argument("name", nargs="*", metavar="NAME", help=told)
    parser.add_argument("--revision", help="branch, tag or commit of a hub model (default: main)")
    told = "list those that fit this machine's memory, and what the others lack; exit status 1 if none does"
    parser.add_argument("--fits", action="store_true", help=told)
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    parser.set_defaults(run=partial(_run, parser.error))


def _run(wrong: Callable[[str], NoReturn], options: argparse.Namespace) -> int:
    from sglang_lite.runtime.models.resolve import resolve

    match options.name:
        case [] | ["list"]:
            return _list_fitting_models(as_json=options.json) if options.fits else _list_all()
        case _ if options.fits:
            wrong("--fits is for the list: leave the name out.")
        case ["pull", name]:
            print(resolve(name, options.revision))
        case [name] if name != "pull":
            return _describe_model(name, options)
        case _:
            wrong("give the name of a model, list, or pull NAME.")
    return 0


def _list_all() -> int:
    from sglang_lite.runtime.models.aliases import ALIASES
    from sglang_lite.runtime.models.resolve import has_local_copy

    for name, model in ALIASES.items():
        size = f"{model.file_bytes / 1e9:.1f} GB{' *' if has_local_copy(name) else ''}"
        cache = (
            f"+ {2 * _LISTED_TOKENS * model.token_numbers / 1e9:.1f} GB"
            if model.token_numbers
            else ""
        )
        print(f"{name:20} {size:9} {cache:9} {model.use} ({model.description})")
    print(
        f"Memory of the weights (bfloat16, or as in the file) + {_LISTED_TOKENS:,} tokens. Fetched already: *"
    )
    print("Those that fit this machine: sglang-lite models --fits")
    return 0


def _list_fitting_models(*, as_json: bool) -> int:
    """Prints the models that fit this machine.

    Raises:
        BackendError: the packages that measure the machine are not installed.
        ModelError: no model fits.
    """
    check_engine_packages("a list of what fits")
    from sglang_lite.runtime.loading.model_choice import choose_model, gigabytes, measure_machine

    choice = choose_model(measure_machine())
    print(json.dumps(asdict(choice)) if as_json else "\n".join(_format_model_choice(choice)))
    if choice.fitting:
        return 0
    free = f"{gigabytes(choice.machine.free)} are free on {choice.machine.device}"
    raise ModelError(
        f"no model with a short name fits: {choice.others[0].name} needs {gigabytes(choice.others[0].needed)}, {free}.",
        hint="End other programs, or use a model behind an API, as sgl.OpenAI(…).",
    )


def _format_model_choice(choice: ModelChoice) -> Iterator[str]:
    from sglang_lite.runtime.loading.model_choice import TOKENS, gigabytes

    machine = choice.machine
    yield f"{machine.device}, {machine.cores} cores, {gigabytes(machine.free)} of memory free. Proposed: >"
    for fit in choice.fitting:
        slow = f"; slow: it reads {gigabytes(fit.read)} a token" if fit.is_slow else ""
        yield _format_model_fit(">" if fit is choice.proposed else " ", fit, slow)
    if choice.others:
        yield "Don't fit:"
    for fit in choice.others:
        yield _format_model_fit(" ", fit, f"; {gigabytes(fit.lacking)} more than is free")
    yield f"Memory of the weights as kept here + {TOKENS:,} tokens + {gigabytes(machine.process_bytes)} of the process."


def _format_model_fit(mark: str, fit: ModelFit, remark: str) -> str:
    from sglang_lite.runtime.loading.model_choice import gigabytes
    from sglang_lite.runtime.models.aliases import ALIASES

    return f"{mark} {fit.name:20} {gigabytes(fit.needed):>8}  {ALIASES[fit.name].use}{remark}"


def _describe_model(name: str, options: argparse.Namespace) -> int:
    """Prints how a model would run. Returns exit status 0 if the model is supported, else 1."""
    check_engine_packages("a description")
    from sglang_lite.runtime.loading.description import describe

    found = describe(name, options.revision)
    print(json.dumps(asdict(found)) if options.json else found.as_text())
    return 1 if found.refused else 0
