"""Cache of long schemas that clients have sent, so that later bodies can name them by their hash."""

from __future__ import annotations

from sglang_lite.constraints.memo import BoundedCache
from sglang_lite.server.errors import TooLargeError, UnknownTextError
from sglang_lite.wire.long_texts import long_schemas, referenced_hashes, restore_schemas

KNOWN_BYTES = 64 << 20  # limit on the kept schemas; the least recently used ones go first


class KnownTexts:
    """Long schemas by their hash."""

    def __init__(self) -> None:
        self._texts = BoundedCache(KNOWN_BYTES)

    def keep_schemas(self, body: bytes) -> None:
        """Stores the long schemas of a body."""
        for digest, text in long_schemas(body):
            self._texts.put_entry(digest, text, len(text))

    def expand_body(self, body: bytes, most: int) -> bytes:
        """Returns the body with the schemas that it names filled in.

        Args:
            most: maximum size of the result in bytes.

        Raises:
            UnknownTextError: a schema isn't known, or isn't known any more.
            TooLargeError: the result is too large.
        """
        names = referenced_hashes(body)
        if not names:
            return body
        texts: dict[bytes, bytes] = {}
        for name in set(names):
            found = self._texts.find_entry(name)
            if found is None:
                raise UnknownTextError(
                    "the schema that the body names by its hash is not known.", hint="Send it."
                )
            texts[name] = found[0]
        if len(body) + sum(len(texts[name]) for name in names) > most:
            raise TooLargeError(
                f"the body is larger than {most:,} bytes with the schemas that it names.",
                hint="Send less, or raise max_body_mb.",
            )
        return restore_schemas(body, texts)
