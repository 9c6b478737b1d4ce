"""Random regexes in the part of Python's dialect that we take, and texts that have something to do
with them.
"""

_PIECES = [
    "a",
    "b",
    "é",
    "-",
    "1",
    "_",
    r"\.",
    r"\d",
    r"\w",
    r"\s",
    r"\D",
    r"\W",
    r"\S",
    ".",
    "(?s:.)",
    r"\x62",
    r"\u00e9",
    r"\n",
]
_IN_CLASS = ["a", "b", "a-c", "é", "0-9", r"\d", r"\w", r"\s", r"\-", r"\]", "_", r"\W"]
_SIGNS = ["", "", "", "", "?", "*", "+", "??", "*?", "+?", "{2}", "{1,2}", "{,2}", "{1,}", "{0,1}?"]
_TEXTS = ["a", "b", "A", "é", "É", "1", "-", "_", ".", " ", "\n", "ſ", "s", "٣", "c"]


def pattern(random):
    return (
        random.choice(["", "", "", "(?i)", "^", r"\A"])
        + _options(random, 0)
        + random.choice(["", "", "", "$", r"\Z"])
    )


def _options(random, depth):
    return "|".join(_sequence(random, depth) for _ in range(random.choice([1, 1, 2, 3])))


def _sequence(random, depth):
    """Atoms; none only outside of groups, as the package `regex` reads `(?i:)?` wrongly."""
    return "".join(
        _atom(random, depth) + random.choice(_SIGNS)
        for _ in range(random.choice([depth > 0, 1, 2, 2, 3]))
    )


def _atom(random, depth):
    if depth < 2 and random.random() < 0.25:
        return random.choice(["({})", "(?:{})", "(?i:{})"]).format(_options(random, depth + 1))
    if random.random() < 0.25:
        sign, parts = random.choice(["", "^"]), random.sample(_IN_CLASS, random.choice([1, 2, 3]))
        # the package `regex` reads `[^\w\W]`, which is empty, as any character
        if sign and r"\w" in parts:
            parts = [part for part in parts if part != r"\W"]
        return f"[{sign}{''.join(parts)}]"
    return random.choice(_PIECES)


def texts(random, pattern):
    letters = [*_TEXTS, *(letter for letter in pattern if letter.isalnum())]
    return [
        "",
        *(
            "".join(random.choices(letters, k=random.choice([1, 1, 2, 2, 3, 4, 6])))
            for _ in range(29)
        ),
    ]


_ASSERTIONS = [
    r"\b", r"\B", "^", "$", r"\A", r"\Z", "(?=a)", "(?!b)", "(?<=a)", "(?<!a)", r"(?<=\w)", "(?<!^)", r"(?<![b\n])",
    "(?=-|$)", "(?!a$)",
]  # fmt: skip
_PLAIN = ["a", "b", "1", "-", ".", "[ab]", "[^a]", r"\w", r"\W", r"\n", " ", "\n"]
_GROUPS = [
    "({})",
    "(?:{})",
    "(?>{})",
    "(?={})",
    "(?!{})",
    "(?i:{})",
    "(?a:{})",
    "(?x: {} #)\n)",
    "(?m:{})",
    "(?s:{})",
]
_REPEATS = [
    "",
    "",
    "",
    "?",
    "*",
    "+",
    "*?",
    "+?",
    "{2}",
    "{0,2}",
    "*+",
    "++",
    "?+",
    "{1,2}+",
    "(?#))*",
]


def pattern_with_assertions(random):
    """A pattern with anchors, lookaround, flags, atomic groups and possessive repeats; Python may
    refuse it.
    """
    flags = random.choice(["", "", "", "(?m)", "(?x)", "(?a)", "(?i)", "(?s)", "(?ms)"])
    return flags + _asserting_options(random, 0)


def _asserting_options(random, depth):
    return "|".join(_asserting_sequence(random, depth) for _ in range(random.choice([1, 1, 1, 2])))


def _asserting_sequence(random, depth):
    def atom():
        if depth < 2 and random.random() < 0.3:
            return random.choice(_GROUPS).format(_asserting_options(random, depth + 1))
        return random.choice(random.choice([_PLAIN, _ASSERTIONS]))

    return "".join(
        atom() + random.choice(_REPEATS) for _ in range(random.choice([1, 1, 2, 2, 3, 4]))
    )
