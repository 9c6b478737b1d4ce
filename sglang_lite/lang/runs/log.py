"""Reads the log of a run: its nodes with their questions, answers and times. Traces, saved runs and
reruns are built from it.
"""

from __future__ import annotations

import math
import reprlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from sglang_lite.lang.backend.base import Backend, name_of
from sglang_lite.lang.execution.base_player import BasePlayer
from sglang_lite.lang.execution.kept import Question
from sglang_lite.lang.execution.operations import (
    AnswerOp,
    ForkOp,
    GenOp,
    JoinOp,
    MarkOp,
    Op,
    ReplaceOp,
    ScopeOp,
    SelectOp,
)
from sglang_lite.lang.execution.program_log import CALLS
from sglang_lite.lang.execution.run import BoundCall
from sglang_lite.lang.execution.transcript import text_without_images
from sglang_lite.lang.expressions import MULTI_SEPARATOR
from sglang_lite.lang.media import redact_media, thumbnail
from sglang_lite.lang.runs.trace import Trace
from sglang_lite.notebook.markup import shorten_text
from sglang_lite.program.nodes import (
    Gen,
    GrammarBegin,
    GrammarEnd,
    ImagePart,
    ScopeBegin,
    Text,
    TurnBegin,
    TurnEnd,
)
from sglang_lite.protocol import (
    Attempt,
    Dropped,
    Generation,
    Location,
    Media,
    Selection,
    SglError,
    TraceHead,
    TraceNode,
)
from sglang_lite.protocol.sampling import adapter_of

_MAX_CALL = 2000  # characters of a call and its result
# reasons for a cache miss that a backend reports if the text was replaced
_REASONS_OF_ANOTHER_TEXT = ("changed", "never_seen", "page")


@dataclass(slots=True)
class _TextSoFar:
    """Text of a branch before the next node that will be read.

    Attributes:
        question: the text, as the beginning of the next node's question.
        unknown: texts whose cache status is not known yet.
        compacted: whether a compaction has replaced the text and no generation has followed yet.
    """

    question: Question = field(default_factory=Question)
    unknown: list[_Entry] = field(default_factory=list)
    compacted: bool = False

    def copy(self) -> _TextSoFar:
        return _TextSoFar(self.question.copy(), list(self.unknown), self.compacted)


@dataclass(slots=True)
class _Entry:
    """Node of a trace that is being built.

    Attributes:
        fields: fields of its record.
        image: the image if the node is one, else None.
        backend: backend that generated its tokens, or None.
        cached: number of leading characters of its text that were cached, or None if unknown.
        children: branches that were forked here.
        text: text before the fork.
    """

    fields: dict[str, Any]
    image: Media | None = None
    backend: Backend | None = None
    cached: int | None = None
    children: Sequence[BasePlayer] = ()
    text: _TextSoFar | None = None

    def to_trace_node(self, *, thumbnails: bool) -> TraceNode:
        small = thumbnail(self.image) if thumbnails and self.image is not None else ""
        texts = self._decode_token_texts() if thumbnails else ()
        return TraceNode(**self.fields, cached=self.cached or 0, thumbnail=small, token_texts=texts)

    def _decode_token_texts(self) -> tuple[str, ...]:
        text = None if self.backend is None else self.backend.token_text
        if text is None or not self.fields["results"]:
            return ()
        return tuple(map(text, self.fields["results"][0].token_ids))


def build_branch_trace(player: BasePlayer, *, thumbnails: bool = True) -> Trace:
    """Returns the trace of a branch, as far as it has been played, and of the branches forked from
    it.

    Args:
        thumbnails: whether to decode images for thumbnails, and to include the texts of tokens.
    """
    run = player.run
    nodes = [entry.to_trace_node(thumbnails=thumbnails) for entry in list(_read_entries(player))]
    seconds = max((node.end for node in nodes), default=0.0)
    started = time.time() - (time.perf_counter() - run.account.started)
    model = run.backend.get_model_name()
    arguments = tuple(_argument_texts(run.called))
    return Trace(
        TraceHead(len(nodes), seconds, name_of(run.backend), model, started, arguments),
        tuple(nodes),
    )


