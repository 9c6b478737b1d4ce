"""Prices of tokens, and so of a usage. What is not known is None, never 0."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources

from sglang_lite.lang.argument_names import tells_fields
from sglang_lite.protocol import Usage

_HOSTS = ("openai/", "anthropic/", "vertex_ai/", "gemini/")  # put before a model's name by those who route calls
_MILLION = 1_000_000


@tells_fields
@dataclass(frozen=True, slots=True)
class Price:
    """Prices of a model in US dollars for a million tokens; None: not known.

    Attributes:
        input: of prompt tokens that are neither read from a cache nor written to one.
        output: of generated tokens, reasoning included.
        cached: of prompt tokens that are read from a cache.
        written: of prompt tokens that are written to one.
        up_to: tokens of the longest prompt that costs so much; None: any.
    """

    input: float
    output: float
    cached: float | None = None
    written: float | None = None
    up_to: int | None = None

    def of(self, usage: Usage) -> float | None:
        """Dollars for a usage of one call; None: it has tokens whose price is not known."""
        if self.up_to is not None and usage.prompt_tokens > self.up_to:
            return None
        plain = usage.prompt_tokens - usage.cached_tokens - usage.written_tokens
        parts = (
            (plain, self.input), (usage.cached_tokens, self.cached), (usage.written_tokens, self.written),
            (usage.completion_tokens, self.output),
        )  # fmt: skip
        total = 0.0
        for tokens, each in parts:
            if tokens and each is None:
                return None
            total += tokens * (each or 0.0)
        return total / _MILLION


def price_of(model: str) -> Price | None:
    """The price of a model by its name; None: it is not known."""
    for host in _HOSTS:
        model = model.removeprefix(host)
    return _prices().get(model)


def price(usage: Usage, model: str) -> float | None:
    """Dollars that a usage costs with a model.

    Args:
        model: its name, as the provider has it; dated names have prices of their own.

    Returns:
        None where a price is not known.
    """
    found = price_of(model)
    return None if found is None else found.of(usage)


@cache
def _prices() -> dict[str, Price]:
    text = resources.files("sglang_lite.lang.backend").joinpath("profiles/prices.toml").read_text("utf-8")
    providers = [each for each in tomllib.loads(text).values() if isinstance(each, dict)]
    return {name: Price(**prices) for models in providers for name, prices in models.items()}
