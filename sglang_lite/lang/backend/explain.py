"""What a program would ask of a remote backend, before it asks anything: rungs, calls, tokens, prices, refusals."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import PurePath
from typing import Any, Literal, Protocol, TypeAlias

import msgspec

from sglang_lite.errors import Location
from sglang_lite.lang.backend.base_backend import ALL_CONSTRAINTS, BaseBackend
from sglang_lite.lang.backend.capabilities import Capabilities
from sglang_lite.lang.backend.rung import Asked, Refusal, Rung
from sglang_lite.lang.backend.turns import TurnRules, from_start
from sglang_lite.lang.expressions import NUMBER_STOPS, number_as_regex
from sglang_lite.program.graph import Call, GraphNode, GraphRecord, Picture, Value, Way
from sglang_lite.program.nodes import (
    Fork,
    Gen,
    GrammarBegin,
    Join,
    Mark,
    Path,
    Rollback,
    Select,
    Text,
    TurnBegin,
    TurnEnd,
)
from sglang_lite.protocol import (
    CapabilityError,
    Continuation,
    Message,
    Number,
    Prompt,
    SamplingParams,
    Span,
    Unset,
    Usage,
)  # fmt: skip
from sglang_lite.protocol.sampling import given
from sglang_lite.text.chat_template import ChatTemplate

Price: TypeAlias = Callable[[Usage, str], float | None]  # dollars for the tokens of a call of a model; None: not known
CHARACTERS_A_TOKEN = 4  # of English, about: where nobody counts


class Paper(BaseBackend):
    """Backend that a program is traced on: it honours everything, and renders roles as the one that is asked about."""

    capabilities = Capabilities(ALL_CONSTRAINTS, images=True)

    def __init__(self, template: ChatTemplate | None) -> None:
        super().__init__()
        self.chat_template = template


class Explainer(Protocol):
    """A backend, as far as it is needed here."""

    @property
    def capabilities(self) -> Capabilities:
        """What it can honour."""

    @property
    def turn_rules(self) -> TurnRules:
        """Rules for several generations in one turn."""

    def rung(self, asked: Asked) -> Rung | Refusal:
        """The rung on which a node is served, or why it is not."""

    def selection(self, choices: Sequence[str], *, scores: bool = False) -> Asked:
        """What a selection asks for."""

    def check_prompt(self, prompt: Prompt) -> None:
        """Refuses a prompt that it would be shown only in part.

        Raises:
            CapabilityError: the model can't continue this text.
        """


@dataclass(frozen=True, slots=True)
class ExplainedNode:
    """A generation or a selection, and how it would be served; or what else is refused.

    Attributes:
        kind, name, where: of the node.
        mode: "native", "emulated" or "refused".
        rung: by which it is served; "turn" if together with others of its turn; empty if it is refused.
        calls: at best, and at worst.
        prompt_tokens: of one call, about: a token for each four characters, or as `count` says.
        completion_tokens: the most that may be generated in one call; None: no limit is set.
        price: dollars at best and at worst; None: not known.
        refusal: what can't be honoured, and what to do instead.
        warnings: what is not as it was asked for.
    """

    kind: Literal["gen", "select", "grammar", "image"]
    name: str | None
    where: Location | None
    mode: Literal["native", "emulated", "refused"]
    rung: str = ""
    calls: tuple[int, int] = (0, 0)
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    price: tuple[float, float] | None = None
    refusal: str = ""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Explanation:
    """How a program would be served. `str` shows it as a table.

    Attributes:
        backend: its name and model.
        nodes: in the order of the body; of several ways through it all of them.
        complete: there are no other ways.
    """

    backend: str
    nodes: tuple[ExplainedNode, ...]
    complete: bool

    @property
    def calls(self) -> tuple[int, int]:
        """Calls if every node is reached once: at best, and at worst."""
        return sum(node.calls[0] for node in self.nodes), sum(node.calls[1] for node in self.nodes)

    @property
    def price(self) -> tuple[float, float] | None:
        """Dollars if every node is reached once; None: those of a node are not known."""
        prices = [node.price for node in self.nodes if node.mode != "refused"]
        known = [each for each in prices if each is not None]
        return None if len(known) < len(prices) else (sum(p[0] for p in known), sum(p[1] for p in known))

    @property
    def refused(self) -> tuple[ExplainedNode, ...]:
        """The nodes that the backend refuses."""
        return tuple(node for node in self.nodes if node.mode == "refused")

    def to_dict(self) -> dict[str, Any]:
        """The explanation as plain data."""
        nodes = [
            {**asdict(node), "where": None if node.where is None else list(node.where.names)} for node in self.nodes
        ]
        return {"backend": self.backend, "complete": self.complete, "nodes": nodes}

    def __str__(self) -> str:
        head = ("line", "node", "served", "calls", "prompt tokens", "at most", "price")
        rows = [head, *map(_row, self.nodes)]
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in rows]
        notes = [f"{_line(node)}: {text}" for node in self.nodes for text in (node.refusal, *node.warnings) if text]
        more = [] if self.complete else ["There are other ways through the body."]
        return "\n".join([self.backend, *lines, *dict.fromkeys(notes), *more])


def explain(
    backend: Explainer,
    name: str,
    model: str,
    graph: GraphRecord,
    *,
    params: SamplingParams,
    count: Callable[[str], int] | None,
    price: Price | None,
    speculates: bool,
) -> Explanation:
    """Explains a program's graph.

    Args:
        name: of the backend.
        params: of the run: what its nodes don't set.
        count: tokens of a text; None: about a quarter of its characters.
        price: of the tokens of a call; None: not known.
        speculates: the program has `num_api_spec_tokens`.
    """
    count = count or (lambda text: math.ceil(len(text) / CHARACTERS_A_TOKEN))
    nodes: dict[int, ExplainedNode] = {}  # those that several ways share are the same on all
    for way in graph.ways:
        reader = _Reader(backend, params, count, _shared_turns(graph, way), speculates=speculates)
        for i in way.nodes:
            found = reader.read(i, graph.nodes[i])
            if found is not None and i not in nodes:
                nodes[i] = replace(found, price=_priced(found, model, price))
    return Explanation(name, tuple(nodes[i] for i in sorted(nodes)), graph.complete)


def _priced(node: ExplainedNode, model: str, price: Price | None) -> tuple[float, float] | None:
    """From one call that generates nothing to the most calls that generate all they may."""
    if price is None or node.completion_tokens is None:
        return None
    least = price(Usage(node.prompt_tokens), model)
    most = price(Usage(node.prompt_tokens, completion_tokens=node.completion_tokens), model)
    return None if least is None or most is None else (least * node.calls[0], most * node.calls[1])


# ------------------------------------------------------------------------------------------------ where nodes stand


_MORE_CALLS = 2  # than a call a generation, in a turn that several share
_ANSWER = "…"  # stands for text that only a run knows


@dataclass(slots=True)
class _Place:
    """A branch, up to a node: what a prompt there has.

    Attributes:
        text: rendered.
        messages: the finished turns.
        role: of the turn that is open.
        partial: its text.
    """

    text: str = ""
    messages: tuple[Message, ...] = ()
    role: str | None = None
    partial: str = ""

    def add(self, text: str) -> None:
        self.text += text
        if self.role is not None:
            self.partial += text

    @property
    def prompt(self) -> Prompt:
        return Prompt((Span(self.text),), self.messages, self.role, self.partial)


def _shared_turns(graph: GraphRecord, way: Way) -> dict[int, bool]:
    """Generations and selections of turns that have several, or text before one; with whether all have constraints."""
    turns: dict[Path, list[int]] = {}  # those of the open turn, by its branch
    begun: dict[Path, bool] = {}
    shared: dict[int, bool] = {}

    def end(path: Path) -> None:
        found = turns.pop(path, [])
        if len(found) > 1 or (found and begun.get(path)):
            values = [graph.nodes[i].node for i in found]
            constrained = all(isinstance(each, Select) or getattr(each, "constraint", None) for each in values)
            shared.update(dict.fromkeys(found, bool(constrained)))

    for i in way.nodes:
        node = graph.nodes[i]
        match node.node:
            case TurnBegin() | TurnEnd():
                end(node.path)
                begun[node.path] = False
            case Text(text) if node.role is not None and text.strip() and not turns.get(node.path):
                begun[node.path] = True
            case Value() if node.role is not None and not turns.get(node.path):
                begun[node.path] = True
            case Gen() | Select():
                turns.setdefault(node.path, []).append(i)
    for path in list(turns):
        end(path)
    return shared


class _Reader:
    def __init__(
        self,
        backend: Explainer,
        params: SamplingParams,
        count: Callable[[str], int],
        shared: Mapping[int, bool],
        *,
        speculates: bool,
    ) -> None:
        self._backend, self._params, self._count = backend, params, count
        self._shared, self._speculates = shared, speculates
        self._places: dict[Path, _Place] = {(): _Place()}
        self._forks: dict[int, _Place] = {}
        self._marks: dict[Path, list[_Place]] = {}

    def read(self, i: int, node: GraphNode) -> ExplainedNode | None:
        """Takes note of the next node, and explains it if a backend has a say in it."""
        here = self._place(node.path)
        match node.node:
            case TurnBegin(role):
                here.role, here.partial = role, ""
            case TurnEnd(role):
                here.messages += (Message(role, (here.partial,)),)
                here.role = None
            case Text(text):
                here.add(text)
            case Value() | Call():
                here.add(_ANSWER)
            case Fork():
                self._forks[i] = replace(here)
            case GrammarBegin() if Continuation not in self._backend.capabilities.constraints:
                return ExplainedNode("grammar", None, node.where, "refused", refusal="a grammar over several nodes")
            case Picture() if not self._backend.capabilities.images:
                return ExplainedNode("image", None, node.where, "refused", refusal="images")
            case Gen() | Select() as said:
                found = self._explained(said, node, here, self._together(i))
                here.add(_ANSWER)
                return found
            case Mark():
                self._marks.setdefault(node.path, []).append(replace(here))
            case Rollback(mark=mark):
                self._places[node.path] = replace(self._marks[node.path][mark])
            case Join(mode=mode) if mode != "gather_variable":
                here.add(_ANSWER)
        return None

    def _place(self, path: Path) -> _Place:
        if path not in self._places:
            self._places[path] = replace(self._forks.get(path[-2], _Place()))  # a program that is called begins anew
        return self._places[path]

    def _together(self, i: int) -> bool:
        """Tells whether a node is served together with others of its turn (docs/backends.md, "Several generations")."""
        rules = self._backend.turn_rules
        if i not in self._shared or rules.begun == "continued":
            return False
        return rules.begun == "asked" or self._speculates or (rules.objects and self._shared[i])

    def _explained(self, said: Gen | Select, node: GraphNode, here: _Place, together: bool) -> ExplainedNode:
        kind: Literal["gen", "select"] = "gen" if isinstance(said, Gen) else "select"
        plain = ExplainedNode(kind, node.name, node.where, "refused")
        tokens = self._count(here.text)
        if any(use.into == "constraint" for use in node.uses):
            return replace(plain, refusal="its constraint is a value that only a run knows: give the argument")
        try:
            self._backend.check_prompt(from_start(here.prompt) if together else here.prompt)
        except CapabilityError as error:
            return replace(plain, refusal=f"{error.message} {error.hint}", prompt_tokens=tokens)
        asked = self._asked(said)
        found = self._backend.rung(asked)
        if isinstance(said, Select) and said.method == "unconditional_likelihood_normalized":
            found = Refusal("scores without the prompt", "Use another choices_method, or a local engine.")
        if isinstance(found, Refusal):
            return replace(plain, refusal=f"{found.feature}. {found.instead}", prompt_tokens=tokens)
        most, calls, warnings = asked.params.max_tokens, found.calls, found.warnings
        if isinstance(said, Select) and said.method is None:  # of several choices, one after the other, or a method of
            calls = calls[0], calls[1] * len(said.choices)  # the user's own
        if together:
            found = replace(found, name="turn", native=found.native and self._backend.turn_rules.begun != "asked")
            calls = 0, calls[1] + _MORE_CALLS
        if isinstance(said, Gen) and said.held:
            warnings = (*warnings, "attempts that a check or retries ask for are not counted")
        return replace(
            plain, mode=found.mode, rung=found.name, calls=calls, prompt_tokens=tokens, warnings=warnings,
            completion_tokens=None if isinstance(most, Unset) else most,
        )  # fmt: skip

    def _asked(self, said: Gen | Select) -> Asked:
        """What the language would ask of the backend."""
        if isinstance(said, Select):
            scores = bool(said.temperature) or said.method != "token_length_normalized"
            return self._backend.selection(said.choices, scores=scores)
        params, constraint = msgspec.structs.replace(self._params, **given(said.params)), said.constraint
        if isinstance(constraint, Number) and Number not in self._backend.capabilities.constraints:
            stops = () if isinstance(params.stop, Unset) else params.stop
            params = msgspec.structs.replace(params, stop=(*stops, *NUMBER_STOPS))
            constraint = number_as_regex(constraint)
        return Asked("gen", params, constraint)


# ------------------------------------------------------------------------------------------------------- as a table


def _row(node: ExplainedNode) -> tuple[str, ...]:
    least, most = node.calls
    calls = "" if node.mode == "refused" else f"{least}" if least == most else f"{least} to {most}"
    limit = "" if node.completion_tokens is None else str(node.completion_tokens)
    price = "" if node.price is None else f"${node.price[0]:.6f} to ${node.price[1]:.6f}"
    served = "refused" if node.mode == "refused" else f"{node.rung} ({node.mode})"
    named = f"{node.kind}({node.name!r})" if node.name is not None else node.kind
    return _line(node), named, served, calls, str(node.prompt_tokens), limit, price


def _line(node: ExplainedNode) -> str:
    return "?" if node.where is None else f"{PurePath(node.where.file).name}:{node.where.line}"
