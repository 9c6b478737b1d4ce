"""The agents of the cookbook, which need a larger model than the tests have: with what such a model
wrote they print what their pages show, and they hold against a model that attacks them.
"""

import json
import runpy
from pathlib import Path

import pytest

import sglang_lite as sgl
from tests.docs.test_recipes import printed, shown
from tests.test_examples import EXAMPLES, LARGER_MODEL, RECIPES

FIXED = {"old": "return width + height", "new": "return width * height"}


def call(tool, **arguments):
    return json.dumps({"tool": tool, "arguments": arguments})


def play(*texts):
    """A model that writes these texts, one after another, and no more."""
    left = iter(texts)
    return sgl.ScriptedBackend(lambda _: next(left))


def load(name):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


def answer(text):
    return json.dumps({"answer": text})


LOOK_UP = call("look_up_order", order="A17")
WRITTEN = {
    "support_agent": [
        LOOK_UP,
        call("refund", order="A17", amount=40),
        answer("The order A17 was refunded for $40."),
    ],
    "coding_agent": [
        call("run_tests"),
        call("read_file", name="area.py"),
        call("replace", name="area.py", **FIXED),
        call("run_tests"),
        answer("The tests pass."),
    ],
    "data_agent": [
        "```python\nsouth_sales = list_sales('south')\n"
        "total_units_sold = sum(sale.units for sale in south_sales)\nreturn total_units_sold\n```",
        "```python\nrevenue = 0\nfor sale in list_sales('north'):\n"
        "    revenue += sale.units * sale.price\nreturn revenue\n```",
        "```python\nprofit = 0\nfor sale in list_sales('west'):\n"
        "    profit += sale.units * (sale.price - cost(sale.product))\nreturn profit\n```",
    ],
}


def test_each_agent_has_a_script():
    assert WRITTEN.keys() == LARGER_MODEL


@pytest.mark.parametrize("name", WRITTEN)
def test_an_agent_prints_what_its_page_shows(name):
    assert printed(name, play(*WRITTEN[name])) == shown(RECIPES[name].read_text())[0]


@pytest.mark.parametrize("name", WRITTEN)
def test_an_agent_is_short(name):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 60


# --------------------------------------------------------------------------------- the support agent


@pytest.mark.parametrize("amount", [51, 1e9])
def test_a_refund_that_is_denied_is_not_paid(amount):
    text = printed(
        "support_agent", play(LOOK_UP, call("refund", order="A17", amount=amount), answer("No."))
    )
    assert text.endswith("refunds: {} answer: No.\n")


def test_an_order_is_refunded_only_once():
    refund = call("refund", order="A17", amount=40)
    text = printed("support_agent", play(LOOK_UP, refund, refund, refund, answer("Done.")))
    assert text.endswith("refunds: {'A17': 40.0} answer: Done.\n")


# ---------------------------------------------------------------------------------- the coding agent


@pytest.fixture
def recipe():
    return load("coding_agent")


@pytest.fixture
def folder(tmp_path, recipe):
    """A folder with links out of it, beside others that the model must not reach."""
    root = tmp_path / "work"
    for place in ("work/inner", "work2", "outside"):
        (tmp_path / place).mkdir(parents=True)
    for place in ("work/a.py", "work/inner/b.py", "work2/secret.py", "outside/secret.py"):
        (tmp_path / place).write_text("secret" if "secret" in place else "own")
    (root / "file_link.py").symlink_to(tmp_path / "outside/secret.py")
    (root / "folder_link").symlink_to(tmp_path / "outside")
    (root / "up_link").symlink_to("..")
    (root / "new_link.py").symlink_to(tmp_path / "outside/new.py")
    return recipe["Folder"](root)


ATTACKS = [
    "../outside/secret.py",
    "../work2/secret.py",
    "inner/../../outside/secret.py",
    "./../work/../outside/secret.py",
    "{tmp_path}/outside/secret.py",
    "{tmp_path}/work2/secret.py",
    "{tmp_path}/work/../outside/secret.py",
    "file_link.py",
    "folder_link/secret.py",
    "up_link/outside/secret.py",
    "folder_link/../outside/secret.py",
    "new_link.py",
    "folder_link/new.py",
    "../new.py",
]


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize(
    "attack",
    [
        lambda name: call("read_file", name=name),
        lambda name: call("replace", name=name, old="secret", new="overwritten"),
        lambda name: call("replace", name=name, old="", new="overwritten"),
    ],
    ids=["read", "replace", "write"],
)
def test_a_path_out_of_the_folder_is_an_error_that_the_model_reads(
    name, attack, folder, recipe, tmp_path
):
    before = contents(tmp_path)
    model = play(attack(name.format(tmp_path=tmp_path)), answer("I could not."))
    state = recipe["program"].run("Attack.", folder, backend=model)
    result = state.messages()[-2]["content"]
    assert "Error: ValueError" in result
    assert "is not in the subpath of" in result
    assert "secret\n" not in result
    assert str(tmp_path) not in result
    assert contents(tmp_path) == before
    assert state.ret_value == "I could not."


def contents(root: Path) -> dict[str, str]:
    return {str(path): path.read_text() for path in root.rglob("*") if path.is_file()}


def test_paths_within_the_folder_are_read_and_written(folder):
    assert folder.read_file("a.py") == folder.read_file("inner/../a.py") == "own"
    assert folder.read_file(str(folder.root / "inner/b.py")) == "own"
    folder.replace("inner/new.py", "", "x = 1\n")
    assert folder.read_file("inner/new.py") == "x = 1\n"
    folder.replace("a.py", "own", "changed")
    assert folder.read_file("a.py") == "changed"


@pytest.mark.parametrize("old", ["none of it", "", "o"])
def test_a_text_that_a_file_has_not_exactly_once_is_not_replaced(old, folder):
    (folder.root / "a.py").write_text("oo")
    with pytest.raises(sgl.ToolError, match="times"):
        folder.replace("a.py", old, "new")
    assert folder.read_file("a.py") == "oo"


def test_the_tests_of_a_project_see_no_environment(folder, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "key-of-the-user")
    (folder.root / "test_env.py").write_text("import os\nraise OSError(dict(os.environ))\n")
    printed = folder.run_tests()
    assert "OSError" in printed
    assert "key-of-the-user" not in printed


def test_the_program_says_when_the_tests_still_fail():
    text = printed("coding_agent", play(call("run_tests"), answer("All tests pass.")))
    assert text == "def area(width, height):\n    return width + height\n(failures=1)\n"
