"""Schemas fitted to a provider: what is sent, and the report of every keyword."""

import json

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_lite.lang.backend.ladder.schema_fit import fit_schema
from sglang_lite.lang.backend.profiles.profile import find_profile

RULES = {
    "openai": find_profile("openai", "gpt-4o").schema,
    "anthropic": find_profile("anthropic", "claude-opus-5").schema,
}


def fit(schema, provider="openai"):
    return fit_schema(json.dumps(schema), RULES[provider])


def an_object(**properties):
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


def test_what_strict_outputs_take_is_sent_as_it_is():
    schema = an_object(
        a={"type": "integer", "minimum": 1}, b={"type": "array", "items": {"enum": ["x", "y"]}}
    )
    found = fit(schema)
    sent = json.loads(found.schema)
    assert sent["properties"]["a"] == {"type": "integer", "minimum": 1}
    assert sent["properties"]["b"]["items"] == {"type": "string", "enum": ["x", "y"]}
    assert "/properties/a/minimum" in found.enforced
    assert (found.checked, found.refused, found.required) == ((), (), ())


@pytest.mark.parametrize(
    ("provider", "schema", "pointer", "told"),
    [
        ("openai", {"type": "string", "maxLength": 3}, "/properties/a/maxLength", "maxLength: 3"),
        ("openai", {"type": "string", "format": "uri"}, "/properties/a/format", "format: uri"),
        (
            "openai",
            {"type": "string", "pattern": "^(?!x)"},
            "/properties/a/pattern",
            "pattern: ^(?!x)",
        ),
        ("anthropic", {"type": "integer", "minimum": 0}, "/properties/a/minimum", "minimum: 0"),
        ("anthropic", {"type": "string", "pattern": "x"}, "/properties/a/pattern", "pattern: x"),
        (
            "anthropic",
            {"type": "array", "items": {"type": "null"}, "minItems": 2},
            "/properties/a/minItems",
            "minItems: 2",
        ),
    ],
)
def test_what_only_narrows_is_told_and_checked(provider, schema, pointer, told):
    found = fit(an_object(a=schema), provider)
    assert [each for each, _ in found.checked] == [pointer]
    assert pointer not in found.enforced
    assert told in json.loads(found.schema)["properties"]["a"]["description"]


@pytest.mark.parametrize("provider", RULES)
def test_a_quote_is_told_without_its_document_and_checked(provider):
    quote = {
        "type": "string",
        "x-quote": {"sources": [{"$ref": "#/x-sources/0"}], "min_words": 2},
        "description": "Why.",
    }
    found = fit({**an_object(a=quote), "x-sources": {"0": "A long document."}}, provider)
    assert [each for each, _ in found.checked] == ["/properties/a/x-quote"]
    assert "long document" not in found.schema
    told = "Why. (at least 2 words, copied from the text, character by character)"
    assert json.loads(found.schema)["properties"]["a"] == {"type": "string", "description": told}


def test_alternatives_of_which_one_fits_are_sent_as_any_and_checked():
    found = fit(an_object(a={"oneOf": [{"type": "string"}, {"type": "null"}]}))
    assert [pointer for pointer, _ in found.checked] == ["/properties/a/oneOf"]
    assert json.loads(found.schema)["properties"]["a"] == {
        "anyOf": [{"type": "string"}, {"type": "null"}]
    }


def test_optional_properties_are_required_where_they_have_to_be():
    schema = an_object(a={"type": "null"}) | {"required": []}
    assert fit(schema).required == ("/properties/a",)
    assert json.loads(fit(schema).schema)["required"] == ["a"]
    assert json.loads(fit(schema, "anthropic").schema)["required"] == []


NODE = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
        "required": ["next"], "additionalProperties": False}  # fmt: skip


@pytest.mark.parametrize(
    ("provider", "schema", "pointer"),
    [
        ("openai", an_object(a=True), "/properties/a"),
        ("openai", an_object(a={}), "/properties/a"),
        ("openai", an_object(a={"type": "array"}), "/properties/a"),
        ("openai", an_object(a={"enum": [1, "x"]}), "/properties/a/enum"),
        ("openai", an_object(a={"type": "object"}), "/properties/a"),
        (
            "openai",
            {"type": "object", "additionalProperties": {"type": "integer"}},
            "/additionalProperties",
        ),
        ("openai", an_object(a={"type": "null"}) | {"required": ["b"]}, "/required"),
        ("openai", an_object() | {"allOf": [{"required": ["a"]}]}, "/allOf"),
        ("openai", an_object(a={"not": {}, "type": "null"}), "/properties/a/not"),
        # would never end
        ("openai", {"type": "object", "properties": {"a": {"$ref": "#"}}}, "/properties/a"),
        (
            "openai",
            an_object(a={"$ref": "#/$defs/x", "minimum": 1}) | {"$defs": {"x": NODE}},
            "/properties/a/$ref",
        ),
        (
            "anthropic",
            an_object(a={"$ref": "#/$defs/node"}) | {"$defs": {"node": NODE}},
            "/properties/a/$ref",
        ),
        ("anthropic", an_object(a={"type": ["string", "null"]}), "/properties/a/type"),
        ("openai", an_object(**{f"a{i}": {"type": "null"} for i in range(5001)}), ""),
        ("anthropic", an_object(**{f"a{i}": {"anyOf": [{"type": "null"}]} for i in range(17)}), ""),
    ],
)
def test_what_no_strict_output_takes_is_refused_where_it_stands(provider, schema, pointer):
    found = fit(schema, provider)
    assert found.schema == ""
    assert pointer in dict(found.refused)
    assert pointer not in found.enforced


def test_a_schema_may_refer_to_itself_where_that_is_taken():
    found = fit(an_object(a={"$ref": "#/$defs/node"}) | {"$defs": {"node": NODE}})
    assert json.loads(found.schema)["$defs"]["node"]["required"] == ["next"]


def test_pointers_of_a_wrapped_value_are_its_own():
    found = fit(an_object(value={"type": "string", "maxLength": 1})).subschema_report(
        "/properties/value"
    )
    assert found.checked == (("/maxLength", "not enforced by the provider"),)
    assert found.enforced == ("/type",)


scalars = st.sampled_from(
    [
        {"type": "integer", "minimum": 0},
        {"type": "string", "maxLength": 2},
        {"enum": ["a", "b"]},
        {"const": 1},
        {"type": "null"},
        {"type": "number", "multipleOf": 0.5},
        {"type": "string", "pattern": "^a"},
    ]
)
schemas = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(lambda d: an_object(**d)),
        inner.map(lambda each: {"type": "array", "items": each, "maxItems": 2}),
        st.lists(inner, min_size=1, max_size=2).map(lambda each: {"anyOf": each}),
    ),
    max_leaves=5,
)
values = st.recursive(
    st.sampled_from([0, 1, -1, 0.5, "a", "b", "abc", None]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    ),
    max_leaves=4,
)


@settings(max_examples=200, deadline=None)
@given(schemas, values, st.sampled_from(sorted(RULES)))
def test_what_is_sent_allows_all_that_was_asked_for_and_what_it_does_not_keep_is_told(
    schema, value, provider
):
    found = fit(schema, provider)
    if found.refused:
        return
    asked, sent = (
        jsonschema.Draft202012Validator(each).is_valid(value)
        for each in (schema, json.loads(found.schema))
    )
    assert sent >= asked
    if not found.checked:
        assert sent == asked
