"""Aliases of Any, for values whose type a signature can't specify. A comment states the reason for
each alias.
"""

from __future__ import annotations

from typing import Any, TypeAlias

# A JSON value as parsers return it. With any other type, code that checks it anyway would narrow at
# every step.
Json: TypeAlias = Any

# A value of the user's program: an argument, a result, an option that is passed on. The user
# chooses its type.
UserValue: TypeAlias = Any

# An object of another package that may be missing, has no type annotations, or different ones in
# each version.
Foreign: TypeAlias = Any
