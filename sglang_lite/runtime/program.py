"""Plays whole programs inside the engine: when a generation ends, the next one goes on in its slot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from sglang_lite.protocol import (
    Constraint,
    ConstraintError,
    Delta,
    ForkSegment,
    Generation,
    GenSegment,
    GrammarSegment,
    JoinSegment,
    ParameterError,
    Played,
    Program,
    ProgramError,
    ProgramResult,
    RequestAbortedError,
    Segment,
    Selection,
    SelectSegment,
    SglError,
    Span,
    TextSegment,
    Unset,
)
from sglang_lite.runtime.core import Core
from sglang_lite.runtime.grammar.base import CompiledGrammar
from sglang_lite.runtime.grammar.continuing import walked
from sglang_lite.runtime.request import Event, Request
from sglang_lite.runtime.sampling_params import resolve_params
from sglang_lite.runtime.selecting import Selecting
from sglang_lite.runtime.tokens.token_log import TokenLog

ProgramSink: TypeAlias = Callable[["Played | ProgramResult | SglError"], None]


class Player:
    """One program that is being played. After `start` everything happens on the engine's thread.

    Args:
        core: of the engine that plays it.
        program: checked here.
        log: the prompt it goes on from.
        sink: gets what each segment brings, and last a ProgramResult or an SglError.
        stream: deltas are wanted.
        namespace: of the prefix tree.

    Raises:
        ParameterError: a generation has a bad parameter, or asks for several samples.
    """

    def __init__(
        self, core: Core, program: Program, log: TokenLog, sink: ProgramSink, *, stream: bool, namespace: str
    ) -> None:
        self.core, self.stream, self.namespace = core, stream, namespace
        self.sink = sink
        self._ended = False
        self._live: set[Request] = set()
        self._selecting: set[Selecting] = set()
        self.grammars: dict[Constraint, CompiledGrammar] = {}
        self._parts, self._wholes = set[Constraint](), set[Constraint]()
        for segment in _all(program.segments):
            if isinstance(segment, GenSegment):
                resolve_params(segment.params, core.vocab_size)
                if not isinstance(segment.params.n, Unset) and segment.params.n != 1:
                    raise ParameterError("n", "a generation inside a program has one sample.", hint="Fork instead.")
                if segment.constraint is not None:
                    self._parts.add(segment.constraint)
            elif isinstance(segment, GrammarSegment) and segment.whole is not None:
                self._wholes.add(segment.whole)
        self.constraints = self._parts | self._wholes
        self._main = _Branch(self, program.segments, log, (), self._done)

    def compiled(self, grammars: dict[Constraint, CompiledGrammar]) -> None:
        """Takes its grammars, before it starts. May take long. Raises ConstraintError: one can't be enforced."""
        self.grammars = grammars
        if self._parts:
            for whole in self._wholes:
                grammars[whole].beside()

    def start(self) -> None:
        """Starts playing."""
        if not self._ended:
            self._main.go_on()

    def abort(self) -> None:
        """Ends the program with RequestAbortedError, unless it has ended."""
        self.fail(RequestAbortedError("the program was aborted."))

    def fail(self, error: SglError) -> None:
        """Ends the program, and whatever of it is under way."""
        if self._ended:
            return
        self._ended = True
        for request in list(self._live):
            self.core.loop.abort(request)
        for selecting in list(self._selecting):
            selecting.abort()
        self.sink(error)

    def submit(self, request: Request) -> None:
        self._live.add(request)
        self.core.loop.submit(request)

    def request(
        self, log: TokenLog, segment: GenSegment, within: _Within | None, sink: Callable[[Event], None]
    ) -> Request:
        """A request for a generation.

        Raises:
            ParameterError: the prompt has grown too long.
            ConstraintError: the text before it does not go on in the grammar.
        """
        request = self.core.intake.request(
            log.ids(), segment.params, sink, stream=self.stream, namespace=self.namespace
        )
        grammar = None if segment.constraint is None else self.grammars[segment.constraint]
        if within is not None:
            grammar = self.core.compiler.continued(within.grammar, within.text, grammar)
        request.matcher = None if grammar is None else grammar.matcher()
        return request

    def select(
        self,
        log: TokenLog,
        segment: SelectSegment,
        choices: Sequence[str],
        sink: Callable[[Selection | SglError], None],
    ) -> None:
        selecting: Selecting

        def ended(outcome: Selection | SglError) -> None:
            self._selecting.discard(selecting)
            sink(outcome)

        selecting = Selecting(self.core, tuple(choices), ended)
        self._selecting.add(selecting)
        selecting.start(
            log, unconditional=segment.unconditional, namespace=self.namespace, special=segment.special
        )  # fmt: skip

    def tell(self, path: tuple[int, ...], name: str | None, event: Delta | Generation | Selection) -> None:
        if not self._ended:
            self.sink(Played(path, name, event))

    def gone(self, request: Request) -> None:
        self._live.discard(request)

    def going_on(self, request: Request) -> None:
        self._live.add(request)

    @property
    def ended(self) -> bool:
        return self._ended

    def _done(self) -> None:
        if not self._ended:
            self._ended = True
            self.sink(ProgramResult(self._main.text))


