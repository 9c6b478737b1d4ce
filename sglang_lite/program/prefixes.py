"""Prefixes that the runs of a program share, counted in tokens. Each run is given as a graph with
its arguments filled in.

A prompt is the text before a generation or selection in its branch. Generated text is unknown, so
it counts no tokens and never equals other text. Open values and images are not counted either.
Prompts for different adapters share nothing. If a graph has several traced paths, only the first
one counts.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from sglang_lite.notebook.markup import element, notebook_html, shorten_text
from sglang_lite.program.graph import Compact, GraphNode, GraphRecord, Picture, Value
from sglang_lite.program.nodes import Fork, Gen, Join, Mark, Path, Rollback, Select, Text, TurnEnd
from sglang_lite.protocol import Span
from sglang_lite.protocol.sampling import adapter_of

_DEEPEST: Final = 40  # maximum depth of the tree
_MAX_SHOWN: Final = 6  # maximum number of printed continuations of a prefix
_LONGEST: Final = 60  # maximum number of printed characters of a text

_Unknown: TypeAlias = tuple[object, ...]  # identity of unknown text
_Segments: TypeAlias = tuple[Span | _Unknown, ...]


class TokenCounter(Protocol):
    """Methods that a tokenizer needs for counting the tokens of prompts."""

    def encode_spans(self, spans: Iterable[Span], *, first: bool = True) -> Sequence[int]:
        """Returns the token ids of spans. `first` is True if they start a prompt."""

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of token ids."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """Text segment in the tree of prompts.

    Attributes:
        text: known text of the segment, at most 1,000 characters.
        tokens: number of tokens of the segment.
        prompts: number of branches whose longest prompt contains the segment.
        after: continuations.
    """

    text: str
    tokens: int
    prompts: int
    after: tuple[Prefix, ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class PrefixTree:
    """Prompts of several runs, as a prefix tree.

    Attributes:
        runs: number of runs.
        prompts: number of generations and selections in the runs.
        tokens: total number of tokens of all prompts, each counted in full.
        unique: number of tokens in the tree, which is the number computed if every prefix is
            computed once.
        root: root of the tree.
    """

    runs: int
    prompts: int
    tokens: int
    unique: int
    root: Prefix

    @property
    def shared(self) -> float:
        """Fraction of the prompt tokens that a sufficiently large cache serves."""
        return 1 - self.unique / self.tokens if self.tokens else 0.0

    def __repr__(self) -> str:
        return f"PrefixTree({self._summary_line()})"

    def __str__(self) -> str:
        return "\n".join([self._summary_line(), *_tree_lines(self.root, 0)])

    def _repr_html_(self) -> str:
        return notebook_html(element("pre", shorten_text(str(self), 20_000)))

    def _summary_line(self) -> str:
        size = f"{self.runs} runs, {self.prompts} prompts of {self.tokens:,} tokens"
        return f"{size}; {self.unique:,} are computed, {self.shared:.0%} come from the cache"


def _tree_lines(prefix: Prefix, depth: int) -> Iterator[str]:
    if prefix.tokens:
        text = prefix.text if len(prefix.text) <= _LONGEST else prefix.text[: _LONGEST - 1] + "…"
        yield f"{'  ' * depth}{prefix.tokens:>6} tokens × {prefix.prompts}  {text!r}"
    for each in prefix.after[:_MAX_SHOWN]:
        yield from _tree_lines(each, depth + bool(prefix.tokens))
    if len(prefix.after) > _MAX_SHOWN:
        hidden = prefix.after[_MAX_SHOWN:]
        yield f"{'  ' * (depth + 1)}… {len(hidden)} more, {sum(map(_tokens, hidden)):,} tokens"


def _tokens(prefix: Prefix) -> int:
    return prefix.tokens + sum(map(_tokens, prefix.after))


def build_prefix_tree(graphs: Sequence[GraphRecord], counter: TokenCounter) -> PrefixTree:
    """Builds the prefix tree of the prompts of several runs.

    Args:
        graphs: one graph for each run.
        counter: tokenizer.
    """
    counted = _PromptEncoder(counter)
    longest: list[list[int]] = []
    prompts = tokens = 0
    for run, graph in enumerate(graphs):
        branches: dict[tuple[Path, str | None], list[int]] = {}
        for path, adapter, segments in iterate_prompts(graph, run):
            found = counted.encode_segments(segments)
            if adapter is not None:
                found.insert(0, counted.placeholder_id_for(("adapter", adapter)))
            branches[path, adapter] = found
            prompts += 1
            tokens += sum(item >= 0 for item in found)
        longest += branches.values()
    longest.sort()
    unique = 0
    before: list[int] = []
    for found in longest:
        same = common_prefix_length(before, found)
        unique += sum(item >= 0 for item in itertools.islice(found, same, None))
        before = found
    return PrefixTree(len(graphs), prompts, tokens, unique, _build_prefix(longest, 0, counter, 0))


def iterate_prompts(
    graph: GraphRecord, run: int = 0
) -> Iterator[tuple[Path, str | None, _Segments]]:
    """Yields the prompt of each generation and selection, with the path of its branch and its
    adapter (or None). A prompt consists of spans of text, and of keys that stand for unknown text.

    Args:
        run: number of the run; unknown text of one run never equals that of another.
    """
    texts: dict[Path, list[Span | _Unknown]] = {}
    marks: dict[Path, list[int]] = {}
    heads: dict[Path, int] = {}  # number of segments up to the end of the system turn
    for i in graph.ways[0].nodes:
        node = graph.nodes[i]
        here = texts.setdefault(node.path, [])
        match node.node:
            case Text(text, special=special):
                here.append(Span(text, special=special))
            case Gen() | Select() as asked:
                adapter = adapter_of(
                    asked.params.lora_path if isinstance(asked, Gen) else asked.lora_path
                )
                yield node.path, adapter, tuple(here)
                here.append((run, i))
            case Value() | Picture():
                here.append((run, *_identify_open_value(node, i)))
            case Join(mode="concate_and_append"):
                here.append((run, i))
            case Fork(branches):
                for number in range(len(branches)):
                    texts[(*node.path, i, number)] = list(here)
            case TurnEnd("system"):
                heads[node.path] = len(here) + 1  # includes the template's text after the turn
            case Compact():
                here[heads.get(node.path, 0) :] = [(run, i)]
            case Mark():
                marks.setdefault(node.path, []).append(len(here))
            case Rollback(mark=mark):
                for length in marks.get(node.path, [])[mark : mark + 1]:
                    del here[length:]


def _identify_open_value(node: GraphNode, i: int) -> _Unknown:
    """Returns a key for a value that is not known yet. All uses of the same argument in a run have
    the same key. Any other value has a key of its own.
    """
    return (node.uses[0].expression,) if node.uses and node.uses[0].source is None else (i,)


class _PromptEncoder:
    """Converts prompts to lists of numbers: token ids, and negative numbers for unknown text.
    Tokenised spans are cached.
    """

    def __init__(self, counter: TokenCounter) -> None:
        self._tokens = functools.cache(counter.encode_spans)
        self._unknown: dict[_Unknown, int] = {}

    def encode_segments(self, segments: _Segments) -> list[int]:
        found: list[int] = []
        for is_text, group in itertools.groupby(segments, lambda each: isinstance(each, Span)):
            if is_text:
                spans = tuple(each for each in group if isinstance(each, Span))
                found += self._tokens(spans, first=not found)
            else:
                found += [
                    self.placeholder_id_for(each) for each in group if isinstance(each, tuple)
                ]
        return found

    def placeholder_id_for(self, text: _Unknown) -> int:
        """Returns the negative number that stands for an unknown text."""
        return self._unknown.setdefault(text, -1 - len(self._unknown))


def common_prefix_length(one: Sequence[object], other: Sequence[object]) -> int:
    """Returns how many items two sequences have in common at the beginning."""
    limit = min(len(one), len(other))
    if one[:limit] == other[:limit]:
        return limit
    return next(i for i in range(limit) if one[i] != other[i])


def _build_prefix(
    prompts: Sequence[list[int]], start: int, counter: TokenCounter, depth: int
) -> Prefix:
    """Builds the tree of sorted prompts from index `start` on. Before that index, all prompts are
    equal.
    """
    if not prompts:
        return Prefix("", 0, 0)
    end = common_prefix_length(prompts[0], prompts[-1])
    text = "".join(
        counter.decode(list(group)) if is_known else "…"
        for is_known, group in itertools.groupby(prompts[0][start:end], lambda item: item >= 0)
    )
    tokens = sum(item >= 0 for item in prompts[0][start:end])
    longer = [prompt for prompt in prompts if len(prompt) > end]
    groups = itertools.groupby(longer, lambda prompt: prompt[end])
    after = (
        ()
        if depth == _DEEPEST
        else tuple(_build_prefix(list(each), end, counter, depth + 1) for _, each in groups)
    )
    return Prefix(text[:1000], tokens, len(prompts), after)
