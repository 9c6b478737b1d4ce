"""`sglang-lite chat`: a conversation in a terminal."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TextIO

from sglang_lite.constraints.schema import json_schema
from sglang_lite.lang.api import assistant, function, gen, system, user
from sglang_lite.lang.backend.default import BackendLike
from sglang_lite.lang.runs import files
from sglang_lite.lang.state import ProgramState
from sglang_lite.notebook.markup import replace_unprintable
from sglang_lite.protocol import JsonSchema, ParameterError, SglError

HELP: Final = """\
/system TEXT   begin again, with TEXT as the system turn
/json SCHEMA   let answers be JSON of a schema, given as text or as a file; without SCHEMA, text again
/save FILE     write the conversation to FILE, as JSON messages
/help          show this
/quit          end; so does Ctrl-D. Ctrl-C stops an answer
"""


@dataclass(frozen=True, slots=True)
class Dialogue:
    """Conversation so far.

    Attributes:
        turns: pairs of role and text, without the system turn.
        system: text of the system turn, or "" for none.
        schema: constraint on the answers, or None.
    """

    turns: tuple[tuple[str, str], ...] = ()
    system: str = ""
    schema: JsonSchema | None = None

    def messages(self) -> list[dict[str, str]]:
        """Returns the turns in the form of chat APIs."""
        turns = (("system", self.system), *self.turns) if self.system else self.turns
        return [{"role": role, "content": text} for role, text in turns]


@function
def _answer(s: ProgramState, conversation: Dialogue) -> None:
    roles: dict[str, Callable[..., Any]] = {"system": system, "user": user, "assistant": assistant}
    for message in conversation.messages():
        s += roles[message["role"]](message["content"])
    s += assistant(gen("answer", constraint=conversation.schema))


def read_typed_lines() -> Iterator[str]:
    """Yields lines of standard input. In a terminal they can be edited, and earlier lines are
    available with the arrow keys.
    """
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    with contextlib.suppress(ImportError):  # Windows has none
        import readline  # noqa: F401 # `input` uses it
    try:
        while True:
            yield input("> ")
    except EOFError:
        print()


def chat(
    lines: Iterable[str],
    out: TextIO,
    backend: BackendLike | None,
    conversation: Dialogue,
    *,
    max_tokens: int,
    temperature: float,
) -> Dialogue:
    """Reads questions and commands, one per line, and writes answers as they arrive, until the end
    of the lines or /quit.

    Args:
        backend: backend of the answers; None for the default one.
        max_tokens, temperature: sampling parameters of the answers.

    Returns:
        The conversation at the end.
    """
    answer = partial(
        _answer.run,
        backend=backend,
        stream=True,
        max_new_tokens=max_tokens,
        temperature=temperature,
    )
    for line in lines:
        text = line.strip()
        if text == "/quit":
            break
        try:
            if text.startswith("/"):
                conversation = _execute_command(conversation, text, out)
            elif text:
                conversation = _answer_question(conversation, text, out, answer)
        except SglError as error:
            print(f"sglang-lite: {error}", file=out)
    return conversation


def _execute_command(conversation: Dialogue, text: str, out: TextIO) -> Dialogue:
    """Executes a command and returns the resulting conversation. Raises SglError if that fails; the
    conversation then stays as it is.
    """
    command, _, rest = text.partition(" ")
    rest = rest.strip()
    if command == "/system":
        print("A new conversation.", file=out)
        return replace(conversation, system=rest, turns=())
    if command == "/json":
        found = (
            json_schema(
                rest if rest.startswith(("{", "true", "false")) else _read_schema(Path(rest))
            )
            if rest
            else None
        )
        print("Answers are text." if found is None else "Answers are JSON of the schema.", file=out)
        return replace(conversation, schema=found)
    if command == "/save" and rest:
        messages = conversation.messages()
        content = json.dumps(messages, ensure_ascii=False, indent=2) + "\n"
        files.write(rest, content.encode(), "/save")
        print(f"{rest}: {len(messages)} messages", file=out)
        return conversation
    if command != "/help":
        print(f"{command} is no command, or lacks something.", file=out)
    print(HELP, end="", file=out)
    return conversation


def _answer_question(
    conversation: Dialogue, text: str, out: TextIO, answer: Callable[[Dialogue], ProgramState]
) -> Dialogue:
    """Prints the answer to a question as it arrives, and returns the conversation extended by the
    question and the answer. If interrupted, keeps the part of the answer that has arrived.
    """
    asked = replace(conversation, turns=(*conversation.turns, ("user", text)))
    state = answer(asked)
    pieces = []
    try:
        for piece in state.text_iter("answer"):
            pieces.append(piece)
            # no escape sequences from the model
            print(replace_unprintable(piece), end="", file=out, flush=True)
    except KeyboardInterrupt:
        state.cancel()
        print(" (stopped)", end="", file=out)
    print(file=out, flush=True)
    return replace(asked, turns=(*asked.turns, ("assistant", "".join(pieces))))


def _read_schema(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(
            "/json", f"{path}: {_error_reason(error)}", hint="Give a schema, or a file with one."
        ) from error


def _error_reason(error: OSError | UnicodeDecodeError) -> str:
    return f"{os.strerror(error.errno) if isinstance(error, OSError) and error.errno else error}."
