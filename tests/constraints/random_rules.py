"""Random rules over a few letters, and how Lark and GBNF write them."""

NAMES = ("start", "x", "y", "z")


def rules(random):
    """Alternatives of each rule, each a list of items (kind, what, least, most); `most` None is
    without end. A rule is back at itself only beside a text, as the `lark` package does not end on
    circles.
    """
    return {
        name: [_sequence(random, 0, NAMES[i + 1 :]) for _ in range(random.choice([1, 2, 2, 3]))]
        for i, name in enumerate(NAMES)
    }


def _sequence(random, depth, later):
    texts = [_counted(random, depth, *_text(random)) for _ in range(random.choice([0, 1, 1, 1, 2]))]
    names = NAMES[1:] if any(least for *_, least, _ in texts) else later
    items = [*texts, *(_other(random, depth, names) for _ in range(random.choice([0, 0, 1, 1, 2])))]
    random.shuffle(items)
    return [item for item in items if item is not None]


def _text(random):
    if random.random() < 0.25:
        return "class", random.choice(["a", "ab", "bc", "^a", "a-b"])
    return "text", random.choice(["a", "b", "c", "ab", "bc", "cab"])


def _other(random, depth, names):
    if depth == 0 and random.random() < 0.3:
        options = [
            _sequence(random, 1, names) or [_counted(random, 1, *_text(random))] for _ in range(2)
        ]
        return _counted(random, 0, "group", options)
    return _counted(random, depth, "rule", random.choice(names)) if names else None


def _counted(random, depth, kind, what):
    """Item with a sign; none inside a group, as the `lark` package writes out every combination of
    signs.
    """
    counts = [(1, 1)] * 8 + [(0, 1), (0, None), (1, None), (2, 2), (1, 3)]
    return kind, what, *random.choice(counts if depth == 0 else counts[:1])


_SIGNS = {(1, 1): "", (0, 1): "?", (0, None): "*", (1, None): "+"}


def in_lark(rules, random):
    """Rules in Lark's syntax, with marks, aliases, comments and blanks where they may be."""
    blank = lambda *some: random.choice(["", "", *some])  # noqa: E731
    lines = []
    for name, options in rules.items():
        mark = blank("?", "!", "?!", "!?")
        bar = random.choice([" | ", "\n   | ", "  // one\n\n   | "])
        body = bar.join(
            _lark_sequence(option, random) + blank(" -> made", "->made") for option in options
        )
        lines.append(
            f"{mark}{name}{blank('.2')}{blank(' ')}:{blank(' ')}{body}{blank('  // end', ' # end')}"
        )
        lines += random.choice([[], [], ["", "// between"], [""]])
    return "\n".join(lines) + blank("\n", "\n\n")


def _lark_sequence(items, random):
    return " ".join(_lark_item(item, random) for item in items)


def _lark_item(item, random):
    kind, what, least, most = item
    match kind:
        case "group":
            options = random.choice([" | ", "\n  | "]).join(
                _lark_sequence(option, random) for option in what
            )
            if (least, most) == (0, 1) and random.random() < 0.5:
                return f"[{options}]"
            written = f"({options})"
        case "class":
            written = f"/[{what}]/"
        case "rule":
            written = what
        case _:
            written = random.choice([f'"{what}"', f'"{what}"', f"/{what}/"])
    count = f"~{least}" if least == most else f"~{least}..{most}"
    return written + _SIGNS.get((least, most), count)


def in_gbnf(rules, random):
    lines = []
    for name, options in rules.items():
        body = random.choice([" | ", " |\n    "]).join(
            _gbnf_sequence(option) or '""' for option in options
        )
        lines.append(
            f"{'root' if name == 'start' else name} ::= {body}{random.choice(['', '', ' # end'])}"
        )
    return "\n".join(lines) + "\n"


def _gbnf_sequence(items):
    return " ".join(_gbnf_item(*item) for item in items)


def _gbnf_item(kind, what, least, most):
    match kind:
        case "group":
            written = "(" + " | ".join(_gbnf_sequence(option) for option in what) + ")"
        case "class":
            written = f"[{what}]"
        case "rule":
            written = what
        case _:
            written = f'"{what}"' if (least, most) == (1, 1) else f'("{what}")'
    return written + _SIGNS.get((least, most), f"{{{least},{most}}}")
