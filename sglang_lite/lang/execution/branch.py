"""The user's side of a branch: converts the expressions that a body adds into nodes, and checks
them before they are executed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_lite.constraints.answer_limit import estimate_max_answer_tokens
from sglang_lite.constraints.number_text import TERMINATORS
from sglang_lite.lang.backend.base import Backend, check_adapter, unsupported_medium_error
from sglang_lite.lang.backend.capabilities import EVERYTHING, Demands
from sglang_lite.lang.backend.planning import Planner
from sglang_lite.lang.concurrency.variables import TextLog, Variable, copy_as_sgl_error
from sglang_lite.lang.execution.blocks import OpenBlocks
from sglang_lite.lang.execution.names import NamesAtMark
from sglang_lite.lang.execution.operations import (
    REASONING_SUFFIX,
    BranchMark,
    Compaction,
    EventOp,
    ForkOp,
    GenOp,
    JoinOp,
    MarkOp,
    ReadOp,
    ReplaceOp,
    ScopeOp,
    SelectOp,
)
from sglang_lite.lang.execution.player import Player, cancel_tree, unknown_variable_error
from sglang_lite.lang.execution.program_log import open_program_node
from sglang_lite.lang.execution.reading import close_when_done, pieces_since_fork
from sglang_lite.lang.execution.retries import check_repair
from sglang_lite.lang.execution.run import Run
from sglang_lite.lang.execution.transcript import FinishedText
from sglang_lite.lang.execution.waits import Place, Waits
from sglang_lite.lang.expressions import (
    NUMBER_STOPS,
    SglCall,
    SglGen,
    SglImage,
    SglSelect,
    SglSeparateReasoning,
    can_skip_scores,
    example_choices,
    number_as_regex,
)
from sglang_lite.lang.tracebacks import choose_error_location, is_library
from sglang_lite.program.nodes import (
    Expression,
    Expressions,
    Fork,
    Gen,
    GrammarBegin,
    GrammarEnd,
    ImagePart,
    Join,
    JoinMode,
    ScopeBegin,
    ScopeEnd,
    Text,
    TurnBegin,
    TurnEnd,
    check_awaited,
    not_addable,
)
from sglang_lite.protocol import (
    UNSET,
    BudgetError,
    Choices,
    Constraint,
    Continuation,
    InOrder,
    Lark,
    Location,
    MediaKind,
    Number,
    ParameterError,
    ProgramError,
    RequestAbortedError,
    RequestTimeoutError,
    SamplingParams,
    SglError,
    TemplateError,
    Unset,
)
from sglang_lite.protocol.anything import UserValue
from sglang_lite.protocol.sampling import CHANGE_DRAWS, NO_PARAMS, merge
from sglang_lite.text.reasoning import allow_reasoning_before

if TYPE_CHECKING:
    from sglang_lite.lang.tools import Toolbox


@dataclass(frozen=True, slots=True)
class BranchSnapshot:
    """State of a branch at a mark."""

    mark: BranchMark
    names: NamesAtMark
    blocks: OpenBlocks


def _media_token(run: Run, kind: MediaKind) -> str:
    """Returns the placeholder that stands for an image or a sound in the text. Returns "" if the
    model has no chat template: placeholders are only needed in turns.
    """
    try:
        return str(getattr(run.template, "audio_token" if kind == "audio" else "image_token", ""))
    except TemplateError:
        return ""


class Branch:
    """The user's side of a branch: converts added expressions into operations, and checks as much
    as possible before they are executed.

    Args:
        player: executes the operations.
        path: path of the branch in the program's tree: the fork's path and the branch's index in
            it.
        node_count: number of nodes so far. A node's path is its branch's path and its number.
        planner: planner of the branch's calls, or None if each node is called separately.

    Attributes:
        blocks: the turn and the grammar that are open.
        shown_tools: tools that the last prompt with tools has shown, or None.
    """

    __slots__ = (
        "__weakref__", "backend", "blocks", "names", "node_count", "path", "planner", "player", "run", "shown_tools",
    )  # fmt: skip

    def __init__(
        self, player: Player, path: str = "", node_count: int = 0, planner: Planner | None = None
    ) -> None:
        self.player = player
        self.path = path
        self.planner = planner
        self.run = player.run
        self.backend = player.backend
        self.names = player.names
        self.blocks = OpenBlocks()
        self.node_count = node_count
        self.shown_tools: Toolbox | None = None

    def submit_expression(self, expr: Expression | str, where: Location | None = None) -> None:
        """Queues the operations of an expression. Raises errors of misuse that can be detected
        before its execution.
        """
        later = not self.run.body_open
        if self.names.gone is not None or later:
            self.player.prepare_for_addition(where)
        try:
            if isinstance(expr, str) and "<coroutine object " in expr:
                check_awaited("+=", expr, where)
            # fast path of _put_text
            if type(expr) is str and self.blocks.matcher is None and self.run.spelled is None:
                self.player.play_or_queue(Text(expr, None, self.blocks.role is None, where=where))
            elif isinstance(expr, str):
                self._append_text_op(expr, where)
            elif not isinstance(expr, Expression):
                raise not_addable("+=", expr, where)
            elif self.planner is not None:
                for expression in self.planner.plan(list(expr.walk()), self.blocks.role, where):
                    self.submit_elementary(expression, where)
            elif isinstance(expr, Expressions):
                for expression in expr.expr_list:
                    self.submit_elementary(expression, where)
            else:
                self.submit_elementary(expr, where)
        finally:
            if later and self.player.pushed is not None:
                close_when_done(self.player, self.player.pushed.program)

    def submit_elementary(self, expression: Expression, where: Location | None) -> None:
        """Queues the operations of one elementary expression, such as a text, a generation or the
        beginning of a turn.
        """
        match expression:
            case Text():
                self._append_text_op(
                    expression.text, where, expression.ids, special=expression.special
                )
            case SglGen():
                made = expression.node.where
                # most are in one line
                if made is not None and where is not None and made.line > where.line:
                    where = choose_error_location(where, made)
                self.player.play_or_queue(self._make_gen_op(expression, where))
            case SglSelect():
                self.player.play_or_queue(
                    self._make_select_op(
                        expression, choose_error_location(where, expression.node.where)
                    )
                )
            case TurnBegin():
                for node in self.blocks.begin_turn(expression.role, self.run, where):
                    self.player.play_or_queue(node)
            case TurnEnd():
                for node in self.blocks.end_turn(expression.role, self.run, where):
                    self.player.play_or_queue(node)
            case ScopeBegin():
                variable = Variable(where)
                self.names.scopes[expression.name] = (
                    *self.names.scopes.get(expression.name, ()),
                    variable,
                )
                self.player.play_or_queue(
                    ScopeOp(ScopeBegin(expression.name, where=where), variable)
                )
            case ScopeEnd():
                if expression.name not in self.names.scopes:
                    raise ProgramError(
                        f"the variable scope {expression.name!r} is not open.", where=where
                    )
                *outer, variable = self.names.scopes.pop(expression.name)
                if outer:
                    self.names.scopes[expression.name] = tuple(outer)
                self.names.declare(expression.name, variable)
                self.player.play_or_queue(ScopeOp(ScopeEnd(expression.name, where=where), variable))
            case GrammarBegin():
                self.blocks.begin_grammar(expression, self.backend, where)
                self.player.play_or_queue(GrammarBegin(expression.constraint, where=where))
            # else a rollback has removed its beginning
            case GrammarEnd() if self.blocks.grammar is not None:
                matcher = self.blocks.end_grammar()
                self.player.play_or_queue(GrammarEnd(where=where))
                if matcher is not None:
                    matcher.check_complete()
            case GrammarEnd():
                pass
            case SglImage():
                self._append_media(expression, choose_error_location(where, expression.made))
            case SglSeparateReasoning():
                for each in expression.with_reasoning_option().walk():
                    self.submit_elementary(each, where)
            case SglCall():
                expression.play_on(self.run.new_state(self))
            case _:
                raise ParameterError("+=", f"{expression!r} can't be executed.", where=where)

    def _append_text_op(
        self,
        text: str,
        where: Location | None,
        ids: tuple[int, ...] | None = None,
        *,
        special: bool = True,
    ) -> None:
        if type(text) is not str:
            if not isinstance(text, str):
                raise not_addable("+=", text, where)
            text = str.__str__(text)  # a subclass of str is not plain data
        if self.blocks.matcher is not None:  # raises at the user's line
            self.blocks.matcher.push(text)
        special = special and self.blocks.role is None
        if special and ids is None and self.run.spelled is not None:
            for piece, names_tokens in self.run.spelled.split_at_plain_tokens(text):
                self.player.play_or_queue(Text(piece, special=names_tokens, where=where))
        else:
            self.player.play_or_queue(Text(text, ids, special, where=where))

    def _make_select_op(self, own: SglSelect, where: Location | None) -> SelectOp:
        run = self.run
        blocks = self.blocks
        adapter = (
            run.settings.params.lora_path
            if isinstance(own.node.lora_path, Unset)
            else own.node.lora_path
        )
        if own.multi:
            blocks.refuse_in_grammar(
                "select(multi=True) can't be part of a grammar.", "Select one by one.", where
            )
        check_adapter(self.backend, own, adapter, where)
        texts = example_choices(own.choices, multi=own.multi)
        choices = Choices(texts) if isinstance(texts, tuple) else None  # a symbol, in a trace
        self.backend.check(
            own, Demands("select", constraint=choices, scores=not can_skip_scores(own)), where
        )
        blocks.matcher = None
        path = self.next_node_path()
        variable = self._declare_variable(own.node.name, path, where)
        judged = own.multi or run.settings.retries or run.kept is not None
        node = msgspec.structs.replace(
            own.node,
            method=None if judged else own.node.method,
            seed=run.seed_for_path(path),
            special=blocks.role is None,
            lora_path=adapter,
            where=where,
        )
        return SelectOp(node, own, variable, in_body=run.body_open)

    def _make_gen_op(self, own: SglGen, where: Location | None) -> GenOp:
        options = own.options
        backend = self.backend if options.backend is None else options.backend
        if own.tools is not None:
            own = _with_tools(own, own.tools, backend)
        if options.code is not None:
            own = _with_grammar_of_code(own, backend)
        shows_tools = own.tools is not None and self.blocks.role == "assistant"
        if shows_tools:
            self.shown_tools = own.tools
        path = self.next_node_path()
        if options.code is not None:
            functions = {name: each.function for name, each in options.code.signatures.items()}
            open_program_node(self.run, path, functions)
        node = _make_gen_node(self, own, backend, path, where, shows_tools=shows_tools)
        kind = None if own.value_type is None else own.value_type.annotation
        thoughts = None
        if options.reasoning is not None:
            name = f"{node.name}{REASONING_SUFFIX}" if node.name is not None else None
            thoughts = self._declare_variable(name, path, where)
        variable = self._declare_variable(node.name, path, where, kind)
        self.blocks.matcher = None
        return GenOp(
            node,
            own,
            variable,
            thoughts=thoughts,
            shows_tools=shows_tools,
            in_body=self.run.body_open,
        )

    def _append_media(self, expression: SglImage, where: Location | None) -> None:
        from sglang_lite.lang.media import extract_frames, fetch_medium

        kind = expression.kind
        can = self.backend.capabilities
        medium = expression.load_media(where)
        self.blocks.refuse_in_grammar(
            "an image can't be part of a grammar.", "Add it before.", where
        )
        if not can.takes(kind):
            raise unsupported_medium_error(self.backend, kind, kind, where)
        if medium.address and not (kind == "image" and can.fetches_images):
            medium = fetch_medium(medium, where)
        for each in (
            extract_frames(medium, where) if kind == "video" and not can.videos else (medium,)
        ):
            self.player.play_or_queue(ImagePart(each, _media_token(self.run, kind), where=where))
        self.notify_listener("fill_image")

    def _declare_variable(
        self, name: str | None, node: str, where: Location | None, kind: Any = None
    ) -> Variable:
        variable = Variable(where, self.run.made)
        variable.node = node
        if name is not None:
            variable.kind = kind  # before the name is declared: readers wait for the declaration
            if self.player.log is not None or self.player.later is not None:
                variable.log = TextLog()
            self.names.declare(name, variable)
        return variable

    def next_node_path(self) -> str:
        """Returns the path of the branch's next node in the program's tree."""
        self.node_count += 1
        return f"{self.path}/{self.node_count}"

    def fork(self, size: int = 1, where: Location | None = None) -> list[Branch]:
        """Creates `size` branches that continue independently from here."""
        self.player.prepare_for_addition(where)
        node = self.next_node_path()
        planners = [None] * size if self.planner is None else self.planner.fork(size)
        children = [
            type(self)(self._fork_player(), f"{node}.{i}", planner=planners[i]) for i in range(size)
        ]
        for child in children:
            child.names.fork_from(self.names)
            child.blocks = self.blocks.copy()
            child.blocks.compacted = False
            child.shown_tools = self.shown_tools
        players = [child.player for child in children]
        self.player.children += players
        if size > 1:
            self.notify_listener("commit_lazy_operations")
        self.player.play_or_queue(ForkOp(Fork(((),) * size, where=where), players))
        self.notify_listener("fork_program", players)
        return children

    def _fork_player(self) -> Player:
        """Creates the player of a branch that forks from this one."""
        return Player(
            self.run,
            depth=self.player.depth + 1,
            waits=Waits(self.player.waits, self.player.waits.last),
        )

    def restore_text(
        self,
        text: FinishedText,
        turn: tuple[str, int] | None,
        earlier: tuple[FinishedText, ...],
    ) -> None:
        """Restores the text of an earlier run. Arguments are those of `Transcript.restore_text`."""
        self.player.transcript.restore_text(text, turn, earlier)
        self.blocks.restore_turns(
            tuple(message.role for message in text.messages), turn and turn[0], text.suffixes
        )

    def replace_text(self, text: FinishedText, compaction: Compaction | None = None) -> None:
        """Replaces the text with a shorter one, which the backend treats as a new text. No turn,
        grammar or scope may be open, and everything queued must have been executed.
        """
        before = self.player.pushed
        self.player.play_or_queue(ReplaceOp(text, compaction))
        roles = tuple([message.role for message in text.messages])
        self.blocks = OpenBlocks(roles, None, text.suffixes, compacted=True)
        now = self.player.pushed
        if before is None or now is None:
            return
        if before.path or self.player.children:  # others may add to that program
            self.run.later_programs.append(before.program)
        else:
            close_when_done(self.player, before.program)
        if not self.run.body_open:
            close_when_done(self.player, now.program)

    def notify_listener(self, event: str, children: Sequence[Player] = ()) -> None:
        """Queues an event for the backend's listener, if the listener wants this kind of event. The
        event is sent once everything queued before it has been executed.
        """
        listener = self.backend.event_listener
        if listener is not None and event in listener.events:
            self.player.play_or_queue(
                EventOp(
                    event,
                    listener.threads,
                    partial(listener.notify_event, event, self.player, children),
                )
            )

    def join(self, children: list[Branch], mode: JoinMode, where: Location | None) -> None:
        """Joins forked branches. With mode "concate_and_append", appends the texts that they have
        added so far.
        """
        if mode == "concate_and_append" and any(child.blocks.compacted for child in children):
            raise ProgramError(
                "the text of a compacted branch can't be appended: it no longer continues the text at the fork.",
                hint="Join the values, group.join(), or add the texts yourself.",
                where=where,
            )
        players = [child.player for child in children]
        appended = (
            [player.read_when_played(pieces_since_fork, where) for player in players]
            if mode == "concate_and_append"
            else []
        )
        if mode == "concate_and_append":
            self.blocks.matcher = None
        for player in players:
            player.claim_for_join(self.player.depth)
        self.player.play_or_queue(JoinOp(Join(mode=mode, where=where), players, appended))

    def mark(self, where: Location | None) -> BranchSnapshot:
        """Sets a mark and returns a snapshot for `roll_back`."""
        self.player.prepare_for_addition(where)
        mark = BranchMark(
            children=len(self.player.children), cancelled=self.player.waits.cancelled is not None
        )
        self.player.play_or_queue(MarkOp(mark, back=False))
        return BranchSnapshot(mark, self.names.snapshot_names(), self.blocks.copy())

    @contextlib.contextmanager
    def restored_on_error(self, where: Location | None) -> Iterator[None]:
        """Restores the branch if the block raises. Text that was streamed is not retracted, and a
        branch that was stopped stays stopped.
        """
        before = self.mark(where)
        try:
            yield
        except BaseException:
            with contextlib.suppress(SglError):
                self.roll_back(before, where, streamed=True)
            raise

    def roll_back(
        self, to: BranchSnapshot, where: Location | None, *, streamed: bool = False
    ) -> None:
        """Rolls back to a mark: restores the text, turns and variables of the snapshot.

        Args:
            streamed: whether text that was already streamed may be rolled back.
        """
        _check_rollback(self.player, where, streamed=streamed)
        _end_branches(self.player.children[to.mark.children :], where)
        self.player.roll_back_to(to.mark)
        self.names.remove_declarations_after(
            to.names, max((self.player.waits.claims or {}).values(), default=0)
        )
        self.blocks = to.blocks.copy()
        self.player.later = None  # it contains text that the rollback removes

    def end_body(self) -> None:
        """Marks the end of the body: no more names will be declared, and the text is complete."""
        self.run.body_open = False
        if self.player.pushed is not None:
            programs = (*self.run.later_programs, self.player.pushed.program)
            self.run.later_programs = []
            for program in dict.fromkeys(programs):
                close_when_done(self.player, program)
        if self.names.awaited or self.player.children or self.player.log is not None:
            for player in self.player.tree():
                player.names.fail_promises(partial(unknown_variable_error, player))
                if player.log is not None:
                    player.log.awaited = Place(player.waits, player.waits.last)
                    player.play_or_queue(ReadOp(Variable(), player.log.close))
        self.notify_listener("end_program")
        if self.run.body_end is not None:
            self.run.end_events()
            self.run.body_end.set(None)

    def abandon(self, error: BaseException) -> None:
        """Stops all branches because the body raised `error`. The error is passed on to the caller
        of the body or, in a streamed run, to the reader of the stream.
        """
        if isinstance(error, SglError) and error.where is None:
            error.where = find_raise_location(error)
        if not isinstance(error, Exception):
            error = RequestAbortedError(f"the program was interrupted by {type(error).__name__}.")
        for player in self.player.tree():
            player.names.cut = True
        streams = self.run.settings.stream
        ended = copy_as_sgl_error(error, find_raise_location(error))
        if streams and not isinstance(error, RequestTimeoutError | BudgetError):
            cancel_tree(self.player, ended, reported=False, ends=True)
        else:  # what has come is in the error's state
            self.player.stop(ended, reported=not streams)
        self.run.stop_inner_runs(ended, final=self.player.stopped is not None)

    def stop(self, error: SglError, *, waited: bool = True) -> None:
        """Cancels the branch and the branches forked from it. Answers that someone has waited for
        are kept. All others fail with the error, even if they have arrived, and so does anything
        added later. Stopping the main branch also stops the programs that the body runs.

        Args:
            waited: False to keep nothing, not even answers that were waited for.
        """
        cancel_tree(self.player, error, waited=waited)
        if not self.path:
            self.run.stop_inner_runs(error, final=self.player.stopped is not None)

    # -------------------------------------------------------------------------------------- reading

    def read_when_played(
        self, what: Callable[[Player], UserValue], where: Location | None = None
    ) -> Variable:
        """Returns a variable that is set to `what(player)` once everything queued so far has been
        executed.
        """
        if self.names.gone is not None:
            self.names.raise_if_removed(where)
        return self.player.read_when_played(what, where)


def _check_rollback(player: Player, where: Location | None, *, streamed: bool) -> None:
    """Checks that a branch can roll back.

    Raises:
        ProgramError: the run is streamed, and `streamed` is False.
        RequestAbortedError: a rollback has removed the fork of the branch.
        SglError: the failure of the branch. Raised if the branch was permanently stopped, or
            if the run's deadline has passed.
    """
    player.names.raise_if_removed(where)
    if player.log is not None and not streamed:
        raise ProgramError(
            "text that was already streamed can't be rolled back.",
            hint="Run without stream=True.",
            where=where,
        )
    deadline = player.run.deadline
    over = player.stopped is not None or (deadline is not None and time.monotonic() >= deadline)
    # else a body that retries until it succeeds would never end
    if over and player.failure is not None:
        raise copy_as_sgl_error(player.failure, where)


def _end_branches(players: Sequence[Player], where: Location | None) -> None:
    """Ends branches because the rollback at `where` removes their fork. All later reads of these
    branches and additions to them fail.
    """
    for child in players:
        for each in child.tree():
            each.names.remove_all(
                RequestAbortedError(
                    f"this branch has ended: the rollback at {where} removed its fork.",
                    hint="Fork again after the rollback.",
                )
            )


def find_raise_location(error: BaseException) -> Location | None:
    """Returns the deepest line of the user's code in an exception's traceback. If there is none,
    returns the deepest line of a library. Returns None if all of the traceback is in this package.
    """
    trace = error.__traceback__
    found = None
    while trace is not None:
        frame = trace.tb_frame
        if not frame.f_globals.get("__name__", "").startswith("sglang_lite.") and not (
            found and is_library(trace)
        ):
            code = frame.f_code
            found = Location(
                code.co_filename, trace.tb_lineno or code.co_firstlineno, code.co_qualname
            )
        trace = trace.tb_next
    return found


_MAX_CODE = 1024  # tokens of a program, unless max_tokens is set


def _with_tools(own: SglGen, tools: Toolbox, backend: Backend) -> SglGen:
    """Returns the generation with its tool calls in the format that the backend's model uses."""
    if (family := backend.tool_family()) is None:
        return own
    spelled = tools.value_type(family)
    node = msgspec.structs.replace(own.node, constraint=spelled.constraint)
    return msgspec.structs.replace(own, node=node, value_type=spelled)


