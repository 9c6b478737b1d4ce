"""Compiling: the body of a program is run once with symbols for its arguments and for what its nodes bring. What comes
of it is the program as data (program/compiled.py), and what the body did, to be done again for the values of a run."""

from __future__ import annotations

import dis
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from types import CodeType, TracebackType
from typing import Any

import msgspec

from sglang_lite.lang.backend.base_backend import BaseBackend
from sglang_lite.lang.blanks import RUN_IT, Blank, CompileError, Origin, kept, marking, origin_of, unmarked
from sglang_lite.lang.concurrency.variables import Variable
from sglang_lite.lang.execution.branch import Branch, raised_at
from sglang_lite.lang.execution.operations import Checkpoint as Place
from sglang_lite.lang.execution.operations import ForkOp, GenOp, HookOp, JoinOp, MarkOp, Op, ReadOp, ScopeOp, SelectOp
from sglang_lite.lang.execution.player import Player
from sglang_lite.lang.execution.reading import check_name, nothing
from sglang_lite.lang.execution.run import Run, RunSettings, current_run
from sglang_lite.lang.expressions import BaseProgram, SglCall, SglSeparateReasoning
from sglang_lite.lang.fingerprint import Fingerprint
from sglang_lite.lang.script import Action, Adopted, Assigned, Forked, Joined, Read, Script, Submitted, adopt
from sglang_lite.lang.state import ProgramState, ProgramStateGroup, user_location
from sglang_lite.lang.symbols import Symbol
from sglang_lite.lang.tracer import awaited
from sglang_lite.program.compiled import CompiledProgram, Hole, Parameter, Seed, Step, check_data
from sglang_lite.program.nodes import (
    Expression,
    Expressions,
    Fill,
    Fork,
    Gen,
    GrammarBegin,
    ImagePart,
    Join,
    JoinMode,
    Node,
    Path,
    Program,
    ScopeBegin,
    ScopeEnd,
    Select,
    Text,
    TurnBegin,
)
from sglang_lite.protocol import UNSET, JsonSchema, Location, ParameterError, SamplingParams, SglError, Unset
from sglang_lite.protocol.record import Record

MOST_NODES = 100_000  # that a compiled program may have
_ESCAPED = "ue002"  # a mark that JSON was made of


class _Compiling(Run):
    """Run of a body that is compiled."""

    __slots__ = ("recorder",)

    def __init__(self, backend: BaseBackend, settings: RunSettings, program: BaseProgram) -> None:
        super().__init__(backend, settings, is_async=program.is_async, new_state=_state_of)
        self.recorder = Recorder(self)

    def contain(self, branch: Branch) -> None:
        raise CompileError(
            "a program that the body runs by itself is no node of it.", hint="Add it: s += program(…).",
            where=user_location(),
        )  # fmt: skip


