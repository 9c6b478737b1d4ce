"""`sgl.record`: backend that stores its requests and their answers in a file."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence

import msgspec

from sglang_lite import wire
from sglang_lite.lang.backend.base import (
    Backend,
    DelegatingBackend,
    asked_adapter,
    name_of,
    unsupported_feature_error,
)
from sglang_lite.lang.backend.default import BackendLike, backend_for
from sglang_lite.lang.backend.planning import Planner, RunFacts
from sglang_lite.lang.backend.remote.planner import CallPlanner
from sglang_lite.lang.chat_template import ChatTemplate, ChatTemplateStyle
from sglang_lite.lang.execution.operations import current_node
from sglang_lite.lang.media import redact_media
from sglang_lite.lang.runs import files
from sglang_lite.protocol import (
    BackendError,
    CapabilityError,
    Constraint,
    Delta,
    Generation,
    Media,
    Message,
    ParameterError,
    Prompt,
    RequestAbortedError,
    SamplingParams,
    Selection,
    SglError,
    Span,
)
from sglang_lite.protocol.recording import (
    RecordedCall,
    RecordedEvent,
    RecordedRequest,
    RecordedTemplate,
    RecordingEnd,
    RecordingHead,
)
from sglang_lite.protocol.results import Failure
from sglang_lite.text.chat_template import JinjaTemplate, TurnTemplate
from sglang_lite.wire.failure import as_failure

_QUERY = re.compile(r"(\bhttps?://[^\s?#'\"<>]*)[?#][^\s'\"<>]*")
_KEY = re.compile(r"\b(sk|pk|key|AIza|ghp|hf|Bearer)([-_ ]?)[A-Za-z0-9._\-]{12,}")
# names of environment variables that contain secrets
_SECRETS = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD)$")
_SHORTEST_SECRET = 8


class Recording(DelegatingBackend):
    """Backend that passes requests to another backend and writes each request with its answers to a
    file. Leaving it as a context manager completes the file.

    Args:
        path: path of the file, which is overwritten.
        backend: backend that answers.

    Raises:
        ParameterError: the file can't be written.
        CapabilityError: the backend has SGLang's blocking hooks, which receive the state instead of
            a request.
    """

    def __init__(self, path: files.AnyPath, backend: Backend) -> None:
        super().__init__(backend)
        if not backend.capabilities.reads_prompts:
            raise unsupported_feature_error(
                backend,
                "record",
                "recording with SGLang's blocking hooks",
                "Write agenerate and aselect.",
                None,
            )
        self.enforces = backend.enforces
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._after = ""
        self._calls = 0
        self._runs: list[Callable[[], object]] = []  # each waits for a run on this backend
        self.on_run = self._runs.append
        self._secrets = [
            value
            for name, value in os.environ.items()
            if _SECRETS.search(name) and len(value) >= _SHORTEST_SECRET
        ]
        try:
            self._file = open(path, "wb", buffering=0)  # noqa: SIM115 # `close` closes it
        except OSError as error:
            raise files.file_error(path, "written", error) from error
        self._path = path
        self._failure: SglError | None = None  # set when a line could not be written
        self._began = time.perf_counter()
        rules = backend.capabilities.turns
        turns = (
            ()
            if rules is None
            else (rules.begun_turns, rules.begun_constrained, rules.enforces_grammars)
        )
        head = RecordingHead(
            name_of(backend),
            backend.get_model_name(),
            backend.enforces,
            _template_for_recording(backend.get_chat_template()),
            backend.tool_family(),
            time.time(),
            tuple(sorted(kind.__name__ for kind in backend.capabilities.constraints)),
            *turns,
        )
        try:
            self._write(head)
        except ParameterError:
            files.remove_if_empty(path)
            raise

    def planner(self, run: RunFacts) -> Planner | None:
        return None if self.capabilities.turns is None else CallPlanner(self, run)

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            for wait in self._runs:
                wait()
        self.close()
        if kind is None and self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Completes the file without waiting for calls in progress. Further calls are refused.

        Raises:
            ParameterError: the file can't be written. It contains the earlier calls.
        """
        with self._lock:
            if not self._file.closed:
                self._write(RecordingEnd(self._calls, self._after))
                self._file.close()

    def shutdown(self) -> None:
        """Completes the file and shuts down the other backend."""
        self.close()
        self.backend.shutdown()

    def _write(self, record: RecordingHead | RecordedCall | RecordingEnd) -> None:
        """Writes a record as one line of the file. If that fails, closes the file and raises
        ParameterError. The recording then ends with the previous line.
        """
        line = wire.encode(record)
        try:
            files.append(self._file, self._path, line + b"\n")
        except ParameterError as error:
            self._failure = error
            self._file.close()
            raise
        self._after = digest_line(line)

    # --------------------------------------------------------------------------------------- asking

    async def agenerate(
        self, prompt: Prompt, params: SamplingParams, constraint: Constraint | None, *, stream: bool
    ) -> AsyncGenerator[Delta | Generation, None]:
        request = RecordedRequest(prompt_for_recording(prompt), params, constraint)
        with self._record_call(request, stream=stream) as record:
            async for event in self.backend.agenerate(prompt, params, constraint, stream=stream):
                record(event)
                yield event

    async def aselect(
        self, prompt: Prompt, choices: Sequence[str], *, unconditional: bool
    ) -> Selection:
        request = selection_request(prompt, choices, unconditional=unconditional)
        with self._record_call(request, stream=False) as record:
            selection = await self.backend.aselect(prompt, choices, unconditional=unconditional)
            record(selection)
        return selection

    @contextlib.contextmanager
    def _record_call(
        self, request: RecordedRequest, *, stream: bool
    ) -> Iterator[Callable[[Delta | Generation | Selection], None]]:
        """Records the call made inside the `with` block, even if it fails. Yields a function that
        records an event of the call.
        """
        if self._failure is not None:
            raise self._failure
        if self._file.closed:
            raise CapabilityError(
                "the recording has ended.",
                hint="Run programs, and read their streams, inside `with sgl.record(…)`.",
            )
        number = next(self._numbers)
        node = current_node()
        began = time.perf_counter()
        events = list[RecordedEvent]()
        failed = None
        try:
            yield lambda event: events.append(RecordedEvent(time.perf_counter() - began, event))
        except BaseException as error:
            failed = self._redacted_failure(error)
            raise
        finally:
            ended = time.perf_counter() - began
            with self._lock:
                if not self._file.closed:
                    call = RecordedCall(
                        number,
                        self._after,
                        request,
                        *node,
                        stream,
                        began - self._began,
                        tuple(events),
                        failed,
                        ended,
                    )
                    self._write_call(call)

    def _write_call(self, call: RecordedCall) -> None:
        """Writes a call to the file. Raises ParameterError if it can't be written, unless the call
        itself has failed.
        """
        try:
            self._write(call)
        except ParameterError:
            if call.error is None:
                raise
        else:
            self._calls += 1

    def _redacted_failure(self, error: BaseException) -> Failure:
        """Returns an error in the form that is recorded. Keys and URL queries are removed, and so
        are the cause and the notes, which may contain them.
        """
        if not isinstance(error, Exception):
            error = RequestAbortedError("the call was cancelled.")
        elif not isinstance(error, SglError):
            error = BackendError(f"{type(error).__name__}: {error}")
        found = as_failure(error)
        message = self._redact(found.message)
        hint = self._redact(found.hint)
        return msgspec.structs.replace(found, message=message, hint=hint, where=None, notes=())

    def _redact(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "…")
        return _KEY.sub(r"\1\2…", _QUERY.sub(r"\1", text))


