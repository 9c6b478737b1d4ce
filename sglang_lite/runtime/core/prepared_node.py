"""Program nodes with everything the engine prepares for them off the loop's thread."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from sglang_lite.program.nodes import (
    Fork,
    Gen,
    GrammarBegin,
    GrammarEnd,
    ImagePart,
    Join,
    Node,
    Pause,
    Rollback,
    Select,
    Text,
)
from sglang_lite.program.play.branch import NOTHING_EXPECTED, Ask, ProgramBranch, QueuedNode
from sglang_lite.protocol import (
    CapabilityError,
    ConstraintError,
    EngineClosedError,
    ParameterError,
    SglError,
    Span,
)
from sglang_lite.runtime.core.engine_context import EngineContext
from sglang_lite.runtime.core.token_text import PreparedImage, TokenText
from sglang_lite.runtime.requests.resolved_params import ResolvedParams
from sglang_lite.runtime.requests.scheduled_branch import estimate_node_tokens
from sglang_lite.runtime.structured_output.base import CompiledGrammar, Matcher
from sglang_lite.runtime.structured_output.shortest import fewest_tokens_above

if TYPE_CHECKING:
    from sglang_lite.runtime.core.generation_job import GenerationJob


@dataclass(eq=False, slots=True)
class PreparedNode(QueuedNode):
    """Queued node, with everything prepared to execute it.

    Attributes:
        grammar: compilation of its constraint, if any.
        params: resolved parameters of a generation or a selection, or the error of an invalid one.
        text: predicted text between the previous answer and a generation, or None if it can't be
            predicted.
        ids: tokenisation of `text`, if started.
        matcher: matcher of its grammar, created in advance for the next request of the branch.
        begun: job whose request has begun before the player asked for the node, or None.
    """

    grammar: Future[CompiledGrammar] | None = None
    params: ResolvedParams | ParameterError | None = None
    text: list[Span] | None = None
    ids: Future[array[int]] | None = None
    matcher: Future[Matcher] | None = None
    begun: GenerationJob | None = None


EngineBranch: TypeAlias = ProgramBranch[TokenText, PreparedNode]
EngineAsk: TypeAlias = Ask[TokenText, PreparedNode]


def prepare_node(node: Node, context: EngineContext) -> PreparedNode:
    """Prepares a node: starts compiling its grammar, and resolves its parameters or stores their
    error.
    """
    if isinstance(node, ImagePart):
        node = _prepare_image(node, context)
    entry = PreparedNode(node)
    if isinstance(node, Gen | GrammarBegin) and node.constraint is not None:
        entry.grammar = context.compiler.compile_in_background(node.constraint)
    if isinstance(node, Gen | Select):
        try:
            entry.params = context.builder.resolve_node_params(node)
        except ParameterError as error:  # raised when the node would run
            entry.params = error
        else:
            for stop in entry.params.stop:  # slow for a new byte: done here, off the loop's thread
                context.tokenizer.tokens_containing(stop.encode("utf-8", "surrogatepass")[-1])
    elif isinstance(node, Fork):
        entry.branches = [
            [prepare_node(each, context) for each in nodes] for nodes in node.branches
        ]
    branches = tuple(
        sum((each.expected for each in entries), NOTHING_EXPECTED) for entries in entry.branches
    )
    entry.expected = estimate_node_tokens(
        node, entry.params if isinstance(entry.params, ResolvedParams) else None, branches
    )
    return entry


def _prepare_image(node: ImagePart, context: EngineContext) -> PreparedImage:
    """Returns a medium with its placeholders, or with an error that is raised when the node runs."""
    spans: tuple[Span, ...] = ()
    error: SglError | None = None
    try:
        if context.builder.media is None:
            raise CapabilityError("the model takes no images.")
        spans = context.builder.media.medium_spans(node.image)
    except SglError as found:
        found.where = node.where
        error = found
    return PreparedImage(node.image, node.text, where=node.where, spans=spans, error=error)


def check_params(entries: Sequence[PreparedNode]) -> None:
    """Raises ParameterError if a generation has an invalid parameter, or a selection's adapter is
    missing.
    """
    for entry in entries:
        if isinstance(entry.params, ParameterError):
            raise entry.params
        for nodes in entry.branches:
            check_params(nodes)


def prepare_generation_after(ask: EngineAsk, context: EngineContext) -> PreparedNode | None:
    """Starts preparing the generation after a running node, so that it can continue in the node's
    slot immediately. Returns the generation. Returns None if no generation follows, or if a node
    between the two must be waited for.
    """
    found = _find_next_generation(ask)
    if found is None:
        return None
    entry, spans = found
    if spans:
        entry.text = spans
        entry.ids = context.constants.encode_constant(spans)
    in_grammar = ask.branch.text is None or ask.branch.text.grammar is not None
    # otherwise, the matcher would have to advance over text that is not known yet
    if entry.grammar is not None and not in_grammar:
        entry.matcher = _start_matcher(entry.grammar, entry.params, context)
    return entry


def _find_next_generation(ask: EngineAsk) -> tuple[PreparedNode, list[Span]] | None:
    """Returns the generation after a running node, and the text between the two. Returns None if no
    generation follows, or if a node between the two must be waited for. The text is empty if it
    can't be predicted.
    """
    asked = ask.node
    known = isinstance(asked, Gen) and not asked.judged
    spans = list[Span]()
    for _, entry in ask.branch.queue:
        node = entry.node
        if isinstance(node, Gen):
            return entry, spans if known else []
        if isinstance(node, Text) and node.ids is not None:
            spans.clear()
        elif isinstance(node, Text) and node.text:
            spans.append(Span(node.text, special=node.special))
        elif isinstance(
            node, ImagePart | Select | Pause | GrammarBegin | GrammarEnd | Rollback
        ) or (isinstance(node, Join) and node.mode == "concate_and_append"):
            return None
    return None


def _start_matcher(
    grammar: Future[CompiledGrammar],
    params: ResolvedParams | ParameterError | None,
    context: EngineContext,
) -> Future[Matcher]:
    """Creates a matcher of a grammar that may still be compiling. Runs on a tokenisation thread
    because it can be slow.
    """
    made: Future[Matcher] = Future()

    def make() -> None:
        try:
            if isinstance(params, ResolvedParams):
                fewest_tokens_above(grammar.result(), params.max_tokens)  # slow the first time
            made.set_result(grammar.result().matcher())
        except SglError as error:
            made.set_exception(error)
        except Exception as error:  # raised by a library; must not end the loop
            made.set_exception(ConstraintError(f"no mask can be made: {error!r}"))

    def submit_make(_: object) -> None:
        try:
            context.encoder.submit(make)
        except RuntimeError:
            made.set_exception(EngineClosedError("the engine is closed."))

    grammar.add_done_callback(submit_make)
    return made
