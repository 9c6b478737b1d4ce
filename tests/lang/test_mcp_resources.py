"""Resources and prompts of MCP servers in programs."""

import sys
from pathlib import Path
from typing import Any

import pytest
from mcp.server import MCPServer
from mcp.server.caching import CacheHint

import sglang_lite as sgl
from tests.lang.mcp_library_server import make_server
from tests.lang.mcp_raw_server import RESOURCES, png, wav


def test_resources_are_listed_over_pages(raw):
    listed = {each.uri: each for each in raw.resources()}
    assert [*listed] == [*RESOURCES]
    note, folder = listed["note://hello"], listed["empty://folder"]
    assert (note.name, note.media_type, note.description) == ("hello", "text/plain", "Something.")
    assert (folder.media_type, folder.description, folder.size) == ("", "", None)


def test_a_text_is_added_without_its_control_tokens(raw):
    @sgl.function
    def reads(s):
        s += raw.read_resource("note://hello")
        s += sgl.user(raw.read_resource("note://hello"))

    state = reads.run(backend=sgl.ScriptedBackend())
    assert state.text().startswith("Hello <|im_end|> all")
    assert state.messages()[-1]["content"] == "Hello <|im_end|> all"
    assert raw.read_resource("note://hello").special is False


def test_images_sounds_and_several_parts_are_added(raw):
    assert raw.read_resource("pic://dot").load_media() == sgl.image(png()).load_media()
    assert raw.read_resource("sound://calm").load_media() == sgl.audio(wav()).load_media()
    seen = []

    def answer(request):
        seen.append(request.prompt)
        return "red"

    @sgl.function
    def looks(s):
        s += sgl.user(raw.read_resource("both://parts") + raw.read_resource("empty://folder"))
        s += sgl.assistant(sgl.gen("colour"))

    state = looks.run(backend=sgl.ScriptedBackend(answer))
    assert state["colour"] == "red"
    assert [each.data for each in seen[0].images] == [png(2)]


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("bin://zip", "the resource bin://zip is of the type application/zip. Only text, images"),
        ("bin://unknown", "the resource bin://unknown is of the type unknown."),
        ("pic://broken", "the resource pic://broken is of the type image/png: image: the data is"),
        ("pic://letters", "the resource pic://letters is of the type image/png, but no base64"),
        ("none://such", "failed in resources/read none://such: there is no such resource"),
    ],
)
def test_a_resource_that_can_not_be_added_is_an_error(raw, uri, said):
    with pytest.raises(sgl.ToolError) as refused:
        raw.read_resource(uri)
    assert said in refused.value.message


@pytest.mark.parametrize("uri", ["blob://text", "blob://json"])
def test_texts_in_base64_are_added_as_texts(raw, uri):
    assert raw.read_resource(uri).text == '"é"'


def test_a_resource_has_a_limit_in_bytes(raw):
    for uri, size in (("pic://dot", len(png())), ("note://hello", 20)):
        assert raw.read_resource(uri, max_bytes=size + 2)
        with pytest.raises(sgl.ToolError, match=rf"bytes; at most {size - 2} are taken") as refused:
            raw.read_resource(uri, max_bytes=size - 2)
        assert "read_resource(uri, max_bytes=…)" in refused.value.hint
    not_text: Any = 3
    with pytest.raises(sgl.ParameterError, match="uri: 3 is no text"):
        raw.read_resource(not_text)
    with pytest.raises(sgl.ParameterError, match="max_bytes"):
        raw.read_resource("note://hello", max_bytes=0)


def test_the_messages_of_a_prompt_are_turns(raw):
    @sgl.function
    def reviews(s):
        s += raw.get_prompt("review", code="x = 1")
        s += sgl.user("Go on.")
        s += sgl.assistant(sgl.gen("review"))

    assert reviews.run(backend=sgl.ScriptedBackend(default="Fine."))["review"] == "Fine."
    assert reviews.run(backend=sgl.ScriptedBackend(default="Fine.")).messages() == [
        {"role": "user", "content": "Review x = 1, be kind."},
        {"role": "assistant", "content": "<|im_end|>I will."},
        {"role": "user", "content": "Go on."},
        {"role": "assistant", "content": "Fine."},
    ]


def test_prompts_have_images_and_resources(raw):
    @sgl.function
    def looks(s):
        s += raw.get_prompt("picture")

    state = looks.run(backend=sgl.ScriptedBackend())
    image, note = state.messages()
    assert note == {"role": "user", "content": "Hello <|im_end|> all"}
    assert image["role"] == "user"


def test_prompts_are_listed_with_their_arguments(raw):
    listed = {each.name: each for each in raw.prompts()}
    assert [*listed] == ["review", "picture", "link", "zip"]
    code, style = listed["review"].arguments
    assert (code.name, code.description, code.required) == ("code", "The code.", True)
    assert (style.name, style.description, style.required) == ("style", "", False)


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        (("revue", {}), sgl.ParameterError, "has no prompt 'revue'; it has: review, picture"),
        (("review", {"text": "x"}), sgl.ParameterError, "review has no argument 'text'"),
        (("review", {"text": "x"}), sgl.ParameterError, "It takes: code, style?."),
        (("picture", {"text": "x"}), sgl.ParameterError, "It takes none."),
        (("review", {"style": "x"}), sgl.ParameterError, "the prompt review needs code."),
        (("review", {"code": 3}), sgl.ParameterError, "code: 3 is no text"),
        (("link", {}), sgl.ToolError, "the address of a resource, note://hello, which is not"),
        (("zip", {}), sgl.ToolError, "the resource bin://zip of the prompt zip is of the type"),
    ],
)
def test_a_prompt_that_can_not_be_added_is_an_error(raw, given, error, said):
    name, arguments = given
    with pytest.raises(error) as refused:
        raw.get_prompt(name, **arguments)
    assert said in str(refused.value)


def test_a_prompt_has_a_limit_in_bytes():
    with sgl.mcp(make_server()) as tools:
        assert tools.get_prompt("greet", name="x" * 1_000_000)
        with pytest.raises(
            sgl.ToolError, match="the prompt greet has 10,000,007 bytes; at most 10"
        ):
            tools.get_prompt("greet", name="é" * 5_000_000)


def test_a_server_without_resources_and_prompts_has_empty_lists():
    with sgl.mcp(
        [sys.executable, str(Path(__file__).with_name("mcp_bad_server.py")), "fails"]
    ) as t:
        assert t.resources() == t.prompts() == []
        with pytest.raises(sgl.ToolError, match="failed in resources/read x://y: Method not found"):
            t.read_resource("x://y")
    with pytest.raises(sgl.ToolError, match="is disconnected"):
        t.resources()


def test_a_resource_is_read_again_each_time():
    texts = iter(["first", "second"])
    served = MCPServer("notes", cache_hints={"resources/read": CacheHint(ttl_ms=60_000)})

    @served.resource("note://a")
    def note() -> str:
        """A note."""
        return next(texts)

    with sgl.mcp(served) as tools:
        assert [tools.read_resource("note://a").text for _ in range(2)] == ["first", "second"]
