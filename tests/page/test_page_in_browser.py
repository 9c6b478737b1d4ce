"""The page of a trace as somebody sees it, in a headless Chromium."""

import pytest

import sglang_lite as sgl
from sglang_lite.lang.trace import Trace, as_html
from sglang_lite.protocol import Generation, TraceHead, TraceNode, Usage
from tests.browser import Errors, chromium, faults_of
from tests.page.test_page import EVIL

# Chromium computes in processes of its own, which the list of slow tests does not see
pytestmark = pytest.mark.slow


@sgl.function
def compare(s, places):
    s += sgl.system("You answer in one short sentence.")
    branches = s.fork(len(places))
    branches += lambda i: sgl.user(f"What is {places[i]} known for?")
    branches += sgl.assistant(sgl.gen("known_for", max_tokens=24, stop="."))
    branches.join()


@sgl.function
def hostile(s, text):
    s += sgl.user(text) + sgl.assistant(sgl.gen(text, max_tokens=9))
    s += sgl.select("end", [text, "no"])
    s += sgl.gen("refused", check=lambda text: False)


PLACES = ["Venice", "Japan", "Rome", "Peru", "Oslo"]


def agent():
    """Trace of a program that paused between two generations, the second of which waited and found
    its prefix gone.
    """
    answers = [
        Generation("call", usage=Usage(100, 90, 4, total_s=1.0, first_token_s=0.2)),
        Generation(
            "done", usage=Usage(120, 20, 4, queue_s=0.5, total_s=2.0, first_token_s=1.5, host_tokens=12, disk_tokens=4),
            meta={"cache_miss": {"reason": "evicted", "at": 20}},
        ),
    ]  # fmt: skip
    nodes = (
        TraceNode("text", text="Task."),
        TraceNode("gen", place=1, name="a", text="call", end=1.0, results=(answers[0],)),
        TraceNode("text", place=2, text="Result.", start=1.0, end=1.0),
        TraceNode("gen", place=3, name="b", text="done", start=4.0, end=6.0, results=(answers[1],)),
        TraceNode("fork", place=4),
        TraceNode("text", path=(4, 1), text="of the second branch"),
    )
    return Trace(TraceHead(len(nodes), 6.0), nodes)


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Addresses of the pages, by name."""
    folder = tmp_path_factory.mktemp("pages")
    text = EVIL[:-1]
    runs = {
        "one": (compare.run(PLACES, backend=sgl.ScriptedBackend(default="Gold.")).trace(), None),
        "two": (
            compare.run(PLACES, backend=sgl.ScriptedBackend(default="Gold.")).trace(),
            compare.run(
                ["Venice", "Nauru"],
                backend=sgl.ScriptedBackend({"Nauru": "Salt."}, default="Gold."),
            ).trace(),
        ),
        "hostile": (hostile.run(text, backend=sgl.ScriptedBackend(default=text)).trace(), None),
        "empty": (Trace(TraceHead(0), ()), None),
        "agent": (agent(), None),
    }
    assert len(runs["one"][0].nodes) == 57
    for name, (trace, beside) in runs.items():
        (folder / f"{name}.html").write_text(as_html(trace, beside), encoding="utf-8")
    return {name: (folder / f"{name}.html").as_uri() for name in runs}


@pytest.fixture(scope="module")
def browser(pages):
    with chromium() as found:
        yield found


@pytest.fixture
def opened(browser, pages):
    errors = Errors()
    contexts = []

    def opened(name, width=1280, scheme="light", bypass=False):
        contexts.append(
            browser.new_context(
                viewport={"width": width, "height": 844}, color_scheme=scheme, bypass_csp=bypass
            )
        )
        page = contexts[-1].new_page()
        errors.watch(page)
        page.goto(pages[name])
        page.wait_for_selector("html[data-ready]")
        return page

    yield opened
    assert errors == []
    for context in contexts:
        context.close()


def test_it_opens_on_the_conversation(opened):
    page = opened("one")
    bubbles = page.locator(".bubble")
    assert 11 == bubbles.count() <= 16
    assert bubbles.nth(0).inner_text().splitlines()[-1] == "You answer in one short sentence."
    assert "<|im_start|>" not in page.locator("#nodes").inner_text()
    page.locator("summary").nth(0).click()
    assert "<|im_start|>system" in bubbles.nth(0).inner_text()
    assert page.locator(".arguments").inner_text().split("\n") == ["places", str(PLACES)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["one", "two", "hostile", "empty"])
@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits_its_window(opened, name, width):
    page = opened(name, width)
    for node in page.locator(".node").all()[:2]:
        node.click()
    assert page.evaluate("document.documentElement.scrollWidth") == width


@pytest.mark.parametrize(
    ("name", "width", "scheme"), [("two", 390, "light"), ("hostile", 1280, "dark")]
)
def test_it_is_accessible_and_its_contrast_is_aa(opened, name, width, scheme):
    page = opened(name, width, scheme, bypass=True)
    page.locator(".node").nth(1).click()
    assert faults_of(page) == []


def test_texts_are_never_markup(opened):
    page = opened("hostile")
    for i in range(page.locator(".node").count()):
        page.locator(".node").nth(i).click()
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 2
    assert (
        page.locator(".bubble")
        .nth(0)
        .inner_text()
        .splitlines()[-1]
        .startswith("</script><script>alert(1)</script><img")
    )
    assert "<img src=x onerror=alert(2)>␀␛[31m␣␣&amp;" in page.locator("#details").inner_text()


def test_the_keyboard_reaches_everything(opened):
    page = opened("one")
    page.keyboard.press("/")
    page.keyboard.type("Rome")
    focused = "(({ className, id, tagName }) => className || id || tagName)(document.activeElement)"
    order = []
    for _ in range(5):
        page.keyboard.press("Tab")
        order.append(page.evaluate(focused))
    assert order == ["filter", "order", "scroll", "SUMMARY", "node text"]
    chosen = page.locator("[aria-current]")
    page.keyboard.press("Home")
    assert chosen.inner_text() == "What is Rome known for?"
    page.locator("#search").fill("")
    chosen.focus()
    page.keyboard.press("ArrowDown")
    assert chosen.inner_text() == "Gold"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "details"
    page.keyboard.press("Escape")
    page.keyboard.press("End")
    assert chosen.inner_text() == "joined"


def test_search_filter_and_order(opened):
    page = opened("two")
    page.locator("#search").fill("nauru")
    assert page.locator(".node:visible").all_inner_texts() == ["What is Nauru known for?"]
    page.locator("#search").fill("")
    page.locator("#filter").select_option("gen")
    assert page.locator(".bubble:visible").count() == 7
    page.locator("#order").select_option("slowest")
    shown = page.evaluate("items.map((node) => node.end - node.start)")
    assert shown == sorted(shown, reverse=True)
    assert len(shown) == 7


def test_two_runs_stand_beside_each_other(opened):
    page = opened("two")
    system = page.locator(".pair").nth(0).locator(".bubble")
    a, b = (system.nth(i).bounding_box() for i in (0, 1))
    assert a["y"] == b["y"]
    assert a["x"] + a["width"] < b["x"]
    page.locator("#filter").select_option("differs")
    page.locator(".node", has_text="Salt").click()
    told = page.locator("#details").inner_text()
    assert "Run A" in told
    assert "another text" in told


def test_its_times_have_an_axis(opened):
    page = opened("one")
    whole, ticks = page.evaluate("[whole, ticks()]")
    assert ticks[0] == 0
    assert 2 <= len(ticks) <= 9
    assert ticks[-1] <= whole
    # the first branch, where it begins
    page.locator("canvas").click(position={"x": 125, "y": 20 + 18 + 8})
    assert page.locator("[aria-current]").inner_text() == "Gold"


def test_pauses_and_what_left_the_cache_are_shown(opened):
    page = opened("agent")
    assert page.locator(".bubble").count() == 3
    assert page.locator(".column").inner_text().split("\n") == ["branch 1", "of the second branch"]
    about = page.locator(".bubble").nth(1).locator(".about").inner_text()
    assert "paused 3 s" in about
    assert "20 of 120 cached (12 from the host, 4 from files)" in about
    assert "not cached: evicted at token 20" in about
    page.locator("#filter").select_option("pause")
    assert page.locator(".node:visible").all_inner_texts() == ["Result.", "done"]
    page.locator(".node", has_text="done").click()
    assert "was dropped, for want of room" in page.locator("#details").inner_text()
