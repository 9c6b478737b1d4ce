"""The command line `sglang-lite`."""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import math
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sglang_lite.commands import (
    evaluate,
    families,
    mcp_server,
    models,
    quantize,
    replay,
    save,
    warm,
)
from sglang_lite.commands.parser import (
    CommandParser,
    add_file_argument,
    add_model_flag,
    split_file_and_function,
    suggest_near,
)
from sglang_lite.commands.verify import command as verify
from sglang_lite.protocol import (
    Constraint,
    Ebnf,
    Lark,
    ParameterError,
    Regex,
    SamplingParams,
    SglError,
)
from sglang_lite.version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit status. An error of this package is printed as one line
    on stderr, with status 1; an interrupt has status 130. Characters that a terminal lacks are
    printed as `?`.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    arguments = sys.argv[1:] if arguments is None else arguments
    parser, commands = _build_parser(arguments)
    if not arguments:
        parser.print_help(sys.stderr)
        return 2
    if arguments[0] not in commands and not arguments[0].startswith("-"):
        parser.error(f"there is no command {arguments[0]!r}{suggest_near(arguments[0], commands)}")
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        commands[options.command].reject_unknown(unknown)
    try:
        run: Callable[[argparse.Namespace], int] = options.run
        return run(options)
    except SglError as error:
        print(f"sglang-lite: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("sglang-lite: interrupted", file=sys.stderr)
        return 130


def _build_parser(arguments: Sequence[str]) -> tuple[CommandParser, Mapping[str, CommandParser]]:
    """Builds the command-line parser, and returns it with the commands' parsers by name. The flags
    of `serve` are added only if `arguments` begin with that command.
    """
    listed = "\n\n".join(
        "\n".join([f"{group}:", *(f"  {each.name:12} {each.does}" for each in commands)])
        for group, commands in _GROUPS.items()
    )
    plain = argparse.RawDescriptionHelpFormatter
    parser = CommandParser(
        prog="sglang-lite",
        usage="sglang-lite COMMAND …",
        description=f"Programs for language models.\n\n{listed}",
        epilog="sglang-lite COMMAND --help has the flags of a command, their defaults and an example.",
        formatter_class=plain,
    )
    parser.add_argument("--version", action="version", version=f"sglang-lite {__version__}")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", help=argparse.SUPPRESS
    )
    for command in itertools.chain.from_iterable(_GROUPS.values()):
        description = f"{command.does[0].upper()}{command.does[1:]}."
        own = commands.add_parser(
            command.name,
            description=description,
            epilog=f"example: {command.example}",
            formatter_class=plain,
            prog=f"sglang-lite {command.name}",
        )
        command.add_flags(own)
        if command.name == "serve" and "serve" in arguments[:1]:
            _add_serve_flags(own)
    return parser, commands.choices


def _add_serve_flags(parser: CommandParser) -> None:
    """Adds the flags of `serve`. The modules that define them are slow to import."""
    try:
        import uvicorn  # noqa: F401 # needed when the server starts

        from sglang_lite.commands.config_file import ConfigFile
        from sglang_lite.server import flags
    except ModuleNotFoundError as error:
        raise _missing_packages_exit(error) from error
    flags.add_serve_flags(parser)
    parser.unknown_note = flags.unknown_name_note()
    parser.add_argument(
        "--config",
        action=ConfigFile,
        metavar="FILE",
        help="YAML file with flags; those given here win",
    )


def _missing_packages_exit(error: ModuleNotFoundError) -> SystemExit:
    """Returns a SystemExit whose message says that a server needs more packages, and how to install
    them.
    """
    return SystemExit(
        f"sglang-lite: {error}. A server needs more packages: pip install 'sglang-lite[server]'"
    )


def _run_serve(options: argparse.Namespace) -> int:
    from sglang_lite.server import flags

    settings, engine, several = flags.read_serve_flags(options)
    if engine.get("node_rank"):
        return _run_node(engine)
    if several.replicas or several.workers:
        if settings.playground:
            raise ParameterError(
                "--playground", "several servers have no page.", hint="Serve one, or leave it out."
            )
        from sglang_lite.server.replicas import supervisor

        return supervisor.serve(settings, engine, several, partial(print, flush=True))
    from sglang_lite.server.app import serve

    return serve(settings, engine)


def _run_node(settings: Mapping[str, Any]) -> int:
    """Runs the ranks of a machine other than the one with the server."""
    from sglang_lite.engine.nodes import run_worker_node
    from sglang_lite.runtime.config import EngineConfig
    from sglang_lite.runtime.models.resolve import resolve_for_engine
    from sglang_lite.server.sglang import server_args

    config = EngineConfig.make(**server_args.translate_engine_settings(settings))
    return run_worker_node(config, resolve_for_engine(config.model, config.revision))


