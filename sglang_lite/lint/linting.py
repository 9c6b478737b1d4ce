"""Lints a file. Traces and checks its programs, and counts the tokens of their prompts."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_lite.lang.backend.base import Backend
from sglang_lite.lang.backend.capabilities import MEDIA_NAMES
from sglang_lite.lang.backend.rendering import shows_tools
from sglang_lite.lang.backend.token_counts import count_text_tokens
from sglang_lite.lang.dropped_parts import find_unadded_expressions
from sglang_lite.lang.execution.control_text import collect_argument_control_tokens
from sglang_lite.lang.function import SglFunction
from sglang_lite.lang.symbolic.graph import Graph, with_text_changes
from sglang_lite.lang.symbolic.graph_checks import Finding
from sglang_lite.lang.symbolic.recorder import is_tracing_limit
from sglang_lite.lang.tracer import explore_ways
from sglang_lite.lint.files import (
    bind_rows,
    import_program_file,
    message_on_one_line,
    programs_in,
    read_json_lines,
)
from sglang_lite.lint.growth import find_outgrowing_loops
from sglang_lite.lint.report import LintReport, Prices
from sglang_lite.lint.second_trace import Template, trace_in_other_process, tracing_backend
from sglang_lite.lint.sharing import Sharing, measure_sharing
from sglang_lite.program.graph import Compact, Picture
from sglang_lite.program.nodes import Text
from sglang_lite.program.prefixes import TokenCounter
from sglang_lite.protocol import Location, MediaKind, ModelError, ParameterError, Span
from sglang_lite.text.chat_template import JinjaTemplate
from sglang_lite.text.tool_formats import detect_tool_family

if TYPE_CHECKING:
    from sglang_lite.runtime.loading.model_files import ModelFiles

MAX_WAYS = 64  # maximum number of paths to follow through a body


def lint(
    file: Path,
    function: str | None = None,
    data: Path | None = None,
    model: str | None = None,
    fail_under: float | None = None,
    prices: Prices | None = None,
    context: int | None = None,
) -> list[LintReport]:
    """Checks the programs of a file and returns a report on each. Like `import`, executes the code
    of the file.

    Args:
        file: Python file with the programs.
        function: name of the only program to check, or None for all.
        data: JSON Lines file with arguments, one object per line; requires a single program. None
            for no rows.
        model: name or path of the model that the programs are for. If None, the default model is
            used to count tokens, provided it has been fetched.
        fail_under: minimum percentage of prompt tokens, over the rows, that the cache must serve;
            None for no minimum.
        prices: prices of prompt tokens, for costs in the report.
        context: tokens of the longest text that the model takes; None for the limit of `model`.
            Without both, growing loops are not checked.

    Raises:
        ParameterError: the file, the program or a row is invalid.
        ModelError: the model does not exist.
        BackendError: packages that models need are not installed.
    """
    programs = programs_in(import_program_file(file), function)
    if data is not None and len(programs) > 1:
        hint = f"Name one: {file}:{next(iter(programs))}."
        raise ParameterError("--data", f"{file} has {len(programs)} programs.", hint=hint)
    if fail_under is not None and not 0 <= fail_under <= 100:
        raise ParameterError("--fail-under", f"{fail_under:g} is not between 0 and 100.")
    if context is not None and context < 1:
        raise ParameterError("--context", f"{context} is not a whole number of at least 1.")
    if data is None:
        for name, given in (("--fail-under", fail_under), ("--price", prices and prices.computed)):
            if given is not None:
                raise ParameterError(name, "needs rows to measure.", hint="Give --data rows.jsonl.")
    rows = [] if data is None else read_json_lines(data)
    files, missing = _model_files(model)
    counter = None if files is None else files.tokenizer
    kinds = (
        None
        if files is None or model is None
        else frozenset(files.media.kinds if files.media else ())
    )
    if counter is None and fail_under is not None:
        raise ModelError(missing)
    if context is None and files is not None and model is not None:
        context = files.spec.max_positions
    template = _chat_template_of(counter)
    later = trace_in_other_process(
        file, {name: rows[0] if rows else {} for name in programs}, template
    )
    reports = []
    for name, program in programs.items():
        arguments = bind_rows(program, rows, data) if data is not None else []
        report = _lint_program(
            name,
            program,
            arguments,
            later.get(name),
            counter,
            tracing_backend(template),
            kinds,
            context,
        )
        notes = (*report.notes, *([missing] if missing else []))
        found = tuple(
            sorted(
                (*report.findings, *_low_sharing_findings(report.sharing, fail_under)),
                key=_line_of_finding,
            )
        )
        report = LintReport(
            report.program, report.rows, found, notes, report.sharing, prices or Prices()
        )
        reports.append(report)
    return reports


def _hidden_tool_findings(graph: Graph, backend: Backend) -> Iterator[Finding]:
    """Yields findings for generations with tools if the model's chat template can't show tools. The
    first message then has to describe them.
    """
    template = backend.get_chat_template()
    if not isinstance(template, JinjaTemplate) or shows_tools(
        template, detect_tool_family(template.source)
    ):
        return
    compactions = {node.where for node in graph.nodes if isinstance(node.node, Compact)}
    for node in graph.nodes:
        if node.tools and node.role == "assistant" and node.where not in compactions:
            yield Finding(
                "hidden-tools",
                f"{node.name or 'gen'!r}: the model's chat template has no place for tools, or its format of calls is "
                "not known, so the first message describes them.",
                node.where,
                "A model that was trained with tools calls them more reliably.",
            )


def _growth_findings(
    program: SglFunction,
    graph: Graph,
    context: int | None,
    counter: TokenCounter | None,
    backend: Backend,
) -> list[Finding]:
    """Returns findings for loops that outgrow the context, or none if its size is unknown."""
    if context is None:
        return []
    count = partial(count_text_tokens, tokenizer=None)
    if counter is not None:
        count = partial(_count_tokens, counter)
    unset = backend.unset_max_tokens or 0
    return find_outgrowing_loops(program.func, graph, context, lru_cache(count), unset)


def _count_tokens(counter: TokenCounter, text: str) -> int:
    return len(counter.encode_spans((Span(text),), first=False))


def _control_token_findings(
    program: SglFunction, graph: Graph, row: dict[str, Any], counter: TokenCounter | None
) -> Iterator[Finding]:
    """Yields findings for arguments of a row that contain the text of a control token, such as
    `<|im_start|>`. Reports only arguments inserted outside turns, where the text acts as that
    token.
    """
    known = getattr(counter, "control_texts", None)
    spelled = (
        None
        if program.untrusted_arguments
        else collect_argument_control_tokens(None, known, program, (), row)
    )
    for node in graph.nodes if spelled is not None else ():
        text = node.node
        if spelled is not None and isinstance(text, Text) and text.special and node.role is None:
            for token, name in spelled.find_tokens_from_arguments(text.text):
                problem = f"the argument {name!r} spells {token}, and outside turns this is a control token."
                yield Finding(
                    "control-token",
                    problem,
                    node.where,
                    "Write sgl.plain(…), or put it into a turn.",
                )


def _media_findings(graph: Graph, kinds: Container[MediaKind] | None) -> Iterator[Finding]:
    """Yields findings for images, videos and sounds that the model does not accept. `kinds`
    contains what it accepts; None stands for everything.
    """
    for node in graph.nodes:
        if kinds is None or not isinstance(node.node, Picture) or node.node.medium in kinds:
            continue
        if node.node.medium == "video" and "image" in kinds:  # the model sees its frames
            continue
        yield Finding(
            "refused",
            f"the model of --model takes no {MEDIA_NAMES[node.node.medium]}.",
            node.where,
            "Use one that does (docs/images.md), or put into words what it is to know of them.",
        )


def _line_of_finding(finding: Finding) -> int:
    return finding.where.line if finding.where is not None else 0


def _model_files(model: str | None) -> tuple[ModelFiles | None, str]:
    """Returns the files of a model and "". If tokens can't be counted, returns None and the reason.
    If `model` is None, uses the default model, but only if it has been fetched.
    """
    from sglang_lite.runtime.config import EngineConfig
    from sglang_lite.runtime.host.installed import check_engine_packages
    from sglang_lite.runtime.models.aliases import ALIASES
    from sglang_lite.runtime.models.resolve import has_local_copy, resolve

    if model is None:
        model = EngineConfig().model
        if model in ALIASES and not has_local_copy(model):
            cure = f"Give --model, or run `sglang-lite models pull {model}`."
            return None, f"tokens are not counted: {model} has not been fetched. {cure}"
    check_engine_packages("a model's tokenizer")
    return _cached_model_files(resolve(model)), ""


@lru_cache(maxsize=1)
def _cached_model_files(path: Path) -> ModelFiles:
    from sglang_lite.runtime.loading.model_files import open_model_files

    return open_model_files(path)


def _chat_template_of(counter: TokenCounter | None) -> Template | None:
    """Returns the chat template of the tokenizer's model, or None if it has none."""
    source = getattr(counter, "chat_template", None)
    return None if source is None else (source, dict(getattr(counter, "special_tokens", {})))


