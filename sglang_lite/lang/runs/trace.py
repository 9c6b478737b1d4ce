"""Trace of a run, and its file in the JSON Lines format of `sglang_lite.wire`. The head is in the
first line, and each other line contains one node.

Loading a file has no side effects: nothing in the file names a class or is executed, and an invalid
line is refused with its number.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from pathlib import Path

from sglang_lite import wire
from sglang_lite.lang.runs import files
from sglang_lite.lang.runs.trajectory import Trajectory, build_trajectory
from sglang_lite.page.data import sum_node_usage
from sglang_lite.protocol import ParameterError, TraceHead, TraceNode, Usage

_SAVED = "Give a file that Trace.save has written."


@dataclass(frozen=True, slots=True, repr=False)
class Trace:
    """Record of the nodes of a run.

    Attributes:
        head: description of the run.
        nodes: nodes in reading order: those of a fork's branches follow the fork.
    """

    head: TraceHead
    nodes: tuple[TraceNode, ...]

    def __repr__(self) -> str:
        branches = len({node.path for node in self.nodes})
        usage = self.usage
        return (
            f"Trace({len(self.nodes):,} nodes, {branches:,} branches, {usage.completion_tokens:,} tokens generated, "
            f"{usage.total_s:.3f} s)"
        )

    def _repr_html_(self) -> str:
        """Returns the page of the trace, for notebooks."""
        from sglang_lite.lang.runs.page import page_in_frame

        return page_in_frame(self)

    @property
    def usage(self) -> Usage:
        """Usage of all nodes, including those that failed or were rolled back; `total_s` is the
        duration of the run.
        """
        return sum_node_usage(self.head, self.nodes)

    @property
    def thrown_away(self) -> int:
        """Number of generated tokens that were wasted because an attempt failed or a node was
        rolled back.
        """
        return sum(node.thrown_away for node in self.nodes)

    def trajectory(self) -> Trajectory:
        """Returns the token sequences of the run, for training: the tokens that the model read and
        those that it sampled, with log-probabilities.

        Raises:
            ProgramError: no generation was answered, or one lacks its prompt's token ids because
                the run did not set `return_prompt_token_ids=True`.
        """
        return build_trajectory(self.nodes)

    def save(self, path: files.AnyPath, beside: Trace | None = None) -> None:
        """Writes the trace: as JSON lines, or as an HTML page if `path` ends in `.html` or `.htm`.

        Args:
            beside: trace of another run, which the page shows beside this one, or None.

        Raises:
            ParameterError: the file can't be written, or `beside` is given for a file that is not a
                page.
            WireError: a value can't be serialised (metadata of a user's backend, for example).
        """
        if Path(path).suffix.lower() in (".html", ".htm"):
            from sglang_lite.lang.runs.page import as_html

            content = as_html(self, beside).encode()
        elif beside is not None:
            raise ParameterError("beside", f"{path} is no page.", hint="Let its name end in .html.")
        else:
            content = b"".join(wire.encode(record) + b"\n" for record in (self.head, *self.nodes))
        files.write(path, content)

    @classmethod
    def load(cls, path: files.AnyPath) -> Trace:
        """Reads a trace from the JSON lines that `save` has written.

        Raises:
            ParameterError: the file does not exist, can't be read, or is too large.
            WireError: a line is not a part of a trace, has another version of the format, is too
                long or too deeply nested, or has impossible values.
        """
        head = None
        nodes = list[TraceNode]()
        for number, line in enumerate(io.BytesIO(files.read(path)), 1):
            record = files.decode_line(path, number, line, _SAVED)
            if number == 1 and isinstance(record, TraceHead):
                head = record
            elif number > 1 and isinstance(record, TraceNode):
                nodes.append(record)
            else:
                expected = "the head of a trace" if number == 1 else "a node of a trace"
                raise files.line_error(
                    path, number, f"a {type(record).__name__} is not {expected}", hint=_SAVED
                )
            if impossible := _find_impossible_value(record):
                raise files.line_error(path, number, *impossible)
        if head is None:
            raise files.line_error(path, 1, "the file is empty", hint=_SAVED)
        if len(nodes) != head.nodes:
            raise files.line_error(
                path, 1, f"it says {head.nodes:,} nodes, but {len(nodes):,} are here"
            )
        return cls(head, tuple(nodes))


def _find_impossible_value(record: TraceHead | TraceNode) -> tuple[str, str] | None:
    """Returns a description of a record's first impossible value and a JSON Pointer to it, or None
    if all values are possible.
    """
    if isinstance(record, TraceHead):
        if 0 <= record.seconds < math.inf and 0 <= record.started < 1e12:
            return None
        return (
            f"{record.seconds} seconds from {record.started} is not a possible time",
            "/data/seconds",
        )
    if not 0 <= record.start <= record.end < math.inf:
        return f"{record.start} to {record.end} seconds is not a possible time", "/data/start"
    if len(record.path) % 2 or min((record.place, *record.path)) < 0:
        problem = f"{record.path!r:.80} is not the path of a branch, which has pairs of a fork and an index"
        return problem, "/data/path"
    length = len(record.text)
    at = 0
    for start, end in record.forced:
        if not at <= start < end <= length:
            return f"the range {start} to {end} is outside its text", "/data/forced"
        at = end
    if not 0 <= record.cached <= length:
        return f"{record.cached} of {length} characters can't be cached", "/data/cached"
    return None
