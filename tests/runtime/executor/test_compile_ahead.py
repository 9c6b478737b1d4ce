"""Kernels that are compiled before an engine starts, in forks of a process: the variants that its
own warm-up launches.
"""

import os
import sys
import textwrap
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from typing import Any

import pytest
import torch

from sglang_lite import Engine
from sglang_lite.protocol import ParameterError
from sglang_lite.runtime.executor import compile_ahead
from sglang_lite.runtime.executor.compile_ahead import (
    BackgroundCompilation,
    RunnerShape,
    collect_variants,
)
from sglang_lite.runtime.kernels import compile_process
from sglang_lite.runtime.kernels.compile_process import CompileProcess, start_compiler_early
from sglang_lite.runtime.kernels.device_properties import DeviceProperties
from sglang_lite.runtime.models.precision import Precision
from sglang_lite.runtime.models.spec import (
    AttentionSpec,
    DenseSpec,
    ExpertsSpec,
    LayerSpec,
    ModelSpec,
    RopeSpec,
)
from sglang_lite.runtime.models.weights.quantised_formats import Q4_K
from sglang_lite.runtime.parallel.layout import Parallel
from tests.engine.processes import children, ended
from tests.runtime import scripted
from tests.waiting import until

A10 = DeviceProperties("A10", 101_376, 1 << 16, 72, (8, 6))
H200 = DeviceProperties("H200", 232_448, 1 << 16, 132, (9, 0))
BFLOAT16 = torch.bfloat16


ATTENTION = AttentionSpec(4, 2, 64, 64, 0.125, RopeSpec(theta=1e4))
LAYER = LayerSpec(ATTENTION, DenseSpec(512))
SPEC = ModelSpec(
    architecture="llama", vocab_size=1000, hidden_size=256, max_positions=512, rms_eps=1e-5, layers=(LAYER,) * 4,
    tied_embeddings=True,
)  # fmt: skip
RUNNER = RunnerShape(
    SPEC, Precision(BFLOAT16, BFLOAT16, BFLOAT16), longest=512, max_running=8, page_size=16, step_tokens=256,
    attention="auto",
)  # fmt: skip


# Layers of which none is left out as one that was met: they differ in what no kernel is compiled
# for.
UNLIKE = replace(SPEC, layers=tuple(
    replace(LAYER, attention=replace(ATTENTION, rope=RopeSpec(theta=theta))) for theta in (1e4, 2e4, 3e4, 4e4)
))  # fmt: skip


WITH_EXPERTS = replace(
    SPEC,
    architecture="qwen3_moe",
    layers=(replace(LAYER, feed_forward=ExpertsSpec(8, 2, 128)),) * 4,
)


def told(*cards: DeviceProperties, **changes: Any) -> list[list[tuple[str, str]]]:
    """Names and keys of the variants on each GPU, in their order."""
    found: list[list[tuple[str, str]]] = [[] for _ in cards]
    for properties, own in zip(cards, found):
        collect_variants(
            replace(RUNNER, **changes),
            properties,
            lambda variant, own=own: own.append((variant.name, variant.key)),
        )
    return found


def others() -> list[list[tuple[str, str]]]:
    """Those of layers that are unlike, on both GPUs, those of a rank, and those of matrices that
    are rounded to 4 bits or stored so, and those of experts.
    """
    rank = replace(SPEC, vocab_size=5000), Parallel(tp=2)
    packed = replace(RUNNER.precision, packed=True)
    return [
        *told(H200, A10, spec=UNLIKE), *told(H200, spec=rank[0], parallel=rank[1]),
        *told(H200, precision=replace(packed, rounding="int4")), *told(H200, precision=packed, stored=Q4_K.format),
        *told(H200, spec=WITH_EXPERTS),
    ]  # fmt: skip


@pytest.fixture
def pool():
    """Two processes whose Triton compiles: this one's interprets."""
    kept = os.environ.pop("TRITON_INTERPRET", None)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        futures = [pool.submit(told, H200), pool.submit(others)]
        found = [variants for future in futures for variants in future.result()]
        if kept is not None:
            os.environ["TRITON_INTERPRET"] = kept
        yield found


