"""Times of vllm and sglang for the same workloads. Each runs in its own process, because it
occupies the whole GPU and does not release it cleanly.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from sglang_lite.bench.workloads import WORKLOADS, Workload, prepare_workload

# Takes prompts, the number of tokens to generate for each, and a temperature; returns the number
# generated for each.
_Generate = Callable[[list[list[int]], tuple[int, ...], float], list[int]]

_RESULTS_FILE = "results.jsonl"


@dataclass(frozen=True, slots=True)
class PeerResults:
    """Measurements of a peer.

    Attributes:
        version: version of the peer, or "" if it could not be imported.
        seconds: median seconds by workload, for the workloads that were completed.
        failure: reason for missing workloads, in one line, or "" if none is missing.
    """

    version: str
    seconds: dict[str, float]
    failure: str


def installed_peers() -> list[str]:
    """Returns the names of the peers that can be imported, without importing them."""
    return [name for name in _ENGINES if find_spec(name)]


def measure_peer(
    name: str, shape: str, workloads: Sequence[str], repeat: int, *, fp8: bool = False, limit: float
) -> PeerResults:
    """Measures workloads with a peer that has random weights. Its logs go to stderr.

    Args:
        name: name of the peer, one of `installed_peers()`.
        shape: name of the model's shape, one of SHAPES.
        workloads: names of workloads, from WORKLOADS; each runs once more beforehand, to warm up.
        repeat: number of measured runs of each workload.
        fp8: whether weights, keys and values have 8 bits.
        limit: seconds after which the peer is killed.
    """
    # imports torch, which the peer's process should do by itself
    from sglang_lite.bench.shapes import hf_config

    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(hf_config(shape)))
        results = Path(folder, _RESULTS_FILE)
        results.touch()
        numbers = "fp8" if fp8 else "bfloat16"
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, name, folder, str(repeat), numbers, *workloads],
            stdin=subprocess.DEVNULL,
            stdout=2,
            start_new_session=True,
        )
        try:
            status = process.wait(limit)
            failure = f"ended with status {status}" if status else ""
        except subprocess.TimeoutExpired:
            failure = f"not done after {limit:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # including the processes that it started
            process.wait()
        figures = dict(json.loads(line) for line in results.read_text().splitlines())
        return PeerResults(
            figures.pop("version", ""), failure=figures.pop("failure", failure), seconds=figures
        )


def _start_vllm(folder: str, fp8: bool) -> tuple[_Generate, Callable[[], bool]]:
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(model=folder, **_common_settings(fp8))

    def generate(prompts: list[list[int]], new: tuple[int, ...], temperature: float) -> list[int]:
        params = [
            SamplingParams(
                temperature=temperature, max_tokens=count, ignore_eos=True, detokenize=False
            )
            for count in new
        ]
        outputs = llm.generate(
            [TokensPrompt(prompt_token_ids=ids) for ids in prompts], params, use_tqdm=False
        )
        return [len(output.outputs[0].token_ids) for output in outputs]

    return generate, llm.reset_prefix_cache


def _start_sglang(folder: str, fp8: bool) -> tuple[_Generate, Callable[[], bool]]:
    from sglang import Engine

    engine = Engine(model_path=folder, **_common_settings(fp8))

    def generate(prompts: list[list[int]], new: tuple[int, ...], temperature: float) -> list[int]:
        params = [
            {"temperature": temperature, "max_new_tokens": count, "ignore_eos": True}
            for count in new
        ]
        return [
            len(output["output_ids"])
            for output in engine.generate(input_ids=prompts, sampling_params=params)
        ]

    return generate, lambda: engine.flush_cache().success


_ENGINES = {"vllm": _start_vllm, "sglang": _start_sglang}


def _common_settings(fp8: bool) -> dict[str, Any]:
    """Returns settings whose names are the same for both peers."""
    numbers = {"quantization": "fp8", "kv_cache_dtype": "fp8_e4m3"} if fp8 else {}
    return {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16", **numbers}


def _time_workload(work: Workload, generate: _Generate, flush: Callable[[], bool]) -> float:
    def flush_peer_cache() -> None:
        # The peer refuses to flush for a moment after the last result, until it has processed the
        # following step.
        if not any(flush() for _ in range(1000)):
            raise RuntimeError("the prefix cache can't be emptied")

    prompts = prepare_workload(work, generate, flush_peer_cache)
    started = time.perf_counter()
    counts = generate(prompts, work.output_lengths, work.temperature)
    seconds = time.perf_counter() - started
    if counts != list(work.output_lengths):
        raise RuntimeError(f"{sum(counts)} tokens were generated, not {sum(work.output_lengths)}")
    return seconds


def _run_peer_process(peer: str, folder: str, repeat: str, numbers: str, *workloads: str) -> None:
    """Measures the workloads inside the peer's process. Appends its version, the times and any
    failure to a file as lines of JSON.
    """

    def write_result(name: str, value: object) -> None:
        with Path(folder, _RESULTS_FILE).open("a") as file:
            file.write(json.dumps([name, value]) + "\n")

    try:
        write_result("version", import_module(peer).__version__)
        generate, flush = _ENGINES[peer](folder, numbers == "fp8")
        for name in workloads:
            work = WORKLOADS[name]()
            _time_workload(work, generate, flush)
            write_result(
                name, median(_time_workload(work, generate, flush) for _ in range(int(repeat)))
            )
    except BaseException as error:
        write_result("failure", " ".join(f"{type(error).__name__}: {error}".split())[:200])
        raise


if __name__ == "__main__":  # peers start processes that import this module again
    _run_peer_process(*sys.argv[1:])
