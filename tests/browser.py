"""Headless Chromium for the tests of pages."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


class Errors(list):
    """What a page has said on its console, and its dialogs: text that became script."""

    def watch(self, page) -> None:
        page.on(
            "console", lambda message: self.append(message.text) if message.type != "log" else None
        )
        page.on("pageerror", lambda error: self.append(str(error)))
        page.on("dialog", lambda dialog: (self.append(dialog.message), dialog.dismiss()))


@contextmanager
def chromium() -> Iterator[object]:
    """The browser of playwright, whose page is checked for faults at the end. While it is open, its
    event loop counts as this thread's: no program may be run here.
    """
    found = shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("no Chromium is installed: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


def faults_of(page) -> list[tuple[str, str]]:
    """Faults that axe finds, contrast below AA among them, as pairs of a rule and where it is
    broken. The page's policy has to be bypassed.
    """
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [(each["id"], str(node["target"])) for each in found for node in each["nodes"]]
