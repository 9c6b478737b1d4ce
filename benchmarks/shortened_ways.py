"""Ways to ask for a limited answer: in this process, and over each protocol of the server."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias

import httpx2
from shortened_cases import TOOL, Source
from shortened_oracle import Outcome

import sglang_lite as sgl
from sglang_lite.protocol import Delta, Generation, Regex, SamplingParams

Call: TypeAlias = tuple[Source, int]  # with its limit
Answers: TypeAlias = list[list[Outcome]]  # samples of each call
CLIENTS = 48
WAIT_S = 1200.0
BATCH = 8


@dataclass(frozen=True, slots=True)
class Context:
    """Engine, a client of its server, and the name that the server gives the model."""

    engine: sgl.Engine
    http: httpx2.Client
    model: str


Way: TypeAlias = Callable[[Context, Sequence[Call], bool], Answers]


# ---------------------------------------------------------------------------------- in this process


def library(context: Context, calls: Sequence[Call], stream: bool) -> Answers:
    """Rows of the engine. As a stream, a text is that of the deltas."""
    events: list[list[Any]] = [[] for _ in calls]
    left = threading.Semaphore(0)

    def take(i: int, event: object) -> None:
        events[i].append(event)
        if not isinstance(event, Delta):
            # an error ends all samples
            left.release(1 if isinstance(event, Generation) else calls[i][0].samples)

    for i, (source, limit) in enumerate(calls):
        params = SamplingParams(
            max_tokens=limit, seed=source.seed, temperature=source.temperature, n=source.samples
        )  # fmt: skip
        prompt, constraint = f"{source.case.prompt}\n", source.case.constraint
        context.engine.submit(
            prompt, params, constraint, sink=lambda event, i=i: take(i, event), stream=stream
        )
    for _ in range(sum(source.samples for source, _ in calls)):
        assert left.acquire(timeout=WAIT_S), "no event came"
    return [
        [_of_events(found, index) for index in range(call[0].samples)]
        for call, found in zip(calls, events)
    ]


def _of_events(events: Sequence[Any], index: int) -> Outcome:
    last = next((e for e in events if isinstance(e, Generation) and e.index == index), None)
    if last is None:
        error = next(e for e in events if isinstance(e, Exception))
        return Outcome(None, error=f"{type(error).__name__}: {error}")
    deltas = [event.text for event in events if isinstance(event, Delta) and event.index == index]
    told = Outcome(last.text, last.finish_reason, last.meta.get("shortened"))
    if deltas and "".join(deltas) != last.text:
        told.error = f"the deltas are {''.join(deltas)!r}, and the text is {last.text!r}"
    return told


@sgl.function
def answer(s: sgl.ProgramState, source: Source, limit: int, typed: bool) -> None:
    s += f"{source.case.prompt}\n"
    options: dict[str, Any] = (
        {"type": source.case.type} if typed else {"constraint": source.case.constraint}
    )
    s += sgl.gen(
        "value", max_tokens=limit, seed=source.seed, temperature=source.temperature, **options
    )


def batch(context: Context, calls: Sequence[Call], stream: bool, *, typed: bool = False) -> Answers:
    """Programs of one generation, run as a batch."""
    arguments = [{"source": source, "limit": limit, "typed": typed} for source, limit in calls]
    states = answer.run_batch(arguments, backend=context.engine, on_error="return")
    return [[_of_state(call[0], state)] for call, state in zip(calls, states)]


def _of_state(source: Source, state: Any) -> Outcome:
    try:
        if isinstance(state, Exception):
            raise state
        meta = state.get_meta_info("value")
        text = state.text().removeprefix(f"{source.case.prompt}\n")
    except Exception as error:  # what a program fails with is looked at
        return Outcome(None, error=f"{type(error).__name__}: {error}")
    finish = meta.get("finish_reason", "")
    return Outcome(
        text,
        finish.get("type", "") if isinstance(finish, dict) else str(finish),
        meta.get("shortened"),
    )


def typed(context: Context, calls: Sequence[Call], stream: bool) -> Answers:
    return batch(context, calls, stream, typed=True)


# ---------------------------------------------------------------------------------------- over HTTP


def _each(one: Callable[[Context, Source, int, bool], list[Outcome]]) -> Way:
    def every(context: Context, calls: Sequence[Call], stream: bool) -> Answers:
        def ask(call: Call) -> list[Outcome]:
            try:
                return one(context, *call, stream)
            except Exception as error:  # what a request fails with is looked at
                return [Outcome(None, error=f"{type(error).__name__}: {error}")] * call[0].samples

        with ThreadPoolExecutor(CLIENTS) as pool:
            return list(pool.map(ask, calls))

    return every


class RefusedError(Exception):
    """The server has answered with an error."""


def _post(context: Context, path: str, body: dict[str, Any]) -> Any:
    response = context.http.post(path, json=body)
    if response.status_code != 200:
        raise RefusedError(f"{response.status_code}: {response.text[:300]}")
    return response.json()


def _events(context: Context, path: str, body: dict[str, Any]) -> Iterator[Any]:
    """Objects of a stream, of server-sent events or of lines of JSON."""
    with context.http.stream("POST", path, json={**body, "stream": True}) as response:
        if response.status_code != 200:
            raise RefusedError(f"{response.status_code}: {response.read()[:300]!r}")
        for line in response.iter_lines():
            data = line.removeprefix("data:").strip()
            if data.startswith("{"):
                yield json.loads(data)


def _shortened(answer: Any) -> Any:
    """What an answer says under "shortened", wherever it is, or None."""
    if isinstance(answer, dict):
        if "shortened" in answer:
            return answer["shortened"]
        answer = list(answer.values())
    found = map(_shortened, answer) if isinstance(answer, list) else iter(())
    return next((each for each in found if each is not None), None)


def _messages(source: Source) -> list[dict[str, str]]:
    return [{"role": "user", "content": source.case.prompt}]


def _chat_body(source: Source, limit: int) -> dict[str, Any]:
    return {
        "model": "", "messages": _messages(source), "max_tokens": limit, "seed": source.seed,
        "temperature": source.temperature, "n": source.samples,
    }  # fmt: skip


def _chat(context: Context, source: Source, limit: int, stream: bool) -> list[Outcome]:
    schema = {"name": "value", "schema": source.case.schema, "strict": True}
    body = _chat_body(source, limit) | {
        "response_format": {"type": "json_schema", "json_schema": schema}
    }
    return _ask_chat(context, body, stream)


def _tools(context: Context, source: Source, limit: int, stream: bool) -> list[Outcome]:
    tool = {
        "name": TOOL,
        "description": f"Saves {source.case.wish}.",
        "parameters": source.case.schema,
    }
    choice = {"type": "function", "function": {"name": TOOL}}
    body = _chat_body(source, limit) | {
        "tools": [{"type": "function", "function": tool}],
        "tool_choice": choice,
    }
    return _ask_chat(context, body, stream)


def _ask_chat(context: Context, body: dict[str, Any], stream: bool) -> list[Outcome]:
    path, found = "/v1/chat/completions", [Outcome("") for _ in range(body["n"])]
    parts = _events(context, path, body) if stream else [_post(context, path, body)]
    for part in parts:
        if "error" in part:
            raise RefusedError(str(part["error"]))
        for choice in part.get("choices", ()):
            told, message = (
                found[choice["index"]],
                choice.get("delta") or choice.get("message") or {},
            )
            told.text = (told.text or "") + (message.get("content") or "")
            for call in message.get("tool_calls") or ():
                index = call.get("index") or 0
                told.calls += [""] * (index + 1 - len(told.calls))
                told.calls[index] += call["function"].get("arguments") or ""
            told.finish = choice.get("finish_reason") or told.finish
            said = _shortened(choice)
            told.shortened = told.shortened if said is None else said
        if part.get("choices") and len(found) == 1 and found[0].shortened is None:
            found[0].shortened = _shortened(part)
    return found


def _responses(context: Context, source: Source, limit: int, stream: bool) -> list[Outcome]:
    format = {"type": "json_schema", "name": "value", "schema": source.case.schema, "strict": True}
    body = {"model": "", "input": source.case.prompt, "text": {"format": format}, "max_output_tokens": limit,
            "temperature": source.temperature, "seed": source.seed, "store": False}  # fmt: skip
    streamed = ""
    if stream:
        answer: Any = {}
        for event in _events(context, "/v1/responses", body):
            streamed += event["delta"] if event["type"] == "response.output_text.delta" else ""
            answer = event.get("response", answer)
    else:
        answer = _post(context, "/v1/responses", body)
    if answer.get("status") not in ("completed", "incomplete"):
        raise RefusedError(str(answer.get("error")))
    parts = [part for item in answer["output"] for part in item.get("content") or ()]
    text = "".join(part["text"] for part in parts if part["type"] == "output_text")
    why = (answer.get("incomplete_details") or {}).get("reason")
    finish = {None: "stop", "max_output_tokens": "length"}.get(why, str(why))
    if stream and streamed != text:
        return [Outcome(text, error=f"the deltas are {streamed!r}, and the text is {text!r}")]
    return [Outcome(text, finish, _shortened(answer))]


_STOPS = {"end_turn": "stop", "max_tokens": "length"}


def _anthropic(context: Context, source: Source, limit: int, stream: bool) -> list[Outcome]:
    """The protocol has no seed: the log reads it from the prompt."""
    prompt = f"{source.case.prompt} #{source.seed}."
    body = {"model": context.model, "messages": [{"role": "user", "content": prompt}], "max_tokens": limit,
            "temperature": source.temperature,
            "output_config": {"format": {"type": "json_schema", "schema": source.case.schema}}}  # fmt: skip
    told = Outcome("")
    parts = (
        _events(context, "/v1/messages", body) if stream else [_post(context, "/v1/messages", body)]
    )
    for part in parts:
        if part.get("type") == "error":
            raise RefusedError(str(part["error"]))
        texts = [part["delta"]] if "delta" in part else part.get("content", ())
        told.text = (told.text or "") + "".join(each.get("text") or "" for each in texts)
        reason = part.get("stop_reason") or (part.get("delta") or {}).get("stop_reason")
        told.finish = _STOPS.get(reason, reason) if reason else told.finish
        said = _shortened(part)
        told.shortened = told.shortened if said is None else said
    return [told]


def _ollama(context: Context, source: Source, limit: int, stream: bool) -> list[Outcome]:
    options = {"num_predict": limit, "seed": source.seed, "temperature": source.temperature}
    body = {
        "model": context.model,
        "messages": _messages(source),
        "format": source.case.schema,
        "options": options,
    }
    path, told = "/api/chat", Outcome("")
    for part in (
        _events(context, path, body)
        if stream
        else [_post(context, path, {**body, "stream": False})]
    ):
        if "error" in part:
            raise RefusedError(str(part["error"]))
        told.text = (told.text or "") + part["message"]["content"]
        told.finish = part.get("done_reason") or told.finish
        said = _shortened({name: value for name, value in part.items() if name != "message"})
        told.shortened = told.shortened if said is None else said
    return [told]


def _generate_params(source: Source, limit: int) -> dict[str, Any]:
    constraint = source.case.constraint
    kind = {"regex": constraint.pattern} if isinstance(constraint, Regex) else {}
    kind = kind or {"json_schema": json.dumps(source.case.schema)}
    return {
        "max_new_tokens": limit,
        "sampling_seed": source.seed,
        "temperature": source.temperature,
        **kind,
    }


def _of_generate(part: Any) -> Outcome:
    finish = part["meta_info"]["finish_reason"]
    return Outcome(part["text"], finish["type"] if finish else "", _shortened(part["meta_info"]))


def _generate(context: Context, source: Source, limit: int, stream: bool) -> list[Outcome]:
    """Each part of a stream has the whole text so far."""
    body = {"text": f"{source.case.prompt}\n", "sampling_params": _generate_params(source, limit)}
    if not stream:
        return [_of_generate(_post(context, "/generate", body))]
    told = Outcome("")
    for part in _events(context, "/generate", body):
        if "error" in part:
            raise RefusedError(str(part["error"]))
        before, told = told.text or "", _of_generate(part)
        if not (told.text or "").startswith(before):
            return [Outcome(None, error=f"a stream took text back: {before!r}, then {told.text!r}")]
    return [told]


def _generate_batch(context: Context, calls: Sequence[Call], stream: bool) -> Answers:
    def ask(part: Sequence[Call]) -> Answers:
        params = [_generate_params(source, limit) for source, limit in part]
        body = {
            "text": [f"{source.case.prompt}\n" for source, _ in part],
            "sampling_params": params,
        }
        try:
            return [[_of_generate(each)] for each in _post(context, "/generate", body)]
        except Exception as error:  # as above
            return [[Outcome(None, error=f"{type(error).__name__}: {error}")] for _ in part]

    with ThreadPoolExecutor(BATCH) as pool:
        parts = [calls[at : at + BATCH] for at in range(0, len(calls), BATCH)]
        return [found for part in pool.map(ask, parts) for found in part]


WAYS: dict[str, Way] = {
    "library": library, "n": library, "batch": batch, "typed": typed, "chat": _each(_chat), "chat_n": _each(_chat),
    "tools": _each(_tools), "responses": _each(_responses), "messages": _each(_anthropic), "ollama": _each(_ollama),
    "generate": _each(_generate), "generate_batch": _generate_batch,
}  # fmt: skip
STREAMS = ("library", "n", "chat", "chat_n", "tools", "responses", "messages", "ollama", "generate")
SCHEMA_ONLY = ("chat", "chat_n", "tools", "responses", "messages", "ollama")
