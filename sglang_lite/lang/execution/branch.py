"""User's side of a branch: makes nodes of the expressions that a body adds, and checks everything that can be checked
before they are played."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_lite.constraints.number_text import TERMINATORS
from sglang_lite.errors import with_article
from sglang_lite.lang.backend.base import Backend, refusal
from sglang_lite.lang.backend.capabilities import EVERYTHING, Demands
from sglang_lite.lang.backend.planning import Planner
from sglang_lite.lang.concurrency.variables import TextLog, Variable, located
from sglang_lite.lang.execution.operations import (
    BranchMark,
    BranchSnapshot,
    EventOp,
    ForkOp,
    GenOp,
    JoinOp,
    MarkOp,
    ScopeOp,
    SelectOp,
)
from sglang_lite.lang.execution.player import Player
from sglang_lite.lang.execution.push_down import PushedBranch
from sglang_lite.lang.execution.reading import added, close_when_finished
from sglang_lite.lang.execution.repair_prompt import check_repair
from sglang_lite.lang.execution.run import Run
from sglang_lite.lang.execution.transcript import Piece
from sglang_lite.lang.expressions import (
    NUMBER_STOPS,
    SglCall,
    SglGen,
    SglImage,
    SglSelect,
    SglSeparateReasoning,
    example_choices,
    number_as_regex,
    only_picks,
)
from sglang_lite.lang.tracebacks import is_library
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
from sglang_lite.program.seeds import derived_seed
from sglang_lite.protocol import (
    UNSET,
    Choices,
    Constraint,
    Continuation,
    Image,
    InOrder,
    Location,
    Message,
    Number,
    ParameterError,
    ProgramError,
    RequestAbortedError,
    SamplingParams,
    SglError,
    Unset,
)
from sglang_lite.protocol.anything import UserValue
from sglang_lite.protocol.sampling import NO_PARAMS, merge
from sglang_lite.text.reasoning import with_reasoning

if TYPE_CHECKING:
    from sglang_lite.constraints.byte_matcher import ByteMatcher


def _turn(role: str) -> str:
    return with_article(f"{role!r} turn")


class Branch:
    """User's side of a branch: makes operations of the added expressions, and checks what can be checked before they
    are played.

    Args:
        player: plays the operations.
        path: path of the branch in the program's tree: that of the fork and the branch's index in it.
        node_count: number of nodes so far; the path of a node is that of its branch and its number.
        planner: planner of its calls, or None if each node is asked for by itself.
    """

    __slots__ = (
        "__weakref__", "_grammar", "_matcher", "_role", "_turns", "backend", "names", "node_count", "path", "planner",
        "player", "run",
    )  # fmt: skip

    def __init__(self, player: Player, path: str = "", node_count: int = 0, planner: Planner | None = None) -> None:
        self.player, self.path, self.planner = player, path, planner
        self.run, self.backend, self.names = player.run, player.backend, player.names
        self._turns: list[str] = []
        self._role: tuple[str, str] | None = None  # role and suffix of the open turn
        self._grammar: Constraint | None = None  # open grammar
        self._matcher: ByteMatcher | None = None  # its matcher, as long as all text in it is known
        self.node_count = node_count

    def submit(self, expr: Expression | str, where: Location | None = None) -> None:
        """Queues the operations of an expression. Raises the errors of misuse that can be detected without playing
        it."""
        if self.names.gone is not None or not self.run.body_open:
            self.player.before_adding(where)
        if isinstance(expr, str) and "<coroutine object " in expr:
            check_awaited("+=", expr, where)
        if type(expr) is str and self._matcher is None:  # fast path of _put_text, where most time is spent
            self.player.put(Text(expr, None, self._role is None, where=where))
        elif isinstance(expr, str):
            self._put_text(expr, where)
        elif not isinstance(expr, Expression):
            raise not_addable("+=", expr, where)
        elif self.planner is not None:
            role = None if self._role is None else self._role[0]
            for expression in self.planner.plan(list(expr.walk()), role, where):
                self.submit_one(expression, where)
        elif isinstance(expr, Expressions):
            for expression in expr.walk():
                self.submit_one(expression, where)
        else:
            self.submit_one(expr, where)

    def share(self, added: Expression, size: int) -> Expression:
        """Expression that is added to this branch and all others of an equal `size`, as the planner shares it."""
        return added if self.planner is None else self.planner.share(added, size)

    def submit_one(self, expression: Expression, where: Location | None) -> None:
        """Queues the operations of an elementary expression. Arguments as of `submit`."""
        match expression:
            case Text():
                self._put_text(expression.text, where, expression.ids, special=expression.special)
            case SglGen():
                self.player.put(self._gen(expression, where))
            case SglSelect():
                self.player.put(self._select(expression, where))
            case TurnBegin():
                self._begin_turn(expression.role, where)
            case TurnEnd():
                self._end_turn(expression.role, where)
            case ScopeBegin():
                variable = Variable(where)
                self.names.scopes[expression.name] = (*self.names.scopes.get(expression.name, ()), variable)
                self.player.put(ScopeOp(ScopeBegin(expression.name, where=where), variable))
            case ScopeEnd():
                if expression.name not in self.names.scopes:
                    raise ProgramError(f"the variable scope {expression.name!r} is not open.", where=where)
                *outer, variable = self.names.scopes.pop(expression.name)
                if outer:
                    self.names.scopes[expression.name] = tuple(outer)
                self.names.declare(expression.name, variable)
                self.player.put(ScopeOp(ScopeEnd(expression.name, where=where), variable))
            case GrammarBegin():
                self._begin_grammar(expression, where)
            case GrammarEnd():
                self._end_grammar(where)
            case SglImage():
                self._put_images(expression.load(where), where)
            case SglSeparateReasoning():
                for each in expression.marked().walk():
                    self.submit_one(each, where)
            case SglCall():
                expression.play_on(self.run.new_state(self))
            case _:
                raise ParameterError("+=", f"{expression!r} can't be executed.", where=where)

    def _put_text(
        self, text: str, where: Location | None, ids: tuple[int, ...] | None = None, *, special: bool = True
    ) -> None:
        if type(text) is not str:
            if not isinstance(text, str):
                raise not_addable("+=", text, where)
            text = str.__str__(text)  # a subclass of str is not plain data
        if self._matcher is not None:  # raises at the user's line
            self._matcher.push(text)
        self.player.put(Text(text, ids, special and self._role is None, where=where))

    def _begin_grammar(self, node: GrammarBegin, where: Location | None) -> None:
        from sglang_lite.constraints.byte_matcher import ByteMatcher

        if self._grammar is not None:
            raise ProgramError("a grammar is already open.", hint="Combine the two into one grammar.", where=where)
        if Continuation not in self.backend.capabilities.constraints:
            raise refusal(
                self.backend, node, "a grammar over several nodes", "Write all of it with one gen(constraint=…).", where
            )
        self._matcher = ByteMatcher(node.constraint)
        self._grammar = node.constraint
        self.player.put(GrammarBegin(node.constraint, where=where))

    def _end_grammar(self, where: Location | None) -> None:
        if self._grammar is None:  # a rollback has removed the grammar's beginning
            return
        ahead, self._grammar, self._matcher = self._matcher, None, None
        self.player.put(GrammarEnd(where=where))
        if ahead is not None:
            ahead.end()

    def _select(self, own: SglSelect, where: Location | None) -> SelectOp:
        node = own.node
        if self._grammar is not None and own.multi:
            raise ProgramError("select(multi=True) can't be part of a grammar.", hint="Select one by one.", where=where)
        texts = example_choices(own.choices, multi=own.multi)
        choices = Choices(texts) if isinstance(texts, tuple) else None  # a symbol, in a trace
        self.backend.check(own, Demands("select", constraint=choices, scores=not only_picks(own)), where)
        self._matcher = None
        variable = self._declare(node.name, self.next_node(), where)
        judged = own.multi or self.run.settings.retries or self.run.kept is not None
        node = msgspec.structs.replace(
            node, method=None if judged else node.method, seed=self.seed_of(variable.node), special=self._role is None,
            where=where,
        )  # fmt: skip
        return SelectOp(node, own, variable, in_body=self.run.body_open)

    def _gen(self, own: SglGen, where: Location | None) -> GenOp:
        options = own.options
        backend = self.backend if options is None or options.backend is None else options.backend
        if own.tools is not None and (family := backend.tool_family()) is not None:
            spelled = own.tools.value_type(family)
            typed_node = msgspec.structs.replace(own.node, constraint=spelled.constraint)
            own = msgspec.structs.replace(own, node=typed_node, value_type=spelled)
        constraint = own.node.constraint
        reasoning = None if options is None else options.reasoning
        kinds = backend.capabilities.constraints
        stops: tuple[str, ...] = ()
        if isinstance(constraint, Number) and (Number not in kinds or (reasoning is not None and InOrder in kinds)):
            if reasoning is None:
                constraint, stops = number_as_regex(constraint), NUMBER_STOPS
            else:  # a stop would end the reasoning
                constraint = number_as_regex(constraint, TERMINATORS)
        if reasoning is not None and constraint is not None and InOrder in kinds:
            constraint = with_reasoning(reasoning, constraint)
        path = self.next_node()
        params = self._params(own.node, stops, path)
        whole = constraint if self._grammar is None else Continuation(self._grammar, part=constraint)
        if whole is not None or backend.capabilities is not EVERYTHING:
            backend.check(own, Demands("gen", params, whole), where)
        if options is not None and options.repair:
            if self._grammar is not None:
                raise ProgramError("repair can't be part of a grammar.", hint="Leave it out.", where=where)
            check_repair(own, backend, self.run.settings.retries, self._role and self._role[0], params, where)
        kind = None if own.value_type is None else own.value_type.annotation
        thoughts = None
        if reasoning is not None:
            name = f"{own.node.name}_reasoning_content" if own.node.name is not None else None
            thoughts = self._declare(name, path, where)
        variable = self._declare(own.node.name, path, where, kind)
        shows_tools = own.tools is not None and self._role is not None and self._role[0] == "assistant"
        judged, later = shows_tools or _judged(own, self.run), self.player.later is not None
        node = Gen(own.node.name, params, constraint, judged, later, own.node.timeout, where=where)
        self._matcher = None
        return GenOp(node, own, variable, thoughts=thoughts, shows_tools=shows_tools, in_body=self.run.body_open)

    def _params(self, node: Gen, more: tuple[str, ...], path: str) -> SamplingParams:
        """Parameters of the node over those of the run, with `more` stops and those of the open turn's template."""
        params, seed = node.params, self.seed_of(path)
        if self.run.settings.params is not NO_PARAMS:
            params = merge(self.run.settings.params, params)
        if self._role is not None:
            more += tuple(self.run.template.stop_str)
        return _completed(params, more, seed) if more or seed is not UNSET else params

    def _put_images(self, images: Sequence[Image], where: Location | None) -> None:
        if self._grammar is not None:
            raise ProgramError("an image can't be part of a grammar.", hint="Add it before.", where=where)
        if not self.backend.capabilities.images:
            raise refusal(self.backend, "image", "images", "Describe what it shows, or use another backend.", where)
        token = getattr(self.run.template, "image_token", "")
        for image in images:
            self.player.put(ImagePart(image, token, where=where))
        self.tell("fill_image")

    def _declare(self, name: str | None, node: str, where: Location | None, kind: Any = None) -> Variable:
        variable = Variable(where, self.run.made)
        variable.node = node
        if name is not None:
            variable.kind = kind  # before the name is declared: readers wait for the declaration
            if self.player.log is not None or self.player.later is not None:
                variable.log = TextLog()
            self.names.declare(name, variable)
        return variable

    def next_node(self) -> str:
        """Path of the next node in the program's tree."""
        self.node_count += 1
        return f"{self.path}/{self.node_count}"

    def seed_of(self, node: str) -> int | Unset:
        seed = self.run.settings.seed
        return UNSET if seed is None else derived_seed(seed, node)

    def _begin_turn(self, role: str, where: Location | None) -> None:
        if self._grammar is not None:
            raise ProgramError(f"{_turn(role)} begins inside a grammar.", hint="End that one first.", where=where)
        if self._role is not None:
            problem = f"{_turn(role)} begins inside {_turn(self._role[0])}."
            raise ProgramError(problem, hint="End that one first.", where=where)
        try:
            template = self.run.template
            system = template.default_system_prompt
            if system and not self._turns and role != "system":
                self._begin_turn("system", where)
                self.player.put(Text(system, where=where))
                self._end_turn("system", where)
            prefix, suffix = template.get_prefix_and_suffix(role, [{"role": r, "content": ""} for r in self._turns])
        except Exception as error:  # templates are the user's code
            raise located(error, where) from error
        self._role = role, suffix
        self.player.put(Text(prefix, where=where))
        self.player.put(TurnBegin(role, where=where))

    def _end_turn(self, role: str, where: Location | None) -> None:
        if self._grammar is not None:
            raise ProgramError(f"{_turn(role)} ends inside a grammar.", hint="End that one first.", where=where)
        if self._role is None or self._role[0] != role:
            found = "no turn is open" if self._role is None else f"the open turn is {self._role[0]!r}"
            raise ProgramError(f"{_turn(role)} ends, but {found}.", where=where)
        _, suffix = self._role
        self._role = None
        self._turns.append(role)
        self.player.put(TurnEnd(role, where=where))
        self.player.put(Text(suffix, where=where))

    def fork(self, size: int = 1, where: Location | None = None) -> list[Branch]:
        """Makes `size` branches that continue from here independently."""
        self.player.before_adding(where)
        node = self.next_node()
        planners = [None] * size if self.planner is None else self.planner.fork(size)
        children = [type(self)(self._forked(), f"{node}.{i}", planner=planners[i]) for i in range(size)]
        self.copy_state_to(children)
        players = [child.player for child in children]
        if size > 1:
            self.tell("commit_lazy_operations")
        self.player.put(ForkOp(Fork(((),) * size, where=where), players))
        self.tell("fork_program", players)
        return children

    def _forked(self) -> Player:
        """Player of a branch that is forked from this one."""
        pushed = self.player.pushed
        return Player(self.run, pushed and PushedBranch(pushed.program, pushed), self.player.depth + 1)

    def copy_state_to(self, children: Iterable[Branch]) -> None:
        """Copies the submitting side's state (variables, turns, open grammar) to branches forked from this one."""
        here = self._snapshot()
        for child in children:
            self.player.children.append(child.player)
            child.names.fork_from(self.names)
            child.continue_from(here)

    def continue_from(self, place: BranchSnapshot) -> None:
        """Takes over the turns and the grammar that were open at a place."""
        self._turns, self._role = list(place.turns), place.role
        self._grammar, self._matcher = place.grammar, place.matcher and place.matcher.copy()

    def _snapshot(self) -> BranchSnapshot:
        return BranchSnapshot(
            BranchMark(children=len(self.player.children)), self.names.at_mark(), list(self._turns), self._role,
            self._grammar, self._matcher and self._matcher.copy(),
        )  # fmt: skip

    def restore(
        self, pieces: Sequence[Piece], messages: Sequence[Message], turn: tuple[str, int] | None = None
    ) -> None:
        """Takes over the text of an earlier run; arguments as of `Transcript.restore`."""
        self.player.transcript.restore(pieces, messages, turn)
        self._turns = [message.role for message in messages]
        if turn is not None:
            before = [{"role": role, "content": ""} for role in self._turns]
            self._role = turn[0], self.run.template.get_prefix_and_suffix(turn[0], before)[1]

    def continue_on(self, backend: Backend) -> None:
        """Makes another backend play everything that is added from now on; as `Player.continue_on`."""
        self.backend, self.planner = backend, self.run.planner(backend)
        self.player.continue_on(backend)

    def tell(self, event: str, children: Sequence[Player] = ()) -> None:
        """Tells the backend's listener of an event, if it listens, after everything queued before has been played."""
        listener = self.backend.event_listener
        if listener is not None and event in listener.events:
            self.player.put(EventOp(event, listener.threads, partial(listener.call, event, self.player, children)))

    def join(self, children: list[Branch], mode: JoinMode, where: Location | None) -> None:
        """Ends forked branches. With mode "concate_and_append", appends the texts that they have added until now."""
        players = [child.player for child in children]
        appended = [player.read(added, where) for player in players] if mode == "concate_and_append" else []
        node = Join(mode=mode, where=where)
        if self.player.pushed is not None:
            node = self.player.pushed.join(node, [player.pushed for player in players])
        if mode == "concate_and_append":
            self._matcher = None
        for player in players:
            player.claim(self.player.depth)
        self.player.put(JoinOp(node, players, appended))

    def mark(self, where: Location | None) -> BranchSnapshot:
        """Sets a mark, and returns a snapshot for `roll_back`."""
        self.player.before_adding(where)
        place = self._snapshot()
        self.player.put(MarkOp(place.mark, back=False))
        return place

    def roll_back(self, to: BranchSnapshot, where: Location | None) -> None:
        """Goes back to a mark: restores the text, turns and variables of the snapshot."""
        _check_rollback(self.player, where)
        _end_branches(self.player.children[to.mark.children :], where)
        self.player.go_back(to.mark)
        self.names.go_back(to.names)
        self.continue_from(to)
        self.player.later = None  # shows what the rollback removes

    def end(self) -> None:
        """Notes that the body has ended: undeclared names will never be declared, and the text is complete."""
        self.run.body_open = False
        if self.player.pushed is not None:
            close_when_finished(self.player, self.player.pushed.program)
        if self.names.awaited or self.player.children or self.player.log is not None:
            for player in self.player.tree():
                player.declare_no_more()
        self.tell("end_program")

    def abandon(self, error: BaseException) -> None:
        """Stops all branches because the body has raised `error`. The body's caller receives the error, except in a
        stream, where only its reader does."""
        if isinstance(error, SglError) and error.where is None:
            error.where = raised_at(error)
        if not isinstance(error, Exception):
            error = RequestAbortedError(f"the program was interrupted by {type(error).__name__}.")
        for player in self.player.tree():
            player.names.cut = True
        self.stop(located(error, raised_at(error)), reported=not self.run.settings.stream)

    def stop(self, error: SglError, *, reported: bool = True) -> None:
        """Fails the branch and the branches forked from it, and cancels the work of their backends. The main branch
        also stops the programs that its body runs by itself.

        Args:
            reported: whether the caller already knows of the error, so that it need not be logged.
        """
        self.player.stop(error, reported=reported)
        if not self.path:
            self.run.stop_inside(error, final=self.player.stopped is not None)

    # ----------------------------------------------------------------------------------------- reading

    def read(self, what: Callable[[Player], UserValue], where: Location | None = None) -> Variable:
        """Variable that is set to `what(player)` when everything queued so far has been played."""
        self.names.check(where)
        return self.player.read(what, where)