def _lint_program(
    name: str,
    program: SglFunction,
    arguments: Sequence[dict[str, Any]],
    later: Graph | None,
    counter: TokenCounter | None,
    backend: Backend,
    kinds: Container[MediaKind] | None,
    context: int | None,
) -> LintReport:
    first_row = arguments[0] if arguments else dict(program.bind_arguments)
    graph, notes = _trace_graph(program, first_row, backend, MAX_WAYS)
    if later is None:
        notes.append(
            "it could not be traced in another process, so texts that change from day to day are not seen."
        )
    else:
        graph = with_text_changes(graph, later)
    others = [_trace_graph(program, row, backend, 1)[0] for row in arguments[1:]]
    findings = dict.fromkeys(
        (
            *graph.check(),
            *_hidden_tool_findings(graph, backend),
            *_media_findings(graph, kinds),
            *unadded_expression_findings(program),
            *_growth_findings(program, graph, context, counter, backend),
            *_control_token_findings(program, graph, first_row, counter),
        )
    )
    for number, (row, other) in enumerate(zip(arguments[1:], others), 2):
        of_row = msgspec.structs.replace(other, changes=()).check()
        for finding in (*of_row, *_control_token_findings(program, other, row, counter)):
            if not any(
                (finding.code, finding.where) == (each.code, each.where) for each in findings
            ):
                findings[
                    msgspec.structs.replace(finding, message=f"{finding.message} (row {number})")
                ] = None
    shared = None
    if counter is not None:
        graphs = [graph, *others] if arguments else [graph, _graph_of_second_run(graph)]
        shared = measure_sharing(graphs, counter, has_rows=bool(arguments))
        for move in shared.moves:
            findings[
                Finding("move-up", f"{move}.", move.where, "All rows have the same text there.")
            ] = None
    return LintReport(name, len(arguments), tuple(findings), tuple(notes), shared)


