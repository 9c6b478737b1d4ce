"""Classification of a document's keywords: assertions about a value, or mere annotations."""

from __future__ import annotations

from sglang_lite.constraints.json_schema.applicators import APPLICATORS
from sglang_lite.constraints.json_schema.document import Document
from sglang_lite.constraints.json_schema.formats import ASSERTED
from sglang_lite.constraints.json_schema.keywords import GROUPS

ASSERTING = {
    *GROUPS, *APPLICATORS, "then", "else", "minContains", "maxContains", "unevaluatedItems", "unevaluatedProperties",
}  # fmt: skip
_NO_ASSERTIONS = {  # keywords that obviously assert nothing
    "$anchor", "$comment", "$defs", "$dynamicAnchor", "$id", "$recursiveAnchor", "$schema", "$vocabulary", "default",
    "definitions", "deprecated", "description", "examples", "id", "readOnly", "title", "writeOnly",
}  # fmt: skip


def assertions_and_annotations(document: Document, *, assert_format: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """JSON Pointers of the keywords that assert something, and of those that don't although they might seem to: formats
    that are not asserted, unknown keywords, keywords of other drafts, and keywords about content.
    """
    demands: list[str] = []
    remarks: list[str] = []
    for place in document.places:
        if place.pointer[:1] not in ("", "/"):  # the place is in a meta-schema
            continue
        written, known = document.at(place.pointer), document.schema(place)
        for keyword in written if isinstance(written, dict) else ():
            if keyword not in _NO_ASSERTIONS:
                demanded = keyword in ASSERTING and keyword in known
                if keyword == "format":
                    demanded = demanded and assert_format and known[keyword] in ASSERTED
                (demands if demanded else remarks).append(place.child(keyword).pointer)
    return tuple(demands), tuple(remarks)