@dataclass(slots=True)
class _Within:
    """A grammar that a branch is in, and the text that is there of it."""

    grammar: CompiledGrammar
    text: str

    def possible(self, choices: Sequence[str]) -> list[str]:
        """Those that go on in the grammar. Raises ConstraintError: none does."""
        found = [choice for choice in choices if self._begins(self.text + choice)]
        if not found:
            raise ConstraintError(f"none of the choices goes on in the grammar: {', '.join(map(repr, choices))}.")
        return found

    def end(self) -> None:
        """Raises ConstraintError: the text is not complete."""
        if not walked(self.grammar, self.text).complete:
            raise ConstraintError(f"the grammar is not complete at its end, after {self.text[-80:]!r}.")

    def _begins(self, text: str) -> bool:
        try:
            walked(self.grammar, text)
        except ConstraintError:
            return False
        return True


class _Branch:
    """A run of segments that are played one after another.

    Args:
        done: called when the last one has been played.
    """

    def __init__(
        self,
        player: Player,
        segments: Sequence[Segment],
        log: TokenLog,
        path: tuple[int, ...],
        done: Callable[[], None],
        within: _Within | None = None,
    ) -> None:
        self._player, self._segments, self._log, self._path, self._done = player, segments, log, path, done
        self._within = within
        self._at = 0
        self._spans: list[Span] = []
        self._children: list[_Branch] = []
        self._unfinished = 0  # of the children
        self._joining = False
        self._busy = False  # something of its own is under way, or being played right now

    @property
    def text(self) -> str:
        """What it has added."""
        return "".join(span.text for span in self._spans)

    def go_on(self) -> None:
        """Plays on as a request of its own."""
        try:
            request = self._next()
            if request is not None:
                self._player.submit(request)
        except SglError as error:
            self._player.fail(error)

    def _next(self) -> Request | None:
        """Plays up to the next generation, and returns the request for it; None when something else has to come first,
        or nothing comes any more."""
        self._busy = True
        while self._at < len(self._segments) and not self._player.ended:
            path, segment = (*self._path, self._at), self._segments[self._at]
            self._at += 1
            match segment:
                case TextSegment(text, special):
                    self._write((Span(text, special=special),))
                case GenSegment():
                    return self._generate(path, segment)
                case SelectSegment():
                    choices = segment.choices if self._within is None else self._within.possible(segment.choices)
                    self._player.select(self._log, segment, choices, partial(self._selected, path, segment))
                    return None
                case GrammarSegment(whole, text):
                    if self._within is not None:
                        self._within.end()
                    self._within = None if whole is None else _Within(self._player.grammars[whole], text)
                case ForkSegment(branches):
                    self._fork(path, branches)
                case JoinSegment():
                    if self._unfinished:
                        self._joining = True
                        return None
                    self._join()
        self._busy = False
        if not self._unfinished:
            self._done()
        return None

    def _generate(self, path: tuple[int, ...], segment: GenSegment) -> Request:
        def deliver(event: Event) -> None:
            if isinstance(event, SglError):
                self._player.gone(request)
                self._player.fail(event)
            else:
                self._player.tell(path, segment.name, event)

        def follow(generation: Generation) -> Request | None:
            self._player.gone(request)
            self._write(generation.spans)
            try:
                following = self._next()
            except SglError as error:
                self._player.fail(error)
                return None
            if following is not None:
                self._player.going_on(following)
            return following

        request = self._player.request(self._log, segment, self._within, deliver)
        request.follow = follow
        return request

    def _selected(self, path: tuple[int, ...], segment: SelectSegment, outcome: Selection | SglError) -> None:
        if isinstance(outcome, SglError):
            self._player.fail(outcome)
            return
        try:
            picked = (segment.pick or _likeliest)(outcome)
        except Exception as error:  # the caller's function
            failure = error if isinstance(error, SglError) else ProgramError(f"pick: {type(error).__name__}: {error}")
            failure.__cause__ = None if error is failure else error
            self._player.fail(failure)
            return
        self._player.tell(path, segment.name, outcome)
        self._write((Span(picked, special=segment.special),))
        self.go_on()

    def _fork(self, path: tuple[int, ...], branches: Sequence[Sequence[Segment]]) -> None:
        children = []
        for i, segments in enumerate(branches):
            within = None if self._within is None else replace(self._within)
            log = self._log.copy()
            children.append(_Branch(self._player, segments, log, (*path, i), self._child_done, within))
        self._children += children
        self._unfinished += len(children)
        for child in children:
            child.go_on()

    def _child_done(self) -> None:
        self._unfinished -= 1
        if self._unfinished:
            return
        if self._joining:
            self._joining = False
            self._join()
            self.go_on()
        elif not self._busy:
            self._done()

    def _join(self) -> None:
        for child in self._children:
            self._write(child._spans)
        self._children.clear()

    def _write(self, spans: Sequence[Span]) -> None:
        self._log.append(spans)
        self._spans += spans
        if self._within is not None:
            self._within.text += "".join(span.text for span in spans)


def _likeliest(selection: Selection) -> str:
    return max(selection.scores, key=lambda s: sum(s.logprobs) / len(s.logprobs)).text


def _all(segments: Sequence[Segment]) -> Iterator[Segment]:
    """Every segment, those inside forks too."""
    for segment in segments:
        yield segment
        if isinstance(segment, ForkSegment):
            for branch in segment.branches:
                yield from _all(branch)
