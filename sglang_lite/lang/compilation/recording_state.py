"""State of a body that is being compiled: records what is added to it (recorder.py) instead of playing it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import msgspec

from sglang_lite.lang.backend.base_backend import BaseBackend
from sglang_lite.lang.compilation.compile_symbols import (
    RUN_IT,
    CompileSymbol,
    CompileSymbolOrigin,
    marks_to_symbols,
    origin_of,
    split_at_marks,
)
from sglang_lite.lang.compilation.recorder import Recorder
from sglang_lite.lang.compilation.script import Adopted, Assigned, Forked, Joined, Marked, Read, RolledBack, Submitted
from sglang_lite.lang.concurrency.variables import Variable
from sglang_lite.lang.execution.branch import Branch
from sglang_lite.lang.execution.operations import (
    BranchMark,
    ForkOp,
    GenOp,
    HookOp,
    JoinOp,
    MarkOp,
    Op,
    ReadOp,
    ScopeOp,
    SelectOp,
)
from sglang_lite.lang.execution.player import Player
from sglang_lite.lang.execution.reading import check_name, nothing
from sglang_lite.lang.execution.run import Run, RunSettings
from sglang_lite.lang.execution.shared_call import SharedCall
from sglang_lite.lang.expressions import BaseProgram, GenOptions, SglCall, SglSeparateReasoning
from sglang_lite.lang.scopes import CopyScope
from sglang_lite.lang.state import ProgramState, ProgramStateGroup, user_location
from sglang_lite.lang.unawaited import must_await
from sglang_lite.program.compiled import Seed
from sglang_lite.program.nodes import (
    Condition,
    Expression,
    Expressions,
    Fill,
    Fork,
    Gen,
    GrammarBegin,
    ImagePart,
    Join,
    JoinMode,
    Mark,
    Path,
    Reader,
    Rollback,
    ScopeBegin,
    ScopeEnd,
    Select,
    Text,
)
from sglang_lite.program.seeds import reseeded
from sglang_lite.protocol import UNSET, Choices, CompileError, JsonSchema, Location, SglError, Unset
from sglang_lite.protocol.anything import UserValue
from sglang_lite.protocol.sampling import Deferred


class RecordingRun(Run):
    """Run of a body that is being compiled.

    Attributes:
        main: state that the body is called with.
    """

    __slots__ = ("main",)

    def __init__(self, backend: BaseBackend, settings: RunSettings, program: BaseProgram, recorder: Recorder) -> None:
        super().__init__(backend, settings, is_async=program.is_async, new_state=_state_of)
        self.main = RecordingBranch(Player(self), "", recorder, ()).state

    def register_inner(self, inner: object) -> None:
        raise nested_run_error()

    def record_call(
        self, name: str, call: Callable[..., UserValue], args: Sequence[UserValue], kwargs: Mapping[str, UserValue]
    ) -> UserValue:
        return self.main.branch.recorder.record_call(name, None, call, args, kwargs)


def nested_run_error() -> CompileError:
    """Error of a body that runs a batch or an async program."""
    problem = "the body runs a batch or an async program, which can't be compiled."
    return CompileError(problem, hint="Add a program that is not async: s += program(…).", where=user_location())


_READERS: dict[Any, Reader] = {int: "int", float: "float", bool: "bool"}  # readers of typed values


def _retried(op: GenOp) -> bool:
    """True if a generation is held only for its retries, and these don't depend on Python: its value has a built-in
    reader, and it has no other options."""
    options, kind, params = op.expression.options, op.expression.value_type, op.node.params
    if options is None or not options.retries or kind is None or kind.annotation not in _READERS:
        return False
    plain = options == GenOptions(retries=options.retries)
    return plain and isinstance(params.n, Unset) and not isinstance(params.seed, Deferred)


class RecordingBranch(Branch):
    """Branch that records what is added instead of playing it. Performs the same checks as Branch.

    Args:
        seeds: name of the branch from which seeds are derived.
        at: path of the branch.
        parent: branch from which this one was forked, or None.

    Attributes:
        index: number of the branch in the recorder.
        nodes: recorded nodes.
        children: branches of each fork, by the place of the fork.
        state: state of the branch.
    """

    __slots__ = (
        "_live", "_marks", "_scope_starts", "_seed", "at", "children", "index", "nodes", "parent", "recorder", "state",
    )  # fmt: skip

    def __init__(
        self, player: Player, seeds: str, recorder: Recorder, at: Path, parent: RecordingBranch | None = None
    ) -> None:
        super().__init__(player, seeds)
        self.recorder, self.at, self.index = recorder, at, len(recorder.branches)
        self.nodes: list[Any] = []
        self.children: dict[int, list[RecordingBranch]] = {}
        self.parent = parent
        self._live: list[int] = []  # places of nodes that were not rolled back
        self._marks: dict[BranchMark, tuple[int, int, int]] = {}  # place, live nodes, action
        self._scope_starts: dict[str, int] = {}
        self._seed: str | None = None  # name from which the next node's seed is derived
        self.state = _RecordingState(self)
        recorder.branches.append(self)

    def submit(self, expr: Expression | str, where: Location | None = None, equal: SharedCall | None = None) -> None:
        """Records what is added. `equal` is not used: it matters only to backends that are requested node by node."""
        if isinstance(expr, str):
            for part in split_at_marks(str.__str__(expr)):
                self._submit_one(part, where, as_text=True)
        elif isinstance(expr, Expressions):
            for each in expr.walk():
                self.submit(each, where)
        elif isinstance(expr, SglSeparateReasoning):
            self.submit(expr.marked(), where)
        elif isinstance(expr, Text) and "\ue002" in expr.text:
            self.submit(expr.text, where)
        elif isinstance(expr, SglCall):  # records what the called program adds
            expr.play_on(self)
        elif isinstance(expr, CompileSymbol) and origin_of(expr).is_read:
            problem = f"{origin_of(expr).name} is a value that Python makes of a text, so it can't be added."
            raise CompileError(problem, hint="Turn it into text.", where=where)
        else:
            self._submit_one(expr, where)

    def _submit_one(self, expr: Any, where: Location | None, *, as_text: bool = False) -> None:
        holes = len(self.recorder.holes)
        added = marks_to_symbols(str(expr)) if as_text and isinstance(expr, CompileSymbol) else expr
        number = self.recorder.record_action(Submitted(self.index, added, where, None, holes=False))
        if isinstance(expr, CompileSymbol):
            for part in origin_of(expr).text_parts(where, special=self._role is None):
                self._record(Text(part, None, self._role is None, where=where) if isinstance(part, str) else part)
            self._matcher = None
            path = None
        else:
            super().submit(expr, where)
            last, filled = self.nodes[-1] if self.nodes else None, len(self.recorder.holes) > holes
            path = (*self.at, len(self.nodes) - 1) if filled or isinstance(last, Gen | Select) else None
        if path is not None:
            actions = self.recorder.script.actions
            submitted: Any = actions[number]
            actions[number] = replace(submitted, path=path, holes=len(self.recorder.holes) > holes)

    def seed_of(self, node: str) -> int | Unset:
        self._seed = node
        return UNSET

    def _put(self, op: Op) -> None:
        """Records the node of an operation instead of playing it."""
        if isinstance(op, ReadOp | HookOp):
            return
        if isinstance(op, MarkOp):
            self._mark(op.mark)
            return
        node: Any = op.node if isinstance(op, GenOp | SelectOp | ScopeOp | ForkOp | JoinOp) else op
        if isinstance(node, Text) and not node.text:
            return
        number = len(self.recorder.script.actions) - 1
        holes = len(self.recorder.holes)
        if isinstance(op, GenOp) and self.recorder.unrolled and not self.run.settings.retries and _retried(op):
            self._record_attempts(op, number)
            return
        path = (*self.at, len(self.nodes))
        node = self._record(node)
        if isinstance(node, GrammarBegin) and len(self.recorder.holes) > holes:
            self._matcher = None  # the grammar depends on an argument
        if isinstance(op, GenOp | SelectOp):
            self._record_result(op, node, path, number)
        elif isinstance(op, ScopeOp) and isinstance(node, ScopeBegin):
            self._scope_starts[node.name] = len(self.nodes)
        elif isinstance(op, ScopeOp) and isinstance(node, ScopeEnd):
            parts, why = self._scope_parts(self._scope_starts[node.name])
            op.variable.set(CompileSymbol(CompileSymbolOrigin(f"s[{node.name!r}]", parts, (number, node.name), why)))

    def _record_attempts(self, op: GenOp, number: int) -> None:
        """Records the attempts at a typed value as nodes: if the value of an attempt can't be read, it is rolled back
        and the next one follows."""
        own, params, seed = op.expression, op.node.params, self._seed
        assert own.options is not None
        assert own.value_type is not None
        greedy = params.temperature == 0 or params.top_k == 1  # a retry would repeat the answer
        again = 0 if greedy else own.options.retries or 0
        place, live = len(self.nodes), len(self._live)
        self._record(Mark())
        refused: list[Path] = []
        for attempt in range(again + 1):
            path = (*self.at, len(self.nodes))
            drawn = msgspec.structs.replace(params, seed=reseeded(params.seed, attempt))
            node = self._record(msgspec.structs.replace(op.node, params=drawn, held=False))
            if seed is not None and isinstance(params.seed, Unset):
                self.recorder.seeds.append(Seed(path, seed, attempt=attempt))
            fill = Fill(node=path, read=_READERS[own.value_type.annotation], where=node.where)
            if attempt == again or self.recorder.decisions.decide_condition(Condition(fill, "readable"), ()):
                break
            self._record(Rollback(place, where=node.where))
            del self._live[live + 1 :]
            refused.append(path)
        self._seed = None
        action: Any = self.recorder.script.actions[number]
        expression = replace(own, options=None)
        self.recorder.script.actions[number] = replace(action, expression=expression, refused=tuple(refused))
        self._record_result(op, node, path, number)

    def _record(self, node: Any) -> Any:
        self._live.append(len(self.nodes))
        return self.recorder.add(self, node, self.run.settings.params)

    def _record_result(self, op: GenOp | SelectOp, node: Any, path: Path, number: int) -> None:
        recorder, name = self.recorder, op.node.name
        own = node.params.seed if isinstance(node, Gen) else UNSET
        if self._seed is not None and isinstance(own, Unset):
            recorder.seeds.append(Seed(path, self._seed))
        self._seed = None
        why, fill, values = "", Fill(node=path), tuple[Any, ...]()
        if isinstance(op, SelectOp):
            held = node.method is None
            if op.expression.multi is None and not any(
                h.path == path and h.field[0] == "choices" for h in recorder.holes
            ):
                values = node.choices
        else:
            options = op.expression.options
            held = node.held or (options is not None and options.timeout is not None)
            kind = op.expression.value_type
            if options is not None and options.reasoning is not None:
                why = "it is a value that Python makes of the text"
            elif kind is not None and (reader := _READERS.get(kind.annotation)) is not None:
                fill = Fill(node=path, read=reader)
            elif kind is not None:
                why = "it is a value that Python makes of the text"
            elif isinstance(node.constraint, Choices):
                values = node.constraint.options
            recorder.script.reads |= (
                kind is not None or bool(why) or isinstance(op.expression.node.constraint, JsonSchema)
            )
            if op.thoughts is not None:
                thoughts = f"{name}_reasoning_content"
                origin = CompileSymbolOrigin(f"s[{thoughts!r}]", None, (number, thoughts), "Python splits it off")
                op.thoughts.set(CompileSymbol(origin))
        if held:
            recorder.note_hold(path)
            if any(hole.path == path and "constraint" in hole.field for hole in recorder.holes):
                self._refuse_reasoned(op, name)
        origin = CompileSymbolOrigin(f"s[{name!r}]", None if why else (fill,), (number, name or ""), why, values=values)
        op.variable.set(CompileSymbol(origin))

    @staticmethod
    def _refuse_reasoned(op: GenOp | SelectOp, name: str | None) -> None:
        """Raises CompileError if a generation has `reasoning`, whose constraint can't be combined with an argument."""
        options = op.expression.options if isinstance(op, GenOp) else None
        if options is not None and options.reasoning is not None:
            problem = f"the constraint of {name!r} has an argument in it, which can't be combined with reasoning= here."
            raise CompileError(problem, hint=RUN_IT, where=op.node.where)

    def _scope_parts(self, start: int) -> tuple[tuple[str | Fill, ...] | None, str]:
        """Parts of the text since a node, or None and the reason for which only Python can make that text."""
        parts: list[str | Fill] = []
        for place in self._live[:-1]:
            node, path = self.nodes[place], (*self.at, place)
            if place < start:
                continue
            if isinstance(node, Text):
                parts.append(node.text)
            elif isinstance(node, Fill):
                parts.append(node)
            elif isinstance(node, Gen | Select):
                several = isinstance(node, Gen) and node.params.samples > 1
                parts.append(Fill(node=path, steps=(0,) if several else ()))
            elif isinstance(node, ImagePart) or (isinstance(node, Join) and node.mode == "concate_and_append"):
                return None, "it has branches or images in it"
        return tuple(parts), ""

    def fork(self, size: int = 1, where: Location | None = None) -> list[Branch]:
        node = self.next_node()
        place = len(self.nodes)
        self._record(Fork(((),) * size, where=where))
        children = [
            RecordingBranch(Player(self.run), f"{node}.{i}", self.recorder, (*self.at, place, i), self)
            for i in range(size)
        ]
        self.copy_state_to(children)
        self.children[place] = children
        numbers = tuple(child.index for child in children)
        self.recorder.record_action(Forked(self.index, numbers, where))
        return list(children)

    def join(self, children: list[Branch], mode: JoinMode, where: Location | None) -> None:
        own = [child for child in children if isinstance(child, RecordingBranch) and child.parent is self]
        places = {child.at[-2] for child in own}
        if len(own) < len(children) or len(places) != 1 or len(own) != len(self.children[min(places)]):
            raise CompileError("join() needs all branches of one fork.", hint=RUN_IT, where=where)
        ends = tuple(len(child.nodes) for child in own) if mode == "concate_and_append" else ()
        self._matcher = None
        self._record(Join(min(places), ends, mode, where=where))
        numbers = tuple(child.index for child in own)
        self.recorder.record_action(Joined(self.index, numbers, mode))

    def _mark(self, mark: BranchMark) -> None:
        number = self.recorder.record_action(Marked(self.index))
        self._marks[mark] = len(self.nodes), len(self._live), number
        self._record(Mark())

    def _go_back(self, mark: BranchMark, where: Location | None) -> None:
        """Records a rollback, which waits until the values that the body has read since the mark are there."""
        place, live, marked = self._marks[mark]
        after = tuple(dict.fromkeys([path for number, path in self.recorder.reads if number > marked]))
        if after:
            self.recorder.decisions.wait_for(after)
        self._record(Rollback(place, where=where))
        del self._live[live + 1 :]
        self.recorder.record_action(RolledBack(self.index, marked, where))

    def stop(self, error: SglError, *, reported: bool = True) -> None:
        raise CompileError("a cancellation can't be compiled.", hint=RUN_IT, where=error.where)

    def restore(self, *_: UserValue) -> None:
        raise CompileError("a state that has run can't be compiled.", hint=RUN_IT)

    def read(self, what: Callable[[Player], UserValue], where: Location | None = None) -> Variable:
        if what is not nothing:
            raise CompileError(
                "the text or the messages are only known when the program runs.", hint=RUN_IT, where=where
            )
        return Variable.of(None)


