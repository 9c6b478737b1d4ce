"""Base classes of all records."""

from __future__ import annotations

import msgspec


class Record(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, repr_omit_defaults=True):
    """Frozen record, which `sglang_lite.wire` encodes and decodes."""


class Variant(Record, frozen=True, tag_field="kind"):
    """Record that can be a member of a union: its encoded form contains the name of its class as `kind`."""
