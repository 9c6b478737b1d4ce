"""Every example runs with one command and says what it should. Recipes of the cookbook have a page;
`make docs` runs them.
"""

import ast
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import sglang_lite as sgl

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
EXPECTED = {
    "quickstart.py": [
        "Japan: Tokyo",
        "positive",
        "Person(name='Maria Lopez', age=34",
        "Venice:",
        "prompt tokens",
    ],
    "streaming.py": ["lighthouse", "for coroutines"],
    "batch.py": ["dog", "animal", "came from the cache"],
}
# That the engine sees: one a run.
PROGRAMS = {"quickstart.py": 6, "streaming.py": 2, "batch.py": 8}

COOKBOOK = ROOT / "docs" / "cookbook"
RECIPES = {
    page.stem: page
    for page in sorted(COOKBOOK.glob("*.md"))
    if page.stem not in ("README", "walks")
}
COMMAND = re.compile(
    r"^```(?:sh)?\npython (examples/(\w+)\.py)(?: < (\S+)| (\S+\.gguf))?\n```$", re.MULTILINE
)
# Written for a model that the tests don't have: tests/test_agent_recipes.py plays its answers.
LARGER_MODEL = {
    name
    for name, page in RECIPES.items()
    if (found := COMMAND.search(page.read_text())) and found[4]
}
PRINTED = re.compile(r"(?<=^prints\n\n```text\n).*?(?=^```$)", re.MULTILINE | re.DOTALL)


def test_every_example_is_tested():
    # tests/test_grpo.py, tests/test_rl_loop.py
    tested_elsewhere = {"grpo.py", "grpo_json.py", "rl_loop.py"}
    recipes = {f"{name}.py" for name in RECIPES}
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*EXPECTED, *recipes, *tested_elsewhere}
    assert set(EXPECTED) == set(PROGRAMS)


@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_says_what_it_should_and_an_engine_sees_one_program_for_each_of_its_runs(
    name, engine, capsys
):
    before = engine.stats()["programs_opened"]
    sgl.set_default_backend(engine)
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert engine.stats()["programs_opened"] - before == PROGRAMS[name]
    printed = capsys.readouterr().out
    for text in EXPECTED[name]:
        assert text in printed


def test_an_example_needs_no_more_than_its_command(model_file):
    done = subprocess.run(
        [sys.executable, EXAMPLES / "batch.py"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    for text in EXPECTED["batch.py"]:
        assert text in done.stdout


def test_every_recipe_is_in_the_index():
    index = (COOKBOOK / "README.md").read_text()
    listed = dict(re.findall(r"^- \[([^\]]+)\]\((\w+)\.md\)$", index, re.MULTILINE))
    assert listed == {
        page.read_text().partition("\n")[0].removeprefix("# "): name
        for name, page in RECIPES.items()
    }
    assert len(listed) == 29


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_its_command_its_program_what_it_prints_and_what_to_change(name):
    page = RECIPES[name].read_text()
    command, printed = COMMAND.search(page), PRINTED.search(page)
    assert command is not None
    assert printed is not None
    assert command[2] == name
    assert f"```python\n--8<--\n{command[1]}\n--8<--\n```" in page
    assert printed[0].strip()
    assert "\n## What to change\n" in page
    program = (ROOT / command[1]).read_text()
    ast.parse(program)
    assert f"python {command[1]}" in program
    assert len(program.splitlines()) <= 70
