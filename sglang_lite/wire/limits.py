"""Limits on the size of a message, and the errors for exceeding them. The errors name the place in
the message.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from sglang_lite.errors import WireError

INTEGERS: Final = range(-(2**63), 2**64)  # integers that fit into 64 bits, signed or unsigned


class Limits(NamedTuple):
    """Limits of a message, for its sender and its reader.

    Attributes:
        bytes: size of the message.
        depth: nesting depth of objects and lists.
        items: number of values and names; each may take 60 times its bytes in memory.
    """

    bytes: int = 2**26
    depth: int = 128
    items: int = 2**20


LIMITS: Final = Limits()


def pointer_to(path: Iterable[str | int]) -> str:
    """Returns the JSON Pointer (RFC 6901) to a path of names and indices."""
    return "".join(f"/{str(part).replace('~', '~0').replace('/', '~1'):.200}" for part in path)


def size_error(size: int, limits: Limits) -> WireError:
    return WireError(
        f"{size} bytes are more than {limits.bytes}", hint="Send less, or raise the limit."
    )


def depth_error(path: Iterable[str | int], limits: Limits) -> WireError:
    return WireError(
        f"nested deeper than {limits.depth}", pointer=pointer_to(path), hint="Nest less."
    )
