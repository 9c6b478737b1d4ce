"""Trace as an object, and its file: JSON lines, first the head and then the nodes, in the format of `sglang_lite.wire`.

Loading a file has no side effects: nothing in the file names a class or is executed, and an invalid line is refused
with its number.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from sglang_lite.errors import WireError
from sglang_lite.protocol import ParameterError, TraceHead, TraceNode, Usage, total_usage
from sglang_lite.protocol.record import Record
from sglang_lite.wire import Limits, decode, encode

MOST_BYTES: Final = 2**26  # maximum size of a file
MOST_NODES: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Trace:
    """Record of a run's nodes.

    Attributes:
        head: description of the run.
        nodes: nodes in reading order: those of a fork's branches follow the fork.
    """

    head: TraceHead
    nodes: tuple[TraceNode, ...]

    @property
    def usage(self) -> Usage:
        """Usage of all nodes, including those that failed or were rolled back; `total_s` is the duration of the run."""
        usages = [result.usage for node in self.nodes for result in node.results]
        failed = [answer.usage for node in self.nodes for attempt in node.attempts for answer in attempt.answers]
        total = total_usage([*usages, *failed])
        return msgspec.structs.replace(total, total_s=self.head.seconds, thrown_away_tokens=self.thrown_away)

    @property
    def thrown_away(self) -> int:
        """Number of tokens that were generated in vain: by attempts that failed, and by nodes that were rolled back."""
        return sum(node.thrown_away for node in self.nodes)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the trace: as JSON lines, or as an HTML page if `path` ends in `.html` or `.htm`.

        Raises:
            OSError: the file can't be written.
            WireError: a value can't be serialised (metadata of a user's backend, for example).
        """
        if Path(path).suffix.lower() in (".html", ".htm"):
            from sglang_lite.lang.runs.page import as_html

            Path(path).write_text(as_html(self), encoding="utf-8")
            return
        with open(path, "wb") as file:
            for record in (self.head, *self.nodes):
                file.write(encode(record) + b"\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Reads a trace from the JSON lines that `save` has written.

        Raises:
            ParameterError: the file does not exist, or can't be read.
            WireError: a line is not a part of a trace, has another version of the format, is too long or too deeply
                nested, or has impossible values.
        """
        try:
            size = Path(path).stat().st_size
            if size > MOST_BYTES:
                raise WireError(f"{path}: {size:,} bytes are more than {MOST_BYTES:,}", hint="Trace a shorter run.")
            lines = Path(path).read_bytes().split(b"\n")
        except OSError as error:
            raise ParameterError("path", f"{path}: {error.strerror or error}.") from error
        records = _records(path, lines)
        head = next(records, None)
        if not isinstance(head, TraceHead):
            raise WireError(
                f"{path}, line 1: the line is not the head of a trace", hint="Give a file that Trace.save has written."
            )
        nodes: list[TraceNode] = []
        for number, record in enumerate(records, 2):
            if not isinstance(record, TraceNode):
                raise WireError(f"{path}, line {number}: a {type(record).__name__} is not a node of a trace")
            _check(record, f"{path}, line {number}")
            nodes.append(record)
        if len(nodes) != head.nodes:
            raise WireError(f"{path}: {len(nodes):,} nodes, but line 1 says {head.nodes:,}")
        if not (0 <= head.seconds < math.inf and 0 <= head.started < 1e12):
            raise WireError(
                f"{path}, line 1: {head.seconds} seconds from {head.started} is not a possible time",
                pointer="/data/seconds",
            )
        return cls(head, tuple(nodes))


def _records(path: str | os.PathLike[str], lines: list[bytes]) -> Iterator[Record | Exception]:
    limits = Limits(bytes=MOST_BYTES)
    if len(lines) > MOST_NODES + 2:
        raise WireError(f"{path}: more than {MOST_NODES:,} lines")
    for number, line in enumerate(lines, 1):
        if not line and number == len(lines):
            return
        try:
            yield decode(line, limits=limits)
        except WireError as error:
            reason = error.message.removeprefix("wire: ").rpartition(" (at ")[0]
            raise WireError(f"{path}, line {number}: {reason}", pointer=error.pointer, hint=error.hint) from None


def _check(node: TraceNode, where: str) -> None:
    """Raises WireError if a node has impossible values."""
    if not 0 <= node.start <= node.end < math.inf:
        raise WireError(f"{where}: {node.start} to {node.end} seconds is not a possible time", pointer="/data/start")
    if len(node.path) % 2 or any(each < 0 for each in (node.place, *node.path)):
        raise WireError(
            f"{where}: {node.path!r:.80} is not the path of a branch, which has pairs of a fork and an index",
            pointer="/data/path",
        )
    at = 0
    for start, end in node.forced:
        if not at <= start < end <= len(node.text):
            raise WireError(f"{where}: the range {start} to {end} is outside its text", pointer="/data/forced")
        at = end
    if not 0 <= node.cached <= len(node.text):
        raise WireError(
            f"{where}: {node.cached} of {len(node.text)} characters can't be cached", pointer="/data/cached"
        )