class Recorder:
    """What a body does while it is compiled.

    Attributes:
        script: of it.
        branches: that it has made, the main one first.
        holes, seeds, held: of the compiled program.
        turns: it has turns, which a chat template wrote.
    """

    def __init__(self, run: Run) -> None:
        self.script = Script()
        self.branches: list[_Branch] = []
        self.holes: list[Hole] = []
        self.seeds: list[Seed] = []
        self.held: Path | None = None
        self.turns = False
        self.count = 0
        self._run = run

    def branch(self, seeds: str, path: Path, parent: _Branch | None = None) -> _Branch:
        branch = _Branch(Player(self._run), seeds)
        branch.recorder, branch.index, branch.at, branch.nodes, branch.children = self, len(self.branches), path, [], {}
        branch.parent, branch.scope_starts, branch.seed = parent, {}, None
        branch.state = _State(branch)
        self.branches.append(branch)
        return branch

    def nodes(self, branch: _Branch) -> tuple[Node, ...]:
        """All nodes of a branch, those of its forks included."""
        found: list[Node] = []
        for place, node in enumerate(branch.nodes):
            if isinstance(node, Fork):
                inner = tuple(self.nodes(child) for child in branch.children[place])
                node = Fork(inner, where=node.where)
            found.append(node)
        return tuple(found)

    def without_blanks(self, node: Any, path: Path, outer: SamplingParams) -> Any:
        """A node with something in place of each symbol, which becomes a hole."""
        found, where = len(self.holes), node.where

        def walk(thing: Any, at: tuple[Step, ...]) -> Any:
            if isinstance(thing, Blank):
                fill, *_ = self._arguments(origin_of(thing), where)
                self.holes.append(Hole(path, at, (fill,), whole=True))
                return getattr(outer, str(at[-1]), UNSET)
            if isinstance(thing, str):
                return text(thing, at)
            if type(thing) is tuple:
                return tuple(walk(each, (*at, i)) for i, each in enumerate(thing))
            if isinstance(thing, Record):
                every = {name: getattr(thing, name) for name in thing.__struct_fields__ if name != "where"}
                changed = {name: new for name, old in every.items() if (new := walk(old, (*at, name))) is not old}
                return msgspec.structs.replace(thing, **changed) if changed else thing
            return thing

        def text(thing: str, at: tuple[Step, ...]) -> str:
            parts = unmarked(thing)
            if _ESCAPED in thing:
                told = f"{'/'.join(map(str, at))} can't be compiled: an argument is in JSON."
                raise CompileError(told, hint=RUN_IT, where=where)
            if len(parts) < 2 and not any(isinstance(part, Symbol) for part in parts):
                return thing
            filled: list[str | Fill] = []
            for part in parts:
                filled += self._arguments(origin_of(part), where) if isinstance(part, Blank) else [str(part)]
            self.holes.append(Hole(path, at, tuple(filled)))
            return "".join(
                [p if isinstance(p, str) else f"\ue002{p.argument}{list(p.steps) or ''}\ue003" for p in filled]
            )

        made = walk(node, ())
        return made if len(self.holes) > found else node

    @staticmethod
    def _arguments(origin: Origin, where: Location | None) -> list[str | Fill]:
        if origin.source is not None:
            told = f"{origin.name} is what a node brings: it can be text, and no parameter, choice or constraint."
            raise CompileError(told, hint=RUN_IT, where=where)
        return origin.fills(where, special=True)


