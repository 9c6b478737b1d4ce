"""Aliases of Any, for values whose type a signature can't specify. A comment states the reason for
each alias.
"""

from __future__ import annotations

from typing import Any, TypeAlias

# A JSON value as parsers return it. With any other type, code that checks the value anyway would
# have to narrow the type at every step.
Json: TypeAlias = Any

# A value of the user's program: an argument, a result, an option that is passed on. The user
# chooses its type.
UserValue: TypeAlias = Any

# An object of another package. The package may be missing, may lack type annotations, or may change
# them in each version.
Foreign: TypeAlias = Any
