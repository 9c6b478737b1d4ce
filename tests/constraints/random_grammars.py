"""Random context-free grammars over a few letters, in GBNF."""

RULES = ("root", "x", "y")


def grammar(random):
    return "\n".join(f"{name} ::= {_options(random, 0)}" for name in RULES)


def _options(random, depth):
    return " | ".join(_sequence(random, depth) for _ in range(random.choice([1, 2, 2, 3])))


def _sequence(random, depth):
    return " ".join(_item(random, depth) for _ in range(random.choice([1, 1, 2, 2, 3]))) or '""'


def _item(random, depth):
    item = random.choice(
        [
            *['"a"', '"b"', '"ab"', '"bc"', '"cab"', '""', "[ab]", "[^a]", "([b-c]+)", '"c"'],
            *RULES,
            *RULES[1:],
        ]
    )
    if depth < 2 and random.random() < 0.2:
        item = f"({_options(random, depth + 1)})"
    return item + random.choice(["", "", "", "", "*", "?", "+", "{2}", "{1,2}"])
