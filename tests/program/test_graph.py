"""The graph of a program: its nodes, edges, drawings, and how it is told as data."""

import dataclasses
import json

import msgspec
import pytest

import sglang_lite as sgl
from sglang_lite.lang.symbolic.graph import Graph
from sglang_lite.program.graph import Branching, Edge, GraphRecord, Use
from sglang_lite.program.nodes import Fork, Gen, Join, Select
from tests.conformance import random_programs
from tests.conformance import random_steps as rp
from tests.conformance.case import cases


def graph(body, explore=None, **arguments):
    return sgl.function(body).trace(explore=explore, **arguments).graph()


def kinds(found):
    return [node.kind for node in found.nodes]


def test_a_node_has_its_role_its_scopes_its_branch_and_its_line():
    def body(s):
        with s.user(), s.var_scope("outer"), s.var_scope("inner"):
            s += "hi"
        fork = s.fork(2)
        fork[1] += sgl.gen("a")

    found = graph(body)
    hi = next(node for node in found.nodes if getattr(node.node, "text", "") == "hi")
    assert (hi.role, hi.scopes, hi.path) == ("user", ("outer", "inner"), ())
    assert hi.where.line == body.__code__.co_firstlineno + 2
    fork = kinds(found).index("Fork")
    assert found.nodes[-1].path == (fork, 1)
    assert found.nodes[-1].name == "a"
    assert found.nodes[-1].role is None


def test_edges_of_data_go_from_who_makes_a_value_to_who_uses_it():
    def body(s, x):
        s += f"{x.title['a'][0]} " + sgl.gen("a", max_tokens=x.most)
        s += sgl.select("b", [f"{s['a']}", "no"])
        s += sgl.gen("c", regex=f"{s['b']}+") + sgl.image(x)
        s += s["c"]

    found = graph(body)
    a, b, c = (next(i for i, node in enumerate(found.nodes) if node.name == name) for name in "abc")
    data = [edge for edge in found.edges if edge.kind == "data"]
    assert data == [
        Edge(None, 0, "data", "x.title['a'][0]"), Edge(None, a, "data", "x.most"), Edge(a, b, "data", "a"),
        Edge(b, c, "data", "b"), Edge(None, c + 1, "data", "x"), Edge(c, c + 2, "data", "c"),
    ]  # fmt: skip
    assert [use.into for node in found.nodes for use in node.uses] == [
        "text", "max_tokens", "choices", "constraint", "image", "text"
    ]  # fmt: skip
    assert found.nodes[b].node.choices == ("{a}", "no")
    assert found.nodes[c].node.constraint is None
    assert set(found.read) == {a, b, c}


def test_a_symbol_can_be_all_choices_or_a_pattern():
    @sgl.function
    def program(s, options, pattern):
        s += sgl.select("a", options) + sgl.gen("b", regex=pattern)

    found = program.trace().graph()
    uses = [(type(node.node), [(use.name, use.into) for use in node.uses]) for node in found.nodes]
    assert uses == [(Select, [("options", "choices")]), (Gen, [("pattern", "constraint")])]
    assert found.check() == ()
    assert sgl.Graph.from_json(found.to_json()) == found


def test_edges_of_order_go_along_branches_from_forks_and_to_joins():
    def body(s):
        s += "0"
        fork = s.fork(2)
        fork[0] += "2" + sgl.gen("a")
        s += "4"
        fork[1] += "5"
        fork.join()
        s += "7"

    order = [(edge.source, edge.target) for edge in graph(body).edges]
    assert order == [(0, 1), (1, 2), (2, 3), (1, 4), (1, 5), (4, 6), (3, 6), (5, 6), (6, 7)]


def test_programs_inside_are_nodes_of_the_text_or_a_branch_of_their_own():
    @sgl.function
    def inner(s, word):
        s += f"inner {word}" + sgl.gen("a")

    def body(s, x):
        s += inner(x)
        s += inner("y")["a"]
        s += s.call(inner, word="z")["a"]

    found = graph(body, x="x")
    assert kinds(found) == [
        "Text",
        "Gen",
        "Call",
        "Text",
        "Gen",
        "Value",
        "Call",
        "Text",
        "Gen",
        "Value",
    ]
    assert [node.path for node in found.nodes] == [
        (),
        (),
        (),
        (2, 0),
        (2, 0),
        (),
        (),
        (6, 0),
        (6, 0),
        (),
    ]
    assert found.nodes[0].where.function.endswith("inner")
    assert Edge(4, 5, "data", "a") in found.edges


