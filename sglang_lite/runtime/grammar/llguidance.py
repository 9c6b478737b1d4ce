"""Constraints through llguidance: it refuses what it can't enforce, and compiles in about a millisecond."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from sglang_lite.constraints.regex import parse, to_rust
from sglang_lite.protocol import Choices, Constraint, ConstraintError, JsonSchema, Regex
from sglang_lite.runtime.tokens.tokenizer import Tokenizer

# One fixed style of writing: json.dumps' own. Flexible whitespace lets a small model write blanks for ever.
# Set as overrides, so that an `x-guidance` key inside a user's schema can't loosen them.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": False}


class LlguidanceMatcher:
    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def fill_mask(self, mask: NDArray[np.int32]) -> None:
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)

    def accept(self, token: int) -> bool:
        return bool(self._matcher.consume_token(token))

    @property
    def complete(self) -> bool:
        return bool(self._matcher.is_accepting())

    @property
    def finished(self) -> bool:
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    @property
    def error(self) -> str:
        return str(self._matcher.get_error())


class LlguidanceGrammar:
    def __init__(self, start: Any) -> None:
        self._start = start

    def matcher(self) -> LlguidanceMatcher:
        return LlguidanceMatcher(self._start.deep_copy())


class LlguidanceEngine:
    """
    Args:
        tokenizer: the model's.
        vocab_size: the model's, padding included.
        eos_ids: tokens that may end a complete text.
        cache_size: compiled grammars kept.
    """

    name = "llguidance"

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: list[int], cache_size: int = 1024) -> None:
        self._tokenizer = LLTokenizer(tokenizer.backend.to_str(), n_vocab=vocab_size, eos_token=eos_ids or None)
        self._cache: OrderedDict[Constraint, LlguidanceGrammar] = OrderedDict()
        self._cache_size = cache_size
        self._lock = threading.Lock()

    def compile(self, constraint: Constraint) -> LlguidanceGrammar:
        with self._lock:
            if constraint in self._cache:
                self._cache.move_to_end(constraint)
                return self._cache[constraint]
        matcher = LLMatcher(self._tokenizer, _grammar(constraint), log_level=0)
        if matcher.is_error():
            raise ConstraintError(f"{_kind(constraint)}: {_first_line(matcher.get_error())}")
        compiled = LlguidanceGrammar(matcher)
        with self._lock:
            self._cache[constraint] = compiled
            while len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)
        return compiled


def _grammar(constraint: Constraint) -> str:
    match constraint:
        case Regex(pattern):
            return str(LLMatcher.grammar_from_regex(to_rust(parse(pattern))))
        case JsonSchema(schema):
            try:
                return str(LLMatcher.grammar_from_json_schema(schema, overrides=_JSON_STYLE))
            except ValueError as error:
                raise ConstraintError(f"json_schema: {error}") from error
        case Choices(options):
            return str(LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(o) for o in options)))


def _kind(constraint: Constraint) -> str:
    return {Regex: "regex", JsonSchema: "json_schema", Choices: "choices"}[type(constraint)]


def _first_line(message: str) -> str:
    return next((line.strip() for line in message.splitlines() if line.strip()), "refused without a reason")
