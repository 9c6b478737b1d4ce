"""Renders prompts with chat templates. Finds text outside the turns, renders a conversation with
another template, inserts the model's tools where its template expects them, and makes a model
continue or restart a turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import msgspec

from sglang_lite.lang.chat_template import ChatTemplate
from sglang_lite.protocol import CapabilityError, Message, Prompt, PromptTools, Span
from sglang_lite.text.chat_format import ChatFormat, Conversation, Tool, prepend_description
from sglang_lite.text.chat_template import JinjaTemplate, TurnTemplate
from sglang_lite.text.plain_bytes import UnchangedDict
from sglang_lite.text.tool_calls import parse_answer
from sglang_lite.text.tool_use import split_call_results

CONTINUE_PROMPT = (
    "Go on with your last message exactly where it ends. Write only what comes next: repeat nothing of it, and say "
    "nothing about it."
)


def text_outside_turns(prompt: Prompt, template: TurnTemplate | None) -> str:
    """Finds text of a prompt that is outside its turns. Returns the first such text without its
    whitespace, or an empty string if there is none.
    """
    assert template is not None
    rest = _without_whitespace(prompt.text)
    roles = list[dict[str, str]]()
    for message in (*prompt.messages, Message("assistant", (prompt.partial,))):
        prefix, suffix = map(
            _without_whitespace, template.get_prefix_and_suffix(message.role, roles)
        )
        if not rest.startswith(prefix):
            return rest.partition(prefix)[0]
        end = _without_whitespace(message.text) + suffix
        at = rest.find(end, len(prefix))
        if at > len(prefix) and message.role != "assistant":
            return rest[len(prefix) : at]
        if at < 0:  # the open turn, or one that is not completely in the prompt (reasoning)
            break
        rest = rest[at + len(end) :]
        roles.append({"role": message.role, "content": ""})
    return ""


def rerender_with_template(
    prompt: Prompt, template: TurnTemplate | None, written_by: TurnTemplate | None
) -> Prompt:
    """Renders the turns of a prompt with another template. Text outside the turns is placed first.
    The content of turns is never read as special tokens. Returns the prompt unchanged if it has no
    turns or a template is missing.
    """
    if template is None or written_by is None or (not prompt.messages and prompt.role is None):
        return prompt
    spans = [Span(text_outside_turns(prompt, written_by))]
    roles = [message.role for message in prompt.messages]
    if prompt.role is not None:
        roles.append(prompt.role)
    texts = _prefixes_and_suffixes(template, roles)
    for message, (prefix, suffix) in zip(prompt.messages, texts):
        spans += [Span(prefix), Span(message.text, special=False), Span(suffix)]
    if prompt.role is not None:
        spans += [Span(texts[-1][0]), Span(prompt.partial, special=False)]
    return msgspec.structs.replace(prompt, spans=tuple(span for span in spans if span.text))


def without_stops_and_placeholders(template: TurnTemplate) -> TurnTemplate:
    """Returns the template without stop strings and image placeholders. Used for an API that
    renders turns itself.
    """
    return (
        replace(template, stop_str=(), image_token="")
        if isinstance(template, ChatTemplate)
        else template
    )


def _without_whitespace(text: str) -> str:
    return "".join(text.split())


# characters of a generated text to search for; a shorter one could be part of a token's name
_MIN_LENGTH = 16


def with_tools(
    prompt: Prompt, template: TurnTemplate | None, control: Sequence[str] = ()
) -> Prompt:
    """Returns the prompt with its tools described in the text. If the prompt has no tools or the
    model no template, returns the prompt unchanged.

    Args:
        prompt: prompt whose open turn is the assistant's.
        template: template of the model, with which the prompt was rendered.
        control: names of the model's control tokens, which are ordinary characters in users' text.

    Raises:
        TemplateError: the template rejects the messages.
        CapabilityError: there is text between the turns.
    """
    if prompt.tools is None or template is None:
        return prompt
    if isinstance(template, JinjaTemplate):
        shown = _render_with_tools(prompt, prompt.tools, template, control)
    else:
        has_system = (
            not isinstance(template, ChatTemplate) or "system" in template.role_prefix_and_suffix
        )
        messages = prepend_description(
            _turn_messages(prompt.messages), _describe_tools(prompt.tools), has_system
        )
        turns = tuple(Message(message["role"], (message["content"],)) for message in messages)
        shown = rerender_with_template(
            msgspec.structs.replace(prompt, messages=turns), template, template
        ).spans
    before = Span(_text_before_turns(prompt, template))
    spans = tuple(span for span in (before, *shown) if span.text)
    return msgspec.structs.replace(prompt, spans=spans, tools=None)


def shows_tools(template: TurnTemplate | None, family: str | None) -> bool:
    """Returns True if the template can render tools and the model's format of tool calls is known.
    If not, the first message describes the tools, and their results are sent as user turns.

    Args:
        family: format of calls, as `Backend.tool_family` returns it.
    """
    return (
        family is not None and isinstance(template, JinjaTemplate) and "tools" in template.variables
    )


def _render_with_tools(
    prompt: Prompt, tools: PromptTools, template: JinjaTemplate, control: Sequence[str]
) -> Sequence[Span]:
    functions: Sequence[Tool] = _read_tools(tools.shown)
    if tools.family is None or "tool_calls" not in template.source:
        messages = _turn_messages(prompt.messages)
    else:
        messages = _messages(prompt.messages, tools.family, tools)
    if tools.family is None:
        messages = prepend_description(messages, _describe_tools(tools), template.has_system)
        functions = []
    chat_format = _chat_format(template, tuple(control), tools.family)
    spans = chat_format.prompt(Conversation(messages, functions)).spans
    return [
        *_restore_token_ids(spans, prompt.spans),
        *_last_spans(prompt.spans, len(prompt.partial)),
    ]


def _describe_tools(tools: PromptTools) -> str:
    """Describes the tools to a model that writes calls as JSON objects."""
    listed = "\n".join(tools.shown)
    call = '{"tool": "NAME", "arguments": {"ARGUMENT": "VALUE"}}'
    how = (
        f'To call some, write {{"calls": [{call}, …]}}.'
        if tools.parallel
        else f"To call one, write {call}."
    )
    return f'You can call these functions:\n{listed}\n{how} If none of them helps, write {{"answer": "TEXT"}}.'


def _text_before_turns(prompt: Prompt, template: TurnTemplate) -> str:
    """Returns the text before the first turn. Raises CapabilityError if there is also text between
    the turns.
    """
    turns = _write_turns(prompt, template)
    if prompt.text.endswith(turns):
        return prompt.text[: len(prompt.text) - len(turns)]
    first = prompt.messages[0].role if prompt.messages else "assistant"
    prefix, _ = template.get_prefix_and_suffix(first, ())
    before = prompt.text.partition(prefix)[0] if prefix else ""
    rest = msgspec.structs.replace(prompt, spans=(Span(prompt.text[len(before) :]),))
    outside = text_outside_turns(rest, template)
    if outside:
        raise CapabilityError(
            f"a model that is shown tools would not see the text between the turns: {outside[:60]!r}.",
            hint="Put it into a turn: sgl.system(…) or sgl.user(…).",
        )
    return before


def _write_turns(prompt: Prompt, template: TurnTemplate) -> str:
    """Returns the turns as the template writes them, with nothing between them."""
    roles = [*(message.role for message in prompt.messages), "assistant"]
    around = _prefixes_and_suffixes(template, roles)
    texts = list[str]()
    for message, (prefix, suffix) in zip(prompt.messages, around):
        texts += prefix, message.text, suffix
    return "".join([*texts, around[-1][0], prompt.partial])


def _prefixes_and_suffixes(
    template: TurnTemplate, roles: Sequence[str]
) -> Sequence[tuple[str, str]]:
    """Returns the text before and after the content of each turn."""
    if isinstance(template, JinjaTemplate):
        return template.get_prefixes_and_suffixes(tuple(roles))
    turns = [{"role": role, "content": ""} for role in roles]
    return [template.get_prefix_and_suffix(role, turns[:i]) for i, role in enumerate(roles)]


def _turn_messages(turns: Sequence[Message]) -> list[Mapping[str, Any]]:
    return [_text_message(turn.role, turn.text) for turn in turns]


def _text_message(role: str, text: str) -> Mapping[str, Any]:
    if len(text) < _LONG:
        return _build_text_message(role, text)
    return _build_text_message.__wrapped__(role, text)


def _messages(turns: Sequence[Message], family: str, tools: PromptTools) -> list[Mapping[str, Any]]:
    """Converts turns to messages of a chat API, with tool calls and their results."""
    messages: list[Mapping[str, Any]] = []
    calls: tuple[tuple[str, str], ...] = ()
    count = 0
    for turn in turns:
        text = turn.text
        if turn.role == "user" and calls:
            read = _result_messages if len(text) < _LONG else _result_messages.__wrapped__
            messages += read(calls, text)
            calls = ()
        elif turn.role == "assistant":
            convert = _assistant_message if len(text) < _LONG else _assistant_message.__wrapped__
            message, calls = convert(text, family, tools.shown, tools.parallel, count)
            count += len(calls)
            messages.append(message)
        else:
            messages.append(_text_message(turn.role, text))
    return messages


# Each prompt of an agent has all its earlier turns. Long ones are few, and are read each time.
_remember_turns = lru_cache(maxsize=4096)
_LONG = 4_096


@_remember_turns
def _build_text_message(role: str, text: str) -> Mapping[str, Any]:
    return UnchangedDict(role=role, content=text)


@_remember_turns
def _result_messages(calls: tuple[tuple[str, str], ...], text: str) -> Sequence[Mapping[str, str]]:
    """Converts a turn with the results of calls to messages.

    Args:
        calls: id and name of each call.
    """
    results = split_call_results([name for _, name in calls], text)
    return [
        UnchangedDict(role="tool", tool_call_id=number, name=name, content=result)
        for (number, name), result in zip(calls, results)
    ]


@_remember_turns
def _assistant_message(
    text: str, family: str, shown: tuple[str, ...], parallel: bool, count: int
) -> tuple[Mapping[str, Any], tuple[tuple[str, str], ...]]:
    """Converts an answer to a message of the assistant, with its tool calls. Returns the message,
    and the id and name of each call.

    Args:
        shown, parallel: see PromptTools.
        count: number of calls in earlier messages.
    """
    schemas = {tool.name: tool.schema for tool in _read_tools(shown)}
    answer = parse_answer(family, text, tools=schemas, parallel=parallel)
    try:
        given = [(call.name, json.loads(call.arguments)) for call in answer.calls]
    except (ValueError, RecursionError):  # the text only begins like a call
        return UnchangedDict(role="assistant", content=text), ()
    if not given:
        return UnchangedDict(role="assistant", content=answer.content), ()
    calls = [
        {
            "id": _call_id(family, name, number),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        for number, (name, arguments) in enumerate(given, count)
    ]
    content = answer.content.rstrip() or None
    message = UnchangedDict(role="assistant", content=content, tool_calls=calls)
    return message, tuple(
        (_call_id(family, name, i), name) for i, (name, _) in enumerate(given, count)
    )


@lru_cache(maxsize=16)
def _read_tools(shown: tuple[str, ...]) -> Sequence[Tool]:
    """Reads tools from the JSON texts of PromptTools."""
    return [Tool(**json.loads(each)["function"]) for each in shown]


def _call_id(family: str, name: str, number: int) -> str:
    """Returns the id of a call in the form that the model was trained on. Mistral's templates
    require nine characters.
    """
    return f"functions.{name}:{number}" if family == "kimi_k2" else f"{number:09}"


@lru_cache(maxsize=16)
def _chat_format(
    template: JinjaTemplate, control: tuple[str, ...], family: str | None
) -> ChatFormat:
    return ChatFormat(template, control, family, None)


def _last_spans(spans: Sequence[Span], length: int) -> list[Span]:
    """Returns the last `length` characters of the text, as spans."""
    found: list[Span] = []
    for span in reversed(spans):
        if length <= 0:
            break
        text = span.text[-length:]
        found.insert(0, span if text == span.text else Span(text, special=span.special))
        length -= len(text)
    return found


def _restore_token_ids(spans: Sequence[Span], written: Sequence[Span]) -> list[Span]:
    """Puts back the token ids of texts that the model wrote, so that their cached prefix can be
    found. Tokenizing such a text again may give other ids.

    Args:
        written: spans of the same conversation with token ids.
    """
    behind = list[Span]()  # what follows the text that is still searched, last span first
    last = len(spans) - 1  # this text ends in this span …
    end = len(spans[last].text) if spans else 0  # … before this character
    for own in reversed(written):
        if own.ids is None or len(own.text) < _MIN_LENGTH:
            continue
        for at in range(last, -1, -1):
            span = spans[at]
            stop = end if at == last else len(span.text)
            start = span.text.rfind(own.text, 0, stop)
            if start >= 0:
                if at < last:
                    behind.append(Span(spans[last].text[:end], special=spans[last].special))
                    behind += reversed(spans[at + 1 : last])
                after = span.text[start + len(own.text) : stop]
                behind.append(Span(after, special=span.special))
                behind.append(own)
                last = at
                end = start
                break
    if not spans:
        return []
    first = Span(spans[last].text[:end], special=spans[last].special)
    return [*spans[:last], first, *reversed(behind)]


def without_partial_turn(prompt: Prompt) -> Prompt:
    """Returns the prompt without the text in its open turn."""
    text = prompt.text.removesuffix(prompt.partial)
    return Prompt((Span(text),), prompt.messages, prompt.role, "", prompt.images)


def with_continue_request(prompt: Prompt, template: TurnTemplate) -> Prompt:
    """Returns the prompt with its open turn finished, followed by the user's request to continue
    it. If the open turn is empty, returns the prompt unchanged.
    """
    return (
        with_user_reply(prompt, "", CONTINUE_PROMPT, template) if prompt.partial.strip() else prompt
    )


def with_user_reply(prompt: Prompt, answer: str, words: str, template: TurnTemplate) -> Prompt:
    """Returns the prompt with three additions: the answer, which finishes the open assistant turn;
    a user turn with `words`; and the start of a new assistant turn.
    """
    before = [{"role": message.role, "content": ""} for message in prompt.messages]
    turns = Message("assistant", ((prompt.partial + answer).strip(),)), Message("user", (words,))
    spans = [
        *prompt.spans,
        Span(answer, special=False),
        Span(template.get_prefix_and_suffix("assistant", before)[1]),
    ]
    before.append({"role": "assistant", "content": ""})
    start, end = template.get_prefix_and_suffix("user", before)
    before.append({"role": "user", "content": ""})
    spans += [Span(start), Span(words, special=False), Span(end)]
    spans.append(Span(template.get_prefix_and_suffix("assistant", before)[0]))
    shown_spans = tuple(span for span in spans if span.text)
    return msgspec.structs.replace(
        prompt, spans=shown_spans, messages=(*prompt.messages, *turns), partial=""
    )
