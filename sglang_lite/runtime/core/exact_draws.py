"""Draws texts of a constraint in proportion to the model's own probabilities (`gen(exact=True)`).

Answers are distributed as if the model wrote freely, and the answer were the text read from the
beginning of its output, ignoring outputs that begin with no text of the constraint. So all
spellings of a text count, and so do all continuations after it. But no free text is drawn: a search
asks for beginnings of texts, and the distribution of the next token after each beginning is
computed by a request for one token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from sglang_lite.constraints.formal.listing import list_texts
from sglang_lite.constraints.kinds import language_for_constraint
from sglang_lite.constraints.matching import matches
from sglang_lite.constraints.memo import memoize
from sglang_lite.protocol import (
    Choices,
    Constraint,
    ConstraintError,
    Continuation,
    Delta,
    EngineClosedError,
    Generation,
    ParameterError,
    Span,
)
from sglang_lite.runtime.core.mass_rows import MassRows
from sglang_lite.runtime.exact.beginnings import Beginning, MassRow
from sglang_lite.runtime.exact.searches import (
    Drawing,
    DrawKey,
    DrawnText,
    Enumeration,
    ExactSearch,
    Likeliest,
    WeightedDrawing,
)
from sglang_lite.runtime.exact.text_limits import TextLimits
from sglang_lite.runtime.requests.request import Request, State
from sglang_lite.runtime.structured_output.outcomes import Outcomes, TokenOutcomes

if TYPE_CHECKING:
    from sglang_lite.runtime.core.engine_context import EngineContext

MAX_TEXTS = 64  # maximum number of texts in a language whose probabilities are all computed


class ExactDraws:
    """Exact draws of a generation's samples. The samples share all computed distributions.

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
        self._context = context
        self._requests = requests
        self._constraint = constraint
        kept = first.prompt_len - first.respelled
        prompt = first.tokens[:kept]
        # text of the prompt's last tokens, if these are respelled together with the answer
        self._before = context.tokenizer.decode(first.tokens[kept : first.prompt_len].tolist())
        self._outcomes, self._make_search = _choose_search(
            context, requests, constraint, self._before
        )
        self._rows = MassRows(context, requests, prompt, constraint, self._add_row)
        self._begin()

    def _begin(self) -> None:
        self._search = self._make_search()
        self._few_texts = isinstance(self._search, Enumeration)
        self._weights = self._context.builder.weights.version

    # ---------------------------------------------------------------------------- the loop's thread

    def start(self) -> None:
        """Submits the first rows."""
        self._rows.watch_requests()
        with self._rows.failing_requests():
            self._advance()

    def _advance(self) -> None:
        """Submits the rows that have to be computed next, or ends the requests if there are none."""
        if not self._rows.are_needed:
            return
        if self._weights != self._context.builder.weights.version:
            self._begin()  # masses of different weights are not comparable
        while not self._rows.open:
            beginnings = self._search.take_beginnings()
            if not beginnings:
                self._end_requests()
                return
            known = [self._outcomes.get_outcomes(each.position) for each in beginnings]
            outcomes = [each for each in known if each is not None]
            if len(outcomes) < len(beginnings):
                if not self._few_texts:  # finding outcomes can take tenths of a second
                    self._find_outcomes_in_background(beginnings)
                    return
                outcomes = self._find_outcomes(beginnings)
            self._submit_rows(beginnings, outcomes)

    def _find_outcomes(self, beginnings: Sequence[Beginning]) -> list[Outcomes]:
        return [self._outcomes.find_outcomes(each.position) for each in beginnings]

    def _find_outcomes_in_background(self, beginnings: Sequence[Beginning]) -> None:
        def resume(found: Future[list[Outcomes]]) -> None:
            self._context.loop.inbox.post(partial(self._resume, beginnings, found))

        try:
            future = self._context.encoder.submit(self._find_outcomes, beginnings)
        except RuntimeError:  # the executor has been shut down
            raise EngineClosedError("the engine is closed.") from None
        future.add_done_callback(resume)

    def _resume(self, beginnings: Sequence[Beginning], found: Future[list[Outcomes]]) -> None:
        with self._rows.failing_requests():
            if not self._rows.are_needed:
                return
            if self._weights == self._context.builder.weights.version:
                self._submit_rows(beginnings, found.result())
            if not self._rows.open:
                self._advance()

    def _submit_rows(self, beginnings: Sequence[Beginning], outcomes: Sequence[Outcomes]) -> None:
        """Submits the requests that compute rows, each with the outcomes of its next token. The
        search gives up beginnings that are too long for the context.
        """
        for beginning in self._rows.submit(beginnings, outcomes):
            self._search.give_up(beginning)

    def _add_row(self, row: MassRow) -> None:
        self._search.add_row(row)
        if not self._rows.open:
            self._advance()

    def _end_requests(self) -> None:
        """Draws the texts, and ends the requests with them."""
        drawn = self._search.draw()
        self._rows.release_requests()
        for request, text in zip(self._requests, drawn, strict=True):
            if not request.ended:
                self._end_request(request, text)
        self._requests = []  # breaks the reference cycle, which avoids garbage collection

    def _answer(self, text: str) -> str:
        """Returns a drawn text without the end of the prompt, which was tokenised again with it."""
        return text[len(self._before) :]

    def _end_request(self, request: Request, drawn: DrawnText) -> None:
        loop = self._context.loop
        text = self._answer(drawn.text)
        tokens = tuple(request.output.tokens_of(text))
        if drawn.cut:  # the text's usual tokens may be more than those that were drawn
            tokens = tokens[: request.limit - request.prompt_len]
            text = self._context.tokenizer.decode(list(tokens)).rstrip("\ufffd")
        first = self._rows.first
        assert first is not None
        duration = loop.clock.now() - request.times.submitted
        usage = msgspec.structs.replace(
            first.usage,
            prompt_tokens=request.prompt_len,
            completion_tokens=len(tokens),
            first_token_s=duration,
            total_s=duration,
        )
        figures = {**drawn.figures, "rows": self._rows.computed, "steps": self._rows.steps}
        if drawn.probs:
            figures["probs"] = {self._answer(each): share for each, share in drawn.probs.items()}
        kind = "weighted" if request.params.exact == "weighted" else "exact"
        meta = dict[str, object]({kind: figures})
        if self._before:
            meta["healed"] = {"end": self._before}
        if "cache_miss" in first.meta:
            meta["cache_miss"] = first.meta["cache_miss"]
        prompt = request.tokens[:0]
        if request.params.return_prompt_token_ids:
            meta["weight_version"] = self._weights
            prompt = request.tokens[: request.prompt_len]
            prompt = prompt if request.media is None else request.media.restore_placeholders(prompt)
        generation = Generation(
            text,
            tokens,
            (Span(text, special=False),) if text else (),
            finish_reason="length" if drawn.cut else "stop",
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


def _choose_search(
    context: EngineContext,
    requests: Sequence[Request],
    constraint: Constraint | None,
    before: str,
) -> tuple[TokenOutcomes, Callable[[], ExactSearch]]:
    """Returns the outcomes of tokens for the texts that requests may draw, and a function that
    creates a search for these texts. In the search, each text is preceded by `before`.

    Raises:
        ConstraintError: no text satisfies the constraint, or its language is too large.
        ParameterError: the requests can't be drawn exactly.
    """
    first = requests[0]
    constraint = _check_request(first, constraint)
    weighted = first.params.exact == "weighted"
    any_gap = first.params.exact == "bound"
    texts = None if weighted else list_drawable_texts(constraint)
    keys = [
        DrawKey(each.seed, each.prompt_len, 0.0 if each.params.greedy else each.params.temperature)
        for each in requests
    ]
    token_bytes = context.tokenizer.token_bytes
    limit = first.limit - first.prompt_len
    tokens_of = first.output.tokens_of
    if texts is not None:
        fitting = _fitting_texts(texts, tokens_of, limit)
        spellings = {before + text: tokens_of(before + text) for text in fitting}
        outcomes = context.compiler.find_text_outcomes(tuple(spellings))
        start = outcomes.reader.start
        return outcomes, partial(Enumeration, spellings, keys, start, token_bytes, any_gap=any_gap)
    temperature = keys[0].temperature
    if temperature not in (0, 1):
        raise ParameterError(
            "exact",
            f"the constraint allows more than {MAX_TEXTS} texts, which can be drawn at temperature 0 or 1, not at "
            f"{temperature:g}.",
            hint="Use temperature=1, or give a constraint with fewer texts, such as type=Literal[…].",
        )
    outcomes = context.compiler.find_language_outcomes(constraint, before)
    reader = outcomes.reader

    def make_search() -> ExactSearch:
        limits = TextLimits(
            lambda text: first.respelled + len(tokens_of(text[len(before) :])),
            first.respelled + limit,
            lambda text: matches(constraint, text[len(before) :]),
        )
        if weighted:
            return WeightedDrawing(keys, reader.start, token_bytes, limits)
        if temperature == 0:
            return Likeliest(len(keys), reader, token_bytes, limits, any_gap=any_gap)
        return Drawing(keys, reader.start, token_bytes, limits)

    return outcomes, make_search


def _check_request(request: Request, constraint: Constraint | None) -> Constraint:
    """Returns the constraint of a request that may be drawn exactly. Raises ParameterError for
    others.
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
    return constraint


def _fitting_texts(
    texts: Sequence[str], tokens_of: Callable[[str], list[int]], limit: int
) -> list[str]:
    """Returns the texts that fit a limit of tokens.

    Raises:
        ConstraintError: there is no text.
        ParameterError: none fits.
    """
    if not texts:
        raise ConstraintError("the constraint allows no text.")
    fitting = [text for text in texts if len(tokens_of(text)) <= limit]
    if not fitting:
        raise ParameterError(
            "max_tokens",
            f"none of the texts fits {limit} tokens, and exact draws whole ones.",
            hint="Raise it.",
        )
    return fitting


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
    except ConstraintError as error:
        reason = str(error)
    except RecursionError:
        reason = "a rule of the grammar refers to itself at its beginning."
    raise ParameterError(
        "exact",
        f"the texts of the constraint can't be read from free text: {reason}",
        hint="Leave it out, or give a simpler constraint, such as type=Literal[…].",
    )
