"""SGLang's native protocol: `/generate`, and requests about the server itself."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import tempfile
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Literal

import msgspec
from starlette.responses import Response

from sglang_lite.protocol import (
    Constraint,
    JsonSchema,
    ParameterError,
    Prompt,
    RequestTimeoutError,
    SamplingParams,
)
from sglang_lite.runtime.calls import EndSession, RecordExperts
from sglang_lite.runtime.core.submission import GenerateRequest
from sglang_lite.server.async_engine import wait_for_first_event
from sglang_lite.server.endpoint import (
    Handler,
    HttpRequest,
    Route,
    drop_ignored_priorities,
    json_response,
    read_body,
    read_record,
)
from sglang_lite.server.fields import (
    LOGGING_REFUSED,
    NATIVE_NEUTRAL,
    NATIVE_REFUSED,
    OPEN_SESSION_REFUSED,
    PROFILE_REFUSED,
    Fields,
)
from sglang_lite.server.http.body import convert
from sglang_lite.server.http.sse import DONE, EventStream, encode_event
from sglang_lite.server.reader import RequestReader
from sglang_lite.server.service import Service
from sglang_lite.server.sessions import (
    CloseSession,
    OpenSession,
    SessionParams,
    read_session_tokens,
    record_output,
)
from sglang_lite.server.sglang.request import (
    NativeRequest,
    read_request,
    unused_kv_hints,
    unused_logprob_fields,
)
from sglang_lite.text.reasoning import ReasoningParser
from sglang_lite.text.tool_calls import parse_answer
from sglang_lite.version import __version__


class GenerateBody(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Native request for one prompt or a list of them; `Engine.generate` documents the fields.

    `prompt` and `constraint` are a Prompt and a Constraint of `sglang_lite.protocol`, encoded by
    `sglang_lite.wire` without an envelope. They take the place of text, and of a grammar in
    `sampling_params`. The answer to a request with `prompt` has the `generation`, too, in the same
    encoding. `timeout` is the time in seconds after which the client gives up. An unfinished JSON
    answer is cut before then, if brackets can close it.
    """

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    token_ids_logprob: list[int | list[int]] | None = None
    return_text_in_logprobs: bool | None = None
    return_confidence: bool | None = None
    return_prompt_token_ids: bool | None = None
    return_routed_experts: bool | None = None
    return_hidden_states: bool | None = None
    lora_path: str | list[str | None] | None = None
    rid: str | list[str] | None = None
    priority: int | list[int] | None = None
    image_data: Any = None  # texts, in lists of up to two levels; so are the next two
    video_data: Any = None
    audio_data: Any = None
    modalities: list[str | list[str]] | None = None
    kv_hints: dict[str, Any] | list[dict[str, Any] | None] | None = None
    cache_salt: str | list[str] | None = None
    output_ids: list[int | list[int] | None] | None = None
    prompt: dict[str, Any] | None = None
    constraint: dict[str, Any] | None = None
    timeout: float | None = None
    stream: bool | None = None
    session_params: SessionParams | None = None
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Request to tokenise text."""

    prompt: str | list[str] | None = None
    text: str | list[str] | None = None
    add_special_tokens: bool = True
    model: str | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Request to decode token ids."""

    tokens: list[int | list[int]] | None = None
    ids: list[int | list[int]] | None = None
    skip_special_tokens: bool = True
    model: str | None = None


class AbortRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Request to abort one request, or all."""

    rid: str | None = None
    abort_all: bool = False


class SeparateReasoningRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Request to split reasoning from a text."""

    text: str
    reasoning_parser: str


class ParseFunctionCallRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Request to find tool calls in a text."""

    text: str
    tools: list[dict[str, Any]]
    tool_call_parser: str


class ConfigureLoggingRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Request to change the lowest level of logged messages. Without a level, it stays."""

    log_level: Literal["debug", "info", "warning", "error"] | None = None
    log_requests: bool | None = None


class ProfileRequest(msgspec.Struct, kw_only=True):
    """Settings of a profile: folder of its trace, and its contents."""

    output_dir: str | None = None
    with_stack: bool | None = None
    record_shapes: bool | None = None


