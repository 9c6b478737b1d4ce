"""Records the body of a traced program. Nodes that a `Player` would execute in a real run become
nodes of a graph.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from sglang_lite.lang.backend.remote.explain import TracedAnswer, TracedBackend
from sglang_lite.lang.concurrency.variables import Variable
from sglang_lite.lang.execution.branch import Branch
from sglang_lite.lang.execution.operations import (
    REASONING_SUFFIX,
    BranchMark,
    EventOp,
    ForkOp,
    GenOp,
    JoinOp,
    MarkOp,
    Op,
    ReadOp,
    ReplaceOp,
    ScopeOp,
    SelectOp,
)
from sglang_lite.lang.execution.player import Player
from sglang_lite.lang.execution.reading import pieces_since_fork, read_finished_text, read_nothing
from sglang_lite.lang.execution.run import Run
from sglang_lite.lang.expressions import SglGen, SglGetForkItem, SglImage, SglSelect
from sglang_lite.lang.state import ProgramState, user_location
from sglang_lite.lang.symbolic.symbols import MARK, SglVariable, Symbol
from sglang_lite.program.graph import (
    MAX_BRANCHINGS,
    Branching,
    Call,
    GraphNode,
    Picture,
    Use,
    Value,
)
from sglang_lite.program.nodes import (
    BaseNode,
    Expression,
    Gen,
    GrammarBegin,
    Mark,
    Path,
    Rollback,
    ScopeBegin,
    Select,
    Text,
    TurnBegin,
    TurnEnd,
)
from sglang_lite.protocol import UNSET, Location, TraceError
from sglang_lite.protocol.anything import UserValue

# Maximum number of steps of a trace; equals the limit on queued nodes in runtime/core/submission.py
# (a test compares them).
MAX_NODES: Final = 100_000
_UNKNOWN_TEXT = Text("…")  # stands for text known only at run time


class EndlessError(TraceError):
    """Raised if a body adds nodes or makes decisions without end."""


class CutError(BaseException):
    """Raised to end a trace on purpose. It is a BaseException, so that bodies don't catch it by
    accident.
    """


def is_tracing_limit(error: BaseException) -> bool:
    """Returns True if an error comes from a limit of tracing, rather than from a fault of the body."""
    return isinstance(error, TraceError) and not isinstance(error, EndlessError)


class TracedGraph:
    """Graph under construction. Contains the nodes that all traced paths through a body have added.
    Two paths share their nodes up to the first decision in which they differ.

    Attributes:
        nodes: nodes; their indices are their ids.
        answers: generations and selections with their prompts, by id; only in traces for `explain`.
        read: ids of the nodes whose value the body has read.
        question_lines: lines of the body that ask a question about a symbol.
    """

    def __init__(self) -> None:
        self.nodes: list[GraphNode] = []
        self.answers: dict[int, TracedAnswer] = {}
        self.read: set[int] = set()
        self.question_lines: set[Location] = set()
        self._ids: dict[tuple[tuple[int, ...], int], int] = {}

    def intern_node(self, node: GraphNode, outcomes: tuple[int, ...], place: int) -> int:
        """Adds a node and returns its id. If an earlier path has already added the node, only
        returns the id.

        Args:
            outcomes: outcomes of the decisions before it.
            place: number of nodes between the last decision and it.
        """
        i = self._ids.setdefault((outcomes, place), len(self.nodes))
        if i == len(self.nodes):
            self.nodes.append(node)
        return i


class TracedWay:
    """One path through a body and the programs that the body calls.

    Args:
        graph: nodes of all paths.
        forced: outcomes of the first decisions; later decisions take their first outcome. None if
            the trace does not explore.
        only: types allowed for nodes of the main branch; the first node of another type ends the
            trace. None allows all types.

    Attributes:
        ids: ids of the nodes so far.
        outcomes: outcomes of the decisions so far.
        marks: symbols by the marks that stand for them in texts.
        equal_values: values that symbols are known to equal on this path, by the symbol's key.
        error: exception that the body raised, or None.
        cut: whether the path was cut short because it has too many decisions.
        returns: whether the body returned a value.
    """

    def __init__(
        self,
        graph: TracedGraph,
        forced: tuple[int, ...] | None = None,
        only: tuple[type[BaseNode], ...] | None = None,
    ) -> None:
        self.graph = graph
        self.forced = forced
        self._only = only
        self.ids: list[int] = []
        self.outcomes: tuple[int, ...] = ()
        self.marks: dict[str, Symbol] = {}
        self.equal_values: dict[Any, object] = {}
        self.error: Exception | None = None
        self.cut = self.returns = False
        self._known: dict[Any, int] = {}  # outcomes of questions, by their key
        # ids of the nodes that make values, by the `id` of the node
        self._sources: dict[int, int] = {}
        self._place = 0  # number of nodes since the last decision
        self._remaining_steps = MAX_NODES
        self._lock = threading.Lock()  # threads of the body may add to several branches

    def record_node(self, node: GraphNode) -> int:
        """Records a node and returns its id."""
        self._count_step()
        if self._only is not None and not node.path and not isinstance(node.node, self._only):
            self._only = ()  # blocks that the error leaves record nothing either
            raise CutError
        with self._lock:
            i = self.graph.intern_node(node, self.outcomes, self._place)
            self.ids.append(i)
            self._place += 1
        return i

    def _count_step(self) -> None:
        """Counts a step. Raises EndlessError if the trace has made too many."""
        self._remaining_steps -= 1
        if self._remaining_steps < 0:
            raise EndlessError(
                f"the body has added nodes or made decisions {MAX_NODES:,} times without ending.",
                hint="Bound each loop whose end depends on a run, as in `for step in range(8):`.",
                where=user_location(),
            )

    def choose_outcome(
        self, symbol: Symbol, question: str, outcomes: tuple[str, ...], key: object
    ) -> int:
        """Returns the index of a decision's outcome on this path. Records the decision if its
        question is new; the same question always gets the same answer. Raises CutError if the path
        has too many decisions.
        """
        if (where := user_location()) is not None:
            self.graph.question_lines.add(where)
        if key in self._known:
            self._count_step()
            return self._known[key]
        at = len(self.outcomes)
        if at == MAX_BRANCHINGS:
            raise CutError
        assert self.forced is not None
        outcome = self._known[key] = self.forced[at] if at < len(self.forced) else 0
        self.record_node(
            GraphNode(
                Branching(question, outcomes, where=where),
                uses=(self.build_symbol_use(symbol, "question"),),
            )
        )
        self.outcomes = (*self.outcomes, outcome)
        self._place = 0
        return outcome

    def decisions(self) -> list[Branching]:
        """Returns the decisions so far, in order."""
        nodes = (self.graph.nodes[i].node for i in self.ids)
        return [node for node in nodes if isinstance(node, Branching)]

    def register_symbol(
        self, name: str, node: BaseNode, i: int, choices: tuple[str, ...] = ()
    ) -> SglVariable:
        """Creates the symbol for the value of the node with the id `i`."""
        self._sources[id(node)] = i
        return SglVariable(name, node, choices)

    def record_variable_read(self, value: UserValue) -> None:
        """Records that the body has read a variable."""
        for each in value if isinstance(value, list) else (value,):
            if (
                isinstance(each, Symbol)
                and (source := self._sources.get(id(each.__origin__().source))) is not None
            ):
                self.graph.read.add(source)

    def build_symbol_use(self, symbol: Symbol, into: str) -> Use:
        of = symbol.__origin__()
        return Use(of.name, of.parts, into, self._sources.get(id(of.source)))

    def symbol_uses_in(self, value: object, into: str) -> tuple[Use, ...]:
        """Returns the uses of symbols in a value. The value may be a symbol itself, or contain the
        marks that stand for symbols in text.
        """
        if isinstance(value, Symbol):
            return (self.build_symbol_use(value, into),)
        text = (
            value if isinstance(value, str) else msgspec.json.encode(value, enc_hook=str).decode()
        )
        return tuple(
            self.build_symbol_use(self.marks[mark], into)
            for mark in MARK.findall(text)
            if mark in self.marks
        )

    def expand_symbol_marks(self, text: str) -> str:
        """Replaces the marks that stand for symbols in a text with the symbols' expressions in
        braces.
        """
        return MARK.sub(
            lambda mark: f"{{{self.build_symbol_use(self.marks[mark[0]], '').expression}}}", text
        )


class Recorder(Player):
    """Player that records the operations of a branch instead of executing them.

    Attributes:
        way: traced path, shared by all branches.
        path: path of the branch in the graph.
        scopes: names of the open scopes, outermost first.
        expressions: nodes, symbols and images in the order in which they were added, in SGLang's
            form.
        symbols: symbol of each variable, by name.
        states: states of forks and of called programs.
    """

    __slots__ = ("_marks", "expressions", "path", "scopes", "states", "symbols", "way")

    def __init__(self, run: Run, way: TracedWay, path: Path = ()) -> None:
        super().__init__(run)
        self.way = way
        self.path = path
        self.expressions: list[Expression] = []
        self.symbols: dict[str, SglVariable] = {}
        self.states: list[ProgramState] = []
        self.scopes: tuple[str, ...] = ()
        self._marks: list[tuple[BranchMark, tuple[str, ...]]] = []

    def record_call(self, run: Run, program: str) -> Recorder:
        """Records that the body runs another program separately. Returns a recorder for the other
        program's branch.
        """
        i = self._record_node(Call(program, where=user_location()), None)
        return Recorder(run, self.way, (*self.path, i, 0))

    def read_when_played(
        self, what: Callable[[Player], UserValue], where: Location | None = None
    ) -> Variable:
        if what is read_finished_text:
            return Variable.from_value(what(self))
        if what not in (read_nothing, pieces_since_fork):
            SglVariable("the text").__refuse__("read the text or the messages")
        return super().read_when_played(read_nothing, where)

    def roll_back_to(self, mark: BranchMark) -> None:
        i = [each for each, _ in self._marks].index(mark)
        self._record_node(Rollback(mark=i, where=user_location()), None)
        assert mark.position is not None
        self.transcript.rewind_to(mark.position)
        self.scopes = self._marks[i][1]

    def add_value(self, symbol: Symbol, where: Location | None) -> None:
        """Records that a symbol was added to the text. In a run, the text would contain its value."""
        self._record_node(Value(where=where), symbol, (self.way.build_symbol_use(symbol, "text"),))
        self.transcript.append_text(_UNKNOWN_TEXT)

    def add_image(self, image: SglImage, where: Location | None) -> None:
        source = image.path
        uses = self.way.symbol_uses_in(source, "image") if isinstance(source, str | Symbol) else ()
        self._record_node(Picture(f"{source!r:.60}", image.kind, where=where), image, uses)

    def play_or_queue(self, op: Op) -> None:
        way = self.way
        match op:
            case ReadOp():
                op.variable.set(None)
            case EventOp():
                pass
            case Text():
                self._record_text(op)
            case GenOp() | SelectOp():
                self._record_answer(op)
            case ScopeOp(ScopeBegin() as node):
                name = way.expand_symbol_marks(node.name)
                self._record_node(_replace_struct_fields(node, name=name), node)
                self.scopes += (name,)
            case ScopeOp(node):
                i = self._record_node(
                    _replace_struct_fields(node, name=way.expand_symbol_marks(node.name)), node
                )
                self.scopes = self.scopes[:-1]
                self.symbols[node.name] = way.register_symbol(node.name, node, i)
                op.variable.set(self.symbols[node.name])
            case ForkOp(node, children):
                i = self._record_node(node, node)
                for number, child in enumerate(children):
                    assert isinstance(child, Recorder)
                    child.path = (*self.path, i, number)
                    child.scopes = self.scopes
                    child.symbols = dict(self.symbols)
                    child.expressions.append(SglGetForkItem(number))
                    child.transcript.fork_from(self.transcript)
            case JoinOp(node, children):
                paths = tuple(child.path for child in children if isinstance(child, Recorder))
                self._record_node(node, node, joins=paths)
                if node.mode == "concate_and_append":
                    self.transcript.append_text(_UNKNOWN_TEXT)
            case MarkOp(mark):
                self._record_node(Mark(where=user_location()), None)
                mark.position = self.transcript.position()
                self._marks.append((mark, self.scopes))
            case ReplaceOp(text, compaction):
                if compaction is not None:
                    self._record_node(compaction.node, None)
                self.transcript.replace_text(text, None)
            case TurnBegin():
                turn = _replace_struct_fields(op, role=way.expand_symbol_marks(op.role))
                self._record_node(turn, op)
                self.transcript.begin_turn(turn)
            case TurnEnd():
                self._record_node(
                    _replace_struct_fields(op, role=way.expand_symbol_marks(op.role)), op
                )
                self.transcript.end_turn(op)
            case _:
                self._record_node(
                    op,
                    op,
                    way.symbol_uses_in(op.constraint, "constraint")
                    if isinstance(op, GrammarBegin)
                    else (),
                )

    def _record_node(
        self,
        node: Any,
        expression: Expression | None,
        uses: tuple[Use, ...] = (),
        tools: tuple[str, ...] = (),
        joins: tuple[Path, ...] = (),
    ) -> int:
        """Records a node and returns its id.

        Args:
            expression: the node in the form in which the state lists it, or None if the state does
                not list it.
        """
        i = self.way.record_node(
            GraphNode(node, self.path, self.transcript.role, self.scopes, uses, tools, joins)
        )
        if expression is not None:
            self.expressions.append(expression)
        return i

    def _record_text(self, node: Text) -> None:
        """Records a text. Where it contains the mark of a symbol, records the symbol instead."""
        for part in MARK.split(node.text):
            if part in self.way.marks:
                self.add_value(self.way.marks[part], node.where)
            elif part:
                text = node if part == node.text else _replace_struct_fields(node, text=part)
                self._record_node(text, text)
                self.transcript.append_text(text)

    def _record_answer(self, op: GenOp | SelectOp) -> None:
        way = self.way
        node = op.node
        own = op.expression
        record, uses = (
            self._gen_with_uses(op) if isinstance(op, GenOp) else self._select_with_uses(op.node)
        )
        tools = _names_of_tools(own)
        i = self._record_node(
            _replace_struct_fields(record, name=node.name and way.expand_symbol_marks(node.name)),
            node,
            uses,
            tools,
        )
        if isinstance(self.backend, TracedBackend):
            way.graph.answers.setdefault(i, TracedAnswer(own, self.transcript.prompt()))
        self.transcript.append_text(_UNKNOWN_TEXT)
        name = node.name or f"{'gen' if isinstance(node, Gen) else 'select'}_{len(self.symbols)}"
        choices = own.choices if isinstance(own, SglSelect) and not own.multi and not uses else ()
        self.symbols[name] = way.register_symbol(name, node, i, choices)
        op.variable.set(self.symbols[name])
        if isinstance(op, GenOp) and op.thoughts is not None:
            op.thoughts.set(way.register_symbol(f"{name}{REASONING_SUFFIX}", node, i))

    def _gen_with_uses(self, op: GenOp) -> tuple[Gen, tuple[Use, ...]]:
        """Returns the generation as the user requested it, and its uses of symbols. Additions of a
        template or backend are left out, and fields that contain symbols are unset.
        """
        params = op.expression.node.params
        constraint = op.expression.node.constraint
        uses = () if constraint is None else self.way.symbol_uses_in(constraint, "constraint")
        if uses:
            constraint = None
        for name in params.__struct_fields__:
            value = getattr(params, name)
            if value is not UNSET and (found := self.way.symbol_uses_in(value, name)):
                uses += found
                params = _replace_struct_fields(params, **{name: UNSET})
        return _replace_struct_fields(op.node, params=params, constraint=constraint), uses

    def _select_with_uses(self, node: Select) -> tuple[Select, tuple[Use, ...]]:
        given: Any = node.choices
        uses = (
            () if node.lora_path is UNSET else self.way.symbol_uses_in(node.lora_path, "lora_path")
        )
        node = _replace_struct_fields(node, seed=UNSET, lora_path=UNSET if uses else node.lora_path)
        if isinstance(given, Symbol):
            return _replace_struct_fields(node, choices=()), uses + self.way.symbol_uses_in(
                given, "choices"
            )
        uses += tuple(use for choice in given for use in self.way.symbol_uses_in(choice, "choices"))
        return _replace_struct_fields(
            node, choices=tuple(map(self.way.expand_symbol_marks, given))
        ), uses


class TracedBranch(Branch):
    """Branch of a trace. Creates and checks nodes as in a run, except for things that are only
    known at run time: symbols, images, and text in a grammar.
    """

    __slots__ = ()

    player: Recorder

    def _fork_player(self) -> Recorder:
        return Recorder(self.run, self.player.way)

    @contextlib.contextmanager
    def restored_on_error(self, where: Location | None) -> Iterator[None]:
        yield

    def submit_elementary(self, expression: Expression, where: Location | None) -> None:
        if isinstance(expression, Symbol):
            self.player.add_value(expression, where)
        elif isinstance(expression, SglImage):
            self.player.add_image(expression, where)
        else:
            super().submit_elementary(expression, where)
        if isinstance(expression, GrammarBegin):
            self.blocks.matcher = None  # text with symbols can't be checked


def _names_of_tools(own: SglGen | SglSelect) -> tuple[str, ...]:
    """Returns the names of the functions that a generation may call."""
    if isinstance(own, SglSelect):
        return ()
    if own.options.code is not None:
        return tuple(own.options.code.signatures)
    return () if own.tools is None else tuple(own.tools.tools)


def _replace_struct_fields(record: Any, **changes: Any) -> Any:
    return msgspec.structs.replace(record, **changes)
