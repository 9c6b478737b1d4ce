"""Types of values of which a signature can say no more, each with the reason."""

from __future__ import annotations

from typing import Any, TypeAlias

# A JSON value as parsers give it: any type for it would be narrowed at every step by code that checks it in any case.
Json: TypeAlias = Any

# A value of the user's program: an argument, a result, an option that is passed on. Its type is the user's.
UserValue: TypeAlias = Any

# An object of another package, which may be absent, has no types, or others in each version.
Foreign: TypeAlias = Any
