"""Command line `sglang-lite`."""

from __future__ import annotations

import argparse
import difflib
import json
import math
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NoReturn

from sglang_lite.protocol import Constraint, Ebnf, Lark, ParameterError, Regex, SglError
from sglang_lite.version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit status. An error of this package is printed as one line on stderr, with
    status 1; an interrupt has status 130."""
    parser = argparse.ArgumentParser(prog="sglang-lite", description="Programs for language models.")
    parser.add_argument("--version", action="version", version=f"sglang-lite {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    models = commands.add_parser(
        "models",
        help="show how a model would run, without loading it; list or fetch models with a short name",
        usage="sglang-lite models [NAME [--revision REVISION] [--json] | list | pull NAME]",
    )
    models.add_argument(
        "name", nargs="*", metavar="NAME", help="a model, as for Engine; exit status 1 if it is not supported"
    )
    models.add_argument("--revision", help="branch, tag or commit of a model from the hub")
    models.add_argument("--json", action="store_true", help="print a JSON object")
    models.set_defaults(run=partial(_models, models.error))
    _add_grammar(commands.add_parser)
    _add_lint(commands.add_parser)
    serve = commands.add_parser("serve", help="serve a model over HTTP: SGLang's, OpenAI's and Anthropic's protocols")
    _serve_flags(serve, sys.argv[1:] if arguments is None else arguments)
    serve.set_defaults(run=_serve)
    warm = commands.add_parser("warm", help="load a model once, so that its GPU kernels are compiled and cached")
    warm.add_argument("--model", help="a model, as for Engine (default: the default model)")
    warm.set_defaults(run=_warm)
    trace = commands.add_parser("trace", help="make an HTML page of a run's trace, as Trace.save writes it")
    trace.add_argument("file", type=Path, help="JSON lines that state.trace().save(…) has written")
    trace.add_argument("-o", "--output", type=Path, help="the page to write (default: FILE with the ending .html)")
    trace.set_defaults(run=_trace)
    _add_bench(commands.add_parser)
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        _refuse(commands.choices[options.command], unknown)
    try:
        run: Callable[[argparse.Namespace], int] = options.run
        return run(options)
    except SglError as error:
        print(f"sglang-lite: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("sglang-lite: interrupted", file=sys.stderr)
        return 130


def _refuse(command: argparse.ArgumentParser, unknown: Sequence[str]) -> NoReturn:
    """Exits with status 2 and a message that suggests the flag which was probably meant."""
    flags = re.findall(r"--[\w-]+", command.format_usage())
    near = difflib.get_close_matches(unknown[0].partition("=")[0], flags, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else f"; see {command.prog} --help"
    command.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")


def _add_grammar(add: Callable[..., argparse.ArgumentParser]) -> None:
    grammar = add("grammar", help="check a schema, regex or grammar")
    actions = grammar.add_subparsers(dest="action", required=True, metavar="ACTION")
    check = actions.add_parser(
        "check", help="report what is enforced and what is refused; exit status 1 if something is refused"
    )
    check.add_argument("file", type=Path, help=f"a file that ends in {', '.join(_KINDS)}")
    check.add_argument(
        "--match", metavar="TEXT", help="also report whether TEXT is allowed; exit status 1 if it is not"
    )
    check.add_argument("--model", help="compile for the tokens of this model (default: one token per byte)")
    check.add_argument(
        "--closed", action="store_true", help="objects have the members that the schema names, no others"
    )
    check.add_argument("--best-effort", action="store_true", help="check afterwards what can't be enforced")
    check.set_defaults(run=_grammar)


def _add_lint(add: Callable[..., argparse.ArgumentParser]) -> None:
    lint = add("lint", help="find faults in programs without running them; count the tokens that runs share")
    lint.add_argument(
        "file",
        metavar="FILE[:FUNCTION]",
        help="a Python file; it is imported, so all its code except the __main__ part runs",
    )
    lint.add_argument(
        "--data", type=Path, metavar="ROWS.jsonl", help="arguments of the program: one JSON object per line"
    )
    lint.add_argument("--model", help="count the tokens of this model (default: the default model)")
    lint.add_argument(
        "--fail-under",
        type=float,
        metavar="PERCENT",
        help="exit status 1 if the cache serves less than this share of the prompts",
    )
    lint.add_argument("--price", type=float, help="price of a million prompt tokens, to report costs")
    lint.add_argument(
        "--cached-price", type=float, default=0.0, help="price of a million cached prompt tokens (default: 0)"
    )
    lint.add_argument("--format", choices=("text", "json"), default="text")
    lint.set_defaults(run=_lint)


def _add_bench(add: Callable[..., argparse.ArgumentParser]) -> None:
    bench = add("bench", help="measure a GPU, and vllm and sglang if installed, with random weights")
    bench.add_argument(
        "--shape",
        default="llama-3.1-8b",
        help="llama-3.1-8b, qwen3-0.6b, qwen3-14b, qwen3-30b-a3b, deepseek-v2-lite; small: on CPUs, too",
    )
    bench.add_argument("--workload", nargs="+", metavar="NAME", help="w1, decode1, fork64 … (default: all)")
    bench.add_argument("--repeat", type=int, default=3, help="runs of each workload after the first one (default: 3)")
    bench.add_argument("--fp8", action="store_true", help="weights, keys and values in 8 bits; latents stay in 16")
    bench.add_argument(
        "--model-impl",
        choices=("native", "transformers"),
        default="native",
        help="code that runs the model (default: native)",
    )
    bench.add_argument("--json", type=Path, metavar="FILE", help="also write every run to FILE")
    bench.set_defaults(run=_bench)


def _serve_flags(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Adds the flags of `serve`, only if that is the command: the modules that define them are slow to import."""
    if "serve" not in arguments[:1]:
        return
    try:
        import uvicorn  # noqa: F401 # needed when the server starts

        from sglang_lite.server import flags
    except ModuleNotFoundError as error:
        problem = f"sglang-lite: {error}. The server needs more packages: pip install 'sglang-lite[server]'"
        raise SystemExit(problem) from error
    flags.add(parser)