def _graph_of_second_run(graph: Graph) -> Graph:
    """Returns the graph as it would be in a second run. Texts that change from run to run have
    their second value.
    """
    nodes = list(graph.nodes)
    for change in graph.changes:
        text = msgspec.structs.replace(nodes[change.node].node, text=change.second)
        nodes[change.node] = msgspec.structs.replace(nodes[change.node], node=text)
    return msgspec.structs.replace(graph, nodes=tuple(nodes))


def _trace_graph(
    program: SglFunction, arguments: dict[str, Any], backend: Backend, max_ways: int
) -> tuple[Graph, list[str]]:
    """Traces a program as far as possible. Returns its graph, and notes about paths that were not
    followed.
    """
    state = explore_ways(program, arguments, backend, max_ways)
    errors = [path.error for path in state.paths if path.error is not None]
    limits = dict.fromkeys(
        message_on_one_line(error) for error in errors if is_tracing_limit(error)
    )
    notes = [f"not followed further: {limit}" for limit in limits]
    if len(state.paths) == max_ways > 1 and not state.complete:
        notes.append(f"{max_ways} ways through the body were followed, and there are more.")
    return state.graph(), notes


def _low_sharing_findings(shared: Sharing | None, fail_under: float | None) -> list[Finding]:
    if shared is None or fail_under is None or shared.tree.shared * 100 >= fail_under:
        return []
    node = shared.divergence.node if shared.divergence is not None else None
    where: Location | None = node.where if node is not None else None
    message = f"{shared.tree.shared:.1%} of the prompt tokens come from the cache; {fail_under:g} % are wanted."
    return [
        Finding("low-sharing", message, where, "Move what all rows share before what they don't.")
    ]


def unadded_expression_findings(program: SglFunction) -> Iterator[Finding]:
    """Yields a finding for each statement of the body that creates an expression without adding it."""
    for part in find_unadded_expressions(program.func):
        yield Finding("not-added", part.problem, part.where, part.cure)
