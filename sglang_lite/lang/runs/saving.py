"""Saved runs: their conversion to data and back, and their files. A file contains no code, so
running a saved run again requires its program.
"""

from __future__ import annotations

import functools
import os
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import msgspec

from sglang_lite import wire
from sglang_lite.lang.backend.base import Backend
from sglang_lite.lang.concurrency.variables import Variable
from sglang_lite.lang.execution.branch import Branch
from sglang_lite.lang.execution.player import Player
from sglang_lite.lang.execution.run import BoundCall, Run, RunSettings
from sglang_lite.lang.execution.run_log import RunLog
from sglang_lite.lang.execution.transcript import FinishedText, Piece, Reasoned
from sglang_lite.lang.expressions import BaseProgram
from sglang_lite.lang.runs import files
from sglang_lite.lang.runs.carried import FileValues, ValueCodec
from sglang_lite.lang.runs.fingerprint import Fingerprint
from sglang_lite.lang.runs.log import collect_branch_answers
from sglang_lite.lang.runs.values import PLAIN_TYPES, from_json_data, to_json_data
from sglang_lite.lang.tools import ToolCall
from sglang_lite.protocol import (
    CapabilityError,
    Generation,
    Media,
    ParameterError,
    ProgramError,
    Selection,
    Span,
    WireError,
)
from sglang_lite.protocol.anything import UserValue
from sglang_lite.protocol.prompt import is_placeholder
from sglang_lite.protocol.saved import (
    SavedPiece,
    SavedResult,
    SavedRun,
    SavedSamples,
    SavedText,
    SavedVariable,
)

_FORMAT = 3  # version of SavedRun's format
_OTHER = "If another version of sglang_lite has saved it, run the program again, or load it with that version."
_NOT_SAVED = f"Was that written by state.save(path)? {_OTHER}"


class AbsentBackend(Backend):
    """Backend of a state that was loaded without one. Running a node raises CapabilityError.

    Args:
        saved: the saved run. Its model and tokenizer are reported as the backend's, so its tokens
            stay valid when it is saved again.
        cure: hint for the error, which says how to give the state a backend.
    """

    def __init__(
        self, saved: SavedRun, cure: str = "Load it with sgl.load(path, backend=…)."
    ) -> None:
        self._model = saved.model
        self._tokenizer = saved.tokenizer
        self._cure = cure

    def get_model_name(self) -> str:
        return self._model

    @property
    def tokenizer_digest(self) -> str | None:
        return self._tokenizer

    def get_chat_template(self) -> NoReturn:
        self.agenerate()

    def agenerate(self, *args: object, **kwargs: object) -> NoReturn:
        raise CapabilityError(
            "this state was loaded without a backend, so it can't run nodes.",
            hint=self._cure,
        )

    async def aselect(self, *args: object, **kwargs: object) -> NoReturn:
        self.agenerate()


# ------------------------------------------------------------------------------------------ to data


def to_saved_run(
    branch: Branch, ret_value: object, *, again: bool = True, values: ValueCodec | None = None
) -> SavedRun:
    """Converts a branch to a SavedRun. Every node in the branch must already have been executed.

    Args:
        ret_value: return value of the program's body.
        again: whether to include everything that is needed to run the program again. If False, only
            texts, turns and values with their usages are included.
        values: codec for the values of variables. Defaults to the one used for files.

    Raises:
        ProgramError: a grammar or a scope is open, or the value of a variable can't be saved.
    """
    run = branch.run
    transcript = branch.player.transcript
    if transcript.matcher is not None or branch.names.scopes:
        what = (
            "a grammar"
            if transcript.matcher is not None
            else f"the scope {next(iter(branch.names.scopes))!r}"
        )
        raise ProgramError(
            f"the state can't be saved while {what} is open.", hint="Save it after the end of that."
        )
    values = values or FileValues()
    program, parts, arguments = _program_data(run) if again else ("", (), None)
    declared = branch.names.all_declarations()
    variables = [
        _save_variable(branch, name, variable, values, whole=again) for name, variable in declared
    ]
    return SavedRun(
        program=program,
        parts=parts,
        arguments=arguments,
        params=run.settings.params,
        seed=run.settings.seed,
        retries=run.settings.retries,
        branch=branch.path,
        nodes=branch.node_count,
        model=run.backend.get_model_name(),
        tokenizer=run.backend.tokenizer_digest,
        pieces=tuple(_save_piece(piece) for piece in transcript.pieces),
        messages=tuple(transcript.messages),
        turn=transcript.turn,
        suffixes=branch.blocks.suffixes,
        turn_ends=tuple(transcript.turn_ends),
        earlier=tuple(map(_save_text, transcript.earlier)),
        variables=(*variables, SavedVariable("", values.to_data(ret_value, "the return value"))),
        answers=(*run.remembered, *collect_branch_answers(branch.player)) if again else (),
        usage=run.account.usage(),
        format=_FORMAT,
        **_suspension_data(branch) if again else {},
    )


