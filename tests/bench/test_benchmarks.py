"""Every benchmark runs to its end, with as little to measure as it can be told to."""

import contextlib
import importlib
import io
import logging
import runpy
import subprocess
import sys
from base64 import b64encode
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"
SMALL = {
    "attacks.py": ["--seconds", "0.2", "--attacks", "idle"],
    "adapters.py": ["--help"],  # it writes an adapter of the default model
    "adjusted_rows.py": [
        "--shape",
        "small",
        "--rows",
        "2",
        "--prompt",
        "4",
        "--new",
        "2",
        "--repeat",
        "1",
    ],
    "code_mode.py": ["--help"],  # it needs a model that can write code
    "calibration.py": ["--texts", "1"],
    "shortened.py": ["--generations", "26", "--ways", "library"],
    "constrained.py": ["--systems", "sglang_lite", "--tokens", "4"],
    "agent_loop.py": ["--turns", "2", "--repeat", "1"],
    "agent_peers.py": ["--help"],  # it needs the peers and a model that can call tools
    "agents_server.py": ["--help"],  # it needs a server that is started apart
    "constrained_gpu.py": ["--help"],  # it needs a GPU, as others below
    "constraints_suite.py": ["--schemas", "2", "--groups", "2"],
    "convolutions.py": ["--help"],  # two models of a third of a gigabyte
    "cpu_formats.py": ["--help"],  # it needs folders of half a gigabyte in all
    "cpu_decode.py": [
        "--batches",
        "1",
        "--new",
        "2",
        "--systems",
        "sglang_lite auto",
        "--sampling",
        "greedy",
        "top_p",
    ],
    "day.py": ["--help"],  # it takes minutes
    "descriptions.py": ["--help"],  # it needs a model that can extract
    "distribution.py": ["--draws", "2"],
    "draws.py": ["--vocabulary", "500", "--rows", "2"],
    "exact.py": ["--count", "2", "--prompt", "20", "--repeat", "1"],
    "heal.py": ["--cuts", "2"],
    "label_calibration.py": ["--cases", "3"],
    "particles.py": ["smollm2-135m", "--count", "2", "--repeat", "1"],
    "exact_reading.py": ["--free", "20", "--drawn", "10", "--cases", "3"],
    "engine_process.py": [
        "--repeat",
        "1",
        "--tokens",
        "2",
        "--workloads",
        "decode1",
        "--requests",
        "1",
    ],
    "experts.py": ["--small"],
    "embedding.py": ["--shape", "small", "--texts", "2", "--tokens", "8", "--repeat", "1"],
    "expert_balance.py": ["--experts", "8", "--layers", "2", "--groups", "2", "--redundant", "2"],
    "extraction.py": ["--texts", "1", "--max-tokens", "60"],
    "frontend_overhead.py": ["--seconds", "0.01", "--programs", "4"],
    "lm_eval_scores.py": ["--help"],  # it needs lm-eval, which the tests do not install
    "loading.py": ["--shape", "small", "--repeat", "1"],
    "step_kernels.py": ["--help"],  # it needs a GPU
    "sleep.py": ["--shape", "small", "--pairs", "0"],
    "first_token.py": ["--help"],  # it needs a GPU
    "few_bits.py": ["--shape", "small", "--rows", "1", "--prompt", "4"],
    "fresh_text.py": ["--rows", "2", "--trials", "1"],
    "deterministic_gpu.py": ["--help"],  # it needs a GPU
    "gateway.py": ["--help"],  # it needs a gateway, which the tests do not install
    "gpu_floor.py": ["--help"],  # it needs a GPU
    "real_gpu.py": ["--help"],  # it needs a GPU and a real model
    "grammar_cost.py": ["--schemas", "2", "--tools", "8"],
    "grammar_memory.py": ["--constraints", "1", "--seconds", "0"],
    "head.py": ["--rows", "1", "--new", "1", "--rounds", "1"],
    "cache_tiers.py": [
        "--shape",
        "small",
        "--mib",
        "4",
        "--tokens",
        "300",
        "--repeat",
        "1",
        "--documents",
        "2",
        "--less",
        "256",
        "--chats",
        "6",
        "--reads",
        "3",
        "--writes",
        "1",
        "--pause",
        "0.01",
    ],
    "appending.py": ["--shape", "small", "--rows", "4", "--tokens", "32", "--repeat", "1"],
    "permuted.py": ["--help"],  # its folders have half a gigabyte
    "playground.py": ["--help"],  # it opens a browser, as the playground's own tests do
    "host_ranks.py": [
        "--device",
        "cpu",
        "--shape",
        "small",
        "--tp",
        "1",
        "--rows",
        "1",
        "--tokens",
        "50",
    ],
    "host_step.py": ["--rows", "4", "--steps", "2"],
    "images.py": [
        "--shape",
        "small",
        "--requests",
        "2",
        "--questions",
        "2",
        "--tokens",
        "2",
        "--arriving",
        "1",
        "--rate",
        "50",
        "--stream-tokens",
        "4",
        "--repeat",
        "1",
    ],
    "latent_attention.py": ["--help"],  # it needs a GPU
    "links.py": ["--help"],  # it needs a GPU
    "lora.py": ["--help"],  # it needs a GPU
    "mixed_requests.py": ["--help"],  # test_mixed_requests.py runs it, with a small model
    "masks.py": ["--rows", "2", "--steps", "2", "--threads", "1", "--constraints", "regex"],
    "openmp.py": ["--help"],  # test_openmp.py runs it, with a small model
    "prefill_attention.py": ["--help"],  # it needs a GPU
    "english.py": ["sglang_lite/text"],
    "gguf_turns.py": ["--help"],  # it needs llama.cpp, which the tests do not install
    "quotes.py": ["--tokens", "2000", "--quotes", "3"],
    "programs_gpu.py": [
        "--shape",
        "small",
        "--rows",
        "2",
        "--own",
        "8",
        "--tokens",
        "2",
        "--repeat",
        "1",
    ],
    "prefix_reuse.py": ["--questions", "1", "--shots", "0"],
    "programs.py": ["--size", "0.05"],
    "quality.py": ["--dtypes", "bfloat16", "--tokens", "32"],
    "ready.py": ["--help"],  # it imports torch, and starts the default model's engine
    "reproducible.py": ["--help"],  # test_reproducible.py runs it, with a small model
    "remote.py": ["--programs", "4", "--latency", "0.001", "--rounds", "1"],
    "replicas.py": ["--help"],  # it needs a gateway, which the tests do not install
    "serve_gpu.py": ["--shape", "small", "--streams", "2", "--tokens", "4", "--repeat", "1"],
    "serve.py": [
        "--repeat",
        "1",
        "--seconds",
        "0.1",
        "--streams",
        "4",
        "--tokens",
        "2",
        "--words",
        "20",
        "--questions",
        "2",
    ],
    "offload.py": ["--help"],  # it needs a GPU
    "data_parallel.py": ["--help"],  # tests/engine/test_replicas.py tests what it runs
    "waiting.py": ["--waiting", "300", "--programs", "4", "--answer", "3", "--steps", "35"],
    "speech.py": ["--help"],  # tests/runtime/media/test_speech.py runs small models
    "speculation_gpu.py": ["--help"],  # it needs a GPU
    "way.py": ["--in-process"],
    "recurrent_states.py": ["--help"],
    "states.py": ["--help"],
    "windows.py": ["--help"],  # it needs a GPU
    "speculation.py": [
        "--only",
        "tokens",
        "--requests",
        "1",
        "--answer",
        "2",
        "--work",
        "extraction",
    ],
    "token_records.py": ["--help"],  # its smallest mixture of experts has gigabytes
    "turns.py": [],
    "tensor_parallel.py": ["--help"],  # tests/runtime/parallel tests what it runs
    "tracing.py": ["--seconds", "0.01", "--nodes", "20", "--programs", "1"],
    "shared_prefix.py": [
        "--requests",
        "2",
        "--new",
        "2",
        "--prefix",
        "8",
        "--systems",
        "sglang_lite auto",
    ],
}
SECTIONS = {  # run one by one
    "engine_process.py": ("undisturbed", "busy", "program", "streams", "start", "hostile"),
    "programs.py": ("shared", "crowded"),
    "serve.py": ("events", "first", "streams", "program", "decisions"),
}
ON_A_GPU = {  # what the others can't run
    "constrained_gpu.py": [],
    "first_token.py": ["--repeat", "1"],
    "gpu_floor.py": ["--shape", "qwen3-0.6b"],
    "latent_attention.py": [],
    "links.py": ["--share", "--small"],
    "lora.py": ["--shape", "qwen3-0.6b", "--rows", "4", "--context", "16", "--pairs", "1"],
    "prefill_attention.py": [],
    "step_kernels.py": ["--shape", "qwen3-0.6b", "--rows", "4", "--prompt", "16"],
}
RUNS = [(name, section) for name in SMALL for section in SECTIONS.get(name, (None,))]


