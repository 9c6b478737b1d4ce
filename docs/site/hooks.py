"""What the site has beside docs/: pages that lie elsewhere in the repository, and links from them and to them.

A link in a page is a path in the repository, which GitHub follows. Here it becomes the page of the site that is made
from that file, or the address of the file if none is.
"""

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
# Files of the repository with their places in the site.
ELSEWHERE = {"README.md": "index.md"} | {
    name: name
    for name in (
        "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/RESULTS.md", "tests/LONG_RUN.md",
        *(f"benchmarks/pictures/{path.name}" for path in (ROOT / "benchmarks" / "pictures").glob("*.svg")),
    )
}  # fmt: skip
SOURCES = {site: source for source, site in ELSEWHERE.items()}
TRACES = ROOT / "build" / "traces"  # of the programs of pages, by tests/docs/test_pages.py
# A block of a program, with what it prints, behind the comment that asks for its trace.
TRACED = re.compile(
    r"^<!-- trace: [^\n]* -->\n(```.*?^```\n(?:\n```text\n.*?^```\n)?)", re.DOTALL | re.MULTILINE
)
LINK = re.compile(r"(\]\(\s*)([^)\s#:]+)(#[^)\s]*)?(\))")


def on_config(config: MkDocsConfig) -> None:
    """Folders in the navigation are their pages."""
    config.nav = _opened(config.nav)


def _opened(nav: Any) -> Any:
    if isinstance(nav, dict):
        return {title: _opened(entry) for title, entry in nav.items()}
    if isinstance(nav, list):
        entries = [_opened(entry) for entry in nav]
        return [entry for entry in entries if entry != {"Cookbook": []}]
    if nav.endswith("/"):
        pages = sorted(
            (ROOT / "docs" / nav).glob("*.md"),
            key=lambda path: (path.name != "README.md", path.name),
        )
        return [f"{nav}{path.name}" for path in pages]
    return nav


def on_files(files: Files, config: MkDocsConfig) -> None:
    for source, site in ELSEWHERE.items():
        files.append(File.generated(config, site, abs_src_path=str(ROOT / source)))
    for page in TRACES.glob("*.html"):
        files.append(File.generated(config, f"traces/{page.name}", abs_src_path=str(page)))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    here = page.file.src_uri
    source = SOURCES.get(here, f"docs/{here}")

    def link(match: re.Match[str]) -> str:
        before, path, anchor, after = match.groups()
        target = normpath(PurePosixPath(source).parent / path)
        if not (ROOT / target).exists():
            return match[0]  # mkdocs says so
        site = ELSEWHERE.get(target, target.removeprefix("docs/"))
        if files.get_file_from_path(site) is None:
            return f"{before}{config.extra['files']}/{target}{anchor or ''}{after}"
        return f"{before}{relpath(site, str(PurePosixPath(here).parent))}{anchor or ''}{after}"

    trace = f"traces/{PurePosixPath(source).stem}.html"
    if files.get_file_from_path(trace):
        frame = f'<iframe class="trace" title="Trace of this run" loading="lazy" src="{trace}"></iframe>'
        markdown = TRACED.sub(rf"\1\nThe trace of this run:\n\n{frame}\n", markdown)
    return LINK.sub(link, markdown)