def _serve(options: argparse.Namespace) -> int:
    from sglang_lite.server import flags

    settings, engine, several = flags.read(options)
    if several.replicas or several.workers:
        from sglang_lite.server.replicas import supervisor

        return supervisor.serve(settings, engine, several, partial(print, flush=True))
    from sglang_lite.server.app import serve

    return serve(settings, engine)


def _models(wrong: Callable[[str], NoReturn], options: argparse.Namespace) -> int:
    from sglang_lite.runtime.models.resolve import ALIASES, cache_folder, resolve

    match options.name:
        case [] | ["list"]:
            for name, model in ALIASES.items():
                there = (cache_folder() / "models" / name).exists()
                print(f"{name:20} {model.description} ({model.file_bytes / 1e6:.0f} MB{', fetched' if there else ''})")
        case ["pull", name]:
            print(resolve(name, options.revision))
        case [name] if name != "pull":
            return _describe(name, options)
        case _:
            wrong("give the name of a model, list, or pull NAME.")
    return 0


def _describe(name: str, options: argparse.Namespace) -> int:
    """Prints how a model would run. Returns exit status 0 if the model is supported, else 1."""
    from sglang_lite.runtime.host.installed import check_installed

    check_installed("a description")
    from sglang_lite.runtime.loading.description import describe

    found = describe(name, options.revision)
    print(json.dumps(asdict(found)) if options.json else found.as_text())
    return 1 if found.refused else 0


def _warm(options: argparse.Namespace) -> int:
    from sglang_lite.engine.engine import Engine

    started = time.perf_counter()
    with Engine(**({"model": options.model} if options.model else {})) as engine:
        print(f"{engine.model_name}: ready after {time.perf_counter() - started:.1f} s")
    return 0


