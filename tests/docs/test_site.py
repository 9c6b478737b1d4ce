"""The site, after `make docs` has built it: links lead somewhere, and a browser finds no fault with
any page, narrow or wide, light or dark.
"""

from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.browser import Errors, chromium

SITE = Path(__file__).parents[2] / "build" / "site"
# The pages of traces have tests of their own; 404.html is for servers.
PAGES = [
    page
    for page in sorted(SITE.rglob("*.html"))
    if page.parent.name != "traces" and page.name != "404.html"
]
# number of the palette in mkdocs.yml: light, dark; width
SIZES = [(0, 1280), (1, 1280), (1, 390), (0, 390)]
pytestmark = pytest.mark.skipif(not PAGES, reason="make docs builds the site")

# Texts of less contrast than AA asks for: 3 : 1 if they are large, else 4.5 : 1. axe's rule, which
# takes seconds a page.
FAINT = """() => {
  const rgba = text => { const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number); return [r, g, b, a] }
  const over = (top, below) => [0, 1, 2].map(i => top[i] * top[3] + below[i] * (1 - top[3])).concat(1)
  const behind = element => {
    const colour = element ? rgba(getComputedStyle(element).backgroundColor) : [255, 255, 255, 1]
    return colour[3] === 1 ? colour : over(colour, behind(element.parentElement))
  }
  const light = colour => [0.2126, 0.7152, 0.0722].reduce((sum, share, i) => {
    const part = colour[i] / 255
    return sum + share * (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
  }, 0.05)
  const seen = new Map()
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT)
  for (let node; node = walk.nextNode();) {
    const element = node.parentElement
    if (!node.data.trim() || !element.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue
    const {color, fontSize, fontWeight} = getComputedStyle(element), back = behind(element), size = parseFloat(fontSize)
    const key = [color, back, size, fontWeight].join()
    if (seen.has(key)) continue
    const [more, less] = [light(over(rgba(color), back)), light(back)].sort((a, b) => b - a)
    const least = size >= 24 || (size >= 18.66 && fontWeight >= 700) ? 3 : 4.5
    seen.set(key, more / less < least ? `${node.data.trim().slice(0, 40)}: ${(more / less).toFixed(2)}, ${color}` : null)
  }
  return [...seen.values()].filter(Boolean)
}"""


class Links(HTMLParser):
    """Links of a page to files of the site, and the places that links can lead to."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links, self.places = list[str](), {"", "__top"}
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value and not urlsplit(value).scheme:
                self.links.append(value)
            elif name in ("id", "name") and value:
                self.places.add(value)


def test_links_lead_to_files_and_places_that_there_are():
    pages = {page.resolve(): Links(page) for page in PAGES}
    broken = []
    for page, found in pages.items():
        for link in found.links:
            parts = urlsplit(link)
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            if not target.is_file() or (
                target in pages and unquote(parts.fragment) not in pages[target].places
            ):
                broken.append((page.name, link))
    assert broken == []


@pytest.fixture(scope="module")
def shown() -> Iterator[object]:
    with chromium() as browser:
        yield browser.new_page()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(SITE).as_posix())
def test_a_browser_finds_no_fault(page, shown):
    errors = Errors()
    errors.watch(shown)
    shown.goto(page.as_uri())
    shown.add_style_tag(content="* { transition: none !important }")
    for scheme, width in SIZES:
        shown.set_viewport_size({"width": width, "height": 800})
        shown.evaluate(f"document.getElementById('__palette_{scheme}').click()")
        assert shown.evaluate("document.documentElement.scrollWidth") <= width, (scheme, width)
        assert shown.evaluate(FAINT) == [], (scheme, width)
    assert errors == []
