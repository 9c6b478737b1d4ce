"""Explains how a remote backend would serve a program, before any call is made: strategies, calls,
tokens, prices and refusals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec

from sglang_lite.errors import Location
from sglang_lite.lang.backend.base import ALL_CONSTRAINTS, Backend, name_with_model
from sglang_lite.lang.backend.capabilities import MEDIA_NAMES, Capabilities, Demands
from sglang_lite.lang.backend.ladder.strategy import Refusal, Strategy
from sglang_lite.lang.backend.planning import RunFacts
from sglang_lite.lang.backend.remote.planner import SharedCall
from sglang_lite.lang.backend.remote.turn import TurnSource
from sglang_lite.lang.backend.remote.turn_plan import TurnPlan, turn_text_constraint
from sglang_lite.lang.backend.rendering import without_partial_turn
from sglang_lite.lang.expressions import (
    NUMBER_STOPS,
    SglGen,
    SglSelect,
    example_choices,
    number_as_regex,
)
from sglang_lite.program.graph import GraphNode, GraphRecord, Picture
from sglang_lite.program.nodes import Gen, GrammarBegin, Select
from sglang_lite.protocol import (
    CapabilityError,
    Continuation,
    Number,
    Prompt,
    SamplingParams,
    Unset,
    Usage,
)
from sglang_lite.protocol.anything import Json
from sglang_lite.protocol.sampling import adapter_of, given_values

if TYPE_CHECKING:
    from sglang_lite.lang.backend.remote.backend import RemoteBackend


# dollars for a call's usage on a model; None if unknown
Price: TypeAlias = Callable[[Usage, str], float | None]
CHARACTERS_A_TOKEN = 4  # estimate for English text, used if no counter is given


@dataclass(frozen=True, slots=True)
class ExplainedNode:
    """How a generation or selection would be served, or why it is refused.

    Attributes:
        kind, name, where: kind of the node, name of its variable, and its place in the source.
        mode: "native", "emulated" or "refused".
        strategy: name of the strategy that serves the node; "turn" if the node shares a call with
            others of its turn or continues a turn that has begun, "another backend" if it has its
            own backend; empty if refused.
        calls: number of calls at best and at worst, with all attempts that `retries` allow.
        prompt_tokens: approximate prompt tokens of one call: one per four characters, or as counted
            by `count`.
        completion_tokens: maximum number of tokens that one call may generate, or None if no limit
            is set.
        price: dollars at best and at worst, or None if unknown.
        refusal: feature that can't be honoured, and what to do instead.
        warnings: differences from the request.
        otherwise: strategy that serves the node if the first one's answer is useless; empty if the
            node has none.
    """

    kind: Literal["gen", "select", "grammar", "image"]
    name: str | None
    where: Location | None
    mode: Literal["native", "emulated", "refused"]
    strategy: str = ""
    calls: tuple[int, int] = (0, 0)
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    price: tuple[float, float] | None = None
    refusal: str = ""
    warnings: tuple[str, ...] = ()
    otherwise: str = ""


@dataclass(frozen=True, slots=True)
class Explanation:
    """How a program would be served. `str` shows it as a table.

    Attributes:
        backend: name and model of the backend.
        nodes: nodes of all paths through the body that were followed, in the order of the body.
        complete: True if the body has no other paths.
    """

    backend: str
    nodes: tuple[ExplainedNode, ...]
    complete: bool

    @property
    def calls(self) -> tuple[int, int]:
        """Number of calls at best and at worst, if every node is reached once."""
        return sum(node.calls[0] for node in self.nodes), sum(node.calls[1] for node in self.nodes)

    @property
    def price(self) -> tuple[float, float] | None:
        """Dollars at best and at worst if every node is reached once, or None if a node's price is
        unknown.
        """
        prices = [node.price for node in self.nodes if node.mode != "refused"]
        numbers = [each for each in prices if each is not None]
        return (
            None
            if len(numbers) < len(prices)
            else (sum(p[0] for p in numbers), sum(p[1] for p in numbers))
        )

    @property
    def refused(self) -> tuple[ExplainedNode, ...]:
        """Nodes that the backend refuses."""
        return tuple(node for node in self.nodes if node.mode == "refused")

    def to_dict(self) -> dict[str, Json]:
        """Returns the explanation as plain data."""
        nodes = [
            {**asdict(node), "where": None if node.where is None else list(node.where)}
            for node in self.nodes
        ]
        return {"backend": self.backend, "complete": self.complete, "nodes": nodes}

    def __str__(self) -> str:
        head = ("line", "node", "served", "calls", "prompt tokens", "at most", "price")
        rows = [head, *map(_table_row, self.nodes)]
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = [
            "  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip()
            for row in rows
        ]
        notes = [
            f"{_source_line(node)}: {text}"
            for node in self.nodes
            for text in (node.refusal, *node.warnings)
            if text
        ]
        more = [] if self.complete else ["The body has other ways, which are not listed."]
        return "\n".join([self.backend, *lines, *dict.fromkeys(notes), *more])


class Explainer:
    """Explains how a backend would serve the nodes of a program.

    Args:
        params: sampling parameters of the run, for nodes that don't set them.
        retries: number of retries of the run, for nodes that don't set it.
        count: function that counts the tokens of a text, or None for a quarter of its characters.
        price: function that returns the dollars for a call's usage, or None for no prices.
    """

    def __init__(
        self,
        backend: RemoteBackend,
        params: SamplingParams,
        retries: int,
        count: Callable[[str], int] | None,
        price: Price | None,
    ) -> None:
        self._backend = backend
        self._params = params
        self._retries = retries
        self._price = price
        self._count = count or (lambda text: math.ceil(len(text) / CHARACTERS_A_TOKEN))
        self._shared: set[SharedCall] = set()  # shared calls that were counted

    def explain(self, graph: GraphRecord, answers: Mapping[int, TracedAnswer]) -> Explanation:
        """Explains a program's graph.

        Args:
            answers: generations and selections of the trace, by the nodes' ids.
        """
        nodes = [self._explain_node(node, answers.get(i)) for i, node in enumerate(graph.nodes)]
        priced = (
            replace(node, price=self._price_range(node)) for node in nodes if node is not None
        )
        return Explanation(name_with_model(self._backend), tuple(priced), graph.complete)

    def _price_range(self, node: ExplainedNode) -> tuple[float, float] | None:
        """Returns the lowest and the highest price of a node. The lowest is for the fewest calls,
        none of which generates anything. The highest is for the most calls, each of which generates
        the maximum.
        """
        if self._price is None or node.completion_tokens is None:
            return None
        model = self._backend.model_name
        longest = Usage(node.prompt_tokens, 0, node.completion_tokens)
        lowest = self._price(Usage(node.prompt_tokens), model)
        highest = self._price(longest, model)
        return (
            None
            if lowest is None or highest is None
            else (lowest * node.calls[0], highest * node.calls[1])
        )

    def _explain_node(self, node: GraphNode, answer: TracedAnswer | None) -> ExplainedNode | None:
        """Explains a node. Returns None for nodes that need nothing from the backend."""
        match node.node:
            case GrammarBegin() if Continuation not in self._backend.capabilities.constraints:
                return ExplainedNode(
                    "grammar", None, node.where, "refused", refusal="a grammar over several nodes"
                )
            case Picture(medium=kind) if not self._backend.capabilities.takes(kind):
                return ExplainedNode(
                    "image", None, node.where, "refused", refusal=MEDIA_NAMES[kind]
                )
            case Picture():
                return ExplainedNode(
                    "image", None, node.where, "native", "shown to the model", completion_tokens=0
                )
            case Gen() | Select() as request:
                assert answer is not None
                return self._explain_answer(request, node, answer.prompt, answer.expression)
        return None

    def _explain_answer(
        self, request: Gen | Select, node: GraphNode, prompt: Prompt, own: SglGen | SglSelect
    ) -> ExplainedNode:
        kind: Literal["gen", "select"] = "gen" if isinstance(request, Gen) else "select"
        plain = ExplainedNode(
            kind, node.name, node.where, "refused", prompt_tokens=self._count(prompt.text)
        )
        if isinstance(own, SglGen) and own.options.backend is not None:
            warning = "another backend answers this node: explain the program with that one"
            return replace(plain, mode="native", strategy="another backend", warnings=(warning,))
        if any(use.into == "constraint" for use in node.uses):
            return replace(
                plain,
                refusal="its constraint is only known when the program runs: give the argument",
            )
        turn, index = (
            (own.source.turn.plan, own.source.index)
            if isinstance(own.source, TurnSource)
            else (None, 0)
        )
        refusal = self._refusal_reason(prompt, turn)
        demands = self._node_demands(request, own)
        found = self._backend.strategy(demands)
        if isinstance(request, Select) and request.method == "unconditional_likelihood_normalized":
            found = Refusal(
                "scores without the prompt", "Use another choices_method, or a local engine."
            )
        if isinstance(request, Select) and adapter_of(
            self._params.lora_path if isinstance(request.lora_path, Unset) else request.lora_path
        ):
            found = Refusal("lora_path", "Leave it out, or use a local engine or its server.")
        if refusal is None and isinstance(found, Refusal):
            refusal = f"{found.feature}. {found.instead}"
        if refusal is not None:
            return replace(plain, refusal=refusal)
        assert isinstance(found, Strategy)
        max_tokens = demands.params.max_tokens
        explained = replace(
            plain,
            mode=found.mode,
            strategy=found.name,
            calls=found.calls,
            warnings=found.warnings,
            otherwise="" if found.fallback is None else found.fallback.name,
            completion_tokens=None if isinstance(max_tokens, Unset) else max_tokens,
        )
        # Method None: several choices, made one after the other, or the user's own method.
        if isinstance(request, Select) and request.method is None:
            explained = replace(
                explained, calls=(found.calls[0], found.calls[1] * len(request.choices))
            )
        if turn is not None:
            explained = self._explain_in_turn(explained, turn, index, prompt)
        best, worst = explained.calls
        if isinstance(own.source, SharedCall):
            best = 0 if own.source in self._shared else best
            self._shared.add(own.source)
        tries = self._retry_count(own)
        if turn is not None and turn.as_text and index:
            # its first answer comes with the turn's first node
            return replace(explained, calls=(0, worst * tries))
        return replace(explained, calls=(best, worst * (1 + tries)))

    def _refusal_reason(self, prompt: Prompt, turn: TurnPlan | None) -> str | None:
        """Returns the reason why a node's prompt or turn is refused. Returns None if both are
        accepted.
        """
        if turn is not None and turn.refusal is not None:
            _, feature, instead = turn.refusal
            return f"{feature}. {instead}"
        shown_whole = turn is None or (turn.ahead and not turn.asks_to_continue)
        try:
            self._backend.check_prompt(prompt if shown_whole else without_partial_turn(prompt))
        except CapabilityError as error:
            return f"{error.message} {error.hint}"
        return None

    def _retry_count(self, own: SglGen | SglSelect) -> int:
        """Returns the number of retries of a node."""
        retries = own.options.retries if isinstance(own, SglGen) else None
        return self._retries if retries is None else retries

    def _explain_in_turn(
        self, node: ExplainedNode, turn: TurnPlan, index: int, prompt: Prompt
    ) -> ExplainedNode:
        """Explains a node that shares its turn with other generations or with text before it
        (docs/backends.md, "Several generations in a turn").
        """
        own = node.calls[1]
        if turn.as_text:
            whole = turn_text_constraint((prompt.partial, *turn.span.fields))
            strategy = self._backend.strategy(
                Demands("gen", turn.common_params or SamplingParams(), whole)
            )
            worst = strategy.calls[1] if isinstance(strategy, Strategy) else own
            return replace(node, strategy="turn", calls=(int(not index), worst))
        if not index and not turn.ahead and not prompt.partial.strip():
            return node  # the first node of the turn; its call brings no other answers
        more = (turn.asks_to_continue + turn.ahead + (not index)) if turn.ahead else 1
        mode = "emulated" if turn.asks_to_continue else node.mode
        return replace(
            node,
            strategy="turn",
            mode=mode,
            otherwise=node.strategy,
            calls=(int(not index), own + more),
        )

    def _node_demands(self, request: Gen | Select, own: SglGen | SglSelect) -> Demands:
        """Returns what a node would demand of the backend in a run."""
        if isinstance(request, Select):
            multi = isinstance(own, SglSelect) and own.multi
            scores = (
                bool(request.temperature) or request.method != "token_length_normalized" or multi
            )
            return self._backend.selection(
                example_choices(request.choices or ("a", "b"), multi=multi), scores=scores
            )
        params = msgspec.structs.replace(self._params, **given_values(request.params))
        constraint = request.constraint
        if isinstance(constraint, Number) and Number not in self._backend.capabilities.constraints:
            stops = () if isinstance(params.stop, Unset) else params.stop
            params = msgspec.structs.replace(params, stop=(*stops, *NUMBER_STOPS))
            constraint = number_as_regex(constraint)
        return Demands("gen", params, constraint)


# --------------------------------------------------------------------------------------- as a table


def _table_row(node: ExplainedNode) -> tuple[str, ...]:
    best, worst = node.calls
    calls = "" if node.mode == "refused" else f"{best}" if best == worst else f"{best} to {worst}"
    limit = "" if node.completion_tokens is None else str(node.completion_tokens)
    price = "" if node.price is None else f"${node.price[0]:.6f} to ${node.price[1]:.6f}"
    strategies = f"{node.strategy} or {node.otherwise}" if node.otherwise else node.strategy
    served = "refused" if node.mode == "refused" else f"{strategies} ({node.mode})"
    named = f"{node.kind}({node.name!r})" if node.name is not None else node.kind
    return _source_line(node), named, served, calls, str(node.prompt_tokens), limit, price


def _source_line(node: ExplainedNode) -> str:
    return "?" if node.where is None else f"{PurePath(node.where.file).name}:{node.where.line}"


@dataclass(frozen=True, slots=True)
class TracedAnswer:
    """Generation or selection of a trace.

    Attributes:
        expression: the user's expression.
        prompt: prompt before it, with "…" for text that is only known in a run.
    """

    expression: SglGen | SglSelect
    prompt: Prompt


class TracedBackend(Backend):
    """Backend that takes the place of the real one while a program is traced. It generates nothing.
    It renders roles with the template of the backend that is being explained.

    Args:
        about: backend to explain. The trace plans calls like a run on this backend.
        facts: facts of the run.
    """

    capabilities = Capabilities(ALL_CONSTRAINTS, images=True, sounds=True, adapters=True)

    def __init__(self, about: RemoteBackend, facts: RunFacts) -> None:
        super().__init__()
        self.chat_template = about.get_chat_template()
        self.about = about
        self.facts = facts
