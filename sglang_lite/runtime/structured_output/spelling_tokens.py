"""Finds the tokens with which a model can spell a given text."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from sglang_lite.runtime.structured_output.outcomes import DEAD, LIVE, Outcomes, SortedVocabulary

SPELLED = -1  # position after a token that spells the end of the text


def find_spelling_tokens(vocabulary: SortedVocabulary, text: bytes) -> Outcomes:
    """Returns the outcomes of the tokens that may spell the remainder of a text.

    A token is live in two cases. If it begins with the whole remainder, its position is SPELLED. If
    the remainder begins with the token, the position is the number of the token's bytes.

    Args:
        vocabulary: tokens of the model.
        text: the remainder.
    """
    texts = vocabulary.texts
    low = bisect_left(texts, text)
    last = text.rstrip(b"\xff")
    after = last[:-1] + bytes((last[-1] + 1,)) if last else None
    high = len(texts) if after is None else bisect_left(texts, after, low)
    numbers = []
    for length in range(1, len(text)):
        number = bisect_left(texts, text[:length])
        while (
            number < len(texts) and texts[number] == text[:length]
        ):  # several ids may have the same bytes
            numbers.append(number)
            number += 1
    positions = [len(texts[number]) for number in numbers] + [SPELLED] * (high - low)
    numbers += range(low, high)
    stretches: list[tuple[int, int]] = []
    for number in numbers:  # sorted, as prefixes of `text` come before tokens that begin with it
        if stretches and stretches[-1][0] == number:
            stretches[-1] = number + 1, LIVE
        else:
            stretches += [(number, DEAD), (number + 1, LIVE)]
    stretches.append((len(texts), DEAD))
    return Outcomes(
        vocabulary,
        tuple(stretches),
        DEAD,
        {},
        vocabulary.ids[numbers],
        np.array(positions, dtype=np.int32),
    )
