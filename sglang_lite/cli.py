"""`sglang-lite`: the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from sglang_lite.protocol import Constraint, Ebnf, Lark, ParameterError, Regex, SglError
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
    models.set_defaults(run=_models)
    grammar = commands.add_parser("grammar", help="what of a schema, regex or grammar is kept")
    actions = grammar.add_subparsers(dest="action", required=True, metavar="ACTION")
    check = actions.add_parser("check", help="tell what is enforced and what is refused; 1 if it is refused")
    check.add_argument("file", type=Path, help=f"a file that ends in {', '.join(_KINDS)}")
    check.add_argument("--match", metavar="TEXT", help="also tell whether the text is allowed; 1 if it is not")
    check.add_argument("--model", help="whose tokens to compile for; else a token per byte")
    check.add_argument("--best-effort", action="store_true", help="leave what can't be enforced of a schema to a check")
    check.set_defaults(run=_grammar)
    options = parser.parse_args(arguments)
    try:
        run: Callable[[argparse.Namespace], int] = options.run
        return run(options)
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


def _json_schema(text: str, best_effort: bool) -> Constraint:
    from sglang_lite.constraints.schema import json_schema

    return json_schema(text, enforce="best_effort" if best_effort else "strict")


def _structural_tag(text: str, best_effort: bool) -> Constraint:
    from sglang_lite.constraints.structural_tag import parse

    return parse(text)


# What a file holds, by its ending. The longest one counts.
_KINDS: dict[str, Callable[[str, bool], Constraint]] = {
    ".tag.json": _structural_tag,
    ".json": _json_schema,
    ".regex": lambda text, _: Regex(text.removesuffix("\n")),
    ".gbnf": lambda text, _: Ebnf(text),
    ".ebnf": lambda text, _: Ebnf(text),
    ".lark": lambda text, _: Lark(text),
}


def _grammar(options: argparse.Namespace) -> int:
    from sglang_lite import grammar

    kind = next((kind for ending, kind in _KINDS.items() if options.file.name.endswith(ending)), None)
    if kind is None:
        raise ParameterError("FILE", f"{options.file} does not end in {', '.join(_KINDS)}.")
    try:
        text = options.file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError("FILE", f"{options.file}: {error}") from error
    constraint = kind(text, options.best_effort)
    report = grammar.check(constraint, options.model)
    for title, pointers in (("enforced", report.enforced), ("says nothing", report.remarks)):
        if pointers:
            print(f"{title}: {', '.join(pointers)}")
    for title, reasons in (("refused", report.refused), ("checked afterwards", report.checked)):
        for pointer, reason in reasons:
            print(f"{title}: {pointer + ': ' if pointer else ''}{reason}")
    if report.refused:
        return 1
    print(f"kept: {report.rules:,} rules, first mask after {report.seconds * 1000:.1f} ms")
    print(f"example: {report.example}")
    if options.match is None:
        return 0
    matched = grammar.matches(constraint, options.match, options.model)
    print(f"matches: {'yes' if matched else 'no'}")
    return 0 if matched else 1


if __name__ == "__main__":
    sys.exit(main())