class _Branch(Branch):
    """A branch that records instead of playing. Everything the submitting side checks is checked here too.

    Attributes:
        at: its path.
        children: of its forks, by their places.
        seed: the place that a seed of the next node is made of.
    """

    __slots__ = ("at", "children", "index", "nodes", "parent", "recorder", "scope_starts", "seed", "state")

    recorder: Recorder
    index: int
    at: Path
    nodes: list[Any]
    children: dict[int, list[_Branch]]
    parent: _Branch | None
    scope_starts: dict[str, int]
    seed: str | None
    state: _State

    def submit(self, expr: Expression | str, where: Location | None = None) -> None:
        if isinstance(expr, str):
            for part in unmarked(str.__str__(expr)):
                self._submit_one(part, where)
        elif isinstance(expr, Expressions):
            for each in expr.walk():
                self.submit(each, where)
        elif isinstance(expr, SglSeparateReasoning):
            self.submit(expr.marked(), where)
        elif isinstance(expr, Text) and "\ue002" in expr.text:
            self.submit(expr.text, where)
        elif isinstance(expr, SglCall):  # what it adds is recorded
            expr.play_on(self)
        else:
            self._submit_one(expr, where)

    def _submit_one(self, expr: Any, where: Location | None) -> None:
        holes, place = len(self.recorder.holes), len(self.recorder.script.actions)
        self.recorder.script.actions.append(Submitted(self.index, expr, where, None, holes=False))
        if isinstance(expr, Blank):
            for part in origin_of(expr).fills(where, special=self._role is None):
                self._record(Text(part, None, self._role is None, where=where) if isinstance(part, str) else part)
            self._ahead = None
            path = None
        else:
            super().submit(expr, where)
            last = self.nodes[-1] if self.nodes else None
            path = (*self.at, len(self.nodes) - 1) if isinstance(last, Gen | Select) else None
        if path is not None or len(self.recorder.holes) > holes:
            done = Submitted(self.index, expr, where, path, holes=len(self.recorder.holes) > holes)
            self.recorder.script.actions[place] = done

    def node_seed(self) -> int | Unset:
        self.node_count += 1
        self.seed = f"{self.path}/{self.node_count}"
        return UNSET

    def _put(self, op: Op) -> None:
        """Records the node of an operation, instead of playing it."""
        if isinstance(op, ReadOp | HookOp | MarkOp):
            return
        node: Any = op.node if isinstance(op, GenOp | SelectOp | ScopeOp | ForkOp | JoinOp) else op
        if isinstance(node, Text) and not node.text:
            return
        number = len(self.recorder.script.actions) - 1
        path = (*self.at, len(self.nodes))
        holes = len(self.recorder.holes)
        node = self._record(node)
        if isinstance(node, GrammarBegin) and len(self.recorder.holes) > holes:
            self._ahead = None  # its language is not known
        if isinstance(op, GenOp | SelectOp):
            self._asked(op, node, path, number)
        elif isinstance(op, ScopeOp) and isinstance(node, ScopeBegin):
            self.scope_starts[node.name] = len(self.nodes)
        elif isinstance(op, ScopeOp) and isinstance(node, ScopeEnd):
            parts, why = self._scope_parts(self.scope_starts[node.name])
            op.variable.set(Blank(Origin(f"s[{node.name!r}]", parts, (number, node.name), why)))

    def _record(self, node: Any) -> Any:
        recorder, path = self.recorder, (*self.at, len(self.nodes))
        recorder.count += 1
        recorder.turns |= isinstance(node, TurnBegin)
        if recorder.count > MOST_NODES:
            told = f"the program has more than {MOST_NODES:,} nodes: compiling it stops here."
            raise CompileError(told, hint="Bound the loop, or run the program as it is.", where=node.where)
        if not isinstance(node, Text | Fill):
            node = recorder.without_blanks(node, path, self.run.settings.params)
        self.nodes.append(node)
        return node

    def _asked(self, op: GenOp | SelectOp, node: Any, path: Path, number: int) -> None:
        recorder, name = self.recorder, op.node.name
        shown = f"s[{name!r}]"
        own = node.params.seed if isinstance(node, Gen) else UNSET
        if self.seed is not None and isinstance(own, Unset):
            recorder.seeds.append(Seed(path, self.seed))
        self.seed = None
        why = ""
        if isinstance(op, SelectOp):
            held = node.method is None
        else:
            options = op.own.options
            held = node.held or (options is not None and options.timeout is not None)
            if op.own.value_type is not None or (options is not None and options.reasoning is not None):
                why = "it is a value that Python reads of the text"
            recorder.script.reads |= bool(why) or isinstance(op.own.node.constraint, JsonSchema)
            if op.thoughts is not None:
                thoughts = f"{name}_reasoning_content"
                op.thoughts.set(Blank(Origin(f"s[{thoughts!r}]", None, (number, thoughts), "Python splits it off")))
        if held:
            recorder.held = recorder.held or path
            why = "the caller's Python decides on it"
        op.variable.set(Blank(Origin(shown, None if why else (Fill(node=path),), (number, name or ""), why)))

    def _scope_parts(self, start: int) -> tuple[tuple[str | Fill, ...] | None, str]:
        """Parts of the text since a node, or why Python makes that."""
        parts: list[str | Fill] = []
        for place, node in enumerate(self.nodes[start:-1], start):
            path = (*self.at, place)
            if isinstance(node, Text):
                parts.append(node.text)
            elif isinstance(node, Fill):
                parts.append(node)
            elif isinstance(node, Gen | Select):
                if getattr(node, "held", False) or getattr(node, "method", "") is None:
                    return None, "the caller's Python decides on a part of it"
                several = isinstance(node, Gen) and not isinstance(node.params.n, Unset) and node.params.n > 1
                parts.append(Fill(node=path, steps=(0,) if several else ()))
            elif isinstance(node, ImagePart) or (isinstance(node, Join) and node.mode == "concate_and_append"):
                return None, "it has branches or images in it"
        return tuple(parts), ""

    def fork(self, size: int = 1, where: Location | None = None) -> list[Branch]:
        self.node_count += 1
        place = len(self.nodes)
        self._record(Fork(((),) * size, where=where))
        children = [
            self.recorder.branch(f"{self.path}/{self.node_count}.{i}", (*self.at, place, i), self) for i in range(size)
        ]
        for child in children:
            child.inherit(self)
        self.children[place] = children
        numbers = tuple(child.index for child in children)
        self.recorder.script.actions.append(Forked(self.index, numbers, where))
        return list(children)

    def join(self, children: list[Branch], mode: JoinMode, where: Location | None) -> None:
        own = [child for child in children if isinstance(child, _Branch) and child.parent is self]
        places = {child.at[-2] for child in own}
        if len(own) < len(children) or len(places) != 1 or len(own) != len(self.children[min(places)]):
            raise CompileError("a join of other branches than those of one fork.", hint=RUN_IT, where=where)
        ends = tuple(len(child.nodes) for child in own) if mode == "concate_and_append" else ()
        self._ahead = None
        self._record(Join(min(places), ends, mode, where=where))
        numbers = tuple(child.index for child in own)
        self.recorder.script.actions.append(Joined(self.index, numbers, mode))

    def roll_back(self, to: Place, where: Location | None) -> None:
        raise CompileError("a rollback can't be compiled.", hint=RUN_IT, where=where)

    def stop(self, error: SglError, *, told: bool = True) -> None:
        raise CompileError("a cancellation can't be compiled.", hint=RUN_IT, where=error.where)

    def restore(self, *_: Any) -> None:
        raise CompileError("a state that has run can't be compiled.", hint=RUN_IT)

    def read(self, what: Callable[[Player], Any], where: Location | None = None) -> Variable:
        if what is not nothing:
            raise CompileError(
                "the text or the messages are only known when the program runs.", hint=RUN_IT, where=where
            )
        return Variable.of(None)


