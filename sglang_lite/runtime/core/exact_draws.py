"""Draws texts of a finite language in proportion to the model's own probabilities
(`gen(exact=True)`).

The model writes freely, and the text that is read from the beginning of what it writes is the
answer, if one is read. So every way of spelling a text counts, and so does every way of going on
after it. No free text is drawn: the distribution of the next token is computed after each likely
beginning of a text, by a request for one token, until all that is left open is too unlikely to
matter.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from sglang_lite.constraints.formal.listing import list_texts
from sglang_lite.constraints.kinds import language_for_constraint
from sglang_lite.constraints.matching import matches
from sglang_lite.constraints.memo import memoize
from sglang_lite.protocol import (
    BackendError,
    Choices,
    Constraint,
    ConstraintError,
    Continuation,
    Delta,
    Generation,
    ParameterError,
    SglError,
    Span,
)
from sglang_lite.runtime.core.mass_tree import Beginning, MassTree
from sglang_lite.runtime.kernels.race import draw_exponentials
from sglang_lite.runtime.requests.output_builder import Event, Sink
from sglang_lite.runtime.requests.request import Request, State
from sglang_lite.runtime.requests.resolved_params import LogitReader, ResolvedParams
from sglang_lite.runtime.structured_output.outcomes import FIRST_END, Outcomes

if TYPE_CHECKING:
    from sglang_lite.runtime.core.engine_context import EngineContext

logger = logging.getLogger("sglang_lite")

MAX_TEXTS = 64
_MAX_ROWS = 512
GAP = 2e-3  # total variation distance up to which shares are known
_MIN_LOG_MASS = -100.0
_MAX_NUMBERS = 8 << 20  # probabilities that are held in memory at once
_FEW_ENDS = 8


class ExactDraws:
    """Exact draws of a generation's samples. All samples are drawn from the same masses.

    Creating it can be slow, so it must not be done on the loop's thread.

    Args:
        context: context of the engine.
        requests: one for each sample. None of them is scheduled; each receives its text.
        constraint: constraint on the texts.

    Raises:
        ParameterError: the generation can't be drawn exactly.
    """

    def __init__(
        self, context: EngineContext, requests: Sequence[Request], constraint: Constraint | None
    ) -> None:
        first = requests[0]
        spelled = _spell_texts(first, constraint)
        self._context = context
        self._requests = requests
        self._constraint = constraint
        self._params = _parameters_of_rows(first.params)
        self._texts = list(spelled)
        self._spellings = list(spelled.values())
        self._outcomes = context.compiler.find_text_outcomes(tuple(spelled))
        # used on the loop's thread only
        self._rows: dict[Request, tuple[Beginning, _OutcomeReader]] = {}  # not computed yet
        self._steps = 0
        self._first: Generation | None = None  # result of the first row
        self._begin()

    def _begin(self) -> None:
        self._tree = MassTree(self._outcomes.reader.start, self._spellings)
        self._computed = 0
        self._weights = self._context.builder.weights.version

    # ---------------------------------------------------------------------------- the loop's thread

    def start(self) -> None:
        """Submits the first rows."""
        for request in self._requests:
            request.output.sink = partial(self._pass_on, request.output.sink)
        with self._failing_requests():
            self._submit_rows()

    def _submit_rows(self) -> None:
        """Submits the rows that have to be computed next, or ends the requests if there are none."""
        if all(request.ended for request in self._requests):
            return
        if self._weights != self._context.builder.weights.version:
            self._begin()  # masses of different weights are not comparable
        while not self._rows:
            branches = self._tree.take_branches(GAP, _MAX_ROWS - self._computed)
            if not branches:
                self._end_requests()
                return
            for branch in branches:
                self._build_row(branch)
        self._steps += 1
        for row in list(self._rows):
            self._context.loop.receive_request(row)

    @contextmanager
    def _failing_requests(self) -> Iterator[None]:
        """Ends the requests with the error that the code inside raises. It must neither end the
        loop nor leave the requests open.
        """
        try:
            yield
        except SglError as error:
            self._fail(error)
        except Exception as error:
            logger.exception("an exact draw failed")
            self._fail(BackendError(f"an exact draw failed: {error!r}"))

    def _build_row(self, branch: Beginning) -> None:
        """Builds the request that computes the distribution after a branch. Leaves the branch open
        if that is too long for the context.
        """
        row = self._context.builder.build_alike(self._requests[0], self._params, branch.tokens)
        if row is None:
            self._tree.give_up(branch)
            return
        reader = _OutcomeReader(self._outcomes.find_outcomes(branch.position))
        row.output.sink = partial(self._receive_row, row)
        row.output.origin = self._constraint
        row.processor = reader
        self._rows[row] = branch, reader

    def _receive_row(self, row: Request, event: Event) -> None:
        if row not in self._rows or isinstance(event, Delta):
            return
        if isinstance(event, SglError):
            self._fail(event)
            return
        if self._first is None:
            self._first = event
        with self._failing_requests():
            branch, reader = self._rows.pop(row)
            ends, live = reader.probabilities()
            token_bytes = self._context.tokenizer.token_bytes
            self._tree.add_row(branch, reader.outcomes, token_bytes, ends, live)
            self._computed += 1
            if not self._rows:
                self._submit_rows()

    def _pass_on(self, sink: Sink, event: Event) -> None:
        """Passes an event of one of the requests to its sink. When all requests have ended, such as
        by an abort, the rows are not needed any more.
        """
        sink(event)
        if self._rows and all(request.ended for request in self._requests):
            self._abort_rows()

    def _abort_rows(self) -> None:
        rows = list(self._rows)
        self._rows = {}
        self._requests = []  # breaks the reference cycle, which avoids garbage collection
        for row in rows:
            self._context.loop.abort(row)

    def _fail(self, error: SglError) -> None:
        """Ends the requests with an error, and the rows that are still computed."""
        requests = self._requests
        self._abort_rows()
        for request in requests:
            self._context.loop.fail_before_start(request, copy(error))

    def _end_requests(self) -> None:
        """Draws the texts, and ends the requests with them.

        Raises:
            ConstraintError: the model gives the texts too little probability, or too many of their
                beginnings would have to be computed.
        """
        masses = [self._tree.masses.get(text.encode(), 0.0) for text in self._texts]
        total = math.fsum(masses)
        gap = self._tree.gap
        if gap > GAP:
            raise ConstraintError(
                f"exact: after {self._computed} beginnings of texts, the shares of the {len(masses)} texts are "
                f"known to {gap:.2g} only: the model would hardly write them, or they are too long.",
                hint="Show them in the prompt, give shorter ones, or leave exact out.",
            )
        if not total or math.log(total) < _MIN_LOG_MASS:
            raise ConstraintError(
                f"exact: the model would write none of the {len(masses)} texts (log_mass below {_MIN_LOG_MASS:.0f}).",
                hint="Show them in the prompt, or leave exact out.",
            )
        found = {
            "probs": {text: mass / total for text, mass in zip(self._texts, masses)},
            "log_mass": math.log(total),
            "gap": gap,
            "rows": self._computed,
            "steps": self._steps,
        }
        open_ = [request for request in self._requests if not request.ended]
        drawn = [_draw_index(masses, request) for request in open_]
        self._requests = []  # breaks the reference cycle, which avoids garbage collection
        for request, index in zip(open_, drawn):
            self._end_request(request, index, found)

    def _end_request(self, request: Request, index: int, found: dict[str, object]) -> None:
        loop = self._context.loop
        text = self._texts[index]
        tokens = tuple(self._spellings[index])
        assert self._first is not None
        duration = loop.clock.now() - request.times.submitted
        usage = msgspec.structs.replace(
            self._first.usage,
            completion_tokens=len(tokens),
            first_token_s=duration,
            total_s=duration,
        )
        meta = dict[str, object](exact=found)
        if "cache_miss" in self._first.meta:
            meta["cache_miss"] = self._first.meta["cache_miss"]
        prompt = request.tokens[:0]
        if request.params.return_prompt_token_ids:
            meta["weight_version"] = self._weights
            prompt = request.tokens[: request.prompt_len]
            prompt = prompt if request.media is None else request.media.restore_placeholders(prompt)
        generation = Generation(
            text,
            tokens,
            (Span(text, special=False),) if text else (),
            usage=usage,
            meta=meta,
            prompt_ids=tuple(prompt.tolist()),
        )
        loop.scheduler.retire_request(request, State.FINISHED)
        if request.output.stream and text:
            request.output.send(Delta(text, tokens))
        request.output.send(generation)
        if request.follow is not None:
            following = request.follow.continue_program(generation)
            if following is not None:
                loop.receive_request(following)


def _spell_texts(request: Request, constraint: Constraint | None) -> dict[str, list[int]]:
    """Returns the texts that a request may draw, with their usual tokens.

    Raises:
        ParameterError: the request can't be drawn exactly.
    """
    if constraint is None:
        raise ParameterError(
            "exact",
            "free text is drawn as the model gives it anyway.",
            hint="Leave it out, or give a constraint, such as type=.",
        )
    if isinstance(constraint, Continuation):
        raise ParameterError(
            "exact", "a grammar over several nodes is open.", hint="Leave it out inside one."
        )
    if request.processor is not None or request.replayed_count:
        other = "logit_processor" if request.processor is not None else "output_ids"
        raise ParameterError(
            "exact", f"can't be combined with {other}.", hint=f"Leave {other} out."
        )
    texts = list_drawable_texts(constraint)
    if texts is None:
        raise ParameterError(
            "exact",
            f"the constraint allows more than {MAX_TEXTS} texts, or very long ones.",
            hint="Leave it out, or give a constraint with fewer texts, such as type=Literal[…].",
        )
    if not texts:
        raise ConstraintError("the constraint allows no text.")
    limit = request.limit - request.prompt_len
    spelled = {text: request.output.tokens_of(text) for text in texts}
    fitting = {text: tokens for text, tokens in spelled.items() if len(tokens) <= limit}
    if not fitting:
        raise ParameterError(
            "max_tokens",
            f"none of the texts fits {limit} tokens, and exact draws whole ones.",
            hint="Raise it.",
        )
    return fitting


class _OutcomeReader(LogitReader):
    """Sums the probabilities of a row's next tokens by outcome, on the device of the logits.

    Args:
        outcomes: outcomes of the tokens.

    Attributes:
        outcomes: the same. Rows with the same outcomes are read together.
        found: what was read together, and the row in it; None before the draw.
    """

    def __init__(self, outcomes: Outcomes) -> None:
        self.outcomes = outcomes
        self.found: tuple[_Table, int] | None = None

    @property
    def group(self) -> Hashable:
        return self.outcomes

    def read_together(self, logits: torch.Tensor, readers: Sequence[LogitReader]) -> None:
        classes, live = _tensors_of_outcomes(self.outcomes, logits.device)
        ends = len(self.outcomes.ends)
        chunk = max(_MAX_NUMBERS // logits.shape[1], 1)
        pieces = []
        for start in range(0, len(logits), chunk):
            rows = logits[start : start + chunk]
            shares = rows.double().softmax(-1)  # float64: small masses are compared, too
            if ends <= _FEW_ENDS:  # a GPU's atomic additions to few numbers are slow
                masks = (classes == FIRST_END + end for end in range(ends))
                sums = [(shares * mask).sum(-1, keepdim=True) for mask in masks]
            else:
                zeros = shares.new_zeros(len(rows), FIRST_END + ends)
                sums = [zeros.index_add_(1, classes, shares)[:, FIRST_END:]]
            pieces.append(torch.cat((*sums, shares[:, live]), 1))
        table = _Table(torch.cat(pieces))
        for row, reader in enumerate(readers):
            assert isinstance(reader, _OutcomeReader)
            reader.found = table, row

    def probabilities(self) -> tuple[list[float], list[float]]:
        """Returns the total probability for each of the outcomes' ends, and that of each live
        token. The row must have been drawn.
        """
        assert self.found is not None
        table, row = self.found
        count = len(self.outcomes.ends)
        return table.rows[row][:count], table.rows[row][count:]


class _Table:
    """Numbers on a device, which are copied to the host when the first of them is needed.

    Args:
        numbers: float64 [R, N].
    """

    def __init__(self, numbers: torch.Tensor) -> None:
        self._numbers = numbers

    @cached_property
    def rows(self) -> list[list[float]]:
        found: list[list[float]] = self._numbers.tolist()
        return found


@lru_cache(32)
def _tensors_of_outcomes(
    outcomes: Outcomes, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the class of each token, int32 [V], and the live tokens, on a device."""
    live = torch.tensor([token for token, _ in outcomes.live], dtype=torch.int64)
    return torch.from_numpy(outcomes.build_classes()).to(device), live.to(device)


