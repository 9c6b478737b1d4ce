"""Constraints at run time: compiled off the loop, matched token by token, as masks of tokens. Knows no requests."""
