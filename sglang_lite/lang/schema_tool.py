"""A tool that is described by a JSON schema of its arguments, and not by a Python function's parameters."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from sglang_lite.constraints.json_schema.validator import violations
from sglang_lite.constraints.schema import json_schema
from sglang_lite.protocol import ConstraintError, ParameterError
from sglang_lite.protocol.anything import Json, UserValue

# Keywords by which a schema may allow members that `properties` does not name.
_ALLOW_MORE = (
    "additionalProperties", "patternProperties", "unevaluatedProperties", "$ref", "anyOf", "oneOf", "allOf", "if",
    "dependentSchemas", "$dynamicRef",
)  # fmt: skip


class SchemaTool:
    """Tool of `gen(tools=…)` and `use_tools`.

    Args:
        name: its name.
        description: text that describes it to the model.
        schema: JSON schema of the arguments, an object. Members that it does not name are refused, unless it says which
            are allowed.
        call: function of the arguments by name.

    Raises:
        ParameterError: the schema is not that of an object, or a model can't be held to it.
    """

    def __init__(
        self, name: str, description: str, schema: Mapping[str, Json], call: Callable[[dict[str, Json]], UserValue]
    ) -> None:
        own = {key: value for key, value in schema.items() if key != "$schema"}
        if own.get("type", "object") != "object":
            raise ParameterError("tools", f"{name}: its schema is not that of an object.")
        if own.keys().isdisjoint(_ALLOW_MORE) and {*own.get("required", ())} <= {*own.get("properties", ())}:
            own["additionalProperties"] = False
        self.__name__, self.__doc__ = name, description
        self.schema: Mapping[str, Json] = {"$id": f"tool:{name}", **own, "type": "object"}
        self._call = call
        try:
            self._constraint = json_schema(self.schema)
        except ConstraintError as error:
            problem = f"{name}: its schema can't be used: {error.message}"
            raise ParameterError("tools", problem, hint=error.hint) from error

    def __repr__(self) -> str:
        return f"SchemaTool({self.__name__!r})"

    def __call__(self, /, **arguments: Json) -> UserValue:
        return self._call(arguments)

    def validate_json(self, text: str) -> dict[str, Json]:
        """Arguments in a JSON text, checked against the schema.

        Raises:
            ValueError: they do not fit it.
        """
        value = json.loads(text)
        for violation in violations(self._constraint, value):
            raise ValueError(str(violation.message))
        assert isinstance(value, dict)
        return value

    @property
    def parameters(self) -> str:
        """Names and types of the parameters, as in a signature."""
        properties, required = self.schema.get("properties", {}), self.schema.get("required", [])
        shown = [f"{name}{'' if name in required else '?'}: {_type(each)}" for name, each in properties.items()]
        return f"({', '.join(shown)})"


def _type(schema: Json) -> str:
    found = schema.get("type", "any") if isinstance(schema, dict) else "any"
    return " | ".join(found) if isinstance(found, list) else str(found)
