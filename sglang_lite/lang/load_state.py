"""States of saved runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from sglang_lite.lang.backend.default import BackendLike, as_backend
from sglang_lite.lang.expressions import BaseProgram
from sglang_lite.lang.runs.carried import FileValues
from sglang_lite.lang.runs.files import prefix_path
from sglang_lite.lang.runs.saving import AbsentBackend, bound_call, check_program, classes, read
from sglang_lite.lang.state import CURE_OF_COPIES, ProgramState
from sglang_lite.protocol import WireError
from sglang_lite.protocol.anything import UserValue
from sglang_lite.protocol.saved import SavedRun


def load(
    path: str | os.PathLike[str],
    program: BaseProgram | None = None,
    *,
    backend: BackendLike | None = None,
    types: Iterable[Callable[..., UserValue]] = (),
    trust_cache: bool = False,
    secret: str | None = None,
) -> ProgramState:
    """Loads a state that `state.save(path)` has written. The state can be read, extended, forked,
    and run again with a different answer of a node (`rerun`). A file contains no code, and reading
    it neither imports nor runs any.

    Args:
        path: file to read.
        program: program whose run was saved; `rerun` needs it. Classes that its module defines or
            has imported need not be listed in `types`.
        backend: backend on which the state continues; without one it can be read, and text can be
            added.
        types: classes of values, and the functions of saved tool calls. The classes of their
            fields, and of plain values (dates, decimals, UUIDs …), need not be listed.
        trust_cache: whether to give the backend, an engine, what `state.save(path, cache=True)`
            wrote beside the file, so that it need not compute the text again. Only for files that
            you know: whoever writes one decides what the model takes for its own computation.
        secret: what that file was written under, in place of `trust_cache`: it proves that its
            writer had it.

    Returns:
        The state. Its `restored` is "tokens" if the backend has the tokenizer of the saved run:
        text that the model wrote keeps its tokens. Else it is "text", and that text is tokenised
        again. In both cases the text is unchanged, including the marks of its chat template; to
        continue with another template, begin a run with `messages()`.

    Raises:
        CapabilityError: `trust_cache` or `secret`, and the backend is no engine of this program, or
            has no hierarchical cache.
        ParameterError: a file does not exist, is too large, or is of another model.
        WireError: the file is not a saved state, is damaged, or has another version.
        ProgramError: the file was saved by another program, or the program's body has changed (the
            error has the first difference), or the class of a value, or the function of a tool
            call, was not given.
    """
    saved = read(path)
    if program is not None:
        check_program(saved, program)
    try:
        find = classes(program, types)
        chosen = AbsentBackend(saved) if backend is None else as_backend(backend)
        state = ProgramState.from_saved(
            saved, chosen, FileValues(find), bound_call(saved, program, find)
        )
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise WireError(f"{os.fspath(path)!r} is damaged: {error!r}") from error
    if trust_cache or secret is not None:
        chosen.prefix_files.import_prefix(prefix_path(path), trust_cache=trust_cache, secret=secret)
    return state


def finished(saved: SavedRun) -> ProgramState:
    """State of a run that another process, or an earlier one, has finished: it can be read."""
    return ProgramState.from_saved(saved, AbsentBackend(saved, CURE_OF_COPIES), FileValues(), None)
