"""The engine: a loaded model with thread-safe calls. Some of the calls block until they have a
result.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

from sglang_lite.engine import weights
from sglang_lite.engine.engine_process import EngineProcess
from sglang_lite.errors import short_repr
from sglang_lite.notebook.markup import definition_list, share_meter, shorten_text
from sglang_lite.program.nodes import Program
from sglang_lite.protocol import (
    BackendError,
    Constraint,
    Generation,
    MediaKind,
    ParameterError,
    Played,
    ProgramResult,
    ProgramSink,
    Prompt,
    SamplingParams,
    Selection,
    SglError,
)
from sglang_lite.runtime import calls
from sglang_lite.runtime.calls import EngineCall, R
from sglang_lite.runtime.config import EngineConfig, takes_fields
from sglang_lite.runtime.core.submission import (
    GenerateRequest,
    OpenRequest,
    ProgramRequest,
    SelectRequest,
    check_field_type,
    check_prefix_file,
    check_priority,
)
from sglang_lite.runtime.embedding.spec import is_encoder
from sglang_lite.runtime.host import startup_messages
from sglang_lite.runtime.host.garbage import freeze_objects
from sglang_lite.runtime.host.installed import check_engine_packages, check_platform
from sglang_lite.runtime.loading.seeding import complete_config_from_seed
from sglang_lite.runtime.models.resolve import resolve, resolve_for_engine
from sglang_lite.version import __version__

if TYPE_CHECKING:
    from sglang_lite.engine.core import Core, OpenProgram
    from sglang_lite.engine.core_client import CoreClient
    from sglang_lite.engine.replicas import Replicas
    from sglang_lite.runtime.core.open_requests import Ticket
    from sglang_lite.runtime.loading.load_model import LoadedModel
    from sglang_lite.runtime.requests.logit_processors import LogitProcessor
    from sglang_lite.runtime.requests.output_builder import Sink
    from sglang_lite.runtime.structured_output.base import CompiledGrammar
    from sglang_lite.runtime.tokens.tokenizer import Tokenizer
    from sglang_lite.text.chat_template import JinjaTemplate

T = TypeVar("T")


_SETTINGS = frozenset(field.name for field in fields(EngineConfig))


class Engine:
    """Engine with a loaded model. `sgl.Engine` adds SGLang's methods and documents the arguments."""

    @takes_fields
    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        **config: Any,  # fields of EngineConfig, whose types `takes_fields` adds
    ) -> None:
        if model is not None:
            if not isinstance(model, str | os.PathLike):
                raise ParameterError(
                    "model", f"{short_repr(model)} is not a name, a folder or a file."
                )
            config["model"] = os.fspath(model)
        is_named = "model" in config
        is_embedding = config.pop("is_embedding", None)
        settings = complete_config_from_seed(EngineConfig.make(**config))
        check_platform()
        check_engine_packages("an engine")
        startup_messages.set_up_logging(settings.log_level)
        path = resolve_for_engine(settings.model, settings.revision)
        if is_embedding is not None and bool(is_embedding) != is_encoder(path):
            raise ParameterError(
                "is_embedding",
                f"{settings.model} is {'no' if is_embedding else 'an'} embedding model.",
            )
        started = time.perf_counter()
        self.core, advice = _start_core(self, settings, path)
        seconds = time.perf_counter() - started
        startup_messages.announce_line(
            f"{self.core.description}; ready after {seconds:.1f} s.", settings.log_level
        )
        if not is_named:
            startup_messages.suggest_once(advice, settings.log_level)

    @classmethod
    def of(cls, loaded: LoadedModel, **config: Any) -> Self:  # keywords of the constructor
        """Creates an engine in this process around a model that is already loaded."""
        from sglang_lite.runtime.core import engine_thread

        settings = EngineConfig.make(**{**config, "in_process": True})
        startup_messages.set_up_logging(settings.log_level)
        engine = cls.__new__(cls)
        engine.core = engine_thread.start_engine_thread(engine, settings, lambda: loaded)
        return engine

    @classmethod
    def from_default_model_files(cls) -> Self:
        """Creates a handle of the default engine without starting it. The handle has only what can
        be read from the model's files: `config`, `model_name`, `tokenizer` and `chat_template`.
        """
        from sglang_lite.runtime.loading.model_files import open_model_files

        config = EngineConfig()
        tokenizer = open_model_files(resolve(config.model)).tokenizer
        engine = cls.__new__(cls)
        builder = SimpleNamespace(media=None)
        core: Any = SimpleNamespace(  # a part of a Core
            config=config,
            model_name=config.model,
            tokenizer=tokenizer,
            builder=builder,
            encoder=None,
        )
        engine.core = core
        return engine

    def __setattr__(self, name: str, value: object) -> None:
        if name in _SETTINGS:
            raise ParameterError(
                name,
                "an engine's settings are fixed once it has started.",
                hint=f"Start it with: sgl.Engine(…, {name}=…).",
            )
        object.__setattr__(self, name, value)

    def __reduce__(self) -> NoReturn:
        raise BackendError(
            "an engine can't be pickled: it belongs to the process that started it.",
            hint="Start an engine in each process that needs one, or serve one and connect to it.",
        )

    @property
    def config(self) -> EngineConfig:
        return self.core.config

    @property
    def model_name(self) -> str:
        return self.config.served_model_name or self.core.model_name

    @property
    def tokenizer(self) -> Tokenizer:
        return self.core.tokenizer

    @property
    def vocab_size(self) -> int:
        return self.core.vocab_size

    @property
    def media_kinds(self) -> frozenset[MediaKind]:
        """Kinds of media that prompts and programs may have: "image", "video", "audio"."""
        media = None if self.core.encoder is not None else self.core.builder.media
        return frozenset(() if media is None else media.kinds)

    @property
    def reads_images(self) -> bool:
        """True if prompts and programs may have images."""
        return "image" in self.media_kinds

    @property
    def context_length(self) -> int:
        """Longest sequence that the model and the engine's settings allow, in tokens."""
        return self.core.capacity.context_length

    # ---------------------------------------------------------------------------------- one request

    def submit(
        self,
        prompt: Prompt | str | Sequence[int],
        params: SamplingParams = SamplingParams(),
        constraint: Constraint | None = None,
        *,
        sink: Sink,
        flush: Callable[[], object] | None = None,
        stream: bool = False,
        namespace: str = "",
        priority: int = 0,
        logit_processor: LogitProcessor | None = None,
        rid: str | None = None,
        output_ids: Sequence[int] = (),
        timeout: float | None = None,
        winds_down: bool = False,
    ) -> Ticket:
        """Starts a generation and returns immediately.

        Args:
            prompt: spans, text, or token ids.
            params: sampling parameters; UNSET fields take the engine's defaults.
            constraint: constraint that the output must satisfy.
            sink: function called on the engine's thread with each Delta (if `stream`), then with
                the Generation or an SglError: once, or `n` times for `n` samples. It must not
                block.
            flush: function called on the engine's thread after the sinks, once for all events of a
                step. It may wake a thread or event loop that waits for these events.
            namespace: name of a part of the prefix cache: requests of different namespaces never
                share cached prefixes.
            priority: rank of the request; higher ones run first. Needs an engine with the policy
                "priority".
            logit_processor: function `(token_ids, logits) -> logits`, called with the ids so far
                and float32 logits [vocab_size], which it may change in place. Slow: it is called
                for every token on the engine's thread, so all requests wait for it.
            rid: name of the request for `abort`, unique among open requests.
            output_ids: first ids of the output, which an earlier stream of the same request has
                delivered. They count as output everywhere (positions of draws, penalties, limits,
                stops, grammar, usage), so with the same seed the output continues as that stream
                would have. The first Delta repeats the given ids; the Generation has the complete
                output, except for `output_logprobs`, which begin after the given ids
                (`meta["continued_from"]`).
            timeout: seconds after which the caller gives up. If the output is JSON, it is cut
                before that time, where closing brackets can complete it.
            winds_down: whether to end as soon as a limit could cut the output, from its first token
                on: like `Ticket.wind_down`, but in effect before the first step.

        Raises:
            ParameterError: a parameter is invalid, the prompt doesn't fit, or the policy has no
                priorities.
            OverloadedError: too many requests are waiting.
            EngineClosedError: the engine is closed.
        """
        check_priority(priority, self.config.policy)
        request = GenerateRequest(
            prompt,
            params,
            constraint,
            stream,
            namespace,
            priority,
            logit_processor,
            rid,
            output_ids,
            timeout,
            winds_down=winds_down,
        )
        return self.core.submit(request, sink, flush)

    def complete(
        self,
        prompt: Prompt | str | Sequence[int],
        params: SamplingParams = SamplingParams(),
        constraint: Constraint | None = None,
    ) -> Generation:
        """Generates one sample and waits for it. Otherwise like `submit`."""
        self.core.gate.check_blocking_call("complete")
        if isinstance(params.n, int) and params.n > 1:
            raise ParameterError(
                "n", "complete gives one generation.", hint="Use generate or submit."
            )
        found: Generation = _wait_for_last_event(partial(self.submit, prompt, params, constraint))
        return found

    def submit_when_room(self, submit: Callable[[], Ticket], count: int) -> Awaitable[Ticket]:
        """Calls `submit` as soon as the engine has room for `count` requests. Returns an awaitable
        of its result.

        Raises:
            SglError: see `submit`; OverloadedError only if `count` exceeds the engine's limit.
        """
        return self.core.open_requests.submit_once_admitted(submit, count)

    def compile_grammar(self, constraint: Constraint) -> CompiledGrammar:
        """Compiles a constraint so that later requests find it ready. May take seconds.

        Raises:
            ConstraintError: the constraint can't be enforced.
            EngineClosedError: the engine is closed.
        """
        try:
            compiled: CompiledGrammar = self.core.submit_call(
                calls.CompileGrammar(constraint)
            ).result()
        except SglError as error:  # may be raised for several callers
            raise copy(error) from error
        return compiled

    # ------------------------------------------------------------------------------------ selection

    def submit_select(
        self,
        prompt: Prompt | str,
        choices: Sequence[str],
        *,
        sink: Callable[[Selection | SglError], None],
        flush: Callable[[], object] | None = None,
        unconditional: bool = False,
        namespace: str = "",
        lora_path: str | None = None,
    ) -> Ticket:
        """Scores every choice as a continuation of the prompt, all in one batched forward over the
        shared prefix.

        Args:
            choices: texts to score, at least one. If one of them is empty, all are scored together
                with the prompt's last token.
            unconditional: whether to also score the choices without the prompt.
            sink: function called once, on the engine's thread, with the Selection or an SglError.
            flush: see `submit`.
            lora_path: name of the adapter (LoRA) to score with.

        Raises:
            ParameterError, OverloadedError, EngineClosedError: see `submit`.
        """
        return self.core.submit(
            SelectRequest(prompt, choices, unconditional, namespace, lora_path), sink, flush
        )

    def select(
        self,
        prompt: Prompt | str,
        choices: Sequence[str],
        *,
        unconditional: bool = False,
        lora_path: str | None = None,
    ) -> Selection:
        """Scores choices like `submit_select`, and waits for the result."""
        self.core.gate.check_blocking_call("select")
        submit = partial(
            self.submit_select, prompt, choices, unconditional=unconditional, lora_path=lora_path
        )
        found: Selection = _wait_for_last_event(submit)
        return found

    # ------------------------------------------------------------------------------------- programs

    def open_program(
        self,
        *,
        sink: ProgramSink,
        flush: Callable[[], object] | None = None,
        stream: bool = False,
        namespace: str = "",
        priority: int = 0,
    ) -> OpenProgram:
        """Opens a program that accepts more nodes while it runs. After each generation, the program
        appends the following text and continues in the same slot. A program with nothing to run
        holds no slot and doesn't count as open.

        Args:
            sink: function called on the engine's thread with the result of each node (Played), and
                last with a ProgramResult or the SglError of the main branch, once the program is
                closed and everything is played. If a node failed, its result is its SglError, and
                no further node of its branch follows. It must not block.
            flush: see `submit`.
            stream: whether to also send deltas.
            priority: rank of all requests of the program; higher ones run first, if the engine's
                policy is "priority".

        Raises:
            EngineClosedError: the engine is closed.
            ParameterError: a priority was given, and the engine's policy isn't "priority".
        """
        return self.core.open_program(OpenRequest(stream, namespace, priority), sink, flush)

    def run_program(
        self,
        prompt: Prompt | str,
        program: Program,
        *,
        sink: ProgramSink,
        flush: Callable[[], object] | None = None,
        stream: bool = False,
        namespace: str = "",
        priority: int = 0,
    ) -> Ticket:
        """Starts a complete program and returns immediately.

        Args:
            sink, flush, stream, priority: see `open_program`.

        Raises:
            ParameterError, OverloadedError, EngineClosedError: see `submit`.
        """
        return self.core.submit(
            ProgramRequest(prompt, program, stream, namespace, priority), sink, flush
        )

    def play(self, prompt: Prompt | str, program: Program) -> tuple[ProgramResult, list[Played]]:
        """Runs a program like `run_program` and waits for it. Returns its result and the results of
        its nodes.
        """
        self.core.gate.check_blocking_call("play")
        played: list[Played] = []
        found: ProgramResult = _wait_for_last_event(
            partial(self.run_program, prompt, program), played.append
        )
        return found, played

    def abort(self, rid: str) -> None:
        """Ends the request with this name. It fails with a RequestAbortedError whose `partial` is
        the result so far. A call of SGLang's `generate` that waits for the request returns that
        result instead, with a `finish_reason` of type "abort".

        Raises:
            ParameterError: no waiting or running request has this name.
        """
        self.core.gate.check_process()  # before a lock is taken
        self.core.open_requests.ticket_by_name(rid).abort()

    # ---------------------------------------------------------------------------- the engine itself

    def get_model_info(self) -> dict[str, object]:
        """Returns a description of the loaded model, with SGLang's keys."""
        return {
            "model_path": self.config.model,
            "served_model_name": self.model_name,
            "is_generation": self.core.generates,
            "weight_version": self.config.weight_version,
            "load_format": self.config.load_format,
            "reasoning_parser": None,
            "tool_call_parser": None,
            "disaggregation_mode": "null",
        }

    def get_server_info(self) -> dict[str, object]:
        """Returns the settings of the engine, limits of the model, and `stats`, with SGLang's keys."""
        stats = self.stats()
        return {
            **asdict(self.config),
            **asdict(self.core.capacity.sizes),
            "version": __version__,
            "model_path": self.config.model,
            "served_model_name": self.model_name,
            "vocab_size": self.vocab_size,
            "max_req_input_len": self.core.capacity.longest - 1,
            "internal_states": stats.get("replicas", [stats]),
        }

    def update_weights(self, path: str, weight_version: str | None = None) -> None:
        """Replaces the weights with those of another checkpoint of the same architecture, between
        two steps: see `weights.update_from_disk`.
        """
        weights.update_from_disk(self, path, weight_version=weight_version)

    def chat_template(self) -> JinjaTemplate | None:
        """Returns the engine's chat template: the one in its settings, or else the one that comes
        with the model. Returns None if there is neither.
        """
        source = self.config.chat_template
        if source is None:
            source = self.tokenizer.chat_template
        elif "{" not in source:
            path = Path(source)
            if not path.is_file():
                raise ParameterError(
                    "chat_template", f"{source!r} is neither a Jinja template nor a file."
                )
            source = path.read_text()
        from sglang_lite.text.chat_template import load_template

        return None if source is None else load_template(source, self.tokenizer.special_tokens)

    def start_profile(
        self,
        output_dir: str | os.PathLike[str],
        *,
        with_stack: bool = False,
        record_shapes: bool = False,
    ) -> None:
        """Starts a profile of the engine's steps with torch's profiler. The trace has spans for
        each step, and for the step's prefill, decode and masks. On a GPU, the spans are also NVTX
        ranges. Steps are slower during a profile, and each step adds to the size of the trace.

        Args:
            output_dir: folder for the trace; created if missing.
            with_stack: whether to record Python's stacks.
            record_shapes: whether to record the shapes of operands.

        Raises:
            ParameterError: a profile is already running, or the folder can't be written.
        """
        self.answer(calls.StartProfile(os.path.abspath(output_dir), with_stack, record_shapes))

    def stop_profile(self) -> str:
        """Ends the profile and returns the path of its trace, which chrome://tracing and Perfetto
        show. With several replicas, returns the folder of their traces.

        Raises:
            ParameterError: no profile is running.
        """
        return self.answer(calls.StopProfile())

    def load_lora_adapter(
        self, lora_name: str, lora_path: str | os.PathLike[str], *, pinned: bool = False
    ) -> None:
        """Registers an adapter (LoRA) from a folder in peft's format, after checking its config and
        the shapes of its matrices. Requests can then name it as `lora_path`. The first such request
        reads the matrices, and fails if they can't be read or contain NaN.

        Args:
            lora_name: name of the adapter. The name of an unloaded one may be used again.
            lora_path: the folder.
            pinned: whether the adapter is read immediately and stays on the device.

        Raises:
            ParameterError: the engine was started without adapters, the name can't be used, or
                there is no room.
            ModelError: the adapter is damaged, belongs to another model, or has something that is
                not supported.
            EngineClosedError: the engine is closed.
        """
        check_field_type("lora_name", lora_name, str)
        check_field_type("pinned", pinned, bool)
        self.answer(
            calls.LoadLoraAdapter(lora_name, os.path.abspath(os.path.expanduser(lora_path)), pinned)
        )

    def unload_lora_adapter(self, lora_name: str) -> None:
        """Forgets an adapter. Requests that already name it finish normally; the call waits for
        them.

        Raises:
            ParameterError: there is no adapter with that name.
            EngineClosedError: the engine is closed.
        """
        check_field_type("lora_name", lora_name, str)
        self.answer(calls.UnloadLoraAdapter(lora_name))

    def loras(self) -> list[dict[str, Any]]:  # texts, booleans and a whole number
        """Returns the adapters that requests can name: lora_name, lora_path, pinned, rank, and
        whether it is resident on the device.
        """
        return self.answer(calls.Loras())

    def flush_cache(self) -> int:
        """Drops every cached prefix that no request is using. Returns the number of tokens that
        were freed.
        """
        return self.answer(calls.FlushCache())

    def freeze_gc(self) -> None:
        """Collects garbage in this process and in the engine's process, and exempts all remaining
        objects from later collections. The engine's process does this automatically once the model
        is loaded. A call after the first requests also exempts the objects that these requests have
        cached.

        Raises:
            EngineClosedError: the engine is closed.
        """
        self.answer(calls.FreezeObjects())
        freeze_objects()

    def export_prefix(
        self,
        prompt: Prompt | str | Sequence[int],
        path: str | os.PathLike[str],
        *,
        namespace: str = "",
        secret: str | None = None,
    ) -> int:
        """Writes the cached keys and values of a prompt's beginning to a file, for `import_prefix`
        of a later engine. Needs `enable_hierarchical_cache=True`.

        Args:
            prompt: spans, text, or token ids; usually the prompt of a request and its answer.
            path: the file. An existing one is replaced once everything is written. Only its owner
                may read it.
            namespace: namespace of the requests whose prefix is exported.
            secret: text of 16 characters or more that is needed to read the file; None for no
                secret.

        Returns:
            Number of tokens whose keys and values were written. Only whole pages are written.

        Raises:
            CapabilityError: the engine has no hierarchical cache, or its model embeds texts.
            ParameterError: no part of the prompt is cached, or the file can't be written.
            EngineClosedError: the engine is closed.
        """
        check_field_type("prompt", prompt, str, Prompt, list, tuple)
        check_prefix_file(namespace, secret)
        text, ids = (prompt, ()) if isinstance(prompt, str | Prompt) else ("", tuple(prompt))
        return self.answer(calls.ExportPrefix(text, ids, os.path.abspath(path), namespace, secret))

    def import_prefix(
        self,
        path: str | os.PathLike[str],
        *,
        trust_cache: bool = False,
        namespace: str = "",
        secret: str | None = None,
    ) -> int:
        """Loads a file written by `export_prefix` into the host cache. Requests that begin with its
        prompt then find it there. The keys and values are also copied to free pages of the device,
        if there are any.

        Args:
            path: the file.
            trust_cache: whether you trust the author of the file. A checksum detects damage, but
                the author can write any keys and values, and the model uses them like its own.
            namespace: part of the cache whose requests may find it.
            secret: secret with which the file was written. If it matches, the author knew the
                secret, and `trust_cache` isn't needed.

        Returns:
            Number of tokens that were read; fewer than the file has if the host has too little
                room.

        Raises:
            CapabilityError: see `export_prefix`.
            ParameterError: the file is not trusted, is damaged, can't be read, or was written for
                another model, weight version, data type or page size. If a page is damaged, the
                pages before it may have been read.
            EngineClosedError: the engine is closed.
        """
        check_prefix_file(namespace, secret, trusted=trust_cache or secret is not None)
        return self.answer(calls.ImportPrefix(os.path.abspath(path), namespace, secret))

    def stats(self) -> dict[str, Any]:  # counts are int, seconds float
        """Returns counts, taken between two steps.

        These are: requests waiting and running; tokens cached and free; pages without an owner,
        which an idle engine recounts once a minute (if not 0, a bug of the engine); tokens of all
        prompts so far, and how many of them were cached; steps; calls so far (requests and
        selections, programs, and extensions of programs); open programs; processes that
        `restart=True` has started in place of others; constraints compiled, found compiled, and
        found on disk.

        For the last 4,096 steps with grammars: median, 99th percentile and maximum of the seconds
        that their masks took and that the device waited for masks (measured in one step of eight;
        on a CPU in every step). Also the number of rows that were postponed by a step because their
        masks took too long.

        With `tp_size` above 1, `ranks` lists the rank and process id of each. With `enable_eplb`,
        `expert_layers_moved` counts how often the experts of a layer were redistributed. With
        several replicas, counts are sums and times are maxima; `replicas` has the counts of each,
        with its number as `dp_rank`."""
        return self.answer(calls.Stats())

    def answer(self, call: EngineCall[R]) -> R:
        """Sends a call (runtime/calls.py) to the engine and waits for its answer."""
        self.core.gate.check_blocking_call(str(call.__struct_config__.tag))
        return self.core.submit_call(call).result()

    def close(self) -> None:
        """Stops the engine and frees its memory. Requests that have not ended fail with
        EngineClosedError. May be called more than once. An engine is also closed when it is
        garbage-collected.
        """
        self.core.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({shorten_text(self.core.description, 280)})"

    def _repr_html_(self) -> str:
        """Returns the model, device, limits and counts as HTML, for notebooks."""
        named = {"model": self.model_name, "engine": self.core.description}
        try:
            stats = self.stats()
        except SglError as error:
            return definition_list("Engine", named | {"state": error})
        if stats["total_tokens"]:
            named["longest sequence"] = f"{self.context_length:,} tokens"
            named["cache in use"] = share_meter(1 - stats["free_tokens"] / stats["total_tokens"])
        if prompts := stats.get("prompt_tokens"):
            named["prompts cached"] = share_meter(stats["prompt_tokens_cached"] / prompts)
        numbers = {name: n for name, n in stats.items() if n and isinstance(n, int | float)}
        counts = {
            name: f"{n:.3g}" if isinstance(n, float) else f"{n:,}" for name, n in numbers.items()
        }
        return definition_list("Engine", named | counts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _start_core(engine: Engine, config: EngineConfig, path: Path) -> tuple[Core, str]:
    """Starts the core of an engine. The core is ended when the engine is garbage-collected. Also
    returns a line of advice on the choice of model.
    """
    if config.node_rank:
        hint = "Run `sglang-lite serve` there: it starts that machine's ranks."
        raise ParameterError("node_rank", "an engine is on machine 0.", hint=hint)
    if config.in_process:
        from sglang_lite.runtime.core import engine_thread  # imports torch
        from sglang_lite.runtime.loading.load_model import load
        from sglang_lite.runtime.loading.model_choice import suggest_larger_model

        advice = suggest_larger_model(config)  # while the memory is free
        return engine_thread.start_engine_thread(engine, config, lambda: load(config, path)), advice
    core: CoreClient | Replicas
    advice = ""
    if config.dp_size > 1:
        from sglang_lite.engine.replicas import Replicas

        core = Replicas(config, path)
    else:
        process = EngineProcess(config, path)
        from sglang_lite.engine.core_client import CoreClient  # while the process starts

        core = CoreClient(config, path, process)
        advice = core.suggestion
    weakref.finalize(engine, core.disconnect).atexit = False
    return core, advice


def _wait_for_last_event(
    submit: Callable[..., Ticket], also: Callable[[Played], object] = lambda _: None
) -> Any:
    """Waits for the last event of a submission and returns it. Passes the results of a program's
    nodes to `also`. If the wait is interrupted with Ctrl-C, aborts the submission.
    """
    future: Future[Any] = Future()

    def sink(event: object) -> None:
        if isinstance(event, SglError):
            future.set_exception(event)
        elif isinstance(event, Played):
            also(event)
        else:
            future.set_result(event)

    ticket = submit(sink=sink)
    try:
        return future.result()
    except KeyboardInterrupt:
        ticket.abort()
        raise
