"""sgl.grammar, and the constraints in gen()."""

from typing import Literal

import pytest
from pydantic import BaseModel

import sglang_lite as sgl
from sglang_lite.protocol import Ebnf, Lark, Regex

g = sgl.grammar


class Point(BaseModel):
    x: int
    y: int | None = None


def test_a_report_tells_what_will_be_kept():
    report = g.check(
        {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 3}},
            "required": ["a"],
        }
    )
    assert report.refused == ()
    assert report.checked == (("", "that an object has a name which is not listed once"),)
    assert report.example is not None
    assert g.matches({"type": "object"}, report.example)
    assert report.rules > 2
    refused = g.check(
        {
            "items": {
                "uniqueItems": True,
                "items": {"type": "object", "maxProperties": 9},
                "pattern": "(?<=ab)",
            }
        }
    )
    assert {pointer for pointer, _ in refused.refused} == {"/items/uniqueItems", "/items/pattern"}
    assert refused.example is None
    loose = g.check(
        g.json_schema(
            {"uniqueItems": True, "items": {"type": "object", "maxProperties": 9}},
            enforce="best_effort",
        )
    )
    assert loose.checked[0][0] == "/uniqueItems"
    assert "lookbehind" in g.check(g.Regex("a(?<=ab)")).refused[0][1]
    assert "contradicts" in g.check(False).refused[0][1]


@pytest.mark.parametrize(
    ("source", "valid", "invalid"),
    [
        ({"type": "integer"}, [" 3 ", "-1"], ["x", '"3"', ""]),
        (Point, ['{"x":1}', '{"y": null,\n "x": 2}'], ['{"x": "1"}', "{}"]),
        (Literal["a", "b"], ["a"], ['"a"', "ab"]),
        (str, ["any\ntext"], []),
        (sgl.Regex("a+"), ["aa"], ["", "ab"]),
        (sgl.Choices(["a", "b"]), ["b"], ["c"]),  # type: ignore[arg-type]  # a list will do
        (sgl.Grammar('root ::= "a" | "(" root ")"'), ["((a))"], ["(a"]),
        (sgl.Grammar('start: "a" start | "::="'), ["a::="], ["a"]),
        (g.Ebnf('root ::= "a" | "(" root ")"'), ["((a))"], ["(a"]),
        (g.Lark('start: "a" start | "b"'), ["aab"], ["a"]),
        (g.OneOf((g.Regex("[0-9]"), g.json_schema({"type": "null"}))), ["1", "null"], ["01"]),
    ],
)
def test_matches(source, valid, invalid):
    assert [text for text in valid if not g.matches(source, text)] == []
    assert [text for text in invalid if g.matches(source, text)] == []


def test_the_public_names_are_the_records():
    assert (sgl.Regex, sgl.Choices) == (g.Regex, g.Choices)
    assert (sgl.Grammar("a ::= b"), sgl.Grammar("start: A")) == (Ebnf("a ::= b"), Lark("start: A"))
    for options in ("yes", ["yes", 3]):
        with pytest.raises(sgl.ConstraintError, match="is not a list of strings"):
            sgl.Choices(options)  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.parametrize(
    "source", [sgl.Regex("[ab]"), sgl.Grammar('start: "a"'), {"enum": ["a"]}, Literal["a"]]
)
def test_gen_takes_whatever_is_a_constraint(source):
    node = sgl.gen("x", constraint=source).node
    assert g.matches(node.constraint, g.check(source).example)  # type: ignore[arg-type]  # there is one


def test_a_report_lists_keywords_by_what_they_do():
    report = g.check(
        {"type": "string", "format": "none", "title": "T", "maxLenght": 3, "pattern": "(?<=ab)"}
    )
    assert report.enforced == ("/type",)
    assert [pointer for pointer, _ in report.refused] == ["/pattern"]
    assert report.remarks == ("/format", "/maxLenght")
    assert g.check(g.json_schema({"format": "date"}, format="annotate")).remarks == ("/format",)
    assert g.check(g.Regex("a{9999}")).example == "a" * 9999


def test_json_matches_in_any_style_but_not_with_a_member_twice_for_two():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "number"}}}
    for text in ('{"a": 1, "b": 2}', '{\n "b":2.50, "a" : 1.0}', '{"x": [ ], "b": 1e2, "a": -0}'):
        assert g.matches(schema, text), text
    for text in ('{"a": 1.5}', '{"a": 1', '{"b": 1e999}', "\ud800", ""):
        assert not g.matches(schema, text), text
    names = {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "minProperties": 2}
    assert g.matches(names, '{"b": 1, "a": 2}')
    assert not g.matches(names, '{"a": 1, "a": 2}')


def test_best_effort_matches_only_what_is_valid():
    constraint = g.json_schema(
        {"items": {"type": ["integer", "object"]}, "uniqueItems": True}, enforce="best_effort"
    )
    assert g.matches(constraint, "[1, 2]")
    assert not g.matches(constraint, "[1, 1]")