def test_tools_marks_and_grammars_are_nodes():
    def look(word: str) -> str:
        """Looks."""
        return word

    def body(s):
        with s.assistant():
            s += sgl.gen("call", tools=[look])
        with s.checkpoint() as place:
            s += sgl.user_begin() + "x"
            place.rollback()
        with s.grammar(sgl.Regex("a+")):
            s += sgl.gen("b")

    found = graph(body)
    assert next(node.tools for node in found.nodes if node.name == "call") == ("look",)
    assert [kind for kind in kinds(found) if "Turn" not in kind and kind != "Text"] == [
        "Gen", "Mark", "Rollback", "GrammarBegin", "Gen", "GrammarEnd"
    ]  # fmt: skip
    assert found.nodes[-1].role is None


def test_ways_share_what_comes_before_they_differ():
    def body(s, x):
        s += "first" + sgl.select("kind", ["a", "b"])
        if s["kind"] == "a":
            s += "one"
        s += "last"

    found = graph(body, explore=5)
    assert [way.nodes for way in found.ways] == [(0, 1, 2, 3, 4), (0, 1, 2, 5)]
    assert found.complete
    asked = found.nodes[2]
    assert asked.node == Branching("", ("a", "b"))
    assert asked.uses == (Use("kind", into="question", source=1),)
    assert [edge for edge in found.edges if edge.kind == "order"] == [
        Edge(0, 1, "order"), Edge(1, 2, "order"), Edge(2, 3, "order", "a"), Edge(3, 4, "order"), Edge(2, 5, "order", "b")
    ]  # fmt: skip


def test_the_text_of_a_graph_has_a_line_a_node_and_shows_each_way():
    def body(s, x):
        s += f"about {x}: " + sgl.gen("answer", max_tokens=8, stop="\n")
        if s["answer"] == "yes":
            s += "Good."

    line = body.__code__.co_firstlineno
    here = "test_graph.py"
    assert str(graph(body, explore=5)).splitlines() == [
        "body(x): 6 nodes, 2 ways",
        f"   0 text 'about '  [{here}:{line + 1}]",
        f"   1 value {{x}}  [{here}:{line + 1}]",
        f"   2 text ': '  [{here}:{line + 1}]",
        f"   3 gen answer max_tokens=8 stop=('\\n',)  [{here}:{line + 1}]",
        f"   4 if answer == 'yes'?  [{here}:{line + 2}]",
        "       True:",
        f"   5     text 'Good.'  [{here}:{line + 3}]",
        "       False:",
    ]


def hostile(s, x):
    s += 'a"]\n --> b{<script>}`\\' + sgl.gen('n"|;')
    if x == '"]':
        s += x


def test_drawings_have_a_shape_a_node_and_an_arrow_an_edge_whatever_texts_say():
    found = graph(hostile, explore=3)
    mermaid = found.mermaid().splitlines()
    assert mermaid[0] == "flowchart TD"
    assert len(mermaid) == 1 + 1 + len(found.nodes) + len(found.edges)
    for line in mermaid[1:]:
        inside = line.split('"')
        assert len(inside) in (1, 3), line
        assert not set("<>`") & set("".join(inside[1:2])), line
    dot = found.dot().splitlines()
    assert len(dot) == 3 + 1 + len(found.nodes) + len(found.edges)


def test_a_graph_is_data_and_back():
    found = graph(hostile, explore=3)
    again = Graph.from_json(found.to_json())
    assert again == found
    assert type(again) is Graph
    assert again.check() == found.check()
    assert str(again) == str(found)
    assert Graph.from_json(found.to_json().decode()) == found


def changed(found, *path_and_value):
    data = json.loads(found.to_json())
    *path, last, value = path_and_value
    at = data
    for key in path:
        at = at[key]
    at[last] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    "change",
    [
        ("version", 2), ("version", "1"), ("type", "Program"), ("data", "nodes", 0, "path", [7, 0]),
        ("data", "nodes", 0, "path", [0]), ("data", "nodes", 0, "node", "kind", "Eval"), ("data", "ways", []),
        ("data", "ways", 0, "nodes", [99]), ("data", "ways", 0, "nodes", [-1]), ("data", "ways", 0, "outcomes", [5]),
        ("data", "ways", 0, "outcomes", []), ("data", "read", [1000]), ("data", "more", 1),
        ("data", "nodes", 0, "node", "where", ["x", "y", "z"]), ("data", "nodes", 2, "uses", 0, "source", 5),
        ("data", "changes", [{"node": 77, "first": "", "second": ""}]),
    ],
)  # fmt: skip
def test_what_is_no_graph_is_refused(change):
    with pytest.raises(sgl.SglError) as caught:
        Graph.from_json(changed(graph(hostile, explore=3), *change))
    assert type(caught.value).__name__ == "WireError"


