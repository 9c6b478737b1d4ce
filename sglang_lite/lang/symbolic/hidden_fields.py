"""Typed generations whose prompt names none of their fields, so that the model has to guess what
they are for.
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
_SMALL: Final = frozenset((  # words that any prompt may have
    "a", "an", "and", "are", "at", "be", "by", "can", "did", "do", "for", "from", "has", "have", "in", "is", "it",
    "its", "no", "not", "of", "on", "or", "that", "the", "this", "to", "was", "with",
))  # fmt: skip
# letters of a word that is also looked for inside other words, as German composes them
_LONG: Final = 4
_MAX_SCHEMAS: Final = 1_000  # that are looked at for one generation


@dataclass(frozen=True, slots=True)
class HiddenFields:
    """Generation whose fields its prompt does not name.

    Attributes:
        node: the generation.
        fields: names of its fields, the outermost first.
        type_name: name of its type, or "" if the schema has none.
    """

    node: GraphNode
    fields: tuple[str, ...]
    type_name: str


@dataclass(frozen=True, slots=True)
class _Prompt:
    """Text of a branch before its next node.

    Attributes:
        text: text that the program writes, without templates and values, in lower case.
        begins: True if the open turn, or a prompt without turns, has no text of its own yet.
        by_caller: True if a turn begins with a value, which may be all of the instructions.
    """

    text: str = ""
    begins: bool = True
    by_caller: bool = False

    def __add__(self, text: str) -> _Prompt:
        return replace(
            self, text=f"{self.text}{text.casefold()}", begins=self.begins and not text.strip()
        )


def hidden_fields(graph: GraphRecord) -> Iterator[HiddenFields]:
    """Yields the generations of all ways with a schema whose fields are named nowhere before them:
    neither in a text that the program writes nor by an earlier answer. Prompts that a value begins
    are not judged.
    """
    for way in graph.ways:
        yield from _hidden_on(graph, way)


def _hidden_on(graph: GraphRecord, way: Way) -> Iterator[HiddenFields]:
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
                fields = tuple(dict.fromkeys(_fields(schema)))
                if (
                    fields
                    and not prompt.by_caller
                    and not any(_is_named(name, prompt.text) for name in fields)
                ):
                    yield HiddenFields(node, fields, _title(schema))
                prompt += " " + " ".join(fields)
            case Fork(branches):
                for number in range(len(branches)):
                    prompts[(*node.path, i, number)] = prompt
            case Join(mode="concate_and_append"):
                for path in node.joins:
                    prompt += prompts[path].text if path in prompts else ""
        prompts[node.path] = prompt


def _template_texts(graph: GraphRecord, way: Way) -> set[int]:
    """Ids of the texts around turns that a template writes."""
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


def _is_named(field: str, text: str) -> bool:
    """Returns True if a text in lower case has a word of a field's name, in any form that is easily
    recognised.
    """
    words = [word.casefold() for word in _WORD.findall(field)]
    return any(
        _has(text, word)
        for word in [word for word in words if word not in _SMALL] or [field.casefold()]
    )


def _has(text: str, word: str) -> bool:
    stem = word[:-1] if len(word) > _LONG - 1 and word[-1] in "sy" else word
    if len(stem) >= _LONG:
        return stem in text
    behind = r"(?!\w)" if len(stem) < _LONG - 1 else ""  # `id` is no word of `idea`
    return re.search(rf"(?<!\w){re.escape(stem)}{behind}", text) is not None


def _fields(schema: Any) -> Iterator[str]:
    """Yields the names of all members that a schema describes, the outermost first."""
    queue: list[Any] = [schema]
    references: set[str] = set()
    for each in queue:
        if not isinstance(each, dict) or len(queue) > _MAX_SCHEMAS:
            continue
        yield from each.get("properties", {})
        queue += [*_below(each), *each.get("properties", {}).values()]
        reference = each.get("$ref")
        if isinstance(reference, str) and reference not in references:
            references.add(reference)
            queue.append(_at(schema, reference))


def _below(schema: dict[str, Any]) -> list[Any]:
    several: Sequence[Any] = [
        schema.get(word, ()) for word in ("anyOf", "oneOf", "allOf", "prefixItems")
    ]
    items = schema.get("items")
    return [
        *(each for group in several for each in group),
        *(items if isinstance(items, list) else [items]),
        schema.get("additionalProperties"),
    ]


def _at(root: Any, reference: str) -> Any:
    """Part of a schema that a reference within it names, or None."""
    found = root
    for step in reference.removeprefix("#").split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        found = found.get(step) if isinstance(found, dict) else None
    return found


def _title(schema: Any) -> str:
    """Name of the type that a schema was made of, or ""."""
    queue = [schema]
    for each in queue:
        if not isinstance(each, dict) or len(queue) > _MAX_SCHEMAS:
            continue
        if isinstance(each.get("title"), str) and each["title"].isidentifier():
            return str(each["title"])
        reference = each.get("$ref")
        queue += _below(each) if reference is None else [_at(schema, reference)]
    return ""
