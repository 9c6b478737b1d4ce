"""Functions and classes of `kernels` that launch a kernel, by reading their files."""

import ast
from pathlib import Path

from sglang_lite.runtime import kernels


def launches(definition, private):
    """Tell whether a function launches a kernel (`kernel[grid](…)`), by itself or through a
    function of its file.
    """
    calls = [node.func for node in ast.walk(definition) if isinstance(node, ast.Call)]
    names = {call.id for call in calls if isinstance(call, ast.Name)}
    return any(
        isinstance(call, ast.Subscript) and isinstance(call.value, ast.Name) for call in calls
    ) or any(name in names and launches(inner, {}) for name, inner in private.items())


def public_launches():
    """By name, the module of each public function or class of `kernels` that launches a kernel."""
    found = {}
    for file in sorted(Path(kernels.__file__).parent.glob("*.py")):
        definitions = {
            node.name: node
            for node in ast.parse(file.read_text()).body
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
            and not any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
        }
        private = {name: node for name, node in definitions.items() if name.startswith("_")}
        for name in definitions.keys() - private.keys():
            if launches(definitions[name], private):
                found[name] = file.stem
    return found
