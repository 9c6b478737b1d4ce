"""Core of an engine that runs in its own process, which is reached over a link (engine_link.py).

Prompts of generations are tokenized and parameters are checked in the caller's process, so errors
are raised at the call.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sglang_lite.engine.engine_link import EngineLink, Watch, ignore_status_message
from sglang_lite.engine.engine_process import EngineProcess
from sglang_lite.engine.frames import (
    Close,
    DropBranch,
    Encode,
    ExpectPause,
    Extend,
    Judge,
    Ready,
    Submit,
    WindDown,
)
from sglang_lite.engine.futures import convert_result
from sglang_lite.engine.open_submissions import OpenSubmission
from sglang_lite.errors import short_repr
from sglang_lite.program.nodes import Gen, Node, Verdict
from sglang_lite.program.nodes import Path as BranchPath
from sglang_lite.protocol import (
    ParameterError,
    ProgramSink,
    Selection,
    SglError,
)
from sglang_lite.runtime.calls import (
    CompileGrammar,
    EngineCall,
    NameWeights,
    OpenTensors,
    R,
    ReceiveWeights,
    Stats,
    UpdateTensors,
    UpdateWeights,
    WriteTensors,
)
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.core.gate import Gate
from sglang_lite.runtime.core.open_requests import OpenRequests, Ticket
from sglang_lite.runtime.core.request_builder import RequestBuilder
from sglang_lite.runtime.core.submission import (
    GenerateRequest,
    OpenRequest,
    ProgramRequest,
    SelectRequest,
    Submission,
    check_nodes,
    check_priority,
    check_replica_rank,
    check_verdict,
)
from sglang_lite.runtime.embedding.request import (
    EncodeRequest,
    not_a_generator_error,
    not_an_encoder_error,
)
from sglang_lite.runtime.embedding.spec import EncoderSpec, encoder_spec, is_encoder
from sglang_lite.runtime.embedding.tokenizer import encoder_tokenizer
from sglang_lite.runtime.loading.model_files import open_model_files
from sglang_lite.runtime.media.placeholders import MediaFormat
from sglang_lite.runtime.models.resolve import resolve
from sglang_lite.runtime.requests.logit_processors import LogitProcessor
from sglang_lite.runtime.requests.output_builder import Sink
from sglang_lite.runtime.tokens.tokenizer import Tokenizer
from sglang_lite.wire.failure import Failure, as_failure

if TYPE_CHECKING:
    from sglang_lite.runtime.structured_output.base import CompiledGrammar
    from sglang_lite.runtime.structured_output.compiler import Compiler

logger = logging.getLogger("sglang_lite")
ReadingParts: TypeAlias = "tuple[EncoderSpec | None, Tokenizer, MediaFormat | None]"


class CoreClient:
    """Client of an engine in another process: the `Core` that `Engine` uses by default.

    Args:
        config: settings of the engine.
        path: folder of the model.
        process: process that was started with `config` and `path`.
        parts: result of `load_tokenizer_and_media` for this model, if it was already read.
        watch: see EngineLink.

    Attributes:
        config, model_name: settings and name of the weights that are loaded now.
        encoder: specification of an embedding or classification model; None for a model that
            generates.
        generates: True if the engine generates text: it is not an encoder of texts or images.
        tokenizer, vocab_size: tokenizer and vocabulary size of the model.
        capacity: limits of the engine: rows, tokens per step, pages, context length.
        description: one line about the model and its capacity.
        suggestion: one line of advice on the default model, "" for others.
        builder: builds requests: checks parameters and tokenizes prompts.
        open_requests: requests and programs that have not ended.
        gate: checks whether a caller may use the engine.

    Raises:
        SglError: the process, or the engine in it, can't be started.
    """

    def __init__(
        self,
        config: EngineConfig,
        path: Path,
        process: EngineProcess,
        parts: ReadingParts | None = None,
        watch: Watch = ignore_status_message,
    ) -> None:
        self.config = config
        self.gate = Gate()
        self._compiler: Compiler | None = None
        self._creating = threading.Lock()  # held while the compiler is made
        self._link = EngineLink(config, path, process, self.gate, watch)
        _open_clients.add(self)
        try:
            # While the process loads the model.
            self.encoder, self.tokenizer, self._media = parts or load_tokenizer_and_media(
                config, path
            )
            ready = process.ready.result()
        except BaseException:
            self.close()
            raise
        self._set_engine_properties(ready)

    def _set_engine_properties(self, ready: Ready) -> None:
        config = self.config
        self.model_name = ready.model_name
        self.vocab_size = ready.vocab_size
        self.description = ready.description
        self.suggestion = ready.suggestion
        self._eos_ids = frozenset(ready.eos_ids)
        self.generates = self.encoder is None and not config.encoder_only
        self.capacity = capacity = ready.capacity
        self.builder = RequestBuilder(
            ready.model_name,
            self.tokenizer,
            ready.vocab_size,
            self._eos_ids,
            capacity.longest,
            config.seed,
            all_special=config.special_tokens_in_roles,
            media=self._media if ready.takes_media else None,
            recorded=config.recorded_names,
        )
        self.builder.adapters = None  # only the engine's process knows which adapters there are
        self.open_requests = OpenRequests(config.max_queued + capacity.sizes.max_running)

    # ---------------------------------------------------------------------------------- submissions

    def submit(
        self,
        request: Submission,
        sink: Callable[[Any], None],
        flush: Callable[[], object] | None = None,
    ) -> Ticket:  # each kind of submission has its own events
        """Starts a generation, a selection or a whole program: see `Engine.submit`, `submit_select`
        and `run_program`.
        """
        self._check_generates()
        request.check_fields()
        return self._submit_by_kind[type(request)](self, request, sink, flush)

    def _generate(
        self, request: GenerateRequest, sink: Sink, flush: Callable[[], object] | None
    ) -> Ticket:
        check_replica_rank(request.routed_dp_rank, 1)
        encoded = self.builder.encode_request(request)
        params = self.builder.resolve_with_defaults(request.params)
        tokens = self.builder.check_prompt_tokens(encoded.ids, params, encoded.media)
        output = self.builder.check_output_ids(request.output_ids, len(tokens), params)
        processor, args = _importable_name_and_args(request.logit_processor)
        number = self._link.next_submission_number()
        entry = OpenSubmission(params.n, flush)
        ticket = Ticket(
            partial(self._link.abort, number),
            lambda: entry.cached,
            partial(self._wind_down, number),
        )
        message = Submit(
            tokens.tobytes(),
            request.params,
            request.constraint,
            request.stream,
            request.namespace,
            request.priority,
            processor,
            output.tobytes(),
            request.timeout,
            request.session,
            encoded.media,
            args,
            request.winds_down,
            encoded.text_tokens,
        )
        self._link.send_submission(
            number,
            message,
            entry,
            lambda: self.open_requests.track(sink, params.n, request.rid, ticket),
        )
        return ticket

    def _select(
        self,
        request: SelectRequest,
        sink: Callable[[Selection | SglError], None],
        flush: Callable[[], object] | None,
    ) -> Ticket:
        self.builder.check_images(request.prompt)
        return self._submit_to_process(request, sink, flush)

    def _submit_program_request(
        self, request: ProgramRequest, sink: ProgramSink, flush: Callable[[], object] | None
    ) -> Ticket:
        check_priority(request.priority, self.config.policy)
        self.builder.check_images(request.prompt)
        for error in self.builder.invalid_node_errors(request.program.nodes).values():
            raise error
        return self._submit_to_process(request, sink, flush)

    def _submit_to_process(
        self,
        request: SelectRequest | ProgramRequest,
        sink: Callable[[Any], None],
        flush: Callable[[], object] | None,
    ) -> Ticket:
        number = self._link.next_submission_number()
        self._link.send_submission(
            number, request, OpenSubmission(flush=flush), lambda: self.open_requests.track(sink)
        )
        return Ticket(partial(self._link.abort, number), wind_down=partial(self._wind_down, number))

    def _wind_down(self, number: int) -> None:
        self._link.notify_submission(number, WindDown())

    _submit_by_kind: ClassVar[Mapping[type[Submission], Callable[..., Ticket]]] = {
        GenerateRequest: _generate,
        SelectRequest: _select,
        ProgramRequest: _submit_program_request,
    }

    def open_program(
        self, request: OpenRequest, sink: ProgramSink, flush: Callable[[], object] | None = None
    ) -> _OpenProgram:
        """Opens a program: see `Engine.open_program`."""
        self._check_generates()
        request.check_for_policy(self.config.policy)
        number = self._link.next_submission_number()
        self._link.register_program(number, request, OpenSubmission(flush=flush), sink)
        return _OpenProgram(self, self._link, number)

    # ------------------------------------------------------------------------ calls with one answer

    def submit_call(self, call: EngineCall[R]) -> Future[R]:
        """Makes a call and returns the future of its answer: see `EngineCore.submit_call`."""
        self.gate.check_open()
        answer = self._answers.get(type(call))
        future: Future[R] = self._link.call_engine(call) if answer is None else answer(self, call)
        return future

    def ask_process(self, call: EngineCall[Any]) -> Future[Any]:  # as the call's own
        """Sends a call to the engine's process and returns the future of its answer. Only for calls
        that need nothing from the caller's process.
        """
        return self._link.call_engine(call)

    def _encode(self, request: EncodeRequest) -> Future[NDArray[np.float32]]:
        encoder = self.encoder
        if encoder is None:
            raise not_an_encoder_error(self.model_name)
        ids, types, lengths = (
            each.tobytes() for each in (request.ids, request.types, request.lengths)
        )
        answer = self._link.call_engine(Encode(ids, types, lengths, request.adapters))
        return convert_result(
            answer, lambda data: np.frombuffer(data, np.float32).reshape(-1, encoder.width)
        )

    def _compile(self, call: CompileGrammar) -> Future[CompiledGrammar]:
        """Compiles a constraint in the caller's process. If that succeeds, compiles it in the
        engine's process, too.
        """
        self._check_generates()
        self.gate.check_blocking_call("compile_grammar")
        # imports a grammar engine
        from sglang_lite.runtime.structured_output.compiler import Compiler

        with self._creating:
            if self._compiler is None:
                self._compiler = Compiler(
                    self.tokenizer,
                    self.vocab_size,
                    self._eos_ids,
                    1,
                    backend=self.config.constraint_backend,
                    timeout_s=self.config.compile_timeout_s,
                    memory_mb=self.config.compile_memory_mb,
                )
        compiled = self._compiler.compile_in_background(call.constraint).result()
        return convert_result(self._link.call_engine(call), lambda _: compiled)

    def _update_tensors(
        self, call: UpdateTensors | OpenTensors | ReceiveWeights | NameWeights
    ) -> Future[str]:
        def keep_version(version: str) -> str:
            self.config = replace(self.config, weight_version=version)
            self._link.remember_weights(self.config)
            return version

        return convert_result(self._link.call_engine(call), keep_version)

    def _update_weights(self, call: UpdateWeights) -> Future[str]:
        path = call.path
        version = self.config.weight_version if call.version is None else call.version
        config = replace(self.config, model=path, revision=None, weight_version=version)
        # the process may be in another folder
        absolute = os.path.abspath(path) if os.path.exists(path) else path
        folder = resolve(absolute, None)

        def keep_weights(name: str) -> str:
            self.model_name = path if name == absolute else name
            self.config = config
            self._link.remember_weights(config, folder)
            return self.model_name

        return convert_result(
            self._link.call_engine(UpdateWeights(absolute, version, call.load_format)), keep_weights
        )

    _answers: ClassVar[Mapping[type[EngineCall[Any]], Callable[..., Future[Any]]]] = {
        EncodeRequest: _encode,
        CompileGrammar: _compile,
        UpdateWeights: _update_weights,
        UpdateTensors: _update_tensors,
        OpenTensors: _update_tensors,
        ReceiveWeights: _update_tensors,
        WriteTensors: lambda self, call: update_tensors_through_file(call, self._update_tensors),
        NameWeights: _update_tensors,
        Stats: lambda self, call: convert_result(
            self._link.call_engine(call), lambda counts: counts | {"restarts": self._link.restarts}
        ),
    }

    # -------------------------------------------------------------------------- state of the engine

    def call_soon(self, call: Callable[[], object]) -> None:
        """Schedules a call on the thread that calls the sinks, after the next frame from the
        engine. Takes no lock.
        """
        self._link.submissions.call_soon(call)

    @property
    def responds(self) -> bool:
        return self._link.responds

    @property
    def pids(self) -> list[int]:
        return self._link.pids

    @property
    def is_silent(self) -> bool:
        """True if the process was stopped or swapped out when it was last checked. This is cheap:
        it makes no system call.
        """
        return self._link.is_silent

    @property
    def is_up(self) -> bool:
        """True if the process has loaded its engine. False while a replacement process is starting."""
        return not self.gate.reason and self._link.is_ready

    def close(self, patience_s: float | None = None) -> None:
        """Ends the engine's process and this process's compiler: see `EngineLink.close`."""
        self._link.disconnect()
        if self._compiler is not None and not self.gate.is_forked_copy:
            self._compiler.close()
        self._link.close(patience_s)

    def disconnect(self, reason: str | None = None) -> None:
        """Ends the engine's process. Without a reason, closes the connection, and the process
        exits: see `EngineLink.disconnect`. With a reason, kills the process: see
        `EngineLink.end_process`.
        """
        if reason is None:
            self._link.disconnect()
        else:
            self._link.end_process(reason)

    def _check_generates(self) -> None:
        """Raises EngineClosedError if the engine is closed, and CapabilityError if its model
        generates nothing.
        """
        self.gate.check_open()
        if not self.generates:
            raise not_a_generator_error(self.model_name, encoder_only=self.config.encoder_only)


@dataclass(frozen=True, slots=True, eq=False)
class _OpenProgram:
    """Program that is open in the engine's process: see `EngineProgram`."""

    core: CoreClient
    link: EngineLink
    number: int

    def extend(self, path: BranchPath, nodes: Sequence[Node]) -> None:
        check_nodes(nodes, path)
        sent = [*nodes]
        refused = dict[int, Failure]()
        for i, error in self.core.builder.invalid_node_errors(nodes).items():
            node = nodes[i]
            # its parameters may have any type, and may not be serialisable
            if isinstance(node, Gen):
                sent[i] = Gen(node.name, where=node.where)
                refused[i] = as_failure(error)
        self.link.send(self.number, Extend(path, tuple(sent), refused))

    def judge(self, path: BranchPath, place: int, verdict: Verdict) -> None:
        check_verdict(path, place, verdict)
        # invalid parameters may have any type, and may not be serialisable
        if verdict.again is not None:
            for error in self.core.builder.invalid_node_errors((verdict.again,)).values():
                raise error
        self.link.send(self.number, Judge(path, place, verdict))

    def drop_branch(self, path: BranchPath) -> None:
        self.link.notify_submission(self.number, DropBranch(path))

    def expect_pause(self, path: BranchPath, seconds: float) -> None:
        self.link.notify_submission(self.number, ExpectPause(path, seconds))

    def wind_down(self) -> None:
        self.link.notify_submission(self.number, WindDown())

    def close(self) -> None:
        self.link.notify_submission(self.number, Close())

    def abort(self) -> None:
        self.link.abort(self.number)


