"""The table of SGLang's ServerArgs in docs/compatibility.md: `python -m
tests.server.sglang.server_args_table` prints it.
"""

from sglang_lite.server.sglang.server_args import server_args


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
