"""OpenAI's API, and every server that speaks it, through the official SDK."""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import AsyncGenerator
from typing import Any

from sglang_lite.constraints.emit.regex import to_rust
from sglang_lite.constraints.syntax.regex import parse
from sglang_lite.lang.backend.base_backend import Capabilities
from sglang_lite.lang.backend.remote import JSON, PartialAnswer, RemoteBackend, chat_model, without_marks
from sglang_lite.lang.backend.structured import Form, form_of, strict_schema
from sglang_lite.lang.chat_template import get_chat_template
from sglang_lite.lang.results import as_dicts
from sglang_lite.protocol import (
    BackendError,
    Constraint,
    Delta,
    Generation,
    Location,
    Message,
    Prompt,
    Regex,
    SamplingParams,
    TokenLogprob,
    Unset,
    Usage,
)
from sglang_lite.protocol.sampling import given
from sglang_lite.text.chat_template import ChatTemplate

_LIMITS = frozenset({"max_tokens", "n", "seed"})
_SAMPLED = _LIMITS | {"temperature", "top_p", "return_logprob", "top_logprobs_num", "return_text_in_logprobs"}
_ALL = _SAMPLED | {"stop", "frequency_penalty", "presence_penalty", "logit_bias"}
_GRAMMAR = frozenset({"max_tokens", "temperature", "top_p"})  # what the Responses API takes
_MAX_STOPS = 4


_COMPLETIONS = Capabilities(frozenset(), _ALL, select=False, scores=False)
_UNKNOWN = chat_model(_ALL)  # a compatible server, or a deployment's own name

# By name, the first that fits; as of October 2026. A model that reasons takes no sampling parameters, and those from
# GPT-5.5 on reason unless told otherwise. Custom tools with a grammar came with GPT-5.
_MODELS = (
    (r"gpt-3\.5-turbo-instruct|davinci-002|babbage-002", _COMPLETIONS),
    (r"gpt-5-chat", chat_model(_ALL)),
    (r"gpt-5\.[1-4](?!.*(chat|codex|pro))", chat_model(_SAMPLED, JSON | {Regex})),
    (r"gpt-([5-9]|\d\d)", chat_model(_LIMITS, JSON | {Regex})),
    (r"o1-(mini|preview)", chat_model(_LIMITS, frozenset(), images=False)),
    (r"o3-mini", chat_model(_LIMITS, images=False)),
    (r"o\d", chat_model(_LIMITS)),
    (r"gpt-4o-2024-05-13|chatgpt-4o|gpt-4-turbo|gpt-4-vision", chat_model(_ALL, frozenset())),
    (r"gpt-4o|gpt-4\.", chat_model(_ALL)),
    (r"gpt-4|gpt-3\.5", chat_model(_ALL, frozenset(), images=False)),
)  # fmt: skip


