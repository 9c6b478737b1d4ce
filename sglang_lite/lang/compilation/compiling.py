"""Compiler of programs: runs a body with symbols for its arguments and for the values of its nodes. The results are the
program as data (program/compiled.py), and scripts of what the body did, to be repeated with the values of a run."""

from __future__ import annotations

import dis
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from types import CodeType
from typing import Any

import msgspec

from sglang_lite.lang.backend.base_backend import BaseBackend
from sglang_lite.lang.compilation.compile_symbols import (
    OR_RUN_IT,
    RUN_IT,
    CompileSymbol,
    CompileSymbolSource,
    Deciding,
    kept,
    marking,
    origin_of,
)
from sglang_lite.lang.compilation.merged_ways import MergedWays
from sglang_lite.lang.compilation.recorder import Recorder
from sglang_lite.lang.compilation.recording_state import RecordingRun
from sglang_lite.lang.compilation.script import Scripts
from sglang_lite.lang.execution.branch import raised_at
from sglang_lite.lang.execution.run import RunSettings, current_run
from sglang_lite.lang.expressions import BaseProgram
from sglang_lite.lang.saved.fingerprint import Fingerprint
from sglang_lite.lang.tracer import awaited
from sglang_lite.program.compiled import CompiledProgram, Parameter, check_data
from sglang_lite.program.nodes import Decision, Fill, Fork, Join, Node, Part, Program, Rollback, Text
from sglang_lite.protocol import CompileError, Location, ParameterError, SglError
from sglang_lite.protocol.anything import UserValue


def compile_program(
    program: BaseProgram, backend: BaseBackend, settings: RunSettings, given: Mapping[str, UserValue] | None = None
) -> tuple[CompiledProgram, Scripts]:
    """Compiles a program for a backend and settings. The body is run once for each way through it.

    Args:
        given: arguments that are constants, as if they were bound, for a program that is only compared; it then has no
            fingerprint.

    Returns:
        The program as data, and the scripts of its body.

    Raises:
        CompileError: the program can't be compiled; the error names the line.
        SglError: the body raised it.
    """
    _refuse_handlers(program)
    parameters, arguments = _arguments(program, given or {})
    recorded = partial(_recorded, program, backend, settings, arguments)
    merged = _merged(partial(recorded, unrolled=True))
    if merged.held is not None:  # then attempts are held, too
        merged = _merged(partial(recorded, unrolled=False))
    template = template_digest(backend) if merged.turns else ""
    nodes, decision, parts = merged.program()
    compiled = CompiledProgram(
        program.name, nodes, parameters, tuple(merged.holes), tuple(merged.seeds), merged.held,
        _fingerprint(program) if given is None else "", template, decision, parts,
    )  # fmt: skip
    return compiled, Scripts(merged.scripts)


def _merged(recorded: Callable[[tuple[int, ...]], Recorder]) -> MergedWays:
    """All ways through a body, merged.

    Args:
        recorded: runs the body with given outcomes of its first decisions and returns the record.
    """
    merged, left = MergedWays(), list[tuple[int, ...]]([()])
    while left:
        left += merged.take(recorded(left.pop()), len(left))
    return merged


def _recorded(
    program: BaseProgram, backend: BaseBackend, settings: RunSettings, arguments: inspect.BoundArguments,
    ways: tuple[int, ...], *, unrolled: bool,
) -> Recorder:  # fmt: skip
    """Record of one way through a body.

    Args:
        ways: outcomes of the first decisions.
        unrolled: as for a Recorder.
    """
    decisions = Deciding(ways=ways)
    recorder = Recorder(decisions, unrolled=unrolled)
    run = RecordingRun(backend, settings, program, recorder)
    token = current_run.set(run)
    try:
        with marking(decisions):
            try:
                result = program.func(run.main, *arguments.args, **arguments.kwargs)
                recorder.script.result = kept(awaited(result) if program.is_async else result)
            except SglError:
                raise
            except RecursionError as error:
                raise CompileError(f"{program.name} calls itself without an end.", hint=RUN_IT) from error
            except Exception as error:  # raised by the user's Python, which has symbols for values
                told = f"the body of {program.name} can't be run with symbols: {type(error).__name__}: {error}."
                hint = f'Make texts of symbols only with f"{{x}}" and +. {OR_RUN_IT}'
                raise CompileError(told, hint=hint, where=raised_at(error)) from error
    finally:
        current_run.reset(token)
    recorder.script.plain = {
        name: spec
        for name, variable in run.main.branch.names.variables.items()
        if (spec := _plain(variable.result())) is not None
    }  # fmt: skip
    return recorder


def _plain(value: Any) -> Any:
    """Path of the node whose text a value is, or list of paths for a list of texts; None for other values."""
    if isinstance(value, CompileSymbol):
        origin = origin_of(value)
        match origin.parts:
            case (Fill(node=node, steps=(), read=None),) if not origin.steps:
                return node
    if isinstance(value, list) and value:
        found = [_plain(each) for each in value]
        return None if None in found else found
    return None


