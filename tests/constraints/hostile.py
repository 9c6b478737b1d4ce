"""Constraints that are meant to break the product: without the limits most of these would run for
minutes or out of memory.
"""

from typing import Annotated

from pydantic import Field

import sglang_lite as sgl
from sglang_lite.protocol import Choices, Ebnf, InOrder, Lark, OneOf, Regex, Repeated

g = sgl.grammar


def chain(count, body, last):
    """Definitions each of which refers to the next one."""
    rules = {f"a{i}": body({"$ref": f"#/$defs/a{i + 1}"}) for i in range(count)}
    return {"$ref": "#/$defs/a0", "$defs": {**rules, f"a{count}": last}}


def nested(count, wrap):
    found = {"type": "integer"}
    for _ in range(count):
        found = wrap(found)
    return found


KEPT = {
    "exponential allOf": (chain(25, lambda s: {"allOf": [s, s]}, {"type": "integer"}), ["1"], ['"a"']),
    "exponential anyOf": (chain(25, lambda s: {"anyOf": [s, s]}, {"type": "integer"}), ["1"], ['"a"']),
    "exponential properties": (
        chain(60, lambda s: {"type": "object", "properties": {"l": s, "r": s}}, {"type": "integer"}),
        ['{"r": {"l": {}, "r": {}}}'],
        ['{"l": 1}'],
    ),
    "deep arrays": (nested(150, lambda s: {"type": "array", "items": s}), ["[[[]]]"], ["[1]"]),
    "deep nots": (nested(40, lambda s: {"not": {"properties": {"x": s}}}), [], []),
    "self-recursion": ({"type": "object", "properties": {"a": {"$ref": "#"}}}, ['{"a": {"a": {}}}'], ['{"a": 1}']),
    "recursion in an array": ({"anyOf": [{"type": "array", "items": {"$ref": "#"}}, {"type": "null"}]}, ["[[null]]"], ["[1]"]),
    "5,000 properties": ({"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(5_000)}},
                          ['{"p7": 1}'], ['{"p7": "x"}']),
    "50,000 values": ({"enum": [f"value {i}" for i in range(50_000)]}, ['"value 49999"'], ['"value 50000"']),
    "20,000 alternatives": ({"anyOf": [{"const": i} for i in range(20_000)]}, ["19999"], ["20000", "0.5"]),
    "100,000 items": ({"type": "array", "items": {"type": "null"}, "minItems": 100_000}, [], ["[null]"]),
    "patterns that multiply": ({"type": "string", "allOf": [{"pattern": "^(.{1,500}){1,500}$"}, {"pattern": "x{3}"}]},
                               ['"axxxb"'], ['"xx"']),
    "NUL": ({"properties": {"\0": {"const": "a\0"}}, "required": ["\0"], "type": "object", "additionalProperties": False},
            ['{"\\u0000": "a\\u0000"}'], ["{}", '{"\0": "a\0"}']),
    "nested repeats": (Regex("(.{1,500}){1,500}"), ["a" * 1000], ["", "a\n"]),
    "deeply nested repeats": (Regex("((((a{1,100}){1,100}){1,100}){1,100}){1,100}"), ["aaa"], [""]),
    "exponential backtracking": (Regex("(a|a)*b|(a*)*c|(a+)+d"), ["a" * 500 + "d"], ["a" * 500]),
    "dots in a row": (Regex(".*" * 25_000), ["", "a" * 500], ["\n"]),
    "optional dots in a row": (Regex(".?" * 25_000), ["", "a"], ["\n"]),
    "different repeats in a row": (Regex("(.*a)?[^x]*" * 4_000), ["", "xa" * 50], ["x"]),
    "dots in a row in a grammar": (Ebnf("root ::= " + ".* " * 50_000), ["", "a" * 500], []),
    "dots in a row in a schema": ({"type": "string", "pattern": f"^{'.*a' * 8_000}$"}, [], ['"a"']),
    "letters in a row": (Regex(r"\w" * 25_000), [], ["-"]),
    "classes in a row": (Regex(r"[^\w]" * 10_000), [], ["a"]),
    "a class of many classes": (Regex("[" + r"\w" * 20_000 + "]"), ["a"], ["-"]),
    "optional parts": (Regex("a?" * 2000 + "a" * 2000), ["a" * 2000, "a" * 4000], ["a" * 1999, "a" * 4001]),
    "optional parts of a grammar": (Ebnf("root ::= " + '"a"? ' * 2000 + '"a" ' * 2000), ["a" * 2001], ["a" * 1999]),
    "exponential determinisation": (Regex("(a|b)*a(a|b){20}"), ["a" * 21], ["b" * 21]),
    "a regex with NUL": (Regex("a\0+"), ["a\0\0"], ["a"]),
    "left recursion": (Ebnf('root ::= root "a" | x\nx ::= root | "b" | ""'), ["", "baa"], ["ab"]),
    "left recursion in Lark": (Lark('start: start "a" | "a"'), ["aaa"], ["b"]),
    "a circle": (Ebnf('root ::= ("" | root)* "x"*'), ["", "xx"], ["a"]),
    "ambiguity": (Ebnf('root ::= root root | "a" | ""'), ["", "a" * 30], ["b"]),
    "unreachable rules": (Ebnf('root ::= "a"\nx ::= "b" x\ny ::= y'), ["a"], ["b"]),
    "nested groups": (Ebnf(f"root ::= {'(' * 90}'a'{'{1,9})' * 90}".replace("'", '"')), ["a", "aaa"], [""]),
    "NUL in a grammar": (Ebnf('root ::= "a\0" [\0-\x01]'), ["a\0\1"], ["a"]),
    "choices that are prefixes": (Choices(("a", "ab", "abc", "a")), ["a", "ab", "abc"], ["", "abcd"]),
    "an empty choice": (Choices(("", "a")), ["", "a"], ["b"]),
    "50,000 choices": (Choices(tuple(f"choice {i}" for i in range(50_000))), ["choice 49999"], ["choice 50000"]),
    "long choices": (Choices(("x" * 2_000, "x" * 2_001)), ["x" * 2_001], ["x" * 2_002]),
    "a constant of 90,000 characters": ({"const": "x" * 90_000}, [], ['"x"']),
    "a long choice beside a short one": (Choices(("x" * 1_000_000, "b")), ["b"], ["x"]),
    "numbers of 400 digits": ({"minimum": -(10**400), "maximum": 10**320}, ["1"], ["2" * 322]),
    "a constant of 400 digits": ({"enum": [10**400, 1]}, ["1", "1" + "0" * 400], ["2"]),
    "the smallest float": ({"minimum": 5e-324, "maximum": 1e-300}, [], ["1"]),
    "a reference into a list of items": ({"items": [{"type": "null"}, {"$ref": "#/items/0"}]}, ["[null, null]"], ["[null, 1]"]),
    "cases of many letters": (Regex("(?i)" + "".join(map(chr, range(0x1E00, 0x1EFF, 2))) + "|K"), ["k", "\u212a"], ["l"]),
    "alternatives without an end": (Regex("a|" * 10_000), ["", "a"], ["b"]),
    "900 brackets": (Regex("[" * 900 + "]" * 900), ["[" + "]" * 899], ["[", "]"]),
    "a chain of rules": (
        Ebnf("\n".join(["root ::= r0", *(f"r{i} ::= r{i + 1}" for i in range(5_000)), 'r5000 ::= "a"'])),
        ["a"],
        [""],
    ),
    "forced text in many ways": (Regex("(a|aa|aaa)*a{10000}"), [], ["", "a" * 100, "b"]),
    "forced text after many counts": (Regex("a{0,1000}" * 50 + "a{5000}"), [], ["", "a" * 100, "b"]),
    "forced text in the schema": ({"type": "string", "pattern": "^(a|aa)*a{9000}$"}, [], ['"a"', '"b"']),
    "empty repeats": (Regex("((a*)*){,}"), ["", "aa"], ["b"]),
    "names of every kind": ({"type": "object", "patternProperties": {rf"^\p{{{c}}}": {"const": c} for c in ("Lu", "Ll", "Nd", "P")}},
                            ['{"A": "Lu", "a": "Ll"}'], ['{"A": "Ll"}']),
    "members counted": ({"type": "object", "properties": {f"p{i}": {} for i in range(40)}, "additionalProperties": False,
                         "minProperties": 3, "maxProperties": 5}, ['{"p0": 1, "p1": 1, "p2": 1}'], ['{"p0": 1}']),
}  # fmt: skip


def alternatives(count):
    either = [
        {"anyOf": [{"required": [f"p{i}", "both"]}, {"required": [f"q{i}"]}]} for i in range(count)
    ]
    return {"type": "object", "allOf": either}


REFUSED = {
    "contradiction": ({"type": "string", "allOf": [{"type": "integer"}]}, "contradicts itself"),
    "contradiction below": (
        {
            "type": "object",
            "properties": {"a": {"enum": ["x"], "pattern": "^y"}},
            "required": ["a"],
        },
        "contradicts itself",
    ),
    "nothing finite": (
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        "contradicts itself",
    ),
    "exponential oneOf": (
        chain(25, lambda s: {"oneOf": [s, s]}, {"type": "integer"}),
        "contradicts itself",
    ),
    "itself": ({"$ref": "#"}, "refers to itself without an end"),
    "not itself": ({"not": {"$ref": "#"}}, "refers to itself without an end"),
    "each other": (
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        "refers to itself without an end",
    ),
    "30,000 properties": (
        {"properties": {f"p{i}": {"type": "integer"} for i in range(30_000)}},
        "too large",
    ),
    "alternatives that multiply": (alternatives(20), "alternatives multiply"),
    "patterns of names that multiply": (
        {"type": "object", "patternProperties": {f"a{i}.*b{i}": {"const": i} for i in range(12)}},
        "alternatives multiply|too complex|too many overlapping",
    ),
    "a lone surrogate": ({"const": "\ud800"}, "lone surrogate"),
    "a grammar without a text": (Ebnf('root ::= "a" root'), "contradicts itself"),
    "exponential rules": (
        Ebnf(
            "\n".join(
                [*(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(40)), 'r40 ::= "a"', "root ::= r0"]
            )
        ),
        "nested too deeply|more than",
    ),
    "a hundred million letters": (Regex("(a{10000}){10000}"), "more than 100,000 characters"),
    "a very long regex": (Regex("a" * 50_001), "the limit is 50,000"),
    "classes that are all different": (
        Regex("".join(rf"[\w{chr(0x2200 + i)}]" for i in range(2_000))),
        "more than 1,000,000 ranges",
    ),
    "and so in a grammar": (
        Lark("start: " + " ".join(rf"/[\w{chr(0x2200 + i)}]/" for i in range(2_000))),
        "more than 1,000,000 ranges",
    ),
    "lookaheads in a row": (Regex("(?=.*a).*" * 2_000), "nested too deeply"),
    "deep groups": (Regex("(" * 200 + ")" * 200), "nest deeper than 100"),
    "constraints in constraints": (None, "nested too deeply"),
    "no choice": (Choices(()), "contradicts itself"),
    "a choice that is half a character": (Choices(("\udc00",)), "lone surrogate"),
    "a very long grammar": (Ebnf('root ::= "' + "a" * 500_000 + '"'), "the limit is 500,000"),
    "fewer than no times": (Repeated(Regex("a"), -1), "not possible"),
    "nothing to choose from": (OneOf(()), "contradicts itself"),
    "a constant of a megabyte": ({"const": "x" * 1_000_000}, "more than 100,000 characters"),
    "an enum of megabytes": (
        {"enum": ["x" * 500_000, "y" * 500_000]},
        "more than 100,000 characters",
    ),
    "a choice of a megabyte": (Choices(("x" * 1_000_000,)), "more than 100,000 characters"),
    "a very long minimum": ({"minLength": 200_000}, "minLength goes up to 100,000"),
    "900 groups": (Regex("(" * 900 + ")" * 900), "nest deeper than 100"),
    "a count of 5,000 digits": (Ebnf('root ::= "a"{' + "9" * 5_000 + "}"), "counts up to 10,000"),
    "an address that is none": ({"$id": "http://[::1", "$ref": "x"}, "is no reference"),
    "an index of 5,000 digits": (
        {"$ref": "#/enum/" + "9" * 5_000, "enum": [1]},
        "leads to nothing",
    ),
}

# Texts that can be read in more ways with each character: the work of the next one grows with the
# square of that.
AMBIGUOUS = {
    "groups that may be empty": (
        'root ::= ((x* "cab"{1,2} x){1,2} | "b"{2} [^a]{1,2}) x root{2} | root? ""{1,2}\n'
        'x ::= ([^a]+ x "c"* | "c"? x) (y+)* | ""{2}\ny ::= [ab]+ | "ab"{2}',
        "1" * 400,
    ),
    "repeats of repeats": (
        'root ::= y+ | x ("b" x* | "a"{1,2} | x y?)\n'
        'x ::= "a" | "" x .| (([^a]{1,2} | [^a] x?)* ("b"+ "c"{2} "a"* | "a" ""{1,2} [ab]+)+ ("b" root+) | "ab"{1,2})+ x\n'
        'y ::= "cab"',
        "ab" * 200,
    ),
    "rules in one another": (
        'root ::= ((x{1,2} | [^a]+ x x+ | "ab" x{1,2} "b"){2} ""+ | ("bc"{1,2})*)* [^a] root"ab"{1,2} | x* "cab"{2} | '
        '"c"+ (x [ab] (x | ""+)? | x*)*\n'
        'x ::= "c"? y{2} (x "b"*) | ("a" "bc"{1,2} | [^a]? [^a]* | "b"{1,2} (root* | x)+){2} ""? "a"*\n'
        'y ::= ((""{2} root{1,2} | [ab]{2})+ root | y | y+){2}',
        "ab" * 200,
    ),
    "itself three times": ('root ::= root root root | root root | "a" | ""', "a" * 1_000),
}


def deep(count, opening="[", closing="]"):
    return opening * count + closing * count


# What stands for no constraint at all, and is refused where it is written.
BROKEN = {
    "a schema of 10,000 levels": (lambda: g.json_schema(deep(10_000, '{"not":', "}").replace("}", "{}}", 1)), "too deeply"),
    "a constant of 10,000 levels": (lambda: g.json_schema(f'{{"const": {deep(10_000)}}}'), "too deeply"),
    "a number of 5,000 digits": (lambda: g.json_schema(f'{{"const": {"1" * 5_000}}}'), "not JSON"),
    "no number at all": (lambda: g.json_schema('{"const": 1e400, "minimum": -Infinity}'), "no number"),
    "a circle of Python's": (lambda: g.json_schema(circle()), "not a JSON document"),
    "no pattern": (lambda: Regex(None), "`pattern` must be a string"),  # type: ignore[arg-type]  # wrong on purpose
    "no grammar": (lambda: g.Grammar(None), "is not a text"),  # type: ignore[arg-type]  # wrong on purpose
    "a list of numbers": (lambda: Choices([1, 2]), "not a list of strings"),  # type: ignore[arg-type]  # wrong on purpose
    "nothing in order": (lambda: InOrder(None), "`parts`"),  # type: ignore[arg-type]  # wrong on purpose
    "texts in order": (lambda: InOrder(("a", Regex("b"))), "not a constraint"),  # type: ignore[arg-type]  # wrong on purpose
    "counts that are none": (lambda: Repeated(Regex("a"), 1.5), "whole number"),  # type: ignore[arg-type]  # wrong on purpose
    "a type that pydantic refuses": (lambda: g.check(Annotated[str, Field(pattern="(")]), "can't be generated"),
}  # fmt: skip


def circle():
    schema = {}
    schema["not"] = schema
    return schema
