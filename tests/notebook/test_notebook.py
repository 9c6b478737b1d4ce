"""What notebooks show of objects: HTML in which every text is text, and short representations."""

import io
import sys
import types
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sglang_lite as sgl
from sglang_lite.lang.confidence import Confidence
from sglang_lite.lang.trace import Trace
from sglang_lite.protocol import (
    ChoiceScore,
    Generation,
    Selection,
    TokenLogprob,
    TraceHead,
    TraceNode,
    Usage,
)
from tests.waiting import until

EVIL = (
    "</td></script><script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m\u202e&amp;\"'"
    + chr(0xD800)
)
TAGS = {
    "b", "details", "div", "g", "iframe", "meter", "p", "path", "pre", "progress", "rect", "span", "style", "summary",
    "svg", "table", "td", "text", "th", "title", "tr",
}  # fmt: skip


class Fragment(HTMLParser):
    """Tags, text and hints of a fragment, checked: all closed, none active."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = self.hints = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []
        assert set(self.tags) <= TAGS

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self._open.append(tag)
        names = {name for name, _ in attrs}
        assert not [
            name for name in names if name.startswith("on") or name in ("src", "href", "style")
        ]
        assert tag != "iframe" or dict(attrs)["sandbox"] == "allow-scripts"
        self.hints += "".join(value or "" for name, value in attrs if name == "title")

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open[-1] != "style":
            self.text += data


@sgl.function
def asks(s, question="a question"):
    """Asks twice, </b>."""
    s += sgl.user(question)
    s += sgl.assistant(sgl.gen("answer", max_tokens=4))
    forks = s.fork(2)
    forks += sgl.gen("idea <i>", max_tokens=4)
    forks.join()
    s += sgl.select("end", ["yes</script>", "no"])


def scripted(answer):
    return sgl.ScriptedBackend(default=answer)


@pytest.fixture(scope="module")
def held():
    """Everything that a user holds, all of it with hostile texts."""
    text = EVIL[:-1]
    state = asks.run(text, backend=scripted(text))
    batch = asks.run_batch(
        [{"question": text}, {"question": "fails"}], backend=failing(), on_error="return"
    )
    trace, traced = state.trace(), asks.bind(question=EVIL).trace()
    group = next(iter(forked(text)))
    return {
        "state": state,
        "group": group,
        "trace": trace,
        "trace node": trace.nodes[0],
        "graph": traced.graph(),
        "traced state": traced,
        "program": asks.bind(question=EVIL),
        "batch": batch,
        "selection": state.selection("end"),
        "confidence": Confidence(
            EVIL, -0.5, 0.0, {EVIL: 0.5, 3: 0.25}, {EVIL: Confidence("1", 0.0, 0.0)}
        ),
        "usage": state.usage(),
        "prefixes": traced.graph().prefixes([{}], Bytes()),
        "generation": Generation(EVIL, matched=EVIL, reasoning=EVIL),
    }


class Bytes:
    """Tokenizer with a token a byte."""

    def encode_spans(self, spans, *, first=True):
        return [*"".join(span.text for span in spans).encode("utf-8", "replace")]

    def decode(self, ids):
        return bytes(ids).decode(errors="replace")


def forked(text):
    groups = []

    @sgl.function
    def forks(s):
        groups.append(group := s.fork(2))
        group += sgl.gen("idea", max_tokens=4)

    forks.run(backend=scripted(text))
    return groups


def failing():
    def answer(request):
        if "fails" in request.prompt.text:
            raise sgl.ProgramError(EVIL[:-1])
        return EVIL[:-1]

    return sgl.ScriptedBackend(answer)


NAMES = [
    "state", "group", "trace", "trace node", "graph", "traced state", "program", "batch", "selection", "confidence",
    "usage", "prefixes", "generation",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_an_object_is_inactive_html_and_has_a_short_repr(name, held):
    html = held[name]._repr_html_()
    html.encode()  # no lone surrogates
    Fragment(html)
    assert len(repr(held[name])) <= 300
    assert "object at 0x" not in repr(held[name])


def test_an_engine_tells_its_model_and_its_cache(engine):
    text = Fragment(engine._repr_html_()).text
    assert engine.model_name in text
    assert "cache in use" in text
    assert repr(engine).startswith("Engine(")
    assert len(repr(engine)) <= 300


def test_a_backend_is_named_with_its_model():
    backends = (
        sgl.ScriptedBackend(),
        sgl.OpenAI("gpt-4o-mini", api_key="-"),
        sgl.Fallback(
            [sgl.OpenAI("gpt-4o-mini", api_key="-"), sgl.Anthropic("claude-haiku-4-5", api_key="-")]
        ),
    )
    assert [repr(each) for each in backends] == [
        "ScriptedBackend('scripted')", "OpenAI('gpt-4o-mini')", "Fallback('gpt-4o-mini, claude-haiku-4-5')",
    ]  # fmt: skip


def test_a_closed_engine_tells_so(model_file):
    with sgl.Engine(str(model_file), in_process=True, max_total_tokens=256) as closed:
        pass
    assert "closed" in Fragment(closed._repr_html_()).text


def test_objects_of_long_texts_have_short_reprs():
    long = "word " * 10_000
    node = TraceNode("gen", name=long, text=long, error=long)
    scores = tuple(ChoiceScore(f"{i} {long}", (1,), (-1.0,)) for i in range(50))
    every = Usage(*(10**9,) * 4, *(123456.789,) * 3, *(10**9,) * 3)
    state = asks.run(long, backend=scripted(long))
    confidence = Confidence(
        long, -1.0, 0.0, parts={f"{i}": Confidence(long, 0.0, 0.0) for i in range(500)}
    )
    batch = asks.run_batch([[long]] * 20, backend=scripted("x"))
    for each in (
        node,
        Selection(scores, picked=long),
        every,
        state,
        confidence,
        batch,
        Generation(long),
    ):
        assert len(repr(each)) <= 300, repr(each)
    for each in (state, batch, node):
        assert len(each._repr_html_()) < 60_000


@given(st.text())
def test_any_text_is_text_in_a_state(text):
    state = sgl.function(lambda s: s.user(text)).run(backend=scripted(""))
    seen = Fragment(state._repr_html_()).text
    assert "".join(c for c in text if c.isalnum())[:2000] in "".join(c for c in seen if c.isalnum())


def test_text_of_the_template_is_folded_and_branches_stand_side_by_side():
    html = asks.run("why?", backend=scripted("so"))._repr_html_()
    assert html.count('class="template ') == 4  # begin and end of two turns
    columns = html.split('class="columns"')[1]
    assert columns.count('class="column"') == 2
    assert "idea &lt;i&gt;" in columns
    for origin in ("constant", "generated", "chosen"):
        assert f'<span class="{origin}">{origin}</span>' in html


def test_a_states_tokens_have_their_probabilities_as_hints():
    logprobs = (TokenLogprob(-0.5, 1, "so"), TokenLogprob(0.0, 2, " it"))
    scores = (ChoiceScore("a", (1,), (-1.0,)), ChoiceScore("b", (2,), (-2.0,)))
    nodes = (
        TraceNode(
            "gen", text="so it", results=(Generation("so it", (1, 2), output_logprobs=logprobs),)
        ),
        TraceNode("select", place=1, text="a", results=(Selection(scores, picked="a"),)),
    )
    from sglang_lite.lang.runs.extract import render_extract

    shown = Fragment(render_extract(Trace(TraceHead(2), nodes)))
    assert "probability 60.7%" in shown.hints
    assert "probability 100.0%" in shown.hints
    assert "a 73%" in shown.hints
    assert "so it" in shown.text


def test_a_states_text_tells_how_many_of_its_tokens_were_drafted():
    meta = {"spec_draft_token_num": 9, "spec_accept_token_num": 7}
    node = TraceNode("gen", text="so", results=(Generation("so", (1,), meta=meta),))
    from sglang_lite.lang.runs.extract import render_extract

    assert (
        "7 of 9 drafted tokens came" in Fragment(render_extract(Trace(TraceHead(1), (node,)))).hints
    )


def test_a_failed_state_shows_its_error():
    state = asks.run("fails", backend=failing())
    assert "alert(1)" in Fragment(state._repr_html_()).text
    assert repr(state).startswith("ProgramState(failed: ")


def test_a_batch_is_a_list_and_a_table_of_values_tokens_and_errors():
    batch = asks.run_batch([["why?"], ["fails"]], backend=failing(), on_error="return")
    assert isinstance(batch, list)
    shown = Fragment(batch._repr_html_())
    assert shown.text.startswith("2 runs, 1 failed")
    assert shown.tags.count("tr") == 3
    assert "ProgramError" in shown.text
    for name in ("answer", "idea <i>", "end", "tokens", "error"):
        assert name in shown.text


def test_the_error_of_a_batch_has_the_table_too():
    with pytest.raises(sgl.BatchError) as raised:
        asks.run_batch([["why?"], ["fails"]], backend=failing())
    assert Fragment(raised.value.results._repr_html_()).text.startswith("2 runs, 1 failed")


def test_a_program_that_no_trace_can_follow_shows_why():
    @sgl.function
    def counts(s, items):
        for each in range(len(items)):
            s += f"{each}"

    shown = Fragment(counts._repr_html_()).text
    assert "counts(items)" in shown
    assert "no graph: " in shown


def test_the_svg_has_each_node_and_argument_of_a_graph():
    graph = asks.trace(explore=4).graph()
    svg = Fragment(graph.svg())
    assert svg.tags.count("rect") == len(graph.nodes) + len(graph.arguments)
    assert svg.tags.count("path") == len(graph.edges)
    corners = [tuple(box.split('"')[i] for i in (1, 3)) for box in graph.svg().split("<rect")[1:]]
    assert len(set(corners)) == len(corners)  # no box hides another


# -------------------------------------------------------------------------------------- in a kernel


@pytest.fixture
def kernel(monkeypatch):
    """IPython as a kernel has it, with what was shown."""
    shown: list[list[str]] = []

    def display(html, display_id=False):
        shown.append([html])
        return types.SimpleNamespace(update=shown[-1].append)

    ipython = types.ModuleType("IPython")
    ipython.get_ipython = lambda: types.SimpleNamespace(kernel=object())
    ipython.display = types.ModuleType("IPython.display")
    ipython.display.HTML, ipython.display.display = str, display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", ipython.display)
    return shown


def test_no_browser_opens_from_a_kernel(kernel, monkeypatch, tmp_path):
    monkeypatch.setattr("webbrowser.open", lambda _: pytest.fail("a browser"))
    file = asks.run("why?", backend=scripted("so")).show(tmp_path / "page.html")
    assert "why?" in file.read_text()
    ((shown,),) = kernel
    assert Fragment(shown).tags == ["div", "style", "iframe"]


def test_progress_in_a_kernel_is_html_and_nothing_is_written(kernel, monkeypatch):
    monkeypatch.setattr(sys, "stderr", written := io.StringIO())
    asks.run_batch([["a"], ["b"], ["c"]], backend=scripted("so"), progress_bar=True)
    assert written.getvalue() == ""
    (updates,) = kernel
    last = Fragment(updates[-1])
    assert "progress" in last.tags
    assert "3 of 3 program" in last.text


def test_a_batch_shows_its_last_rows_while_it_runs(kernel):
    def answer(request):
        if "slow" in request.prompt.text:
            until(lambda: kernel and "quick so" in kernel[0][-1])  # the finished row is shown
            return "at last"
        return "quick so"

    asks.run_batch([["slow"], ["why?"]], backend=sgl.ScriptedBackend(answer), progress_bar=True)
    (updates,) = kernel
    (running,) = [each for each in updates if "quick so" in each and "at last" not in each]
    assert "1 of 2" in Fragment(running).text
    assert "table" in Fragment(running).tags
    assert "table" not in Fragment(updates[-1]).tags  # the results are one


def test_an_engine_that_starts_writes_nothing_to_standard_error_of_a_kernel(
    kernel, model_file, capsys, monkeypatch
):
    with sgl.Engine(str(model_file), in_process=True, max_total_tokens=256):
        pass
    said = capsys.readouterr()
    assert said.err == ""
    assert "; ready after " in said.out


def test_a_streamed_state_is_shown_while_it_runs(kernel):
    def answer(request):
        until(lambda: kernel and "why?" in kernel[0][-1])  # the text before the answer is shown
        return "so"

    state = asks.run("why?", backend=sgl.ScriptedBackend(answer), stream=True)
    state._ipython_display_()
    (updates,) = kernel
    assert "so" not in Fragment(updates[0]).text
    assert 'class="columns"' in updates[-1]
    with pytest.raises(NotImplementedError):  # IPython takes the HTML then
        state._ipython_display_()


def test_a_terminals_ipython_gets_no_html():
    state = asks.run("why?", backend=scripted("so"), stream=True)
    with pytest.raises(NotImplementedError):
        state._ipython_display_()
    state.sync()


def test_in_a_terminal_progress_is_written_to_stderr(monkeypatch):
    monkeypatch.setattr(sys, "stderr", written := io.StringIO())
    asks.run_batch([["a"]], backend=scripted("so"), progress_bar=True)
    assert "1/1" in written.getvalue()
