"""Calls of SGLang's blocking hooks (`generate`, `generate_stream`, `select`), and their results as records."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_lite.lang.backend.base_backend import BaseBackend
from sglang_lite.lang.execution.operations import GenOp, SelectOp
from sglang_lite.lang.execution.stream_executor import StreamExecutor
from sglang_lite.lang.expressions import SglSamplingParams
from sglang_lite.program.choosing import checked
from sglang_lite.protocol import CapabilityError, Generation, ProgramError, Selection, Usage
from sglang_lite.protocol.anything import UserValue

if TYPE_CHECKING:
    from sglang_lite.lang.execution.player import Player


def generate(
    backend: BaseBackend, player: Player, op: GenOp, show: Callable[[str, dict[str, UserValue]], None] | None
) -> list[Generation]:
    """Calls the hook `generate`, or `generate_stream` if the run is streamed and asks for one sample.

    Args:
        show: called with the text and metadata of each piece of a stream; None if nothing is to be shown.
    """
    params = SglSamplingParams.of(op.node.params, op.node.constraint)
    if player.transcript.log is None or params.n > 1:
        text, meta = backend.generate(StreamExecutor(player), params)
        texts = text if isinstance(text, list) else [text]
        metas = meta if isinstance(meta, list) else [meta] * len(texts)
        return [_generation(t, m, i) for i, (t, m) in enumerate(zip(texts, metas))]
    pieces: list[str] = []
    meta = {}
    # The last piece's metadata is kept for the node.
    for piece, meta in backend.generate_stream(StreamExecutor(player), params):
        pieces.append(piece)
        if show is not None:
            show(piece, meta or {})
    return [_generation("".join(pieces), meta, 0)]


def _generation(text: Any, meta: dict[str, Any] | None, index: int) -> Generation:
    if not isinstance(text, str):
        raise ProgramError(f"the backend returned {text!r:.60}, which is not a string.")
    meta = dict(meta or {})
    reason = meta.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, dict) else reason
    usage = Usage(
        prompt_tokens=meta.get("prompt_tokens") or 0,
        cached_tokens=meta.get("cached_tokens") or 0,
        completion_tokens=meta.get("completion_tokens") or 0,
    )
    return Generation(text, finish_reason="length" if kind == "length" else "stop", usage=usage, index=index, meta=meta)


def select(player: Player, op: SelectOp) -> Selection:
    node = op.node
    if op.expression.multi is not None:
        raise CapabilityError(
            f"select(multi=…) is not possible on {type(player.backend).__name__}: it picks without scores."
        )
    decision = player.backend.select(
        StreamExecutor(player), list(node.choices), node.temperature, op.expression.choices_method
    )
    decision = checked(decision, node.choices)
    return Selection((), picked=decision.decision, meta=decision.meta_info or {})
