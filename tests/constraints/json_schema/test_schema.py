"""Schemas are checked before anything runs, enforced or refused with a pointer, and values are
validated against them.
"""

import gc
import json

import jsonschema
import pytest

import sglang_lite as sgl
from sglang_lite.constraints.json_schema import wellformed
from sglang_lite.constraints.json_schema.normal_form import normalise
from sglang_lite.constraints.kinds import language_for_constraint
from sglang_lite.constraints.schema import json_schema, parse_json
from sglang_lite.protocol import (
    ConstraintError,
    InOrder,
    JsonSchema,
    TaggedObject,
    Tags,
    ValueValidationError,
)
from tests.constraints.engine import accepts, byte_engine, compiled


def test_a_schema_may_be_text_a_mapping_or_a_boolean():
    assert json_schema('{"type": "integer"}') == JsonSchema('{"type": "integer"}')
    assert json_schema({"type": "integer"}) == JsonSchema('{"type": "integer"}')
    assert json_schema(True) == JsonSchema("true")


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "must be an object or a boolean"),
        ('{"minimum": NaN}', "NaN is no number"),
        ({"type": object()}, "not a JSON document"),
        ({"maximum": float("inf")}, "not a JSON document"),
        ("[" * 100_000, "nested too deeply"),
        ('{"not":' * 300 + "{}" + "}" * 300, "nested too deeply"),
        ('"' + "x" * 2_000_001 + '"', "the limit is"),
    ],
)
def test_what_is_no_schema_is_refused(schema, message):
    with pytest.raises(ConstraintError, match=message):
        json_schema(schema)


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"properties": {"a/b": {"type": "strin"}}}, "/properties/a~1b/type"),
        ({"items": 3}, "/items"),
        ({"allOf": []}, "/allOf"),
        ({"$defs": {"x": {"minLength": -1}}}, "/$defs/x/minLength"),
        ({"required": True}, "/required"),
        ({"multipleOf": 0}, "/multipleOf"),
        ({"anyOf": [{"pattern": 1}]}, "/anyOf/0/pattern"),
        ({"uniqueItems": "yes"}, "/uniqueItems"),
        ({"enum": {}}, "/enum"),
        ({"$ref": "#/default", "default": {"type": "strin"}}, "/default/type"),
        (
            {"$ref": "#/x/y", "x": {"y": {"$ref": "#/x/z"}, "z": {"type": ["null", "strin"]}}},
            "/x/z/type",
        ),
    ],
)
def test_the_fault_of_a_schema_has_its_pointer(schema, pointer):
    with pytest.raises(ConstraintError) as caught:
        json_schema(schema)
    assert caught.value.pointer == pointer


@pytest.mark.parametrize(
    "option", [{"enforce": "maybe"}, {"format": "check"}, {"separators": (";", ":")}]
)
def test_options_that_are_none_are_refused(option):
    with pytest.raises(ConstraintError, match=next(iter(option))):
        json_schema({}, **option)


# ---------------------------------------------------------------------------------------- enforcing

