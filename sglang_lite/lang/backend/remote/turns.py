"""Turns that a model behind an API has begun: the prompts that make it continue them, or begin again, and a whole turn
as one text under a grammar. Builds no requests."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sglang_lite.protocol import Choices, Constraint, InOrder, Message, OneOf, Prompt, Span
from sglang_lite.text.chat_template import TurnTemplate

CONTINUE_PROMPT = (
    "Go on with your last message exactly where it ends. Write only what comes next: repeat nothing of it, and say "
    "nothing about it."
)


def turn_text(parts: Sequence[str | Constraint | None]) -> Constraint | None:
    """Constraint on a turn's text, up to its last generation: its constant text unchanged, and the generations'
    constraints in between. None if a generation may be any text (None), or only blanks separate two generations, so
    that the end of the first is unknown."""
    found = list[Constraint]()
    behind = False  # True after a generation, until text other than blanks follows
    last = max(i for i, part in enumerate(parts) if not isinstance(part, str))
    for part in parts[: last + 1]:
        if isinstance(part, str):
            found += [Choices((part,))] if part else []
            behind = behind and not part.strip()
        elif part is None or behind:
            return None
        else:
            found.append(part)
            behind = True
    return OneOf((InOrder(tuple(found)),))  # every API with grammars supports OneOf


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
