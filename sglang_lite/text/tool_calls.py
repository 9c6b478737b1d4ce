"""How families of models write calls of tools: the constraint that holds them to it, and reading the calls back.

Only formats whose arguments are JSON. (Sources: the models' chat templates; xgrammar 0.2.8, `builtin_structural_tag`;
for Mistral's, mistral-common.)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import regex

from sglang_lite.protocol import (
    Choices,
    Constraint,
    InOrder,
    JsonSchema,
    OneOf,
    ParameterError,
    Regex,
    Repeated,
    StructuralTag,
    Tag,
)
from sglang_lite.text.reasoning import ReasoningParser, format_of, reasoned
from sglang_lite.text.stop import overlap


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A call is `begin`, the name of the tool, `middle`, its arguments as a JSON object, and `end`.

    Attributes:
        trigger: what begins calls, and stands in no other text of an answer.
        middle: a # in it is a number.
        opening, closing: around all calls.
        separator: between two of them.
    """

    trigger: str
    begin: str
    middle: str
    end: str
    opening: str = ""
    closing: str = ""
    separator: str = ""


_DEEPSEEK = "<｜tool▁calls▁begin｜>"

# By the names that SGLang gives them.
FORMATS = {
    "qwen": ToolFormat(
        "<tool_call>", '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", separator="\n"
    ),
    "exaone": ToolFormat("<tool_call>", '<tool_call>{"name": "', '", "arguments": ', "}</tool_call>", separator="\n"),
    "llama3": ToolFormat('{"name": "', '{"name": "', '", "parameters": ', "}", separator="; "),
    "mistral": ToolFormat(
        "[TOOL_CALLS]", '{"name": "', '", "arguments": ', "}", opening="[TOOL_CALLS] [", closing="]", separator=", "
    ),
    "mistral-nemo": ToolFormat(
        "[TOOL_CALLS]", '{"name": "', '", "arguments": ', "}", opening="[TOOL_CALLS][", closing="]", separator=", "
    ),
    "mistral-v13": ToolFormat("[TOOL_CALLS]", "[TOOL_CALLS]", "[ARGS]", ""),
    "deepseekv3": ToolFormat(
        _DEEPSEEK, "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>",
        opening=_DEEPSEEK, closing="<｜tool▁calls▁end｜>", separator="\n",
    ),
    "deepseekv31": ToolFormat(
        _DEEPSEEK, "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
        opening=_DEEPSEEK, closing="<｜tool▁calls▁end｜>",
    ),
    "kimi_k2": ToolFormat(
        "<|tool_calls_section_begin|>", "<|tool_call_begin|>functions.", ":#<|tool_call_argument_begin|>",
        "<|tool_call_end|>", opening="<|tool_calls_section_begin|>", closing="<|tool_calls_section_end|>",
    ),
}  # fmt: skip
DEFAULT = "qwen"  # of models of other families: most that were trained without a format of their own were with this one

# Tokens of these texts are part of what a model says, though its tokenizer may call them special.
MARKS = frozenset({
    "<think>", "</think>", "[THINK]", "[/THINK]", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>",
    "<|tool_call_argument_begin|>",
})  # fmt: skip

