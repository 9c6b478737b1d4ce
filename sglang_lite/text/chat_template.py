"""Chat templates, which turn a conversation's roles into text.

A program is rendered turn by turn, before the content of the turns is known. A template therefore
returns the text before and after a turn's content (`get_prefix_and_suffix`). To find this text, a
Jinja template is rendered with marks in place of contents.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, lru_cache
from operator import itemgetter
from typing import Protocol

from sglang_lite.protocol import MediaKind, TemplateError
from sglang_lite.protocol.anything import Json

MAX_TEMPLATE_CHARS = 200_000
_MAX_TURNS = 10_000  # kept with their texts; then all are forgotten
# excludes the marks for turns and for text that is hidden from a template
_get_role = itemgetter("role")
_REASONING_ORDER = ("reasoning_content", "thinking", "reasoning")
_REASONING_NAMES = frozenset(_REASONING_ORDER)
_NO_ASCII = re.compile("[^\x00-~\ue000-\ue003]")


class TurnTemplate(Protocol):
    """Interface of chat templates: a model's own JinjaTemplate, or a ChatTemplate with fixed texts."""

    @property
    def name(self) -> str: ...

    @property
    def default_system_prompt(self) -> str | None: ...

    @property
    def stop_str(self) -> Sequence[str]: ...

    def get_prefix_and_suffix(
        self, role: str, hist_messages: Sequence[Mapping[str, Json]]
    ) -> tuple[str, str]:
        """Returns the text before and after the content of a turn of `role` that follows the turns
        `hist_messages`.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Turn:
    """Turn in the tree of the sequences of roles that a template has rendered.

    Attributes:
        following: the turns that followed it, by role.
        texts: text before and after its content.
    """

    following: dict[str, _Turn]
    texts: tuple[str, str] = ("", "")


class JinjaTemplate:
    """Chat template of a model, rendered in jinja2's sandbox within the limits of bounded_jinja.py.

    Args:
        source: Jinja text, as in `tokenizer.chat_template`.
        special_tokens: texts that the template may use, by name: `bos_token`, `eos_token` …
        name: name of the template for error messages.

    Attributes:
        source, special_tokens: as given.

    Raises:
        TemplateError: the source is not a valid template, or is too long.
    """

    default_system_prompt: str | None = None  # the template inserts its own
    stop_str: tuple[str, ...] = ()

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        name: str = "the model's chat template",
    ) -> None:
        from sglang_lite.text.bounded_jinja import BoundedEnvironment, meter_rendering

        if len(source) > MAX_TEMPLATE_CHARS:
            raise TemplateError(
                f"{name}: {len(source):,} characters, the limit is {MAX_TEMPLATE_CHARS:,}."
            )
        self.name = name
        self.source = source
        self.special_tokens = dict(special_tokens or {})
        environment = BoundedEnvironment(
            {"tojson": to_json},
            {"raise_exception": _raise_exception, "strftime_now": _strftime_now},
        )
        self._metered = meter_rendering
        self._environment = environment
        try:
            self._template = environment.from_string(source)
            # not a ChainMap, which renderings copy slowly
            self._template.globals = dict(self._template.globals)
        except Exception as error:  # jinja2's own, or Python's for deep nesting
            raise TemplateError(f"{name} is not valid: {_error_text(error)}") from error
        self._first_turns = _Turn({})
        self._turn_count = 0
        # Cached because neighbouring turns share renderings, and long conversations render slowly.
        self._marked = lru_cache(maxsize=16)(self._render_marks)

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names of the variables that the template reads, without the special tokens."""
        from jinja2.meta import find_undeclared_variables

        return (
            frozenset(find_undeclared_variables(self._environment.parse_unchanged(self.source)))
            - self.special_tokens.keys()
        )

    @cached_property
    def has_system(self) -> bool:
        """True if the template accepts a system message at the start of a conversation, and shows
        it.
        """
        try:
            return _mark(0) in self.render(
                [{"role": "system", "content": _mark(0)}, {"role": "user", "content": "x"}]
            )
        except TemplateError:
            return False

    def render(
        self,
        messages: Sequence[Mapping[str, Json]],
        *,
        add_generation_prompt: bool = False,
        **variables: object,
    ) -> str:
        """Returns the text of a whole conversation, the same text that transformers'
        `apply_chat_template` returns.

        Args:
            messages: messages of the conversation. Reasoning may be given under any of its names.
            add_generation_prompt: whether to append the beginning of an assistant's answer.
            variables: further variables that the template may read: `tools`, `enable_thinking` …

        Raises:
            TemplateError: the template rejected these messages, failed, or exceeded a limit.
        """
        shaped = (
            [_wrap_content_in_part(message) for message in messages]
            if self._requires_content_parts
            else messages
        )
        return self._render_within_limits(
            shaped, add_generation_prompt=add_generation_prompt, **variables
        )

    def shows_media(self, kind: MediaKind) -> bool:
        """Returns whether the template writes placeholders for the images, videos or sounds among a
        message's parts.
        """
        return re.search(rf"""["']{kind}["']""", self.source) is not None

    @cached_property
    def _requires_content_parts(self) -> bool:
        """True if the template ignores content that is plain text and shows it only in a list of
        parts.
        """
        message = {"role": "user", "content": _mark(0)}
        with contextlib.suppress(TemplateError):
            return _mark(0) not in self._render_within_limits([message]) and _mark(
                0
            ) in self._render_within_limits([_wrap_content_in_part(message)])
        return False

    def _render_within_limits(
        self,
        messages: Sequence[Mapping[str, Json]],
        *,
        add_generation_prompt: bool = False,
        **variables: object,
    ) -> str:
        try:
            with self._metered():
                return self._template.render(
                    **{"tools": None, "documents": None, **variables, **self.special_tokens},
                    messages=[
                        message  # most of them
                        if _REASONING_NAMES.isdisjoint(message)
                        else _with_reasoning_names(message)
                        for message in messages
                    ],
                    add_generation_prompt=add_generation_prompt,
                )
        # templates are foreign code: any exception is the template's failure
        except Exception as error:
            roles = [m["role"] for m in messages]
            more = f" and {len(roles) - 8} more" if len(roles) > 8 else ""
            raise TemplateError(
                f"{self.name} failed on {roles[:8]}{more}: {_error_text(error)}"
            ) from error

    def get_prefix_and_suffix(
        self, role: str, hist_messages: Sequence[Mapping[str, Json]]
    ) -> tuple[str, str]:
        """Returns the text before and after the content of a turn, as in TurnTemplate.

        Raises:
            TemplateError: the template can't render this sequence of roles turn by turn.
        """
        return self.get_prefixes_and_suffixes((*map(_get_role, hist_messages), role))[-1]

    def get_prefixes_and_suffixes(self, roles: tuple[str, ...]) -> list[tuple[str, str]]:
        """Returns the text before and after the content of each turn of a conversation with these
        roles.

        Raises:
            TemplateError: the template can't render this sequence of roles turn by turn.
        """
        texts = list[tuple[str, str]]()
        last = self._first_turns
        for position, role in enumerate(roles):
            turn = last.following.get(role)
            if turn is None:
                if self._turn_count > _MAX_TURNS:
                    self._first_turns = _Turn({})
                    self._turn_count = 0
                turn = _Turn({}, self._prefix_and_suffix_for_roles(roles[: position + 1]))
                last.following[role] = turn
                self._turn_count += 1
            texts.append(turn.texts)
            last = turn
        return texts

    def _prefix_and_suffix_for_roles(self, roles: tuple[str, ...]) -> tuple[str, str]:
        earlier = roles[:-1]
        before, suffix = self._text_around_last_turn(roles)
        if not earlier:
            return before, suffix
        if roles[-1] == "assistant":
            # The generation prompt may differ from the beginning of a finished answer.
            history = self._marked(earlier)
            prompted = self._marked(earlier, add_generation_prompt=True)
            if not prompted.startswith(history):
                raise self._unstable_error(roles)
            return prompted[len(history) :], suffix
        between = before.split(_mark(len(earlier) - 1))[-1]
        previous_suffix = self._text_around_last_turn(earlier)[1]
        prefix = between[len(previous_suffix) :]
        if not between.startswith(previous_suffix) or "\ue000" in prefix:
            raise self._unstable_error(roles)
        return prefix, suffix

    def _text_around_last_turn(self, roles: tuple[str, ...]) -> tuple[str, str]:
        """Returns the text before and after the content of the last turn. The text after it is
        empty if the template ends the last turn of a conversation differently from earlier turns,
        or rejects a conversation with only a system turn.
        """
        own = None
        try:
            own = self._text_around_turn(roles)
        except TemplateError:
            if roles[-1] != "system":
                raise
        if own is not None and roles[-1] == "user":
            return own
        try:
            before, between = self._text_around_turn((*roles, "user"), -2)
        except TemplateError:
            if own is None:
                raise
            return own
        if own is None:
            return before, ""
        return own[0], own[1] if between.startswith(own[1]) else ""

    def _text_around_turn(self, roles: tuple[str, ...], turn: int = -1) -> tuple[str, str]:
        """Returns the text before and after the content of a turn, by default the last one."""
        text = self._marked(roles)
        mark = _mark(len(roles) + turn)
        before, found, suffix = text.partition(mark)
        if not found or mark in suffix:
            raise TemplateError(
                f"{self.name} does not write a {roles[turn]!r} turn as one piece of text.",
                hint="Put its text into another role's turn, or set chat_template= to a template that has the role.",
            )
        return before, suffix

    def _render_marks(self, roles: tuple[str, ...], *, add_generation_prompt: bool = False) -> str:
        """Renders a conversation with marks as contents."""
        messages = [{"role": role, "content": _mark(i)} for i, role in enumerate(roles)]
        return self.render(messages, add_generation_prompt=add_generation_prompt)

    def _unstable_error(self, roles: tuple[str, ...]) -> TemplateError:
        return TemplateError(
            f"{self.name} changes earlier turns when a {roles[-1]!r} turn follows: it can't be written turn by turn.",
            hint="Set chat_template= to a template that only appends.",
        )


