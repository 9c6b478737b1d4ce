"""Schemas, regexes and grammars with something changed at random, for which nobody wrote code: most
are broken.
"""

import json
import re

from sglang_lite.constraints.json_schema.applicators import APPLICATORS
from sglang_lite.constraints.json_schema.keywords import READERS
from sglang_lite.protocol import Ebnf, JsonSchema, Lark, Regex
from tests.constraints import random_grammars, random_schemas
from tests.constraints.suites import maskbench, official_groups

SMALL = 2_000  # characters

_KEYWORDS = sorted({
    *READERS, *APPLICATORS, "then", "else", "minContains", "maxContains", "unevaluatedItems", "unevaluatedProperties",
    "$id", "$anchor", "$schema", "$defs", "definitions", "$dynamicAnchor", "$recursiveAnchor", "title",
})  # fmt: skip
_VALUES = [
    None, True, False, 0, -1, 1, 3, 0.1, 1e308, -1e-308, 5e-324, 2**53, 10**320, 10**400, "", "a", "é\u2028😀", "\ud800",
    "a" * 3_000, "#", "#/", "#/$defs/a", "#a", "x:/y#", "http://[::1", "(", "^a*$", "(a|a)*b{,3}", [], {}, [[]], [{}], ["a"],
    [1, 1.0, True], {"a": {}}, {"$ref": "#"}, {"not": {}}, {"type": "object"}, {"const": {"a": [1]}}, "date", "hostname",
]  # fmt: skip
_PIECES = [
    *r"()[]{}|*+?\^$.-/:=~&%<>,;'#" + '"\n\0é', r"\07", r"\400", r"\x", r"\p{L}", r"\u{1F600}", "(?i)", "(?:", "(?P<a>",
    "{,}", "{2,1}", "{9999}", "[^", "[z-a]", "(?=", "::=", "root", "start", "%json {}", "%ignore", "%import common.INT",
    '"a".."b"', "a" * 300, "(" * 120, "{1,99}" * 3, "9" * 4_400, "😀", "\ud800",
]  # fmt: skip
_PATTERNS = [
    r"\d+\.\d{2}", r"(?i)[\w.]+@\w+\.(com|org)", r"(?P<y>\d{4})-(?P<m>[01]\d)", r"[^\x00-\x1f\"\\]{0,20}", r"a(b|c)*d?e{2,}",
    r"(?s:.)x(?-i:y)", r"^(a|b$)|^c", "", r"\N{BULLET}?[\101-\132]+", r"(x{2,3}y){,4}",
]  # fmt: skip
_LARKS = [
    'start: "a" (WORD | NUM)* ("," WORD)~1..3\nWORD: /[a-z]+/\nNUM: "-"? INT\n%import common.INT\n%ignore " "',
    'start: x\nx: "(" x ")" | A & ~"ab" | %json {"type": "integer"}\nA: "a".."c"+',
]


def schemas():
    """Schemas to mutate."""
    real = (schema for _, schema, _ in maskbench(7))
    official = (
        schema for draft in ("draft2020-12", "draft7") for _, schema, _, _ in official_groups(draft)
    )
    return [schema for schema in (*real, *official) if len(json.dumps(schema)) < SMALL]


def mutated(random, schemas):
    """A constraint that was changed in a few places; it need not be one any more."""
    kind = random.randrange(8)
    if kind < 5:
        schema = (
            random_schemas.schema(random)
            if kind == 0
            else json.loads(json.dumps(random.choice(schemas)))
        )
        for _ in range(random.randint(1, 4)):
            schema = _changed(random, schema)
        text = json.dumps(schema, ensure_ascii=random.random() < 0.5)
        text = _edited(random, text) if random.random() < 0.1 else text
        return JsonSchema(text, random.choice(["strict", "best_effort"]))
    text = (
        random.choice(_PATTERNS)
        if kind == 5
        else random_grammars.grammar(random)
        if kind == 6
        else random.choice(_LARKS)
    )
    for _ in range(random.randint(1, 4)):
        text = _edited(random, text)
    return (Regex, Ebnf, Lark)[kind - 5](text)


def _changed(random, value):
    """JSON with one value replaced, renamed, repeated or nested."""
    if isinstance(value, dict) and value and random.random() < 0.8:
        name = random.choice(list(value))
        match random.randrange(5):
            case 0:
                return {
                    **value,
                    random.choice(_KEYWORDS): random.choice(
                        [value[name], *random.sample(_VALUES, 3)]
                    ),
                }
            case 1:
                return {
                    random.choice(_KEYWORDS) if each == name else each: below
                    for each, below in value.items()
                }
        return {**value, name: _changed(random, value[name])}
    if isinstance(value, list) and value and random.random() < 0.8:
        i = random.randrange(len(value))
        return [*value[:i], _changed(random, value[i]), *value[i + (random.random() < 0.8) :]]
    nested = value
    for _ in range(random.choice([1, 2, 30, 220])):
        nested = random.choice(
            [{"not": nested}, {"items": nested}, {"properties": {"a": nested}}, [nested]]
        )
    return random.choice([*random.sample(_VALUES, 4), random_schemas.schema(random), nested])


def _edited(random, text):
    start, end = sorted(random.randrange(len(text) + 1) for _ in range(2))
    piece = random.choice([*_PIECES, text[start:end]])
    return random.choice(
        [
            text[:start] + piece + text[start:],
            text[:start] + piece + text[end:],
            text[:start] + text[end:],
        ]
    )


def printable(constraint):
    """Constraint as text for messages."""
    return re.sub(r"(.)\1{40,}", r"\1…", repr(constraint))[:2_000]
