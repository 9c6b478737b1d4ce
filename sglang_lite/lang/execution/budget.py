"""Limits on the usage of runs: a call that could exceed a limit is not made."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import msgspec

from sglang_lite.lang.backend.base_backend import BaseBackend
from sglang_lite.lang.checks import check_positive, check_whole
from sglang_lite.protocol import (
    BudgetError,
    ParameterError,
    Prompt,
    SamplingParams,
    SglError,
    Unset,
    Usage,
    total_usage,
)

_BYTES_A_TOKEN = 3  # bytes of a prompt for each token; English has four, source code about three
_OF_A_MESSAGE = 8  # tokens of markup around a turn
_OF_AN_IMAGE = 1_500
_AROUND_A_CHOICE = 16  # tokens of the JSON object into which an API writes a choice


class Budget:
    """Limits that runs share, and their usage so far. Thread-safe.

    Before a call, its prompt is estimated (a token for three bytes) and its answer is counted at maximum length. The
    estimate, the usage so far and the reservations of the calls under way must be within the limits together. When the
    call has ended, its real usage replaces the reservation.

    Args:
        max_cost: limit in dollars, or None for no limit.
        max_total_tokens: limit on the tokens of prompts and answers together, or None for no limit.

    Raises:
        ParameterError: a limit is not a positive number.
    """

    def __init__(self, max_cost: float | None, max_total_tokens: int | None) -> None:
        if max_cost is not None:
            check_positive("max_cost", max_cost, "dollars")
        if max_total_tokens is not None:
            check_whole("max_total_tokens", max_total_tokens, 1)
        self.max_cost, self.max_total_tokens = max_cost, max_total_tokens
        self._lock = threading.Lock()
        self._cost, self._tokens = 0.0, 0  # used so far, plus reservations of the calls under way

    def afresh(self) -> Budget:
        """Budget with the same limits and no usage."""
        return Budget(self.max_cost, self.max_total_tokens)

    def check(self, backend: BaseBackend) -> None:
        """Raises ParameterError if a cost limit is set and the price of the backend's model is not known."""
        if self.max_cost is not None and backend.cost(Usage(1, 0, 1)) is None:
            raise ParameterError(
                "max_cost", f"the price of the model {backend.get_model_name()!r} is not known.",
                hint="Set it (backend.price = sgl.Price(…)), or use max_total_tokens.",
            )  # fmt: skip

    @contextlib.contextmanager
    def call(self, backend: BaseBackend, limit: Usage) -> Iterator[list[Usage]]:
        """Reserves the usage of a call, which is made in the `with` block.

        Args:
            limit: maximum usage of the call.

        Yields:
            List to which the caller adds the call's usage. An `SglError` carries its usage itself. If anything else
                ends the call (a timeout, a stop), its usage is unknown, so the reservation counts as used.

        Raises:
            BudgetError: the call could exceed a limit.
            ParameterError: a cost limit is set, and the price of the backend's model is not known.
        """
        self.check(backend)
        cost = self._cost_of(backend, limit, 0.0)
        self._reserve(cost, limit.prompt_tokens + limit.completion_tokens)
        used: list[Usage] = []
        try:
            yield used
        except SglError as error:
            self._settle(backend, limit, cost, [] if error.usage is None else [error.usage])
            raise
        self._settle(backend, limit, cost, used)

    def _reserve(self, cost: float, tokens: int) -> None:
        with self._lock:
            if self.max_total_tokens is not None and self._tokens + tokens > self.max_total_tokens:
                usage = f"{self._tokens:,} of {self.max_total_tokens:,} tokens are used or reserved"
                raise _over("max_total_tokens", f"{usage}, and this call may use {tokens:,}.")
            if self.max_cost is not None and self._cost + cost > self.max_cost:
                usage = f"${self._cost:.6g} of ${self.max_cost:.6g} are used or reserved"
                raise _over("max_cost", f"{usage}, and this call may cost ${cost:.6g}.")
            self._cost += cost
            self._tokens += tokens

    def _settle(self, backend: BaseBackend, reserved: Usage, cost: float, used: list[Usage]) -> None:
        total = total_usage(used)
        with self._lock:
            self._cost += (self._cost_of(backend, total, cost) if used else 0.0) - cost
            self._tokens += total.prompt_tokens + total.completion_tokens
            self._tokens -= reserved.prompt_tokens + reserved.completion_tokens

    def _cost_of(self, backend: BaseBackend, usage: Usage, otherwise: float) -> float:
        """Cost of a usage in dollars. If the price of cached tokens is not known, cached tokens are priced as uncached;
        if the model has no price, returns `otherwise`."""
        if self.max_cost is None:
            return 0.0
        cost = backend.cost(usage)
        if cost is None:
            cost = backend.cost(msgspec.structs.replace(usage, cached_tokens=0, written_tokens=0))
        return otherwise if cost is None else cost


def _over(limit: str, problem: str) -> BudgetError:
    return BudgetError(
        limit, problem, hint=f"Raise {limit}, or lower max_tokens. Finished answers are in the error's `state`."
    )


def max_generation_usage(backend: BaseBackend, prompt: Prompt, params: SamplingParams) -> Usage:
    """Upper estimate of a generation's usage.

    Raises:
        ParameterError: neither max_tokens nor the backend limits the length of the answer.
    """
    longest = backend.unset_max_tokens if isinstance(params.max_tokens, Unset) else params.max_tokens
    if longest is None:
        raise ParameterError(
            "max_tokens", "this generation has no limit, so the budget can't be kept.",
            hint="Set it: gen(max_tokens=…), or run(max_new_tokens=…) for all.",
        )  # fmt: skip
    samples = params.samples
    return Usage(estimated_tokens(prompt), 0, longest * samples)


def max_selection_usage(prompt: Prompt, choices: Sequence[str]) -> Usage:
    """Upper estimate of a selection's usage."""
    longest = max((len(choice.encode("utf-8", "replace")) for choice in choices), default=0)
    return Usage(estimated_tokens(prompt), 0, longest // _BYTES_A_TOKEN + _AROUND_A_CHOICE)


def estimated_tokens(prompt: Prompt) -> int:
    """Number of tokens in a prompt, estimated rather too high than too low."""
    text = len(prompt.text.encode("utf-8", "replace"))
    return text // _BYTES_A_TOKEN + 1 + _OF_A_MESSAGE * (len(prompt.messages) + 1) + _OF_AN_IMAGE * len(prompt.images)
