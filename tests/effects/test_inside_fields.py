"""Every field inside a field of a request has an effect that an answer shows, and has none while it
is dropped.

Those without effect are listed by name, with the reason.
"""

import pytest

from tests.effects.fields import DOORS
from tests.effects.fields.case import Ask
from tests.effects.fields.inside_tables import CASES, NEUTRAL, RECORDS


def test_every_inner_field_has_a_case_or_is_listed():
    rows = {(record, name) for record in RECORDS for name in record.__struct_encode_fields__}
    seen = {(case.record, case.name) for case in CASES if case.record is not None}
    missing = sorted(
        f"{record.__module__}.{record.__name__}.{name}"
        for record, name in rows - seen - NEUTRAL.keys()
    )
    assert missing == [], "add a case to tests/effects/fields/inside_….py"
    assert (seen | NEUTRAL.keys()) - rows == set()
    assert not seen & NEUTRAL.keys()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", [pytest.param(each, id=str(each)) for each in CASES])
def test_an_inner_field_has_an_effect_and_none_while_it_is_dropped(case, servers):
    url, door = servers(case.server), DOORS[case.door]
    assert not _seen_anyhow(case, url, door, given=False)
    assert case.seen(url, door, given=True)
    with case.hidden() as dropped:
        assert not _seen_anyhow(case, url, door, given=True)
    assert dropped, "no record of the body has the field"


def _seen_anyhow(case, url, door, *, given):
    """Whether the effect is seen; without the field the request may be refused, so its answer lacks
    the parts.
    """
    try:
        return case.seen(url, door, given=given)
    except (AssertionError, TypeError, KeyError, IndexError):
        return False


IMAGE = {"type": "image", "source": {"type": "base64", "data": "aa", "quality": 3}}


@pytest.mark.parametrize(
    ("door", "fields", "named"),
    [
        (
            "ChatRequest",
            {"response_format": {"type": "text", "schema": {}}},
            "response_format.schema",
        ),
        (
            "ChatRequest",
            {"response_format": {"type": "json_object", "schema": "x"}},
            "response_format.schema",
        ),
        (
            "ChatRequest",
            {"response_format": {"type": "json_object", "schema": {"type": 5}}},
            "type",
        ),
        (
            "ChatRequest",
            {"response_format": {"type": "text", "style": "plain"}},
            "response_format.style",
        ),
        (
            "CompletionRequest",
            {"response_format": {"type": "json_object", "strict": True}},
            "response_format.strict",
        ),
        (
            "ResponsesRequest",
            {"text": {"format": {"type": "text", "schema": {}}}},
            "text.format.schema",
        ),
        (
            "ResponsesRequest",
            {"image": {"context_compression": "some"}},
            "image.context_compression",
        ),
        ("ResponsesRequest", {"image": {"scale": 2}}, "image"),
        (
            "ResponsesRequest",
            {"stream": True, "stream_options": {"include_usage": True}},
            "include_usage",
        ),
        ("MessagesRequest", {"messages": [{"role": "user", "content": [IMAGE]}]}, "source.quality"),
    ],
)
def test_what_no_record_has_inside_is_refused_by_name(door, fields, named, servers):
    answer = Ask(servers("bytes"), DOORS[door], "", {}, {})(**fields)
    assert answer.status == 400, answer.text
    assert named in answer.text
