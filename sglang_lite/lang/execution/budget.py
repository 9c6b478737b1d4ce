"""Limits on the usage of runs, and the accounts that charge calls against them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec

from sglang_lite.lang.backend.base import Backend
from sglang_lite.lang.backend.token_counts import (
    NOT_CREDIBLE,
    count_text_tokens,
    estimate_tokens,
    is_credible,
    possible_unreported_usage,
    unreported_usages,
)
from sglang_lite.lang.checks import check_positive, check_whole_number
from sglang_lite.lang.results import with_warnings
from sglang_lite.protocol import (
    BudgetError,
    CapabilityError,
    ConstraintError,
    EngineClosedError,
    Generation,
    OverloadedError,
    ParameterError,
    Prompt,
    SamplingParams,
    Selection,
    SglError,
    TemplateError,
    Unset,
    Usage,
    total_usage,
)

_Answer = TypeVar("_Answer", bound=Generation | Selection)
# Errors before a call, or instead of one.
_NOT_MADE = (
    BudgetError,
    ParameterError,
    ConstraintError,
    CapabilityError,
    TemplateError,
    OverloadedError,
    EngineClosedError,
)
_AROUND_A_CHOICE = 16  # tokens of the JSON object into which an API writes a choice


class Budget:
    """Limits shared by several runs, and their usage so far. Thread-safe.

    Before a call, its prompt is counted (with the backend's tokenizer, or else as one token per
    three bytes), and its answer is counted at maximum length. This reservation, the usage so far
    and the reservations of running calls must together stay within the limits. When the call has
    ended, its actual usage replaces the reservation.

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
            check_whole_number("max_total_tokens", max_total_tokens, 1)
        self.max_cost = max_cost
        self.max_total_tokens = max_total_tokens
        self._lock = threading.Lock()
        # used so far, plus reservations of the calls under way
        self._cost = 0.0
        self._tokens = 0

    def copy_without_usage(self) -> Budget:
        """Returns a budget with the same limits and no usage."""
        return Budget(self.max_cost, self.max_total_tokens)

    def check_price_known(self, backend: Backend) -> None:
        """Raises ParameterError if a cost limit is set and the price of the backend's model is not
        known.
        """
        if self.max_cost is not None and backend.cost(Usage(1, 0, 1)) is None:
            raise ParameterError(
                "max_cost",
                f"the price of the model {backend.get_model_name()!r} is not known.",
                hint="Set it (backend.price = sgl.Price(…)), or use max_total_tokens.",
            )

    def is_nearly_spent(self, share: float) -> bool:
        """Returns True if a share (0 to 1) of a limit is used or reserved."""
        with self._lock:
            cost, tokens = self._cost, self._tokens
        return (self.max_cost is not None and cost >= share * self.max_cost) or (
            self.max_total_tokens is not None and tokens >= share * self.max_total_tokens
        )

    def has_room_for(self, backend: Backend, usage: Usage) -> bool:
        """Returns True if a call with this usage would stay within the limits now."""
        cost = self._price_usage(backend, usage, 0.0)
        tokens = usage.prompt_tokens + usage.completion_tokens
        with self._lock:
            return (self.max_cost is None or self._cost + cost <= self.max_cost) and (
                self.max_total_tokens is None or self._tokens + tokens <= self.max_total_tokens
            )

    @contextlib.contextmanager
    def reserve(self, account: NodeAccount) -> Iterator[None]:
        """Reserves the usage of a node's call, which is made in the `with` block. Afterwards the
        account's usage replaces the reservation.

        Raises:
            BudgetError: the call could exceed a limit.
            ParameterError: a cost limit is set, and the price of the backend's model is not known.
        """
        self.check_price_known(account.backend)
        cost = self._price_usage(account.backend, account.reserved, 0.0)
        tokens = account.reserved.prompt_tokens + account.reserved.completion_tokens
        with self._lock:
            if self.max_total_tokens is not None and self._tokens + tokens > self.max_total_tokens:
                usage = f"{self._tokens:,} of {self.max_total_tokens:,} tokens are used or reserved"
                raise _over_limit_error(
                    "max_total_tokens", f"{usage}, and this call may use {tokens:,}."
                )
            if self.max_cost is not None and self._cost + cost > self.max_cost:
                usage = f"${self._cost:.6g} of ${self.max_cost:.6g} are used or reserved"
                raise _over_limit_error("max_cost", f"{usage}, and this call may cost ${cost:.6g}.")
            self._cost += cost
            self._tokens += tokens
        try:
            yield
        finally:
            used = total_usage(account.used)
            with self._lock:
                self._cost += (
                    self._price_usage(account.backend, used, cost) if account.used else 0.0
                ) - cost
                self._tokens += used.prompt_tokens + used.completion_tokens - tokens

    def _price_usage(self, backend: Backend, usage: Usage, otherwise: float) -> float:
        """Returns the cost of a usage in dollars, or `otherwise` if the model has no price. Cached
        tokens are charged like uncached ones if they have no price of their own.
        """
        if self.max_cost is None:
            return 0.0
        cost = backend.cost(usage)
        if cost is None:
            cost = backend.cost(msgspec.structs.replace(usage, cached_tokens=0, written_tokens=0))
        return otherwise if cost is None else cost


