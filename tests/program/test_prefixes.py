"""The prefix tree of a program's runs, against counting every prefix of every prompt."""

from random import Random

import pytest

import sglang_lite as sgl
from sglang_lite.program.prefixes import build_prefix_tree, iterate_prompts
from sglang_lite.protocol import Span


class Characters:
    """A token per character."""

    def encode_spans(self, spans, *, first=True):
        return [ord(character) for span in spans for character in span.text]

    def decode(self, ids):
        return "".join(map(chr, ids))


def counted(graphs):
    """Tokens of all prompts, and how many different prefixes they have."""
    prefixes, tokens = set(), 0
    for run, graph in enumerate(graphs):
        for _, adapter, segments in iterate_prompts(graph, run):
            items = [] if adapter is None else [(adapter,)]
            items += [
                c for each in segments for c in (each.text if isinstance(each, Span) else [each])
            ]
            tokens += sum(isinstance(item, str) for item in items)
            prefixes |= {
                tuple(items[: i + 1]) for i, item in enumerate(items) if isinstance(item, str)
            }
    return tokens, len(prefixes)


@sgl.function
def program(s, a, b):
    s += f"Start. {a} middle {b['key']}: " + sgl.gen("x")
    fork = s.fork(2)
    fork += lambda i: f" branch {i} {b['key']} " + sgl.gen("y", lora_path="poet" if i else None)
    fork.join("concate_and_append")
    s += f" end {a}" + sgl.select("z", ["p", "q"], lora_path="judge")


@pytest.mark.parametrize("seed", range(30))
def test_every_prefix_is_counted_once(seed):
    draw = Random(seed)
    words = ["".join(draw.choices("ab", k=draw.randrange(6))) for _ in range(4)]
    rows = [
        {"a": draw.choice(words), "b": {"key": draw.choice(words)}}
        for _ in range(draw.choice((1, 2, 9)))
    ]
    graph = program.trace().graph()
    tree = graph.prefixes(rows, Characters())
    graphs = [program.trace(a=row["a"], b=row["b"]).graph() for row in rows]
    assert (tree.tokens, tree.unique) == counted(graphs)
    assert (tree.runs, tree.prompts) == (len(rows), 4 * len(rows))
    again = build_prefix_tree(graphs, Characters())
    assert (again.tokens, again.unique, again.root) == (tree.tokens, tree.unique, tree.root)
    assert total(tree.root) == tree.unique


def total(prefix):
    return prefix.tokens + sum(map(total, prefix.after))


def test_what_is_shared_is_shown():
    @sgl.function
    def short(s, word):
        s += f"Word: {word}. Kind:" + sgl.gen("kind")

    tree = (
        short.trace()
        .graph()
        .prefixes([{"word": "cat"}, {"word": "cow"}, {"word": "oak"}], Characters())
    )
    assert str(tree).splitlines() == [
        "3 runs, 3 prompts of 48 tokens; 35 are computed, 27% come from the cache",
        "     6 tokens × 3  'Word: '",
        "       1 tokens × 2  'c'",
        "         9 tokens × 1  'at. Kind:'",
        "         9 tokens × 1  'ow. Kind:'",
        "      10 tokens × 1  'oak. Kind:'",
    ]


def test_values_that_are_open_and_images_count_nothing_and_end_what_is_shared():
    @sgl.function
    def body(s, x):
        s += f"all {x} same " + sgl.gen("a")
        s += sgl.image("x.png") + " too" + sgl.gen("b")

    graph = body.trace().graph()
    tree = build_prefix_tree([graph, graph], Characters())
    assert tree.tokens == 2 * (4 + 6 + 4 + 6 + 4)
    assert tree.unique == 4 + 2 * (6 + 4)


def test_an_engine_has_a_tokenizer_and_other_things_are_refused():
    class Engine:
        tokenizer = Characters()

    graph = sgl.function(lambda s: s.__iadd__("text" + sgl.gen("a"))).trace().graph()
    assert graph.prefixes([{}], Engine()).unique == 4
    with pytest.raises(sgl.ParameterError, match="a str is not a tokenizer"):
        graph.prefixes([{}], "model")  # type: ignore[arg-type] # wrong on purpose


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({"a": "x"}, "row 0 has no 'b'"),
        ({"a": "x", "b": {}}, "b\\['key'\\] can't be read"),
        ({"a": "x", "b": 3}, "b\\['key'\\]"),
    ],
)
def test_a_row_that_does_not_fit_is_refused(row, match):
    with pytest.raises(sgl.ParameterError, match=match):
        program.trace().graph().prefixes([row], Characters())
