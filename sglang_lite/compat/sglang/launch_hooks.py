"""Handles arguments with which SGLang's programs start an engine: a record of its settings, or
functions that start SGLang's processes. Such functions are rejected by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

from sglang_lite.errors import short_repr
from sglang_lite.protocol import CapabilityError, ParameterError
from sglang_lite.protocol.anything import UserValue

_HOOKS = (
    "server_args_class",
    "init_tokenizer_manager_func",
    "run_scheduler_process_func",
    "run_detokenizer_process_func",
    "execute_warmup_func",
)


# values of a user
def read_server_args(given: Mapping[str, UserValue]) -> dict[str, Any]:
    """Returns the settings in the record `server_args`, which must be the only argument.

    Raises:
        ParameterError: the argument isn't a record of settings, or there are other arguments.
    """
    record: Any = given["server_args"]
    if len(given) > 1:
        others = ", ".join(given.keys() - {"server_args"})
        raise ParameterError(
            "server_args", f"{others} is given, too.", hint="Set it in the record."
        )
    if not is_dataclass(record) or isinstance(record, type):
        raise ParameterError(
            "server_args", f"{short_repr(record)} is no record of SGLang's settings."
        )
    return asdict(record)


def reject_launch_hooks(given: Mapping[str, object]) -> None:
    """Raises CapabilityError for a function that would start one of SGLang's processes, because
    this engine doesn't have these processes.
    """
    for name in _HOOKS:
        if given.get(name) is not None:
            raise CapabilityError(
                f"{name}: the engine has no such process of SGLang's to replace.",
                hint="Leave it out; a subclass may override generate and other methods.",
            )