def _suspension_data(branch: Branch) -> dict[str, Any]:
    """Returns the data needed to resume a suspended run. Returns an empty dict for other runs."""
    run = branch.run
    if not run.pending or run.log is None or branch.path:
        return {}
    return {"pending": run.pending, "log": tuple(run.log.records), "identity": run.log.identity}


def _program_data(run: Run) -> tuple[str, tuple[tuple[str, str], ...], SavedVariable | None]:
    """Returns the `program`, `parts` and `arguments` of a SavedRun: the name of a run's program,
    digests of its parts, and its arguments.
    """
    called = run.called
    unbound = run.unbound
    if called is None:
        return (
            ("", (), None)
            if unbound is None
            else (unbound.program, unbound.parts, unbound.arguments)
        )
    found = Fingerprint()
    found.add_program(called.program.func)
    return (
        called.program.name,
        () if found.unreadable else tuple(found.parts.items()),
        _arguments_data(called),
    )


def _arguments_data(called: BoundCall) -> SavedVariable | None:
    try:
        return SavedVariable("", to_json_data([list(called.args), called.kwargs], "an argument"))
    except ProgramError:
        return None


def _save_text(text: FinishedText) -> SavedText:
    return SavedText(
        tuple(map(_save_piece, text.pieces)),
        tuple(text.messages),
        tuple(text.turn_ends),
        text.suffixes,
    )


def _save_piece(piece: Piece) -> SavedPiece:
    match piece:
        case Media():
            return SavedPiece(image=piece)
        case Reasoned():
            return SavedPiece(piece.spans, answer=piece.answer)
        case Span():
            return SavedPiece((piece,))
        case _:
            return SavedPiece((Span(piece),))


def _save_variable(
    branch: Branch, name: str, variable: Variable, values: ValueCodec, *, whole: bool
) -> SavedVariable:
    failure = variable.error_or_none()
    node = variable.node
    if failure is None and branch.run.pending and _has_call(variable.result()):
        failure = ProgramError("the call is known when the run is resumed.")
    if failure is None:
        try:
            value = values.to_data(variable.result(), repr(name))
        except ProgramError as error:
            if branch.names.variables.get(name) is variable:
                raise
            failure = error
    if failure is not None:
        return SavedVariable(name, error=str(failure), node=node)
    # A variable may come from a branch whose text is not part of this one.
    in_text = bool(node) and f"{branch.path}/".startswith(f"{node.rpartition('/')[0]}/")
    behind, text = None, 0
    if in_text and variable.end_position is not None:
        *behind, text = variable.end_position
    return SavedVariable(
        name,
        value,
        _save_result(variable.record, whole=whole),
        behind=None if behind is None else tuple(behind),
        node=node,
        text=text,
    )


def _has_call(value: UserValue) -> bool:
    """Returns True if a value is a call of a tool, or a list of calls."""
    return isinstance(value, ToolCall) or (
        isinstance(value, list) and any(isinstance(each, ToolCall) for each in value)
    )


def _save_result(record: Any, *, whole: bool) -> SavedResult | None:
    """Converts the result that set a variable to data. Returns None if the result came from a
    blocking hook.

    Args:
        whole: whether to include log-probabilities, scores and metadata, which may be of any type.
    """
    match record:
        case list():
            return SavedSamples(tuple([_save_result(each, whole=whole) for each in record]))
        case Generation() | Selection() if whole:
            return record
        case Generation():
            return Generation(
                record.text,
                finish_reason=record.finish_reason,
                usage=record.usage,
                index=record.index,
                reasoning=record.reasoning,
            )
        case Selection():
            return Selection((), record.usage, record.picked)
    return None


# ---------------------------------------------------------------------------------------- from data


