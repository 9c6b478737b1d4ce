"""Heals the end of a prompt (`gen(heal=True)`): replaces the tokens of its last word by those that
the model would have used for the word together with the text after it.

The prompt's text does not change. The tokens of the last word, the last of which may continue after
the prompt, are drawn from all spellings in proportion to the model's probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_lite.protocol import ConstraintError, ParameterError
from sglang_lite.runtime.core.mass_rows import MassRows
from sglang_lite.runtime.exact.beginnings import Beginning, MassRow
from sglang_lite.runtime.exact.spellings import Spellings, SpellingSearch
from sglang_lite.runtime.executor.sampler import SamplingTable, sample
from sglang_lite.runtime.executor.step_record import SAMPLING, sampling_row
from sglang_lite.runtime.requests.request import Request
from sglang_lite.runtime.structured_output.base import CompiledGrammar

if TYPE_CHECKING:
    from sglang_lite.runtime.core.engine_context import EngineContext

_MAX_CHECKED = 128  # maximum number of different endings that are checked against a grammar
_ENOUGH = 0.999  # total probability of spellings after which no others are checked


class Healing:
    """Healing of a generation's prompt, for all its samples.

    Creating it can be slow, so it must not be done on the loop's thread.

    Args:
        context: context of the engine.
        requests: one for each sample, with `respelled` tokens at the end of their prompt. None of
            them is scheduled.
        origin: identifies what requested the outputs, such as their constraint.
        grammar: grammar of the requests' texts, or None.
        resume: called on the loop's thread when the spellings are known. Must lead to a call of
            `set_prompts` off that thread.

    Raises:
        ParameterError: the requests have a logit processor.
    """

    def __init__(
        self,
        context: EngineContext,
        requests: Sequence[Request],
        origin: Hashable,
        grammar: CompiledGrammar | None,
        resume: Callable[[Healing], object],
    ) -> None:
        first = requests[0]
        if first.processor is not None:
            raise ParameterError(
                "heal", "can't be combined with logit_processor.", hint="Leave logit_processor out."
            )
        self._context = context
        self._requests = requests
        self._grammar = grammar
        self._resume = resume
        self._kept = first.prompt_len - first.respelled
        usual = first.tokens[self._kept : first.prompt_len].tolist()
        self._end = context.tokenizer.decode_bytes(usual)
        self._search = SpellingSearch(
            self._end,
            usual,
            context.compiler.find_spelling_tokens,
            context.tokenizer.token_bytes,
            greedy=first.params.greedy and grammar is None,
        )
        self._first_beginnings = self._search.take_beginnings()
        for beginning in self._first_beginnings:
            self._search.outcomes_after(beginning)  # the first call is slow
        self._rows = MassRows(
            context, requests, first.tokens[: self._kept], origin, self._receive_row
        )

    # ---------------------------------------------------------------------------- the loop's thread

    def start(self) -> None:
        """Submits the first rows."""
        self._rows.watch_requests()
        with self._rows.failing_requests():
            self._advance(self._first_beginnings)

    def _receive_row(self, row: MassRow) -> None:
        self._search.add_row(row)
        if not self._rows.open:
            self._advance(self._search.take_beginnings())

    def _advance(self, beginnings: Sequence[Beginning]) -> None:
        """Submits rows, or ends the healing if there are none."""
        while beginnings:
            outcomes = list(map(self._search.outcomes_after, beginnings))
            for beginning in self._rows.submit(beginnings, outcomes):
                self._search.give_up(beginning)
            if self._rows.open:
                return
            beginnings = self._search.take_beginnings()
        self._rows.release_requests()
        self._resume(self)

    # ------------------------------------------------------------------------- off the loop's thread

    def set_prompts(self) -> None:
        """Draws a spelling for each request, and gives it to the request. Slow with a grammar, so it
        must not be called on the loop's thread.

        Raises:
            ModelError: no spelling can be drawn.
        """
        found = self._search.list_spellings()
        masses = found.masses
        if self._grammar is not None:
            masses = masses * self._allowed_spellings(found, self._grammar)
        logits = torch.from_numpy(
            np.log(masses, where=masses > 0, out=np.full_like(masses, -np.inf))
        ).float()
        for request in self._requests:
            if request.ended:
                continue
            number = _draw_number(logits, request, self._kept)
            after = self._text_after(found, number)
            tokens = found.tokens_of(number)
            if not self._context.builder.replace_prompt_end(request, tokens):
                continue
            if after:
                request.output.begin_with_text(after)
            request.output.healed = {
                "end": self._end.decode("utf-8", "replace"),
                "token_ids": list(tokens),
                "begun": after.decode("utf-8", "replace"),
                "gap": found.gap,
                "rows": found.rows,
            }

    def _text_after(self, found: Spellings, number: int) -> bytes:
        """Returns the bytes of a spelling's last token that come after the end of the prompt."""
        token: bytes = self._context.tokenizer.token_bytes[found.tokens[number]]
        return token[found.skipped[number] :]

    def _allowed_spellings(self, found: Spellings, grammar: CompiledGrammar) -> NDArray[np.bool_]:
        """Returns True for each spelling whose bytes after the prompt begin a text of the grammar,
        bool [N]. Checks the likeliest spellings only, with at most 128 different endings, and
        returns False for the others. Spellings that end with the prompt are always allowed.
        """
        allowed = np.zeros(len(found.masses), dtype=np.bool_)
        left = float(found.masses.sum()) * (1 - _ENOUGH)
        by_mass = np.argsort(-found.masses, kind="stable")
        rest = float(found.masses.sum())
        checked: dict[bytes, bool] = {b"": True}
        for number in by_mass.tolist():
            text = self._text_after(found, number)
            if text not in checked and len(checked) <= _MAX_CHECKED and rest > left:
                checked[text] = begins_text(grammar, text)
            allowed[number] = checked.get(text, False)
            rest -= float(found.masses[number])
        return allowed


def begins_text(grammar: CompiledGrammar, text: bytes) -> bool:
    """Returns whether a text of a grammar begins with `text`. False if that ends inside a
    character.
    """
    try:
        text.decode()
        return grammar.matcher().accept_text(text)
    except (UnicodeDecodeError, ConstraintError):
        return False


def _draw_number(logits: torch.Tensor, request: Request, position: int) -> int:
    """Draws one of N spellings in the same way that the request draws its tokens.

    Args:
        logits: logarithms of the spellings' probabilities, float32 [N].
        request: the request.
        position: position of the first respelled token.
    """
    table = SamplingTable(1)
    slot = np.zeros(1, dtype=np.int32)
    row = np.array([sampling_row(request.params, request.seed)], dtype=SAMPLING)
    table.set_parameters(slot, row)
    at = np.array([position], dtype=np.int32)
    drawn = sample(logits[None].clone(), table, slot, at, {})
    for error in drawn.errors.values():
        raise error
    return drawn.tokens[0]
