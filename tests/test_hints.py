"""What the hints of errors advise is there: names of the package, arguments, and flags of commands.

tests/mistakes.toml has mistakes whose advice is carried out.
"""

import ast
import re
from functools import cache
from pathlib import Path

import sglang_lite as sgl
from sglang_lite.lang.state import ProgramState

PACKAGE = Path(__file__).parents[1] / "sglang_lite"
OWNERS = {"engine": sgl.Engine, "Engine": sgl.Engine, "state": ProgramState, "s": ProgramState}
FOREIGN = {  # not of this package
    "--install": "of wsl",
    "--rollout-top-p": "of slime",
    "--help": "of every command, by argparse",
    "project=": "of Vertex AI's client, which takes what is left over",
}


def written(node):
    """Text of a hint, with {} for what is filled in, and with every alternative of a choice; None
    if it is computed.
    """
    match node:
        case ast.Constant(value=str() as text):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in parts)
        case ast.BinOp(left=left, right=right):
            return f"{written(left) or ''}{written(right) or ''}"
        case ast.IfExp(body=body, orelse=other):
            return f"{written(body) or ''} | {written(other) or ''}"
    return None


@cache
def trees():
    return {file: ast.parse(file.read_text()) for file in PACKAGE.rglob("*.py")}


def hints(found):
    """Hints by the place where they are."""
    return {
        f"{file.relative_to(PACKAGE)}:{keyword.value.lineno}": text
        for file, tree in found.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "hint" and (text := written(keyword.value))
    }


def arguments(found):
    """Names of all arguments and fields, and all flags."""
    names, flags = set(), set()
    for file, tree in found.items():
        flags |= set(re.findall(r'"(--[a-z][a-z0-9-]+)"', file.read_text()))
        for node in ast.walk(tree):
            if isinstance(node, ast.arguments):
                names |= {each.arg for each in (*node.posonlyargs, *node.args, *node.kwonlyargs)}
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
    return names, flags


def missing(hint, names, flags):
    """What a hint names and nobody has."""
    found = []
    for whole, name, member in re.findall(r"\b(sgl\.(\w+)(?:\.(\w+))?)", hint):
        owner = getattr(sgl, name, None)
        if owner is None or (member and not hasattr(owner, member)):
            found.append(whole)
    for owner, name in re.findall(r"`(\w+)\.(\w+)", hint):
        if owner in OWNERS and not hasattr(OWNERS[owner], name):
            found.append(f"{owner}.{name}")
    found += [
        f"{name}="
        for name in re.findall(r"(?<![\w.\-])([a-z_]\w*)=(?!=)", hint)
        if name not in names
    ]
    found += [
        flag for flag in re.findall(r"--[a-z][a-z0-9-]+", hint)
        if flag not in flags and flag[2:].replace("-", "_") not in names
    ]  # fmt: skip
    return [each for each in found if each not in FOREIGN]


def test_what_hints_name_is_there():
    found = trees()
    all_hints = hints(found)
    assert len(all_hints) >= 700
    names, flags = arguments(found)
    assert {
        place: wrong for place, hint in all_hints.items() if (wrong := missing(hint, names, flags))
    } == {}


def test_a_hint_that_names_what_nobody_has_is_found():
    assert missing("Give sgl.Engin(…) or sgl.Engine.stop(), colour=1, --blue, `s.textt()`.", {"color"}, {"--red"}) == [
        "sgl.Engin", "sgl.Engine.stop", "s.textt", "colour=", "--blue",
    ]  # fmt: skip
    assert missing("Give color=1, --red or sgl.Engine().", {"color"}, {"--red"}) == []
