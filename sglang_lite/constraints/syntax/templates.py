"""Templates of Lark grammars: rules with parameters, expanded for each use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from sglang_lite.constraints.formal.nodes import Node, Ref, mapped
from sglang_lite.constraints.syntax.scanner import Scanner

_MAX_INSTANCES = 1_000  # maximum number of template instances


class Templates:
    """Templates of a grammar and their uses. Each use is a reference to a rule that `instances` creates."""

    def __init__(self, scanner: Scanner) -> None:
        self._scanner = scanner
        self._bodies: dict[str, tuple[tuple[str, ...], Node]] = {}
        self._names: dict[tuple[str, tuple[Node, ...]], str] = {}  # name of the rule for each use
        self._arguments: dict[Node, str] = {}  # rule names of arguments that are not references, so that keys stay flat
        self._bodies_of: dict[str, Node] = {}
        self._uses: dict[str, tuple[str, tuple[Node, ...], int]] = {}  # template, arguments and offset, by rule

    def __contains__(self, name: object) -> bool:
        return name in self._bodies

    def define(self, name: str, parameters: str, body: Node, at: int) -> None:
        """Adds a template. Raises ConstraintError if its parameters are not distinct names."""
        names = tuple(each.strip() for each in parameters.split(","))
        if len(set(names)) < len(names) or not all(each.replace("-", "_").isidentifier() for each in names):
            self._scanner.fail(f"the parameters of {name} must be distinct names", at)
        self._bodies[name] = names, body

    def use(self, name: str, arguments: Sequence[Node], at: int) -> Ref:
        """Reference to the rule of a template with these arguments."""
        key = name, tuple(map(self._as_name, arguments))
        if key not in self._names:
            if len(self._names) == _MAX_INSTANCES:
                self._scanner.fail(f"templates make more than {_MAX_INSTANCES:,} rules", at)
            self._names[key] = rule = f"%{name} {len(self._names)}"
            self._uses[rule] = *key, at
        return Ref(self._names[key])

    def _as_name(self, node: Node) -> Ref:
        if isinstance(node, Ref):
            return node
        if node not in self._arguments:
            self._arguments[node] = name = f"%argument {len(self._arguments)}"
            self._bodies_of[name] = node
        return Ref(self._arguments[node])

    def instances(self, rules: Mapping[str, Node]) -> dict[str, Node]:
        """Rules of all uses, by name.

        Args:
            rules: rules of the grammar, which use templates only through `use`.

        Raises:
            ConstraintError: a template is not defined or takes a different number of arguments, or templates make too
                many rules.
        """
        expanded: dict[str, Node] = {}
        waiting = [*(name for body in rules.values() for name in self._used(body))]
        while waiting:
            rule = waiting.pop()
            if rule in expanded:
                continue
            if rule in self._bodies_of:
                expanded[rule] = self._bodies_of[rule]
                waiting += self._used(expanded[rule])
                continue
            name, arguments, at = self._uses[rule]
            if name not in self._bodies:
                self._scanner.fail(f"there is no template {name!r}", at)
            parameters, body = self._bodies[name]
            if len(parameters) != len(arguments):
                self._scanner.fail(f"{name} takes {len(parameters)} arguments, not {len(arguments)}", at)
            expanded[rule] = self._filled(body, dict(zip(parameters, arguments)))
            waiting += self._used(expanded[rule])
        return expanded

    def _used(self, node: Node) -> list[str]:
        found: list[str] = []

        def look(each: Node) -> Node:
            if isinstance(each, Ref):
                found.extend([each.name] if each.name in self._uses or each.name in self._bodies_of else [])
                return each
            return mapped(each, look)

        look(node)
        return found

    def _filled(self, node: Node, arguments: Mapping[str, Node]) -> Node:
        """Body with parameters replaced by arguments, also in the templates that it uses."""
        match node:
            case Ref(name) if name in arguments:
                return arguments[name]
            case Ref(name) if name in self._bodies_of:
                return self._as_name(self._filled(self._bodies_of[name], arguments))
            case Ref(name) if name in self._uses:
                template, template_arguments, at = self._uses[name]
                return self.use(template, [self._filled(each, arguments) for each in template_arguments], at)
        return mapped(node, partial(self._filled, arguments=arguments))
