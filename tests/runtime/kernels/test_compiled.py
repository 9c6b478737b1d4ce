"""Every kernel compiles for every card that the engine takes, and finds room there. No GPU is needed.

The whole takes an hour of processor time: `python -m tests.runtime.kernels.compiled 8`, whose results are kept in
compiled.tsv, so far of some cases; here a few of those are compiled anew, and all with SGLANG_LITE_CASES=all.
"""

import ast
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from sglang_lite.runtime import kernels
from tests.runtime.kernels.compiled import compiled, read_table, told
from tests.runtime.kernels.launches import CARDS, Case, cases

pytestmark = pytest.mark.slow

CASES = {str(case): case for case in cases()}
COMPILED = CASES if os.environ.get("SGLANG_LITE_CASES") == "all" else read_table()  # those that are known to fit


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    """A process whose Triton compiles: this one's interprets."""
    kept = {name: os.environ.get(name) for name in ("TRITON_INTERPRET", "TRITON_CACHE_DIR")}
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("kernels"))
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        pool.submit(int).result()  # it has started, with this environment
        for name, value in kept.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        yield pool


@pytest.mark.sampled(40)
@pytest.mark.parametrize("name", COMPILED)
def test_it_compiles_and_finds_room(compiler, name):
    case = CASES[name]
    shared, spilled, _ = compiler.submit(compiled, case).result()
    assert shared <= case.card.shared
    assert spilled <= case.most_spilled


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("head", "kernel", "only"),
    [
        (128, "prefill 128", "prefill_attention_hopper.prefill_kernel"),
        (0, "latents", "latent_attention_hopper.latent_prefill_kernel"),
    ],
)
def test_attention_on_a_hopper_gpu_is_by_kernels_of_its_own(compiler, head, kernel, only):
    _, _, ptx = compiler.submit(compiled, Case(CARDS[3], head, "bfloat16", kernel), only).result()
    assert "wgmma.mma_async" in ptx
    assert "cp.async.bulk.tensor" in ptx


@pytest.mark.parametrize("name", read_table())
def test_the_last_whole_result_is_within_the_limits(name):
    shared, spilled = read_table()[name]
    assert shared <= CASES[name].card.shared
    assert spilled <= CASES[name].most_spilled


def test_every_kernel_has_a_case(compiler):
    launched = set()
    for file in Path(kernels.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                launched.add(f"{file.stem}.{node.func.value.id}")
    assert "decode_attention._decode" in launched
    assert compiler.submit(told, [case for case in cases() if case.card.name == "H200"]).result() == launched
