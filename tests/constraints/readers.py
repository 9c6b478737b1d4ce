"""Other libraries that read grammars, as functions from a text to whether it belongs: none has a
line of ours.
"""

from functools import lru_cache

import lark
import llguidance
import xgrammar


class NotRead(Exception):  # noqa: N818 # not an error: another dialect
    """The library does not take the grammar."""


def by_lark(grammar):
    """The `lark` package, with every derivation of Earley's algorithm and every length of a
    terminal.
    """
    try:
        parser = lark.Lark(grammar, parser="earley", lexer="dynamic_complete", ambiguity="forest")
    except lark.exceptions.LarkError as error:
        raise NotRead(str(error)) from error

    def reads(text):
        try:
            parser.parse(text)
        except lark.exceptions.LarkError:
            return False
        return True

    return reads


def by_llguidance(grammar):
    """llguidance, from the grammar as it is written; its lexer is greedy."""
    start = _llguidance(grammar)

    def reads(text):
        at, data = start.deep_copy(), list(text.encode())
        return at.try_consume_tokens(data) == len(data) and at.is_accepting()

    return reads


def by_xgrammar(grammar):
    """xgrammar, from the grammar as it is written in GBNF."""
    try:
        compiled = _compiler().compile_grammar(xgrammar.Grammar.from_ebnf(grammar))
    except RuntimeError as error:
        raise NotRead(str(error)) from error

    def reads(text):
        matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=True)
        return (not text or matcher.accept_string(text)) and matcher.is_completed()

    return reads


def drawn_by_llguidance(grammar, random, longest):
    """Text that llguidance's masks lead to, by bytes at random; it may be cut."""
    at = _llguidance(grammar).deep_copy()
    data = bytearray()
    while (
        len(data) < longest
        and not at.is_stopped()
        and not (at.is_accepting() and random.random() < 0.2)
    ):
        mask = int.from_bytes(at.compute_bitmask(), "little")
        allowed = [byte for byte in range(256) if mask >> byte & 1]
        if not allowed:
            break
        printable = [byte for byte in allowed if 32 <= byte < 127]
        data.append(random.choice(printable or allowed))
        at.consume_token(data[-1])
    return data.decode("utf-8", "ignore")


def edited(random, text):
    """Text with one character left out, doubled or replaced by another one of it."""
    at = random.randrange(len(text) + 1)
    piece = random.choice(text or " ")
    return text[:at] + random.choice(["", piece + text[at : at + 1], piece]) + text[at + 1 :]


@lru_cache(maxsize=8)
def _llguidance(grammar):
    matcher = llguidance.LLMatcher(
        _bytes(), llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0
    )
    if matcher.is_error():
        raise NotRead(matcher.get_error())
    return matcher


@lru_cache(maxsize=1)
def _bytes():
    return llguidance.LLTokenizer("byte")


@lru_cache(maxsize=1)
def _compiler():
    vocabulary = [bytes([byte]) for byte in range(256)] + [b"</s>"]
    return xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[256]))
