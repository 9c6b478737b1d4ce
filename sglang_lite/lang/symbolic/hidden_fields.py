"""Finds typed generations whose prompt mentions none of their fields. The model then has to guess
what the fields are for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from sglang_lite.program.graph import GraphNode, GraphRecord, Value, Way
from sglang_lite.program.nodes import Fork, Gen, Join, Path, Text, TurnBegin, TurnEnd
from sglang_lite.protocol import JsonSchema

# in snake_case and camelCase
_WORD: Final = re.compile(r"[A-Z]?[^\W\d_A-Z]+|[A-Z]+(?![^\W\d_A-Z])|\d+")
_SMALL: Final = frozenset((  # words that any prompt may contain
    "a", "an", "and", "are", "at", "be", "by", "can", "did", "do", "for", "from", "has", "have", "in", "is", "it",
    "its", "no", "not", "of", "on", "or", "that", "the", "this", "to", "was", "with",
))  # fmt: skip
# minimum length of a word that is also searched inside other words, as in German compounds
_LONG: Final = 4
_MAX_SCHEMAS: Final = 1_000  # schemas visited for one generation


@dataclass(frozen=True, slots=True)
class HiddenFields:
    """Generation whose prompt mentions none of its fields.

    Attributes:
        node: the generation.
        fields: names of its fields, outermost first.
        type_name: name of its type, or "" if the schema has none.
    """

    node: GraphNode
    fields: tuple[str, ...]
    type_name: str


@dataclass(frozen=True, slots=True)
class _Prompt:
    """Text of a branch before the next node to check.

    Attributes:
        text: text written by the program, without templates and values, in lower case.
        begins: True if the open turn (or a prompt without turns) has no text of its own yet.
        by_caller: True if a turn begins with a value, which may hold the whole instructions.
    """

    text: str = ""
    begins: bool = True
    by_caller: bool = False

    def __add__(self, text: str) -> _Prompt:
        return replace(
            self, text=f"{self.text}{text.casefold()}", begins=self.begins and not text.strip()
        )


def find_hidden_fields(graph: GraphRecord) -> Iterator[HiddenFields]:
    """Yields the generations with a schema whose fields are not mentioned before them, neither in
    the program's text nor in an earlier answer. Searches all traced paths. Skips generations with
    tools, and prompts in which a turn begins with a value.
    """
    for way in graph.ways:
        yield from _hidden_fields_on_path(graph, way)


def _hidden_fields_on_path(graph: GraphRecord, way: Way) -> Iterator[HiddenFields]:
    prompts: dict[Path, _Prompt] = {}
    templates = _template_texts(graph, way)
    for i in way.nodes:
        node = graph.nodes[i]
        prompt = prompts.get(node.path, _Prompt())
        match node.node:
            case TurnBegin():
                prompt = replace(prompt, begins=True)
            case Text(text) if i not in templates:
                prompt += text
            case Value():
                prompt = replace(prompt, by_caller=prompt.by_caller or prompt.begins)
            case Gen(constraint=JsonSchema(source)) if not node.tools:
                schema = json.loads(source)
                fields = tuple(dict.fromkeys(_member_names(schema)))
                if (
                    fields
                    and not prompt.by_caller
                    and not any(_field_occurs_in(name, prompt.text) for name in fields)
                ):
                    yield HiddenFields(node, fields, _type_name_of_schema(schema))
                prompt += " " + " ".join(fields)
            case Fork(branches):
                for number in range(len(branches)):
                    prompts[(*node.path, i, number)] = prompt
            case Join(mode="concate_and_append"):
                for path in node.joins:
                    prompt += prompts[path].text if path in prompts else ""
        prompts[node.path] = prompt


def _template_texts(graph: GraphRecord, way: Way) -> set[int]:
    """Returns the ids of the texts written by the chat template, directly before and after turns."""
    found: set[int] = set()
    last: dict[Path, int] = {}
    for i in way.nodes:
        node = graph.nodes[i]
        before = last.get(node.path)
        if (
            isinstance(node.node, TurnBegin)
            and before is not None
            and isinstance(graph.nodes[before].node, Text)
        ):
            found.add(before)
        if (
            isinstance(node.node, Text)
            and before is not None
            and isinstance(graph.nodes[before].node, TurnEnd)
        ):
            found.add(i)
        last[node.path] = i
    return found


def _field_occurs_in(field: str, text: str) -> bool:
    """Returns True if a word of a field's name occurs in a lower-case text, in any easily
    recognised form.
    """
    words = [word.casefold() for word in _WORD.findall(field)]
    return any(
        _contains_word(text, word)
        for word in [word for word in words if word not in _SMALL] or [field.casefold()]
    )


def _contains_word(text: str, word: str) -> bool:
    stem = word[:-1] if len(word) > _LONG - 1 and word[-1] in "sy" else word
    if len(stem) >= _LONG:
        return stem in text
    behind = r"(?!\w)" if len(stem) < _LONG - 1 else ""  # `id` is not a word of `idea`
    return re.search(rf"(?<!\w){re.escape(stem)}{behind}", text) is not None


def _member_names(schema: Any) -> Iterator[str]:
    """Yields the names of all members that a schema describes, outermost first."""
    queue: list[Any] = [schema]
    references: set[str] = set()
    for each in queue:
        if not isinstance(each, dict) or len(queue) > _MAX_SCHEMAS:
            continue
        yield from each.get("properties", {})
        queue += [*_subschemas(each), *each.get("properties", {}).values()]
        reference = each.get("$ref")
        if isinstance(reference, str) and reference not in references:
            references.add(reference)
            queue.append(_look_up_reference(schema, reference))


def _subschemas(schema: dict[str, Any]) -> list[Any]:
    several: Sequence[Any] = [
        schema.get(word, ()) for word in ("anyOf", "oneOf", "allOf", "prefixItems")
    ]
    items = schema.get("items")
    return [
        *(each for group in several for each in group),
        *(items if isinstance(items, list) else [items]),
        schema.get("additionalProperties"),
    ]


def _look_up_reference(root: Any, reference: str) -> Any:
    """Returns the part of a schema that a reference within it points to, or None if it points to
    nothing.
    """
    found = root
    for step in reference.removeprefix("#").split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        found = found.get(step) if isinstance(found, dict) else None
    return found


def _type_name_of_schema(schema: Any) -> str:
    """Returns the name of the type that a schema was made from, or "" if it was made from none."""
    queue = [schema]
    for each in queue:
        if not isinstance(each, dict) or len(queue) > _MAX_SCHEMAS:
            continue
        if isinstance(each.get("title"), str) and each["title"].isidentifier():
            return str(each["title"])
        reference = each.get("$ref")
        queue += _subschemas(each) if reference is None else [_look_up_reference(schema, reference)]
    return ""
