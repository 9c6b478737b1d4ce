"""Spaces of the prefix cache: sequences in one space can use each other's keys and values.

A late adapter computes the tokens of a sequence only from some position on. The base model computes
the tokens before it, so these are shared with sequences that have another late adapter or none. In
the tree, the first tokens that the adapter computes have ids mixed with a hash of the adapter, and
all later tokens are below them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from sglang_lite.runtime.kv_cache.pages import Ints

if TYPE_CHECKING:
    from sglang_lite.runtime.models.lora.adapter import Adapter  # needs torch

# number of tokens whose ids are each mixed with 30 bits of an adapter's hash, to identify it
_MIXED = 4
_FIRST = np.int32(1 << 30)  # above every vocabulary


@dataclass(frozen=True, slots=True)
class PrefixSpace:
    """Part of the prefix cache that a sequence may use: a namespace, and the adapter that computes
    the sequence.

    Attributes:
        namespace: its namespace in the radix tree.
        adapter: adapter that computes its tokens from `start` on, or None.
        start: position of the first token that a late adapter computes; 0 for others.
    """

    namespace: str = ""
    adapter: Adapter | None = None
    start: int = 0

    @classmethod
    def in_namespace(cls, namespace: str, adapter: Adapter | None = None) -> PrefixSpace:
        """Returns the space for a caller's namespace and an adapter. Each combination gets a
        separate namespace in the tree, except that late adapters share one with the base model.
        """
        if adapter is not None and not adapter.invocation:
            return cls(f"\0{adapter.digest}:{namespace}", adapter)
        return cls(f"\0:{namespace}" if namespace.startswith("\0") else namespace, adapter)

    @property
    def late_digest(self) -> str:
        """Digest of the adapter if it is a late one, which applies only from its invocation tokens
        on. Empty otherwise.
        """
        return self.adapter.digest if self.adapter is not None and self.adapter.invocation else ""

    def start_at_invocation(self, prompt: Ints) -> PrefixSpace:
        """Returns the space of a prompt. A late adapter applies from the last occurrence of its
        invocation tokens on; if the prompt lacks them, only the base model applies.
        """
        if self.adapter is None or not self.adapter.invocation:
            return self
        start = _last_occurrence(prompt, self.adapter.invocation)
        return replace(self, adapter=None) if start is None else replace(self, start=start)

    def tree_key(self, tokens: Ints) -> tuple[Ints, str]:
        """Returns the ids and the namespace under which a sequence is stored in the tree."""
        return self.tree_ids(tokens), self.namespace

    def tree_ids(self, tokens: Ints, first: int = 0) -> Ints:
        """Returns the ids under which tokens are stored in the tree. They differ from the token ids
        only where a late adapter begins.

        Args:
            tokens: int32 token ids.
            first: position of the first one.
        """
        begin = max(self.start, first)
        end = min(self.start + _MIXED, first + len(tokens))
        late = self.late_digest
        if not late or begin >= end:
            return tokens
        hashes = np.frombuffer(hashlib.shake_128(late.encode()).digest(4 * _MIXED), dtype="<i4")
        mixed = tokens.copy()
        mixed[begin - first : end - first] ^= hashes[begin - self.start : end - self.start]
        mixed[begin - first : end - first] &= _FIRST - 1
        mixed[begin - first : end - first] |= _FIRST
        return mixed

    def count_trusted_tokens(self, cached: int) -> int:
        """Returns how many of the cached tokens may be used, usually all. The first tokens that a
        late adapter computes have ids mixed with its digest, and by chance another adapter's ids
        may be the same. If the cached tokens end among these, only the tokens before the adapter's
        start may be used.
        """
        return (
            self.start if self.late_digest and self.start < cached < self.start + _MIXED else cached
        )

    def has_same_model(self, other: PrefixSpace) -> bool:
        """Returns whether the same adapter, or none, computes both sequences."""
        return self.adapter is other.adapter

    def common_length_with(self, other: PrefixSpace, count: int) -> int:
        """Compares two sequences, one in each space, whose first `count` tokens are equal. Returns
        how many leading tokens also have equal keys and values.
        """
        if self == other:
            return count
        if self.namespace != other.namespace:
            return 0
        return min([count, *(space.start for space in (self, other) if space.late_digest)])


def _last_occurrence(tokens: Ints, part: tuple[int, ...]) -> int | None:
    """Returns the position where `part` last occurs in `tokens`, or None if it does not occur."""
    if len(tokens) < len(part):
        return None
    places = (
        (np.lib.stride_tricks.sliding_window_view(tokens, len(part)) == part).all(1).nonzero()[0]
    )
    return int(places[-1]) if len(places) else None