def _with_grammar_of_code(own: SglGen, backend: Backend) -> SglGen:
    """Returns the generation of a program. Drops the grammar if the backend can't enforce it, which
    is safe because the program is parsed anyway.
    """
    if Lark in backend.capabilities.constraints:
        return own
    return msgspec.structs.replace(own, node=msgspec.structs.replace(own.node, constraint=None))


def _make_gen_node(
    branch: Branch,
    own: SglGen,
    backend: Backend,
    path: str,
    where: Location | None,
    *,
    shows_tools: bool,
) -> Gen:
    """Builds the node of a generation.

    Args:
        backend: backend that answers it.
        path: path of the node in the program's tree.
        shows_tools: whether the prompt describes the generation's tools.

    Raises:
        ProgramError: `repair` is set inside a grammar.
        CapabilityError: the backend can't do it.
    """
    run = branch.run
    blocks = branch.blocks
    later = branch.player.later is not None
    reasoning = own.options.reasoning
    constraint = own.node.constraint
    stops = tuple[str, ...]()
    kinds = backend.capabilities.constraints
    if isinstance(constraint, Number) and (
        Number not in kinds or (reasoning is not None and InOrder in kinds)
    ):
        if reasoning is None:
            constraint = number_as_regex(constraint)
            stops = NUMBER_STOPS
        else:  # a stop would end the reasoning
            constraint = number_as_regex(constraint, TERMINATORS)
    params = _merge_params(
        own, run, stops if blocks.role is None else (*stops, *run.template.stop_str), path
    )
    if reasoning is not None and constraint is not None and InOrder in kinds:
        constraint = allow_reasoning_before(reasoning, constraint)
        params = _with_reasoning_format(params, reasoning, backend)
    elif reasoning is not None and params.thinking is not UNSET:
        params = _with_reasoning_format(params, reasoning, backend)
    elif params.thinking is not UNSET and constraint is not None and InOrder in kinds:
        hint = 'Name the type of the model: gen(reasoning="qwen3").'
        raise ParameterError(
            "thinking", "the constraint begins with the answer.", hint=hint, where=where
        )
    if (
        isinstance(params.max_tokens, Unset)
        and own.is_typed
        and backend.capabilities.sizes_answers
        and not run.budgets
    ):
        params = _with_answer_limit(params, constraint)
    if isinstance(params.max_tokens, Unset) and own.options.code is not None:
        params = msgspec.structs.replace(params, max_tokens=_MAX_CODE)
    whole = constraint if blocks.grammar is None else Continuation(blocks.grammar, part=constraint)
    if whole is not None or backend.capabilities is not EVERYTHING:
        backend.check(own, Demands("gen", params, whole), where)
    if own.options.repair:
        blocks.refuse_in_grammar("repair can't be part of a grammar.", "Leave it out.", where)
        check_repair(own, backend, run.settings.retries, blocks.role, params, where)
    judged = shows_tools or _requires_caller_decision(own, run)
    return Gen(own.node.name, params, constraint, judged, later, own.node.timeout, where=where)


