"""Stop strings, matched on text as it arrives in pieces of any size."""

from __future__ import annotations


class StopMatcher:
    """Finds the first stop string in a growing text and holds back only what may still become one.

    The outcome does not depend on how the text is cut into pieces: the stop that is complete first wins, the longer
    one among those that end together.

    Args:
        stops: the stop strings, none empty.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._prefixes = {stop[:k] for stop in stops for k in range(1, len(stop))}
        self._longest = max((len(stop) for stop in stops), default=0)
        self._held = ""
        self.matched: str | None = None

    def push(self, piece: str) -> str:
        """Takes the next piece and returns text that belongs to the result for certain. After a match
        (`self.matched` is the stop), what follows is dropped."""
        if not self._stops:
            return piece
        if self.matched is not None:
            return ""
        text = self._held + piece
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.matched = min(found)
            self._held = ""
            return text[:at]
        keep = next((k for k in range(min(self._longest - 1, len(text)), 0, -1) if text[-k:] in self._prefixes), 0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text still held back, at the end of the generation."""
        held, self._held = self._held, ""
        return held