class OpenAI(RemoteBackend):
    """A model behind OpenAI's API. Constraints are native: JSON schemas, types and choices as structured outputs, other
    regexes as the grammar of a custom tool (which the Responses API answers). Only parameters that were set are sent.

    Args:
        model_name: the model; on Azure the deployment.
        is_chat_model: whether to use the chat API or the completions API; None: the model's name decides.
        chat_template: how roles become text in `state.text()`, and what a completion model is shown.
        is_azure: connect to Azure: `azure_endpoint=`, `api_version=` … are its client's.
        *args, **kwargs: for the SDK's client: `api_key`, `base_url`, `timeout`, `max_retries` …
        capabilities: what the model can do, where its name does not tell: a compatible server's, a deployment's. A
            parameter that only such a server has (top_k …) is sent under its name.

    Attributes:
        token_usage: `prompt_tokens` and `completion_tokens` so far; `reset()` starts anew.

    Raises:
        BackendError: the SDK is not installed.
        ParameterError: the SDK refuses the arguments, or has no API key.
    """

    def __init__(
        self,
        model_name: str,
        is_chat_model: bool | None = None,
        chat_template: ChatTemplate | None = None,
        is_azure: bool = False,
        *args: Any,
        capabilities: Capabilities | None = None,
        **kwargs: Any,
    ) -> None:
        name = model_name.rpartition("/")[2].removeprefix("ft:")
        known = next((can for pattern, can in _MODELS if re.match(pattern, name)), None)
        if is_chat_model is None:
            is_chat_model = known is not _COMPLETIONS
        self.is_chat_model = is_chat_model
        can = (known or _UNKNOWN) if is_chat_model else _COMPLETIONS
        template = chat_template or get_chat_template("default")

        def connect(sdk: Any) -> Any:
            return (sdk.AsyncAzureOpenAI if is_azure else sdk.AsyncOpenAI)(*args, **kwargs)

        super().__init__(
            model_name, "openai", "OpenAIError", connect, capabilities or can,
            without_marks(template) if is_chat_model else template,
        )  # fmt: skip
        official = is_azure or self._client.base_url.host.endswith("openai.com") or known is not None
        self._max_stops = _MAX_STOPS if official else None
        # Other servers may know only the older name.
        self._max_tokens = "max_completion_tokens" if official and is_chat_model else "max_tokens"

    def check(
        self, node: object, params: SamplingParams, constraint: Constraint | None, where: Location | None
    ) -> None:
        super().check(node, params, constraint, where)
        if isinstance(constraint, Regex) and form_of(constraint) is None:
            for name in given(params):
                if name not in _GRAMMAR:
                    raise self.refusal(node, f"{name} together with a regex", f"Leave {name} out.", where)
        stops = () if constraint is not None or isinstance(params.stop, Unset) else params.stop
        if self._max_stops is not None and len(stops) > self._max_stops:
            raise self.refusal(node, f"{len(stops)} stop strings", f"It takes {self._max_stops}.", where)

    async def agenerate(
        self, prompt: Prompt, params: SamplingParams, constraint: Constraint | None, *, stream: bool
    ) -> AsyncGenerator[Delta | Generation, None]:
        self.check_prompt(prompt)
        form = form_of(constraint)
        if isinstance(constraint, Regex) and form is None:
            yield await self._by_grammar(prompt, params, constraint)
            return
        api = self.client().chat.completions if self.is_chat_model else self.client().completions
        request = self._request(prompt, params, form)
        samples: defaultdict[int, PartialAnswer] = defaultdict(PartialAnswer)
        said: Any = None
        usage = None
        began, first = time.perf_counter(), 0.0
        with self.errors():
            if stream and not (form is not None and form.wrapped):  # what is wrapped is shown when it is whole
                options = {"include_usage": True}
                async with await api.create(**request, stream=True, stream_options=options) as parts:
                    async for said in parts:
                        usage = said.usage or usage
                        for choice in said.choices or ():
                            delta = _add(samples[choice.index], choice)
                            first = first or time.perf_counter() - began
                            if delta.text:
                                yield delta
            else:
                said = await api.create(**request)
                usage = getattr(said, "usage", None)
                for choice in getattr(said, "choices", None) or ():
                    _add(samples[choice.index], choice)
                    samples[choice.index].reason = choice.finish_reason or "stop"  # not every server tells
        wanted = 1 if isinstance(params.n, Unset) else params.n
        if len(samples) != wanted:
            raise self.unreadable(f"{len(samples)} answers came where {wanted} should have")
        meta = {"id": said.id, "model": said.model, **_reasoning(usage)}
        cost = _cost(usage, began, first)
        for index, sample in sorted(samples.items()):
            if sample.reason is None:
                raise self.unreadable("the stream ended before the answer was complete")
            sample.cut = sample.reason == "length"
            if sample.reason == "content_filter":
                sample.refusal = sample.refusal or "a content filter stopped the answer"
            # The cost is that of all samples together: the first one has it.
            yield self.generation(sample, params, constraint, cost if not index else Usage(), meta, index)

    def _request(self, prompt: Prompt, params: SamplingParams, form: Form | None) -> dict[str, Any]:
        request: dict[str, Any] = {"model": self.model_name}
        extra: dict[str, Any] = {}
        for name, value in given(params).items():
            match name:
                case "max_tokens":
                    request[self._max_tokens] = value
                case "stop":
                    if form is None:  # else it is that of a number, which ends by itself in JSON
                        request["stop"] = list(value)
                case "seed":
                    request["seed"] = value % 2**63  # theirs are signed
                case "logit_bias":
                    request["logit_bias"] = {str(token): bias for token, bias in value}
                case "return_logprob":
                    request["logprobs"] = value
                case "top_logprobs_num":
                    request["top_logprobs"] = value
                case "n" | "temperature" | "top_p" | "frequency_penalty" | "presence_penalty":
                    request[name] = value
                case "return_text_in_logprobs":
                    pass  # it always is
                case _:
                    extra[name] = list(value) if isinstance(value, tuple) else value
        if extra:
            request["extra_body"] = extra
        if not self.is_chat_model:
            if request.pop("logprobs", False):
                request["logprobs"] = request.pop("top_logprobs", 0)
            return request | {"prompt": prompt.text}
        if form is not None:
            schema = json.loads(form.constraint.schema)
            strict = strict_schema(schema)
            asked = {"name": "answer", "schema": strict or schema, "strict": strict is not None}
            request["response_format"] = {"type": "json_schema", "json_schema": asked}
        return request | {"messages": as_dicts(prompt.messages)}

    async def _by_grammar(self, prompt: Prompt, params: SamplingParams, regex: Regex) -> Generation:
        """Has the model call a tool whose input matches. By the Responses API: the chat API takes no tools of models
        that reason."""
        grammar = {"type": "grammar", "syntax": "regex", "definition": to_rust(parse(regex.pattern))}
        tool = {"type": "custom", "name": "answer", "description": "Its input is your whole answer.", "format": grammar}
        request = given(params)
        if "max_tokens" in request:
            request["max_output_tokens"] = request.pop("max_tokens")
        began = time.perf_counter()
        with self.errors():
            said = await self.client().responses.create(
                model=self.model_name, input=_items(prompt.messages), tools=[tool], store=False,
                tool_choice={"type": "custom", "name": "answer"}, parallel_tool_calls=False, **request,
            )  # fmt: skip
        if getattr(said, "error", None) is not None:
            raise BackendError(f"{self._name}: {said.error.message} (response {said.id})", hint="Try again.")
        why = getattr(getattr(said, "incomplete_details", None), "reason", None)
        sample = PartialAnswer(cut=why == "max_output_tokens")
        calls = 0
        for item in getattr(said, "output", None) or ():
            if item.type == "custom_tool_call":
                sample.text, calls = item.input, calls + 1
            elif item.type == "message":
                sample.refusal = "".join(part.refusal for part in item.content if part.type == "refusal")
        if why == "content_filter":
            sample.refusal = sample.refusal or "a content filter stopped the answer"
        if calls != 1 and not sample.refusal and not sample.cut:
            raise self.unreadable(f"{calls} answers came where 1 should have")
        meta = {"id": said.id, "model": said.model, **_reasoning(said.usage)}
        return self.generation(sample, params, regex, _cost(said.usage, began, 0.0), meta)


