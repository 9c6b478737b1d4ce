"""docs/integrations.md: its examples print what it shows."""

import contextlib
import io
from importlib.util import find_spec

import pytest

from tests.docs.test_pages import ROOT, blocks

LIBRARIES = ("dspy", "langchain_core", "llama_index", "lm_eval", "pydantic_ai")
MISSING = [name for name in LIBRARIES if find_spec(name) is None]


@pytest.mark.skipif(
    bool(MISSING), reason=f"not installed: {', '.join(MISSING)}; `make test-clients` installs them"
)
@pytest.mark.filterwarnings("default")  # the libraries' own
def test_the_examples_print_what_the_page_shows():
    names: dict = {"__name__": "page"}
    try:
        for block in blocks(ROOT / "docs" / "integrations.md"):
            if block.language != "python":
                continue
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(block.text, f"integrations.md:{block.line}", "exec"), names)
            assert printed.getvalue() == (block.shown or "")
    finally:
        names["sgl"].set_default_backend(None)
        names["engine"].close()
