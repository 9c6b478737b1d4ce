"""`sglang-lite doctor`: what this machine can run, how fast, and what is missing."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from sglang_lite.protocol import SamplingParams, SglError
from sglang_lite.runtime.host.cache_folder import cache_folder
from sglang_lite.runtime.host.installed import NEEDED, is_installed
from sglang_lite.runtime.models.aliases import ALIASES
from sglang_lite.runtime.models.resolve import has_local_copy
from sglang_lite.version import __version__

_EXTRAS: Final = {
    "local": ("an engine", NEEDED),
    "server": ("sglang-lite serve", ("starlette", "uvicorn")),
    "openai": ("sgl.OpenAI", ("openai",)),
    "anthropic": ("sgl.Anthropic", ("anthropic",)),
}
_KEYS: Final = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY")
_PLATFORMS: Final = {
    "win32": "Programs run on APIs and servers. An engine needs WSL 2: wsl --install",
    "darwin": "An engine makes the same calls as on Linux, and is not tested here.",
}
_TOKENS: Final = 64  # number of tokens whose generation is timed


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Result of one check: its subject, the finding, and what to do about it ("" for nothing)."""

    about: str
    found: str
    advice: str = ""

    def as_text(self) -> str:
        """Returns one line, and a second one with the advice, if any."""
        return f"{self.about:12} {self.found}" + (
            f"\n{'':12} -> {self.advice}" if self.advice else ""
        )


def diagnose_all() -> Iterator[Diagnosis]:
    """Yields each finding as soon as it is known. If the default model has been fetched, the last
    finding is the model's speed, which is measured with an engine.
    """
    advice = _PLATFORMS.get(sys.platform, "")
    yield Diagnosis(
        "package",
        f"sglang-lite {__version__}, Python {platform.python_version()}, {platform.platform()}",
        advice,
    )
    yield from _diagnose_packages()
    yield _diagnose_terminal()
    yield _diagnose_keys()
    yield _diagnose_cache()
    if missing := [name for name in NEEDED if not is_installed(name)]:
        yield Diagnosis(
            "engine", f"none without {', '.join(missing)}", "Programs can run on APIs and servers."
        )
        return
    yield from _diagnose_machine()
    yield _diagnose_model()
    yield _diagnose_generation()


def _diagnose_packages() -> Iterator[Diagnosis]:
    for extra, (use, names) in _EXTRAS.items():
        missing = [name for name in names if not is_installed(name)]
        advice = f"For {use}: pip install 'sglang-lite[{extra}]'" if missing else ""
        yield Diagnosis(
            f"[{extra}]", f"missing: {', '.join(missing)}" if missing else "installed", advice
        )


def _diagnose_terminal() -> Diagnosis:
    encoding = sys.stdout.encoding or "unknown"
    advice = (
        ""
        if encoding.lower() in ("utf-8", "utf8")
        else "Signs that it lacks are shown as '?'. Set PYTHONIOENCODING=utf-8."
    )
    return Diagnosis("terminal", encoding, advice)


def _diagnose_keys() -> Diagnosis:
    there = [name for name in _KEYS if os.environ.get(name)]
    return Diagnosis(
        "keys", f"set: {', '.join(there)}" if there else f"none of {', '.join(_KEYS)} is set"
    )


def _diagnose_cache() -> Diagnosis:
    folder = cache_folder()
    around = next((each for each in (folder, *folder.parents) if each.exists()), folder)
    try:
        # permissions say too little in containers and on read-only disks
        tempfile.TemporaryFile(dir=around).close()
    except OSError:
        return Diagnosis(
            "cache", f"{folder} can't be written", "Set SGLANG_LITE_CACHE to a folder that can."
        )
    free = shutil.disk_usage(around).free
    advice = "Models need more: set SGLANG_LITE_CACHE to another disk." if free < 1e9 else ""
    return Diagnosis("cache", f"{folder}, {free / 1e9:,.1f} GB free", advice)


def _diagnose_machine() -> Iterator[Diagnosis]:
    """Yields findings about the hardware and software that an engine would run on."""
    import torch

    from sglang_lite.runtime.loading.load_model import why_no_gpu
    from sglang_lite.runtime.models.memory_check import free_bytes

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    free = free_bytes(torch.device("cpu")) or 0
    advice = "The default model needs about 1 GB." if free < 1e9 else ""
    yield Diagnosis("processor", f"{cores} cores, {free / 1e9:,.1f} GB of memory free", advice)
    compiler = next(
        filter(None, map(shutil.which, (os.environ.get("CXX") or "c++", "g++", "clang++"))), None
    )
    advice = (
        ""
        if compiler
        else "Install g++ or clang++: steps of few tokens on a CPU are slower without."
    )
    yield Diagnosis("compiler", compiler or "none", advice)
    reason = why_no_gpu("cuda")
    if reason is None:
        name = torch.cuda.get_device_name(0)
        memory = free_bytes(torch.device("cuda:0")) or 0
        yield Diagnosis("GPU", f"{name}, {memory / 1e9:,.1f} GB free")
    else:
        yield Diagnosis(
            "GPU",
            f"none: {reason}",
            "Engines run on the CPU, well for models of up to 1B parameters.",
        )


def _diagnose_model() -> Diagnosis:
    """Reports which model is suggested for this machine."""
    from sglang_lite.runtime.loading.model_choice import choose_model, gigabytes, measure_machine

    choice = choose_model(measure_machine())
    advice = "sglang-lite models --fits lists what fits."
    if choice.proposed is None:
        return Diagnosis(
            "model", f"none that was run here fits {gigabytes(choice.machine.free)}", advice
        )
    return Diagnosis(
        "model",
        f"{choice.proposed.name} fits: it needs {gigabytes(choice.proposed.needed)}",
        advice,
    )


def _diagnose_generation() -> Diagnosis:
    """Measures the speed of the default model, if it has been fetched."""
    from sglang_lite.engine.engine import Engine

    name = next(iter(ALIASES))
    if not has_local_copy(name):
        return Diagnosis(
            "speed", f"not measured: {name} is not fetched", f"sglang-lite models pull {name}"
        )
    started = time.perf_counter()
    try:
        with Engine(name, log_level="error") as engine:
            ready = time.perf_counter()
            usage = engine.complete(
                "A story:", SamplingParams(max_tokens=_TOKENS, ignore_eos=True)
            ).usage
    except SglError as error:
        return Diagnosis("speed", f"not measured: {error}")
    rate = (usage.completion_tokens - 1) / max(usage.total_s - usage.first_token_s, 1e-9)
    return Diagnosis(
        "speed",
        f"{name}: ready after {ready - started:.1f} s, {rate:,.0f} tokens/s in one generation",
    )
