"""Turns that a model behind an API has begun: how a prompt has it go on, or begin again. Knows no request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec

from sglang_lite.protocol import Message, Prompt, Span
from sglang_lite.text.chat_template import TurnTemplate

GO_ON = (
    "Go on with your last message exactly where it ends. Write only what comes next: repeat nothing of it, and say "
    "nothing about it."
)


Begun: TypeAlias = Literal["continued", "asked", "refused"]
_WEAKEST_FIRST: tuple[Begun, ...] = ("refused", "asked", "continued")


@dataclass(frozen=True, slots=True)
class TurnRules:
    """Rules of a backend that is asked generation by generation, for turns with several.

    Attributes:
        begun: what it does with a turn that has begun: "continued" by the model, which is shown it so; "asked": it is
            shown the turn as its own message, and asked to go on; "refused".
        objects: it enforces JSON schemas, so that values can come as one object.
        constrained: it continues a begun turn under a constraint, too.
        texts: it enforces grammars, so that a turn can come as one text.
    """

    begun: Begun
    objects: bool
    constrained: bool = False
    texts: bool = False


def common_rules(each: Sequence[TurnRules]) -> TurnRules:
    """Rules that several backends can keep to, each of which may be the one to answer: what one refuses is refused, a
    turn is continued where all continue it, and comes as one object where all enforce its schema."""
    begun: Begun = next(way for way in _WEAKEST_FIRST if any(rules.begun == way for rules in each))
    return TurnRules(begun, all(rules.objects for rules in each), all(rules.constrained for rules in each))


def from_start(prompt: Prompt) -> Prompt:
    """The prompt without what stands in the open turn."""
    text = prompt.text.removesuffix(prompt.partial)
    return Prompt((Span(text),), prompt.messages, prompt.role, "", prompt.images)


def asked_to_go_on(prompt: Prompt, template: TurnTemplate) -> Prompt:
    """A prompt whose open turn is shown as finished, with the user asking to go on with it."""
    return answered(prompt, "", GO_ON, template) if prompt.partial.strip() else prompt


def answered(prompt: Prompt, answer: str, words: str, template: TurnTemplate) -> Prompt:
    """A prompt whose open turn, the assistant's, ends with an answer, with words of the user behind it, and the next
    turn of the assistant open."""
    before = [{"role": message.role, "content": ""} for message in prompt.messages]
    said = Message("assistant", ((prompt.partial + answer).strip(),)), Message("user", (words,))
    spans = [*prompt.spans, Span(answer, special=False), Span(template.get_prefix_and_suffix("assistant", before)[1])]
    before.append({"role": "assistant", "content": ""})
    start, end = template.get_prefix_and_suffix("user", before)
    before.append({"role": "user", "content": ""})
    spans += [Span(start), Span(words, special=False), Span(end)]
    spans.append(Span(template.get_prefix_and_suffix("assistant", before)[0]))
    told = tuple(span for span in spans if span.text)
    return msgspec.structs.replace(prompt, spans=told, messages=(*prompt.messages, *said), partial="")


def unrepeated(begun: str, text: str) -> str:
    """Text that a model has added to a turn which it was asked to continue: without lines of the begun turn."""
    lines = begun.strip().split("\n")
    start = len(text) - len(text.lstrip())
    for first in range(len(lines)):
        said = "\n".join(lines[first:]).strip()
        if said and text.startswith(said, start):
            rest = text[start + len(said) :]
            if not (said[-1].isalnum() and rest[:1].isalnum()):  # else it is the beginning of another word
                return rest
    return text
