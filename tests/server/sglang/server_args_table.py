"""The table of SGLang's ServerArgs in docs/compatibility.md: `python -m
tests.server.sglang.server_args_table` prints it.
"""

import ast
import json
from pathlib import Path

from sglang_lite.server.sglang.server_args import server_args

WHEEL = Path(__file__).parent / "data" / "server_args_0.5.23.json"


def listed():
    """The fields that SGLang's wheel has: of each a list with its default, or an empty one."""
    return json.loads(WHEEL.read_text())


def read_package(folder):
    """The same, read from an unpacked wheel, without importing it."""
    found = {}
    for file in sorted((Path(folder) / "sglang/srt/arg_groups/fields").glob("*.py")):
        for each in ast.parse(file.read_text()).body:
            for line in each.body if isinstance(each, ast.ClassDef) else ():
                if isinstance(line, ast.AnnAssign):
                    found[line.target.id] = [] if line.value is None else [_default(line.value)]
    return found


def _default(node):
    if isinstance(node, ast.Call):  # msgspec.field(default_factory=list)
        assert ast.unparse(node).endswith("(default_factory=list)")
        return []
    # numbers are products
    return eval(compile(ast.Expression(node), "default", "eval"), {"__builtins__": {}})


def table():
    """The table, in Markdown."""
    args = server_args().values()
    lines = ["| honoured | here | default |", "|---|---|---|"]
    for arg in args:
        if arg.support in ("engine", "server"):
            of = "" if arg.support == "engine" else " (of `sglang-lite serve`)"
            default = "" if arg.required else f"`{arg.default!r}`"
            lines.append(f"| `{arg.name}` | `{arg.meaning}`{of} | {default} |")
    lines += ["", "| always so | why |", "|---|---|"]
    lines += [f"| `{arg.name}` | {arg.meaning} |" for arg in args if arg.support == "always"]
    lines += ["", "| always so on a server, neutral for an engine | why |", "|---|---|"]
    lines += [f"| `{arg.name}` | {arg.meaning} |" for arg in args if arg.support == "served"]
    lines += ["", "| neutral at the default, else refused | instead |", "|---|---|"]
    groups: dict[str, list[str]] = {}
    for arg in args:
        if arg.support == "neutral":
            groups.setdefault(arg.meaning, []).append(f"`{arg.name}={arg.default!r}`")
    lines += [f"| {', '.join(names)} | {use} |" for use, names in groups.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
