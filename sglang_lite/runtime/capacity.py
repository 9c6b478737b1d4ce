"""Sizes of an engine on its device, determined by its settings, its model and the device's memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sizes:
    """Values of max_running, step_tokens and page_size that an engine uses. Values that the config
    leaves open are the device's defaults.
    """

    max_running: int
    step_tokens: int
    page_size: int


@dataclass(frozen=True, slots=True)
class Capacity:
    """Capacity of an engine on its device.

    Attributes:
        sizes: sizes in force: those of the config, or the device's defaults.
        context_length: longest sequence that the config and the model allow, in tokens.
        pages: number of pages in the KV cache.
        longest: longest sequence that also fits the KV cache, in tokens.
        window_pages: number of pages in the KV cache of the layers with a window; 0 if these use
            `pages` as well.
        states: number of places for states of sequences; 0 if the model has none.
    """

    sizes: Sizes
    context_length: int
    pages: int
    longest: int
    window_pages: int = 0
    states: int = 0

    @property
    def tokens(self) -> int:
        """Size of the KV cache, in tokens."""
        return self.pages * self.sizes.page_size
