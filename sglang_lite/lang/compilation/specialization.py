"""Specializations: a compiled program for one backend and settings."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING

from sglang_lite.lang.backend.base_backend import BaseBackend
from sglang_lite.lang.compilation.compiling import check_seen_through, compile_program
from sglang_lite.lang.execution.run import BoundCall, RunSettings
from sglang_lite.lang.expressions import BaseProgram
from sglang_lite.program.compiled import Filler
from sglang_lite.program.control_flow import all_nodes
from sglang_lite.program.nodes import Select
from sglang_lite.protocol.anything import UserValue

if TYPE_CHECKING:
    from sglang_lite.text.chat_template import TurnTemplate


class Specialization:
    """Program compiled for one backend and settings.

    Attributes:
        backend, settings: backend and settings that the program was compiled for.
        template: chat template of the backend at that time, or None.
        compiled: program as data.
        scripts: scripts of the body.
        filler: fills the holes of the program.
        draws: whether the program has selections that are drawn, so that a run needs a seed.
        waits: whether the body reads values, so that `run` returns only when they are there.
        reads: whether the caller's Python reads values from texts, which it may refuse.
    """

    def __init__(self, program: BaseProgram, backend: BaseBackend, settings: RunSettings) -> None:
        self.backend, self.settings = backend, settings
        self.template: TurnTemplate | None = backend.get_chat_template()
        self.compiled, self.scripts = compile_program(program, backend, settings)
        self.filler = Filler(self.compiled)
        nodes = all_nodes(self.compiled.nodes, self.compiled.parts)
        self.draws = any(isinstance(node, Select) and node.temperature for _, node in nodes)
        self._program, self._checked = program, False
        self.waits, self.reads = self.scripts.waits, self.scripts.reads

    def check(self, row: Mapping[str, UserValue]) -> None:
        """Checks that the body does the same with actual arguments as with symbols. Only the first row is checked.

        Raises:
            CompileError: the body does something else with these arguments.
        """
        if not self._checked:
            filled = self.filler(row)
            check_seen_through(self._program, self.backend, self.settings, row, filled)
            self._checked = True

    def called(self, row: Mapping[str, UserValue]) -> BoundCall:
        """Call of the program with the arguments of a row."""
        arguments = inspect.BoundArguments(self._program.signature, {**self._program.bind_arguments, **row})
        return BoundCall(self._program, arguments.args, arguments.kwargs)

    def fits(self, backend: BaseBackend, settings: RunSettings) -> bool:
        same = self.backend is backend and self.settings.params == settings.params
        return same and self.template is backend.get_chat_template()
