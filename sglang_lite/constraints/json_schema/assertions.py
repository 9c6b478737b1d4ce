"""Classification of a document's keywords: assertions about a value, or mere annotations."""

from __future__ import annotations

from sglang_lite.constraints.json_schema.applicators import APPLICATORS
from sglang_lite.constraints.json_schema.document import Document
from sglang_lite.constraints.json_schema.formats import ASSERTED
from sglang_lite.constraints.json_schema.keywords import READERS, REPEATS
from sglang_lite.constraints.json_schema.prose import PROSE
from sglang_lite.constraints.json_schema.quotes import SOURCES

ASSERTING = {
    *READERS,
    *APPLICATORS,
    "then",
    "else",
    "minContains",
    "maxContains",
    "unevaluatedItems",
    "unevaluatedProperties",
} - {REPEATS}
_NO_ASSERTIONS = {  # keywords that assert nothing in any draft
    "$anchor", "$comment", "$defs", "$dynamicAnchor", "$id", "$recursiveAnchor", "$schema", "$vocabulary", "default",
    "definitions", "deprecated", "description", "examples", "id", "readOnly", "title", "writeOnly", SOURCES, REPEATS,
    PROSE,
}  # fmt: skip


def find_unknown_keywords(schema: object) -> list[str]:
    """Returns the names in a schema that no draft defines as keywords. Returns an empty list if the
    schema has a keyword that asserts something.
    """
    if not isinstance(schema, dict) or any(keyword in ASSERTING for keyword in schema):
        return []
    return [
        name
        for name in schema
        if name not in _NO_ASSERTIONS and not name.startswith(("$", "x-", "content"))
    ]


def assertions_and_annotations(
    document: Document, *, assert_format: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the JSON Pointers of two kinds of keywords: keywords that assert something, and
    keywords that only seem to. The second kind includes unknown keywords and formats that are not
    asserted.
    """
    asserting: list[str] = []
    annotations: list[str] = []
    for location in document.locations:
        if location.pointer[:1] not in ("", "/"):  # the location is in a meta-schema
            continue
        schema = document.value_at_pointer(location.pointer)
        supported = document.schema(location)
        for keyword in schema if isinstance(schema, dict) else ():
            if keyword not in _NO_ASSERTIONS:
                asserts = keyword in ASSERTING and keyword in supported
                if keyword == "format":
                    asserts = asserts and assert_format and supported[keyword] in ASSERTED
                (asserting if asserts else annotations).append(location.child(keyword).pointer)
    return tuple(asserting), tuple(annotations)