def test_a_models_tokens(small_engine, small_file):
    for model in (small_engine, small_file, str(small_file)):
        assert g.matches(Point, '{"x": 17, "y": null}', model)
        assert not g.matches(Point, '{"x": "17"}', model)
        assert g.check(Point, model).refused == ()
    with pytest.raises(sgl.ParameterError, match="not a name, a path or an Engine"):
        g.matches(Point, "{}", 3)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(sgl.ModelError):
        g.check(Point, "no-such-model")


def test_what_is_refused_is_an_error_to_match():
    with pytest.raises(sgl.ConstraintError, match="uniqueItems"):
        g.matches({"uniqueItems": True, "items": {"type": "object", "maxProperties": 9}}, "[]")
    with pytest.raises(sgl.ConstraintError):
        g.matches(object(), "")


def test_validate_gives_the_value():
    assert g.validate({"type": "array", "uniqueItems": True}, "[1, 2]") == [1, 2]
    assert g.validate(g.Regex("a+"), "aa") == "aa"
    with pytest.raises(sgl.ValueValidationError):
        g.validate(g.Regex("a+"), "b")
    with pytest.raises(sgl.ValueValidationError):
        g.validate({"type": "array", "uniqueItems": True}, "[1, 1]")


def test_gen_takes_grammars_and_any_constraint():
    tag = g.StructuralTag((g.Tag("<n>", g.Regex("[0-9]+"), "</n>"),), ("<n>",))

    @sgl.function
    def program(s):
        s += sgl.gen("e", constraint=sgl.Grammar('root ::= "yes" | "no"'))
        s += sgl.gen("l", constraint=sgl.Grammar('start: "a"+'))
        s += sgl.gen("t", constraint=tag)
        s += sgl.gen("j", json_schema=g.json_schema({"type": "null"}, separators=(",", ":")))

    state = program.run(backend=sgl.ScriptedBackend())
    assert state["e"] in ("yes", "no")
    assert set(state["l"]) == {"a"}
    assert g.matches(tag, state["t"])
    assert state["j"] == "null"
    assert sgl.gen("x", constraint=sgl.Grammar('root ::= "a"')).node.constraint == Ebnf(
        'root ::= "a"'
    )
    assert sgl.gen("x", constraint=sgl.Grammar('start: "a"')).node.constraint == Lark('start: "a"')


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"constraint": Ebnf("root ::= ")}, None, None),
        ({"constraint": Ebnf("root := 1")}, sgl.ConstraintError, "::= expected"),
        ({"constraint": Lark("start: b")}, sgl.ConstraintError, "no rule 'b'"),
        (
            {"constraint": Ebnf("")},
            sgl.ConstraintError,
            r"(?s)the grammar is empty.*Begin with: root ::=",
        ),
        (
            {"json_schema": [1]},
            sgl.ParameterError,
            "json_schema: a list is not a schema. Give a dict",
        ),
        (
            {"constraint": "a+"},
            sgl.ConstraintError,
            r"'a\+' is text, not a constraint. Say what it is: sgl.Regex",
        ),
        ({"constraint": sgl.Regex("a(")}, sgl.ConstraintError, "regex"),
        ({"constraint": sgl.Grammar("root ::= b")}, sgl.ConstraintError, "no rule 'b'"),
        ({"constraint": 3}, sgl.ConstraintError, "can't be generated"),
        (
            {"constraint": Ebnf('root ::= "a"'), "regex": "a"},
            sgl.ParameterError,
            "can't be combined",
        ),
    ],
)
def test_broken_grammars_are_refused_where_they_are_written(arguments, error, message):
    if error is None:
        sgl.gen("x", **arguments)
        return
    with pytest.raises(error, match=message):
        sgl.gen("x", **arguments)


def test_a_backend_that_can_not_keep_a_grammar_refuses_it():
    class Plain(sgl.BaseBackend):
        async def agenerate(self, prompt, params, constraint, *, stream):
            yield

    @sgl.function
    def program(s):
        s += sgl.gen("x", constraint=sgl.Grammar('root ::= "a"'))

    with pytest.raises(sgl.CapabilityError, match="an EBNF grammar"):
        program.run(backend=Plain())["x"]


@pytest.mark.parametrize(
    "constraint",
    [
        Ebnf('root ::= "(" root ")" | "x"'),
        Lark('start: /[0-9]+/ (" + " /[0-9]+/)~1..2'),
        g.InOrder((Regex("[A-Z]{3}"), g.json_schema({"enum": [1, "two"]}))),
        g.StructuralTag((g.Tag("<b>", Regex("[a-z]{1,9}"), "</b>"),), ("<b>",)),
    ],
    ids=lambda constraint: type(constraint).__name__,
)
def test_the_engine_keeps_them(small_engine, constraint):
    @sgl.function
    def program(s):
        s += "Answer:" + sgl.gen("x", constraint=constraint, max_tokens=24, temperature=0)

    state = program.run(backend=small_engine)
    if state.get_meta_info("x")["finish_reason"]["type"] == "stop":
        assert g.matches(constraint, state["x"])