def test_damaged_deep_and_large_data_is_refused():
    data = graph(hostile, explore=3).to_json()
    for bad in (
        b"",
        data[:-3],
        data + b"x",
        b"[" * 100_000,
        b'{"version":1,"type":"GraphRecord","data":' + b"[" * 300,
    ):
        with pytest.raises(sgl.SglError):
            Graph.from_json(bad)
    with pytest.raises(sgl.SglError, match="bytes are more than"):
        Graph.from_json(b" " * (2**26 + 1))


def test_a_branch_and_a_program_inside_have_no_graph_of_their_own():
    state = sgl.function(lambda s: s.fork(1)).trace()
    with pytest.raises(sgl.ProgramError, match="only the state that trace"):
        state.child_states[0].graph()


# --------------------------------------------------------------------------- against what is played


class Recorder(sgl.BaseBackend):
    """Is handed whole programs, and answers nothing."""

    def __init__(self):
        super().__init__()
        self.chat_template = sgl.ScriptedBackend().get_chat_template()
        self.branches = {}

    def open_program(self, sink, *, stream, priority=0):
        return self

    def extend(self, path, nodes):
        self.branches.setdefault(path, []).extend(nodes)

    def drop_branch(self, path):
        pass

    def close(self):
        pass


def told(node):
    """Fields of a node that a trace and a run have in common."""
    said = {name: getattr(node, name, None) for name in ("text", "role", "name", "choices", "mode")}
    size = len(node.branches) if isinstance(node, Fork) else None
    return type(node).__name__, tuple(said.values()), size


def played(branches, path=()):
    """Nodes that a run was made of, as a tree."""
    nodes = branches.get(path, [])
    return [
        (told(node), [played(branches, (*path, i, k)) for k in range(len(node.branches))] if isinstance(node, Fork) else [])
        for i, node in enumerate(nodes)
    ]  # fmt: skip


def traced(found, path=()):
    ids = [i for i in found.ways[0].nodes if found.nodes[i].path == path]
    return [
        (told(node), [traced(found, (*path, i, k)) for k in range(len(node.branches))] if isinstance(node, Fork) else [])
        for i in ids
        for node in (found.nodes[i].node,)
    ]  # fmt: skip


def plain(steps):
    """Steps that are taken alike in a trace and in a run that answers nothing: nothing is read,
    nothing goes wrong, and branches end with a generation (what stands behind the last one is not
    handed over).
    """
    last = rp.Gen("last", ())
    found: list[rp.Step] = []
    for step in steps:
        match step:
            case rp.Text() | rp.Set():
                found.append(step)
            case rp.Gen(name):
                found.append(rp.Gen(name, (("max_tokens", 2),)))
            case rp.Select(name, choices):
                found.append(rp.Select(name, choices))
            case rp.Sum(parts):
                found.append(rp.Sum(plain(parts)))
            case rp.Fork():
                bodies = tuple((*plain(body), last) for body in step.bodies)
                found.append(
                    rp.Fork(plain(step.first), bodies, plain(step.beside), step.join, False, ())
                )
            case rp.Copy(body):
                found.append(rp.Copy((*plain(body), last)))
            case rp.Scope() | rp.Turn() | rp.Nested():
                found.append(dataclasses.replace(step, body=plain(step.body)))
            case rp.Attempt(body):
                found += plain(body)
    return tuple(found)


@pytest.mark.parametrize("seed", range(40))
def test_the_order_of_nodes_is_the_order_in_which_they_are_played(seed):
    steps = (*plain(random_programs.drawn(seed).steps), rp.Gen("last", ()))
    backend = Recorder()
    try:
        found = rp.program.trace(steps=steps, told=[], ending=None, backend=backend).graph()
    except sgl.SglError as error:
        with pytest.raises(type(error)):
            rp.program.run(steps, [], backend=backend)
        return
    rp.program.run(steps, [], backend=backend)
    assert traced(found) == played(backend.branches)
    assert len(found.ways[0].nodes) == sum(map(len, backend.branches.values()))
    assert Graph.from_json(found.to_json()) == found
    joins = [node for node in found.nodes if isinstance(node.node, Join)]
    assert all(node.joins for node in joins)


CASES = cases()


@pytest.mark.parametrize("name", CASES)
def test_every_conformance_program_that_can_be_traced_has_a_graph(name):
    case = CASES[name]
    try:
        state = case.program.trace(explore=6, **case.arguments)
    except sgl.SglError:
        return
    found = state.graph()
    assert Graph.from_json(found.to_json()) == found
    assert str(found).count("\n") >= len(found.nodes) - 1
    assert found.mermaid()
    assert found.dot()
    record = GraphRecord(*(getattr(found, name) for name in GraphRecord.__struct_fields__))
    assert msgspec.structs.astuple(record) == msgspec.structs.astuple(found)
