"""Prompts as chat templates render them: text outside the turns, and the same conversation in another template."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from sglang_lite.lang.chat_template import ChatTemplate
from sglang_lite.protocol import Message, Prompt, Span
from sglang_lite.text.chat_template import TurnTemplate


def text_outside(prompt: Prompt, template: TurnTemplate | None) -> str:
    """First text of a prompt that is outside its turns, without blanks; empty if all text is inside."""
    assert template is not None
    rest, roles = _squeezed(prompt.text), list[dict[str, str]]()
    for message in (*prompt.messages, Message("assistant", (prompt.partial,))):
        prefix, suffix = map(_squeezed, template.get_prefix_and_suffix(message.role, roles))
        if not rest.startswith(prefix):
            return rest.partition(prefix)[0]
        end = _squeezed("".join(part for part in message.content if isinstance(part, str))) + suffix
        at = rest.find(end, len(prefix))
        if at > len(prefix) and message.role != "assistant":
            return rest[len(prefix) : at]
        if at < 0:  # the open turn, or one whose text is not all in the prompt (reasoning)
            break
        rest = rest[at + len(end) :]
        roles.append({"role": message.role, "content": ""})
    return ""


def rerender(prompt: Prompt, template: TurnTemplate | None, written_by: TurnTemplate | None) -> Prompt:
    """Prompt of turns, rendered by another template, with the text outside the turns in front. Unchanged if the prompt
    has no turns or a template is missing. The content of turns is never read as special tokens."""
    if template is None or written_by is None or (not prompt.messages and prompt.role is None):
        return prompt
    spans, before = [Span(text_outside(prompt, written_by))], list[dict[str, str]]()
    for message in prompt.messages:
        prefix, suffix = template.get_prefix_and_suffix(message.role, before)
        content = "".join(part for part in message.content if isinstance(part, str))
        spans += [Span(prefix), Span(content, special=False), Span(suffix)]
        before.append({"role": message.role, "content": ""})
    if prompt.role is not None:
        prefix, _ = template.get_prefix_and_suffix(prompt.role, before)
        spans += [Span(prefix), Span(prompt.partial, special=False)]
    return msgspec.structs.replace(prompt, spans=tuple(span for span in spans if span.text))


def without_marks(template: TurnTemplate) -> TurnTemplate:
    """Template for an API that renders turns itself: without stop strings and image placeholders."""
    return replace(template, stop_str=(), image_token="") if isinstance(template, ChatTemplate) else template


def _squeezed(text: str) -> str:
    return "".join(text.split())
