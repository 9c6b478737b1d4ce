"""The bases of all records."""

from __future__ import annotations

import msgspec


class Record(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, repr_omit_defaults=True):
    """A frozen record. `sglang_lite.wire` knows how it looks as data."""


class Variant(Record, frozen=True, tag_field="kind"):
    """A record that stands in a union with others: as data its name is in it, as `kind`."""
