"""Records which experts were chosen between two points in time."""

from __future__ import annotations

from sglang_lite.protocol import CapabilityError, ParameterError
from sglang_lite.runtime.models.decoder import Decoder
from sglang_lite.runtime.models.expert_moves import read_expert_counts
from sglang_lite.runtime.models.model import Model

_WRAP = 1 << 32  # where counts wrap to 0


class ExpertRecord:
    """Counts how many rows have chosen each expert of each layer. Nothing is recorded at first."""

    def __init__(self) -> None:
        self._first: list[list[int]] | None = None
        self._last: list[list[int]] | None = None

    def record_counts(self, action: str, model: Model) -> list[list[int]]:
        """Returns how many rows have chosen each expert of each layer, from the start of the record
        until now or until the record was stopped. A layer without experts has an empty list.

        Args:
            action: "start" to begin a new record; "stop" to end it; "dump" to only read it.
            model: the model.

        Raises:
            CapabilityError: the model has no experts, or they are not counted.
            ParameterError: nothing has been started.
        """
        now = read_expert_counts(model.layers) if isinstance(model, Decoder) else []
        if not any(now):
            raise CapabilityError(
                "the model has no experts, so none are recorded.", hint="Leave it out."
            )
        if action == "start":
            self._first = now
            self._last = None
        if self._first is None:
            hint = "Call start_expert_distribution_record first."
            raise ParameterError("expert_distribution_record", "none has been started.", hint=hint)
        if action == "stop":
            self._last = self._last or now
        last = self._last or now
        return [
            [(b - a) % _WRAP for a, b in zip(*both)] for both in zip(self._first, last, strict=True)
        ]