def _arguments(
    program: BaseProgram, constants: Mapping[str, Any]
) -> tuple[tuple[Parameter, ...], inspect.BoundArguments]:
    """Parameters of a compiled program, and the arguments with which its body is run: constants for bound arguments,
    symbols for the others."""
    parameters: list[Parameter] = []
    given: dict[str, Any] = {**program.bind_arguments, **constants}
    for name, each in program.signature.parameters.items():
        if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
            told = (
                f"{program.name} takes any number of arguments ({each}), but a compiled program needs a name for each."
            )
            raise CompileError(told, hint=RUN_IT, where=_defined(program))
        if name in given:
            continue
        required = each.default is each.empty
        default = None if required else each.default
        try:
            check_data(default, name)
        except ParameterError:
            given[name] = default  # no data, so the same in all runs
            continue
        parameters.append(Parameter(name, default, required))
        given[name] = CompileSymbol(CompileSymbolSource(name, (Fill(argument=name),)))
    arguments = inspect.BoundArguments(program.signature, {n: given[n] for n in program.signature.parameters})
    return tuple(parameters), arguments


def _refuse_handlers(program: BaseProgram) -> None:
    """Raises CompileError if the body catches exceptions, since a script can't repeat how it handles them."""
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
    """Digest of a backend's chat template, or an empty string if it has none."""
    template = backend.get_chat_template()
    if template is None:
        return ""
    return blake2b(str(getattr(template, "source", template.name)).encode(), digest_size=16).hexdigest()


def _fingerprint(program: BaseProgram) -> str:
    """Digest of a program's body and of the values that it reads, as far as they can be compared between processes."""
    found = Fingerprint()
    found.add_program(program.func)
    found.add("bound", program.bind_arguments)
    parts = sorted({**found.parts, **found.unreadable}.items())
    return blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def check_seen_through(
    program: BaseProgram, backend: BaseBackend, settings: RunSettings, row: Mapping[str, UserValue], filled: Program
) -> None:
    """Checks that a filled program is what the body does with the same arguments.

    Args:
        row: arguments by name.
        filled: program with these arguments in its holes.

    Raises:
        CompileError: the two differ, because the body processes texts that stand for symbols; the error has the line of
            the first difference.
    """
    try:
        compiled, _ = compile_program(program, backend, settings, row)
    except SglError:  # the body can't be compiled with these arguments
        return
    _compare_parts(filled, compiled)


def _compare_parts(filled: Program, wanted: CompiledProgram) -> None:
    """Compares two programs, decision by decision. Raises CompileError if they differ."""
    _compare(filled.nodes, wanted.nodes)
    left = [(filled.decision, wanted.decision)]
    while left:
        ours, theirs = left.pop()
        if _question(ours) != _question(theirs):
            condition = None if theirs is None else theirs.condition
            _differ(f"decides {theirs!r:.120}", repr(ours), None if condition is None else condition.left.where)
        if ours is None or theirs is None:
            continue
        for own, other in zip(ours.parts, theirs.parts):
            one, two = filled.parts[own], wanted.parts[other]
            branches = {each.path[1::2] for part in (one, two) for each in part.added}
            for branch in sorted(branches):
                _compare(_added(one, branch), _added(two, branch))
            left.append((one.decision, two.decision))


def _question(decision: Decision | None) -> Any:
    """Form of a decision for comparisons, without paths of nodes."""
    if decision is None or decision.condition is None:
        return decision and ()
    condition = decision.condition
    right = condition.right
    return condition.sign, condition.left.steps, (right.steps if isinstance(right, Fill) else (type(right), right))


def _added(part: Part, branch: tuple[int, ...]) -> list[Node]:
    """Nodes that a part adds to a branch.

    Args:
        branch: number of the branch in each fork on its path. Places of nodes are left out, since they differ if texts
            are split differently.
    """
    return [node for each in part.added if each.path[1::2] == branch for node in each.nodes]


def _compare(filled: Sequence[Node], wanted: Sequence[Node]) -> None:
    ours, theirs = _without_seams(filled), _without_seams(wanted)
    for found, own in itertools.zip_longest(ours, theirs):
        if isinstance(found, Fork) and isinstance(own, Fork) and len(found.branches) == len(own.branches):
            for branch, other in zip(found.branches, own.branches):
                _compare(branch, other)
        elif not (found == own):  # noqa: SIM201 # `!=` is the struct's own, which also compares lines
            _differ(f"makes {own!r:.120}", f"{found!r:.120}", getattr(own or found, "where", None))


def _differ(wanted: str, found: str, where: Location | None) -> None:
    raise CompileError(
        f"with these arguments the body {wanted}, but the compiled program has {found:.120}: the body works on a text "
        "that is only known when the program runs.",
        hint=f"Pass such a text as an argument. {OR_RUN_IT}", where=where,
    )  # fmt: skip


def _without_seams(nodes: Sequence[Node]) -> list[Any]:
    """Form of nodes for comparisons: neighbouring texts are joined, and places of nodes are left out."""
    found: list[Any] = []
    for node in nodes:
        last = found[-1] if found else None
        if isinstance(node, Text) and not node.text:  # an empty argument
            continue
        if isinstance(node, Text) and isinstance(last, Text) and node.special == last.special:
            found[-1] = msgspec.structs.replace(last, text=last.text + node.text)
        elif isinstance(node, Fork):
            found.append(node)
        elif isinstance(node, Join):
            found.append(Join(mode=node.mode, where=node.where))  # without places
        elif isinstance(node, Fill):
            found.append(node if node.node is None else msgspec.structs.replace(node, node=()))
        elif isinstance(node, Rollback):
            found.append(Rollback(0, where=node.where))
        else:
            found.append(node)
    return found
