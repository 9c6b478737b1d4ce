"""Check `template`: renders conversations and tools with the model's chat template, and compares
the text with transformers' text, byte for byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sglang_lite.commands.verify.records import Check, Subject, Unread
from sglang_lite.commands.verify.texts import CONVERSATIONS
from sglang_lite.protocol import SglError, TemplateError
from sglang_lite.protocol.anything import Foreign
from sglang_lite.text.chat_format import ChatFormat, Conversation, Tool
from sglang_lite.text.chat_template import JinjaTemplate


def check_template(subject: Subject, theirs: Foreign | Unread) -> Check:
    """Renders each conversation in three ways: with the template itself, as a server's prompt, and
    turn by turn like in programs. Compares each text with transformers' text.
    """
    tokenizer = subject.files.tokenizer
    if tokenizer.chat_template is None:
        return Check("template", "left out", "the model has no chat template")
    if isinstance(theirs, Unread):
        return Check("template", "left out", theirs.reason)
    try:
        template = JinjaTemplate(tokenizer.chat_template, tokenizer.special_tokens)
    except TemplateError as error:
        return Check("template", "failed", str(error))
    form = ChatFormat(template, tokenizer.control_texts, None, None)
    found: dict[str, str] = {}
    for name, (messages, shown) in CONVERSATIONS.items():
        tools = [Tool(**each) for each in shown]
        if tools and "tools" not in template.source:
            found[name] = "left out: the template shows no tools"
            continue
        wanted = _render_by_transformers(theirs, messages, tools)
        ways = {
            "rendered": _render_by_template(template, messages, tools),
            "of a server": _render_by_server(form, messages, tools),
        }
        if not tools:
            ways["turn by turn"] = _render_by_turns(template, messages)
        wrong = [way for way, text in ways.items() if text is not None and text != wanted]
        refused = "refused by both" if wanted is None else "equal"
        found[name] = f"other bytes: {', '.join(wrong)}" if wrong else refused
        if wanted is not None and ways["rendered"] is None:
            found[name] = "other bytes: refused here alone"
    return _template_check(found)


def _template_check(found: Mapping[str, str]) -> Check:
    wrong = {name: each for name, each in found.items() if each.startswith("other")}
    equal = sum(each == "equal" for each in found.values())
    summary = f"{equal} of {len(found)} conversations have apply_chat_template's bytes"
    for kind in ("refused by both", "left out: the template shows no tools"):
        if names := [name for name, each in found.items() if each == kind]:
            summary += f"; {kind.removeprefix('left out: ')}: {', '.join(names)}"
    for name, each in wrong.items():
        summary += f"; {name}: {each}"
    return Check(
        "template", "failed" if wrong else "passed", summary, {"conversations": dict(found)}
    )


def _render_by_transformers(
    tokenizer: Foreign, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]
) -> str | None:
    """Renders a conversation with transformers' code. Returns None if the template rejects the
    messages.
    """
    try:
        text: str = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=[tool.shown for tool in tools] or None,
            add_generation_prompt=True,
            tokenize=False,
        )
    except Exception:  # the template's own, of any kind
        return None
    return text


def _render_by_template(
    template: JinjaTemplate, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]
) -> str | None:
    try:
        return template.render(
            messages,
            add_generation_prompt=True,
            **({"tools": [tool.shown for tool in tools]} if tools else {}),
        )
    except TemplateError:
        return None


def _render_by_server(
    form: ChatFormat, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]
) -> str | None:
    try:
        return form.prompt(Conversation(messages, tools)).text
    except SglError:
        return None


def _render_by_turns(template: JinjaTemplate, messages: Sequence[Mapping[str, Any]]) -> str | None:
    """Renders a conversation turn by turn, as a program does. Returns None if the template can't be
    rendered turn by turn.
    """
    text = ""
    try:
        for i, message in enumerate(messages):
            before, after = template.get_prefix_and_suffix(message["role"], messages[:i])
            text += before + message["content"] + after
        return text + template.get_prefix_and_suffix("assistant", messages)[0]
    except TemplateError:
        return None
