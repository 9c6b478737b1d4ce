"""Streaming of answers: pieces are put into the text logs that readers follow."""

from __future__ import annotations

from typing import Any

from sglang_lite.lang.concurrency.variables import TextLog
from sglang_lite.lang.execution.operations import GenOp
from sglang_lite.lang.results import DeltaWithMeta, delta_meta, joined_meta
from sglang_lite.protocol import Delta, Generation
from sglang_lite.protocol.anything import Json
from sglang_lite.text.reasoning import ReasoningParser


class AnswerStream:
    """Writes an answer into the logs of its branch and its variable, piece by piece: all of its text and metadata,
    without duplicates. `log` is the branch's, None if the run is not streamed."""

    __slots__ = ("_chars", "_early", "_ids", "_log", "_logprobs", "_op", "_parser", "_thoughts")

    def __init__(self, log: TextLog | None, op: GenOp, reasoning: str | None) -> None:
        self._log, self._op = log, op
        self._parser = None if reasoning is None else ReasoningParser(reasoning, once=op.node.constraint is not None)
        self._chars = self._ids = self._logprobs = self._thoughts = 0  # counts shown so far
        self._early: dict[str, Any] = {}  # metadata whose text has not come yet

    def delta(self, delta: Delta) -> None:
        """Shows a piece, with cumulative counts of tokens and log-probabilities, as in SGLang's streams."""
        if isinstance(delta, DeltaWithMeta):
            return self.piece(delta.text, delta.meta)
        self._ids += len(delta.token_ids)
        self._logprobs += len(delta.logprobs)
        meta = delta_meta(delta)
        if delta.logprobs:
            meta["output_token_logprobs_length"] = self._logprobs
        tokens = max(self._ids, self._logprobs)  # some backends report only one of the two
        if tokens and (delta.text or delta.logprobs):
            meta["completion_tokens"] = tokens
        if delta.reasoning:
            self._think(delta.reasoning)
        return self.piece(delta.text, meta)

    def _think(self, thought: str) -> None:
        """Shows reasoning that the backend reports apart from the text; the text then contains none, so it is not
        parsed any more."""
        self._parser = None
        self._thoughts += len(thought)
        if self._op.thoughts is not None and self._op.thoughts.log is not None:
            self._op.thoughts.log.append(thought)

    def piece(self, text: str, meta: dict[str, Json]) -> None:
        if self._log is None:
            return
        self._chars += len(text)
        if text:
            self._log.append(text)
        self._give(*(("", text) if self._parser is None else self._parser.push(text)), meta)

    def end(self, generation: Generation) -> None:
        """Shows the parts of a finished answer that have not been shown yet."""
        if self._log is None:
            return
        if generation.reasoning is not None:
            self._think(generation.reasoning[self._thoughts :])
        self.delta(
            Delta(
                generation.text[self._chars :],
                generation.token_ids[self._ids :],
                generation.output_logprobs[self._logprobs :],
            )
        )
        if self._parser is not None:
            self._give(*self._parser.flush(), {})
        if self._early and self._op.variable.log is not None:
            self._op.variable.log.append("", self._early)

    def _give(self, thought: str, answer: str, meta: dict[str, Any]) -> None:
        op = self._op
        if self._early:
            meta = joined_meta(self._early, meta)
        self._early = {} if thought or answer else meta
        if thought and op.thoughts is not None and op.thoughts.log is not None:
            op.thoughts.log.append(thought, None if answer else meta)
        if answer and op.variable.log is not None:
            op.variable.log.append(answer, meta)
