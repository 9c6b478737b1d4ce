"""Records of a run's trace: the nodes that were executed, with their results, times and cost."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from sglang_lite.notebook.markup import definition_list, shorten_text
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
    "compact",
    "call",
]
MissReason: TypeAlias = Literal[
    "never_seen",
    "evicted",
    "paused",
    "no_state",
    "other_namespace",
    "changed",
    "page",
    "continued",
    "compacted",
    "disabled",
    "on_host",
    "on_disk",
]
Origin: TypeAlias = Literal[
    "constant", "cached", "generated", "forced", "chosen", "joined", "rejected"
]


class CacheMiss(Record, frozen=True):
    """Reason why a prompt's tokens, from some place on, were not in the prefix cache.

    Attributes:
        reason: "never_seen": no earlier prompt had this beginning. "evicted": the tokens were
            cached, and were dropped to make room or by a flush. "paused": the same, while the
            program was paused. "no_state": the tokens are cached, but the state after them, which
            linear attention requires, is not. "other_namespace": the tokens are cached in another
            namespace. "changed": the cache has a different text after the place. "page": less than
            a page remains, and the cache stores only whole pages. "continued": the prompt continues
            an earlier generation in its slot, and the rest is new. "compacted": `s.compact`
            replaced the text before this prompt. "disabled": the engine has no prefix cache.
            "on_host": the host's memory has the tokens, but computing them was faster than copying
            them, or there were only a few. "on_disk": the same for files that this engine has
            written or read.
        at: number of tokens before the place.
        left: number of characters of the prompt that were computed. None if they were not counted,
            because all or very many were computed.
        now: text of the prompt after the place, at most 40 characters.
        before: text that the cache has there, if any and if it is reported.
    """

    reason: MissReason
    at: int
    left: int | None = None
    now: str = ""
    before: str = ""


class Dropped(Record, frozen=True):
    """What a compaction has dropped from a text.

    Attributes:
        turns: number of turns.
        tokens: number of their tokens; estimated if the model's tokenizer is not known.
        text: their text, with the template's marks.
        images: number of their images, videos and sounds.
    """

    turns: int
    tokens: int
    text: str
    images: int = 0


class Attempt(Record, frozen=True):
    """A failed attempt at a node: its error, and its answers if it had any."""

    error: str
    answers: tuple[Generation, ...] = ()


class TraceNode(Record, frozen=True):
    """A node that was executed.

    Attributes:
        kind: kind of node.
        path: path of its branch: () is the main branch, (2, 0) the first branch of the fork
            that is its node 2.
        place: place of the node in its branch.
        name: name of its variable or scope, or its role; None if it has none.
        where: location in the user's program, as file, line and function.
        text: text that the node added to its branch.
        cached: number of characters at the beginning of the text that the backend had in its
            cache.
        forced: spans of a generation's text that the grammar forced, as (start, end)
            character offsets.
        start, end: times in seconds after the start of the run. Text takes no time.
        results: samples of a generation, or scores of a selection.
        attempts: failed attempts before the result.
        error: error that the node failed with, or None.
        rejected: whether the program rolled back to a place before the node.
        node: path of a generation or selection in the program's tree, the same in all runs
            that reach it the same way. "" for other nodes, and for those that were added
            after the end of the program's body.
        asked: digest of its question: the prompt, and the parameters and the constraint, or the
            choices and the method. "" if it has no `node`, or if its backend is not the run's.
        adapter: name of the adapter (LoRA) that answered, or None.
        image: SHA-256 of an image's content, or its address; "" for other nodes.
        thumbnail: data URL of a small version of the image; "" without pillow, or if its
            bytes are not available.
        token_texts: texts of the tokens of the first sample; empty if the backend does not
            know them.
        dropped: what a compaction has dropped; None for other nodes. The `text` of a compaction is
            the whole text that replaces the branch's earlier text.
        call: call that a model's program made (`gen(code=…)`), and its result, as text; "" for other
            nodes. Its `name` is the function's.
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
    node: str = ""
    asked: str = ""
    adapter: str | None = None
    image: str = ""
    thumbnail: str = ""
    token_texts: tuple[str, ...] = ()
    call: str = ""
    dropped: Dropped | None = None

    def __repr__(self) -> str:
        failed = "" if self.error is None else f", failed: {shorten_text(self.error, 60)}"
        name = "" if self.name is None else f" {shorten_text(self.name, 40)}"
        return f"TraceNode({self.kind}{name}, {shorten_text(repr(self.text), 100)}, {self.seconds:.3f} s{failed})"

    def _repr_html_(self) -> str:
        named = {
            "text": self.text,
            "line": self.where and f"{self.where[0]}:{self.where[1]}",
            "error": self.error,
            "call": self.call,
            "dropped": self.dropped and _describe_dropped(self.dropped),
            "adapter": self.adapter,
            "image": self.image,
        }
        if self.results:
            named |= {"seconds": f"{self.seconds:.3f}", "usage": repr(self.usage)}
        return definition_list(
            f"{self.kind} {self.name or ''}",
            {name: value for name, value in named.items() if value},
        )

    @property
    def usage(self) -> Usage:
        """Usage of the node: summed tokens and maximum times of its results."""
        return total_usage(result.usage for result in self.results)

    @property
    def seconds(self) -> float:
        """Duration of the node in seconds."""
        return self.end - self.start

    @property
    def miss(self) -> CacheMiss | None:
        """Reason why tokens of the prompt were not cached, or None if the backend does not report
        one.
        """
        told = self.results[0].meta.get("cache_miss") if self.results else None
        try:
            return None if told is None else msgspec.convert(told, CacheMiss)
        except msgspec.ValidationError:  # metadata of another backend
            return None

    @property
    def thrown_away(self) -> int:
        """Number of generated tokens that were wasted, by failed attempts or because of a rollback."""
        answers = [answer for attempt in self.attempts for answer in attempt.answers]
        lost = sum(answer.usage.completion_tokens for answer in answers)
        return lost + (self.usage.completion_tokens if self.rejected else 0)

    @property
    def pieces(self) -> tuple[tuple[str, Origin], ...]:
        """Text of the node in consecutive parts, each with its origin."""
        if self.rejected:
            found: list[tuple[str, Origin]] = [(self.text, "rejected")]
        elif self.kind == "gen":
            found = []
            at = 0
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


def _describe_dropped(dropped: Dropped) -> str:
    images = f", {dropped.images} images" if dropped.images else ""
    return f"{dropped.turns} turns, {dropped.tokens:,} tokens{images}"


class TraceHead(Record, frozen=True):
    """First line of a trace file: properties of the run.

    Attributes:
        nodes: number of nodes that follow.
        seconds: time from the start of the run to the end of its last node.
        backend: name of the backend's class.
        model: name of the model.
        started: start of the run, in seconds since 1970.
        arguments: arguments of the program, as name and shortened text.
    """

    nodes: int
    seconds: float = 0.0
    backend: str = ""
    model: str = ""
    started: float = 0.0
    arguments: tuple[tuple[str, str], ...] = ()
