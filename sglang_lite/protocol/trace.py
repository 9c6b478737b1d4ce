"""The trace of a run: each node that was played, what came of it, when, and at what cost."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from sglang_lite.protocol.record import Record
from sglang_lite.protocol.results import Generation, Selection, Usage, total_usage

NodeKind: TypeAlias = Literal[
    "text",
    "image",
    "gen",
    "select",
    "turn_begin",
    "turn_end",
    "scope_begin",
    "scope_end",
    "grammar_begin",
    "grammar_end",
    "fork",
    "join",
    "mark",
    "rollback",
]
MissReason: TypeAlias = Literal["never_seen", "evicted", "other_namespace", "changed", "page", "continued", "disabled"]
Origin: TypeAlias = Literal["constant", "cached", "generated", "forced", "chosen", "joined", "rejected"]


class CacheMiss(Record, frozen=True):
    """Reason why a prompt's tokens from a place on were not in the cache.

    Attributes:
        reason: "never_seen": no prompt began so. "evicted": it was there and was dropped, for want of room or by a
            flush.
            "other_namespace": another namespace has it. "changed": the cache has another text from there on. "page":
            less than a page is left, and the cache keeps whole pages. "continued": it continues in place behind another
            generation, and the rest is new. "disabled": the engine keeps no prefixes.
        at: tokens before the place.
        left: characters of the prompt that were computed; None: not counted, as they are all, or many.
        now: the prompt there, at most 40 characters.
        before: what the cache has there, if it has anything and tells.
    """

    reason: MissReason
    at: int
    left: int | None = None
    now: str = ""
    before: str = ""


class Attempt(Record, frozen=True):
    """An attempt that failed: its answers, where it had any, and what was wrong."""

    error: str
    answers: tuple[Generation, ...] = ()


class TraceNode(Record, frozen=True):
    """A node that was played.

    Attributes:
        kind: of node.
        path: of its branch: () is the main one, (2, 0) the first branch of the fork that is node 2 of it.
        place: of the node in its branch.
        name: of its variable, scope or role.
        where: the user's line: file, line and function.
        text: that it added to its branch.
        cached: characters at the beginning of a text that the backend had in its cache.
        forced: stretches of a generation's text that its grammar left no choice about: (start, end) in characters.
        start, end: seconds after the start of the run. Text takes no time.
        results: of a generation its samples; of a selection its scores.
        attempts: that failed before that.
        error: that it failed with.
        rejected: the program went back to before it.
    """

    kind: NodeKind
    path: tuple[int, ...] = ()
    place: int = 0
    name: str | None = None
    where: tuple[str, int, str] | None = None
    text: str = ""
    cached: int = 0
    forced: tuple[tuple[int, int], ...] = ()
    start: float = 0.0
    end: float = 0.0
    results: tuple[Generation | Selection, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    error: str | None = None
    rejected: bool = False

    @property
    def usage(self) -> Usage:
        """Tokens of its results; times of the longest."""
        return total_usage(result.usage for result in self.results)

    @property
    def seconds(self) -> float:
        """From start to end."""
        return self.end - self.start

    @property
    def miss(self) -> CacheMiss | None:
        """Reason why tokens of its prompt were not cached, where the backend tells."""
        told = self.results[0].meta.get("cache_miss") if self.results else None
        try:
            return None if told is None else msgspec.convert(told, CacheMiss)
        except msgspec.ValidationError:  # another backend's word
            return None

    @property
    def thrown_away(self) -> int:
        """Tokens that were generated in vain."""
        answers = [answer for attempt in self.attempts for answer in attempt.answers]
        lost = sum(answer.usage.completion_tokens for answer in answers)
        return lost + (self.usage.completion_tokens if self.rejected else 0)

    @property
    def pieces(self) -> tuple[tuple[str, Origin], ...]:
        """Text of the node by origin."""
        if self.rejected:
            found: list[tuple[str, Origin]] = [(self.text, "rejected")]
        elif self.kind == "gen":
            found, at = [], 0
            for start, end in self.forced:
                found += [(self.text[at:start], "generated"), (self.text[start:end], "forced")]
                at = end
            found.append((self.text[at:], "generated"))
        elif self.kind == "select":
            found = [(self.text, "chosen")]
        elif self.kind == "join":
            found = [(self.text, "joined")]
        else:
            found = [(self.text[: self.cached], "cached"), (self.text[self.cached :], "constant")]
        return tuple((text, origin) for text, origin in found if text)


class TraceHead(Record, frozen=True):
    """The first line of a trace: what ran.

    Attributes:
        nodes: how many follow.
        seconds: from the start of the run to the end of its last node.
        backend: its class.
        model: its name.
        started: seconds since 1970 at which the run began.
    """

    nodes: int
    seconds: float = 0.0
    backend: str = ""
    model: str = ""
    started: float = 0.0