LONGEST_S = 3600.0  # longest time for loading weights, or writing a profile
_CONSTRAINT: Any = Constraint  # a union is not a type
GENERATE = Fields(GenerateBody, NATIVE_NEUTRAL, NATIVE_REFUSED)
CONFIGURE_LOGGING = Fields(ConfigureLoggingRequest, {}, LOGGING_REFUSED)
PROFILE = Fields(ProfileRequest, {}, PROFILE_REFUSED)
TOKENIZE = Fields(TokenizeRequest, {}, {})
DETOKENIZE = Fields(DetokenizeRequest, {}, {})
ABORT = Fields(AbortRequest, {}, {})
SEPARATE_REASONING = Fields(SeparateReasoningRequest, {}, {})
PARSE_FUNCTION_CALL = Fields(ParseFunctionCallRequest, {}, {})
OPEN_SESSION = Fields(OpenSession, {}, OPEN_SESSION_REFUSED)
CLOSE_SESSION = Fields(CloseSession, {}, {})


async def generate(service: Service, call: HttpRequest) -> Response:
    """Generates text for one prompt or several."""
    request = await read_body(service, call, _read_generate)
    calls = await service.images.fetch_requests(
        drop_ignored_priorities(service, call, request.calls)
    )
    request = replace(request, calls=calls)
    if request.session is None:
        answers = service.async_engine.generate_native(request)
    else:
        answers = await _answer_in_session(service, call, request, request.session)
    if request.stream:
        answers = await wait_for_first_event(answers)
        write = partial(
            _stream_native_answers, incremental=service.settings.incremental_streaming_output
        )
        return EventStream(answers, write, "native")
    async with contextlib.aclosing(answers):
        result = await anext(answers)
    return json_response(result if request.is_list else result[0])


async def _answer_in_session(
    service: Service, call: HttpRequest, request: NativeRequest, given: SessionParams
) -> AsyncGenerator[list[dict[str, Any]], None]:
    """Starts a request of a session, and returns its answers. The prompt may continue an earlier
    request.
    """
    session = service.sessions.find_session(call.key, given.id)
    only = request.calls[0]
    engine = service.engine
    assert only.rid is not None  # `read_request` names each
    tokens = await asyncio.to_thread(
        read_session_tokens, engine.core.builder, only, in_list=request.is_list
    )
    prompt = session.begin_request(only.rid, tokens, given, engine.tokenizer.bos_id)
    whole = replace(request, calls=[replace(only, prompt=prompt, session=session.own_name)])
    return record_output(session, only.rid, service.async_engine.generate_native(whole))


def _read_generate(reader: RequestReader, call: HttpRequest) -> NativeRequest:
    try:
        body = call.read_fields(GENERATE)
    except ParameterError as error:
        if error.parameter == "prompt":
            error.hint = error.hint or "Text is `text` here, and token ids are `input_ids`."
        raise
    fields = {
        name: value for name, value in msgspec.structs.asdict(body).items() if value is not None
    }
    prompt, constraint, timeout = (
        fields.pop(name, None) for name in ("prompt", "constraint", "timeout")
    )
    session = fields.pop("session_params", None)
    if prompt is not None and ("text" in fields or "input_ids" in fields):
        raise ParameterError(
            "prompt", "is given together with text or input_ids. Give one of them."
        )
    request = read_request(fields.pop("text", None if prompt is None else ""), **fields)
    call.unused.extend([*unused_logprob_fields(fields), *unused_kv_hints(fields.get("kv_hints"))])
    calls = [replace(each, timeout=timeout) for each in request.calls]
    if prompt is not None:
        calls = [replace(calls[0], prompt=convert(prompt, Prompt, "prompt"))]
    if constraint is not None:
        if any(each.constraint is not None for each in calls):
            raise ParameterError(
                "constraint", "and a grammar in sampling_params are both given. Give one of them."
            )
        held = convert(constraint, _CONSTRAINT, "constraint")
        calls = [replace(each, constraint=held) for each in calls]
    calls = [replace(each, prompt=reader.prepare_prompt(each.prompt)) for each in calls]
    return replace(request, calls=calls, session=session)