# What a chat template says that shows calls in a format; the first one counts.
_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("deepseekv3", (_DEEPSEEK, "```json")),
    ("deepseekv31", (_DEEPSEEK,)),
    ("mistral-v13", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral-nemo", ("[TOOL_CALLS][",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("exaone", ('<tool_call>{"name": ', '"arguments": ')),
    ("qwen", ("<tool_call>", '"arguments": ')),
    ("llama3", ('{"name": ', '"parameters": ')),
)
_OTHERS = ("<function=", "<arg_key>", "<invoke", "[CALL_ID]")  # formats that are not known here


def family_of(template: str | None) -> str | None:
    """The key of FORMATS for a model's chat template; None where it shows no calls, or in another format."""
    source = (template or "").replace("\\n", "\n").replace('\\"', '"')
    if any(sign in source for sign in _OTHERS):
        return None
    return next((family for family, signs in _SIGNS if all(sign in source for sign in signs)), None)


def tool_format(family: str) -> ToolFormat:
    """Raises ParameterError: an unknown family."""
    if family not in FORMATS:
        raise ParameterError("tool_format", f"{family!r} is unknown.", hint=f"Known: {', '.join(FORMATS)}.")
    return FORMATS[family]


def calls_constraint(
    family: str,
    tools: Mapping[str, JsonSchema],
    choice: Literal["auto", "required", "none"] = "auto",
    *,
    reasoning: str | None = None,
    parallel: bool = True,
) -> Constraint:
    """What a model's whole answer is, from what its template ends with on: reasoning, text, calls.

    Args:
        family: a key of FORMATS.
        tools: the schema of its arguments by a tool's name. To ask for one of several, give that one alone.
        choice: "auto": text, and calls in it; "required": calls and nothing else; "none": no calls.
        reasoning: how the model marks its reasoning: a key of text.reasoning.FORMATS.
        parallel: several calls are allowed.

    Raises:
        ParameterError: an unknown family, model type or choice; "required" without tools.
    """
    spelled = tool_format(family)
    if choice not in ("auto", "required", "none"):
        raise ParameterError("tool_choice", f"{choice!r} is not 'auto', 'required' or 'none'.")
    if choice == "required" and not tools:
        raise ParameterError("tool_choice", "'required' needs tools.")
    calls = OneOf(tuple(_call(spelled, name, schema) for name, schema in tools.items()))
    if parallel:
        calls_text: Constraint = InOrder((calls, Repeated(InOrder((Choices((spelled.separator,)), calls)))))
    else:
        calls_text = calls
    marks = () if reasoning is None else (format_of(reasoning).start, format_of(reasoning).end)
    if choice == "required":
        answer: Constraint = InOrder((Choices((spelled.opening,)), calls_text, Choices((spelled.closing,))))
    else:
        tags: tuple[Tag, ...] = ()
        if choice == "auto" and spelled.opening and tools:
            tags = (Tag(spelled.opening, calls_text, spelled.closing),)
        elif choice == "auto":
            tags = tuple(_tag(spelled, name, schema) for name, schema in tools.items())
        once = bool(tags) and (not parallel or bool(spelled.closing))
        answer = StructuralTag(tags, (spelled.trigger,), stop_after_first=once, excludes=marks)
    return answer if reasoning is None else reasoned(reasoning, answer)


def _tag(spelled: ToolFormat, name: str, schema: JsonSchema) -> Tag:
    before, number, after = f"{spelled.begin}{name}{spelled.middle}".partition("#")
    content = InOrder((Regex("[0-9]{1,3}"), Choices((after,)), schema)) if number else schema
    return Tag(before, content, spelled.end)


def _call(spelled: ToolFormat, name: str, schema: JsonSchema) -> Constraint:
    tag = _tag(spelled, name, schema)
    return InOrder((Choices((tag.begin,)), tag.content, Choices((tag.end,))))


def call_text(family: str, name: str, arguments: str) -> str:
    """A call as the family writes it."""
    spelled = tool_format(family)
    call = f"{spelled.begin}{name}{spelled.middle.replace('#', '0')}{arguments}{spelled.end}"
    return f"{spelled.opening}{call}{spelled.closing}"


# -------------------------------------------------------------------------------------------------- reading back


@dataclass(frozen=True, slots=True)
class Call:
    """A call as it is written.

    Attributes:
        name: of the tool.
        arguments: JSON text of an object.
    """

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class CallPiece:
    """What has come of a call: with its first piece the name."""

    index: int
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Pieces:
    """What new text has brought for certain."""

    reasoning: str
    content: str
    calls: tuple[CallPiece, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer.

    Attributes:
        complete: no call was cut short; else the last of `calls` is, or the end of `content` is its beginning.
    """

    reasoning: str
    content: str
    calls: tuple[Call, ...]
    complete: bool


class ToolParser:
    """Reads an answer as it arrives. Text that only looks like a call is content.

    Args:
        family: a key of FORMATS.
        reasoning: a key of text.reasoning.FORMATS; None: nothing is split off.

    Attributes:
        open: a call has begun and has not ended.

    Raises:
        ParameterError: an unknown family or model type.
    """

    def __init__(self, family: str, reasoning: str | None = None) -> None:
        self._format = found = tool_format(family)
        self._reasoning = None if reasoning is None else ReasoningParser(reasoning, once=True)
        middle = re.escape(found.middle).replace(r"\#", r"[0-9]+").replace("#", "[0-9]+")
        self._head = regex.compile(rf"{re.escape(found.begin)}(?P<name>[\w.-]+?){middle}")
        self._held = ""
        self._read = self._text
        self._inside = False  # of opening and closing
        self._count = 0
        self._scan = _JsonEnd()
        self._content: list[str] = []
        self._calls: list[CallPiece] = []

    @property
    def open(self) -> bool:
        return self._read in (self._begin, self._arguments, self._end)

    def push(self, piece: str) -> Pieces:
        """Takes the next text."""
        reasoning, answer = ("", piece) if self._reasoning is None else self._reasoning.push(piece)
        return self._pieces(reasoning, answer)

    def flush(self) -> Pieces:
        """The end of the text."""
        reasoning, answer = ("", "") if self._reasoning is None else self._reasoning.flush()
        pieces = self._pieces(reasoning, answer)
        held, self._held = self._held, ""
        if self._read in (self._arguments, self._end) or (
            self._count and held.strip() in ("", self._format.separator.strip())
        ):
            held = ""
        return Pieces(pieces.reasoning, pieces.content + held, pieces.calls)

    def _pieces(self, reasoning: str, answer: str) -> Pieces:
        self._held += answer
        while self._read():
            pass
        content, calls = "".join(self._content), tuple(self._calls)
        self._content.clear()
        self._calls.clear()
        return Pieces(reasoning, content, calls)

    # Each of these reads what it can of the text held, and says whether there may be more to read.

    def _text(self) -> bool:
        at = self._held.find(self._format.trigger)
        if at >= 0:
            self._content.append(self._taken(at))
            self._read = self._begin
            return True
        self._content.append(self._taken(overlap(self._held, 0, self._format.trigger)))
        return False

    def _begin(self) -> bool:
        """At a call, or at what is before the first one."""
        opening = "" if self._inside else self._format.opening
        if len(self._held) < len(opening) and opening.startswith(self._held):
            return False
        head = self._head.match(self._held, len(opening), partial=True) if self._held.startswith(opening) else None
        if head is None:
            self._content.append(self._taken(max(1, len(self._format.trigger))))
            return self._to(self._text, inside=False)
        if head.partial:
            return False
        self._taken(head.end())
        self._calls.append(CallPiece(self._count, head["name"], ""))
        self._scan = _JsonEnd()
        return self._to(self._arguments, inside=bool(self._format.opening))

    def _arguments(self) -> bool:
        length = self._scan.push(self._held)
        if length:
            self._calls.append(CallPiece(self._count, "", self._taken(length)))
        return self._scan.done and self._to(self._end, inside=self._inside)

    def _end(self) -> bool:
        end = self._format.end
        if len(self._held) < len(end) and end.startswith(self._held):
            return False
        if not self._held.startswith(end):  # no model that is held to it writes this
            return self._to(self._text, inside=False)
        self._taken(len(end))
        self._count += 1
        return self._to(self._after, inside=self._inside)

    def _after(self) -> bool:
        """Behind a call: another one, or what is after the last one."""
        more = self._format.separator + (self._format.begin if self._inside else self._format.trigger)
        for follows, read in ((more, self._begin), (self._format.closing if self._inside else "", self._text)):
            if follows and self._held.startswith(follows):
                self._taken(len(self._format.separator) if read == self._begin else len(follows))
                return self._to(read, inside=self._inside and read == self._begin)
            if follows.startswith(self._held):
                return False
        return self._to(self._text, inside=False)

    def _to(self, read: Callable[[], bool], *, inside: bool) -> bool:
        self._read, self._inside = read, inside
        return True

    def _taken(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        return text


def parse_answer(family: str, text: str, reasoning: str | None = None) -> Answer:
    """A whole answer, read. Raises as ToolParser."""
    parser = ToolParser(family, reasoning)
    pieces = (parser.push(text), parser.flush())
    calls: list[Call] = []
    for piece in (piece for part in pieces for piece in part.calls):
        if piece.name:
            calls.append(Call(piece.name, ""))
        calls[-1] = Call(calls[-1].name, calls[-1].arguments + piece.arguments)
    thought, content = "".join(p.reasoning for p in pieces), "".join(p.content for p in pieces)
    return Answer(thought, content, tuple(calls), complete=not parser.open)


class _JsonEnd:
    """Finds the end of a JSON object that comes in pieces. What is no object ends at once."""

    def __init__(self) -> None:
        self.done = False
        self._depth = 0
        self._in_string = self._escaped = False

    def push(self, text: str) -> int:
        """How many characters of the next text belong to it."""
        for i, char in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = char == "\\"
                self._in_string = char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
            if not self._depth:
                self.done = True
                return i + (char in "}]")
        return len(text)
