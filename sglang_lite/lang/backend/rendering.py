"""A prompt as a chat template has written it: text outside its turns, and the same conversation in another template."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from sglang_lite.lang.chat_template import ChatTemplate
from sglang_lite.protocol import Message, Prompt, Span
from sglang_lite.text.chat_template import TurnTemplate


def text_outside(prompt: Prompt, template: TurnTemplate | None) -> str:
    """The text before the first turn that does not follow on the one before it. Blanks don't count."""
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
        if at < 0:  # the open turn, or one that is not all shown (reasoning)
            break
        rest = rest[at + len(end) :]
        roles.append({"role": message.role, "content": ""})
    return ""


def rendered(prompt: Prompt, template: TurnTemplate | None, written_by: TurnTemplate | None) -> Prompt:
    """A prompt of turns in another template's marks, its text outside turns before them; as it is, where it has no
    turns or there is no template. Text of turns names no special tokens."""
    if template is None or written_by is None or (not prompt.messages and prompt.role is None):
        return prompt
    spans, before = [Span(text_outside(prompt, written_by))], list[dict[str, str]]()
    for message in prompt.messages:
        prefix, suffix = template.get_prefix_and_suffix(message.role, before)
        said = "".join(part for part in message.content if isinstance(part, str))
        spans += [Span(prefix), Span(said, special=False), Span(suffix)]
        before.append({"role": message.role, "content": ""})
    if prompt.role is not None:
        prefix, _ = template.get_prefix_and_suffix(prompt.role, before)
        spans += [Span(prefix), Span(prompt.partial, special=False)]
    return msgspec.structs.replace(prompt, spans=tuple(span for span in spans if span.text))


def without_marks(template: TurnTemplate) -> TurnTemplate:
    """A template for an API that renders turns itself: without stop strings and placeholders of images."""
    return replace(template, stop_str=(), image_token="") if isinstance(template, ChatTemplate) else template


def _squeezed(text: str) -> str:
    return "".join(text.split())
