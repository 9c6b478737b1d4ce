"""A batch that can be stopped and run again: finished items are kept in a file, one JSON line each.

A line is written whole when its item has finished. A line that a kill cut short is ignored, so that nothing is lost or
done twice. An item counts as done only if its arguments are those of the line.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import hashlib
import importlib
import json
import os
import threading
from pathlib import Path
from typing import Any

from sglang_lite.lang.backend.base_backend import BaseBackend
from sglang_lite.lang.futures import Cell
from sglang_lite.lang.interpreter import Run, RunSettings, StreamExecutor, as_dicts
from sglang_lite.lang.results import total_usage, usages_of
from sglang_lite.lang.state import ProgramState
from sglang_lite.protocol import Generation, Message, ProgramError, Usage

_VERSION = 1


class BatchFile:
    """
    Args:
        path: of the file; made with the first item.
        program: name of the program, which the arguments are kept under.
        items: the batch's arguments.

    Attributes:
        states: by index, what the file has of these items.

    Raises:
        ProgramError: the file is something else.
    """

    def __init__(self, path: Path, program: str, items: list[Any]) -> None:
        self._path, self._lock = path, threading.Lock()
        self._keys = [f"{i}:{_digest(program, item)}" for i, item in enumerate(items)]
        self.states: dict[int, ProgramState] = {}
        if not path.exists():
            return
        place = {key: i for i, key in enumerate(self._keys)}
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):  # cut short by a kill
            with open(path, "r+b") as file:
                file.truncate(len(whole))
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                entry = json.loads(line)
                index = place.get(entry["key"])
                if index is not None:
                    self.states[index] = _restored(entry)
            except (ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
                raise ProgramError(
                    f"{path}, line {number}: not of a batch checkpoint: {error!r}", hint="Name another file."
                ) from error

    def save(self, index: int, state: ProgramState) -> None:
        """Keeps a finished item.

        Raises:
            ProgramError: a variable has a value that can't be kept.
        """
        executor = state.stream_executor
        variables = {}
        for name, cell in executor._cells.items():
            raw = cell.record.text if isinstance(cell.record, Generation) else None
            usage = dataclasses.asdict(total_usage(usages_of(cell.record))) if cell.record is not None else None
            variables[name] = {"value": _packed(cell.result(), name), "raw": raw, "usage": usage}
        entry = {
            "version": _VERSION,
            "key": self._keys[index],
            "text": executor.text_,
            "messages": as_dicts(executor._messages),
            "variables": variables,
            "ret_value": _packed(state.ret_value, "the return value"),
            "usage": dataclasses.asdict(executor.run.usage()),
        }
        line = json.dumps(entry, ensure_ascii=False).encode() + b"\n"
        with self._lock, open(self._path, "ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())


def _digest(program: str, item: Any) -> str:
    return hashlib.sha256(f"{program}{item!r}".encode()).hexdigest()[:16]


def _restored(entry: dict[str, Any]) -> ProgramState:
    """A state that has what the line says, and nothing left to run."""
    run = Run(BaseBackend(), RunSettings())
    run.body_open = False
    state = ProgramState(StreamExecutor(run))
    executor = state.stream_executor
    executor._pieces = [entry["text"]]
    executor._messages = [Message(m["role"], (m["content"],)) for m in entry["messages"]]
    executor._turns = [m["role"] for m in entry["messages"]]
    for name, variable in entry["variables"].items():
        cell = Cell.of(_unpacked(variable["value"]))
        if variable["usage"] is not None:
            cell.record = Generation(variable["raw"] or "", usage=Usage(**variable["usage"]))
        executor._cells[name] = cell
    run.played(Generation("", usage=Usage(**entry["usage"])))
    state.ret_value = _unpacked(entry["ret_value"])
    return state


def _packed(value: Any, what: str) -> Any:
    """A value as JSON; of the types that `gen(type=…)` makes, with the name of the type."""
    if value is None or (isinstance(value, bool | int | float | str) and not isinstance(value, enum.Enum)):
        return value
    if isinstance(value, list):
        return [_packed(item, what) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: _packed(item, what) for key, item in value.items()}
    kind = type(value)
    data: Any = None
    if isinstance(value, enum.Enum):
        data = value.name
    elif isinstance(value, datetime.date | datetime.time):
        data = value.isoformat()
    elif hasattr(value, "model_dump"):
        data = value.model_dump(mode="json")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        data = {f.name: _packed(getattr(value, f.name), what) for f in dataclasses.fields(value)}
    if data is None or "<locals>" in kind.__qualname__:
        raise ProgramError(
            f"checkpoint: {what} is a {kind.__name__}, which can't be kept in a file.",
            hint="Define its class at the top of a module, or return plain data.",
        )
    return {"$type": f"{kind.__module__}:{kind.__qualname__}", "$value": data}


def _unpacked(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpacked(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "$type" not in value:
        return {key: _unpacked(item) for key, item in value.items()}
    module, _, name = value["$type"].partition(":")
    kind: Any = importlib.import_module(module)
    for part in name.split("."):
        kind = getattr(kind, part)
    data = value["$value"]
    if issubclass(kind, enum.Enum):
        return kind[data]
    if issubclass(kind, datetime.date | datetime.time):
        return kind.fromisoformat(data)
    if hasattr(kind, "model_validate"):
        return kind.model_validate(data)
    if hasattr(kind, "__dataclass_fields__"):
        return kind(**_unpacked(data))
    raise ValueError(f"{value['$type']} is no type of a batch checkpoint")
