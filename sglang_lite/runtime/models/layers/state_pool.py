"""States of a step's rows on a CPU: read from a pool, carried over the rows' tokens, and written."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch

from sglang_lite.runtime.kernels.state_rows import StateRows


def read_states(states: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
    """Returns a copy of the states at some places, zeros where a place is -1.

    Args:
        states: pool [S, ...].
        read: int32 [R], places.

    Returns:
        States [R, ...], in the data type of the pool.
    """
    found = states.index_select(0, read.clamp(min=0))
    empty = (read < 0).nonzero().squeeze(1)
    return found.index_fill_(0, empty, 0.0)


def write_states(states: torch.Tensor, write: torch.Tensor, new: torch.Tensor) -> None:
    """Writes states to their places, except where a place is -1.

    Args:
        states: pool [S, ...] (written).
        write: int32 [R], places.
        new: states [R, ...], in any data type.
    """
    for index, state in zip(write.tolist(), new, strict=True):
        if index >= 0:
            states[index] = state  # index_copy_ takes five times as long for a large state


def scan_rows(
    step: Callable[..., torch.Tensor],
    scan: Callable[..., torch.Tensor],
    inputs: tuple[torch.Tensor, ...],
    states: torch.Tensor,
    rows: StateRows,
    out: torch.Tensor,
) -> torch.Tensor:
    """Updates the states of all rows over their tokens: rows of one token together, longer rows one
    after the other.

    Args:
        step: function of the inputs [R, ...] of one token each and their states, float32 [R, ...],
            which it updates. Returns the outputs [R, ...].
        scan: function of the inputs [n, ...] of a row and its state, float32, which it updates.
            Returns the outputs [n, ...].
        inputs: inputs of the step's tokens, each [T, ...].
        states: pool [S, ...] (written).
        rows: rows of the step.
        out: outputs [T, ...] (written).

    Returns:
        `out`.
    """
    if rows.longest == 1:
        state = read_states(states, rows.read).float()
        out.copy_(step(*inputs, state))
        write_states(states, rows.write, state)
        return out
    offsets = rows.offsets.tolist()
    spans = list(pairwise(offsets))
    singles = torch.tensor([row for row, (begin, end) in enumerate(spans) if end - begin == 1])
    if len(singles):
        at = rows.offsets[singles].long()
        state = read_states(states, rows.read[singles]).float()
        out[at] = step(*(each[at] for each in inputs), state).to(out.dtype)
        write_states(states, rows.write[singles], state)
    for row, (begin, end) in enumerate(spans):
        if end - begin == 1:
            continue
        state = read_states(states, rows.read[row : row + 1]).float()
        out[begin:end] = scan(*(each[begin:end] for each in inputs), state[0])
        write_states(states, rows.write[row : row + 1], state)
    return out