async def _stream_native_answers(
    answers: AsyncGenerator[list[dict[str, Any]], None], *, incremental: bool
) -> AsyncGenerator[bytes]:
    sent: dict[int, dict[str, int]] = {}
    async for changed in answers:
        if incremental:
            changed = [
                _take_unsent_part(each, sent.setdefault(each.get("index", 0), {}))
                for each in changed
            ]
        yield b"".join(map(encode_event, changed))
    yield DONE


_CUMULATIVE = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")


def _take_unsent_part(found: dict[str, Any], sent: dict[str, int]) -> dict[str, Any]:
    """Returns the part of an answer that has not been sent yet. `sent` maps fields to the lengths
    sent so far, and is updated.
    """

    def rest(name: str, whole: Any) -> Any:
        start = sent.get(name, 0)
        sent[name] = len(whole)
        return whole[start:]

    meta = dict(found["meta_info"])
    meta.update({name: rest(name, meta[name]) for name in _CUMULATIVE if name in meta})
    return {
        **found,
        "text": rest("text", found["text"]),
        "output_ids": rest("output_ids", found["output_ids"]),
        "meta_info": meta,
    }


# -------------------------------------------------------------------------------- the server itself


async def health(service: Service, _: HttpRequest) -> Response:
    """Returns status 200 if the engine is healthy, with the text "asleep" if it sleeps."""
    service.check_health()
    return Response("asleep" if service.asleep else None)


async def ready(service: Service, _: HttpRequest) -> Response:
    """Returns status 200 if the engine has generated its first token."""
    service.check_ready()
    return Response(status_code=200)


async def health_generate(service: Service, call: HttpRequest) -> Response:
    """Generates a token, if the model generates text and is awake; otherwise only checks the
    engine's health.
    """
    if not service.engine.core.generates or service.asleep:
        return await health(service, call)
    seconds = service.settings.health_timeout_s
    try:
        async with asyncio.timeout(seconds):
            await service.async_engine.results(
                GenerateRequest([0], SamplingParams(max_tokens=1, ignore_eos=True))
            )
    except TimeoutError:
        raise RequestTimeoutError(
            f"the engine generated no token within {seconds:g} seconds."
        ) from None
    return Response(status_code=200)


async def ping(service: Service, _: HttpRequest) -> Response:
    """Returns status 200."""
    return Response(status_code=200)


async def version(service: Service, _: HttpRequest) -> Response:
    """Returns the version of this package."""
    return json_response({"version": __version__, "server": "sglang_lite"})


async def model_info(service: Service, _: HttpRequest) -> Response:
    """Describes the model."""
    engine = service.engine
    return json_response(
        {
            **engine.get_model_info(),
            "served_model_name": service.model_name,
            "tokenizer_path": service.tokenizer_path,
            "preferred_sampling_params": None,
            "reasoning_parser": service.settings.reasoning_parser,
            "tool_call_parser": service.settings.tool_call_parser,
            "has_image_understanding": engine.reads_images,
            "has_video_understanding": "video" in engine.media_kinds,
            "has_audio_understanding": "audio" in engine.media_kinds,
            "max_model_len": engine.context_length,
            # gateways forward this whole answer, but not that of `/server_info`
            "sglang_lite": _server_info_fields(service),
        }
    )


def _server_info_fields(service: Service) -> dict[str, Any]:
    engine = service.engine
    template = engine.chat_template()
    return {
        "version": __version__,
        "chat_template": None if template is None else template.source,
        "special_tokens": engine.tokenizer.special_tokens,
        "control_texts": engine.tokenizer.control_texts,
        "tokenizer_digest": engine.tokenizer.digest,
        "incremental_streaming_output": service.settings.incremental_streaming_output,
    }


async def server_info(service: Service, _: HttpRequest) -> Response:
    """Returns the settings and counts."""
    engine = service.engine
    settings = asdict(service.settings)
    for secret in ("api_key", "admin_api_key"):
        del settings[secret]
    info = await service.call_engine(engine.get_server_info)
    return json_response({
        **info,
        **settings,
        "served_model_name": service.model_name,
        "sglang_lite": {
            **_server_info_fields(service),
            "program": True, "program_priority": True, "output_ids": True, "records": True,
            "timeout": True, "named_texts": True, "program_wind_down": True,
        },
    })  # fmt: skip