class _Copy:
    """`with s.copy() as c:`"""

    def __init__(self, state: _State) -> None:
        self._state = state
        self._child: ProgramState | None = None

    def __enter__(self) -> ProgramState:
        self._child = self._state.fork(1)[0]
        return self._child

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        assert self._child is not None
        parent, child = self._state.branch, self._child.branch
        adopt(parent, child)
        assert isinstance(parent, _Branch)
        assert isinstance(child, _Branch)
        parent.recorder.script.actions.append(Adopted(parent.index, child.index))


class _State(ProgramState):
    """A state of a body that is compiled."""

    branch: _Branch

    def fork(self, size: int = 1, position_ids_offset: list[int] | None = None) -> ProgramStateGroup:
        group = super().fork(size, position_ids_offset)
        return ProgramStateGroup([_state_of(child.branch) for child in group], self)

    def copy(self, position_ids_offset: list[int] | None = None) -> Any:
        super().copy(position_ids_offset)  # refuses what it does not take
        return _Copy(self)

    def set_var(self, name: str, value: object) -> None:
        super().set_var(name, value)
        self._note(Assigned(self.branch.index, name, kept(value)))

    def __getitem__(self, name: str) -> Any:
        self._note_reading(name)
        return super().__getitem__(name)

    get_var = __getitem__

    async def get(self, name: str) -> Any:
        self._note_reading(name)
        return await super().get(name)

    def sync(self) -> None:
        self._note(Read(self.branch.index, None, user_location()))

    async def async_sync(self) -> None:
        self._note(Read(self.branch.index, None, user_location()))

    def _note_reading(self, name: str) -> None:
        check_name(name, user_location())
        if name in self.branch.names.variables:
            self._note(Read(self.branch.index, name, user_location()))

    def _note(self, action: Action) -> None:
        actions = self.branch.recorder.script.actions
        actions.append(action)
        if len(actions) > 2 * MOST_NODES:
            raise CompileError("the body reads and assigns without an end.", hint=RUN_IT, where=user_location())

    def call(self, program: BaseProgram, *args: Any, **kwargs: Any) -> Any:
        raise CompileError(
            "a program that the body runs by itself is no node of it.", hint="Add it: s += program(…).",
            where=user_location(),
        )  # fmt: skip

    def _record(self, name: str) -> Any:
        raise CompileError(f"what is known of {name!r} depends on the run.", hint=RUN_IT, where=user_location())

    def raw(self, name: str) -> Any:
        return self._record(name)

    def error(self) -> SglError | None:
        raise CompileError("errors depend on the run.", hint=RUN_IT, where=user_location())

    def usage(self, name: str | None = None) -> Any:
        return self._record(name or "the run")

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        raise CompileError("a stream is of a run.", hint=RUN_IT, where=user_location())

    def text_async_iter(self, var_name: str | None = None, return_meta_data: bool = False) -> Any:
        raise CompileError("a stream is of a run.", hint=RUN_IT, where=user_location())