class _RecordingCopyScope(CopyScope):
    """Context manager of `s.copy()` that also records the adoption of the variables."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        super().__exit__(kind, error, tb)
        assert self._group is not None
        parent, child = self._state.branch, self._group[0].branch
        assert isinstance(parent, RecordingBranch)
        assert isinstance(child, RecordingBranch)
        parent.recorder.record_action(Adopted(parent.index, child.index))


def _recorded_call(method: str) -> Any:
    """Method of a state that records its call, which the caller's Python makes in a run."""
    return lambda self, *args, **kwargs: self._record_call(method, *args, **kwargs)


class _RecordingState(ProgramState):
    """State of a body that is being compiled."""

    branch: RecordingBranch

    def fork(self, size: int = 1, position_ids_offset: list[int] | None = None) -> ProgramStateGroup:
        group = super().fork(size, position_ids_offset)
        return ProgramStateGroup([_state_of(child.branch) for child in group], self)

    def copy(self, position_ids_offset: list[int] | None = None) -> CopyScope:
        super().copy(position_ids_offset)  # checks the argument
        return _RecordingCopyScope(self)

    def set_var(self, name: str, value: object) -> None:
        super().set_var(name, value)
        self.branch.recorder.record_action(Assigned(self.branch.index, name, marks_to_symbols(value)))

    def __getitem__(self, name: str) -> Any:
        self._record_read(name)
        return super().__getitem__(name)

    get_var = __getitem__

    @must_await
    async def get(self, name: str) -> Any:
        self._record_read(name)
        return await super().get(name)

    def sync(self) -> None:
        self._record_read(None)

    async def async_sync(self) -> None:
        self._record_read(None)

    def _record_read(self, name: str | None) -> None:
        branch = self.branch
        if name is not None:
            check_name(name, user_location())
            if name not in branch.names.variables:
                return
        number = branch.recorder.record_action(Read(branch.index, name, user_location()))
        if branch.nodes:
            branch.recorder.reads.append((number, (*branch.at, len(branch.nodes) - 1)))

    # Methods that the caller's Python calls in a run.

    def _record_call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self.branch.recorder.record_call(f"s.{method}", self.branch.index, method, args, kwargs)

    def call(self, program: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(program, BaseProgram):
            return super().call(program)
        if program.is_async:
            raise nested_run_error()
        return self._record_call("call", program, *args, **kwargs)

    cancel, raw, probs = _recorded_call("cancel"), _recorded_call("raw"), _recorded_call("probs")
    selection, usage = _recorded_call("selection"), _recorded_call("usage")
    text, messages = _recorded_call("text"), _recorded_call("messages")

    # Methods whose results can't be symbols, since `is None` and isinstance(…) on a symbol can't be noticed.

    def _record(self, name: str) -> Any:
        raise CompileError(
            f"the metadata of {name!r} is only known when the program runs.", hint=RUN_IT, where=user_location()
        )

    def error(self) -> SglError | None:
        raise CompileError("errors are only known when the program runs.", hint=RUN_IT, where=user_location())

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        raise CompileError("the stream is only there when the program runs.", hint=RUN_IT, where=user_location())

    def text_async_iter(self, var_name: str | None = None, return_meta_data: bool = False) -> Any:
        raise CompileError("the stream is only there when the program runs.", hint=RUN_IT, where=user_location())


def _state_of(branch: Branch) -> _RecordingState:
    assert isinstance(branch, RecordingBranch)
    return branch.state
