"""Compacts a conversation: replaces turns with a summary of them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from sglang_lite.lang.backend.base import unsupported_feature_error
from sglang_lite.lang.checks import check_whole_number
from sglang_lite.lang.concurrency.variables import Variable
from sglang_lite.lang.execution.blocks import OpenBlocks
from sglang_lite.lang.execution.branch import Branch
from sglang_lite.lang.execution.operations import Compaction
from sglang_lite.lang.execution.reading import check_name, read_finished_text
from sglang_lite.lang.execution.transcript import FinishedText, Transcript, pieces_to_nodes
from sglang_lite.lang.expressions import SglGen
from sglang_lite.program.graph import Compact
from sglang_lite.program.nodes import Expressions, Gen, ImagePart, Text, TurnBegin, TurnEnd
from sglang_lite.protocol import (
    UNSET,
    Location,
    Message,
    ParameterError,
    ProgramError,
    SamplingParams,
    TemplateError,
    ValueValidationError,
)
from sglang_lite.text.tool_calls import parse_answer

if TYPE_CHECKING:
    from sglang_lite.protocol.anything import UserValue

_HEADING: Final = "Summary of the conversation so far:"
_PROMPT: Final = (
    "Summarize the conversation above. You will go on with it, and then see only this summary and the "
    "last turns. Write down the task, every fact, number and name that may still be needed, what was "
    "done, and what is left to do. Write nothing but the summary."
)


class Compactor:
    """Compacts the text of a branch.

    Args:
        keep, max_tokens, prompt, name: arguments of `ProgramState.compact`, which are checked here.
        where: line of the call of `compact`.
    """

    def __init__(
        self,
        branch: Branch,
        keep: int,
        max_tokens: int,
        prompt: str | None,
        name: str,
        where: Location | None,
    ) -> None:
        check_whole_number("keep", keep, 0, where)
        check_whole_number("max_tokens", max_tokens, 1, where)
        check_name(name, where)
        if prompt is not None and (not isinstance(prompt, str) or not prompt.strip()):
            raise ParameterError(
                "prompt",
                f"{prompt!r:.60} is not a text that asks for a summary.",
                hint="Leave it out, or write what the summary has to contain.",
                where=where,
            )
        self._branch = branch
        self._keep = keep
        self._max_tokens = max_tokens
        self._prompt = _PROMPT if prompt is None else prompt
        self._name = name
        self._where = where
        self._check_place()

    def run(self, wait: Callable[[Variable], UserValue]) -> UserValue:
        """Compacts the text. `wait` waits for a variable and returns its value.

        Returns:
            The summary, or None if there was nothing to drop.
        """
        with contextlib.closing(self._steps()) as steps:
            try:
                variable = next(steps)
                while True:
                    variable = steps.send(wait(variable))
            except StopIteration as ended:
                return ended.value

    async def arun(self, wait: Callable[[Variable], Awaitable[UserValue]]) -> UserValue:
        """Compacts the text in a coroutine, like `run`."""
        with contextlib.closing(self._steps()) as steps:
            try:
                variable = next(steps)
                while True:
                    variable = steps.send(await wait(variable))
            except StopIteration as ended:
                return ended.value

    def _check_place(self) -> None:
        """Checks that the branch is between two turns, and that its backend reads prompts."""
        branch = self._branch
        branch.names.raise_if_removed(self._where)
        blocks = branch.blocks
        problem = ""
        if blocks.role is not None:
            problem, hint = f"the {blocks.role!r} turn is open", "Compact after its end."
        elif blocks.grammar is not None:
            problem, hint = "a grammar is open", "Compact after its end."
        elif branch.names.scopes:
            problem, hint = "a scope is open", "Compact after its end."
        elif not blocks.turns:
            problem = "it has no turns"
            hint = "Write turns: s += sgl.user(…), s += sgl.assistant(…)."
        if problem:
            raise ProgramError(
                f"the text can't be compacted here: {problem}.", hint=hint, where=self._where
            )
        if not branch.backend.capabilities.reads_prompts:
            raise unsupported_feature_error(
                branch.backend,
                "compact",
                "replacing the text of a state",
                "Use another backend, or begin a new program with what it has to know.",
                self._where,
            )

    def _steps(self) -> Generator[Variable, UserValue, UserValue]:
        """Compacts the text. A generator that yields variables to wait for and receives their
        values.
        """
        branch = self._branch
        branch.player.prepare_for_addition(self._where)
        before = self._additions()
        whole: Any = yield branch.read_when_played(read_finished_text, self._where)
        self._check_unchanged(before)
        whole = replace(whole, suffixes=branch.blocks.suffixes)
        if len(whole.turn_ends) < len(whole.messages):
            raise ProgramError(
                "the state was saved by an earlier version, which did not write where its turns end.",
                hint="Run the program again.",
                where=self._where,
            )
        roles = _roles(whole)
        head = next((i for i, role in enumerate(roles) if role != "system"), len(roles))
        first = self._first_kept(whole.messages, head)
        if first == head or _is_summary(whole.messages[head:first]):
            return None
        with branch.restored_on_error(self._where):
            summary = yield from self._replace_turns(whole, head, first)
        return summary

    def _replace_turns(
        self, whole: FinishedText, head: int, first: int
    ) -> Generator[Variable, UserValue, UserValue]:
        """Replaces the turns from `head` to `first` with a summary, and returns the summary."""
        branch = self._branch
        self._ask_for_summary(whole, first)
        before = self._additions()
        variable = branch.names.variables[self._name]
        summary = yield variable
        self._check_not_empty(summary)
        yield branch.read_when_played(read_finished_text, self._where)
        self._check_unchanged(before)
        node = Compact(len(whole.messages) - first, first - head, where=self._where)
        dropped = whole.pieces[_start_of_turn(whole, head) : _start_of_turn(whole, first)]
        branch.replace_text(
            self._with_summary(whole, head, first, summary if isinstance(summary, str) else "…"),
            Compaction(node, whole, node.turns, dropped, variable, self._name),
        )
        return summary

    def _additions(self) -> tuple[int, tuple[str, ...], str | None]:
        """Returns values that change whenever something is added to the state."""
        blocks = self._branch.blocks
        return self._branch.node_count, blocks.turns, blocks.role

    def _check_unchanged(self, before: tuple[int, tuple[str, ...], str | None]) -> None:
        """Raises ProgramError if another task has added to the state."""
        if self._additions() != before:
            raise ProgramError(
                "something was added to the state while it was compacted. The text is as before, without "
                "what was added.",
                hint="Wait for the summary before more is added.",
                where=self._where,
            )

    def _check_not_empty(self, summary: UserValue) -> None:
        """Raises ValueValidationError if the model has written no summary."""
        if isinstance(summary, str) and not summary.strip():
            raise ValueValidationError(
                "the model has written an empty summary. The text is as before.",
                text=summary,
                hint="Say in prompt= what the summary has to contain, or raise max_tokens.",
                where=self._where,
            )

    def _first_kept(self, messages: Sequence[Message], head: int) -> int:
        """Returns the index of the first turn that is kept, after the `head` system turns. Results
        of tools are kept together with their calls.
        """
        first = max(len(messages) - self._keep, head)
        family = self._branch.backend.tool_family()
        while first > head and _has_tool_call(messages[first - 1], family):
            first -= 1
        return first

    def _refuses_user_turn(self, roles: Sequence[str]) -> bool:
        """Returns True if the last of these turns is a user turn, and the template refuses another
        one after it.
        """
        if roles[-1:] != ["user"]:
            return False
        try:
            self._user_prefix(roles)
        except TemplateError:
            return True
        return False

    def _user_prefix(self, roles: Sequence[str]) -> str:
        """Returns the text that the template adds before a user turn that follows these roles."""
        history = [{"role": role, "content": ""} for role in roles]
        return self._branch.run.template.get_prefix_and_suffix("user", history)[0]

    def _content_nodes(self, text: FinishedText, turn: int) -> Iterator[Text | ImagePart]:
        """Yields the content of a user turn as nodes."""
        pieces = list(text.pieces[_start_of_turn(text, turn) : text.turn_ends[turn]])
        prefix = self._user_prefix(_roles(text)[:turn])
        if prefix in pieces:
            pieces.remove(prefix)
        return pieces_to_nodes(pieces)

    def _user_turn(
        self, blocks: OpenBlocks, *content: Text | ImagePart
    ) -> tuple[Text | ImagePart | TurnBegin | TurnEnd, ...]:
        """Returns the nodes of a user turn after the turns of `blocks`, and adds it to `blocks`."""
        run = self._branch.run
        begin = tuple(blocks.begin_turn("user", run, self._where))
        return *begin, *content, *blocks.end_turn("user", run, self._where)

    def _ask_for_summary(self, whole: FinishedText, first: int) -> None:
        """Cuts the text after the first turns, and adds turns in which the model writes the
        summary. Their prompt shows the same tools as earlier prompts, so that its beginning is
        cached.
        """
        branch = self._branch
        if self._refuses_user_turn(_roles(whole)[:first]):
            branch.replace_text(_first_turns(whole, first - 1))
            question = Text(f"\n\n{self._prompt}", special=False, where=self._where)
            content = self._content_nodes(whole, first - 1)
            for node in self._user_turn(branch.blocks, *content, question):
                branch.player.play_or_queue(node)
        else:
            branch.replace_text(_first_turns(whole, first))
            branch.submit_expression(
                Expressions((TurnBegin("user"), self._prompt, TurnEnd("user"))), self._where
            )
        branch.submit_expression(
            Expressions((TurnBegin("assistant"), self._make_gen(), TurnEnd("assistant"))),
            self._where,
        )

    def _make_gen(self) -> SglGen[UserValue]:
        """Returns the generation that writes the summary."""
        branch = self._branch
        of_run = branch.run.settings.params
        # stops of the run would cut the summary
        params = SamplingParams(
            max_tokens=self._max_tokens,
            stop=UNSET if of_run.stop is UNSET else (),
            stop_regex=UNSET if of_run.stop_regex is UNSET else (),
        )
        if branch.shown_tools is None:
            return SglGen(Gen(self._name, params, where=self._where))
        tools = replace(branch.shown_tools, choice="none", keeps_invalid=False)
        kind = tools.value_type(None)
        node = Gen(self._name, params, kind.constraint, where=self._where)
        return SglGen(node, kind, tools=tools)

    def _with_summary(
        self, whole: FinishedText, head: int, first: int, summary: str
    ) -> FinishedText:
        """Returns the new text: the first `head` turns, the summary as a user turn, and the turns
        from `first` on. If the template refuses two user turns in a row, a user turn at `first` is
        appended to the summary.
        """
        begun = _first_turns(whole, head)
        draft = Transcript()
        draft.restore_text(begun, None)
        blocks = OpenBlocks(tuple(_roles(begun)), None, begun.suffixes)
        content: list[Text | ImagePart] = [Text(f"{_HEADING}\n{summary}", special=False)]
        if _roles(whole)[first : first + 1] == ["user"] and self._refuses_user_turn(
            [*_roles(begun), "user"]
        ):
            content += [Text("\n\n", special=False), *self._content_nodes(whole, first)]
            first += 1
        for node in self._user_turn(blocks, *content):
            match node:
                case Text():
                    draft.append_text(node)
                case ImagePart():
                    draft.append_image(node)
                case TurnBegin():
                    draft.begin_turn(node)
                case TurnEnd():
                    draft.end_turn(node)
        start = _start_of_turn(whole, first)
        moved = len(draft.pieces) - start
        return FinishedText(
            (*draft.pieces, *whole.pieces[start:]),
            (*draft.messages, *whole.messages[first:]),
            (*draft.turn_ends, *(end + moved for end in whole.turn_ends[first:])),
            (*blocks.suffixes, *whole.suffixes[first:]),
        )


def _roles(text: FinishedText) -> list[str]:
    return [message.role for message in text.messages]


def _start_of_turn(text: FinishedText, turn: int) -> int:
    """Returns the index of a turn's first piece, which may be the template's prefix."""
    if not turn:
        return 0
    end = text.turn_ends[turn - 1]
    return end + (text.pieces[end : end + 1] == (text.suffixes[turn - 1],))


def _first_turns(text: FinishedText, count: int) -> FinishedText:
    """Returns the text of the first `count` turns."""
    return FinishedText(
        text.pieces[: _start_of_turn(text, count)],
        text.messages[:count],
        text.turn_ends[:count],
        text.suffixes[:count],
    )


def _is_summary(turns: Sequence[Message]) -> bool:
    """Returns True if `turns` contains only the summary of an earlier compaction."""
    return len(turns) == 1 and turns[0].role == "user" and turns[0].text.startswith(f"{_HEADING}\n")


def _has_tool_call(message: Message, family: str | None) -> bool:
    """Returns True if a turn calls tools, so that the next turn contains the results.

    Args:
        family: name of the model's format for calls; None for one JSON object.
    """
    if message.role != "assistant":
        return False
    if family is not None:
        return bool(parse_answer(family, message.text).calls)
    try:
        value = json.loads(message.text)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and not {"tool", "calls"}.isdisjoint(value)