def restore_branch(
    saved: SavedRun,
    backend: Backend,
    values: ValueCodec,
    called: BoundCall | None,
    new_state: Callable[[Branch], UserValue],
) -> tuple[Branch, UserValue]:
    """Restores the branch of a saved run, with all of its nodes already executed. Returns the
    branch and the return value of the program's body.

    Args:
        values: codec for the values of variables.
        called: program of the run with its arguments, or None if the run can't be repeated.
        new_state: creates the state of a branch, for the body of a called program.
    """
    settings = RunSettings(saved.params, seed=saved.seed, retries=saved.retries)
    run = Run(backend, settings, new_state=new_state)
    run.body_open = False
    run.called = called
    run.unbound = saved if called is None and saved.program else None
    player = Player(run)
    player.pushed = run.new_pushed_branch()
    if player.pushed is not None:  # later additions need a program that begins with the text
        player.pushed.program.close()
    branch = Branch(player, saved.branch, saved.nodes, run.planner_for_backend(backend))
    same = has_same_tokens(saved, backend)
    earlier = tuple(_restore_text(text, same_tokens=same) for text in saved.earlier)
    branch.restore_text(_restore_text(saved, same_tokens=same), saved.turn, earlier)
    ret_value = None
    for each in saved.variables:
        variable = Variable()
        variable.node = each.node
        if each.error is not None:
            variable.set_error(ProgramError(each.error))
        else:
            variable.record = _restore_result(each.result)
            variable.end_position = None if each.behind is None else (*each.behind, each.text)
            variable.set(values.from_data(each.value))
        if each.name:
            branch.names.declare(each.name, variable)
        else:
            ret_value = variable.result()
    run.remembered = saved.answers
    if saved.pending:
        run.pending = saved.pending
        run.attach_log(RunLog(saved.identity, saved.log))
    run.account.add_earlier_usage(saved.usage)
    return branch, ret_value


def bind_saved_call(
    saved: SavedRun, program: BaseProgram | None, find: Callable[[str], UserValue]
) -> BoundCall | None:
    """Returns `program` bound to the arguments of a saved run, so that it can run again. Returns
    None if no program is given or the arguments were not saved.

    Args:
        find: returns the class of a given name, for classes that occur in the arguments.
    """
    if program is None or saved.arguments is None:
        return None
    args, kwargs = from_json_data(saved.arguments.value, find)
    return BoundCall(program, tuple(args), kwargs)


def truncate_run(saved: SavedRun, name: str, index: int) -> SavedRun:
    """Returns a saved run as it was right after a node had set the variable `name`. If several
    nodes have set it, the last one counts.

    Args:
        index: number of the new state. Several states may continue after the same node.

    Raises:
        ParameterError: no node of the run's text set the variable.
    """
    places = {each.name: i for i, each in enumerate(saved.variables) if each.behind is not None}
    if name not in places:
        names = ", ".join(map(repr, places)) or "none"
        raise ParameterError("at", f"no node of this text set {name!r:.60}. Nodes set: {names}.")
    until = saved.variables[: places[name] + 1]
    assert until[-1].behind is not None
    pieces, messages, turn = until[-1].behind
    number = until[-1].text
    text: SavedText | SavedRun = saved if number == len(saved.earlier) else saved.earlier[number]
    return msgspec.structs.replace(
        saved,
        program="",
        parts=(),
        arguments=None,
        pieces=text.pieces[:pieces],
        messages=text.messages[:messages],
        turn=turn,
        suffixes=text.suffixes[: messages + (turn is not None)],
        turn_ends=text.turn_ends[:messages],
        earlier=saved.earlier[:number],
        variables=until,
        branch=f"{saved.branch}/{until[-1].node}.{index}",
        nodes=0,
    )


def has_same_tokens(saved: SavedRun, backend: Backend) -> bool:
    """Returns True if the token ids of a saved run are those of the backend's tokenizer."""
    return saved.tokenizer is not None and saved.tokenizer == backend.tokenizer_digest


def _restore_text(text: SavedText | SavedRun, *, same_tokens: bool) -> FinishedText:
    pieces = [_restore_piece(piece, same_tokens=same_tokens) for piece in text.pieces]
    return FinishedText(pieces, text.messages, text.turn_ends, text.suffixes)


def _restore_piece(piece: SavedPiece, *, same_tokens: bool) -> Piece:
    if piece.image is not None:
        return piece.image
    spans = piece.spans
    if not same_tokens:
        spans = tuple(
            span
            if is_placeholder(span)
            else Span(span.text, special=span.special and span.ids is None)
            for span in spans
        )
    if piece.answer is not None:
        return Reasoned(spans, piece.answer)
    (span,) = spans
    return span.text if span.special and span.ids is None else span