def _run_init(options: argparse.Namespace) -> int:
    from sglang_lite.commands.new_project import proposed_model, write_project

    for file in write_project(options.folder):
        print(file)
    folder = shlex.quote(str(options.folder))
    run = "sglang-lite run extract.py --rows notes.jsonl"
    print(f"\ncd {folder}\npython -m pytest -q\n{run}", flush=True)
    if (model := proposed_model()) is not None:
        print(
            f"\nWith a larger model, which fits this machine: {run} --model {model}",
            file=sys.stderr,
        )
    return 0


def _run_doctor(options: argparse.Namespace) -> int:
    from sglang_lite.commands.doctor import diagnose_all

    for diagnosis in diagnose_all():
        print(diagnosis.as_text(), flush=True)
    return 0


def _run_completion(options: argparse.Namespace) -> int:
    from sglang_lite.commands.completion import SHELLS
    from sglang_lite.runtime.host.installed import is_installed

    _, commands = _build_parser(["serve"] if is_installed("uvicorn") else [])
    words = {
        name: dict.fromkeys(re.findall(r"(?<![\w-])--[a-z][\w-]*", own.format_help()))
        for name, own in commands.items()
    }
    actions = {"models": ("list", "pull"), "grammar": ("check",), "completion": tuple(SHELLS)}
    print(
        SHELLS[options.shell](
            {name: [*own, *actions.get(name, ())] for name, own in words.items()}
        ),
        end="",
    )
    return 0


def _run_chat(options: argparse.Namespace) -> int:
    from sglang_lite.commands.chat import HELP, Dialogue, chat, read_typed_lines
    from sglang_lite.engine.engine import Engine

    SamplingParams(max_tokens=options.max_tokens, temperature=options.temperature)  # checks both
    with Engine(**({"model": options.model} if options.model else {})) as engine:
        if sys.stdin.isatty():
            print(HELP, end="")
        chat(
            read_typed_lines(),
            sys.stdout,
            engine,
            Dialogue(system=options.system),
            max_tokens=options.max_tokens,
            temperature=options.temperature,
        )
    return 0


def _run_program(options: argparse.Namespace) -> int:
    """Prints the variables of each run as JSON; for rows, one line per run. Returns exit status 1
    if a run has failed.
    """
    from sglang_lite.commands.run_file import load_program, parse_arguments, run_on_rows
    from sglang_lite.engine.engine import Engine

    file, function = split_file_and_function(options.file)
    ascii_only = (sys.stdout.encoding or "").lower() not in ("utf-8", "utf8")
    failed = False
    with contextlib.ExitStack() as stack:
        with redirect_stdout(sys.stderr):  # output of the file, whose code runs
            program = load_program(file, function)
        arguments = parse_arguments(program, options.arg)
        engine = None if options.model is None else stack.enter_context(Engine(options.model))
        for result in run_on_rows(program, arguments, options.rows, engine, options.seed):
            failed |= "error" in result and len(result) == 1
            print(
                json.dumps(result, ensure_ascii=ascii_only, indent=None if options.rows else 2),
                flush=True,
            )
    return 1 if failed else 0


def _run_playground(options: argparse.Namespace) -> int:
    from sglang_lite.engine.engine import Engine
    from sglang_lite.playground.programs import Playground
    from sglang_lite.server.http.sockets import bind_socket

    try:
        from sglang_lite.playground.app import serve_playground
    except ModuleNotFoundError as error:
        raise _missing_packages_exit(error) from error
    file, function = split_file_and_function(options.file)
    if not file.is_file():
        raise ParameterError(
            "FILE", f"there is no file {file}.", hint="Give prog.py, or prog.py:function."
        )
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(bind_socket("127.0.0.1", options.port))
        engine = None if options.model is None else stack.enter_context(Engine(options.model))
        serve_playground(Playground(file, function, engine), listening, partial(print, flush=True))
    return 0


def _run_trace(options: argparse.Namespace) -> int:
    from sglang_lite.lang.runs import files
    from sglang_lite.lang.trace import Trace, as_html

    trace = Trace.load(options.file)
    beside = None if options.beside is None else Trace.load(options.beside)
    page: Path = options.output or options.file.with_suffix(".html")
    if page in (options.file, options.beside):
        raise ParameterError(
            "FILE", f"{page} would be overwritten.", hint="Name the page: -o page.html"
        )
    files.write(page, as_html(trace, beside).encode(), "--output")
    usage = trace.usage
    print(
        f"{page}: {len(trace.nodes):,} nodes, {usage.total_s:.3f} s; {usage.prompt_tokens:,} prompt tokens, "
        f"{usage.cached_tokens:,} of them cached; {usage.completion_tokens:,} generated, {trace.thrown_away:,} in vain"
    )
    return 0


