"""Every kernel compiles for every GPU that the engine takes, and finds room there. No GPU is
needed.

The whole takes half an hour of processor time: `python -m tests.runtime.kernels.compiled 8`, whose
results are kept in compiled.tsv, each with the version of Triton that compiled it; here a few are
compiled by the one that is installed, and all with SGLANG_LITE_CASES=all.
"""

import ast
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from sglang_lite.runtime import kernels
from tests.runtime.kernels import compiled as tool
from tests.runtime.kernels.compiled import compiled, ptx, read_table, told, update
from tests.runtime.kernels.launches import GPUS, Case, cases

# of Triton: what torch brings to machines with a GPU, and what is installed here
VERSIONS = "3.6.0", "3.9.0"
CASES = {str(case): case for case in cases()}
KNOWN = {(name, version): row for (name, version), row in read_table().items() if name in CASES}
COMPILED = (
    CASES
    if os.environ.get("SGLANG_LITE_CASES") == "all"
    else dict.fromkeys(name for name, _ in KNOWN)
)


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


@pytest.mark.slow  # in a process that is waited for at the end
@pytest.mark.sampled(1500)
@pytest.mark.parametrize("name", COMPILED)
def test_it_compiles_and_finds_room(compiler, name):
    case = CASES[name]
    found = compiler.submit(compiled, case).result()
    assert found.shared <= case.properties.shared_memory
    assert found.spilled <= case.most_spilled


@pytest.mark.slow
@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("head", "kernel", "name"),
    [
        (128, "prefill 128", "prefill_attention_hopper.prefill_kernel"),
        (256, "prefill 128", "prefill_attention_hopper.prefill_kernel"),
        (128, "prefix", "prefix_attention_hopper.prefix_kernel"),
        (0, "latents", "latent_attention_hopper.latent_prefill_kernel"),
    ],
)
def test_attention_on_a_hopper_gpu_is_by_kernels_of_its_own(compiler, head, kernel, name):
    code = compiler.submit(ptx, Case(GPUS[3], head, "bfloat16", kernel), name).result()
    assert "wgmma.mma_async" in code
    assert "cp.async.bulk.tensor" in code


def test_the_last_results_are_within_the_limits():
    assert not [
        key for key, row in KNOWN.items() if row.shared > CASES[key[0]].properties.shared_memory
    ]
    assert not [key for key, row in KNOWN.items() if row.spilled > CASES[key[0]].most_spilled]


def test_every_case_was_compiled_by_the_cards_triton_and_invariant_ones_by_both():
    assert {name for name, version in KNOWN if version == VERSIONS[0]} == set(CASES)
    both = [name for name in CASES if all((name, version) in KNOWN for version in VERSIONS)]
    assert not [name for name in CASES if "invariant" in name and name not in both]


def test_only_what_is_missing_or_has_changed_is_compiled(compiler, tmp_path, monkeypatch):
    file = tmp_path / "compiled.tsv"
    monkeypatch.setattr(tool, "TABLE", file)
    words = ("A10", "64", "bfloat16", "copy")
    assert update(compiler, *words) == ["A10, 64, bfloat16, copy"]
    assert update(compiler, *words) == []
    kept, ((_, row),) = file.read_text(), read_table().items()
    file.write_text(kept.replace(row.digest, "of other sources"))
    assert update(compiler, *words) == ["A10, 64, bfloat16, copy"]
    assert file.read_text() == kept


def test_every_kernel_has_a_case(compiler):
    launched = set()
    for file in Path(kernels.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Call(func=ast.Subscript(value=ast.Name(id=name))):
                    launched.add(f"{file.stem}.{name}")
    assert "decode_attention._decode" in launched
    assert (
        compiler.submit(told, [case for case in cases() if case.properties.name == "H200"]).result()
        == launched
    )