def record(path: files.AnyPath, backend: BackendLike | None = None) -> Recording:
    """Returns a backend that passes requests to another backend and records them with their
    answers, for `sgl.Replay`:

        with sgl.record("run.jsonl", sgl.OpenAI("gpt-4o")) as backend:
            program.run(backend=backend)

    The file contains prompts, parameters, answers and errors, with their times. It does not contain
    keys, headers or URL queries, and only digests of images.

    Args:
        path: path of the file, which is overwritten. Leaving the `with` block waits for runs on the
            backend, and completes the file.
        backend: backend that answers, node by node; None for the default backend.

    Raises:
        ParameterError: the file can't be written.
        CapabilityError: the backend has SGLang's blocking hooks.
    """
    return Recording(path, backend_for(backend))


def prompt_for_recording(prompt: Prompt) -> Prompt:
    """Returns a prompt in the form that is recorded: text without token ids, and digests instead of
    images.
    """
    spans = tuple(
        Span("".join(span.text for span in spans), special=special)
        for special, spans in itertools.groupby(prompt.spans, key=lambda span: span.special)
    )
    messages = prompt.messages
    if prompt.images or any(
        isinstance(part, Media) for message in messages for part in message.content
    ):
        messages = tuple(
            Message(
                each.role,
                tuple(
                    redact_media(part) if isinstance(part, Media) else part for part in each.content
                ),
            )
            for each in messages
        )
    return Prompt(
        spans, messages, prompt.role, prompt.partial, tuple(map(redact_media, prompt.images))
    )


def digest_line(line: bytes) -> str:
    """Returns the digest of a line of a recording."""
    return hashlib.sha256(line).hexdigest()[:32]


def selection_request(
    prompt: Prompt, choices: Sequence[str], *, unconditional: bool
) -> RecordedRequest:
    """Returns a selection's request in the form that is recorded. It includes the adapter requested
    in the current context.
    """
    adapter = asked_adapter.get()
    params = SamplingParams() if adapter is None else SamplingParams(lora_path=(adapter,))
    return RecordedRequest(
        prompt_for_recording(prompt), params, choices=tuple(choices), unconditional=unconditional
    )


def request_key(request: RecordedRequest) -> bytes:
    """Returns the digest of a request; equal requests have equal digests."""
    return hashlib.sha256(msgspec.msgpack.encode(request)).digest()


def _template_for_recording(template: TurnTemplate | None) -> RecordedTemplate | None:
    if isinstance(template, JinjaTemplate):
        return RecordedTemplate(
            template.name, template.source, tuple(template.special_tokens.items())
        )
    if isinstance(template, ChatTemplate):
        turns = tuple((role, *texts) for role, texts in template.role_prefix_and_suffix.items())
        return RecordedTemplate(
            template.name,
            turns=turns,
            default_system_prompt=template.default_system_prompt,
            stop_str=tuple(template.stop_str),
            image_token=template.image_token,
            llama2=template.style is ChatTemplateStyle.LLAMA2,
        )
    return None
