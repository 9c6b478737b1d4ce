"""Service that the handlers of all protocols use: the engine, the chat format of its model, its
health.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import msgspec

from sglang_lite.engine.engine import Engine
from sglang_lite.protocol import EngineClosedError, RequestTimeoutError, SamplingParams, SglError
from sglang_lite.runtime.core.submission import GenerateRequest
from sglang_lite.runtime.host.cache_folder import cache_folder
from sglang_lite.runtime.media.speech import VoxtralSpeech, WhisperSpeech, load_speech_format
from sglang_lite.runtime.models.lora.paths import read_lora_path
from sglang_lite.runtime.models.resolve import resolve_for_engine
from sglang_lite.server.async_engine import AsyncEngine, key_in_use
from sglang_lite.server.conversation.addresses import ImageFetcher
from sglang_lite.server.errors import NotFoundError, RateLimitError
from sglang_lite.server.known_texts import KnownTexts
from sglang_lite.server.quotas import Quotas
from sglang_lite.server.reader import ModelFacts, RequestReader
from sglang_lite.server.reader_pool import ReaderPool
from sglang_lite.server.request_metrics import RequestMetrics
from sglang_lite.server.request_spans import RequestSpans
from sglang_lite.server.responses_store import ResponseStore
from sglang_lite.server.sessions import Sessions
from sglang_lite.server.settings import ServerSettings
from sglang_lite.server.sound_decoder import SoundDecoder

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

P = ParamSpec("P")
T = TypeVar("T")
logger = logging.getLogger("sglang_lite.server")
_BEAT_S = 1.0
_ENCODING_S = 600.0  # longest time to encode texts
_SHORT = 4096  # characters; tokenising a shorter text takes less time than switching threads


class Service:
    """Engine with everything that request handlers share.

    Args:
        engine: engine that runs the requests.
        settings: settings of the server.
        tracer: tracer for spans of requests; None for no spans.

    Attributes:
        async_engine: asynchronous form of the engine, on the event loop that created the service.
        started: Unix time of the start.
        stored: stored responses.
        texts: long schemas that clients name by their hash.
        sessions: open sessions of the native protocol.
        programs: open programs by id; their type is private to programs/program.py.
        reader_pool: processes that read large bodies.
        images: fetcher of images that requests name by address.
        sounds: decoder of sounds to transcribe.
        grpc_port: port of the gRPC service; 0 without one.
        shutting_down: True once the server shuts down: open requests may continue, and no others
            are accepted.
    """

    def __init__(
        self, engine: Engine, settings: ServerSettings, tracer: Tracer | None = None
    ) -> None:
        self.engine = engine
        self.settings = settings
        self._tracer = tracer
        self.async_engine = AsyncEngine(
            engine, self._observe_events, apart=settings.cache_salt_by_key
        )
        self.stored = ResponseStore(
            settings.max_stored_responses, int(settings.max_stored_mb * 2**20)
        )
        self.started = time.time()
        self.programs: dict[str, Any] = {}
        self.texts = KnownTexts()
        self.sessions = Sessions(self.async_engine.abort)
        self.reader_pool = ReaderPool(
            settings.body_processes, partial(ModelFacts.from_engine, engine, settings)
        )
        self.images = ImageFetcher(
            settings, lambda prompt: engine.core.builder.check_images(prompt)
        )
        self.sounds = SoundDecoder()
        self.quotas = Quotas(settings)
        self.grpc_port = 0
        self.shutting_down = False
        self.asleep = False  # whether the engine had released its memory at the last check
        self._last_reply = 0.0  # time of the latest reply from the engine
        self._first_token_at = 0.0  # 0.0 until the engine has generated a token
        self._tasks: set[asyncio.Task[None]] = set()

    def _observe_events(self, events: Sequence[object]) -> None:
        key = key_in_use.get()
        self.quotas.charge_tokens(key, self.metrics.count_events(events, key))
        if self.spans is not None:
            self.spans.record_events(events)

    @property
    def model_name(self) -> str:
        return self.settings.served_model_name or self.engine.model_name

    def check_model(self, name: str | None) -> None:
        """Raises NotFoundError if a request names a model that isn't served."""
        if not self._names_base_model(name):
            adapters = (
                f", with the adapters {', '.join(map(repr, self.adapters))}"
                if self.adapters
                else ""
            )
            raise NotFoundError(
                f"the model {name!r:.200} is not served.",
                hint=f"This server serves {self.model_name!r}{adapters:.500}.",
            )

    def _names_base_model(self, name: str | None) -> bool:
        return name in (None, "", self.model_name, self.engine.model_name, self.engine.config.model)

    @cached_property
    def adapters(self) -> dict[str, str]:
        """Folders of the adapters (LoRA) that requests can name as their model, by name."""
        return {each.name: each.path for each in map(read_lora_path, self.engine.config.lora_paths)}

    @cached_property
    def given_adapters(self) -> dict[str, Callable[[], object]]:
        """Adapters that came in a request: for each name, a function that removes the adapter's
        folder.
        """
        return {}

    def find_requested_adapter(self, model: str | None) -> str | None:
        """Returns the name of the adapter that a request asks for as its model, written as "name"
        or "base:name". Returns None for the model itself.

        Raises:
            NotFoundError: neither a model nor an adapter of that name is served.
        """
        if self._names_base_model(model) or model is None:
            return None
        base, colon, name = model.rpartition(":")
        if name in self.adapters and (not colon or self._names_base_model(base)):
            return name
        self.check_model(model)
        return None

    def resolve_answering_model(self, model: str | None) -> str:
        """Returns the name of the adapter or model that answers a request for `model`. Raises like
        `find_requested_adapter`.
        """
        return self.find_requested_adapter(model) or self.model_name

    def select_requested_adapter(
        self, model: str | None, request: GenerateRequest
    ) -> GenerateRequest:
        """Adds the adapter that `model` names to a request, if it names one. Raises like
        `find_requested_adapter`.
        """
        name = self.find_requested_adapter(model)
        if name is None:
            return request
        return replace(request, params=msgspec.structs.replace(request.params, lora_path=(name,)))

    @cached_property
    def metrics(self) -> RequestMetrics:
        """Metrics of the answered requests."""
        return RequestMetrics(self.model_name, self.settings.metrics_names)

    @cached_property
    def spans(self) -> RequestSpans | None:
        """Spans of requests, or None if no traces are exported."""
        return None if self._tracer is None else RequestSpans(self._tracer, self.model_name)

    @cached_property
    def reader(self) -> RequestReader:
        """Reader of requests in this process."""
        return RequestReader.from_engine(self.engine, self.settings)

    @cached_property
    def speech(self) -> WhisperSpeech | VoxtralSpeech:
        """Speech format of the model, Whisper's or Voxtral's. Raises CapabilityError if the model
        can't transcribe. The first use may read files.
        """
        config = self.engine.config
        return load_speech_format(
            self.reader.media,
            self.reader.tokenizer,
            partial(resolve_for_engine, config.model, config.revision),
        )

    async def count_text_tokens(self, text: str) -> int:
        """Returns the number of tokens of a text."""
        encode = partial(self.engine.tokenizer.encode, text, first=False)
        return len(encode() if len(text) <= _SHORT else await asyncio.to_thread(encode))

    @cached_property
    def tokenizer_path(self) -> str:
        """Folder that has the tokenizer as `tokenizer.json`. If the model's folder lacks this file,
        it is written to the cache.
        """
        config = self.engine.config
        folder = resolve_for_engine(config.model, config.revision)
        if (folder / "tokenizer.json").is_file():
            return str(folder)
        text = self.engine.tokenizer.backend.to_str()
        written = cache_folder() / "tokenizers" / hashlib.sha256(text.encode()).hexdigest()[:16]
        written.mkdir(parents=True, exist_ok=True)
        (written / "tokenizer.json").write_text(text)
        return str(written)

    async def call_engine(self, call: Callable[[], T], *, at_most_s: float | None = None) -> T:
        """Returns the result of a call that waits for the engine's loop. The call runs on a daemon
        thread, because it may never return, and must not keep this process from exiting.

        Args:
            call: function to run.
            at_most_s: longest time of the call in seconds; None for `health_timeout_s`.

        Raises:
            RequestTimeoutError: the call takes longer.
            SglError: the error of the call.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle_future(done: Callable[[Any], None], result: object) -> None:
            if not future.done():
                done(result)

        def make() -> None:
            try:
                done = future.set_result
                result = call()
            except BaseException as error:
                done, result = future.set_exception, error  # type: ignore[assignment] # a matching pair
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(settle_future, done, result)

        threading.Thread(target=make, name="sglang_lite-ask", daemon=True).start()
        seconds = self.settings.health_timeout_s if at_most_s is None else at_most_s
        try:
            # `wait_for` can lose a cancellation that coincides with the result
            async with asyncio.timeout(seconds):
                return await future
        except TimeoutError:
            raise RequestTimeoutError(
                f"the engine has not responded for {seconds:g} seconds."
            ) from None

    async def encode(
        self, compute: Callable[Concatenate[Engine, P], T], *given: P.args, **options: P.kwargs
    ) -> T:
        """Calls a function of engine/embedding.py with the engine, and returns its result. Raises
        like `call_engine`.
        """
        return await self.call_engine(
            partial(compute, self.engine, *given, **options), at_most_s=_ENCODING_S
        )

    # --------------------------------------------------------------------------------------- health

    async def start(self) -> None:
        """Begins to watch the engine, and generates a first token."""
        # without a reply from the engine, the timeout counts from now
        self._last_reply = time.monotonic()
        for work in (self._watch_engine_health(), self._warm_up()):
            task = asyncio.ensure_future(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Ends the tasks that `start` began, the processes that read bodies, and the threads of
        images and sounds.
        """
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.reader_pool.close()
        self.images.close()
        self.sounds.close()

    async def _watch_engine_health(self) -> None:
        while True:
            try:
                self.asleep = bool((await self.call_engine(self.engine.stats)).get("asleep"))
                self._last_reply = time.monotonic()
            except SglError:
                self._last_reply = 0.0
            await asyncio.sleep(_BEAT_S)

    async def _warm_up(self) -> None:
        with contextlib.suppress(SglError):
            media = self.reader.media
            if not self.engine.core.generates or (media is not None and media.begins):
                await self.call_engine(self.engine.core.gate.check_open)
                self._first_token_at = time.monotonic()
                return
            await self.async_engine.results(
                GenerateRequest([0], SamplingParams(max_tokens=1, ignore_eos=True))
            )
            self._first_token_at = time.monotonic()

    def check_health(self) -> None:
        """Raises EngineClosedError if the engine has died, or its loop doesn't respond."""
        self.engine.core.gate.check_open()
        silent = time.monotonic() - self._last_reply
        if silent > self.settings.health_timeout_s or not self.engine.core.responds:
            raise EngineClosedError("the engine does not respond.")

    def check_not_shutting_down(self) -> None:
        """Raises EngineClosedError if the server accepts no more requests because it is shutting
        down.
        """
        if self.shutting_down:
            raise EngineClosedError(
                "the server is shutting down.", hint="Try again later, or on another server."
            )

    def count_request(self, key: str) -> None:
        """Counts a request against the quotas of its key.

        Raises:
            EngineClosedError: the server is shutting down.
            RateLimitError: a quota of its key is used up.
        """
        self.check_not_shutting_down()
        try:
            self.quotas.charge_request(key)
        except RateLimitError:
            self.metrics.count_quota_refusal(key)
            raise

    def check_ready(self) -> None:
        """Raises EngineClosedError unless the server is ready: it isn't shutting down, and its
        engine is healthy and has generated a token.
        """
        self.check_not_shutting_down()
        self.check_health()
        if not self._first_token_at:
            raise EngineClosedError(
                "the engine has generated no token yet.", hint="It is starting. Try again later."
            )
