"""Backend for a server of this package or of SGLang."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from sglang_lite.lang.argument_names import explains_wrong_arguments
from sglang_lite.lang.backend.base import ALL_CONSTRAINTS, Backend, ProgramAtBackend, asked_adapter
from sglang_lite.lang.backend.capabilities import Capabilities
from sglang_lite.lang.backend.http.client import RETRYABLE_ERRORS, Retries, ServerClient
from sglang_lite.lang.backend.http.native_protocol import (
    FOREIGN_PARAMS,
    NATIVE,
    SampleStream,
    parse_choice_score,
    parse_generation,
    parse_prompt_logprobs,
    request_body,
    usage_from_meta,
)
from sglang_lite.lang.backend.http.program import RemoteProgram, play_single_node
from sglang_lite.lang.backend.rendering import with_tools
from sglang_lite.lang.backend.token_counts import TokenUsage
from sglang_lite.lang.chat_template import get_chat_template, get_chat_template_by_model_path
from sglang_lite.lang.concurrency.loop import current_deadline, executor
from sglang_lite.lang.results import missing_data_warnings, with_warnings
from sglang_lite.program.nodes import Gen, Node, Select
from sglang_lite.protocol import (
    UNSET,
    BackendError,
    Constraint,
    Delta,
    Generation,
    ProgramSink,
    Prompt,
    SamplingParams,
    Selection,
    SglError,
    TemplateError,
    Usage,
)
from sglang_lite.protocol.anything import Json
from sglang_lite.text.chat_template import JinjaTemplate, TurnTemplate
from sglang_lite.text.tool_formats import detect_tool_family

_SCORED = {"max_new_tokens": 0, "temperature": 0}
_CHECK = "Check what listens at base_url."


class RuntimeEndpoint(Backend):
    """Backend for a server that speaks SGLang's native protocol. If the server is this package's
    own, it receives whole programs, and a stream that breaks off continues where it stopped.

    Args:
        base_url: address of the server.
        api_key: key that is sent with each request, if given.
        verify: TLS verification: False for none, or the path of a file of certificate authorities.
        chat_template_name: name of a registered template; None for the model's own, or the one that
            its name suggests.
        timeout: longest wait for the next bytes of an answer, in seconds; None for no limit.
        retries: attempts after the first if a connection is lost, with growing pauses; the count
            restarts whenever data arrives.

    Attributes:
        model_info: the server's description of the model.
        token_usage: tokens used so far, except in batches that the server runs, as
            `prompt_tokens` and `completion_tokens`; `reset()` sets them to 0.

    Raises:
        BackendError: the server can't be reached or rejects the request.
        ParameterError: the address is not valid.
        TemplateError: no template has this name.
    """

    template_cure = 'name one: sgl.RuntimeEndpoint(url, chat_template_name="chatml").'

    @explains_wrong_arguments
    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        verify: bool | str | None = None,
        chat_template_name: str | None = None,
        *,
        timeout: float | None = None,
        retries: int = 8,
    ) -> None:
        super().__init__()
        self.base_url = base_url
        self._server = ServerClient(base_url, api_key, verify, timeout, retries)
        self.model_info = _parse_server_description(
            self._server.request_blocking("GET", "/get_model_info").content
        )
        self.token_usage = TokenUsage()
        info = self._server_info()
        ours = info.get("sglang_lite", self.model_info.get("sglang_lite"))
        self._own_info: Mapping[str, Any] = ours if isinstance(ours, dict) else {}
        self._server.names_texts = bool(self._own_info.get("named_texts"))
        # A gateway that itself answers /server_info (sglang-router) forwards only fields that it
        # knows, except in /v1/completions: there nodes are sent as programs.
        self._behind_gateway = bool(self._own_info) and "sglang_lite" not in info
        self._incremental = bool({**self._own_info, **info}.get("incremental_streaming_output"))
        self._programs = (
            bool(self._own_info.get("program"))
            and self._server.request_status("GET", "/program") == 405
        )
        self.enforces = bool(self._own_info)
        self.capabilities = Capabilities(
            ALL_CONSTRAINTS
            if self._own_info.get("records") or self._behind_gateway
            else NATIVE.constraints,
            params=None if self._own_info else FOREIGN_PARAMS,
            images=bool(self.model_info.get("has_image_understanding")),
            videos=bool(self._own_info and self.model_info.get("has_video_understanding")),
            sounds=bool(self._own_info and self.model_info.get("has_audio_understanding")),
            priority=bool(self._own_info.get("program_priority")),
            adapters=bool(self._own_info.get("program")) or self._behind_gateway,
            sizes_answers=bool(self._own_info),
            winds_down_programs=bool(self._own_info.get("program_wind_down")),
        )
        self.plays_programs = self.plays_programs and self._programs
        if chat_template_name is not None:
            self.chat_template = get_chat_template(chat_template_name)

    @property
    def endpoint(self) -> RuntimeEndpoint:
        """The backend itself. SGLang's `Runtime` has an attribute of this name, which some code
        reads.
        """
        return self

    def _server_info(self) -> dict[str, Any]:
        """Returns the settings and counts of the server, or {} if it reports none."""
        # older servers, and gateways, have only the second
        for path in ("/server_info", "/get_server_info"):
            with contextlib.suppress(SglError):
                return _parse_server_description(self._server.request_blocking("GET", path).content)
        return {}

    # ---------------------------------------------------------------------------------- generations

    async def agenerate(
        self, prompt: Prompt, params: SamplingParams, constraint: Constraint | None, *, stream: bool
    ) -> AsyncGenerator[Delta | Generation, None]:
        if prompt.tools is not None:
            own = self._own_info
            control = own.get("control_texts") or [*(own.get("special_tokens") or {}).values()]
            prompt = with_tools(prompt, self.get_chat_template(), control)
        deadline = current_deadline.get()
        timeout = None if deadline is None else deadline - time.monotonic()
        if self._behind_gateway:
            node = Gen(None, params, constraint, timeout=timeout)
            async with contextlib.aclosing(
                self._play_single_node(prompt, node, stream=stream)
            ) as events:
                async for event in events:
                    assert not isinstance(event, Selection)
                    if isinstance(event, Generation):
                        self.token_usage.add_usage(event.usage)
                    yield event
            return
        body = request_body(prompt, params, constraint, records=bool(self._own_info.get("records")))
        if self._own_info:
            body["sampling_params"].setdefault("sampling_seed", secrets.randbits(63))
        if timeout is not None and self._own_info.get("timeout"):
            body["timeout"] = timeout
        count = params.samples
        if stream:
            async with contextlib.aclosing(
                self._stream_generation(body, count, constraint)
            ) as events:
                async for event in events:
                    yield (
                        self._warn_of_missing_data(event, params)
                        if isinstance(event, Generation)
                        else event
                    )
            return
        answer = await self._server.post("/generate", body)
        answers = answer if isinstance(answer, list) else [answer]
        if len(answers) != count:
            raise BackendError(
                f"{self.base_url} returned {len(answers)} answers for {count} samples.", hint=_CHECK
            )
        for index, each in enumerate(answers):
            generation = parse_generation(each, constraint, index)
            self.token_usage.add_usage(generation.usage)
            yield self._warn_of_missing_data(generation, params)

    def _warn_of_missing_data(self, answer: Generation, params: SamplingParams) -> Generation:
        """Adds a warning to an answer if the server left out requested data."""
        missing = [] if self._own_info else missing_data_warnings(answer, params, answer.usage)
        return (
            msgspec.structs.replace(answer, meta=with_warnings(answer.meta, *missing))
            if missing
            else answer
        )

    async def _stream_generation(
        self, body: Mapping[str, Any], count: int, constraint: Constraint | None
    ) -> AsyncGenerator[Delta | Generation, None]:
        """Yields the events of a generation. If a connection breaks, continues over another one."""
        samples = [
            SampleStream(index, constraint, incremental=self._incremental) for index in range(count)
        ]
        retries = Retries(self._server)
        continued_ids = list[int]()
        while True:
            request = {
                **body,
                "stream": True,
                **({"output_ids": continued_ids} if continued_ids else {}),
            }
            try:
                async with contextlib.aclosing(
                    self._server.stream_json("/generate", request)
                ) as answers:
                    async for answer in answers:
                        index = answer.get("index", 0)
                        if not isinstance(index, int) or not 0 <= index < count:
                            problem = f"returned an answer with the index {index!r:.60} for {count} samples."
                            raise BackendError(f"{self.base_url} {problem}", hint=_CHECK)
                        if samples[index].ended:
                            continue
                        for event in samples[index].feed(answer):
                            retries.reset_retry_count()
                            if isinstance(event, Generation):
                                self.token_usage.add_usage(event.usage)
                            yield event
                if all(sample.ended for sample in samples):
                    return
                problem = "the stream ended before the answer was complete."
                raise BackendError(f"{self.base_url}: {problem}", hint=_CHECK)
            except RETRYABLE_ERRORS as error:
                if all(sample.ended for sample in samples):  # only its last line is missing
                    return
                if not self._own_info.get("output_ids") and any(sample.ids for sample in samples):
                    raise
                await retries.pause_before_retry(error)
            # One sample is continued. Several can't be, so they are generated again with the same
            # result.
            continues = count == 1
            continued_ids = [
                i for sample in samples for i in sample.prepare_for_reconnect(continues=continues)
            ]

    def _play_single_node(
        self, prompt: Prompt, node: Node, *, stream: bool = False
    ) -> AsyncGenerator[Delta | Generation | Selection, None]:
        """Runs a single node as a program on the server, and yields its events."""
        model = None if self._programs else self.get_model_name()
        return play_single_node(self._server, prompt, node, stream=stream, model=model)

    # ----------------------------------------------------------------------------------- selections

    async def aselect(
        self, prompt: Prompt, choices: Sequence[str], *, unconditional: bool
    ) -> Selection:
        if self._own_info.get("program") or self._behind_gateway:
            special = prompt.role is None  # in a turn, the choices are content
            adapter = asked_adapter.get()
            lora_path = UNSET if adapter is None else (adapter,)
            node = Select(
                None,
                tuple(choices),
                None,
                unconditional=unconditional,
                special=special,
                lora_path=lora_path,
            )
            async with contextlib.aclosing(self._play_single_node(prompt, node)) as events:
                async for event in events:
                    assert isinstance(event, Selection)
                    self.token_usage.add_usage(event.usage)
                    return event
            raise BackendError(f"{self.base_url} returned no scores.", hint=_CHECK)
        text = prompt.text
        prefilled = await self._server.post(
            "/generate", {"text": text, "sampling_params": {"max_new_tokens": 0}}
        )
        prompt_tokens = usage_from_meta(prefilled["meta_info"]).prompt_tokens
        start = max(prompt_tokens - 2, 0)
        request = {
            "text": [text + choice for choice in choices],
            "sampling_params": _SCORED,
            "return_logprob": True,
            "return_text_in_logprobs": True,
            "logprob_start_len": start,
        }
        answers = await self._server.post("/generate", request)
        # an empty choice has no token, so the prompt's last one is scored
        before = 0 if all(choices) else 1
        scores = [
            parse_choice_score(choice, each, start, prompt_tokens, before)
            for choice, each in zip(choices, answers)
        ]
        if unconditional:
            alone = {
                "input_ids": [list(score.token_ids) for score in scores],
                "sampling_params": _SCORED,
                "return_logprob": True,
                "logprob_start_len": 0,
            }
            found = await self._server.post("/generate", alone)
            scores = [
                msgspec.structs.replace(s, unconditional=parse_prompt_logprobs(f))
                for s, f in zip(scores, found)
            ]
        usages = [usage_from_meta(each["meta_info"]) for each in answers]
        usage = Usage(
            prompt_tokens=sum(each.prompt_tokens for each in usages),
            cached_tokens=sum(each.cached_tokens for each in usages),
            total_s=max((each.total_s for each in usages), default=0.0),
        )
        self.token_usage.add_usage(usage)
        return Selection(tuple(scores), usage)

    # ------------------------------------------------------------------------------------- programs

    def open_program(
        self, sink: ProgramSink, *, stream: bool, priority: int = 0
    ) -> ProgramAtBackend:
        sink = partial(self.token_usage.count_and_forward, sink)
        return RemoteProgram(self._server, sink, stream=stream, priority=priority)

    # ----------------------------------------------------------------------------------- the server

    @property
    def tokenizer_digest(self) -> str | None:
        return self._own_info.get("tokenizer_digest")

    def get_model_name(self) -> str:
        return str(self.model_info.get("model_path", "?"))

    def identity(self) -> tuple[Json, ...]:
        return *super().identity(), self.base_url

    def get_chat_template(self) -> TurnTemplate | None:
        if self.chat_template is None:
            source = self._own_info.get("chat_template")
            if isinstance(source, str):
                self.chat_template = JinjaTemplate(source, self._own_info.get("special_tokens"))
            else:
                with contextlib.suppress(TemplateError):
                    self.chat_template = get_chat_template_by_model_path(self.get_model_name())
        return self.chat_template

    def tool_family(self) -> str | None:
        template = self.get_chat_template()
        return detect_tool_family(template.source) if isinstance(template, JinjaTemplate) else None

    def flush_cache(self) -> bool:
        self._server.request_blocking("POST", "/flush_cache")
        return True

    def get_server_info(self) -> dict[str, Json]:
        return self._server_info()

    def cache_prefix(self, prefix_str: str) -> None:
        self._server.request_blocking(
            "POST", "/generate", {"text": prefix_str, "sampling_params": {"max_new_tokens": 0}}
        )

    def start_profile(self) -> None:
        """Makes the server start recording a profile."""
        self._server.request_blocking("POST", "/start_profile")

    def stop_profile(self) -> None:
        """Makes the server write the profile."""
        self._server.request_blocking("POST", "/stop_profile")

    def shutdown(self) -> None:
        """Closes the connections; the next call opens new ones."""
        asyncio.run_coroutine_threadsafe(self.aclose(), executor().loop).result()

    async def aclose(self) -> None:
        """Closes the connections of the running event loop. The connections that programs use
        belong to the executor loop.
        """
        await self._server.close()


def _parse_server_description(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise BackendError(
            f"{data[:80]!r} is not the description of a server.",
            hint="Check what listens at base_url.",
        )
    return found