def _state_of(branch: Branch) -> _State:
    assert isinstance(branch, _Branch)
    return branch.state


# ------------------------------------------------------------------------------------------------------------ compile


def compile_program(
    program: BaseProgram, backend: BaseBackend, settings: RunSettings, given: Mapping[str, Any] | None = None
) -> tuple[CompiledProgram, Script]:
    """The program as data, for a backend and settings, and what its body did.

    Args:
        given: arguments that are constants, as if they were bound; then nothing is kept of it, and it has no
            fingerprint.

    Raises:
        CompileError: it can't be; the error names the line.
        SglError: as the body raises it.
    """
    _refuse_handlers(program)
    run = _Compiling(backend, settings, program)
    recorder = run.recorder
    main = recorder.branch("", ())
    parameters, arguments = _arguments(program, given or {})
    token = current_run.set(run)
    try:
        with marking():
            try:
                result = program.func(main.state, *arguments.args, **arguments.kwargs)
                recorder.script.result = kept(awaited(result) if program.is_async else result)
            except SglError:
                raise
            except RecursionError as error:
                raise CompileError(f"{program.name} calls itself without an end.", hint=RUN_IT) from error
            except Exception as error:  # of the user's Python, which gets symbols for values
                told = f"the body of {program.name} can't be run with symbols: {type(error).__name__}: {error}."
                hint = f'Texts are made of symbols by f"{{x}}" and +. {RUN_IT}'
                raise CompileError(told, hint=hint, where=raised_at(error)) from error
    finally:
        current_run.reset(token)
    recorder.script.plain = {
        name: spec
        for name, variable in main.names.variables.items()
        if (spec := _plain(variable.result())) is not None
    }  # fmt: skip
    template = template_digest(backend) if recorder.turns else ""
    compiled = CompiledProgram(
        program.name, recorder.nodes(main), parameters, tuple(recorder.holes), tuple(recorder.seeds), recorder.held,
        _fingerprint(program) if given is None else "", template,
    )  # fmt: skip
    return compiled, recorder.script


def _plain(value: Any) -> Any:
    """Path of the node whose text a value is, or a list of such; None where it is something else."""
    if isinstance(value, Blank):
        origin = origin_of(value)
        match origin.parts:
            case (Fill(node=node, steps=()),) if not origin.steps:
                return node
    if isinstance(value, list) and value:
        found = [_plain(each) for each in value]
        return None if None in found else found
    return None


