"""Prices of tokens and of usages. An unknown price is None, never 0."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources

from sglang_lite.lang.argument_names import explains_wrong_fields
from sglang_lite.protocol import Usage

# prefixes that call routers add to a model's name
_HOSTS = ("openai/", "anthropic/", "vertex_ai/", "gemini/")
_MILLION = 1_000_000


@explains_wrong_fields
@dataclass(frozen=True, slots=True)
class Price:
    """Prices of a model in US dollars per million tokens; None if unknown.

    Attributes:
        input: price of prompt tokens that are neither read from a cache nor written to one.
        output: price of generated tokens, reasoning included.
        cached: price of prompt tokens that are read from a cache.
        written: price of prompt tokens that are written to a cache.
        up_to: length of the longest prompt with these prices, in tokens, or None for any length.
    """

    input: float
    output: float
    cached: float | None = None
    written: float | None = None
    up_to: int | None = None

    def of(self, usage: Usage) -> float | None:
        """Returns the cost of one call's usage in dollars, or None if a price is unknown or the
        prompt is longer than `up_to`.
        """
        if self.up_to is not None and usage.prompt_tokens > self.up_to:
            return None
        plain = usage.prompt_tokens - usage.cached_tokens - usage.written_tokens
        parts = (
            (plain, self.input),
            (usage.cached_tokens, self.cached),
            (usage.written_tokens, self.written),
            (usage.completion_tokens, self.output),
        )
        total = 0.0
        for tokens, each in parts:
            if tokens and each is None:
                return None
            total += tokens * (each or 0.0)
        return total / _MILLION


def find_price(model: str) -> Price | None:
    """Returns the price of a model by its name, or None if unknown."""
    for host in _HOSTS:
        model = model.removeprefix(host)
    return _prices().get(model)


def price(usage: Usage, model: str) -> float | None:
    """Returns the cost of a usage in dollars.

    Args:
        model: the provider's name of the model; dated names have their own prices.

    Returns:
        Dollars, or None if a price is unknown.
    """
    found = find_price(model)
    return None if found is None else found.of(usage)


@cache
def _prices() -> dict[str, Price]:
    text = (
        resources.files("sglang_lite.lang.backend.profiles")
        .joinpath("prices.toml")
        .read_text("utf-8")
    )
    providers = [each for each in tomllib.loads(text).values() if isinstance(each, dict)]
    return {name: Price(**prices) for models in providers for name, prices in models.items()}
