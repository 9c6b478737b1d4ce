"""A step's rows pass all stages in order, whenever steps begin and are drawn from."""

from collections import defaultdict, deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_lite.runtime.executor.stages import Stages
from tests.runtime.kernels import needs_kernels

pytestmark = needs_kernels


class Rank:
    """One rank of each stage. Its runner appends the stage's number to the digits of a step's rows,
    in memory that every forward writes anew.
    """

    def __init__(
        self, stage: int, count: int, messages: defaultdict[int, deque[torch.Tensor]]
    ) -> None:
        self.stage, self.messages, self.memory, self.scored = (
            stage,
            messages,
            torch.zeros(1, 1),
            list[float](),
        )
        spec = SimpleNamespace(hidden_size=1)
        self.model = SimpleNamespace(
            spec=spec, precision=SimpleNamespace(compute=torch.float32), device="cpu"
        )
        self.parallel = SimpleNamespace(stage=stage, pp=count)
        own: Any = self  # as the runner, and as the connection of the ranks
        self.stages = Stages(own, own)

    def pass_to_next_stage(self, rows: torch.Tensor, stage: int) -> torch.Tensor:
        if stage == self.stage:
            self.messages[stage].append(rows.clone())
        return self.messages[stage].popleft() if stage == self.stage - 1 else rows

    def forward(self, record: Any, rows: torch.Tensor | None) -> Any:
        self.memory[0, 0] = 10 * (record.step if rows is None else float(rows)) + self.stage
        return SimpleNamespace(hidden=self.memory, token_slots=None)

    def finish_forward(self, _: Any, rows: torch.Tensor) -> None:
        self.scored.append(float(rows))


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@given(data=st.data())
def test_every_step_passes_all_stages_before_it_is_drawn_from(count, data):
    messages: defaultdict[int, deque[torch.Tensor]] = defaultdict(deque)
    ranks = [Rank(stage, count, messages) for stage in range(count)]
    launched: deque[tuple[int, bool]] = deque()
    scored = []
    for step in range(1, data.draw(st.integers(1, 20)) + 1):
        record: Any = SimpleNamespace(ids=[0], step=step, scores=data.draw(st.booleans()))
        for rank in ranks:
            rank.stages.begin_step(record)
        drawn = record.scores or data.draw(st.booleans())  # else it is a part of a prompt
        launched.append((step, drawn))
        if drawn and record.scores:
            scored.append(step)
        # As the loop has it: as many steps as stages at most, and sooner if there is nothing to
        # launch.
        while len(launched) == count or (launched and data.draw(st.booleans())):
            number, drawn = launched.popleft()
            if drawn:
                forward: Any = [rank.stages.finish_step(number) for rank in ranks][-1]
                assert int(forward.hidden) == int(f"{number}{''.join(map(str, range(count)))}")
    passed = [int(rows) // 10**count for rows in ranks[-1].scored]
    assert passed == scored[: len(passed)] if count > 1 else not passed