async def internal_state(service: Service, _: HttpRequest) -> Response:
    """Returns the counts of each replica of the engine."""
    return json_response({"internal_states": await collect_replica_stats(service)})


async def flush_cache(service: Service, _: HttpRequest) -> Response:
    """Drops cached prefixes that are not in use."""
    freed = await service.call_engine(service.engine.flush_cache)
    return Response(f"Cache flushed: {freed} tokens.\n", media_type="text/plain")


async def freeze_gc(service: Service, _: HttpRequest) -> Response:
    """Exempts the objects of the server and the engine from garbage collection."""
    await service.call_engine(service.engine.freeze_gc)
    return Response("Garbage collection frozen.\n", media_type="text/plain")


async def abort_request(service: Service, call: HttpRequest) -> Response:
    """Aborts one request or all requests. With an API key, this affects only the requests of that
    key; with the administrator's key, or if none is required, it affects those of all keys.
    """
    body = await read_record(service, call, ABORT)
    key = None if call.key in ("", service.settings.admin_api_key) else call.key
    if body.abort_all:
        if body.rid is not None:
            raise ParameterError("abort_all", "and rid are both given. Give one of them.")
        service.async_engine.abort_all(key)
    elif body.rid:
        service.async_engine.abort(body.rid, key)
    else:
        raise ParameterError("rid", "is missing.")
    return Response(status_code=200)


async def loads(service: Service, _: HttpRequest) -> Response:
    """Returns the load of each replica of the engine. Sections in `include` that this engine lacks
    are left out.
    """
    found = [
        {
            "dp_rank": stats["dp_rank"],
            "num_running_reqs": stats["running"],
            "num_waiting_reqs": stats["waiting"],
            "num_total_reqs": stats["running"] + stats["waiting"],
            "num_used_tokens": stats["total_tokens"] - stats["free_tokens"],
            "max_running_requests": service.engine.core.capacity.sizes.max_running,
        }
        for stats in await collect_replica_stats(service)
    ]
    return json_response(
        {"version": __version__, "dp_rank_count": service.engine.config.dp_size, "loads": found}
    )


async def get_load(service: Service, _: HttpRequest) -> Response:
    """Returns the load of each replica in SGLang's older format. Gateways add up the token counts."""
    return json_response(
        [
            {
                "dp_rank": stats["dp_rank"],
                "num_reqs": stats["running"] + stats["waiting"],
                "num_waiting_reqs": stats["waiting"],
                # Only tokens of requests.
                "num_tokens": stats["total_tokens"] - stats["free_tokens"] - stats["cached_tokens"],
            }
            for stats in await collect_replica_stats(service)
        ]
    )


async def collect_replica_stats(service: Service) -> list[dict[str, Any]]:  # as of `Engine.stats`
    """Returns the counts of each replica of the engine, with its number."""
    stats = await service.call_engine(service.engine.stats)
    each: list[dict[str, Any]] = stats.get("replicas", [{"dp_rank": 0, **stats}])
    return each


def tokenize(reader: RequestReader, call: HttpRequest) -> tuple[str | None, bytes]:
    """Converts texts to token ids."""
    body = call.read_fields(TOKENIZE)
    text = _require_one_of_two_names(body.prompt, body.text, "prompt")
    texts = [text] if isinstance(text, str) else text
    ids = [reader.tokenizer.encode(each, first=body.add_special_tokens) for each in texts]
    counts = [len(each) for each in ids]
    return body.model, msgspec.json.encode(
        {
            "tokens": ids[0] if isinstance(text, str) else ids,
            "count": counts[0] if isinstance(text, str) else counts,
            "max_model_len": reader.context_length,
        }
    )


