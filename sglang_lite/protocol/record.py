"""Base classes of all records."""

from __future__ import annotations

import msgspec


class Record(
    msgspec.Struct,
    frozen=True,
    gc=False,
    omit_defaults=True,
    forbid_unknown_fields=True,
    repr_omit_defaults=True,
):
    """Frozen record, encoded and decoded by `sglang_lite.wire`.

    Records consist of data and of records created before them, so they can't be part of a
    cycle and the garbage collector need not visit them (`gc=False`). A record that holds an
    object which may lead back to it sets `gc=True`.
    """


class Variant(Record, frozen=True, tag_field="kind"):
    """Record that can be a member of a union. Its encoded form contains the name of its class as
    `kind`.
    """