def _with_reasoning_format(
    params: SamplingParams, reasoning: str, backend: Backend
) -> SamplingParams:
    """Adds the model's reasoning format to the parameters, so that an engine leaves room for the
    answer after the reasoning.
    """
    known = backend.capabilities.params
    if known is not None and "reasoning_format" not in known:
        return params
    return msgspec.structs.replace(params, reasoning_format=(reasoning,))


# Parameters of a run that change no draw under a constraint.
_CHANGE_NO_DRAW = ("max_tokens", "lora_path", "return_prompt_token_ids")


def _params_of_run(own: SglGen, run: Run) -> SamplingParams:
    """Returns those parameters of the run that apply to a generation. If the generation draws
    plainly, parameters that change draws are left out. If it also has a constraint, so are
    parameters that end its text or report its tokens.
    """
    params = run.settings.params
    if not own.options.draws_plainly:
        return params
    if own.node.constraint is None:
        return msgspec.structs.replace(params, **dict.fromkeys(("n", *CHANGE_DRAWS), UNSET))
    return SamplingParams(**{name: getattr(params, name) for name in _CHANGE_NO_DRAW})


def _merge_params(own: SglGen, run: Run, stops: tuple[str, ...], path: str) -> SamplingParams:
    """Merges the node's parameters over the run's, and adds stops and the node's seed."""
    params = own.node.params
    if run.settings.params is not NO_PARAMS:
        params = merge(_params_of_run(own, run), params)
    if not stops and run.settings.seed is None:
        return params
    given = () if isinstance(params.stop, Unset) else params.stop
    seed = run.seed_for_path(path)
    return msgspec.structs.replace(
        params,
        stop=(*given, *(s for s in stops if s not in given)) or UNSET,
        seed=seed if isinstance(params.seed, Unset) else params.seed,
    )


def _with_answer_limit(params: SamplingParams, constraint: Constraint | None) -> SamplingParams:
    """Limits max_tokens to the number of tokens that the constraint's values need, if it is known."""
    limit = None if constraint is None else estimate_max_answer_tokens(constraint)
    return params if limit is None else msgspec.structs.replace(params, max_tokens=limit)


def _requires_caller_decision(own: SglGen, run: Run) -> bool:
    """Returns True if this process decides which answer a generation gets, so the backend's first
    answer may not be final. This is so if the generation has retries, a check, a program to run or
    its own backend, or if the run keeps answers from an earlier run.
    """
    options = own.options
    retries = run.settings.retries if options.retries is None else options.retries
    return (
        bool(retries)
        or options.check is not None
        or options.code is not None
        or options.backend is not None
        or run.kept is not None
    )
