"""Open blocks of a branch: the turn and the grammar that its next text will belong to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from sglang_lite.errors import with_article
from sglang_lite.lang.backend.base import Backend, unsupported_feature_error
from sglang_lite.lang.concurrency.variables import copy_as_sgl_error
from sglang_lite.lang.execution.run import Run
from sglang_lite.program.nodes import GrammarBegin, Text, TurnBegin, TurnEnd
from sglang_lite.protocol import Constraint, Continuation, Location, ProgramError
from sglang_lite.text.chat_template import JinjaTemplate, TurnTemplate

if TYPE_CHECKING:
    from sglang_lite.constraints.byte_matcher import ByteMatcher


class OpenBlocks(msgspec.Struct, eq=False):  # its constructor runs no Python code
    """The turn and the grammar open at some point of a branch, and the turns before it.

    Attributes:
        turns: roles of the turns that have ended.
        role: role of the open turn, or None.
        suffixes: text that ends each turn, with the open turn last; None for a turn whose text is
            missing from an earlier run's file.
        grammar: the open grammar, or None.
        matcher: matcher of the open grammar while all of its text is known, else None.
        compacted: whether the branch's text was replaced after the branch was forked.
    """

    turns: tuple[str, ...] = ()
    role: str | None = None
    suffixes: tuple[str | None, ...] = ()
    grammar: Constraint | None = None
    matcher: ByteMatcher | None = None
    compacted: bool = False

    def copy(self) -> OpenBlocks:
        return OpenBlocks(
            self.turns,
            self.role,
            self.suffixes,
            self.grammar,
            self.matcher and self.matcher.copy(),
            self.compacted,
        )

    def restore_turns(
        self, turns: tuple[str, ...], role: str | None, suffixes: tuple[str | None, ...]
    ) -> None:
        """Restores the turns of an earlier run, including its open turn, if any.

        Args:
            suffixes: texts that end the turns. Missing ones come from the backend's template.
        """
        self.turns = turns
        self.role = role
        count = len(turns) + (role is not None)
        self.suffixes = (*suffixes, *[None] * count)[:count]

    def begin_turn(
        self, role: str, run: Run, where: Location | None
    ) -> Iterator[Text | TurnBegin | TurnEnd]:
        """Opens a turn and yields its nodes. If it is the first turn, the template's default system
        turn comes before it.
        """
        if self.grammar is not None or self.role is not None:
            inside = "a grammar" if self.grammar is not None else _describe_turn(self.role or "")
            problem = f"{_describe_turn(role)} begins inside {inside}."
            raise ProgramError(problem, hint="End that one first.", where=where)
        try:
            template = run.template
            system = template.default_system_prompt
            if system and not self.turns and role != "system":
                yield from self.begin_turn("system", run, where)
                yield Text(system, where=where)
                yield from self.end_turn("system", run, where)
            prefix, suffix = self._text_around_turn(template, role)
        except Exception as error:  # templates are the user's code
            raise copy_as_sgl_error(error, where) from error
        self.role = role
        self.suffixes = (*self.suffixes, suffix)
        yield Text(prefix, where=where)
        yield TurnBegin(role, where=where)

    def end_turn(self, role: str, run: Run, where: Location | None) -> tuple[TurnEnd, Text]:
        """Closes the open turn and returns its last nodes."""
        if self.grammar is not None:
            raise ProgramError(
                f"{_describe_turn(role)} ends inside a grammar.",
                hint="End that one first.",
                where=where,
            )
        if self.role != role:
            if self.role is None:
                problem = "no turn is open"
                hint = f"Begin it first: s += sgl.{role}_begin()."
            else:
                problem = f"the open turn is {self.role!r}"
                hint = f"End that one first: s += sgl.{self.role}_end()."
            raise ProgramError(
                f"{_describe_turn(role)} ends, but {problem}.", hint=hint, where=where
            )
        suffix = self.suffixes[-1]
        if suffix is None:
            suffix = self._suffix_from_template(role, run, where)
            self.suffixes = (*self.suffixes[:-1], suffix)
        self.role = None
        self.turns = (*self.turns, role)
        return TurnEnd(role, where=where), Text(suffix, where=where)

    def _suffix_from_template(self, role: str, run: Run, where: Location | None) -> str:
        """Returns the text that ends the open turn in the backend's template."""
        try:
            return str(self._text_around_turn(run.template, role)[1])
        except Exception as error:  # templates are the user's code
            raise copy_as_sgl_error(error, where) from error

    def begin_grammar(self, node: GrammarBegin, backend: Backend, where: Location | None) -> None:
        from sglang_lite.constraints.byte_matcher import ByteMatcher

        self.refuse_in_grammar(
            "a grammar is already open.", "Combine the two into one grammar.", where
        )
        if Continuation not in backend.capabilities.constraints:
            raise unsupported_feature_error(
                backend,
                node,
                "a grammar over several nodes",
                "Write all of it with one gen(constraint=…).",
                where,
            )
        self.grammar = node.constraint
        self.matcher = ByteMatcher(node.constraint)

    def end_grammar(self) -> ByteMatcher | None:
        """Closes the open grammar and returns its matcher."""
        matcher = self.matcher
        self.grammar = None
        self.matcher = None
        return matcher

    def refuse_in_grammar(self, problem: str, hint: str, where: Location | None) -> None:
        """Raises ProgramError if a grammar is open."""
        if self.grammar is not None:
            raise ProgramError(problem, hint=hint, where=where)

    def _text_around_turn(self, template: TurnTemplate, role: str) -> tuple[str, str]:
        """Returns the text before and after the content of a turn that follows the finished ones."""
        if isinstance(template, JinjaTemplate):
            return template.get_prefixes_and_suffixes((*self.turns, role))[-1]
        return template.get_prefix_and_suffix(
            role, [{"role": earlier, "content": ""} for earlier in self.turns]
        )


def _describe_turn(role: str) -> str:
    return with_article(f"{role!r} turn")
