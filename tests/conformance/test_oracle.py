"""Random programs give what a plain interpreter of the documentation says, in every way to run
them.

SGLANG_LITE_ORACLE=5000 takes that many, each in every way; up to 300 are each taken in one of the
ways, by turns. SGLANG_LITE_FIRST=1234 begins with that one.
"""

import ast
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.conformance import oracle, oracle_branches, oracle_tools, steps
from tests.conformance.oracle_programs import drawn
from tests.conformance.oracle_runs import WAYS, expected, started
from tests.conformance.random_programs import smaller
from tests.lang.fakes import within

COUNT = int(os.environ.get("SGLANG_LITE_ORACLE", "300"))
FIRST = int(os.environ.get("SGLANG_LITE_FIRST", "0"))
AT_ONCE = 6
PATIENCE = 3  # seconds for a run


def found_and_wanted(way, program):
    """What a way gives for a program, and what it has to give; None if nobody can say that."""
    try:
        wanted = expected(program)
        return within(PATIENCE, partial(way, program, wanted))
    except (oracle.NearTieError, oracle.NotDrawnError):
        return None


def differs(way, program):
    pair = found_and_wanted(way, program)
    return pair is not None and pair[0] != pair[1]


@pytest.mark.parametrize("number", range(len(WAYS)), ids=list(WAYS))
def test_a_random_program_gives_what_the_documentation_says(number, tmp_path, caplog):
    caplog.set_level("CRITICAL", "sglang_lite")  # branches that failed and that nobody read
    seeds = (
        range(FIRST + number, FIRST + COUNT, len(WAYS))
        if COUNT <= 300
        else range(FIRST, FIRST + COUNT)
    )
    with started(list(WAYS)[number], tmp_path) as way, ThreadPoolExecutor(AT_ONCE) as pool:
        pairs = list(pool.map(lambda seed: found_and_wanted(way, drawn(seed)), seeds))
        wrong = [
            seed for seed, pair in zip(seeds, pairs) if pair is not None and pair[0] != pair[1]
        ]
        if wrong:
            less = smaller(drawn(wrong[0]), partial(differs, way))
            found, wanted = found_and_wanted(way, less) or (None, None)
            raise AssertionError(
                f"programs {wrong}; the first: {less}\nfound:  {found}\nwanted: {wanted}"
            )


OWN = [oracle, oracle_branches, oracle_tools, steps]


@pytest.mark.parametrize("module", OWN)
def test_the_oracle_shares_no_code_with_the_package(module):
    tree = ast.parse(Path(module.__file__).read_text())
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
        for name in names:
            assert (
                name in [each.__name__ for each in OWN]
                or name.split(".")[0] in sys.stdlib_module_names
            )
