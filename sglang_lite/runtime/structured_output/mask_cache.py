"""Cache of token masks, shared by many languages.

An engine computes a new mask for each request. In a batch of requests with the same constraint,
most requests are in a state (language_states.py) that another request has visited. The mask of such
a state is known, and the engine need not even process the tokens that lead to the state.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque

from sglang_lite.runtime.structured_output.base import Mask
from sglang_lite.runtime.structured_output.language_states import LanguageStates, State


class MaskCache:
    """Limits the total memory of the masks of many languages and evicts the oldest masks.

    Args:
        size: limit in bytes.
    """

    def __init__(self, size: int) -> None:
        self._free = size
        # Weak references, so that a language and its masks are freed together.
        self._entries: deque[tuple[weakref.ref[LanguageStates], State, int]] = deque()
        self._lock = threading.Lock()

    def cache_mask(self, states: LanguageStates, state: State, mask: Mask) -> None:
        with self._lock:
            if state in states.masks:  # another thread has computed it as well
                return
            states.misses += 1
            self._free -= mask.nbytes
            self._entries.append((weakref.ref(states), state, mask.nbytes))
            states.masks[state] = mask
            while self._free < 0:
                of, old, size = self._entries.popleft()
                self._free += size
                if (owner := of()) is not None:
                    del owner.masks[old]
