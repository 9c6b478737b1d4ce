"""A type whose values a mistake of hint_cures.toml saves."""

from dataclasses import dataclass


@dataclass
class Pair:
    first: int
    second: int