class _Shortened(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxstring = 1000
        self.maxother = 200
        self.maxlong = 200
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = 20


def _argument_texts(called: BoundCall | None) -> Iterator[tuple[str, str]]:
    """Yields a program's arguments by name, as texts of bounded length."""
    if called is None:
        return
    shortened = _Shortened()
    try:
        bound = called.program.signature.bind(*called.args, **called.kwargs)
    except TypeError:  # a loaded run of a program whose parameters have changed
        return
    for name, value in bound.arguments.items():
        yield name, shorten_text(value, 2000) if isinstance(value, str) else shortened.repr(value)


def collect_branch_answers(player: BasePlayer) -> list[TraceNode]:
    """Returns the generations and selections of the program's body in a branch and in the branches
    forked from it. They contain only what a rerun needs. Times, lines of code and errors are left
    out; errors may contain secrets.
    """
    nodes = (each for each in build_branch_trace(player, thumbnails=False).nodes if each.node)
    return [
        TraceNode(each.kind, name=each.name, results=each.results, node=each.node, asked=each.asked)
        for each in nodes
    ]


def _read_entries(player: BasePlayer) -> Iterator[_Entry]:
    """Yields the nodes in reading order: the nodes of a fork's branches come directly after the
    fork.
    """
    open_branches = [iter(_Reader(player, (), _TextSoFar(), rejected=False, now=0.0).entries)]
    while open_branches:
        entry = next(open_branches[-1], None)
        if entry is None:
            open_branches.pop()
            continue
        yield entry
        fields = entry.fields
        for i, child in reversed(list(enumerate(entry.children))):
            assert entry.text is not None
            path = (*fields["path"], fields["place"], i)
            reader = _Reader(
                child, path, entry.text.copy(), rejected=fields["rejected"], now=fields["end"]
            )
            open_branches.append(iter(reader.entries))


class _Reader:
    """Reader that builds the nodes of a branch from its log.

    Args:
        path: path of the branch.
        text: text before the branch's own, which the reader extends.
        rejected: whether the branch's fork was rolled back.
        now: time of the fork, in seconds from the run's start.

    Attributes:
        entries: nodes of the branch.
    """

    def __init__(
        self,
        player: BasePlayer,
        path: tuple[int, ...],
        text: _TextSoFar,
        *,
        rejected: bool,
        now: float,
    ) -> None:
        self.entries: list[_Entry] = []
        self._path = path
        self._text = text
        self._rejected = rejected
        self._now = now
        # number of nodes before the mark, and the text
        self._marks: dict[int, tuple[int, _TextSoFar]] = {}
        self._started = player.run.account.started
        self._backend = player.run.backend
        # stopped operations may be listed twice
        for op in {id(op): op for op in player.played[:]}.values():
            self._read_op(op)
        if player.failure is not None and self.entries and self.entries[-1].fields["error"] is None:
            self.entries[-1].fields["error"] = _error_summary(player.failure)

    def _read_op(self, op: Op) -> None:
        match op:
            case Text() if not op.text:
                return
            case Text():
                self._text.unknown.append(self._add_entry("text", op.where, text=op.text))
            case ImagePart():
                url = redact_media(op.image).url
                entry = self._add_entry(
                    "image", op.where, images=(op.image,), text=op.text, image=url
                )
                entry.image = op.image
                self._text.unknown.append(entry)
            case TurnBegin() | TurnEnd():
                self._add_entry(
                    "turn_begin" if isinstance(op, TurnBegin) else "turn_end",
                    op.where,
                    name=op.role,
                )
            case GenOp():
                self._read_generation(op)
            case SelectOp():
                self._read_selection(op)
            case ForkOp():
                entry = self._add_entry("fork", op.node.where)
                entry.children = op.children
                entry.text = self._text.copy()
            case JoinOp():
                self._read_join(op)
            case ScopeOp(node):
                kind = "scope_begin" if isinstance(node, ScopeBegin) else "scope_end"
                self._add_entry(kind, node.where, name=node.name)
            case MarkOp():
                self._read_mark_op(op)
            case ReplaceOp():
                self._read_replacement(op)
            case GrammarBegin():
                self._add_entry("grammar_begin", None)
                self._text.question.grammar = op.constraint, ""
            case GrammarEnd():
                self._add_entry("grammar_end", None)
                self._text.question.grammar = None

    def _add_entry(
        self, kind: str, where: Location | None, images: Sequence[Media] = (), **fields: Any
    ) -> _Entry:
        fields = {
            "start": self._now,
            "end": self._now,
            "error": None,
            "rejected": self._rejected,
            **fields,
        }
        place = len(self.entries)
        entry = _Entry({"kind": kind, "path": self._path, "place": place, "where": where, **fields})
        self.entries.append(entry)
        self._text.question.add_question_text(fields.get("text", ""), images)
        self._now = max(self._now, fields["end"])
        return entry

    def _read_replacement(self, op: ReplaceOp) -> None:
        """Reads the operation that begins or ends a compaction. Only the end adds a node."""
        done = op.compaction
        pieces = op.text.pieces
        images = [piece for piece in pieces if isinstance(piece, Media)]
        self._text = _TextSoFar()
        if done is None:
            self._text.question.add_question_text(text_without_images(pieces), images)
            return
        text = text_without_images(done.dropped)
        dropped = Dropped(
            done.turns,
            self._backend.count_tokens(text),
            text,
            sum(isinstance(piece, Media) for piece in done.dropped),
        )
        entry = self._add_entry(
            "compact",
            done.node.where,
            images,
            name=done.name,
            text=text_without_images(pieces),
            dropped=dropped,
        )
        self._text = _TextSoFar(self._text.question, [entry], compacted=True)

    def _with_reason(self, found: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the results of the next node. If a compaction replaced the text before the node,
        the first result names that as the reason why its prompt was not cached.
        """
        miss = found[0].meta.get("cache_miss") if found else None
        if not self._text.compacted or not found:
            return found
        self._text.compacted = False
        if not isinstance(miss, dict) or miss.get("reason") not in _REASONS_OF_ANOTHER_TEXT:
            return found
        meta = {**found[0].meta, "cache_miss": {**miss, "reason": "compacted"}}
        return msgspec.structs.replace(found[0], meta=meta), *found[1:]

    def _read_generation(self, op: GenOp) -> None:
        found = self._with_reason(_list_op_results(op))
        text = ""
        forced = tuple[tuple[int, int], ...]()
        if found:
            spans = () if _has_own_backend(op) else found[0].spans
            text = "".join(span.text for span in spans) if spans else found[0].text
            forced = _forced_ranges(found[0], len(text))
            if not op.has_own_prompt:
                self._set_cache_status(found[0])
        entry = self._add_answer_entry("gen", op, found, text=text, forced=forced)
        entry.backend = op.expression.options.backend or self._backend
        if op.expression.options.code is not None:
            self._add_calls(op, found)

    def _add_calls(self, op: GenOp, found: Sequence[Generation]) -> None:
        """Adds the tool calls made by a generation's code. Calls from failed attempts are marked as
        rejected.
        """
        failed = [answer for attempt in op.failed_attempts for answer in attempt.answers]
        for answer in (*failed, *found):
            for call in answer.meta.get(CALLS, ()):
                arguments = ", ".join(f"{k}={v!r}" for k, v in dict(call["arguments"]).items())
                shown = f"{call['tool']}({arguments}) = {call['result']!r}"
                self._add_entry(
                    "call",
                    op.node.where,
                    name=call["tool"],
                    start=call["start"],
                    end=call["end"],
                    call=shorten_text(shown, _MAX_CALL),
                    error=call["error"],
                    rejected=self._rejected or answer not in found,
                )

    def _read_selection(self, op: SelectOp) -> None:
        found = self._with_reason(_list_op_results(op))
        text = ""
        if found:
            self._set_cache_status(found[0])
            text = found[0].picked
            if op.expression.multi:
                text = "".join(
                    MULTI_SEPARATOR.join(picked) for picked in op.variable.value_so_far()
                )
        self._add_answer_entry("select", op, found, text=text)

    def _add_answer_entry(
        self, kind: str, op: AnswerOp, found: tuple[Any, ...], **fields: Any
    ) -> _Entry:
        error = op.variable.error_or_none()
        end = max(op.ended - self._started, self._now) if op.ended else self._now
        start = end
        if op.began:
            start = op.began - self._started
        elif found:
            start = end - found[0].usage.total_s
        attempts = op.failed_attempts
        if not found and attempts and error is not None and not attempts[-1].answers:
            attempts = attempts[:-1]  # the node's error is the same
        return self._add_entry(
            kind,
            op.node.where,
            name=op.node.name,
            start=min(max(start, self._now), end),
            end=end,
            results=found,
            attempts=tuple(Attempt(_error_summary(each.error), each.answers) for each in attempts),
            error=None if error is None else _error_summary(error),
            adapter=adapter_of(
                op.node.params.lora_path if isinstance(op.node, Gen) else op.node.lora_path
            ),
            node=op.variable.node if op.in_body else "",
            asked=""
            if not op.in_body or _has_own_backend(op)
            else self._text.question.digest_for(op),
            **fields,
        )

    def _read_join(self, op: JoinOp) -> None:
        pieces = [
            piece
            for each in op.added
            if each.done and each.error_or_none() is None
            for piece in each.result()
        ]
        images = [piece for piece in pieces if isinstance(piece, Media)]
        text = text_without_images(pieces)
        ends = [
            each.ended
            for child in op.children
            for each in child.played
            if isinstance(each, AnswerOp)
        ]
        end = max([self._now, *(at - self._started for at in ends)]) if op.added else self._now
        self._add_entry("join", op.node.where, images, text=text, end=end)

    def _read_mark_op(self, op: MarkOp) -> None:
        if not op.back:
            self._marks[id(op.mark)] = len(self.entries), self._text.copy()
            self._add_entry("mark", None)
            return
        count, text = self._marks.get(id(op.mark), (len(self.entries), self._text))
        for entry in self.entries[count + 1 :]:
            entry.fields["rejected"] = True
        self._text = text.copy()
        self._add_entry("rollback", None)

    def _set_cache_status(self, result: Generation | Selection) -> None:
        """Uses a result to set how many characters of each preceding text were cached, where this
        is still unknown. If several branches continue a text, the smallest number counts, because
        text that any branch had to compute was not cached.
        """
        usage = result.usage
        miss = result.meta.get("cache_miss")
        uncached: Any = math.inf  # number of characters that were not cached
        if isinstance(miss, dict) and isinstance(miss.get("left"), int):
            uncached = miss["left"]
        elif (
            miss is None and usage.cached_tokens and usage.cached_tokens >= usage.prompt_tokens - 1
        ):
            uncached = 0
        for entry in reversed(self._text.unknown):
            length = len(entry.fields["text"])
            cached = int(length - min(uncached, length))
            entry.cached = cached if entry.cached is None else min(entry.cached, cached)
            uncached = max(uncached - length, 0)
        self._text.unknown = []


def _has_own_backend(op: AnswerOp) -> bool:
    return isinstance(op, GenOp) and op.expression.options.backend is not None


def _list_op_results(op: AnswerOp) -> tuple[Any, ...]:
    """Returns the samples of a generation or the steps of a selection; none if it has failed."""
    record = op.variable.record
    return () if record is None else tuple(record) if isinstance(record, list) else (record,)


def _forced_ranges(generation: Generation, length: int) -> tuple[tuple[int, int], ...]:
    """Returns the parts of the text that the grammar forced, as (start, end) character offsets."""
    spans = generation.meta.get("forced_text")
    if not isinstance(spans, list | tuple):
        return ()
    return tuple((start, end) for start, end in spans if 0 <= start < end <= length)


def _error_summary(error: BaseException) -> str:
    """Returns the type, message and hint of an error. Leaves out the location, which the node has."""
    text = f"{error.message} {error.hint}".rstrip() if isinstance(error, SglError) else str(error)
    return f"{type(error).__name__}: {text}"
