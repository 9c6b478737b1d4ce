"""Codes at the end of a checkpoint's lines: checksums, which find damage, or authentication codes
under a secret, which find whatever who does not have it has changed.
"""

from __future__ import annotations

import hmac
from hashlib import blake2b

from sglang_lite import wire
from sglang_lite.protocol import ParameterError
from sglang_lite.protocol.anything import UserValue
from sglang_lite.protocol.saved import CheckpointHead, CheckpointRow

MIN_SECRET = 16  # characters
_SIZE = 16  # bytes


def check_secret(secret: UserValue) -> None:
    """Raises ParameterError if a secret is no text, or so short that it could be guessed."""
    if not isinstance(secret, str):
        raise ParameterError("secret", f"{secret!r:.20} is not a string.")
    if len(secret) < MIN_SECRET:
        raise ParameterError(
            "secret", f"it has {len(secret)} characters.", hint=f"Draw {MIN_SECRET} or more."
        )


class LineCodes:
    """Codes of a checkpoint's lines. That of a row depends on the first line, too, so that no row
    of another batch has a right one.

    Args:
        secret: text that whoever reads the file must have; None for checksums.
    """

    def __init__(self, secret: str | None) -> None:
        encoded = b"" if secret is None else secret.encode("utf-8", "surrogatepass")
        self._key = b"" if secret is None else blake2b(encoded).digest()
        self._first = b""

    def line(self, record: CheckpointHead | CheckpointRow) -> bytes:
        """Line of a record, with its code."""
        content = wire.encode(record)
        code = self._code(content, record)
        return content[:-2] + _end(code)

    def is_right(self, line: bytes, record: CheckpointHead | CheckpointRow) -> bool:
        """Returns True if a line has the code of its content."""
        end = _end(record.code)
        content = line.removesuffix(end) + b"}}"
        return line.endswith(end) and hmac.compare_digest(record.code, self._code(content, record))

    def _code(self, content: bytes, record: CheckpointHead | CheckpointRow) -> str:
        if isinstance(record, CheckpointHead):
            self._first = blake2b(content).digest()
        return blake2b(self._first + content, digest_size=_SIZE, key=self._key).hexdigest()


def _end(code: str) -> bytes:
    """End of a line: the last field of its record, and the brackets that close it."""
    return f',"code":"{code}"}}}}'.encode()
