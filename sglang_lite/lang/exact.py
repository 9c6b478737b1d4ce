"""Probabilities of the texts from which an exact generation was drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from sglang_lite.errors import Location
from sglang_lite.notebook.markup import element, notebook_html, share_meter, table_of_rows
from sglang_lite.protocol import Generation, ParameterError, ProgramError

MAX_GAP_OF_ALL_TEXTS: Final = 2e-3  # up to which the probabilities of all texts count as known


@dataclass(frozen=True, slots=True)
class ExactShares:
    """Probabilities of the texts that a constraint allows, as the model itself has them.

    Attributes:
        probs: probability of each text, given that one of them is read from the beginning of what
            the model writes freely. If the constraint allows more than 64 texts, those that were
            drawn, and the likeliest of the others that were found on the way.
        log_mass: log of the probability that one of the constraint's texts is read, as far as it
            was computed. Far below 0, the model would have written something else. With
            `heal=True`, of the prompt's last word and one of the texts.
        gap: upper bound for the total variation distance between `probs` and the probabilities that
            would be found if nothing was left out. It says how much is known of `probs`; a draw is
            exact whatever it is.
        rows: number of beginnings of texts after which the next token's distribution was computed.
        steps: number of rounds in which that was done, one after another.
        tries: number of times that the draw of this text has begun; 1 if all texts were listed.
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
    """Reads the probabilities from the record of a variable. Raises as `ProgramState.exact` does."""
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