def test_processes_meet_the_same_variants_in_the_same_order(pool):
    first, second, other, of_rank, rounded, stored, with_experts = pool
    assert first == second  # of layers that are alike, and of as many that are not
    assert len(set(first)) == len(first)
    names, older = ({name for name, _ in of} for of in (first, other))
    assert {"decode_attention._decode", "rope_store._rope_store"} <= names & older
    assert "prefix_attention._prefix" in older - names
    hopper = {"prefill_attention_hopper.prefill_kernel", "prefix_attention_hopper.prefix_kernel"}
    assert hopper <= names - older <= hopper | {"tiled._tiled"}
    assert {name for name, _ in of_rank} - names == {
        "all_reduce._sum_ranks",
        "all_reduce._gather_ranks",
    }
    few_bits = {
        "packed_row._packed_row",
        "packed_products._packed_rows",
        "packed_products_hopper._packed_products",
    }
    kinds = {name for name, _ in rounded}
    assert few_bits <= kinds
    chosen = {name for name, _ in with_experts} - names
    assert {"experts_route._route", "experts_tiled._gate_up", "experts_tiled._down"} <= chosen
    # which is slow in groups of 32
    assert {name for name, _ in stored} == kinds - {"packed_products._packed_rows"}


# -------------------------------------------------------------------------------------- the process


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Starts a process that runs `body` with the socket `line` and what it was sent as `work`."""

    def start(body: str) -> CompileProcess:
        (tmp_path / "scripted_compiler.py").write_text(
            "import os, socket, sys\n"
            "def main(descriptor):\n"
            "    line = socket.socket(fileno=descriptor)\n"
            "    work = b''.join(iter(lambda: line.recv(65536), b''))\n"
            + textwrap.indent(body, "    ")
        )
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(compile_process, "MODULE", "scripted_compiler")
        process = CompileProcess()
        processes.append(process)
        return process

    processes: list[CompileProcess] = []
    yield start
    for process in processes:
        process.kill()


def test_a_kernel_is_waited_for_until_it_is_told(started, caplog):
    process = started("line.sendall(b'one\\ntwo\\nthr')\nline.sendall(b'ee\\n' + work + b'\\n')")
    process.send(b"four")
    for kernel in ("two", "four", "one", "three"):
        process.wait_for(kernel)
    process.wait_for("one that no process compiles")  # it has ended
    assert not caplog.text


def test_a_process_that_dies_is_said_once_and_leaves_the_rest_to_the_engine(started, caplog):
    process = started("line.sendall(b'one\\n')\nos.kill(os.getpid(), 9)")
    process.send(b"")
    for kernel in ("one", "two", "three"):
        process.wait_for(kernel)
    assert caplog.text.count("ended with status -9: the engine compiles the rest") == 1


def test_a_process_that_stands_still_is_ended_and_said(started, monkeypatch, caplog):
    monkeypatch.setattr(compile_process, "PATIENCE_S", 0.05)
    process = started("import threading; threading.Event().wait()")
    process.send(b"")
    process.wait_for("one")
    process.wait_for("two")
    assert caplog.text.count("has compiled none for 0 s: the engine compiles the rest") == 1


def test_a_process_can_be_ended_at_any_time(started):
    process = started("os.read(0, 1)")
    process.kill()
    process.kill()
    process.wait_for("one")


def test_what_a_kernel_fails_by_is_its_own(started, caplog):
    """Forks compile: one that raises and one that dies take no other with them."""
    process = started(
        textwrap.dedent("""
        from dataclasses import dataclass
        from sglang_lite.runtime.executor.compile_ahead import compile_all

        @dataclass
        class Scripted:
            digest: str
            launcher: str
            name = "scripted"
            def compile(self):
                if self.digest == "dies":
                    os.abort()
                if self.digest == "raises":
                    raise ValueError("no such kernel")
            def compile_launcher(self):
                line.sendall(b"launcher of " + self.digest.encode() + b"\\n")

        sys.exit(compile_all([Scripted(name, name[0]) for name in ("first", "dies", "raises", "found")], 2, line))
        """)
    )
    process.send(b"")
    for kernel in ("first", "launcher of first", "found"):
        process.wait_for(kernel)
    assert not caplog.text
    process.wait_for("launcher of found")  # which is that of the first
    assert "ended with status 1: the engine compiles the rest" in caplog.text


def test_a_process_that_has_no_work_ends_well(caplog):
    process = CompileProcess()
    process.send(b"")
    process.wait_for("any")
    assert not caplog.text


def test_an_engine_without_room_ends_the_process(started, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    ahead = BackgroundCompilation(
        RUNNER, A10, "model", 2, started("import threading\nthreading.Event().wait()")
    )
    (pid,) = until(partial(children, "scripted_compiler"))
    with pytest.raises(ParameterError, match="context_length"):
        Engine.of(replace(scripted.loaded(), compiling=ahead), context_length=1 << 30)
    ended(pid)


# ---------------------------------------------------------------------------- whether it is started


class NoProcess(CompileProcess):
    """Stands for a process that has compiled everything."""

    def __init__(self) -> None:
        started_processes.append(self)

    def send(self, work: bytes) -> None:
        self.work = work

    def wait_for(self, kernel: str) -> None: ...
    def kill(self) -> None: ...


started_processes: list[NoProcess] = []


@pytest.fixture
def counted(tmp_path, monkeypatch):
    """Processes that are started, none of which is one."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_ahead, "CompileProcess", NoProcess)
    started_processes.clear()
    return started_processes