def load_template(source: str, special_tokens: Mapping[str, str]) -> JinjaTemplate:
    """Returns a model's template. Equal arguments give the same object, because it caches the text
    around turns. Raises TemplateError like JinjaTemplate.
    """
    return _load_template(source, tuple(special_tokens.items()))


@lru_cache(maxsize=8)
def _load_template(source: str, special_tokens: tuple[tuple[str, str], ...]) -> JinjaTemplate:
    return JinjaTemplate(source, dict(special_tokens))


def _with_reasoning_names(message: Mapping[str, Json]) -> Mapping[str, Json]:
    """Returns a message with its reasoning under all names that templates read."""
    values = (message.get(name) for name in _REASONING_ORDER)
    found = next((value for value in values if value is not None), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


def _wrap_content_in_part(message: Mapping[str, Json]) -> Mapping[str, Json]:
    """Returns a message with its text as a list of one part."""
    content = message.get("content")
    return (
        {**message, "content": [{"type": "text", "text": content}]}
        if isinstance(content, str)
        else message
    )


def _mark(turn: int) -> str:
    return f"\ue000{turn}\ue001"  # private-use characters survive trimming and occur in no template


def _error_text(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text if len(text) <= 1000 else f"{text[:1000]}…"


def to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns the JSON text that chat templates expect from `tojson`. Has the parameters of
    transformers' filter. Leaves marks unescaped, so that they can be found in the text.
    """
    text = json.dumps(
        value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return _NO_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], text) if ensure_ascii else text


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format[:1000])
