"""Reports Python's own limits (recursion depth, size of numbers) as ConstraintErrors. A constraint
within its own limits may still exceed Python's while it is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sglang_lite.protocol import ConstraintError, SglError


@contextmanager
def convert_limit_errors(kind: str) -> Iterator[None]:
    """Converts errors about Python's own limits, raised inside the block, into ConstraintErrors.

    Args:
        kind: name of what is compiled in the block, for error messages.

    Raises:
        ConstraintError: the input is nested too deeply, or contains a number outside Python's
            range.
    """
    try:
        yield
    except SglError:
        raise
    except RecursionError as error:
        raise ConstraintError(f"{kind}: nested too deeply.") from error
    except (OverflowError, ValueError, ZeroDivisionError) as error:
        raise ConstraintError(
            f"{kind}: a number in it is too large or too small: {error}."
        ) from error
