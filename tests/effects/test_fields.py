"""Every field of a request's body has an effect that its answer shows, and has none while it is
hidden.

Fields without effect are accepted by name (`neutral` in sglang_lite/server/fields.py), or reported
in a header.
"""

from pathlib import Path

import pytest

from sglang_lite.server.ollama.ollama_request import OPTIONS
from sglang_lite.server.routes import ROUTES
from tests.effects.fields import CASES, DOORS, NOT_SEEN
from tests.effects.fields.case import UNUSED, Ask, hide_body_field

TABLES = [*(route.fields for route in ROUTES if route.fields is not None), OPTIONS]
RECORDS = {fields.record.__name__: fields.record for fields in TABLES}
ROWS = {
    f"{name}.{field}"
    for name, record in RECORDS.items()
    for field in record.__struct_encode_fields__
}
ALL = [
    pytest.param(name, field, case, id=f"{name}.{field}")
    for name, cases in CASES.items()
    for field, case in cases.items()
]


def test_every_field_has_a_case_or_is_listed():
    seen = {
        f"{name}.{field}" for name, cases in CASES.items() for field in cases if name in RECORDS
    }
    assert sorted(ROWS - seen - NOT_SEEN.keys()) == [], "add a case to tests/effects/fields"
    assert (seen | NOT_SEEN.keys()) - ROWS == set()
    assert not seen & NOT_SEEN.keys()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "field", "case"), ALL)
def test_a_field_has_an_effect_and_none_while_it_is_hidden(name, field, case, servers):
    url, door = servers(case.server), DOORS[name]
    assert not _seen_anyhow(case, url, door, field, given=False)
    assert case.seen(url, door, field, given=True)
    with hide_body_field(RECORDS[name], field, case.empty) as hidden:
        assert not _seen_anyhow(case, url, door, field, given=True)
    assert hidden, "the body was not read by its table of fields"


def _seen_anyhow(case, url, door, field, *, given):
    """Whether the effect is seen; without the field the request may be refused, so its answer has
    not the parts.
    """
    try:
        return case.seen(url, door, field, given=given)
    except (AssertionError, TypeError, KeyError, IndexError):
        return False


def test_fields_without_effect_are_documented():
    text = (Path(__file__).parents[2] / "docs/server.md").read_text()
    assert [name for fields in TABLES for name in fields.neutral if f"`{name}`" not in text] == []


@pytest.mark.parametrize("name", ["GenerateBody", "ChatRequest", "CompletionRequest", "ResponsesRequest", "MessagesRequest",
                                  "CountTokensRequest", "OllamaChat", "OllamaOptions"])  # fmt: skip
def test_neutral_fields_change_nothing(name, servers):
    (fields,) = {id(each): each for each in TABLES if each.record.__name__ == name}.values()
    door = DOORS[name]
    ask = Ask(servers("bytes"), door, "", {}, {})
    plain, given = ask(), ask(**dict.fromkeys(fields.neutral, "value"))
    assert (given.status, given.headers.get(UNUSED)) == (200, None), given.text
    if door.text:
        assert given.get(door.text) == plain.get(door.text)
