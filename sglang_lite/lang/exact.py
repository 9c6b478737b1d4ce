"""Probabilities of the texts from which an exact generation was drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from sglang_lite.errors import Location
from sglang_lite.notebook.markup import element, notebook_html, share_meter, table_of_rows
from sglang_lite.protocol import Generation, ParameterError, ProgramError

MAX_GAP_OF_ALL_TEXTS: Final = 2e-3  # largest gap of probabilities that count as known


@dataclass(frozen=True, slots=True)
class ExactShares:
    """Probabilities that the model itself, without a constraint, gives to the allowed texts.

    Attributes:
        probs: probability of each text, given that the model's unconstrained output begins with one
            of them. If the constraint allows more than 64 texts, contains only the drawn texts and
            the likeliest of the other texts that were found while drawing.
        log_mass: log of the probability that the model's unconstrained output begins with one of
            the texts, as far as it was computed. If it is far below 0, the model would have written
            something else. With `heal=True`, the output includes the prompt's last word.
        gap: upper bound for the total variation distance between `probs` and the probabilities that
            a complete computation would find. It only limits how well `probs` is known; the draw is
            exact for any gap.
        rows: number of text beginnings after which the next token's distribution was computed.
        steps: number of consecutive rounds in which these distributions were computed.
        tries: number of times that the draw of this text was started; 1 if all texts were listed.
    """

    probs: Mapping[str, float]
    log_mass: float
    gap: float
    rows: int
    steps: int
    tries: int = 1

    def _repr_html_(self) -> str:
        by_share = sorted(self.probs.items(), key=lambda each: -each[1])
        rows = ((text, share_meter(share)) for text, share in by_share)
        title = f"ExactShares: log_mass {self.log_mass:.3f}, gap {self.gap:.2g}"
        return notebook_html(element("b", title), table_of_rows(("text", "probability"), rows))


def read_exact_shares(
    record: object, name: object, sample: int, where: Location | None
) -> ExactShares:
    """Reads the probabilities from the record of a variable. Raises errors like
    `ProgramState.exact`.
    """
    samples = record if isinstance(record, list) else [record]
    if not isinstance(sample, int) or not 0 <= sample < len(samples):
        raise ParameterError(
            "sample", f"{sample!r:.60} is no index of {len(samples)} samples.", where=where
        )
    found = samples[sample]
    shares = found.meta.get("exact") if isinstance(found, Generation) else None
    if shares is None:
        raise ProgramError(
            f"{name!r} was not drawn exactly.", hint="Use gen(exact=True).", where=where
        )
    return ExactShares(**shares)