def _run_lint(options: argparse.Namespace) -> int:
    """Reports findings about programs. Returns exit status 0 without findings, 1 with findings, 2
    after an error.
    """
    from sglang_lite.lint import lint
    from sglang_lite.lint.report import Prices, format_reports

    file, function = split_file_and_function(options.file)
    try:
        for name, price in (("--price", options.price), ("--cached-price", options.cached_price)):
            if price is not None and not 0 <= price < math.inf:
                raise ParameterError(name, f"{price:g} is not a number of at least 0.")
        prices = Prices(options.price, options.cached_price)
        with redirect_stdout(sys.stderr):  # output of the file, whose code runs
            reports = lint(
                file,
                function,
                options.data,
                options.model,
                options.fail_under,
                prices,
                options.context,
            )
    except SglError as error:
        print(f"sglang-lite: {error}", file=sys.stderr)
        return 2
    print(format_reports(reports, options.format), end="")
    return 1 if any(report.findings for report in reports) else 0


def _run_bench(options: argparse.Namespace) -> int:
    if options.repeat < 1:
        raise ParameterError("--repeat", f"{options.repeat} is not a whole number of at least 1.")
    if options.json is not None and (options.json.is_dir() or not options.json.parent.is_dir()):
        problem = (
            "it is a folder"
            if options.json.is_dir()
            else f"there is no folder {options.json.parent}"
        )
        raise ParameterError("--json", f"{options.json} can't be written: {problem}.")
    from sglang_lite.runtime.host.installed import check_engine_packages

    check_engine_packages("a measurement")
    from sglang_lite.bench.report import print_agents_report, print_report
    from sglang_lite.bench.shapes import SHAPES
    from sglang_lite.bench.workloads import WORKLOADS
    from sglang_lite.runtime.parallel.layout import Parallel

    if options.shape not in SHAPES:
        raise ParameterError("--shape", f"{options.shape!r} is not one of {', '.join(SHAPES)}.")
    names = options.workload or list(WORKLOADS)
    for name in names:
        if name not in (*WORKLOADS, "agents"):
            raise ParameterError(
                "--workload", f"{name!r} is not one of {', '.join(WORKLOADS)}, agents."
            )
    if "agents" in names and (
        len(names) > 1
        or options.tp > 1
        or options.model_impl != "native"
        or options.json is not None
    ):
        raise ParameterError(
            "--workload",
            "agents have a table of their own, of our models on one GPU: name them alone.",
        )
    if options.fp8 and options.model_impl == "transformers":
        raise ParameterError(
            "--fp8", "transformers' code has no 8 bits.", hint="Leave one of the two out."
        )
    if "agents" in names:
        print_agents_report(options.shape, fp8=options.fp8)
        return 0
    if options.tp > 1 and options.model_impl == "transformers":
        raise ParameterError(
            "--tp", "transformers' code runs on one GPU.", hint="Leave one of the two out."
        )
    print_report(
        options.shape,
        names,
        options.repeat,
        fp8=options.fp8,
        model_impl=options.model_impl,
        parallel=Parallel(tp=options.tp, ep=options.ep),
        file=options.json,
    )
    return 0


def _read_json_schema(text: str, options: argparse.Namespace) -> Constraint:
    from sglang_lite.constraints.schema import json_schema

    return json_schema(
        text, enforce="best_effort" if options.best_effort else "strict", closed=options.closed
    )


def _read_structural_tag(text: str, options: argparse.Namespace) -> Constraint:
    from sglang_lite.constraints.structural_tag import parse

    return parse(text)


# Readers of constraint files by file name ending. The first matching ending wins, so longer ones
# come first.
_KINDS: dict[str, Callable[[str, argparse.Namespace], Constraint]] = {
    ".tag.json": _read_structural_tag,
    ".json": _read_json_schema,
    ".regex": lambda text, _: Regex(text.removesuffix("\n")),
    ".gbnf": lambda text, _: Ebnf(text),
    ".ebnf": lambda text, _: Ebnf(text),
    ".lark": lambda text, _: Lark(text),
}


def _run_grammar(options: argparse.Namespace) -> int:
    from sglang_lite import grammar

    kind = next(
        (kind for ending, kind in _KINDS.items() if options.file.name.endswith(ending)), None
    )
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


