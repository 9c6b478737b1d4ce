"""`make changed` names the tests that once failed on main, as nobody ran them before a commit."""

import subprocess

import pytest

from tests.rooms import ROOMS, ROOT, to_run


@pytest.mark.parametrize(
    ("changed", "test"),
    [
        (
            "sglang_lite/runtime/kernels/packed_products.py",
            "tests/runtime/kernels/test_reference.py",
        ),
        ("sglang_lite/runtime/models/weights/awq.py", "tests/runtime/loading/test_description.py"),
        # names what names it
        ("sglang_lite/runtime/models/weights/awq.py", "tests/runtime/models/test_packings.py"),
        ("sglang_lite/lint/sharing.py", "tests/lint/test_lint.py"),
        ("examples/agent.py", "tests/lint/test_files.py"),
        ("docs/engine.md", "tests/test_docs.py"),
        ("sglang_lite/runtime/core/engine_core.py", "tests/runtime/core/test_loop_thread.py"),
        ("sglang_lite/server/metrics.py", "tests/server/test_metrics.py"),
        ("sglang_lite/text/stop.py", "tests/text/test_stop.py"),
        # pages show what is drawn
        ("sglang_lite/runtime/requests/sample_seed.py", "tests/docs/test_recipes.py"),
        ("tests/waiting.py", "tests/engine/test_death.py"),
        ("tests/runtime/models/conftest.py", "tests/runtime/models/test_gguf.py"),
        ("tests/wire.py", "tests/test_structure.py"),
        ("tests/real/pieces.json", "tests/test_real_files.py"),
    ],
)
def test_a_change_names_the_tests_that_it_can_break(changed, test):
    assert any(test == found or test.startswith(f"{found}/") for found in to_run([changed]))


def test_nothing_names_the_tests_of_real_models():
    files = [str(path.relative_to(ROOT)) for path in (ROOT / "tests/real").iterdir()]
    found = to_run([*files, "sglang_lite/cli.py", "tests/hub.py"])
    assert [test for test in found if f"{test}/".startswith("tests/real/")] == []


def test_every_module_has_tests_beyond_those_of_all():
    modules = subprocess.run(
        ["git", "ls-files", "sglang_lite/*.py"], cwd=ROOT, capture_output=True, text=True
    )
    of_all = set(ROOMS["sglang_lite/"])
    alone = [path for path in modules.stdout.split() if to_run([path]) <= of_all]
    assert [path for path in alone if not path.endswith("__.py")] == []


def test_rooms_and_their_tests_exist():
    assert [path for tests in ROOMS.values() for path in tests if not (ROOT / path).exists()] == []
    assert [room for room in ROOMS if not (ROOT / room).exists()] == []
