"""Codes at the end of each line of a checkpoint or journal. Without a secret, they are checksums,
which reveal damage. With a secret, they also reveal edits by anyone who does not know it.
"""

from __future__ import annotations

import hmac
from hashlib import blake2b
from typing import TypeAlias

from sglang_lite import wire
from sglang_lite.protocol import ParameterError
from sglang_lite.protocol.anything import UserValue
from sglang_lite.protocol.run_log import LogRecord
from sglang_lite.protocol.saved import CheckpointHead, CheckpointRow, JournalHead

_Line: TypeAlias = CheckpointHead | CheckpointRow | JournalHead | LogRecord

MIN_SECRET = 16  # characters
_SIZE = 16  # bytes


def check_secret(secret: UserValue) -> None:
    """Raises ParameterError if a secret is not a string, or is so short that it could be guessed."""
    if not isinstance(secret, str):
        raise ParameterError("secret", f"{secret!r:.20} is not a string.")
    if len(secret) < MIN_SECRET:
        raise ParameterError(
            "secret", f"it has {len(secret)} characters.", hint=f"Draw {MIN_SECRET} or more."
        )


class LineCodes:
    """Codes of a file's lines. Each code also depends on the first line, so lines copied from
    another file are detected. If lines are chained, each code depends on all lines before it.
    Deleted, repeated and moved lines are then detected, too, but not missing lines at the end.

    Args:
        secret: text that every reader of the file must have; None for checksums.
    """

    def __init__(self, secret: str | None) -> None:
        encoded = b"" if secret is None else secret.encode("utf-8", "surrogatepass")
        self._key = b"" if secret is None else blake2b(encoded).digest()
        self._before = b""  # digest of what the codes depend on besides their lines

    def encode_line(self, record: _Line) -> bytes:
        """Returns a record as a line with its code."""
        content = wire.encode(record)
        code = self._compute_code(content, record)
        return content[:-2] + _encode_code_suffix(code)

    def matches_code(self, line: bytes, record: _Line) -> bool:
        """Returns True if a line has the code of its content."""
        end = _encode_code_suffix(record.code)
        content = line.removesuffix(end) + b"}}"
        return line.endswith(end) and hmac.compare_digest(
            record.code, self._compute_code(content, record)
        )

    def chain(self, line: bytes) -> None:
        """Makes the codes of all later lines depend on this line and on the lines before it."""
        self._before = blake2b(line).digest()

    def _compute_code(self, content: bytes, record: _Line) -> str:
        if isinstance(record, CheckpointHead | JournalHead):
            self._before = blake2b(content).digest()
        return blake2b(self._before + content, digest_size=_SIZE, key=self._key).hexdigest()


def _encode_code_suffix(code: str) -> bytes:
    """Returns the text that ends a line: the field with its code, and the closing brackets."""
    return f',"code":"{code}"}}}}'.encode()