def test_every_benchmark_is_run():
    assert {path.name for path in FOLDER.glob("*.py") if "def main" in path.read_text()} == set(
        SMALL
    )


@pytest.fixture
def printed(monkeypatch):
    """Runs a benchmark in this process, with those that it would start for itself; returns its
    output.
    """
    monkeypatch.syspath_prepend(FOLDER)
    # its limits
    monkeypatch.setattr(importlib.import_module("machine"), "seconds", lambda work, repeats=1: 1.0)

    really = subprocess.run

    def run(name, arguments):
        def start(command, **options):
            if command[1] != str(FOLDER / name):
                return really(command, **options)
            return subprocess.CompletedProcess(command, 0, run(name, command[2:]))

        out = io.StringIO()
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
            patch.setattr(subprocess, "run", start)
            patch.setattr(sys, "argv", [name, *arguments])
            with contextlib.suppress(SystemExit):  # --help ends so
                runpy.run_path(str(FOLDER / name), run_name="__main__")
        return out.getvalue()

    logger = logging.getLogger("sglang_lite")
    before = logger.level  # an engine with `log_level` sets it for all of the process
    yield run
    logger.setLevel(before)


@pytest.mark.sampled(20)
@pytest.mark.parametrize(("name", "section"), RUNS)
def test_a_benchmark_runs(name, section, model_file, printed):
    only = [] if section is None else ["--only", section]
    assert len(printed(name, [*only, *SMALL[name]]).splitlines()) >= 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ON_A_GPU)
def test_a_benchmark_of_a_gpu_runs(name, tmp_path, printed):
    arguments = ON_A_GPU[name]
    if name == "constrained_gpu.py":
        words = [bytes([i]) for i in range(256)]
        (tmp_path / "bytes.tiktoken").write_text(
            "".join(f"{b64encode(w).decode()} {i}\n" for i, w in enumerate(words))
        )
        arguments = ["--vocabulary", str(tmp_path / "bytes.tiktoken")]
    assert len(printed(name, arguments).splitlines()) >= 2
