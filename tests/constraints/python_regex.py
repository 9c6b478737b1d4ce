"""Patterns of the languages that constraints are, for Python's `re`."""

import re

from sglang_lite.constraints.emit.regex import to_rust_regex


def to_python(node):
    """Pattern of a regular node: what Rust is told, with Python's escapes."""
    return re.sub(
        r"\\x\{([0-9A-F]+)\}", lambda found: f"\\U{int(found[1], 16):08X}", to_rust_regex(node)
    )
