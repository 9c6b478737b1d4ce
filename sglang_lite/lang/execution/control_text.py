"""Finds control tokens, such as `<|im_start|>`, in a program's arguments. Outside turns, text may
contain such tokens, so an argument written by a user could begin a turn.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache

from sglang_lite.lang.expressions import BaseProgram
from sglang_lite.lang.tracebacks import warn_here
from sglang_lite.protocol.anything import UserValue

# Spellings of most models' control tokens, for backends that don't report theirs.
USUAL = re.compile(
    r"<\|[^<>|\s]{1,60}\|>|<｜[^<>｜\s]{1,60}｜>|</?s>|<</?SYS>>|\[/?[A-Z]{3,10}(?:_[A-Z]{3,10}){0,2}\]"
    r"|<(?:start|end)_of_(?:turn|image)>|<(?:bos|eos|pad|unk|mask)>"
)
_BEGINNINGS = ("<", "[")  # first characters of control tokens
_DEPTH = 8  # levels of values inside values that are searched


class SpelledTokens:
    """Argument values that contain the text of control tokens, such as `<|im_start|>`.

    Args:
        pattern: finds control tokens in text.
    """

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern
        self._plain: set[str] = set()  # tokens that stay plain text
        self._values: list[tuple[str, str]] = []  # other values, with the names of their arguments
        self._warned = False

    def add_argument_value(self, name: str, value: str, *, plain: bool) -> None:
        """Adds an argument's value.

        Args:
            plain: whether the tokens in it are plain text wherever the program writes them.
        """
        if plain:
            self._plain.update(self._pattern.findall(value))
        else:
            self._values.append((name, value))

    def split_at_plain_tokens(self, text: str) -> list[tuple[str, bool]]:
        """Splits a text written outside turns into pieces, each with a flag. The flag is False if
        control tokens in the piece are plain text, else True. Warns once if a token that is not
        plain text comes from an argument's value.
        """
        pieces = list[tuple[str, bool]]()
        start = 0
        for found in self._pattern.finditer(text):
            if found[0] in self._plain:
                pieces += [(text[start : found.start()], True), (found[0], False)]
                start = found.end()
            elif (
                not self._warned
                and (name := self.find_argument_with_token(found[0], text)) is not None
            ):
                self._warned = True
                warn_here(
                    f"the argument {name!r} spells {found[0]}, and outside turns this is a control token. Write "
                    "sgl.plain(…) for it, put it into a turn, or make the program by "
                    "@sgl.function(untrusted_arguments=True)."
                )
        pieces.append((text[start:], True))
        return [piece for piece in pieces if piece[0]]

    def find_argument_with_token(self, token: str, text: str) -> str | None:
        """Returns the name of an argument whose value contains the token and occurs in the text.
        Returns None if there is no such argument.
        """
        return next(
            (name for name, value in self._values if token in value and value.strip() in text), None
        )

    def find_tokens_from_arguments(self, text: str) -> Iterator[tuple[str, str]]:
        """Yields each control token in a text that comes from an argument's value, with the
        argument's name.
        """
        for token in dict.fromkeys(self._pattern.findall(text)):
            if (name := self.find_argument_with_token(token, text)) is not None:
                yield token, name


def collect_argument_control_tokens(
    earlier: SpelledTokens | None,
    known: Sequence[str] | None,
    program: BaseProgram,
    args: Sequence[UserValue],
    kwargs: Mapping[str, UserValue],
) -> SpelledTokens | None:
    """Collects the control tokens in a run's arguments. Returns None if there are none.

    Args:
        earlier: tokens collected by the run so far, if its body calls this program.
        known: control tokens of the model; None for those that most models have.
    """
    for name, value in _walk_argument_texts([*zip(program.arg_names, args), *kwargs.items()]):
        pattern = USUAL if known is None else _compile_token_pattern(tuple(known))
        if pattern.search(value):
            earlier = earlier or SpelledTokens(pattern)
            earlier.add_argument_value(name, value, plain=program.untrusted_arguments)
    return earlier


@lru_cache(maxsize=32)
def _compile_token_pattern(tokens: Collection[str]) -> re.Pattern[str]:
    longest_first = sorted(filter(None, tokens), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _walk_argument_texts(named: Sequence[tuple[str, UserValue]]) -> Iterator[tuple[str, str]]:
    """Yields the texts in arguments that might spell a control token, with the arguments' names."""
    left: list[tuple[str, UserValue, int]] = [(name, value, _DEPTH) for name, value in named]
    while left:
        name, value, depth = left.pop()
        if isinstance(value, str):
            if any(beginning in value for beginning in _BEGINNINGS):
                yield name, value
        elif depth and isinstance(value, list | tuple | set | frozenset):
            left += [(name, each, depth - 1) for each in value]
        elif depth and isinstance(value, dict):
            left += [(name, each, depth - 1) for item in value.items() for each in item]
        elif depth and (hasattr(type(value), "model_fields") or dataclasses.is_dataclass(value)):
            left += [(name, each, depth - 1) for each in getattr(value, "__dict__", {}).values()]