OBJECT = {"type": "object", "additionalProperties": False}
KEPT = [
    # what the engines by themselves refuse, ignore or get wrong
    ({"type": "string", "pattern": "foo"}, ['"xfoox"'], ['"fo"']),
    ({"type": "string", "pattern": "^a+$", "maxLength": 2}, ['"a"', '"aa"'], ['"aaa"', '""']),
    ({"type": "string", "format": "date", "pattern": "^2024"}, ['"2024-02-29"'], ['"2023-01-01"', '"2024-02-30"']),
    ({"type": "string", "minLength": 1, "maxLength": 2}, ['"é😀"', '"\\n"'], ['""', '"abc"']),
    ({"not": {"type": ["string", "number"]}}, ["null", "[]", "{}"], ['"a"', "1"]),
    ({"type": "integer", "not": {"multipleOf": 2}}, ["1", "-3"], ["2", "0"]),
    ({"type": "string", "not": {"enum": ["a", "b"]}}, ['"c"', '"aa"'], ['"a"']),
    ({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 2}]}, ["1", "2.5"], ["3", "1.5"]),
    ({"allOf": [{"minimum": 1}, {"maximum": 2.5}], "type": "number"}, ["1", "2.50"], ["0.9", "2.51"]),
    ({"type": "array", "contains": {"const": 1}, "maxItems": 3}, ["[1]", "[2, 1]"], ["[]", "[2, 3]", "[1, 1, 1, 1]"]),
    ({"type": "array", "contains": {"const": 1}, "maxContains": 1}, ["[0, 1]"], ["[1, 1]", "[0]"]),
    ({"items": {"enum": [1, 2, 3]}, "uniqueItems": True, "type": "array"}, ["[]", "[3, 1]"], ["[1, 1]", "[1, 2, 1]"]),
    ({"prefixItems": [{"type": "null"}], "items": False, "type": "array"}, ["[]", "[null]"], ["[null, 1]", "[1]"]),
    ({"minProperties": 1, "maxProperties": 2, "type": "object"}, ['{"a": 1, "b": 2}'], ["{}", '{"a": 1, "b": 2, "c": 3}']),
    ({"propertyNames": {"maxLength": 1}, "type": "object"}, ['{"a": 1}'], ['{"ab": 1}']),
    (
        OBJECT | {"properties": {"ab": {"maximum": 5}}, "patternProperties": {"^a": {"type": "integer"}}},
        ['{"ab": 3}', '{"ac": 7}'],
        ['{"ab": 7}', '{"ab": 1.5}', '{"b": 1}'],
    ),
    (
        OBJECT | {"properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}},
        ["{}", '{"b": 1}', '{"a": 1, "b": 2}'],
        ['{"a": 1}'],
    ),
    (
        {
            "type": "object",
            "properties": {"kind": {"enum": ["int", "text"]}, "value": {}},
            "required": ["kind", "value"],
            "if": {"properties": {"kind": {"const": "int"}}},
            "then": {"properties": {"value": {"type": "integer"}}},
            "else": {"properties": {"value": {"type": "string"}}},
        },
        ['{"kind": "int", "value": 1}', '{"kind": "text", "value": "x"}'],
        ['{"kind": "int", "value": "x"}', '{"kind": "text", "value": 1}'],
    ),
    (
        {"$ref": "#/$defs/base", "properties": {"b": {"type": "null"}}, "unevaluatedProperties": False,
         "$defs": {"base": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}},
        ['{"b": null, "a": 1}', '{"a": 1}'],
        ['{"a": 1, "c": 2}', "{}"],
    ),
    (
        {"$schema": "http://json-schema.org/draft-04/schema#", "type": "integer", "minimum": 1, "exclusiveMinimum": True,
         "const": 7},
        ["2", "7"],
        ["1"],
    ),
    (
        {"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"type": "null"}], "additionalItems": False,
         "type": "array", "dependencies": {"a": ["b"]}},
        ["[]", "[null]"],
        ["[null, null]"],
    ),
    ({"const": {"a": [1, "x\n", None]}}, ['{"a": [1, "x\\n", null]}'], ['{"a": [1, "x\\n"]}', '{"a": [1, "x", null]}']),
    ({"type": "string", "format": "no-such-format"}, ['"anything"'], ["1"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"), KEPT, ids=lambda value: json.dumps(value)[:50]
)
def test_what_is_enforced_is_exact(schema, valid, invalid):
    constraint = json_schema(schema)
    grammar = byte_engine().compile(constraint)
    for text in valid:
        assert accepts(grammar, text), text
        parse_json(constraint, text)
    for text in invalid:
        assert not accepts(grammar, text), text
        with pytest.raises(ValueValidationError):
            parse_json(constraint, text)


# JSON as models write it may name a member twice, and the last one counts.
REPEATED = [
    (
        {"propertyNames": {"enum": ["a", "b"]}, "minProperties": 2},
        ['{"a": 1, "b": 2}'],
        ['{"a": 1, "a": 2}'],
    ),
    (
        {"not": {"additionalProperties": {"type": "integer"}}},
        ['{"b": 1, "a": "x"}'],
        ['{"a": "x", "a": 2}'],
    ),
    (
        {"required": ["a"], "minProperties": 2},
        ['{"a": 1, "b": 2}'],
        ['{"a": 1}', '{"a": 1, "a": 2}'],
    ),
    (
        {"not": {"propertyNames": {"pattern": "^a"}}, "maxProperties": 2},
        ['{"aa": 1, "b": 2}'],
        ['{"aa": 1}', "{}"],
    ),
]


@pytest.mark.parametrize(("schema", "valid", "invalid"), REPEATED)
def test_a_name_that_is_written_twice_breaks_nothing(schema, valid, invalid):
    grammar = byte_engine().compile(json_schema({"type": "object", **schema}))
    assert [text for text in valid if not accepts(grammar, text)] == []
    assert [text for text in invalid if accepts(grammar, text)] == []


def test_members_are_counted_and_their_names_differ():
    constraint = json_schema({"type": "object", "minProperties": 2})
    grammar, _ = compiled(constraint)
    assert accepts(grammar, '{"a": 1, "b": 2}')
    assert not accepts(grammar, '{"a": 1}')
    assert not accepts(grammar, '{"a": 1, "a": 2}')
    with pytest.raises(ValueValidationError):
        parse_json(constraint, '{"a": 1, "a": 2}')


def test_the_style_is_one():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "array"}}}
    usual = byte_engine().compile(json_schema(schema))
    compact = byte_engine().compile(json_schema(schema, separators=(",", ":")))
    assert accepts(usual, '{"a": 1, "b": [1, {"c": 2}]}')
    assert accepts(compact, '{"a":1,"b":[1,{"c":2}]}')
    for text in (
        '{"b": [], "a": 1}',
        '{"a":1}',
        '{ "a": 1}',
        ' {"a": 1}',
        '{"a": 1.0}',
        '{"a": 1}\n',
        '{"a": 1, }',
    ):
        assert not accepts(usual, text)
    assert not accepts(compact, '{"a": 1}')


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"properties": {"tags": {"items": {"type": "object", "maxProperties": 3}, "uniqueItems": True}}}, "/properties/tags/uniqueItems"),
        ({"not": {"type": "array", "uniqueItems": True}}, "/not/uniqueItems"),
        ({"multipleOf": 37}, "/multipleOf"),
        ({"propertyNames": {"pattern": "^a?b?$"}, "minProperties": 5}, "/minProperties"),
        ({"$ref": "https://example.com/schema.json"}, "/$ref"),
        ({"$ref": "#/$defs/none"}, "/$ref"),
        ({"items": {"pattern": "(?<=ab)"}}, "/items/pattern"),
        ({"patternProperties": {"(": True}}, "/patternProperties"),
        ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "/$defs/a"),
        ({"oneOf": [{"type": "object", "properties": {f"p{i}": {"const": i}}, "required": [f"p{i}"]} for i in range(14)]},
         "/oneOf"),
    ],
)  # fmt: skip
def test_what_can_not_be_enforced_is_refused_with_its_pointer(schema, pointer):
    with pytest.raises(ConstraintError) as caught:
        normalise(json_schema(schema))
    assert caught.value.pointer == pointer