def _trace(options: argparse.Namespace) -> int:
    from sglang_lite.lang.trace import Trace, as_html

    trace = Trace.load(options.file)
    page: Path = options.output or options.file.with_suffix(".html")
    if page == options.file:
        raise ParameterError("FILE", f"{page} would be overwritten.", hint="Name the page: -o page.html")
    try:
        page.write_text(as_html(trace), encoding="utf-8")
    except OSError as error:
        raise ParameterError("--output", f"{page}: {error}") from error
    usage = trace.usage
    print(
        f"{page}: {len(trace.nodes):,} nodes, {usage.total_s:.3f} s; {usage.prompt_tokens:,} prompt tokens, "
        f"{usage.cached_tokens:,} of them cached; {usage.completion_tokens:,} generated, {trace.thrown_away:,} in vain"
    )
    return 0


def _lint(options: argparse.Namespace) -> int:
    """Prints findings about programs. Returns exit status 0 without findings, 1 with findings, 2 after an error."""
    from sglang_lite.lint import lint
    from sglang_lite.lint.report import Prices, written

    file, _, function = options.file.rpartition(":") if not options.file.endswith(".py") else (options.file, "", "")
    try:
        for name, price in (("--price", options.price), ("--cached-price", options.cached_price)):
            if price is not None and not 0 <= price < math.inf:
                raise ParameterError(name, f"{price:g} is not a number of at least 0.")
        prices = Prices(options.price, options.cached_price)
        with redirect_stdout(sys.stderr):  # output of the file, whose code runs
            reports = lint(
                Path(file or options.file), function or None, options.data, options.model, options.fail_under, prices
            )
    except SglError as error:
        print(f"sglang-lite: {error}", file=sys.stderr)
        return 2
    print(written(reports, options.format), end="")
    return 1 if any(report.findings for report in reports) else 0


def _bench(options: argparse.Namespace) -> int:
    if options.repeat < 1:
        raise ParameterError("--repeat", f"{options.repeat} is not a whole number of at least 1.")
    if options.json is not None and (options.json.is_dir() or not options.json.parent.is_dir()):
        problem = "it is a folder" if options.json.is_dir() else f"there is no folder {options.json.parent}"
        raise ParameterError("--json", f"{options.json} can't be written: {problem}.")
    from sglang_lite.runtime.host.installed import check_installed

    check_installed("a measurement")
    from sglang_lite.bench.report import report
    from sglang_lite.bench.shapes import SHAPES
    from sglang_lite.bench.workloads import WORKLOADS

    if options.shape not in SHAPES:
        raise ParameterError("--shape", f"{options.shape!r} is not one of {', '.join(SHAPES)}.")
    names = options.workload or list(WORKLOADS)
    for name in names:
        if name not in WORKLOADS:
            raise ParameterError("--workload", f"{name!r} is not one of {', '.join(WORKLOADS)}.")
    if options.fp8 and options.model_impl == "transformers":
        raise ParameterError("--fp8", "transformers' code has no 8 bits.", hint="Leave one of the two out.")
    report(options.shape, names, options.repeat, fp8=options.fp8, model_impl=options.model_impl, file=options.json)
    return 0


def _json_schema(text: str, options: argparse.Namespace) -> Constraint:
    from sglang_lite.constraints.schema import json_schema

    return json_schema(text, enforce="best_effort" if options.best_effort else "strict", closed=options.closed)


def _structural_tag(text: str, options: argparse.Namespace) -> Constraint:
    from sglang_lite.constraints.structural_tag import parse

    return parse(text)


# Readers of constraint files by file name ending; the first ending that fits counts, so longer ones come first.
_KINDS: dict[str, Callable[[str, argparse.Namespace], Constraint]] = {
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
    constraint = kind(text, options)
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