def _add(sample: PartialAnswer, choice: Any) -> Delta:
    """Adds what a choice, whole or a part, has brought."""
    message = getattr(choice, "message", None) or getattr(choice, "delta", None)
    text = (getattr(choice, "text", None) if message is None else message.content) or ""
    logprobs = _logprobs(choice.logprobs)
    sample.text += text
    sample.refusal += getattr(message, "refusal", None) or ""
    sample.reason = choice.finish_reason or sample.reason
    sample.logprobs += logprobs
    return Delta(text, logprobs=logprobs, index=choice.index)


def _logprobs(said: Any) -> tuple[TokenLogprob, ...]:
    """Log-probabilities of a chat or completions choice. Both tell tokens as text alone: the ids are -1."""
    if said is None:
        return ()
    if getattr(said, "tokens", None) is not None:
        tops = said.top_logprobs or [None] * len(said.tokens)
        return tuple(
            TokenLogprob(logprob, -1, token, tuple((each, -1, text) for text, each in (top or {}).items()))
            for token, logprob, top in zip(said.tokens, said.token_logprobs, tops)
        )
    return tuple(
        TokenLogprob(t.logprob, -1, t.token, tuple((top.logprob, -1, top.token) for top in t.top_logprobs or ()))
        for t in getattr(said, "content", None) or ()
    )


def _cost(usage: Any, began: float, first: float) -> Usage:
    """The usage that an API reports, of chat and completions or of responses."""
    prompt = getattr(usage, "prompt_tokens", None) or getattr(usage, "input_tokens", None) or 0
    completion = getattr(usage, "completion_tokens", None) or getattr(usage, "output_tokens", None) or 0
    details = getattr(usage, "prompt_tokens_details", None) or getattr(usage, "input_tokens_details", None)
    cached = getattr(details, "cached_tokens", None) or 0
    return Usage(prompt, cached, completion, first_token_s=first, total_s=time.perf_counter() - began)


def _reasoning(usage: Any) -> dict[str, int]:
    details = getattr(usage, "completion_tokens_details", None) or getattr(usage, "output_tokens_details", None)
    tokens = getattr(details, "reasoning_tokens", None)
    return {} if tokens is None else {"reasoning_tokens": tokens}


def _items(messages: tuple[Message, ...]) -> list[dict[str, Any]]:
    """Messages as the Responses API takes them."""
    items = as_dicts(messages)
    for item in items:
        if not isinstance(item["content"], str):
            item["content"] = [
                {"type": "input_text", "text": part["text"]}
                if part["type"] == "text"
                else {"type": "input_image", "detail": "auto", "image_url": part["image_url"]["url"]}
                for part in item["content"]
            ]
    return items