def detokenize(reader: RequestReader, call: HttpRequest) -> tuple[str | None, bytes]:
    """Converts token ids to texts."""
    body = call.read_fields(DETOKENIZE)
    tokens = _require_one_of_two_names(body.tokens, body.ids, "tokens")
    nested = bool(tokens) and isinstance(tokens[0], list)
    if any(isinstance(each, list) != nested for each in tokens):
        raise ParameterError(
            "tokens", "mixes token ids and lists of token ids. Give only one kind."
        )
    lists: Iterable[Any] = tokens if nested else [tokens]
    size = reader.vocab_size
    for ids in lists:
        for each in ids:
            if not 0 <= each < size:
                raise ParameterError("tokens", f"{each} is not a token id (0 to {size - 1:,}).")
    texts = [reader.tokenizer.decode(ids, skip_special=body.skip_special_tokens) for ids in lists]
    return body.model, msgspec.json.encode({"text": texts if nested else texts[0]})


def separate_reasoning(_: RequestReader, call: HttpRequest) -> tuple[str | None, bytes]:
    """Splits the text of an answer into its reasoning and the rest."""
    body = call.read_fields(SEPARATE_REASONING)
    reasoning, text = ReasoningParser.split(body.reasoning_parser, body.text)
    return None, msgspec.json.encode({"reasoning_text": reasoning, "text": text})


def parse_function_call(_: RequestReader, call: HttpRequest) -> tuple[str | None, bytes]:
    """Separates the tool calls of an answer from its other text."""
    body = call.read_fields(PARSE_FUNCTION_CALL)
    names = [each.get("function", {}).get("name") for each in body.tools]
    any_arguments = {name: JsonSchema("{}") for name in names if isinstance(name, str) and name}
    found = parse_answer(body.tool_call_parser, body.text, tools=any_arguments)
    calls = [
        {
            "tool_index": names.index(each.name) if each.name in names else -1,
            "name": each.name,
            "parameters": each.arguments,
        }
        for each in found.calls
    ]
    return None, msgspec.json.encode({"normal_text": found.content, "calls": calls})


def _reader_handler(
    function: Callable[[RequestReader, HttpRequest], tuple[str | None, bytes]],
) -> Handler:
    """Returns a handler for requests that need no engine. `function` reads the body, and returns
    the model's name, if any, and the answer as JSON.
    """

    async def handle(service: Service, call: HttpRequest) -> Response:
        model, content = await read_body(service, call, function)
        service.check_model(model)
        return Response(content, media_type="application/json")

    return handle


async def configure_logging(service: Service, call: HttpRequest) -> Response:
    """Changes the lowest level of logged messages. Requests are logged at the level "info"."""
    body = await read_record(service, call, CONFIGURE_LOGGING)
    root = logging.getLogger()
    level = root.level if body.log_level is None else logging.getLevelName(body.log_level.upper())
    if body.log_requests is not None and body.log_requests != (level <= logging.INFO):
        raise ParameterError(
            "log_requests",
            f"{body.log_requests} is not possible with the level {logging.getLevelName(level).lower()!r}.",
            hint='Give log_level, too: "info" logs a line for each request, "warning" none.',
        )
    root.setLevel(level)
    return json_response({"log_level": logging.getLevelName(level).lower()})


async def open_session(service: Service, call: HttpRequest) -> Response:
    """Opens a session, in which a request can continue an earlier one."""
    return json_response(
        service.sessions.open(call.key, await read_record(service, call, OPEN_SESSION))
    )


async def close_session(service: Service, call: HttpRequest) -> Response:
    """Closes a session, and aborts its requests."""
    id = (await read_record(service, call, CLOSE_SESSION)).session_id
    session = service.sessions.close(call.key, id)
    await asyncio.wrap_future(service.engine.core.submit_call(EndSession(session.own_name)))
    return Response(status_code=200)


async def start_profile(service: Service, call: HttpRequest) -> Response:
    """Starts a profile of the engine's steps."""
    body = await read_record(service, call, PROFILE) if call.data else ProfileRequest()
    folder = body.output_dir or tempfile.mkdtemp(prefix="sglang_lite-profile-")
    options = {"with_stack": bool(body.with_stack), "record_shapes": bool(body.record_shapes)}
    await service.call_engine(
        partial(service.engine.start_profile, folder, **options), at_most_s=LONGEST_S
    )
    return json_response({"success": True, "output_dir": os.path.abspath(folder)})


