"""Tool calls in the formats of model families (tool_formats.py): constraints that enforce a format,
and parsers for calls.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import regex

from sglang_lite.protocol import (
    ArgumentList,
    Choices,
    Constraint,
    InOrder,
    JsonSchema,
    Notation,
    OneOf,
    ParameterError,
    Regex,
    Repeated,
    StructuralTag,
    Tag,
    TaggedObject,
    Tags,
)
from sglang_lite.protocol.anything import Json
from sglang_lite.text.argument_list import NAME, ArgumentListReader
from sglang_lite.text.bare_calls import DOUBLED_END, END, FENCE_END, BareCalls, FoundCall
from sglang_lite.text.reasoning import ReasoningParser, allow_reasoning_before, reasoning_format
from sglang_lite.text.stop import partial_match_start
from sglang_lite.text.tool_arguments import (
    JsonArguments,
    TaggedArguments,
    arguments_text,
    compile_literal,
    literal_expression,
)
from sglang_lite.text.tool_formats import ToolFormat, tool_format

_NAME = r"[\w.:-]{1,256}"  # name of a tool
_MAX_NAMED = 24  # tools in a format without marks, before whose calls there may be text


def calls_constraint(
    family: str,
    tools: Mapping[str, JsonSchema],
    choice: Literal["auto", "required", "named", "none"] = "auto",
    *,
    reasoning: str | None = None,
    parallel: bool = True,
) -> Constraint:
    """Returns a constraint on a model's whole answer after the prompt, including reasoning, text
    and calls.

    Args:
        family: name in text.tool_formats.
        tools: schema of the arguments by tool name. To force one of several tools, pass only that
            tool.
        choice: "auto" for text that may contain calls, "required" for one or more calls, "named"
            for one call, "none" for no calls.
        reasoning: key of text.reasoning.FORMATS for the model's reasoning marks, or None for no
            reasoning.
        parallel: whether several calls are allowed; ignored for "named".

    Raises:
        ParameterError: the family, model type or choice is unknown, a forced call has no tools, or
            a tool's name could not be parsed back.
    """
    call_format = tool_format(family)
    if choice not in ("auto", "required", "named", "none"):
        raise ParameterError(
            "tool_choice", f"{choice!r} is not 'auto', 'required', 'named' or 'none'."
        )
    forced = choice in ("required", "named")
    if forced and not tools:
        raise ParameterError("tool_choice", f"{choice!r} needs tools.")
    for name in tools:
        if not regex.fullmatch(_NAME, name):
            hint = "Use up to 256 letters, digits, and _ . : -"
            raise ParameterError("tools", f"{name!r} can't be the name of a tool.", hint=hint)
    forms = tuple(_call_tags(call_format, tools))
    calls: Constraint = OneOf(
        tuple(InOrder((Choices((tag.begin,)), tag.content, Choices((tag.end,)))) for tag in forms)
    )
    more: Constraint = Choices(("",))
    if parallel and choice != "named":
        more = Repeated(InOrder((Choices((call_format.separator,)), calls)))
        calls = InOrder((calls, more))
    excluded = (
        ()
        if reasoning is None
        else (reasoning_format(reasoning).start, reasoning_format(reasoning).end)
    )
    if forced:
        before = (
            call_format.text[1] if not call_format.text[0] else ""
        )  # without a start mark, even an empty text is followed by its end mark
        answer: Constraint = InOrder(
            (Choices((before + call_format.opening,)), calls, Choices((call_format.closing,)))
        )
    elif call_format.final != ("", ""):
        answer = _constrain_channels(
            call_format, calls if choice == "auto" and tools else None, excluded
        )
    elif call_format.by_name:
        closed = InOrder((more, Choices((call_format.closing,))))
        answer = _constrain_named_calls(
            call_format, forms, closed if choice == "auto" else None, excluded
        )
    else:
        tags: tuple[Tag, ...] = ()
        if choice == "auto" and call_format.opening and tools:
            tags = (Tag(call_format.opening, calls, call_format.closing),)
        elif choice == "auto":
            tags = forms
        once = bool(tags) and (not parallel or bool(call_format.closing))
        answer = StructuralTag(tags, call_format.triggers, stop_after_first=once, excludes=excluded)
    return (
        answer
        if reasoning is None
        else allow_reasoning_before(reasoning, answer, call_format.between)
    )


def _constrain_channels(
    call_format: ToolFormat, calls: Constraint | None, excluded: tuple[str, ...]
) -> Constraint:
    """Returns a constraint on text and calls, for a format that marks text before calls differently
    from text without calls.
    """
    (first, last), (begin, end) = call_format.text, call_format.final
    nothing = Choices(("",))
    if end:  # both kinds of text begin the same way and end differently
        tags = (
            Tag(end, nothing, ""),
            *(
                ()
                if calls is None
                else (Tag(last + call_format.opening, calls, call_format.closing),)
            ),
        )
        return StructuralTag(tags, (last,), True, True, (*call_format.excluded, *excluded))
    alone = InOrder(
        (Choices((begin,)), StructuralTag((), (*call_format.marks, *call_format.excluded)))
    )
    if calls is None:
        return alone
    ends = tuple(mark for mark in call_format.marks if last.startswith(mark))
    note = InOrder(
        (
            Choices((first,)),
            StructuralTag((Tag(last, nothing, ""),), ends, True, True, call_format.excluded),
        )
    )
    return OneOf((alone, InOrder((Repeated(note, 0, 1), calls))))


def _constrain_named_calls(
    call_format: ToolFormat,
    forms: tuple[Tag, ...],
    after: Constraint | None,
    excluded: tuple[str, ...],
) -> Constraint:
    """Returns a constraint on text and calls, for a format whose calls are recognised by the name
    of a tool. With many tools, no text may precede calls, as the grammar would be too large.

    Args:
        call_format: the format.
        forms: a call of each tool.
        after: what follows the first call, or None if calls are not allowed.
        excluded: strings that text can't contain.
    """
    tags = tuple(Tag(call_format.opening + each.begin, each.content, each.end) for each in forms)
    triggers = tuple(each.begin for each in tags)
    if not triggers and not excluded:
        return Regex("(?s).*")
    text = StructuralTag((), (*triggers, *excluded))
    if after is None or not tags:
        return text
    if len(tags) <= _MAX_NAMED:
        first: Constraint = StructuralTag(tags, triggers, True, True, excluded)
    else:
        first = OneOf(
            tuple(
                InOrder((Choices((each.begin,)), each.content, Choices((each.end,))))
                for each in tags
            )
        )
    return OneOf((text, InOrder((first, after))))


def _call_tags(call_format: ToolFormat, tools: Mapping[str, JsonSchema]) -> Iterator[Tag]:
    for name, schema in tools.items():
        arguments = _constrain_arguments(schema, call_format.arguments)
        for begin, middle in call_format.heads:
            head = f"{begin.replace('{name}', name)}{name}{middle}"
            before, number, after = head.partition("#")
            content = (
                InOrder((Regex("[0-9]{1,3}"), Choices((after,)), arguments))
                if number
                else arguments
            )
            yield Tag(before, content, call_format.end)


def _constrain_arguments(schema: JsonSchema, form: Tags | Notation | None) -> Constraint:
    if form is None:
        return schema
    return ArgumentList(schema, form) if isinstance(form, Notation) else TaggedObject(schema, form)


def call_text(family: str, name: str, arguments: Mapping[str, Json]) -> str:
    """Returns the text of a call in the family's format."""
    call_format = tool_format(family)
    begin, middle = (
        part.replace("#", "0").replace("{name}", name) for part in call_format.heads[0]
    )
    call = (
        f"{begin}{name}{middle}{arguments_text(call_format.arguments, arguments)}{call_format.end}"
    )
    return f"{call_format.opening}{call}{call_format.closing}"


