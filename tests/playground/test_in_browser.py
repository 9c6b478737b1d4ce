"""The playground as somebody uses it, in a headless Chromium."""

import pytest

from tests.browser import Errors, chromium, faults_of
from tests.playground.test_app import TOKEN, served  # noqa: F401 # a fixture
from tests.playground.test_programs import SOURCE

# Chromium computes in processes of its own, which the list of slow tests does not see
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser(served):  # noqa: F811
    with chromium() as found:
        yield found


@pytest.fixture
def opened(browser, served):  # noqa: F811
    errors = Errors()
    contexts = []

    def opened(width=1280, scheme="light", bypass=False):
        contexts.append(
            browser.new_context(
                viewport={"width": width, "height": 844}, color_scheme=scheme, bypass_csp=bypass
            )
        )
        page = contexts[-1].new_page()
        errors.watch(page)
        page.goto(f"{served[1]}/?token={TOKEN}")
        page.wait_for_selector("#fields textarea")
        return page

    yield opened
    assert errors == []
    for context in contexts:
        context.close()


def run(page, key="Control+Enter"):
    """Runs the program from the text that has the focus, and waits for the run."""
    before = page.locator("#shown option").count()
    page.keyboard.press(key)
    page.wait_for_selector(f"#shown option:nth-child({before + 1})", state="attached")


def test_a_text_is_changed_run_and_compared(opened):
    page = opened()
    page.get_by_label("argument text").fill("<img src=x onerror=alert(1)>")
    run(page)
    assert (
        "Who is '<img src=x onerror=alert(1)>'"
        in page.locator(".node", has_text="Who is").first.inner_text()
    )
    first = page.locator("#shown").input_value()
    page.get_by_label("prompt, line 7").fill("Be long.")
    run(page)
    assert page.locator(".node").first.inner_text() == "Be long."
    page.locator("#beside").select_option(first)
    assert page.locator(".pair").first.locator(".node").all_inner_texts() == [
        "Be long.",
        "Be brief.",
    ]
    assert page.locator("img").count() == 0


def test_another_answer_runs_the_rest_again(opened):
    page = opened()
    page.locator("#panel button").focus()
    run(page, "Enter")
    page.locator(".node.gen", has_text="34").click()
    page.get_by_label("another answer for age").fill("56")
    run(page)
    assert page.locator(".node.gen.differs").all_inner_texts() == ["34", "56"]
    page.locator(".node.gen.differs").first.click()
    page.get_by_label("another answer for age").fill("old")
    page.keyboard.press("Control+Enter")
    assert "age" in page.locator("#failed b").inner_text()


def test_a_schema_is_reported_on_as_it_is_typed(opened):
    page = opened()
    schema, told = page.get_by_label("JSON schema, line 15"), page.locator(".report").first
    page.wait_for_selector(".report:has-text('for example')")
    schema.fill('{"type": "objec"}')
    page.wait_for_selector(".report .wrong")
    assert "refused" in told.inner_text()
    schema.fill("{")
    page.wait_for_selector(".report:has-text('not JSON')")


def test_an_error_is_shown_at_its_line_and_the_page_lives(opened, served):  # noqa: F811
    page = opened()
    page.locator("#program").select_option("failing")
    page.locator("#panel button").click()
    assert page.locator("#failed pre").inner_text().endswith('    raise KeyError("nothing")')
    file = served[0].file
    file.write_text(SOURCE.replace("    s += inner()", "    s += inner("))
    page.locator("#program").select_option("profile")
    page.locator("#panel button").click()
    page.wait_for_selector("#failed:has-text('was never closed')")
    file.write_text(SOURCE)
    page.locator("#panel button").click()
    page.wait_for_selector(".node.gen")
    assert page.locator("#failed").inner_text() == ""


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light")])
def test_it_fits_and_is_accessible(opened, width, scheme):
    page = opened(width, scheme, bypass=True)
    page.get_by_label("argument text").focus()
    run(page)
    page.locator(".node.gen").first.click()
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert faults_of(page) == []