def test_best_effort_enforces_the_rest_and_tells_what_is_checked():
    schema = {
        "type": "object",
        "properties": {
            "tags": {
                "type": "array",
                "uniqueItems": True,
                "items": {"type": "string", "pattern": r"(?<!ab)x"},
            }
        },
        "required": ["tags"],
    }
    constraint = json_schema(schema, enforce="best_effort")
    pointers = [pointer for pointer, _ in normalise(constraint).checked]
    assert pointers == ["/properties/tags/items/pattern"]
    grammar, _ = compiled(constraint)
    assert accepts(grammar, '{"tags": ["x", "ax"]}')
    assert not accepts(grammar, '{"tags": ["x", "x"]}')
    assert not accepts(grammar, '{"tags": [1]}')
    assert not accepts(grammar, "{}")
    assert parse_json(constraint, '{"tags": ["x", "a x"]}') == {"tags": ["x", "a x"]}
    for text in ('{"tags": ["x", "x"]}', '{"tags": ["abx"]}'):
        with pytest.raises(ValueValidationError):
            parse_json(constraint, text)


def test_best_effort_fetches_nothing_either():
    with pytest.raises(ConstraintError, match="leads out of the schema"):
        normalise(json_schema({"$ref": "https://example.com/schema.json"}, enforce="best_effort"))
    with pytest.raises(ConstraintError, match="leads out of the schema"):
        parse_json(json_schema({"$ref": "https://example.com/schema.json"}), "1")


