"""What output may look like: regexes, schemas, grammars and Python types. Knows no tokens, no engine and no model.

Every constraint becomes a `Language` (nodes.py): a regex (regex.py), a schema (normal/), a grammar (ebnf.py, lark.py),
and what is made of them (compose.py). Engines are handed its text (to_lark.py, with lexemes that lexing.py proves);
matching.py, sampling.py and earley.py work with it directly. The public door is grammar.py, as `sgl.grammar`.
"""

from __future__ import annotations

import importlib
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    if name == "grammar":  # loaded when it is asked for, as all that is public
        return importlib.import_module("sglang_lite.constraints.grammar")
    raise AttributeError(f"module 'sglang_lite.constraints' has no attribute {name!r}")
