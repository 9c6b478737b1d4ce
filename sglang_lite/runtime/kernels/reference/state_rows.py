"""States of a step's rows, for torch twins."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from sglang_lite.runtime.kernels.state_rows import StateRows


def row_states(states: torch.Tensor, rows: StateRows) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yields each row's first token, the end of its tokens, and a float64 copy of the state that it
    reads. The caller updates the state, which is then written.
    """
    offsets = rows.offsets.tolist()
    for row, (read, write) in enumerate(zip(rows.read.tolist(), rows.write.tolist(), strict=True)):
        state = states[max(read, 0)].double()
        if read < 0:
            state = torch.zeros_like(state)
        yield offsets[row], offsets[row + 1], state
        if write >= 0:
            states[write] = state.to(states.dtype)


def select_single(rows: StateRows) -> StateRows:
    """Returns rows of which those with more than one token neither read nor write a state."""
    single = rows.offsets.diff() == 1
    return StateRows(
        rows.offsets,
        torch.where(single, rows.read, -1),
        torch.where(single, rows.write, -1),
        rows.longest,
    )
