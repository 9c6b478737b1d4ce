"""Loads the states of saved runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from sglang_lite.lang.backend.default import BackendLike, as_backend
from sglang_lite.lang.expressions import BaseProgram
from sglang_lite.lang.runs.carried import FileValues
from sglang_lite.lang.runs.files import kv_file_path
from sglang_lite.lang.runs.saving import (
    AbsentBackend,
    bind_saved_call,
    check_program,
    class_finder,
    read_saved_run,
)
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
    """Loads a state that was saved with `state.save(path)`. The state can be read, extended and
    forked, and `rerun` repeats the run with a different answer for one node. A file contains no
    code, and loading it neither imports nor runs any.

    Args:
        path: file to read.
        program: program whose run was saved; needed by `rerun`. Classes that its module defines or
            has imported need not be listed in `types`.
        backend: backend on which the state continues. Without one, the state can be read, and text
            can be added.
        types: classes of values, and the functions of saved tool calls. The classes of their
            fields, and of plain values (dates, decimals, UUIDs …), need not be listed.
        trust_cache: whether to load the cache that `state.save(path, cache=True)` wrote beside the
            file into the backend (an engine), so that the text need not be computed again. Use it
            only for files that you trust: the model uses the file's content as if it had computed
            it.
        secret: secret with which the cache was saved. Use it instead of `trust_cache`: the file is
            only accepted if its writer knew the secret.

    Returns:
        The state. Its `restored` is "tokens" if the backend has the tokenizer of the saved run:
        text that the model wrote keeps its tokens. Otherwise it is "text", and that text is
        tokenised again. In both cases the text is unchanged, including the marks of its chat
        template. To continue with another template, begin a run with `messages()`.

    Raises:
        CapabilityError: `trust_cache` or `secret` is given, and the backend is not one of this
            package's engines, or has no hierarchical cache.
        ParameterError: a file does not exist, is too large, or belongs to another model.
        WireError: the file is not a saved state, is damaged, or has another version.
        ProgramError: the file was saved by another program, the program's body has changed (the
            error shows the first difference), or the class of a value or the function of a tool
            call is missing from `types`.
    """
    saved = read_saved_run(path)
    if program is not None:
        check_program(saved, program)
    try:
        find = class_finder(program, types)
        chosen = AbsentBackend(saved) if backend is None else as_backend(backend)
        state = ProgramState.from_saved(
            saved, chosen, FileValues(find), bind_saved_call(saved, program, find)
        )
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise WireError(f"{os.fspath(path)!r} is damaged: {error!r}") from error
    if trust_cache or secret is not None:
        chosen.prefix_files.import_prefix(
            kv_file_path(path), trust_cache=trust_cache, secret=secret
        )
    return state


def load_finished_run(saved: SavedRun) -> ProgramState:
    """Returns the state of a run that has already ended, perhaps in another process. The state has
    no backend, so it can be read but can't generate.
    """
    return ProgramState.from_saved(saved, AbsentBackend(saved, CURE_OF_COPIES), FileValues(), None)
