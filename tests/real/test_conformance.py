"""The conformance programs mean the same on a real model, whether the engine plays them whole or
node by node.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

import sglang_lite as sgl
from sglang_lite.lang.backend.local import LocalBackend
from tests.conformance.case import cases, node_by_node, outcome

CASES = {name: case for name, case in cases().items() if case.engine}


@pytest.fixture(scope="module")
def engine(coder: Path) -> Iterator[sgl.Engine]:
    """An engine whose answers don't depend on what is computed beside them."""
    with sgl.Engine(coder, deterministic=True, in_process=True) as engine:
        yield engine


@pytest.mark.parametrize("name", CASES)
def test_the_engine_plays_whole_programs_as_it_plays_their_nodes(engine, name):
    case, settings = CASES[name], {"seed": 3, "max_new_tokens": 12}
    whole, (apart, alone) = LocalBackend(engine), node_by_node(engine)
    found = outcome(case, whole, **settings)
    assert found == outcome(case, apart, **settings, **alone)
    assert found.raised == case.raises