TAGS = Tags("<{name}>", "</{name}>", "</")
# What can't be enforced, with a text that it allows without that, and one that it does not.
UNENFORCED: dict[str, tuple[dict, str, str | None]] = {
    "uniqueItems": (
        {"type": "array", "uniqueItems": True, "items": {"type": "object"}},
        "[{}, {}]",
        "[1]",
    ),
    "pattern": ({"type": "string", "pattern": "(?<!ab)x", "maxLength": 3}, '"a"', '"abcd"'),
    "another document": ({"$ref": "https://example.com/schema.json"}, "1", None),
    "no target": ({"$ref": "#/$defs/none", "type": "array"}, "[1]", "1"),
}


@pytest.mark.parametrize("name", UNENFORCED)
@pytest.mark.parametrize("inside", ["in order", "between tags"])
def test_what_may_stay_unchecked_is_left_out_inside_another_constraint(name, inside):
    part, allowed, other = UNENFORCED[name]
    schema = {"properties": {"a": part, "b": {"const": 1}}, "required": ["b"], "type": "object"}
    make = {"in order": in_order, "between tags": between_tags}[inside]
    for enforce in ("strict", "best_effort"):
        with pytest.raises(ConstraintError):
            language_for_constraint(make(schema, enforce))
    grammar, _ = compiled(make(schema, "unchecked"))
    for members, fits in (
        ({"b": "1"}, True),
        ({"a": allowed, "b": "1"}, True),
        ({"a": other, "b": "1"}, False),
        ({"b": "2"}, False),
    ):
        if None in members.values():
            continue
        text = "{" + ", ".join(f'"{key}": {value}' for key, value in members.items()) + "}"
        tagged = "".join(f"<{key}>{value}</{key}>" for key, value in members.items())
        assert accepts(grammar, text if inside == "in order" else tagged) == fits, text


def in_order(schema, enforce):
    return InOrder((json_schema(schema, enforce=enforce),))


def between_tags(schema, enforce):
    return InOrder((TaggedObject(json_schema(schema, enforce=enforce), TAGS),))


@pytest.mark.parametrize(
    "part", [False, {"minimum": 5, "maximum": 2, "type": "integer"}], ids=json.dumps
)
def test_what_contradicts_itself_is_refused_also_if_it_may_stay_unchecked(part):
    schema = {"type": "object", "properties": {"a": part}, "required": ["a"]}
    with pytest.raises(ConstraintError, match="contradicts itself"):
        language_for_constraint(in_order(schema, "unchecked"))


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"allOf": [{"type": "integer"}, {"type": "string"}]},
        {"type": "array", "minItems": 2, "maxItems": 1},
        {"type": "string", "pattern": "^a", "const": "b"},
        {"type": "object", "required": ["a"], "propertyNames": {"const": "b"}},
    ],
)
def test_what_contradicts_itself_is_refused(schema):
    with pytest.raises(ConstraintError, match="contradicts itself"):
        normalise(json_schema(schema))


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"type": "integer", "minimum": 5, "maximum": 2}, ""),
        ({"properties": {"b": True, "a": {"const": 1, "type": "string"}}, "type": "object", "required": ["a"]}, "/properties/a"),
        ({"type": "array", "minItems": 1, "items": {"type": "array", "minItems": 2, "maxItems": 1}}, "/items"),
        # either alone would do, so neither is to blame
        ({"type": "array", "minItems": 1, "items": {"anyOf": [{"enum": []}, {"not": {}}]}}, "/items"),
        # two are to blame, and what need not be there is not
        ({"type": "object", "required": ["a", "b"], "properties": {"a": False, "b": False, "c": {"not": {}}}}, ""),
    ],
)  # fmt: skip
@pytest.mark.parametrize("enforce", ["strict", "best_effort"])
def test_a_contradiction_is_told_with_its_place(schema, pointer, enforce):
    with pytest.raises(ConstraintError, match="contradicts itself") as caught:
        normalise(json_schema(schema, enforce=enforce))
    assert caught.value.pointer == pointer


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        (
            {"type": "integer", "enum": ["a"], "title": "Age"},
            'No value meets all of type: "integer"; enum: ["a"]. Change one.',
        ),
        (
            {
                "required": ["a"],
                "properties": {"a": {"minimum": 5, "maximum": 3, "type": "number"}},
                "type": "object",
            },
            'No value meets all of minimum: 5; maximum: 3; type: "number". Change one.',
        ),
        ({"type": "array", "minItems": 1, "items": False}, "No value meets all of"),
        (False, "The schema false allows no value."),
    ],
)
def test_a_contradiction_names_the_keywords(schema, told):
    with pytest.raises(ConstraintError) as caught:
        normalise(json_schema(schema))
    assert told in str(caught.value)


