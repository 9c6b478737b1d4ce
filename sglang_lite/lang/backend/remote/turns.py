"""Turns that a model behind an API has begun: the prompts that make it continue them, or begin again. Builds no
requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec

from sglang_lite.protocol import Message, Prompt, Span
from sglang_lite.text.chat_template import TurnTemplate

CONTINUE_PROMPT = (
    "Go on with your last message exactly where it ends. Write only what comes next: repeat nothing of it, and say "
    "nothing about it."
)


BegunTurns: TypeAlias = Literal["continued", "asked", "refused"]
_WEAKEST_FIRST: tuple[BegunTurns, ...] = ("refused", "asked", "continued")


@dataclass(frozen=True, slots=True)
class TurnRules:
    """Rules of a backend that is called generation by generation, for turns with several generations.

    Attributes:
        begun_turns: treatment of a turn that has begun: "continued" by the model, which is shown the open turn;
            "asked": shown to the model as its own finished message, with a request to continue; or "refused".
        enforces_schemas: True if JSON schemas are enforced, so that values can be generated as one object.
        continues_constrained: True if a begun turn is continued under a constraint, too.
        enforces_grammars: True if grammars are enforced, so that a turn can be generated as one text.
    """

    begun_turns: BegunTurns
    enforces_schemas: bool
    continues_constrained: bool = False
    enforces_grammars: bool = False


def common_rules(each: Sequence[TurnRules]) -> TurnRules:
    """Rules that all of several backends can follow, because any of them may answer. A turn is refused if one
    backend refuses it, continued if all backends continue it, and generated as one object if all backends enforce
    its schema."""
    begun: BegunTurns = next(way for way in _WEAKEST_FIRST if any(rules.begun_turns == way for rules in each))
    return TurnRules(
        begun, all(rules.enforces_schemas for rules in each), all(rules.continues_constrained for rules in each)
    )


def from_start(prompt: Prompt) -> Prompt:
    """Prompt without the text in its open turn."""
    text = prompt.text.removesuffix(prompt.partial)
    return Prompt((Span(text),), prompt.messages, prompt.role, "", prompt.images)


def with_continue_request(prompt: Prompt, template: TurnTemplate) -> Prompt:
    """Prompt whose open turn is shown as finished, followed by the user's request to continue it. Unchanged if the open
    turn is empty."""
    return with_user_reply(prompt, "", CONTINUE_PROMPT, template) if prompt.partial.strip() else prompt


def with_user_reply(prompt: Prompt, answer: str, words: str, template: TurnTemplate) -> Prompt:
    """Prompt whose open turn, the assistant's, ends with an answer, followed by words of the user and a new turn of the
    assistant."""
    before = [{"role": message.role, "content": ""} for message in prompt.messages]
    turns = Message("assistant", ((prompt.partial + answer).strip(),)), Message("user", (words,))
    spans = [*prompt.spans, Span(answer, special=False), Span(template.get_prefix_and_suffix("assistant", before)[1])]
    before.append({"role": "assistant", "content": ""})
    start, end = template.get_prefix_and_suffix("user", before)
    before.append({"role": "user", "content": ""})
    spans += [Span(start), Span(words, special=False), Span(end)]
    spans.append(Span(template.get_prefix_and_suffix("assistant", before)[0]))
    shown_spans = tuple(span for span in spans if span.text)
    return msgspec.structs.replace(prompt, spans=shown_spans, messages=(*prompt.messages, *turns), partial="")


def unrepeated(begun: str, text: str) -> str:
    """Text that a model has added to a begun turn, without leading lines that repeat the turn."""
    lines = begun.strip().split("\n")
    start = len(text) - len(text.lstrip())
    for first in range(len(lines)):
        repeated = "\n".join(lines[first:]).strip()
        if repeated and text.startswith(repeated, start):
            rest = text[start + len(repeated) :]
            if not (
                repeated[-1].isalnum() and rest[:1].isalnum()
            ):  # if not, the lines were the beginning of another word
                return rest
    return text