async def stop_profile(service: Service, _: HttpRequest) -> Response:
    """Ends the profile, and writes its trace."""
    return json_response(
        {
            "success": True,
            "path": await service.call_engine(service.engine.stop_profile, at_most_s=LONGEST_S),
        }
    )


def _require_one_of_two_names(first: Any, second: Any, name: str) -> Any:
    """Returns the value of a field that may be given under either of two names. Raises
    ParameterError unless exactly one of them is given.
    """
    if (first is None) == (second is None):
        raise ParameterError(
            name, "is missing." if first is None else "is given under two names. Give one of them."
        )
    return second if first is None else first


def _experts_record_handler(action: str) -> Handler:
    """Returns a handler that starts, stops or reads the record of which experts are chosen."""

    async def run(service: Service, _: HttpRequest) -> Response:
        counts = await service.call_engine(partial(service.engine.answer, RecordExperts(action)))
        return json_response({"logical_count": counts} if action == "dump" else {"success": True})

    return run


_GET_OR_POST = ("GET", "POST")
ROUTES = (
    Route("/generate", generate, "Continue text", ("POST", "PUT"), fields=GENERATE, streams=True, counts_as_open=True),
    Route("/health", health, "Is the engine alive?", ("GET",), access="open", media_type=""),
    Route("/health_generate", health_generate, "Can it make a token?", ("GET",), media_type="", acts=True),
    Route("/ready", ready, "Has it made a token?", ("GET",), access="open", media_type=""),
    Route("/ping", ping, "Is the server there?", ("GET",), access="open", media_type=""),
    Route("/version", version, "The version", ("GET",)),
    *(Route(path, model_info, "The model", ("GET",)) for path in ("/model_info", "/get_model_info")),
    *(Route(path, server_info, "Settings and counts", ("GET",)) for path in ("/server_info", "/get_server_info")),
    Route("/internal_state", internal_state, "Counts of each replica", ("GET",)),
    Route("/v1/loads", loads, "How busy it is", ("GET",), query=("include",)),
    Route("/get_load", get_load, "How busy it is, in short", ("GET",)),
    Route(
        "/freeze_gc", freeze_gc, "Exempt objects from garbage collection", _GET_OR_POST, access="admin",
        media_type="text/plain", acts=True,
    ),
    Route(
        "/flush_cache", flush_cache, "Drop cached prefixes", _GET_OR_POST, access="admin", media_type="text/plain",
        acts=True,
    ),
    Route("/abort_request", abort_request, "End a request, or all", fields=ABORT, media_type=""),
    Route(
        "/configure_logging", configure_logging, "Log other messages", _GET_OR_POST, fields=CONFIGURE_LOGGING,
        access="admin", acts=True,
    ),
    Route("/open_session", open_session, "Open a session", _GET_OR_POST, fields=OPEN_SESSION, acts=True),
    Route(
        "/close_session", close_session, "Close a session", _GET_OR_POST, fields=CLOSE_SESSION, media_type="",
        acts=True,
    ),
    Route("/tokenize", _reader_handler(tokenize), "Token ids of text", fields=TOKENIZE),
    Route("/v1/tokenize", _reader_handler(tokenize), "Token ids of text", fields=TOKENIZE),
    Route("/detokenize", _reader_handler(detokenize), "Text of ids", fields=DETOKENIZE),
    Route("/v1/detokenize", _reader_handler(detokenize), "Text of ids", fields=DETOKENIZE),
    Route("/separate_reasoning", _reader_handler(separate_reasoning), "Split reasoning off", fields=SEPARATE_REASONING),
    Route("/parse_function_call", _reader_handler(parse_function_call), "Find calls", fields=PARSE_FUNCTION_CALL),
    Route("/start_profile", start_profile, "Start a profile", _GET_OR_POST, fields=PROFILE, access="owner", acts=True),
    Route("/stop_profile", stop_profile, "End the profile", _GET_OR_POST, access="owner", acts=True),
    *(
        Route(
            f"/{action}_expert_distribution_record", _experts_record_handler(action), "Which experts are chosen",
            _GET_OR_POST, access="admin", acts=True,
        )
        for action in ("start", "stop", "dump")
    ),
)  # fmt: skip
