"""Random schemas and values that have something to do with each other."""

_NAMES = ["a", "b", "c", "aa"]
_STRINGS = ["", "a", "b", "ab", "aab", "é", 'q"\\', "2024-02-29", "\n"]
_NUMBERS = [0, 1, 2, 3, 5, -1, -4, 10, 0.5, 1.5, -2.5, 2.25, 100]
_PATTERNS = ["^a", "b$", "^a+b?$", "a|^b$", "[^a]", "^.{0,2}$", "^$"]


def value(random, depth=0):
    kind = random.randrange(7 if depth < 3 else 5)
    match kind:
        case 0:
            return None
        case 1:
            return random.random() < 0.5
        case 2 | 3:
            return random.choice(_NUMBERS)
        case 4:
            return random.choice(_STRINGS)
        case 5:
            return [value(random, depth + 1) for _ in range(random.randrange(4))]
    return {name: value(random, depth + 1) for name in random.sample(_NAMES, random.randrange(4))}


def schema(random, depth=0):
    """A schema of a few keywords."""
    if random.random() < 0.08:
        return random.random() < 0.7
    found = {}
    for _ in range(random.choice([1, 1, 2, 2, 3, 4])):
        keyword = random.choice(_SCALAR if depth > 2 else [*_SCALAR, *_NESTED, *_NESTED])
        found |= keyword(random, depth + 1)
    if random.random() < 0.4:
        kinds = [
            "null",
            "boolean",
            "integer",
            "number",
            "string",
            "array",
            "object",
            "object",
            "array",
        ]
        found["type"] = (
            random.choice(kinds) if random.random() < 0.7 else random.sample(sorted(set(kinds)), 2)
        )
    return found


def _below(random, depth):
    return schema(random, depth)


def _some(random, depth, most=3):
    return [schema(random, depth) for _ in range(random.randint(1, most))]


_SCALAR = [
    lambda r, d: {"minimum": r.choice(_NUMBERS)},
    lambda r, d: {"maximum": r.choice(_NUMBERS)},
    lambda r, d: {"exclusiveMinimum": r.choice(_NUMBERS)},
    lambda r, d: {"exclusiveMaximum": r.choice(_NUMBERS)},
    lambda r, d: {"multipleOf": r.choice([1, 2, 3, 0.5, 0.01, 5])},
    lambda r, d: {"minLength": r.randrange(4)},
    lambda r, d: {"maxLength": r.randrange(4)},
    lambda r, d: {"pattern": r.choice(_PATTERNS)},
    lambda r, d: {"format": "date"},
    lambda r, d: {"const": value(r, 1)},
    lambda r, d: {"enum": [value(r, 1) for _ in range(r.randint(1, 4))]},
    lambda r, d: {
        "type": r.choice(["null", "boolean", "integer", "number", "string", "array", "object"])
    },
    lambda r, d: {"required": r.sample(_NAMES, r.randint(1, 2))},
    lambda r, d: {"minItems": r.randrange(3)},
    lambda r, d: {"maxItems": r.randrange(4)},
    lambda r, d: {"minProperties": r.randrange(3)},
    lambda r, d: {"maxProperties": r.randrange(4)},
    lambda r, d: {"dependentRequired": {r.choice(_NAMES): r.sample(_NAMES, r.randint(1, 2))}},
    lambda r, d: {"uniqueItems": True},
]
_NESTED = [
    lambda r, d: {"properties": {name: _below(r, d) for name in r.sample(_NAMES, r.randint(1, 3))}},
    lambda r, d: {"properties": {name: _below(r, d) for name in r.sample(_NAMES, r.randint(1, 3))}},
    lambda r, d: {
        "patternProperties": {p: _below(r, d) for p in r.sample(_PATTERNS, r.randint(1, 2))}
    },
    lambda r, d: {"additionalProperties": _below(r, d)},
    lambda r, d: {"propertyNames": _below(r, d)},
    lambda r, d: {"items": _below(r, d)},
    lambda r, d: {"prefixItems": _some(r, d)},
    lambda r, d: {"contains": _below(r, d)},
    lambda r, d: {"contains": _below(r, d), "minContains": r.randrange(3)},
    lambda r, d: {"contains": _below(r, d), "maxContains": r.randrange(1, 3)},
    lambda r, d: {"allOf": _some(r, d)},
    lambda r, d: {"anyOf": _some(r, d)},
    lambda r, d: {"oneOf": _some(r, d)},
    lambda r, d: {"not": _below(r, d)},
    lambda r, d: {"if": _below(r, d), "then": _below(r, d), "else": _below(r, d)},
    lambda r, d: {"dependentSchemas": {r.choice(_NAMES): _below(r, d)}},
    lambda r, d: {"unevaluatedProperties": _below(r, d) if r.random() < 0.5 else False},
    lambda r, d: {"unevaluatedItems": _below(r, d) if r.random() < 0.5 else False},
    lambda r, d: {"$ref": "#"} if r.random() < 0.3 else {"properties": {"a": {"$ref": "#"}}},
]