def _restore_result(result: SavedResult | None) -> Any:
    return (
        [_restore_result(each) for each in result.results]
        if isinstance(result, SavedSamples)
        else result
    )


# -------------------------------------------------------------------------------------------- files


def read_saved_run(path: files.AnyPath) -> SavedRun:
    """Reads a saved run from a file.

    Raises:
        ParameterError: the file does not exist, can't be read, or is too large.
        WireError: the file is not a saved state, is damaged, or has another version.
    """
    if not isinstance(path, str | os.PathLike):
        raise ParameterError(
            "path",
            f"{path!r:.60} is not a path.",
            hint="Give the file that state.save(path) wrote.",
        )
    try:
        return decode_saved_run(files.read(path))
    except WireError as error:
        error.hint = f"It is in {str(path)!r}. {error.hint or _NOT_SAVED}"
        raise


def decode_saved_run(content: bytes) -> SavedRun:
    """Decodes a saved run. Raises WireError if the content is not a saved run or was saved in
    another format.
    """
    saved = wire.decode(content)
    if not isinstance(saved, SavedRun):
        raise WireError(
            f"a {type(saved).__name__} is not a saved state", hint="Save one: state.save(…)"
        )
    if saved.format != _FORMAT:
        raise WireError(
            f"the state was saved in format {saved.format}; this version reads format {_FORMAT}",
            hint=_OTHER,
        )
    return saved


def class_finder(
    program: BaseProgram | None, types: Iterable[Callable[..., UserValue]]
) -> Callable[[str], UserValue]:
    """Returns a function that finds classes by name without importing anything.

    It knows plain types, `types`, the classes that the program's module defines or has imported,
    and the classes of all their fields. It finds functions (tools of saved calls) only in `types`,
    since a file could name any function.
    """
    allowed: dict[str, Any] = {_qualified_name(kind): kind for kind in with_nested_classes(types)}
    allowed |= {_qualified_name(kind): kind for kind in (*PLAIN_TYPES, ToolCall, *types)}

    @functools.cache
    def module_classes() -> dict[str, type]:
        own = () if program is None else program.func.__globals__.values()
        return {
            _qualified_name(kind): kind
            for kind in with_nested_classes(each for each in own if isinstance(each, type))
        }

    def find(name: str) -> Any:
        found = allowed.get(name) or module_classes().get(name)
        if found is None:
            raise ProgramError(
                f"a saved value has the type or the tool {name}, which is not known here.",
                hint="Give the class or the function: sgl.load(path, types=[…]).",
            )
        return found

    return find


def _qualified_name(kind: Any) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def with_nested_classes(kinds: Iterable[UserValue]) -> Iterator[type]:
    """Yields the classes among `kinds`, the classes in the annotations of their fields, and the
    classes defined inside them, recursively.
    """
    left = [*kinds]
    seen = set[int]()
    while left:
        kind = left.pop()
        if id(kind) in seen:
            continue
        seen.add(id(kind))
        left += typing.get_args(kind)
        if not isinstance(kind, type) or typing.get_origin(kind) is not None:
            continue
        yield kind
        left += [
            each
            for each in vars(kind).values()
            if isinstance(each, type) and each.__module__ == kind.__module__
        ]
        try:
            left += typing.get_type_hints(kind).values()
        except Exception:  # annotations that can't be resolved: the class itself is listed
            continue


def check_program(saved: SavedRun, program: BaseProgram) -> None:
    """Raises ProgramError if a run belongs to another program or if the program's body has changed.
    The error names the first difference. The program of a suspended run may have changed, so that
    a mistake in a tool can be fixed: resuming the run compares it with its log instead.
    """
    if not saved.program:
        problem = (
            f"the saved state belongs to no program, so {program.name!r} can't run again from it."
        )
        raise ProgramError(problem, hint="Load it without a program: sgl.load(path).")
    if saved.program != program.name:
        problem = f"the saved run is of the program {saved.program!r}, not of {program.name!r}."
        raise ProgramError(problem, hint=f"Load it with {saved.program}, or without a program.")
    if saved.pending:
        return
    now = Fingerprint()
    now.add_program(program.func)
    before = dict(saved.parts)
    if not before or now.unreadable:
        return
    for name in {**before, **now.parts}:
        if before.get(name) != now.parts.get(name):
            own = name == f"the code of {program.name}"
            what = f"the code of program {program.name!r}" if own else f"{name} of {program.name!r}"
            raise ProgramError(
                f"since this was saved, {what} has changed.",
                hint="Load it without the program, to read it or continue its text.",
            )