class NodeAccount:
    """Usage charged to a run's budgets for a node's call. If the call reports no usage, or less
    than it must have used, the reserved maximum is charged.

    Args:
        backend: backend that is called.
        reserved: maximum usage of the call.

    Attributes:
        used: usages that are charged when the call has ended.
    """

    def __init__(self, backend: Backend, reserved: Usage) -> None:
        self.backend = backend
        self.reserved = reserved
        self.used: list[Usage] = []

    @contextlib.contextmanager
    def track_call(self) -> Iterator[None]:
        """Tracks the call made in the `with` block. During the call, remote backends add usage that
        no answer or error reports.
        """
        token = unreported_usages.set(self.used)
        try:
            yield
        except SglError as error:
            if error.usage is not None:
                self.used.append(error.usage)
            elif not isinstance(error, _NOT_MADE):
                self.used.append(self.reserved)
            raise
        except BaseException:  # a timeout or a stop: usage up to then is unknown
            self.used.append(self.reserved)
            raise
        finally:
            unreported_usages.reset(token)

    def record_answers(
        self, answers: list[_Answer], prompt: Prompt, texts: Sequence[str]
    ) -> list[_Answer]:
        """Adds the usage of an answer. If the reported usage is not credible, the reserved maximum
        is charged instead.

        Args:
            answers: the samples, or a selection.
            texts: texts of the samples; empty for a selection, which generates no text.

        Returns:
            The answers. The first one has a warning if their usage is not credible.
        """
        self.used += [answer.usage for answer in answers]
        first = answers[0]
        total = total_usage(self.used)
        tokenizer = self.backend.tokenizer
        # A call for several nodes does not report the usage of this prompt.
        if (
            "turn" in first.meta
            or first.meta.get("calls") == 0
            or is_credible(total, prompt, texts, tokenizer)
        ):
            return answers
        longest = max(
            self.reserved.completion_tokens,
            sum(count_text_tokens(text, tokenizer) for text in texts),
        )
        self.used.append(
            possible_unreported_usage(
                total, msgspec.structs.replace(self.reserved, completion_tokens=longest)
            )
        )
        return [
            msgspec.structs.replace(first, meta=with_warnings(first.meta, NOT_CREDIBLE)),
            *answers[1:],
        ]


def _over_limit_error(limit: str, problem: str) -> BudgetError:
    return BudgetError(
        limit,
        problem,
        hint=f"Raise {limit}, or lower max_tokens. Finished answers are in the error's `state`.",
    )


def max_generation_usage(backend: Backend, prompt: Prompt, params: SamplingParams) -> Usage:
    """Returns an upper bound on a generation's estimated usage.

    Raises:
        ParameterError: neither max_tokens nor the backend limits the length of the answer.
    """
    longest = (
        backend.unset_max_tokens if isinstance(params.max_tokens, Unset) else params.max_tokens
    )
    if longest is None:
        raise ParameterError(
            "max_tokens",
            "this generation has no limit, so the budget can't be kept.",
            hint="Set it: gen(max_tokens=…), or run(max_new_tokens=…) for all.",
        )
    samples = params.samples
    return Usage(estimate_tokens(prompt, backend.tokenizer), 0, longest * samples)


def max_selection_usage(backend: Backend, prompt: Prompt, choices: Sequence[str]) -> Usage:
    """Returns an upper bound on a selection's estimated usage."""
    longest = max((count_text_tokens(choice, backend.tokenizer) for choice in choices), default=0)
    return Usage(estimate_tokens(prompt, backend.tokenizer), 0, longest + _AROUND_A_CHOICE)