def test_large_schemas_are_compiled_or_refused_in_time():
    properties = {f"p{i}": {"type": "integer"} for i in range(3000)}
    grammar = byte_engine().compile(json_schema({"type": "object", "properties": properties}))
    assert accepts(grammar, '{"p3": 1, "p2999": 2}')
    either = [{"anyOf": [{"required": [f"p{i}"]}, {"required": [f"q{i}"]}]} for i in range(20)]
    every = {f"q{i}": i for i in range(20)}
    for order in ("schema", "any"):
        grammar = byte_engine().compile(
            json_schema({"type": "object", "allOf": either}, order=order)
        )
        assert accepts(grammar, json.dumps(every))
        assert not accepts(grammar, json.dumps({**every, "q19": None}).replace('"q19"', '"x"'))
        chained = [
            {"anyOf": [{"required": [f"p{i}"]}, {"required": [f"p{i + 1}"]}]} for i in range(20)
        ]
        with pytest.raises(ConstraintError, match="too complex"):
            normalise(json_schema({"type": "object", "allOf": chained}, order=order))


# --------------------------------------------------------------------------------------- validating


@pytest.mark.parametrize(
    ("contained", "item"),
    [
        ({"properties": {"a": {"const": 0}, "aa": {"type": "integer"}}}, {"aa": [], "a": []}),
        ({"propertyNames": {"maxLength": 1}}, {"aa": 1, "b": 2}),
        ({"not": {"propertyNames": {"maxLength": 1}}}, {"aa": 1, "b": 2}),
    ],
)
@pytest.mark.parametrize("counts", [{}, {"maxContains": 2}, {"minContains": 0, "maxContains": 2}])
def test_items_that_may_count_are_rewritten_in_the_order_of_what_they_count_for(
    contained, item, counts
):
    for value in ([item], [False, item], [item, item, item]):
        schema = {"contains": contained, **counts}
        valid = jsonschema.Draft202012Validator(schema).is_valid(value)
        assert sgl.grammar.matches(schema, json.dumps(value)) == valid


def test_values_are_validated():
    constraint = json_schema(
        {"type": "object", "properties": {"n": {"type": "integer", "maximum": 3}}}
    )
    assert parse_json(constraint, '{"n": 2}') == {"n": 2}
    assert parse_json(constraint, ' {\n"x":1,"n" : 2} ') == {"x": 1, "n": 2}
    with pytest.raises(ValueValidationError, match=r"\$\.n: 5 is greater") as caught:
        parse_json(constraint, '{"n": 5}')
    assert (caught.value.text, caught.value.value) == ('{"n": 5}', {"n": 5})
    for text in ('{"n":', '{"n": NaN}', '{"n": 1e999}', "[1", "9" * 5000):
        with pytest.raises(ValueValidationError, match="not JSON"):
            parse_json(constraint, text)


def test_formats_are_asserted_unless_they_are_annotations():
    schema = {"type": "string", "format": "ipv4"}
    with pytest.raises(ValueValidationError, match="not a 'ipv4'"):
        parse_json(json_schema(schema), '"1.2.3"')
    annotated = json_schema(schema, format="annotate")
    assert parse_json(annotated, '"1.2.3"') == "1.2.3"
    assert accepts(byte_engine().compile(annotated), '"1.2.3"')


def test_decimals_are_exact_in_validation_too():
    assert parse_json(json_schema({"multipleOf": 0.01}), "19.99") == 19.99


def test_a_schema_that_says_its_draft_is_validated_by_the_same_rules_everywhere():
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "properties": {
            "next": {"$ref": "#"},
            "day": {"type": "string", "format": "date", "pattern": r"^\p{Nd}"},
        },
    }
    constraint = json_schema(schema)
    assert parse_json(constraint, '{"next": {"day": "2024-02-29"}}') == {
        "next": {"day": "2024-02-29"}
    }
    with pytest.raises(ValueValidationError, match="not a 'date'"):
        parse_json(constraint, '{"next": {"day": "2024-02-30"}}')


