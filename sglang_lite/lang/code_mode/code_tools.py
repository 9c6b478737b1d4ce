"""The functions that a model's program may call, with the limits of such programs."""

from __future__ import annotations

import ast
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from textwrap import indent
from typing import Final

from sglang_lite.lang.checks import check_positive, check_whole_number
from sglang_lite.lang.code_mode.builtin_types import BUILTINS
from sglang_lite.lang.code_mode.calls import CallMaker, CallOutcome, CallStore, CodeCall
from sglang_lite.lang.code_mode.check_types import check_types
from sglang_lite.lang.code_mode.grammar import MAX_BLOCKS, write_grammar
from sglang_lite.lang.code_mode.interpreter import ProgramInterpreter
from sglang_lite.lang.code_mode.limits import CodeLimits, Meter
from sglang_lite.lang.code_mode.parse import parse_program
from sglang_lite.lang.code_mode.static_types import StaticType
from sglang_lite.lang.code_mode.tool_signatures import ToolSignature, read_signatures
from sglang_lite.lang.tool_results import OnToolError
from sglang_lite.lang.tool_runner import ToolRunner
from sglang_lite.lang.tools import ToolCall
from sglang_lite.lang.tracebacks import user_location
from sglang_lite.protocol import Lark, ParameterError
from sglang_lite.protocol.anything import UserValue

_INTRODUCTION: Final = "You can call these Python functions, which are defined already:"
_RULES: Final = f"""
Answer with the body of a Python function that does what the user asks for: it calls these functions, and ends with
`return` and the result (`return None` if it has none). Write the code alone. There is no import, def, class, while,
try or print, and no function but these and {", ".join(BUILTINS)}.
Blocks are at most {MAX_BLOCKS} deep.

For example, "How many of the numbers 3, 8 and 5 are above 4?" is answered with

```python
count = 0
for number in [3, 8, 5]:
    if number > 4:
        count += 1
return count
```"""


@dataclass(frozen=True, slots=True)
class CheckedProgram:
    """Program whose form and types have been checked."""

    tree: ast.Module
    text: str


class CodeTools:
    """Functions for `gen(code=…)`: the model writes a small program that calls them, which is checked
    and then run.

    Args:
        tools: functions with annotated parameters, or tools of MCP servers, as in `gen(tools=…)`.
        max_steps: maximum number of steps; each statement, expression and loop item is a step.
        max_memory: maximum number of items and characters in all values that a program creates.
        max_calls: maximum number of calls.
        max_result: maximum number of items and characters in the result of one call.
        tool_timeout: seconds that a call may take, like in `use_tools`; None for no limit.
        on_tool_error: what happens if a function raises an exception. "show" shows it to the model
            if the generation has attempts left. "raise" raises a ToolError. A function gets the
            ToolCall and the exception, and returns the text for the model.

    Raises:
        ParameterError: a function can't be called by a program: it has `*args`, a parameter without
            a type or with one that can't be written as JSON, or it is a generator.
    """

    def __init__(
        self,
        tools: Sequence[Callable[..., UserValue]],
        *,
        max_steps: int = 100_000,
        max_memory: int = 10_000_000,
        max_calls: int = 100,
        max_result: int = 1_000_000,
        tool_timeout: float | None = None,
        on_tool_error: OnToolError = "show",
    ) -> None:
        where = user_location()
        counts = {
            "max_steps": max_steps,
            "max_memory": max_memory,
            "max_calls": max_calls,
            "max_result": max_result,
        }
        for name, value in counts.items():
            check_whole_number(name, value, 1, where)
        if tool_timeout is not None:
            check_positive("tool_timeout", tool_timeout)
        if on_tool_error not in ("show", "raise") and not callable(on_tool_error):
            raise ParameterError(
                "on_tool_error",
                f"{on_tool_error!r:.60} is not 'show', 'raise' or a function.",
                hint="A function gets the call and the exception, and returns the text to show.",
                where=where,
            )
        self.limits = CodeLimits(tool_timeout=tool_timeout, **counts)
        self.on_tool_error: OnToolError = on_tool_error
        self.signatures = read_signatures(tools, where)

    def __repr__(self) -> str:
        return f"CodeTools([{', '.join(self.signatures)}])"

    @cached_property
    def constraint(self) -> Lark:
        """Grammar of the programs that a model may write."""
        return Lark(write_grammar(self.signatures))

    def describe(self) -> str:
        """Describes the functions and the language of programs, for a prompt."""
        records = dict[str, StaticType]()
        for tool in self.signatures.values():
            _collect_records(tool.result, records)
        parts = [_describe_record(each) for each in records.values()]
        parts += [_describe_function(tool) for tool in self.signatures.values()]
        definitions = "\n\n".join(parts)
        return f"{_INTRODUCTION}\n\n```python\n{definitions}\n```\n{_RULES}"

    def parse(self, text: str) -> CheckedProgram:
        """Parses a program and checks its types. Raises CodeError if it is not valid."""
        tree = parse_program(text, self.signatures)
        check_types(tree, self.signatures, text)
        return CheckedProgram(tree, text)

    def run(
        self,
        program: CheckedProgram,
        stopped: threading.Event,
        made: list[CodeCall],
        note: Callable[[ToolCall, CodeCall | None], None] = lambda call, made: None,
        recorded: Sequence[Mapping[str, UserValue]] = (),
        log: CallStore | None = None,
    ) -> UserValue:
        """Runs a program and returns its result.

        Args:
            program: the program.
            stopped: set by another thread to end the program.
            made: list to which the calls are added as they are made.
            note: like in CallMaker.
            recorded: calls of an earlier run of the program, which are not made again.
            log: log of the calls, or None.

        Raises:
            CodeError: the program fails, or goes over a limit.
            ToolError: a function failed, with `on_tool_error="raise"`.
        """
        meter = Meter(self.limits, stopped)
        limited = self.limits.tool_timeout is not None
        runner = ToolRunner(
            lambda _: nullcontext(), CallOutcome.of, parallel=False, limits_functions=limited
        )
        with runner:
            maker = CallMaker(
                self.signatures, runner, meter, self.on_tool_error, recorded, note, made, log
            )
            interpreter = ProgramInterpreter(self.signatures, maker.call, meter, program.text)
            return interpreter.run(program.tree)


def _collect_records(found: StaticType, records: dict[str, StaticType]) -> None:
    if found.kind == "record":
        records[found.name] = found
    for each in (*found.items, *(kind for _, kind in found.fields)):
        _collect_records(each, records)


def _describe_record(record: StaticType) -> str:
    fields = [f"{name}: {kind}" for name, kind in record.fields]
    return "\n    ".join([f"class {record.name}:", *fields])


def _describe_function(tool: ToolSignature) -> str:
    text = inspect.getdoc(tool.function)
    if not text:
        return f"def {tool}: ..."
    closing = '\n"""' if "\n" in text else '"""'
    return f"def {tool}:\n" + indent(f'"""{text}{closing}', "    ")
