"""Takes an effect away at the place that a row names.

A mutation hides a value from one module, which reads the field's default instead. All other modules
read the value, so a row that names the wrong module is found.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sglang_lite

PACKAGE = Path(sglang_lite.__file__).parent


class _Hidden:
    """Data descriptor that gives one module the default, and all others what the field has.

    Args:
        field: descriptor that it stands in for.
        file: file of the module.
        default: what the module reads.
    """

    def __init__(self, field: Any, file: Path, default: object) -> None:
        self.reads = 0
        self._field, self._file, self._default = field, str(file), default

    def __get__(self, owner: object, kind: type) -> object:
        if owner is None:
            return self
        if sys._getframe(1).f_code.co_filename != self._file:
            return self._field.__get__(owner, kind)
        self.reads += 1
        return self._default

    def __set__(self, owner: object, value: object) -> None:
        self._field.__set__(owner, value)


@contextmanager
def hide_field(record: type, name: str, module: str, default: object) -> Iterator[_Hidden]:
    """Makes a module read a default in place of a field of records.

    Args:
        record: class of the records, which has slots.
        name: name of the field.
        module: the module's file, below the package.
        default: what it reads.
    """
    file = PACKAGE / module
    assert file.is_file(), f"{name} names {module}, which does not exist."
    field = record.__dict__[name]
    mutation = _Hidden(field, file, default)
    setattr(record, name, mutation)
    try:
        yield mutation
    finally:
        setattr(record, name, field)
