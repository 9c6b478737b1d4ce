"""The page of a trace: one HTML file with nothing from elsewhere, in which no text of a program is
anything but text.
"""

import base64
import hashlib
import io
import json
from html.parser import HTMLParser

import pytest

import sglang_lite as sgl
from sglang_lite.lang.runs.extract import render_extract
from sglang_lite.lang.trace import Trace, as_html
from sglang_lite.protocol import TraceHead, TraceNode, Usage

EVIL = (
    "</script><script>alert(1)</script><img src=x onerror=alert(2)>\x00\x1b[31m\u2028\u202e&amp;"
    + chr(0xD800)
)


class Page(HTMLParser):
    """Elements, addresses, and the text of scripts and styles of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.addresses, self.inside = [], [], {}
        self._open: list[str] = []
        self.policy = ""
        self.feed(text)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.tags.append(tag)
        self.addresses += [
            value for name, value in attrs if name in ("src", "href", "action", "data", "srcset")
        ]
        assert not [name for name in given if name.startswith("on") or name == "style"]
        if given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"]
        if tag not in ("meta", "link", "input"):
            self._open.append(tag if "type" not in given else f"{tag} {given['type']}")

    def handle_endtag(self, tag):
        assert self._open.pop().split()[0] == tag

    def handle_data(self, data):
        if self._open:
            self.inside[self._open[-1]] = self.inside.get(self._open[-1], "") + data


def data(page: Page):
    return json.loads(page.inside["script application/json"])[0]


@pytest.fixture(scope="module")
def trace():
    @sgl.function
    def program(s, question):
        s += question
        forks = s.fork(2)
        forks += sgl.gen(EVIL[:-1], max_tokens=4)
        forks.join("concate_and_append")
        s += sgl.select("end", ["yes</script>", "no"])
        with s.checkpoint() as c:
            s += sgl.gen("lost")
            s["lost"]
            c.rollback()

    return program.run(EVIL[:-1], backend=sgl.ScriptedBackend(default=EVIL[:-1])).trace()


def test_the_page_is_closed_html_with_no_address(trace):
    page = Page(as_html(trace))
    assert page.addresses == ["data:,"]
    assert page.tags.count("script") == 2
    assert "img" not in page.tags


def test_its_policy_allows_its_own_script_alone(trace):
    page = Page(as_html(trace))
    for kind in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(page.inside[kind].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in page.policy
    assert page.policy.startswith("default-src 'none'; ")
    assert "unsafe" not in page.policy


def test_texts_arrive_as_they_are(trace):
    nodes = data(Page(as_html(trace)))["nodes"]
    assert ["".join(text for text, _ in node["pieces"]) for node in nodes] == [
        node.text for node in trace.nodes
    ]
    assert [[origin for _, origin in node["pieces"]] for node in nodes if node["pieces"]] == [
        ["constant"], ["generated"], ["generated"], ["joined"], ["chosen"], ["rejected"],
    ]  # fmt: skip


def test_probabilities_of_a_select_are_shown(trace):
    choices = next(
        node["choices"] for node in data(Page(as_html(trace)))["nodes"] if node["kind"] == "select"
    )
    assert [text for text, _ in choices] == ["yes</script>", "no"]
    assert sum(share for _, share in choices) == pytest.approx(1)


def test_how_sure_the_model_was_is_shown(small_engine):
    @sgl.function
    def sure(s):
        s += "A number: " + sgl.gen(
            "n", regex="[0-9]{3} [ab]é", confidence=True, return_logprob=True, temperature=0
        )

    state = sure.run(backend=small_engine)
    node = next(
        node for node in data(Page(as_html(state.trace())))["nodes"] if node["kind"] == "gen"
    )
    scores = state.trace().nodes[-1].results[0].scores
    assert "".join(token["text"] for token in node["tokens"]) == state["n"]
    assert [token["own"] for token in node["tokens"]] == list(scores.logprobs)
    for token in node["tokens"]:
        assert token["drawn"] == pytest.approx(token["own"] - token["allowed"], abs=1e-4)
    found = state.confidence("n")
    assert node["sure"] == pytest.approx({"logprob": found.logprob, "mass": found.mass}, abs=1e-4)


def test_numbers_are_there_that_are_zero(trace):
    usages = [
        node["usage"]
        for node in data(Page(as_html(trace)))["nodes"]
        if node["kind"] in ("gen", "select")
    ]
    assert all(set(usage) == set(Usage.__struct_fields__) for usage in usages)
    assert all(isinstance(value, int | float) for usage in usages for value in usage.values())


def test_halves_of_surrogate_pairs_become_signs():
    page = as_html(Trace(TraceHead(1), (TraceNode("text", text=EVIL, name=EVIL, error=EVIL),)))
    page.encode()
    assert data(Page(page))["nodes"][0]["pieces"][0][0].endswith("&amp;?")


def test_a_long_text_is_cut_with_a_note():
    node = data(Page(as_html(Trace(TraceHead(1), (TraceNode("text", text="x" * 1_000_000),)))))[
        "nodes"
    ][0]
    assert (len(node["pieces"][0][0]), node["cut"]) == (20_000, 980_000)


def test_it_has_the_arguments_of_the_program(trace):
    [(name, text)] = data(Page(as_html(trace)))["arguments"]
    assert (name, text) == ("question", EVIL[:-1])


def test_an_empty_trace_has_a_page():
    assert data(Page(as_html(Trace(TraceHead(0), ()))))["nodes"] == []


def test_a_notebooks_extract_has_no_script_and_is_short(trace):
    page = Page(render_extract(trace))
    assert "script" not in page.tags
    assert page.addresses == []
    many = Trace(
        TraceHead(10_000),
        tuple(TraceNode("text", place=i, text="word " * 9) for i in range(10_000)),
    )
    assert len(render_extract(many)) < 30_000


def test_show_writes_the_page(trace, tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)

    @sgl.function
    def program(s):
        s += "a text"

    state = program.run(backend=sgl.ScriptedBackend())
    file = state.show(tmp_path / "page.html")
    assert opened == [file.as_uri()]
    assert "a text" in file.read_text()
    again = state.show()
    assert again.read_text().startswith("<!DOCTYPE html>")
    again.unlink()


@pytest.mark.parametrize("name", ["run.html", "run.HTM"])
def test_a_trace_saved_as_html_is_the_page(trace, tmp_path, name):
    trace.save(tmp_path / name)
    assert (tmp_path / name).read_text(encoding="utf-8") == as_html(trace)


def test_two_runs_are_one_page(trace, tmp_path):
    other = Trace(TraceHead(1, arguments=(("n", "1"),)), (TraceNode("text", text="other"),))
    trace.save(tmp_path / "two.html", beside=other)
    runs = json.loads(
        Page((tmp_path / "two.html").read_text(encoding="utf-8")).inside["script application/json"]
    )
    assert [len(run["nodes"]) for run in runs] == [len(trace.nodes), 1]
    assert runs[1]["arguments"] == [["n", "1"]]
    with pytest.raises(sgl.ParameterError, match="is no page"):
        trace.save(tmp_path / "two.jsonl", beside=other)


def test_long_and_broken_arguments_are_shortened():
    class Broken:
        def __repr__(self):
            raise ValueError

    @sgl.function
    def program(s, text, rows, broken):
        s += "a"

    found = dict(
        program.run("x" * 9000, ["y"] * 9000, broken=Broken(), backend=sgl.ScriptedBackend())
        .trace()
        .head.arguments
    )
    assert list(found) == ["text", "rows", "broken"]
    assert len(found["text"]) == 2000
    assert len(found["rows"]) < 200
    assert "Broken instance" in found["broken"]


def test_an_image_is_shown_small_and_by_the_hash_of_its_content():
    pillow = pytest.importorskip("PIL.Image")
    picture = io.BytesIO()
    pillow.new("RGB", (400, 200), "red").save(picture, "PNG")

    @sgl.function
    def look(s):
        s += (
            sgl.image(picture.getvalue())
            + sgl.image("https://me:secret@a.example/i.png?key=secret")
            + sgl.gen("seen")
        )

    trace = look().run(backend=sgl.ScriptedBackend({"": "red"})).trace()
    shown, remote, _ = data(Page(as_html(trace)))["nodes"]
    assert shown["image"] == f"sha256:{hashlib.sha256(picture.getvalue()).hexdigest()}"
    small = base64.b64decode(shown["thumbnail"].removeprefix("data:image/jpeg;base64,"))
    with pillow.open(io.BytesIO(small)) as found:
        assert found.size == (96, 48)
        assert found.getpixel((40, 20))[0] > 240
    assert (remote["image"], remote["thumbnail"]) == ("https://a.example/i.png", "")


def test_a_thumbnail_of_a_foreign_file_is_a_picture_or_nothing():
    node = TraceNode("image", image="x", thumbnail="https://a.example/spy.png")
    assert data(Page(as_html(Trace(TraceHead(1), (node,)))))["nodes"][0]["thumbnail"] == ""


def test_a_page_has_the_texts_of_tokens_that_nobody_asked_for(engine, tmp_path):
    other = sgl.ScriptedBackend(default="elsewhere")

    @sgl.function
    def program(s):
        s += (
            "é: "
            + sgl.gen("a", max_tokens=8, temperature=1, ignore_eos=True)
            + sgl.gen("b", backend=other)
        )

    state = program.run(backend=engine, seed=3)
    state.trace().save(tmp_path / "trace.jsonl")
    trace = Trace.load(tmp_path / "trace.jsonl")
    (first, second) = [
        node["tokens"] for node in data(Page(as_html(trace)))["nodes"] if node["kind"] == "gen"
    ]
    decode = engine.tokenizer.decode
    assert len(first) == 8
    assert [token["text"] for token in first] == [
        decode((token["id"],), skip_special=False) for token in first
    ]
    assert second == []
