"""A batch that can be stopped and run again: finished items are kept in a file, one JSON line each.

A line is written whole when its item has finished. A line that a kill cut short is dropped, so that nothing is lost or
done twice. A file of another program or of other items is refused; items may be added at the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import enum
import hashlib
import importlib
import inspect
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
from sglang_lite.protocol import Generation, Image, Message, ParameterError, ProgramError, Usage

_VERSION = 1
_HEAD = b'{"sglang_lite_batch": '  # what every line begins with


class BatchFile:
    """
    Args:
        path: of the file.
        program: name of the program.
        items: the batch's arguments, in the order of the lines' numbers; there may be more than there were.

    Attributes:
        states: by index, what the file has of these items. (Log-probabilities are not kept.)

    Raises:
        ParameterError: the file can't be written.
        ProgramError: the file is something else, or of another batch. It is not changed then.
    """

    def __init__(self, path: Path, program: str, items: list[Any]) -> None:
        self._path, self._program, self._lock = path, program, threading.Lock()
        self._arguments = [_digest(item) for item in items]
        self.states: dict[int, ProgramState] = {}
        try:
            open(path, "ab").close()
            content = path.read_bytes()
        except OSError as error:
            raise ParameterError("checkpoint", f"{path} can't be written: {error}") from error
        whole = content[: content.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), 1):
            self._read(number, line)
        torn = content[len(whole) :]
        if torn and not (torn.startswith(_HEAD) or _HEAD.startswith(torn)):
            raise self._refusal(whole.count(b"\n") + 1, "not of a batch checkpoint.")
        if torn:  # cut short by a kill
            with open(path, "r+b") as file:
                file.truncate(len(whole))

    def _read(self, number: int, line: bytes) -> None:
        try:
            entry = json.loads(line)
            version, program, index = entry["sglang_lite_batch"], entry["program"], entry["index"]
        except (ValueError, KeyError, TypeError) as error:
            raise self._refusal(number, f"not of a batch checkpoint: {error!r}.") from error
        if version != _VERSION:
            raise self._refusal(number, f"its version is {version}, this is {_VERSION}.")
        if program != self._program:
            raise self._refusal(number, f"of the program {program!r}, and this is {self._program!r}.")
        if index >= len(self._arguments):
            raise self._refusal(number, f"of item {index}, and this batch has {len(self._arguments)} items.")
        if entry["arguments"] != self._arguments[index]:
            raise self._refusal(number, f"item {index} has other arguments now (by their repr).")
        try:
            self.states[index] = _restored(entry)
        except (ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
            raise self._refusal(number, f"its values can't be made again: {error!r}.") from error

    def _refusal(self, line: int, problem: str) -> ProgramError:
        return ProgramError(f"{self._path}, line {line}: {problem}", hint="Name another file, or delete this one.")

    def save(self, index: int, state: ProgramState) -> None:
        """Keeps a finished item.

        Raises:
            ProgramError: a variable has a value that can't be kept.
        """
        executor = state.stream_executor
        entry = {
            "sglang_lite_batch": _VERSION,
            "program": self._program,
            "index": index,
            "arguments": self._arguments[index],
            "text": executor.text_,
            "messages": as_dicts(executor._messages),
            "variables": {name: _variable(state, name, cell) for name, cell in executor._cells.items()},
            "ret_value": _packed(state.ret_value, "the return value"),
            "usage": dataclasses.asdict(executor.run.usage()),
        }
        line = json.dumps(entry, ensure_ascii=False).encode() + b"\n"
        with self._lock, open(self._path, "ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())


def _digest(item: Any) -> str:
    return hashlib.sha256(repr(item).encode(errors="surrogatepass")).hexdigest()[:16]


def _variable(state: ProgramState, name: str, cell: Cell) -> dict[str, Any]:
    failure = cell.error()
    if failure is not None:  # of a branch, say, that the program could do without
        return {"error": str(failure)}
    kept = {"value": _packed(cell.result(), name)}
    if cell.record is not None:
        kept["raw"] = _packed(state.raw(name), name)
        kept["usage"] = dataclasses.asdict(total_usage(usages_of(cell.record)))
        kept["finish_reason"] = getattr(cell.record, "finish_reason", "stop")
    return kept


def _restored(entry: dict[str, Any]) -> ProgramState:
    """A state that has what the line says, and nothing left to run."""
    run = Run(BaseBackend(), RunSettings())
    run.body_open = False
    state = ProgramState(StreamExecutor(run))
    executor = state.stream_executor
    executor._pieces = [entry["text"]]
    executor._messages = [Message(m["role"], _content(m["content"])) for m in entry["messages"]]
    executor._turns = [m["role"] for m in entry["messages"]]
    for name, variable in entry["variables"].items():
        cell = executor._cells[name] = Cell()
        if "error" in variable:
            cell.fail(ProgramError(variable["error"]))
            continue
        cell.set(_unpacked(variable["value"]))
        if "usage" in variable:
            of_all = [Usage(**variable["usage"])]
            cell.record = _record(_unpacked(variable["raw"]), of_all, variable["finish_reason"])
    usage = Usage(**entry["usage"])
    run.played(Generation("", usage=usage))
    run._started = run._last_end - usage.total_s
    state.ret_value = _unpacked(entry["ret_value"])
    return state


def _content(content: Any) -> tuple[str | Image, ...]:
    if isinstance(content, str):
        return (content,)
    return tuple(part["text"] if "text" in part else Image(url=part["image_url"]["url"]) for part in content)


def _record(raw: Any, usage: list[Usage], finish_reason: Any) -> Any:
    """Generations of the texts in `raw`, the first with the usage of all."""
    if isinstance(raw, list):
        return [_record(text, usage, finish_reason) for text in raw]
    if not isinstance(raw, str):
        return None
    return Generation(raw, finish_reason=finish_reason, usage=usage.pop() if usage else Usage())


def _packed(value: Any, what: str) -> Any:
    """A value as JSON; of the types that `gen(type=…)` makes, with the name of the type."""
    if value is None or (isinstance(value, bool | int | float | str) and not isinstance(value, enum.Enum)):
        return value
    if isinstance(value, list):
        return [_packed(item, what) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: _packed(item, what) for key, item in value.items()}
    kind: Any = type(value)
    data: Any = None
    if kind in (tuple, set, frozenset):
        data = [_packed(item, what) for item in value]
    elif kind is dict:
        data = [[_packed(key, what), _packed(item, what)] for key, item in value.items()]
    elif inspect.isfunction(value):  # of a ToolCall
        kind, data = value, value.__name__
    elif isinstance(value, enum.Enum):
        data = value.name
    elif isinstance(value, datetime.date | datetime.time):
        data = value.isoformat()
    elif hasattr(value, "model_dump"):
        data = value.model_dump(mode="json")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        data = {f.name: _packed(getattr(value, f.name), what) for f in dataclasses.fields(value)}
    name = f"{kind.__module__}:{kind.__qualname__}"
    with contextlib.suppress(ImportError, AttributeError):
        if data is not None and _named(name) is kind:
            return {"$type": name, "$value": data}
    raise ProgramError(
        f"checkpoint: {what} is a {kind.__name__}, which can't be kept in a file.",
        hint="Define its class at the top of a module, or return plain data.",
    )


def _named(name: str) -> Any:
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def _unpacked(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpacked(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "$type" not in value:
        return {key: _unpacked(item) for key, item in value.items()}
    kind, data = _named(value["$type"]), value["$value"]
    if inspect.isfunction(kind):
        return kind
    if kind in (tuple, set, frozenset):
        return kind(map(_unpacked, data))
    if kind is dict:
        return {_unpacked(key): _unpacked(item) for key, item in data}
    if issubclass(kind, enum.Enum):
        return kind[data]
    if issubclass(kind, datetime.date | datetime.time):
        return kind.fromisoformat(data)
    if hasattr(kind, "model_validate"):
        return kind.model_validate(data)
    if hasattr(kind, "__dataclass_fields__"):
        return kind(**_unpacked(data))
    raise ValueError(f"{value['$type']} is no type of a batch checkpoint")
