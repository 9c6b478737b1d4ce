"""Cases of sampling parameters in bodies: chats, completions, responses and, by other names, other
protocols.
"""

from __future__ import annotations

from typing import Any

from tests.effects.fields.case import OMIT, Ask, Case, Shows

DRAWN: dict[str, Any] = {"temperature": 1, "seed": 7, "max_tokens": 16}
# What decides between two orders of the same filters: the mass is counted among four tokens, or
# among all.
FILTERED: dict[str, Any] = {**DRAWN, "top_k": 4, "top_p": 0.5}


def text_is(text: str) -> Shows:
    return lambda ask: ask.text() == text


def has_tokens(count: int) -> Shows:
    return lambda ask: ask.tokens() == count


def is_greedy(ask: Ask) -> bool:
    """Whether the answer is the likeliest one."""
    return ask.text() == ask.text(given=False, temperature=1, top_k=1)


def another_text(ask: Ask) -> bool:
    return ask.text() != ask.text(given=False)


def draws_again(ask: Ask) -> bool:
    """Whether a second answer is the same."""
    return ask.text() == ask.text()


def drafts_nothing(ask: Ask) -> bool:
    """Whether no token was guessed, by the engine's counts."""
    ask.without()  # whoever drafts has seen the text
    before = ask.send("/internal_state", None, "GET").body["internal_states"][0]["drafters"]
    ask()
    return before == ask.send("/internal_state", None, "GET").body["internal_states"][0]["drafters"]


# By this package's names. What a text's end needs is asked of a model that says ABC.
SAMPLING = {
    "max_tokens": Case(2, text_is("AB"), server="reciter"),
    "min_tokens": Case(6, has_tokens(10), {"max_tokens": 10}, server="reciter"),
    "ignore_eos": Case(True, has_tokens(10), {"max_tokens": 10}, server="reciter"),
    "stop": Case("B", text_is("A"), server="reciter"),
    "stop_regex": Case("[BC]", text_is("A"), server="reciter"),
    "stop_token_ids": Case([ord("B")], text_is("A"), server="reciter"),
    "no_stop_trim": Case(True, text_is("AB"), {"stop": "B"}, server="reciter"),
    "skip_special_tokens": Case(
        False,
        lambda ask: "<end>" in ask.text(),
        {"ignore_eos": True, "max_tokens": 8},
        server="reciter",
    ),
    "temperature": Case(0, is_greedy, {**DRAWN, "temperature": OMIT}),
    "top_p": Case(0.01, is_greedy, DRAWN),
    "top_k": Case(1, lambda ask: ask.text() == ask.text(given=False, temperature=0), DRAWN),
    "min_p": Case(1.0, is_greedy, DRAWN),
    "seed": Case(7, draws_again, {**DRAWN, "seed": OMIT}),
    "frequency_penalty": Case(2.0, another_text, {"max_tokens": 40}),
    "presence_penalty": Case(2.0, another_text, {"max_tokens": 40}),
    "repetition_penalty": Case(2.0, another_text, {"max_tokens": 40}),
    "sampling_order": Case("sequential", another_text, FILTERED),
    "speculation": Case(False, drafts_nothing, {"max_tokens": 40}, server="thinker"),
}


def named(names: dict[str, str]) -> dict[str, Case]:
    """Cases by a protocol's names of the parameters.

    Args:
        names: the protocol's name of each of this package's names; `min_tokens` and others of
            `beside` are renamed, too.
    """
    return {
        name: Case(
            case.value, case.shows, {names[each]: value for each, value in case.beside.items() if each in names},
            case.server,
        )
        for own, name in names.items()
        if (case := SAMPLING.get(own)) is not None
    }  # fmt: skip