def update_tensors_through_file(
    call: WriteTensors, update: Callable[[UpdateTensors], Future[str]]
) -> Future[str]:
    """Writes a call's tensors to a file in shared memory and calls `update` with the file's path.
    Returns the future of the update. The file is deleted when the future is done.
    """
    from sglang_lite.runtime.models.weights.given import write_shared_file  # needs torch

    file = write_shared_file(call.tensors)
    answer = update(UpdateTensors(str(file), call.last, call.version))
    answer.add_done_callback(lambda _: file.unlink())
    return answer


def load_tokenizer_and_media(config: EngineConfig, path: Path) -> ReadingParts:
    """Returns three values: the specification of an embedding or classification model, or None for
    other models; the model's tokenizer; and how its prompts embed images, videos and sounds.
    """
    if is_encoder(path):
        spec = encoder_spec(path)
        return spec, encoder_tokenizer(path, spec), None
    files = open_model_files(
        path, config.model_impl, config.image_options, tokenizer=not config.skip_tokenizer_init
    )
    return None, files.tokenizer, files.media


def _importable_name_and_args(given: LogitProcessor | None) -> tuple[str | None, tuple[Any, ...]]:
    """Returns the name under which the engine's process can import a logit processor, and the
    arguments that a `partial` has bound to it. Raises ParameterError like `_importable_name`.
    """
    if isinstance(given, partial) and not given.keywords:
        return _importable_name(given.func), given.args
    return None if given is None else _importable_name(given), ()


def _importable_name(processor: Callable[..., Any]) -> str:
    """Returns the name under which the engine's process can import a logit processor, as
    "module:name".

    Raises:
        ParameterError: the processor can't be imported by name.
    """
    module = getattr(processor, "__module__", None)
    name = getattr(processor, "__qualname__", "")
    value: Any = sys.modules.get(module or "")
    for part in name.split("."):
        value = getattr(value, part, None)
    if module == "__main__" or value is not processor:
        raise ParameterError(
            "logit_processor",
            f"{short_repr(processor)} can't be found by name in the engine's process.",
            hint="Define it at the top of a module of its own and import it from there, or use in_process=True.",
        )
    return f"{module}:{name}"


_open_clients: weakref.WeakSet[CoreClient] = weakref.WeakSet()


@atexit.register
def _close_all_clients() -> None:
    for core in list(_open_clients):
        core.close(0)  # their links wait for sinks
