"""Grammars are kept within a limit of memory, which they count towards as they grow."""

from dataclasses import dataclass

from sglang_lite.protocol import ConstraintError, Regex
from sglang_lite.runtime.structured_output import grammar_cache
from sglang_lite.runtime.structured_output.grammar_cache import GrammarCache


@dataclass
class Growing:
    size: int


def kept(cache, pattern, size):
    future, new = cache.find_or_reserve(Regex(pattern))
    assert new
    cache.keep_grammar(Regex(pattern), future, size)
    future.set_result(Growing(size))
    return future.result()


def test_what_has_grown_drops_others(monkeypatch):
    monkeypatch.setattr(grammar_cache, "CACHED_BYTES", 10_000)
    cache = GrammarCache()
    first, *_ = [kept(cache, pattern, 2_000) for pattern in "abcd"]
    assert 8_000 < cache.bytes < 10_000
    first.size = 7_000
    assert not cache.find_or_reserve(Regex("a"))[1]
    assert 7_000 < cache.bytes < 10_000
    assert [cache.find_or_reserve(Regex(pattern))[1] for pattern in "adbc"] == [
        False,
        False,
        True,
        True,
    ]


def test_nothing_is_left_counted_of_what_was_dropped(monkeypatch):
    monkeypatch.setattr(grammar_cache, "CACHED", 3)
    cache = GrammarCache()
    for number in range(20):
        kept(cache, str(number), 1_000).size = 1_000 * number
        cache.find_or_reserve(Regex(str(number)))
    before = cache.bytes
    for number in range(3):
        future, _ = cache.find_or_reserve(Regex(f"x{number}"))
        cache.keep_error(Regex(f"x{number}"), future, ConstraintError("no"))
        future.set_exception(ConstraintError("no"))
    assert cache.bytes < 1_000 < before
