"""Every recipe of the cookbook runs with the real models, and is right, wrong or either as
docs/models.md says.

`python -m tests.real.test_recipes FILE` prints what each recipe prints with a model's file, and
whether that is right.
"""

import contextlib
import sys
from collections.abc import Iterator

import pytest

import sglang_lite as sgl
from tests.docs import test_recipes as pages
from tests.real.conftest import file_of
from tests.real.verdicts import NEAR_TIES, NOT_RUN, OWN_MODEL, VARIES, is_right, verdicts
from tests.test_examples import RECIPES

MODELS = ("qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b")


def printed(name: str, engine: sgl.Engine, file: str) -> str:
    """Returns what a recipe prints with an engine."""
    arguments = [file] if name == "own_gguf" else []
    return pages.printed(name, engine, *arguments)


@contextlib.contextmanager
def running(file: str) -> Iterator[sgl.Engine]:
    """Starts the engine that the recipes run on, as a user starts it."""
    with sgl.Engine(file, in_process=True) as engine:
        yield engine


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Iterator[tuple[str, sgl.Engine]]:
    with running(str(file_of(request.param))) as engine:
        yield request.param, engine


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", [name for name in RECIPES if name not in OWN_MODEL])
def test_a_recipe_is_right_with_the_models_that_the_docs_name(name, model):
    called, engine = model
    try:
        text = printed(name, engine, str(file_of(called)))
    except sgl.SglError as error:  # with which an agent gives up
        text = repr(error)
    said = verdicts(called)[name].partition(":")[0]
    if said == VARIES:
        said, text = "right", text.replace(*NEAR_TIES[name])
    found = "right" if is_right(name, text) else "wrong"
    if said == NOT_RUN:
        pytest.skip(f"docs/models.md says nothing yet of {name} with {called}: it is {found} here")
    assert found == said, text


def main(file: str, names: list[str]) -> None:
    with running(file) as engine:
        for name in names or [name for name in RECIPES if name not in OWN_MODEL]:
            try:
                text = printed(name, engine, file)
                verdict = "right" if is_right(name, text) else "wrong"
            except Exception as error:
                text, verdict = repr(error), "fails"
            print(f"=== {name}: {verdict}\n{text}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
