"""Configuration of an engine. Every field is a keyword of `Engine` and is honoured or refused."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal, TypeVar, get_args, get_type_hints

from sglang_lite.protocol import ParameterError
from sglang_lite.protocol.anything import UserValue
from sglang_lite.runtime.attention.registry import AttentionBackendName
from sglang_lite.runtime.models.config_fields import shown
from sglang_lite.runtime.structured_output.registry import ConstraintBackend

# Above these the machine fails, not the setting: positions and slots are int32, and each thread has a stack.
_MOST = {
    "context_length": (1 << 31) - 1,
    "max_total_tokens": (1 << 31) - 1,
    "threads": 1024,
    "max_running": 65_536,
    "step_tokens": 1 << 24,
    "page_size": 64,
    "compile_processes": 1024,
}
_WHOLE = -1  # of step_tokens: prompts are prefilled whole
DEFAULT_MODEL = "smollm2-135m"
_Constructor = TypeVar("_Constructor", bound=Callable[..., None])


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """
    Attributes:
        model: an alias (`smollm2-135m`), a Hugging Face folder, a `.gguf` file or a hub id.
        revision: branch, tag or commit of a hub id.
        model_impl: "native" runs the model by our own code; "transformers" by transformers', over our cache: slower, of
            any causal language model that keeps nothing but keys and values; "auto" by ours, if there is any.
        load_format: "auto" reads the checkpoint; "safetensors" and "gguf" refuse one of another format; "dummy" draws
            random weights of its shape.
        skip_tokenizer_init: the checkpoint may lack a tokenizer. Where it does, prompts are token ids, and so are
            answers: their texts are empty; text, chat templates and constraints are refused.
        served_model_name: the model's name in answers; None for `model`.
        weight_version: a name for the weights, which answers and `get_model_info` tell; `update_weights` may set
            another.
        chat_template: a Jinja template or the path of one, instead of the model's own.
        special_tokens_in_roles: what a program writes into a turn (users' text, tools' results, choices, variables)
            names special tokens, as text outside turns, chat templates and `generate`'s prompts always do: with True
            a user who writes `<|im_end|>` ends the turn.
        device: "cpu", "cuda" or "cuda:1"; "auto" is the GPU where there is one that can be used.
        dtype: "bfloat16", "float32", "float16"; "int8" quantises weights and activations (CPUs with VNNI: faster for
            many rows, less exact); "auto" is bfloat16 where the device computes in it, else float32.
        quantization: "fp8": the layers' matrices in 8-bit floating point (e4m3, a scale an output, and one a row of
            activations), quantised while loading; the head and the embedding stay as they are. GPUs of compute
            capability 8.9 (Ada, Hopper) or newer. None: as the checkpoint is: matrices of the layers
            that it has in 8-bit floating point (fp8, fbgemm_fp8, modelopt, compressed-tensors) keep their 8 bits on
            such a GPU where `dtype` is bfloat16, exactly but for scales by blocks, which become one an output;
            elsewhere they are dequantised while loading.
        kv_dtype: "fp8": keys and values in 8-bit floating point (e4m3), on such a GPU; "auto" is `dtype`. Each KV
            head's are divided by a power of two: the one that the checkpoint's scale is rounded up to where it brings
            one, else found while loading, by running the model on a few hundred fixed tokens.
        context_length: longest sequence in tokens; None for the model's own limit. A model with "longrope" (Phi)
            has two sets of factors: within its original length the short ones are used, else the long ones.
        max_total_tokens: size of the KV pool in tokens; None for what `mem_fraction` leaves on a GPU, and on a CPU for
            512 for each of `max_running`, and at least `context_length`.
        mem_fraction: share of a GPU's memory that weights, KV pool and everything else of this engine may take; it
            decides the pool where `max_total_tokens` does not. Without a meaning on a CPU.
        max_running: requests computed at the same time; None for 64 on a CPU, 256 on a GPU.
        max_queued: requests that may wait; one more is refused.
        step_tokens: most tokens computed in one step; a longer prompt is prefilled in chunks. None for 512 on a CPU,
            8,192 on a GPU. -1 for no chunks: as many as the longest sequence has.
        page_size: tokens in a page of the KV pool; None for 1 on a CPU, 16 on a GPU.
        prefix_cache: keep and reuse computed prefixes.
        tell_cache: where tokens of a prompt were not cached, results show the text that the cache has instead, and tell
            of other namespaces: so of others' prompts, too. None: as True, but `sglang-lite serve` does so only if it
            is set there. Models that read texts keep nothing to tell: they refuse True.
        policy: which waiting request is admitted next: "lpm" (longest cached prefix), "fcfs", "priority".
        eviction: which cached prefix is dropped for another: "lru", "lfu", "fifo", "slru".
        overlap: plan and launch a step while the one before is still running.
        jump_forward: "safe": text that a constraint leaves no choice about is appended as a whole, in the tokenizer's
            own spelling, instead of token by token; tokens at its end that might merge with what follows are left to
            the model. Not for requests with log-probabilities or a logit processor. "off": the model writes them all.
        deterministic: one numeric path per dtype, so that a request's tokens and log-probabilities have the same bits
            whatever runs beside it, however its prompt is cut into chunks, and whether it was found in the cache.
            Attention is computed token by token: in bfloat16, decoding reaches 0.6 (one request) to 0.8 (64) of the
            speed, prefill 0.45 (512 tokens) to 0.3 (2,048). On a CPU only.
        original_logprobs: log-probabilities of generated tokens are the model's own, before penalties, biases, masks
            and temperature. Else they are those that tokens are drawn with, before top-k, top-p and min-p; greedy ones
            have temperature 1. Those of prompt tokens and of choices always are the model's own.
        constraint_backend: the engine behind constraints: "llguidance", "xgrammar", "outlines" (regexes and choices);
            "auto" takes for each constraint the fastest that keeps it. One that is named refuses what it can't keep.
        compile_timeout_s: seconds on the CPU that compiling a constraint may take; longer fails its request alone.
        compile_memory_mb: most memory of a process that compiles constraints, of which there are up to two.
        cuda_graphs: decode through captured CUDA graphs on a GPU; without a meaning on a CPU.
        compile_processes: forks of a process that compile a model's kernels for a GPU, side by side, while its weights
            are read; the engine takes each when it is there. None are started where Triton's cache has all. 0: the
            engine compiles them itself, one after the other. None: one a core, at most 16; 0 where there is one core.
            Without a meaning on a CPU.
        attention_backend: what computes attention on a GPU: "triton", our kernels, or "torch", which takes heads of any
            size, reads no shared prefix once for all, runs without CUDA graphs, and is slower. "auto" is the first one
            that can run the model. "flashinfer" and "flash_attn" are the packages `flashinfer-python` and
            `flash-attn-4`, where they are installed; they read no shared prefix once for all, and flashinfer runs
            without CUDA graphs. One that is named and can't is refused. Without a meaning on a CPU.
        threads: CPU threads; None for one per physical core.
        seed: of the requests that set none; None for fresh randomness.
        in_process: run the engine in this process instead of one of its own: what its caller computes and what it
            computes then wait for each other, and a fault of one is the end of both. Logit processors can be any
            function. Where processes can't be started so (Windows) that is always done.
        restart: start another process for later requests when the engine's has died, at most three times in five
            minutes. Refused with `in_process`, as the two that follow.
        stall_timeout_s: seconds after which a step that stands still is logged, with what it is doing.
        stream_interval_s: least seconds between two times that new text is told: what comes meanwhile is joined. 0
            tells it as it comes.
        log_level: of this package's messages, for the whole process, in letters of any case; they are shown on standard
            error where the caller has set up no logging. None leaves it as it is.
    """

    model: str = DEFAULT_MODEL
    revision: str | None = None
    model_impl: Literal["auto", "native", "transformers"] = "auto"
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = "auto"
    skip_tokenizer_init: bool = False
    served_model_name: str | None = None
    weight_version: str = "default"
    chat_template: str | None = None
    special_tokens_in_roles: bool = False
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] = "auto"
    quantization: Literal["fp8"] | None = None
    kv_dtype: Literal["auto", "fp8"] = "auto"
    context_length: int | None = None
    max_total_tokens: int | None = None
    mem_fraction: float = 0.88
    max_running: int | None = None
    max_queued: int = 4096
    step_tokens: int | None = None
    page_size: int | None = None
    prefix_cache: bool = True
    tell_cache: bool | None = None
    policy: Literal["lpm", "fcfs", "priority"] = "lpm"
    eviction: Literal["lru", "lfu", "fifo", "slru"] = "lru"
    overlap: bool = True
    jump_forward: Literal["safe", "off"] = "safe"
    deterministic: bool = False
    original_logprobs: bool = False
    constraint_backend: ConstraintBackend = "auto"
    compile_timeout_s: float = 10.0
    compile_memory_mb: int = 2048
    cuda_graphs: bool = True
    compile_processes: int | None = None
    attention_backend: AttentionBackendName = "auto"
    threads: int | None = None
    seed: int | None = None
    in_process: bool = False
    restart: bool = False
    stall_timeout_s: float = 60.0
    stream_interval_s: float = 0.0
    log_level: Literal["debug", "info", "warning", "error", "critical"] | None = None

    def __post_init__(self) -> None:
        _check_int("max_queued", self.max_queued, 1)
        for name, most in _MOST.items():
            if (value := getattr(self, name)) is not None and (name, value) != ("step_tokens", _WHOLE):
                _check_int(name, value, 0 if name == "compile_processes" else 1)
                if value > most:
                    raise ParameterError(name, f"{shown(value)} is more than {most:,}.")
        for name in ("model", "revision", "chat_template", "served_model_name", "weight_version"):
            value = getattr(self, name)
            if not isinstance(value, str) and (value is not None or name in ("model", "weight_version")):
                raise ParameterError(name, f"{shown(value)} is no text.")
        if not isinstance(self.device, str) or not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ParameterError("device", f'{self.device!r} is not one of "auto", "cpu", "cuda", "cuda:<number>".')
        fraction = self.mem_fraction
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction < 1:
            raise ParameterError("mem_fraction", f"{fraction!r} is not between 0 and 1.")
        _check_int("compile_memory_mb", self.compile_memory_mb, 256)
        for name in ("compile_timeout_s", "stall_timeout_s"):
            seconds = getattr(self, name)
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < float("inf"):
                raise ParameterError(name, f"{seconds!r} is no number of seconds above 0.")
        pause = self.stream_interval_s
        if isinstance(pause, bool) or not isinstance(pause, int | float) or not 0 <= pause <= 60:
            raise ParameterError("stream_interval_s", f"{pause!r} is no number of seconds from 0 to 60.")
        chunk = self.step_tokens
        if chunk not in (None, _WHOLE) and self.max_running is not None and chunk < self.max_running:
            raise ParameterError(
                "step_tokens", f"{self.step_tokens} is less than max_running ({self.max_running}).",
                hint="Every running request takes one token of a step.",
            )  # fmt: skip
        if self.in_process:
            for name in _OF_A_PROCESS:
                if getattr(self, name) != getattr(type(self)(), name):
                    raise ParameterError(
                        name, "is for an engine in a process of its own.", hint="Leave it out, or in_process=True."
                    )
        if isinstance(self.log_level, str):
            object.__setattr__(self, "log_level", self.log_level.lower())
        for name, allowed in (
            ("model_impl", ("auto", "native", "transformers")),
            ("load_format", ("auto", "safetensors", "gguf", "dummy")),
            ("dtype", ("auto", "float32", "bfloat16", "float16", "int8")),
            ("jump_forward", ("safe", "off")),
            ("quantization", (None, "fp8")),
            ("kv_dtype", ("auto", "fp8")),
            ("policy", ("lpm", "fcfs", "priority")),
            ("constraint_backend", get_args(ConstraintBackend)),
            ("attention_backend", get_args(AttentionBackendName)),
            ("eviction", ("lru", "lfu", "fifo", "slru")),
            ("log_level", (None, "debug", "info", "warning", "error", "critical")),
            ("tell_cache", (None, True, False)),
            *((name, (True, False)) for name in _SWITCHES),
        ):
            if getattr(self, name) not in allowed:
                raise ParameterError(name, f"{getattr(self, name)!r} is not one of {', '.join(map(str, allowed))}.")

    def sized(self, *, gpu: bool, longest: int) -> Sizes:
        """The sizes, with the defaults of the kind of device where none were set.

        Args:
            longest: tokens of the longest sequence.
        """
        most = 256 if gpu else 64
        chunk = max(longest, self.max_running or most) if self.step_tokens == _WHOLE else self.step_tokens
        running = self.max_running or min(most, chunk or 8192)
        tokens = chunk or max(8192 if gpu else 512, running)
        return Sizes(running, tokens, self.page_size or (16 if gpu else 1))

    @staticmethod
    def make(**values: UserValue) -> EngineConfig:
        """A config from keywords. Raises ParameterError for one that does not exist."""
        known = {field.name for field in fields(EngineConfig)}
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"Did you mean {near[0]}=?" if near else f"It has: {', '.join(sorted(known))}."
                raise ParameterError(name, "Engine has no such parameter.", hint=hint)
        return EngineConfig(**values)


_SWITCHES = (
    "skip_tokenizer_init", "special_tokens_in_roles", "prefix_cache", "overlap", "deterministic", "original_logprobs",
    "cuda_graphs", "in_process", "restart",
)  # fmt: skip


_OF_A_PROCESS = ("restart", "stall_timeout_s", "stream_interval_s")
FIELDS = (EngineConfig.__doc__ or "").partition("Attributes:\n")[2].rstrip()  # for other docstrings


def takes_fields(constructor: _Constructor) -> _Constructor:
    """Gives a constructor that takes the fields as keywords, and the model also by position, their signature."""
    this = next(iter(inspect.signature(constructor).parameters.values()))
    kinds = get_type_hints(EngineConfig)
    first, *others = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=kinds[f.name])
        for f in fields(EngineConfig)
    ]
    first = first.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)
    constructor.__dict__["__signature__"] = inspect.Signature([this, first, *others], return_annotation=None)
    return constructor


@dataclass(frozen=True, slots=True)
class Sizes:
    """max_running, step_tokens and page_size as they are in force."""

    max_running: int
    step_tokens: int
    page_size: int


@dataclass(frozen=True, slots=True)
class Capacity:
    """
    Attributes:
        sizes: of the config, on this device.
        context_length: the longest sequence that the config and the model allow, in tokens.
        pages: of the KV cache.
        longest: the longest sequence that fits the cache, too.
    """

    sizes: Sizes
    context_length: int
    pages: int
    longest: int

    @property
    def tokens(self) -> int:
        """Of the KV cache."""
        return self.pages * self.sizes.page_size


def _check_int(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ParameterError(name, f"{value!r} is not a whole number of at least {least}.")