def _build_flag_adder(
    run: Callable[[argparse.Namespace], int], *flags: Callable[[argparse.ArgumentParser], object]
) -> Callable[[argparse.ArgumentParser], None]:
    """Returns a function that adds flags to a command's parser and sets the function that runs the
    command.
    """

    def add_flags(parser: argparse.ArgumentParser) -> None:
        for add in flags:
            add(parser)
        parser.set_defaults(run=run)

    return add_flags


# of `add_argument`
def _flag(*names: str, **options: Any) -> Callable[[argparse.ArgumentParser], object]:
    return lambda parser: parser.add_argument(*names, **options)


def _add_grammar_flags(grammar: argparse.ArgumentParser) -> None:
    actions = grammar.add_subparsers(dest="action", required=True, metavar="ACTION")
    told = "report what is enforced and what is refused; exit status 1 if something is refused"
    _build_flag_adder(
        _run_grammar,
        _flag("file", type=Path, help=f"a file that ends in {', '.join(_KINDS)}"),
        _flag(
            "--match",
            metavar="TEXT",
            help="also report whether TEXT is allowed; exit status 1 if it is not",
        ),
        _flag("--model", help="compile for the tokens of this model (default: one token per byte)"),
        _flag(
            "--closed",
            action="store_true",
            help="objects have the members that the schema names, no others",
        ),
        _flag("--best-effort", action="store_true", help="check afterwards what can't be enforced"),
    )(actions.add_parser("check", help=told))


@dataclass(frozen=True, slots=True)
class _Command:
    """Command of `sglang-lite`: its name, what it does, an example, and the function that adds its
    flags.
    """

    name: str
    does: str
    example: str
    add_flags: Callable[[argparse.ArgumentParser], None]


