"""The recipes of the cookbook: each runs with the command of its page, and prints what the page
shows.

`python -m tests.docs.test_recipes NAME …` writes what they print into their pages.
"""

import contextlib
import importlib.util
import io
import re
import runpy
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import sglang_lite as sgl
from tests.hub import ask, local_hub
from tests.test_examples import COMMAND, LARGER_MODEL, PRINTED, RECIPES, ROOT

NEEDS = {"documents_ray": "ray"}  # of what the extra `dev` does not bring


def default_model_as_folder(folder: Path) -> None:
    """Writes the default model as its folder is on the hub."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from sglang_lite.runtime.models.resolve import resolve

    file = resolve("smollm2-135m")
    model = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype="bfloat16",
        quantization_config=GgufConfig(dequantize=True),
    )
    for part in (model, AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)):
        part.save_pretrained(folder)


@contextlib.contextmanager
def hub_of_the_default_model() -> Iterator[None]:
    """A hub that has it, whose cache is empty."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        default_model_as_folder(folder / "model")
        url = stack.enter_context(
            local_hub({"HuggingFaceTB/SmolLM2-135M-Instruct": folder / "model"})
        )
        ask(url, folder / "cache", stack.enter_context(pytest.MonkeyPatch.context()))
        yield


def shown(page: str) -> re.Match[str]:
    found = PRINTED.search(page)
    assert found is not None
    return found


def printed(name: str, engine: sgl.Engine | sgl.BaseBackend, *arguments: str) -> str:
    """What a recipe prints when its page's command runs it, with further arguments."""
    command = COMMAND.search(RECIPES[name].read_text())
    assert command is not None
    sgl.set_default_backend(engine)
    with contextlib.ExitStack() as stack, contextlib.redirect_stdout(io.StringIO()) as out:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(sys, "argv", [command[1], *arguments])
        for key in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
            patch.delenv(key, raising=False)
        if command[3]:
            patch.setattr(sys, "stdin", stack.enter_context(open(ROOT / command[3])))
        if name == "hub_model":
            stack.enter_context(hub_of_the_default_model())
        runpy.run_path(str(ROOT / command[1]), run_name="__main__")
    return out.getvalue()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", [name for name in RECIPES if name not in LARGER_MODEL])
def test_a_recipe_prints_what_its_page_shows(name, documented):
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    if name == "gpu_box" and torch.cuda.is_available():
        pytest.skip("the page shows a machine without a GPU")
    assert printed(name, documented) == shown(RECIPES[name].read_text())[0]


def main(names: list[str]) -> None:
    with sgl.Engine(deterministic=True, dtype="float32", in_process=True) as engine:
        for name in names or [name for name in RECIPES if name not in LARGER_MODEL]:
            page = RECIPES[name].read_text()
            start, end = shown(page).span()
            RECIPES[name].write_text(page[:start] + printed(name, engine) + page[end:])


if __name__ == "__main__":
    main(sys.argv[1:])