# ------------------------------------------------------------------------------------ parsing calls


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """Call as written by the model.

    Attributes:
        name: name of the tool.
        arguments: JSON text of the arguments object.
    """

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class CallPiece:
    """New part of a call. Only the first part has the name.

    Attributes:
        index: number of the call in the answer.
        name: name of the tool, or "" after the first part.
        arguments: new part of the arguments' JSON text.
    """

    index: int
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Pieces:
    """Reasoning, content and calls that have become certain with the latest text."""

    reasoning: str
    content: str
    calls: tuple[CallPiece, ...] = ()


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """A whole answer, parsed.

    Attributes:
        complete: False if a call was cut off: either the last of `calls`, or one that has only
            begun at the end of `content`.
    """

    reasoning: str
    content: str
    calls: tuple[WrittenCall, ...]
    complete: bool


class ToolParser:
    """Incremental parser for an answer with tool calls. Text that only looks like a call is
    content.

    Args:
        family: name in text.tool_formats.
        reasoning: key of text.reasoning.FORMATS, or None to leave reasoning in the content.
        tools: schema of the arguments by tool name. Calls without marks (text.bare_calls) must name
            one of these. In formats with unquoted strings, an argument without a schema is not read
            as a string if it is valid JSON.
        bare: whether to read calls without marks.
        parallel: whether there may be several calls. If not, a call without marks is only read if
            it is the first call, and the text after it is content, because the constraint can't end
            the answer there.

    Attributes:
        open: True if a call has begun and not ended.
        ended: number of calls that have ended.

    Raises:
        ParameterError: the family or model type is unknown.
    """

    def __init__(
        self,
        family: str,
        reasoning: str | None = None,
        tools: Mapping[str, JsonSchema] | None = None,
        *,
        bare: bool = True,
        parallel: bool = True,
    ) -> None:
        self._format = found = tool_format(family)
        self._reasoning = None if reasoning is None else ReasoningParser(reasoning, once=True)
        self._tools = tools or {}
        self._head = _call_pattern(found, tuple(self._tools) if found.by_name else ())
        # reasoning before an answer takes the blanks at its beginning
        begins = (found.trigger, *(begin for begin, _ in found.variants))
        begins = tuple(text for each in begins for text in (each, each.lstrip()))
        self._marks = tuple(text for each in found.marks for text in (each, each.lstrip()))
        self._stops = tuple(dict.fromkeys((*begins, *self._marks)))
        # marks that could also be the beginning of a call
        self._like_calls = tuple(each for each in self._marks if each.startswith(begins))
        self._pending = ""
        self._read = self._read_text
        self._inside = False  # between the format's `opening` and `closing`
        self._bare = (
            BareCalls(found.bare, tuple(self._tools))
            if bare and found.bare and self._tools
            else None
        )
        self._parallel = parallel
        self._is_bare = False  # whether the latest call has no marks
        self._bare_end = END
        self._at_line = True  # whether the pending text begins a line or follows a call
        # whether the pending text contains a tool's name and may become a call without marks
        self._named = False
        self.ended = 0
        self._scan: JsonArguments | TaggedArguments | ArgumentListReader = JsonArguments()
        self._content: list[str] = []
        self._calls: list[CallPiece] = []

    @property
    def open(self) -> bool:
        return self._named or self._read in (
            self._read_call_start,
            self._read_arguments,
            self._read_call_end,
        )

    def push(self, piece: str) -> Pieces:
        """Appends a piece of text, and returns the parts that have become certain."""
        reasoning, answer = ("", piece) if self._reasoning is None else self._reasoning.push(piece)
        return self._read_pieces(reasoning, answer)

    def flush(self) -> Pieces:
        """Ends the text, and returns the remaining parts."""
        reasoning, answer = ("", "") if self._reasoning is None else self._reasoning.flush()
        pieces = self._read_pieces(reasoning, answer)
        cut = self._read in (self._read_arguments, self._read_call_end) or (
            self._read == self._read_after_call and self._inside
        )
        while not cut and self._pending.startswith(self._marks):
            self._consume(next(len(mark) for mark in self._marks if self._pending.startswith(mark)))
        pending = self._pending
        self._pending = ""
        ends = (
            ("`", "``", "```")
            if self._read == self._read_fence_end
            else (self._format.separator.strip(),)
        )
        if cut or (self.ended and pending.strip() in ("", *ends)):
            pending = ""
        return Pieces(pieces.reasoning, pieces.content + pending, pieces.calls)

    def _read_pieces(self, reasoning: str, answer: str) -> Pieces:
        self._pending += answer
        while self._read():
            pass
        content = "".join(self._content)
        calls = tuple(self._calls)
        self._content.clear()
        self._calls.clear()
        return Pieces(reasoning, content, calls)

    # Each of the following states reads what it can of the pending text. It returns True if
    # another state may read more.

    def _read_text(self) -> bool:
        if self.ended and self._is_bare and not self._parallel:
            self._add_content(len(self._pending))
            return False
        hits = [at for stop in self._stops if (at := self._pending.find(stop)) >= 0]
        end = min(hits or (partial_match_start(self._pending, 0, stop) for stop in self._stops))
        bare = self._find_bare(self._pending, at_line=self._at_line)
        if bare is not None and bare.start < end:
            self._add_content(bare.start)
            return bare.whole and self._read_bare_start(bare)
        self._named = False
        self._add_content(end)
        start = self._read_possible_start if self._format.by_name else self._read_call_start
        return bool(hits) and self._switch_to(start, inside=False)

    def _find_bare(self, text: str, *, at_line: bool) -> FoundCall | None:
        allowed = self._bare is not None and (self._parallel or not self.ended)
        found = (
            self._bare.find(text, at_line=at_line) if self._bare is not None and allowed else None
        )
        self._named = found is not None and not found.whole and bool(found.name)
        return found

    def _read_bare_start(self, found: FoundCall) -> bool:
        """Reads the start of a bare call (a JSON object without the format's marks) from the
        pending text.
        """
        self._consume(found.end - found.start)
        self._is_bare = True
        self._bare_end = DOUBLED_END if found.doubled else END
        self._calls.append(CallPiece(self.ended, found.name, ""))
        if found.arguments:
            self._calls.append(CallPiece(self.ended, "", found.arguments))
            return self._switch_to(self._read_call_end, inside=False)
        self._scan = JsonArguments()
        return self._switch_to(self._read_arguments, inside=False)

    def _read_possible_start(self) -> bool:
        """Reads the start of a call in a format where other text may begin the same way. A call has
        begun once its name is complete.
        """
        if self._format.middle in self._pending:
            return self._switch_to(self._read_call_start, inside=False)
        return self._read_call_start()

    def _read_call_start(self) -> bool:
        """Reads the start of a call. For the first call, also reads the text that opens all calls.
        If no call begins here, reads one mark or one character instead.
        """
        if self._inside and self._format.accepts_any_whitespace:
            self._pending = self._pending.lstrip()
        opening = "" if self._inside else self._format.opening
        if opening and self._format.accepts_any_whitespace:
            opening = f"{opening.rstrip()}\n"
        before = compile_literal(opening, blanks=self._format.accepts_any_whitespace).match(
            self._pending, partial=True
        )
        head = None
        if self._pending.startswith(self._like_calls):
            before = None
        if before and not before.partial:
            head = self._head.match(self._pending, before.end(), partial=True)
        if (before and before.partial) or (head and head.partial):
            return False
        if head is None:
            stop = max(
                (each for each in self._stops if self._pending.startswith(each)),
                key=len,
                default=self._pending[:1],
            )
            self._consume(len(stop))
            if stop not in self._marks:
                self._content.append(stop)
                self._at_line = False
            return self._switch_to(self._read_text, inside=False)
        self._consume(head.end())
        self._is_bare = False
        name = head["name"]
        self._scan = _read_arguments_in(self._format.arguments, self._tools.get(name))
        self._calls.append(CallPiece(self.ended, name, ""))
        return self._switch_to(self._read_arguments, inside=bool(self._format.opening))

    def _read_arguments(self) -> bool:
        length, json_text = self._scan.push(self._pending)
        self._consume(length)
        if json_text:
            self._calls.append(CallPiece(self.ended, "", json_text))
        return self._scan.done and self._switch_to(self._read_call_end, inside=self._inside)

    def _read_call_end(self) -> bool:
        blanks = self._format.accepts_any_whitespace
        before = " " if blanks and self._format.end else ""
        found = (
            self._bare_end
            if self._is_bare
            else compile_literal(before + self._format.end, blanks=blanks)
        )
        end = found.match(self._pending, partial=True)
        if end and end.partial:
            return False
        self.ended += 1
        self._at_line = True
        if end is None:  # impossible under the format's constraint
            return self._switch_to(self._read_text, inside=False)
        self._consume(end.end())
        return self._switch_to(
            self._read_fence_end if self._is_bare else self._read_after_call, inside=self._inside
        )

    def _read_fence_end(self) -> bool:
        """Reads the end of a code fence after a call without marks."""
        end = FENCE_END.match(self._pending, partial=True)
        if end and end.partial:
            return False
        if end:
            self._consume(end.end())
        return self._switch_to(self._read_blanks, inside=False)

    def _read_blanks(self) -> bool:
        """Reads the blanks after a call without marks. Drops them if another call follows;
        otherwise they become content.
        """
        rest = self._pending.lstrip()
        blanks = self._pending[: len(self._pending) - len(rest)]
        found = self._find_bare(rest, at_line=blanks == "" or blanks.endswith("\n"))
        follows = found is not None and not found.start
        if (
            not rest
            or self._format.trigger.startswith(rest)
            or (follows and found is not None and not found.whole)
        ):
            return False
        if follows or (self._parallel and rest.startswith(self._format.trigger)):
            self._pending = rest
            self._at_line = True
        return self._switch_to(self._read_text, inside=False)

    def _read_after_call(self) -> bool:
        """Reads what follows a call: the beginning of another call, or the end of all calls."""
        separator = self._format.separator
        closing = self._format.closing if self._inside else ""
        if self._inside and self._format.accepts_any_whitespace:
            self._pending = self._pending.lstrip()
        begin = self._format.begin if self._inside else self._format.trigger
        for follows, read in (
            (separator + begin, self._read_call_start),
            (closing, self._read_text),
        ):
            found = (
                compile_literal(follows, blanks=self._format.accepts_any_whitespace).match(
                    self._pending, partial=True
                )
                if follows
                else None
            )
            if found and found.partial:
                return False
            if found:
                between = compile_literal(
                    separator, blanks=self._format.accepts_any_whitespace
                ).match(self._pending)
                self._consume(
                    between.end() if between and read == self._read_call_start else found.end()
                )
                return self._switch_to(read, inside=self._inside and read == self._read_call_start)
        return self._switch_to(self._read_text, inside=False)

    def _switch_to(self, read: Callable[[], bool], *, inside: bool) -> bool:
        self._read = read
        self._inside = inside
        return True

    def _add_content(self, length: int) -> None:
        """Adds the next `length` characters to the content."""
        if length:
            self._content.append(self._consume(length))
            self._at_line = self._content[-1].endswith("\n")

    def _consume(self, length: int) -> str:
        text = self._pending[:length]
        self._pending = self._pending[length:]
        return text