_GROUPS = {
    "begin": (
        _Command(
            "init", "write a project: a program, its test, rows of data", "sglang-lite init extraction",
            _build_flag_adder(
                _run_init,
                _flag("folder", type=Path, metavar="DIR",
                    help="the folder to write; it is made if it is not there",
                ),
            ),
        ),
        _Command(
            "doctor", "tell what this machine can run, how fast, and what is missing", "sglang-lite doctor",
            _build_flag_adder(_run_doctor),
        ),
        _Command(
            "chat", "talk with a model", "sglang-lite chat --system 'Be brief.'",
            _build_flag_adder(
                _run_chat,
                _flag("--model", help="a model, as for Engine (default: the default model)"),
                _flag("--system", default="", metavar="TEXT", help="text of the system turn (default: none)"),
                _flag(
                    "--max-tokens", type=int, default=512, metavar="N",
                    help="largest number of tokens of an answer (default: 512)",
                ),
                _flag(
                    "--temperature", type=float, default=0.0, metavar="T",
                    help="0 for the likeliest tokens, 1 for draws (default: 0)",
                ),
            ),
        ),
        _Command(
            "completion", "print a script by which a shell completes commands and flags",
            "sglang-lite completion bash >> ~/.bashrc",
            _build_flag_adder(_run_completion, _flag("shell", choices=("bash", "zsh", "fish"), help="the shell")),
        ),
    ),
    "programs": (
        _Command(
            "run", "run a program of a file, on arguments or on rows of a file",
            "sglang-lite run prog.py --arg day=Monday",
            _build_flag_adder(
                _run_program, add_file_argument,
                _flag(
                    "--arg", action="append", default=[], metavar="NAME=VALUE",
                    help="an argument of the program, several times for several; JSON, or else text (default: none)",
                ),
                _flag(
                    "--rows", type=Path, metavar="ROWS.jsonl",
                    help="run once for each row, a JSON object of arguments per line",
                ),
                add_model_flag,
                _flag("--seed", type=int, help="seed of the draws (default: another one each time)"),
            ),
        ),
        _Command(
            "eval", "count how right a program is on labelled rows",
            "sglang-lite eval prog.py rows.jsonl --metric accuracy:kind", evaluate.add_flags,
        ),
        _Command(
            "mcp", "serve programs as tools of an MCP server, on standard input and output", "sglang-lite mcp prog.py",
            mcp_server.add_flags,
        ),
        _Command(
            "playground", "open a page that changes a program's prompts, schemas and answers, and runs it",
            "sglang-lite playground prog.py",
            _build_flag_adder(
                _run_playground, add_file_argument, add_model_flag,
                _flag("--port", type=int, default=0,
                    help="port of the page on this machine (default: a free one)",
                ),
            ),
        ),
        _Command(
            "lint", "find faults in programs without running them; count the tokens that runs share",
            "sglang-lite lint prog.py --data rows.jsonl",
            _build_flag_adder(
                _run_lint, add_file_argument,
                _flag(
                    "--data", type=Path, metavar="ROWS.jsonl",
                    help="arguments of the program: one JSON object per line",
                ),
                _flag(
                    "--model",
                    help="model that the programs are for, whose tokens are counted (default: the default model's are)",
                ),
                _flag(
                    "--context", type=int, metavar="TOKENS",
                    help="longest text that the model takes: loops that outgrow it are found (default: the model's)",
                ),
                _flag(
                    "--fail-under", type=float, metavar="PERCENT",
                    help="exit status 1 if the cache serves less than this share of the prompts (default: 0)",
                ),
                _flag(
                    "--price", type=float, help="price of a million prompt tokens (default: no costs are reported)"
                ),
                _flag(
                    "--cached-price", type=float, default=0.0,
                    help="price of a million cached prompt tokens (default: 0)",
                ),
                _flag(
                    "--format", choices=("text", "json"), default="text", help="form of the report (default: text)"
                ),
            ),
        ),
        _Command(
            "trace", "make an HTML page of a run's trace, as Trace.save writes it", "sglang-lite trace plan.jsonl",
            _build_flag_adder(
                _run_trace,
                _flag("file", type=Path, help="JSON lines that state.trace().save(…) has written"),
                _flag("beside", type=Path, nargs="?", metavar="OTHER", help="another run, shown beside it"),
                _flag("-o", "--output", type=Path,
                    help="the page to write (default: FILE with the ending .html)",
                ),
            ),
        ),
        _Command(
            "grammar", "check a schema, regex or grammar", "sglang-lite grammar check schema.json --match '{}'",
            _add_grammar_flags,
        ),
    ),
    "models": (
        _Command(
            "models", "show how a model would run, without loading it; list or fetch models with a short name",
            "sglang-lite models smollm2-135m", models.add_flags,
        ),
        _Command(
            "families", "list the model families; write a model's layers as pseudo-code",
            "sglang-lite families qwen3", families.add_flags,
        ),
        _Command(
            "verify", "compare a model as it runs here with transformers' code, and try what programs do",
            "sglang-lite verify smollm2-135m --report smollm2.json", verify.add_flags,
        ),
        _Command(
            "serve", "serve a model over HTTP: SGLang's, OpenAI's, Anthropic's and Ollama's protocols",
            "sglang-lite serve --model-path Qwen/Qwen3-0.6B --port 30000", _build_flag_adder(_run_serve),
        ),
        _Command(
            "warm", "load a model once, so that its GPU kernels are compiled and cached",
            "sglang-lite warm --model Qwen/Qwen3-0.6B", warm.add_flags,
        ),
        _Command(
            "quantize", "write a model with weights of 4 or 8 bits, for any engine",
            "sglang-lite quantize Qwen/Qwen3-0.6B --group 64", quantize.add_flags,
        ),
        _Command(
            "save", "write a model in files by rank, for any engine that reads sharded_state",
            "sglang-lite save Qwen/Qwen3-0.6B --sharded --out shards", save.add_flags,
        ),
        _Command(
            "replay", "compute an engine's steps again, and write what comes out of each layer",
            "sglang-lite replay dump/TP0_PP0_Rank0_pid123/steps --model Qwen/Qwen3-0.6B --out again", replay.add_flags,
        ),
        _Command(
            "bench", "measure a GPU, and vllm and sglang if installed, with random weights",
            "sglang-lite bench --workload w1",
            _build_flag_adder(
                _run_bench,
                _flag(
                    "--shape", default="llama-3.1-8b",
                    help="llama-3.1-8b (default), qwen3-0.6b, qwen3-14b, qwen3-30b-a3b, deepseek-v2-lite; small: on "
                    "CPUs, too",
                ),
                _flag(
                    "--workload", nargs="+", metavar="NAME", help="w1, decode1, fork64 … (default: all); or agents"
                ),
                _flag(
                    "--repeat", type=int, default=3, help="runs of each workload after the first one (default: 3)"
                ),
                _flag("--fp8", action="store_true",
                    help="weights, keys and values in 8 bits; latents stay in 16",
                ),
                _flag("--tp", type=int, default=1, metavar="N", help="GPUs that share each layer (default: 1)"),
                _flag(
                    "--ep", type=int, default=1, metavar="N",
                    help="groups of these GPUs that share out experts by number (default: 1)",
                ),
                _flag(
                    "--model-impl", choices=("native", "transformers"), default="native",
                    help="code that runs the model (default: native)",
                ),
                _flag("--json", type=Path, metavar="FILE", help="also write every run to FILE (default: none)"),
            ),
        ),
    ),
}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
