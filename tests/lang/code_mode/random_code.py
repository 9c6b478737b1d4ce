"""Random programs of code mode, made by walking types: most are valid, and a part has one mistake that
a checker should find. Shares nothing with the package but the tools' signatures.
"""

import random
from functools import partial

NAMES = ["a", "b", "c", "total", "out"]
CITIES = ["Oslo", "Rome", "Lima"]


class Tools:
    """Tools that record each call with its arguments, and raise for some of them."""

    def __init__(self):
        self.calls = []

    def functions(self):
        def size(city: str, scale: int = 1) -> int:
            self.calls.append(("size", city, scale))
            if city not in CITIES:
                raise KeyError(city)
            return len(city) * scale

        def near(city: str) -> list[str]:
            self.calls.append(("near", city))
            return [each for each in CITIES if each != city]

        def mean(values: list[float], digits: int) -> float:
            self.calls.append(("mean", tuple(values), digits))
            return round(sum(values) / max(len(values), 1), digits)

        def table(flag: bool) -> dict[str, int]:
            self.calls.append(("table", flag))
            return {city: i + flag for i, city in enumerate(CITIES)}

        return [size, near, mean, table]


class Maker:
    """Makes one program.

    Args:
        seed: seed of the choices.
        wrong: chance that an argument or name is wrong.
    """

    def __init__(self, seed, wrong=0.0):
        self.random = random.Random(seed)
        self.wrong = wrong
        self.types = {}

    def program(self):
        lines = self.block(0, self.random.randint(2, 5))
        kind = self.random.choice(["int", "str", "list", "float", "bool", "dict"])
        return "\n".join([*lines, f"return {self.expression(kind, 2)}"])

    def block(self, depth, count):
        lines = []
        for _ in range(count):
            lines += self.statement(depth)
        return lines

    def statement(self, depth):
        blank = "    " * depth
        kind = self.random.choice(["int", "str", "list", "float", "bool", "dict"])
        pick = self.random.random()
        if pick < 0.55 or depth == 2:
            value = self.expression(kind, 2)
            name = f"{self.random.choice(NAMES)}_{kind}"
            self.types[name] = kind
            return [f"{blank}{name} = {value}"]
        if pick < 0.65 and self.known("int"):
            sign = self.random.choice(["+=", "-=", "*="])
            return [f"{blank}{self.known('int')} {sign} {self.expression('int', 1)}"]
        if pick < 0.72 and self.known("list"):
            return [f"{blank}{self.known('list')}.append({self.expression('int', 1)})"]
        if pick < 0.86:
            return self.conditional(depth, blank)
        before = dict(self.types)
        loop = f"i{depth}_int"
        source = self.random.choice(
            [f"range({self.random.randint(0, 4)})", self.expression("list", 1)]
        )
        self.types[loop] = "int"
        body = self.block(depth + 1, self.random.randint(1, 2))
        self.types = before
        return [f"{blank}for {loop} in {source}:", *body]

    def conditional(self, depth, blank):
        before = dict(self.types)
        lines = [f"{blank}if {self.expression('bool', 2)}:", *self.block(depth + 1, 1)]
        self.types = dict(before)
        if self.random.random() < 0.5:
            lines += [f"{blank}else:", *self.block(depth + 1, 1)]
        self.types = before
        return lines

    def known(self, kind):
        names = [name for name, own in self.types.items() if own == kind]
        return self.random.choice(names) if names else None

    def expression(self, kind, depth):
        if self.random.random() < self.wrong:
            return self.mistake()
        name = self.known(kind)
        if name and self.random.random() < 0.35:
            return name
        return getattr(self, f"make_{kind}")(depth)

    def mistake(self):
        return self.random.choice(
            [
                "unknown",
                "size(1)",
                "size()",
                "near(town='Oslo')",
                "nowhere('x')",
                "mean('a', 1)",
                "size('Oslo', 'x')",
                "size('Oslo', 1, 2)",
                "table(1)",
                "mean([1.5], 1.5)",
                "near(None)",
                "size(city='Oslo', city2=3)",
            ]
        )

    def make_int(self, depth):
        sub = partial(self.expression, depth=depth - 1)
        if depth <= 0:
            return str(self.random.randint(0, 20))
        return self.random.choice(
            [
                lambda: (
                    f"({sub('int')} {self.random.choice(['+', '-', '*', '//', '%'])} {sub('int')})"
                ),
                lambda: f"len({sub('list')})",
                lambda: f"size({sub('str')}, {sub('int')})",
                lambda: f"size(city={sub('str')})",
                lambda: f"sum({sub('list')})",
                lambda: f"{sub('list')}[{self.random.randint(-2, 3)}]",
                lambda: f"table({sub('bool')})[{sub('str')}]",
                lambda: f"({sub('int')} if {sub('bool')} else {sub('int')})",
                lambda: f"max({sub('int')}, {sub('int')})",
                lambda: (
                    f"{self.random.choice(['min', 'max'])}({sub('list')}, key=lambda x: x % {self.random.randint(1, 4)})"
                ),
                lambda: f"{self.random.randint(0, 9)} ** {self.random.randint(0, 5)}",
            ]
        )()

    def make_float(self, depth):
        sub = partial(self.expression, depth=depth - 1)
        if depth <= 0:
            return f"{self.random.randint(0, 9)}.5"
        return self.random.choice(
            [
                lambda: f"({sub('float')} + {sub('int')})",
                lambda: f"({sub('int')} / {sub('int')})",
                lambda: f"mean([{sub('float')}, {sub('float')}], {self.random.randint(0, 3)})",
                lambda: f"round({sub('float')}, 1)",
                lambda: f"abs({sub('float')})",
            ]
        )()

    def make_str(self, depth):
        sub = partial(self.expression, depth=depth - 1)
        if depth <= 0:
            return repr(self.random.choice([*CITIES, "Rom", ""]))
        return self.random.choice(
            [
                lambda: f"({sub('str')} + {sub('str')})",
                lambda: f"str({sub('list')})",
                lambda: f"near({sub('str')})[{self.random.randint(-1, 2)}]",
                lambda: f"max(near({sub('str')}), key=size)",
                lambda: f"{sub('str')}.upper()",
                lambda: f"', '.join(near({sub('str')}))",
                lambda: f"f'{{{self.known('int') or 3}}}: {{{self.known('str') or 5}}}'",
                lambda: f"f'{{{self.known('float') or 0.5}:.2f}}'",
                lambda: f"{sub('str')}[{self.random.randint(0, 2)}:{self.random.randint(0, 4)}]",
            ]
        )()

    def make_list(self, depth):
        sub = partial(self.expression, depth=depth - 1)
        if depth <= 0:
            return f"[{self.random.randint(0, 9)}, {self.random.randint(0, 9)}]"
        return self.random.choice(
            [
                lambda: f"[{sub('int')}, {sub('int')}]",
                lambda: f"[x * {sub('int')} for x in {sub('list')} if x > {sub('int')}]",
                lambda: f"[size(x) for x in near({sub('str')})]",
                lambda: f"sorted({sub('list')})",
                lambda: (
                    f"sorted({sub('list')}, key=lambda x: -x * {sub('int')}, reverse={sub('bool')})"
                ),
                lambda: f"({sub('list')} + {sub('list')})",
                lambda: f"[v for k, v in table({sub('bool')}).items()]",
                lambda: f"({sub('list')} * {self.random.randint(0, 3)})",
                lambda: f"{sub('list')}[{self.random.randint(-1, 2)}:]",
            ]
        )()

    def make_bool(self, depth):
        sub = partial(self.expression, depth=depth - 1)
        if depth <= 0:
            return self.random.choice(["True", "False"])
        return self.random.choice(
            [
                lambda: f"({sub('int')} < {sub('int')})",
                lambda: f"({sub('str')} in near({sub('str')}))",
                lambda: f"({sub('list')} == {sub('list')})",
                lambda: f"({sub('bool')} and {sub('bool')})",
                lambda: f"(not {sub('bool')})",
                lambda: f"{sub('str')}.startswith({sub('str')})",
                lambda: f"(1 < {sub('int')} <= {sub('int')})",
            ]
        )()

    def make_dict(self, depth):
        sub = partial(self.expression, depth=depth - 1)
        if depth <= 0:
            return "{'k': 1}"
        return self.random.choice(
            [
                lambda: f"table({sub('bool')})",
                lambda: f"{{x: x + 1 for x in {sub('list')}}}",
                lambda: f"{{'n': {sub('int')}, 's': {sub('str')}}}",
            ]
        )()