def _read_arguments_in(
    form: Tags | Notation | None, schema: JsonSchema | None
) -> JsonArguments | TaggedArguments | ArgumentListReader:
    if form is None:
        return JsonArguments()
    return (
        ArgumentListReader(form, schema)
        if isinstance(form, Notation)
        else TaggedArguments(form, schema)
    )


@lru_cache(maxsize=64)
def _call_pattern(call_format: ToolFormat, names: tuple[str, ...]) -> regex.Pattern[str]:
    """Returns the pattern of the text in a call before its arguments.

    Args:
        call_format: format of the call.
        names: names of the tools, or () for any name.
    """
    blanks = call_format.accepts_any_whitespace
    options = []
    for begin, middle in call_format.heads:
        name = "|".join(map(regex.escape, names)) or _NAME
        before = literal_expression(begin, blanks=blanks)
        if "{name}" in begin:
            before = before.replace(r"\{name\}", f"(?P<same>{name})")
            name = "(?P=same)"
        after = literal_expression(middle, blanks=blanks) if middle.strip() else r"\s{0,100}(?=<)"
        if blanks and middle.endswith(" "):
            after += r"(?=\S)"
        if call_format.by_name:
            after += rf"(?=\s{{0,100}}(?:{NAME}\s{{0,100}}=|{re.escape(call_format.end)}))"
        options.append(f"{before}(?P<name>{name}){after}")
    return regex.compile("|".join(options))


def parse_answer(
    family: str,
    text: str,
    reasoning: str | None = None,
    tools: Mapping[str, JsonSchema] | None = None,
    *,
    parallel: bool = True,
) -> ParsedAnswer:
    """Parses a whole answer. For arguments and errors, see ToolParser."""
    parser = ToolParser(family, reasoning, tools, parallel=parallel)
    pieces = (parser.push(text), parser.flush())
    calls: list[WrittenCall] = []
    for piece in (piece for part in pieces for piece in part.calls):
        if piece.name:
            calls.append(WrittenCall(piece.name, ""))
        calls[-1] = WrittenCall(calls[-1].name, calls[-1].arguments + piece.arguments)
    thought = "".join(p.reasoning for p in pieces)
    content = "".join(p.content for p in pieces)
    return ParsedAnswer(thought, content, tuple(calls), complete=not parser.open)