DRAFT_2019, DRAFT_2020 = (
    f"https://json-schema.org/draft/{name}/schema" for name in ("2019-09", "2020-12")
)


@pytest.mark.parametrize("draft", [DRAFT_2019, DRAFT_2020])
@pytest.mark.parametrize("additional", [True, {"type": "string"}])
def test_additional_properties_are_evaluated_in_every_draft(draft, additional):
    schema = {
        "$schema": draft,
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "additionalProperties": additional,
        "unevaluatedProperties": False,
    }
    example = sgl.grammar.check(schema).example
    assert example is not None
    assert sgl.grammar.matches(schema, example)
    assert sgl.grammar.matches(schema, '{"a": 1, "b": "x"}')
    assert sgl.grammar.matches(schema, '{"b": 1}') == (additional is True)


@pytest.mark.parametrize("draft", [DRAFT_2019, DRAFT_2020, None])
def test_dependencies_and_items_as_a_list_are_kept_in_every_draft(draft):
    said = {} if draft is None else {"$schema": draft}
    dependencies = {**said, "dependencies": {"a": ["b"], "c": {"required": ["d"]}}}
    assert sgl.grammar.matches(dependencies, '{"a": 1, "b": 2}')
    assert not sgl.grammar.matches(dependencies, '{"a": 1}')
    assert not sgl.grammar.matches(dependencies, '{"c": 1}')
    items = {
        **said,
        "items": [{"type": "string"}, {"$ref": "#/items/0"}],
        "additionalItems": {"type": "null"},
    }
    for text, valid in (
        ('["a", "b", null]', True),
        ('["a", 1]', False),
        ('["a", "b", "c"]', False),
        ("[1]", False),
    ):
        assert sgl.grammar.matches(items, text) == valid, text


def test_unevaluated_names_are_found_by_the_dialect_of_patterns():
    schema = {"patternProperties": {r"^\d$": True}, "unevaluatedProperties": False}
    assert validated(schema, '{"1": 0}')
    assert not validated(schema, '{"٣": 0}')


def test_a_reference_to_itself_is_no_endless_validation():
    with pytest.raises(ConstraintError, match="without an end"):
        parse_json(json_schema({"$ref": "#"}), "1")


def validated(schema, text):
    try:
        parse_json(json_schema(schema), text)
    except ValueValidationError:
        return False
    return True


def test_checking_a_large_schema_brings_on_no_collections_of_garbage():
    """One of them would look at all that the caller has, and hold up all its threads. With a list
    of all subschemas there were 85.
    """
    schema = {"properties": {f"p{i}": {"type": "integer"} for i in range(60_000)}}
    passes = []

    def note(phase, info):
        if phase == "start":
            passes.append(info["generation"])

    gc.collect()
    gc.callbacks.append(note)
    try:
        wellformed.check(schema)
    finally:
        gc.callbacks.remove(note)
    assert len(passes) < 5


@pytest.mark.parametrize(
    ("wrapped", "place"),
    [
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
            '["json_schema"]["schema"]',
        ),
        ({"type": "json_schema", "name": "n", "schema": {}, "strict": True}, '["schema"]'),
        ({"name": "n", "schema": {"type": "object"}, "strict": True}, '["schema"]'),
        (
            {"type": "function", "function": {"name": "n", "parameters": {}}},
            '["function"]["parameters"]',
        ),
        ({"name": "n", "description": "d", "input_schema": {}}, '["input_schema"]'),
    ],
)
def test_what_an_api_takes_around_a_schema_is_none(wrapped, place):
    for source in (wrapped, json.dumps(wrapped)):
        with pytest.raises(ConstraintError) as caught:
            json_schema(source)
        assert caught.value.hint == f"Pass the schema inside: json_schema=wrapped{place}."


def test_a_response_format_of_any_object_is_told_as_a_schema():
    with pytest.raises(ConstraintError, match=r"at /type.* Any object is .*\"type\": \"object\""):
        json_schema({"type": "json_object"})


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "description": "d", "parameters": {}},
        {"schema": {}},
        {"properties": {"name": True}},
    ],
)
def test_unknown_keywords_alone_make_no_wrapper(schema):
    assert json_schema(schema).schema == json.dumps(schema)
