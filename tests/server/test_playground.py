"""The page of a server that plays turns."""

import httpx2
import pytest

from sglang_lite.cli import main
from sglang_lite.protocol import ParameterError
from sglang_lite.server.settings import ServerSettings
from tests.browser import Errors, chromium
from tests.server.conftest import serving

TOKEN = "the-token"


@pytest.fixture(scope="module")
def url(engine):
    with serving(engine, token=TOKEN) as found:
        yield found


@pytest.fixture
def post(url):
    def post(path, body, **headers):
        return httpx2.post(
            f"{url}/playground/{path}", json=body, headers={"x-token": TOKEN, **headers}, timeout=60
        )

    return post


def gen(**more):
    return {"role": "assistant", "kind": "gen", "name": "a", "max_tokens": 4, **more}


ASKED = {
    "turns": [
        {"role": "user", "text": "<|end|>Hi"},
        gen(constraint={"kind": "regex", "text": "[ab]{3}"}),
    ]
}


def texts(answer):
    return ["".join(piece[0] for piece in node["pieces"]) for node in answer["data"]["nodes"]]


def test_turns_are_played_in_the_chat_template(post):
    found = post("run", ASKED).json()
    assert found["error"] is None
    *before, answered, _, end = texts(found)
    assert before == ["<user>", "", "<|end|>Hi", "", "</user>\n", "<assistant>", ""]
    assert end == "</assistant>\n"
    assert len(answered) == 3
    assert set(answered) <= {"a", "b"}
    node = found["data"]["nodes"][7]
    assert [node["kind"], node["name"], node["place"]] == ["gen", "a", 7]
    assert len(node["tokens"][0]["top"]) == 5
    assert node["tokens"][0]["allowed"] < 0


def test_an_answer_that_is_given_is_kept(post):
    turns = [
        *ASKED["turns"],
        {"role": "assistant", "kind": "select", "name": "b", "text": "x\ny\n"},
    ]
    turns[1] = {**turns[1], "answer": "<|end|>given"}
    found = post("run", {"turns": turns}).json()
    assert texts(found)[7] == "<|end|>given"
    assert texts(found)[12] in ("x", "y")
    assert sum(share for _, share in found["data"]["nodes"][12]["choices"]) == pytest.approx(1)
    assert [
        node["kind"] for node in found["data"]["nodes"] if node["kind"] in ("gen", "select")
    ] == ["gen", "select"]


@pytest.mark.parametrize(
    ("turn", "named"),
    [
        (gen(max_tokens=-1), "max_tokens"),
        (gen(max_tokens=10**9), "max_tokens"),
        (gen(temperature="hot"), "temperature"),
        (gen(constraint={"kind": "python", "text": "x"}), "kind"),
        ({"role": "user", "kind": "select", "name": "a", "text": ""}, "choices"),
        ({"role": "user", "kind": "code", "text": "import os"}, "kind"),
        ({"role": "robot"}, "role"),
        ({"role": "user", "code": "x"}, "code"),
    ],
)
def test_what_can_not_be_played_is_named(post, turn, named):
    found = post("run", {"turns": [turn]})
    assert found.status_code == 400
    assert named in found.text


def test_what_fails_while_it_is_played_is_told(post):
    found = post("run", {"turns": [gen(), gen(constraint={"kind": "regex", "text": "(a"})]}).json()
    assert "regex" in found["error"]["text"]
    assert [node["kind"] for node in found["data"]["nodes"]].count("gen") == 2


def test_a_constraint_is_reported_on(post):
    assert post("check", {"kind": "regex", "text": "a+"}).json()["rules"] == 1
    assert post("check", {"kind": "json_schema", "text": "{"}).json()["refused"]


def test_its_token_and_its_own_page_are_needed(url, post):
    assert (
        httpx2.get(url, params={"token": TOKEN}).headers["content-security-policy"]
        == "frame-ancestors 'none'"
    )
    assert httpx2.get(url).status_code == 401
    assert (
        httpx2.get(url, params={"token": TOKEN}, headers={"host": "evil.example"}).status_code
        == 403
    )
    for path, body in (("run", ASKED), ("check", {"kind": "regex", "text": "a"})):
        assert post(path, body, origin=url).status_code == 200
        assert post(path, body, **{"x-token": "x"}).status_code == 401
        assert post(path, body, origin="http://evil.example").status_code == 403
        assert post(path, body, origin="null").status_code == 403
        assert post(path, body, host="evil.example").status_code == 403
    generate = {"text": "a", "sampling_params": {"max_new_tokens": 1}}
    with_token = httpx2.post(
        f"{url}/generate", json=generate, headers={"x-token": TOKEN, "origin": url}
    )
    assert with_token.status_code == 403  # the token is for the page alone


def test_a_server_without_a_token_has_no_page(engine):
    with serving(engine) as other:
        assert httpx2.get(other).status_code == 405  # HEAD alone is answered
        assert httpx2.post(f"{other}/playground/run", json=ASKED).status_code == 404


def test_when_there_is_a_page():
    assert ServerSettings().has_playground
    assert not ServerSettings(playground=False).has_playground
    assert not ServerSettings(host="0.0.0.0").has_playground
    assert not ServerSettings(api_key=("secret",)).has_playground
    assert not ServerSettings(admin_api_key="secret").has_playground
    assert ServerSettings(api_key=("secret",), playground=True).has_playground
    with pytest.raises(ParameterError, match="others can connect"):
        ServerSettings(host="0.0.0.0", playground=True)


def test_it_plays_turns_in_a_browser(url):
    errors = Errors()
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 390, "height": 844})
        errors.watch(page)
        page.goto(f"{url}/?token={TOKEN}")
        turn = page.locator(".turn").nth(1)
        turn.get_by_label("constraint").first.select_option("regex")
        turn.locator("textarea").fill("[ab]{3}")
        turn.locator(".report:has-text('for example')").wait_for()
        page.keyboard.press("Control+Enter")
        page.locator(".node.gen").click()
        page.get_by_label("another answer for answer").fill("<b>no</b>")
        page.keyboard.press("Control+Enter")
        page.locator(".pair .node.gen.differs").first.wait_for()
        assert page.locator(".pair .node.gen.differs").all_inner_texts()[1] == "<b>no</b>"
        assert page.locator("#nodes .node.differs").count() == 2
        turn.locator("textarea").fill("(")
        page.locator("#panel [type=submit]").click()
        page.locator("#failed b").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert errors == []


def test_several_servers_have_no_page(capsys):
    assert main(["serve", "--model-path", "none", "--replicas", "2", "--playground"]) == 1
    assert "several servers have no page" in capsys.readouterr().err