def _check_rollback(player: Player, where: Location | None) -> None:
    """Checks that a branch can go back.

    Raises:
        ProgramError: the run is streamed.
        RequestAbortedError: a rollback has removed the fork of the branch.
        SglError: the branch was stopped for good, or has failed and its deadline has passed; the error is its failure.
    """
    player.names.check(where)
    if player.log is not None:
        raise ProgramError(
            "text that was already streamed can't be rolled back.", hint="Run without stream=True.", where=where
        )
    deadline = player.run.deadline
    over = player.stopped is not None or (deadline is not None and time.monotonic() >= deadline)
    if over and player.failure is not None:  # else a body that retries until it succeeds would never end
        raise located(player.failure, where)


def _end_branches(players: Sequence[Player], where: Location | None) -> None:
    """Makes all reads of branches and additions to them raise an error, as the rollback at `where` removes their
    fork."""
    for child in players:
        for each in child.tree():
            each.names.end(
                RequestAbortedError(
                    f"this branch has ended: the rollback at {where} removed its fork.",
                    hint="Fork again after the rollback.",
                )
            )


def raised_at(error: BaseException) -> Location | None:
    """Deepest line of the user's code in an exception's traceback; a line of a library if the traceback has no other.
    None if all of it is in this package."""
    trace, found = error.__traceback__, None
    while trace is not None:
        frame = trace.tb_frame
        if not frame.f_globals.get("__name__", "").startswith("sglang_lite.") and not (found and is_library(trace)):
            found = Location(frame.f_code, trace.tb_lasti)
        trace = trace.tb_next
    return found


def _judged(own: SglGen, run: Run) -> bool:
    """Returns True if the caller's Python decides on a generation's result: by retries, a check, another backend, or
    because an earlier run may have the answer."""
    if own.options is None or run.kept is not None:
        return bool(run.settings.retries) or run.kept is not None
    retries = run.settings.retries if own.options.retries is None else own.options.retries
    return bool(retries) or own.options.check is not None or own.options.backend is not None


def _completed(params: SamplingParams, stops: tuple[str, ...], seed: int | Unset) -> SamplingParams:
    own = () if isinstance(params.stop, Unset) else params.stop
    return msgspec.structs.replace(
        params,
        stop=(*own, *(s for s in stops if s not in own)) or UNSET,
        seed=seed if isinstance(params.seed, Unset) else params.seed,
    )
