"""Drafter that uses a row's grammar. It guesses the text that the grammar forces, or how a quote
from one of the grammar's source texts continues.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from sglang_lite.runtime.drafting.guess import Chance, Guess, Guesser
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.requests.request import Request

_LONGEST = 64  # maximum number of last characters to search for
_AHEAD = 200  # characters that are tokenised at a time
# evidence; for copied text the minimum
_FORCED = 0
_COPIED = 1


class GrammarDrafter:
    """Drafts quotes from a grammar's source texts. Also drafts the tokens that a grammar forces,
    for requests whose forced tokens are scored and therefore not appended as a whole.
    """

    name = "grammar"

    def can_draft(self, request: Request) -> bool:
        matcher = request.output.matcher
        return matcher is not None and (request.params.scores_tokens or bool(matcher.sources))

    def make_guesser(self, request: Request, known: Ints, chance: Chance) -> Guesser:
        return _Following(request)

    def learn_tokens(self, request: Request, text: Sequence[int], start: int) -> None:
        """Remembers nothing, because it only needs the grammar."""


class _Following:
    """Guesses the tokens that the grammar forces. After those, guesses tokens from a source text:
    the ones after the first occurrence of the longest suffix of the row's text. The evidence for
    these tokens is the suffix's length, and whether the suffix occurs only once in the source.
    """

    def __init__(self, request: Request) -> None:
        matcher = request.output.matcher
        assert matcher is not None
        self._output = request.output
        self._sources = matcher.sources
        self._next = (
            matcher.find_forced_tokens() if request.params.scores_tokens else []
        )  # tokens that follow
        self._seen: int | None = None  # number of tokens of the text before them, once known
        self._evidence = _FORCED

    def __call__(self, text: Sequence[int], state: Hashable) -> Guess | None:
        new = [] if self._seen is None else list(text[self._seen :])
        came = self._next[: len(new)]
        self._next = self._next[len(new) :]
        if came != new or not self._next:
            self._next = self._copy_from_source(
                self._output.text_of(text).decode("utf-8", "ignore")
            )
        self._seen = len(text)
        return Guess(self._next[0], self._evidence) if self._next else None

    def _copy_from_source(self, text: str) -> list[int]:
        """Finds the longest suffix of the text in a source, and returns the tokens that follow it
        there. Also sets the evidence for these tokens.
        """
        length, at, source = max(
            (_longest_suffix_in(source, text) for source in self._sources), default=(0, 0, "")
        )
        if not length:
            return []
        alone = source.find(text[-length:], at + 1) < 0
        self._evidence = _COPIED + 2 * length.bit_length() + alone
        end = at + length
        return self._output.tokens_of(source[end : end + _AHEAD])


def _longest_suffix_in(source: str, text: str) -> tuple[int, int, str]:
    """Finds the longest suffix of a text that occurs in a source, up to a limit. Returns its
    length, the index of its first occurrence, and the source.
    """
    length = at = 0
    while length < min(len(text), _LONGEST):
        found = source.find(text[-length - 1 :], max(at - 1, 0))
        if found < 0:
            break
        length = length + 1
        at = found
    return length, at, source
