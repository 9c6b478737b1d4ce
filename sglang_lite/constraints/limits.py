"""Python's own limits (of recursion, of numbers), as refusals: what is written within them may ask for more than they
allow once it is worked out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sglang_lite.protocol import ConstraintError, SglError


@contextmanager
def within_limits(kind: str) -> Iterator[None]:
    """Turn Python's own limits into refusals.

    Args:
        kind: of what is worked out inside, for errors.

    Raises:
        ConstraintError: it is nested too deeply, or has numbers that are too large.
    """
    try:
        yield
    except SglError:
        raise
    except RecursionError as error:
        raise ConstraintError(f"{kind}: nested too deeply.") from error
    except (OverflowError, ValueError, ZeroDivisionError) as error:
        raise ConstraintError(f"{kind}: a number in it is too large or too small: {error}.") from error