def _arguments(
    program: BaseProgram, constants: Mapping[str, Any]
) -> tuple[tuple[Parameter, ...], inspect.BoundArguments]:
    """Parameters of a compiled program, and what its body is called with: constants that were bound, symbols else."""
    parameters: list[Parameter] = []
    given: dict[str, Any] = {**program.bind_arguments, **constants}
    for name, each in program.signature.parameters.items():
        if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
            told = f"{program.name} takes any number of arguments ({each}), and a compiled program has names for them."
            raise CompileError(told, hint=RUN_IT, where=_defined(program))
        if name in given:
            continue
        required = each.default is each.empty
        default = None if required else each.default
        try:
            check_data(default, name)
        except ParameterError:
            given[name] = default  # it is the same in all runs
            continue
        parameters.append(Parameter(name, default, required))
        given[name] = Blank(Origin(name, (Fill(argument=name),)))
    arguments = inspect.BoundArguments(program.signature, {n: given[n] for n in program.signature.parameters})
    return tuple(parameters), arguments


def _refuse_handlers(program: BaseProgram) -> None:
    """Raises CompileError: the body catches exceptions, which only a run raises."""
    code = getattr(program.func, "__code__", None)
    if code is None:
        return
    found: list[CodeType] = [code]
    for each in found:
        found += [constant for constant in each.co_consts if isinstance(constant, CodeType)]
        for instruction in dis.get_instructions(each):
            if instruction.opname == "CHECK_EXC_MATCH":
                raise CompileError(
                    f"{program.name} catches exceptions, which depend on the run.", hint=RUN_IT,
                    where=Location(each, instruction.offset),
                )  # fmt: skip


def _defined(program: BaseProgram) -> Location | None:
    code = getattr(program.func, "__code__", None)
    return None if code is None else Location(code, 0)


def template_digest(backend: BaseBackend) -> str:
    """Digest of a backend's chat template; empty where it has none."""
    template = backend.get_chat_template()
    if template is None:
        return ""
    return blake2b(str(getattr(template, "source", template.name)).encode(), digest_size=16).hexdigest()


def _fingerprint(program: BaseProgram) -> str:
    """Digest of a body and of all that it reads, as far as that can be compared between runs."""
    found = Fingerprint()
    found.add_program(program.func)
    found.add("bound", program.bind_arguments)
    parts = sorted({**found.parts, **found.unreadable}.items())
    return blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def check_seen_through(
    program: BaseProgram, backend: BaseBackend, settings: RunSettings, row: Mapping[str, Any], filled: Program
) -> None:
    """Checks a program that was filled against what the body does with the same arguments.

    Raises:
        CompileError: they differ, as the body works on the texts that stand for symbols; with the first line.
    """
    try:
        compiled, _ = compile_program(program, backend, settings, row)
    except SglError:  # with these it can't be compiled, and so not compared
        return
    _compare(filled.nodes, compiled.nodes)


def _compare(filled: Sequence[Node], wanted: Sequence[Node]) -> None:
    ours, theirs = _without_seams(filled), _without_seams(wanted)
    for found, own in itertools.zip_longest(ours, theirs):
        if isinstance(found, Fork) and isinstance(own, Fork) and len(found.branches) == len(own.branches):
            for branch, other in zip(found.branches, own.branches):
                _compare(branch, other)
        elif not (found == own):  # noqa: SIM201 # `!=` is the struct's own, which compares lines, too
            told = f"with these arguments the body makes {own!r:.120}, and compiled it is {found!r:.120}"
            raise CompileError(
                f"{told}: the body works on the text of what is only known when the program runs.",
                hint=f"Pass such texts as arguments. {RUN_IT}", where=getattr(own or found, "where", None),
            )  # fmt: skip


def _without_seams(nodes: Sequence[Node]) -> list[Any]:
    """Nodes with neighbouring texts joined, which nothing tells apart."""
    found: list[Any] = []
    for node in nodes:
        last = found[-1] if found else None
        if isinstance(node, Text) and isinstance(last, Text) and node.special == last.special:
            found[-1] = msgspec.structs.replace(last, text=last.text + node.text)
        elif isinstance(node, Fork):
            found.append(node)
        elif isinstance(node, Join):
            found.append(Join(mode=node.mode, where=node.where))  # places are others
        elif isinstance(node, Fill):
            found.append(Fill(node=(), steps=node.steps, special=node.special, where=node.where))
        else:
            found.append(node)
    return found