def test_nothing_is_started_where_the_cache_has_it_all(counted):
    with (
        pytest.raises(ZeroDivisionError),
        BackgroundCompilation(RUNNER, A10, "model", 2).waiting_for_kernels(),
    ):
        _ = 1 / 0
    assert len(counted) == 1
    with BackgroundCompilation(RUNNER, A10, "model", 2).waiting_for_kernels():
        assert len(counted) == 2  # what failed is not there
    with BackgroundCompilation(RUNNER, A10, "model", 2).waiting_for_kernels():
        assert len(counted) == 2
    BackgroundCompilation(replace(RUNNER, max_running=16), A10, "model", 1)
    BackgroundCompilation(RUNNER, H200, "model", 1)
    assert len(counted) == 4
    BackgroundCompilation(replace(RUNNER, max_running=16), A10, "model", 0)
    assert len(counted) == 4


def test_another_version_compiles_its_own(counted, monkeypatch):
    with BackgroundCompilation(RUNNER, A10, "model", 2).waiting_for_kernels():
        pass
    monkeypatch.setattr(compile_ahead.triton, "__version__", "another")
    BackgroundCompilation(RUNNER, A10, "model", 2)
    assert len(counted) == 2


def test_a_process_that_was_started_early_is_used(counted):
    early = NoProcess()
    BackgroundCompilation(RUNNER, A10, "model", 2, early)
    assert counted == [early]
    assert early.work


def test_a_single_core_compiles_in_the_engine(counted, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    BackgroundCompilation(RUNNER, A10, "model")
    assert not counted
    BackgroundCompilation(RUNNER, A10, "model", 1)
    assert len(counted) == 1


def test_where_no_process_can_be_started_it_is_left_to_the_engine(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    with BackgroundCompilation(RUNNER, A10, "model", 1).waiting_for_kernels():
        pass
    assert "no process to compile kernels can be started" in caplog.text


def test_it_is_started_early_only_where_a_gpu_has_no_kernels_of_the_model(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "executable", "/bin/true")
    monkeypatch.setattr(compile_process, "DRIVER", tmp_path / "driver")
    assert start_compiler_early("model", "auto", None) is None
    (tmp_path / "driver").touch()
    found = start_compiler_early("model", "cuda:1", 4)
    assert found is not None
    found.kill()
    assert start_compiler_early("model", "cpu", None) is None
    assert start_compiler_early("model", "auto", 0) is None
    with BackgroundCompilation(RUNNER, A10, "model", 0).waiting_for_kernels():
        pass  # the cache has the model's kernels
    assert start_compiler_early("model", "auto", None) is None
    another = start_compiler_early("another", "auto", None)
    assert another is not None
    another.kill()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "another"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    assert start_compiler_early("model", "auto", None) is None