@memoize
def list_drawable_texts(constraint: Constraint) -> tuple[str, ...] | None:
    """Returns the texts of a constraint, or None if there are too many.

    Raises:
        ParameterError: they can't be listed.
    """
    if isinstance(constraint, Choices):
        options = tuple(sorted(set(constraint.options)))
        return options if len(options) <= MAX_TEXTS else None
    try:
        texts = list_texts(language_for_constraint(constraint), MAX_TEXTS)
        # A schema can have rules that no language expresses, such as `uniqueItems`.
        return None if texts is None else tuple(t for t in texts if matches(constraint, t))
    except (ConstraintError, RecursionError) as error:
        raise ParameterError(
            "exact",
            f"the texts of the constraint can't be listed: {error}",
            hint="Leave it out, or give a constraint with fewer texts, such as type=Literal[…].",
        ) from None


def _parameters_of_rows(params: ResolvedParams) -> ResolvedParams:
    """Returns the parameters of a request that only computes the distribution of a next token."""
    return replace(
        params,
        max_tokens=1,
        n=1,
        temperature=0,
        seed=0,  # so that no draw of the engine's own seeds is used up
        exact=False,
        ignore_eos=True,
        return_prompt_token_ids=False,
    )


def _draw_index(masses: Sequence[float], request: Request) -> int:
    """Returns the index of the text that a request draws: the likeliest at temperature 0, otherwise
    the winner of a race with the request's seed.
    """
    with np.errstate(divide="ignore"):
        scores = np.log(masses)
    if request.params.greedy:
        return int(scores.argmax())
    noise = np.log(draw_exponentials(request.seed % 2**64, request.prompt_len, len(masses)))
    return int((scores / request.params.temperature - noise).argmax())
