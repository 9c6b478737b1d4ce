"""States from files."""

from __future__ import annotations

import os
from collections.abc import Iterable

from sglang_lite.lang.backend.default import BackendLike, as_backend
from sglang_lite.lang.expressions import BaseProgram
from sglang_lite.lang.saved.runs import AbsentBackend, check_program, classes, read
from sglang_lite.lang.state import ProgramState
from sglang_lite.protocol import WireError


def load(
    path: str | os.PathLike[str],
    program: BaseProgram | None = None,
    *,
    backend: BackendLike | None = None,
    types: Iterable[type] = (),
) -> ProgramState:
    """The state that `state.save(path)` has written: it can be read, added to, forked, and run again where an answer is
    another one. A file has no code, and reading it imports and runs none.

    Args:
        program: whose run it was; `rerun` needs it. Classes of values are looked for in its module, too.
        backend: to continue on; without one the state can only be read.
        types: classes of values that are not in the program's module.

    Returns:
        The state. Its `restored` is "tokens" where the backend's tokenizer is that of the file: what a model has
        written is the same tokens. Else it is "text", which is tokenised again. In both cases the text is what it was,
        a chat template's marks included; to go on with another template, begin a run with `messages()`.

    Raises:
        ParameterError: there is no such file, or it is too large.
        WireError: it is no saved state, damaged, or of another version.
        ProgramError: it is of another program, or of one whose body has changed: the error has the first difference. Or
            a value is of a class that was not given.
    """
    saved = read(path)
    if program is not None:
        check_program(saved, program)
    try:
        chosen = AbsentBackend() if backend is None else as_backend(backend)
        return ProgramState.made(saved, chosen, classes(program, types), program)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise WireError(f"{os.fspath(path)!r} is damaged: {error!r}") from error
