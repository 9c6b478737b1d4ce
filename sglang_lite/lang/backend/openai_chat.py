"""Chat completions of OpenAI, and of every server that speaks it: requests and answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_lite.lang.backend.openai_usage import reasoning_of, usage_of
from sglang_lite.lang.backend.remote_api import Api, JsonFormat, JsonTool, OwnField, PartialAnswer, Question
from sglang_lite.lang.results import as_dicts
from sglang_lite.protocol import Delta, TokenLogprob, Usage
from sglang_lite.protocol.sampling import given

ANSWER = "answer"  # name of a form, or of the tool that is called with the answer


def request(question: Question) -> dict[str, Any]:
    """Arguments of `chat.completions.create`."""
    asked = {"model": question.target.model, **parameters(question)}
    match question.shape:
        case JsonFormat(schema, strict):
            form = {"name": ANSWER, "schema": schema, "strict": strict}
            asked["response_format"] = {"type": "json_schema", "json_schema": form}
        case JsonTool(schema):
            function = {"name": ANSWER, "description": "Its arguments are your whole answer.", "parameters": schema}
            asked["tools"] = [{"type": "function", "function": function | {"strict": True}}]
            asked["tool_choice"] = {"type": "function", "function": {"name": ANSWER}}
            asked["parallel_tool_calls"] = False
        case OwnField(fields):
            asked["extra_body"] = {**asked.get("extra_body", {}), **fields}
    messages = as_dicts(question.prompt.messages)
    if question.prompt.partial.strip():  # only servers whose models continue it are asked to
        messages.append({"role": "assistant", "content": question.prompt.partial})
        asked["extra_body"] = {
            **asked.get("extra_body", {}), "continue_final_message": True, "add_generation_prompt": False
        }  # fmt: skip
    return asked | {"messages": messages}


def parameters(question: Question) -> dict[str, Any]:
    """The parameters that were set, under the names of chat and completions; what only other servers know as
    `extra_body`."""
    asked: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for name, value in given(question.params).items():
        match name:
            case "max_tokens":
                asked[question.target.limit] = value
            case "stop":
                asked["stop"] = list(value)
            case "seed":
                asked["seed"] = value % 2**63  # theirs are signed
            case "logit_bias":
                asked["logit_bias"] = {str(token): bias for token, bias in value}
            case "return_logprob":
                asked["logprobs"] = value
            case "top_logprobs_num":
                asked["top_logprobs"] = value
            case "n" | "temperature" | "top_p" | "frequency_penalty" | "presence_penalty":
                asked[name] = value
            case "return_text_in_logprobs":
                pass  # it always is
            case _:
                extra[name] = list(value) if isinstance(value, tuple) else value
    return asked | ({"extra_body": extra} if extra else {})


class ChatReader:
    """Reader of a chat completion, or of its chunks."""

    def __init__(self) -> None:
        self.samples: dict[int, PartialAnswer] = {}
        self.usage = Usage()
        self.meta: dict[str, Any] = {}
        self.failure = ""

    def whole(self, said: Any) -> None:
        self.event(said)
        for sample in self.samples.values():
            sample.reason = sample.reason or "stop"  # not every server tells

    def event(self, said: Any) -> Sequence[Delta]:
        usage = getattr(said, "usage", None)
        if usage is not None:
            self.usage = usage_of(usage)
        self.meta |= {"id": getattr(said, "id", None), "model": getattr(said, "model", None), **reasoning_of(usage)}
        return [self._add(choice) for choice in getattr(said, "choices", None) or ()]

    def _add(self, choice: Any) -> Delta:
        """Adds what a choice, whole or a part, has brought."""
        sample = self.samples.setdefault(choice.index, PartialAnswer())
        text, logprobs = self.piece(choice, sample)
        sample.text += text
        sample.logprobs += logprobs
        sample.reason = choice.finish_reason or sample.reason
        sample.cut = sample.reason == "length"
        if sample.reason == "content_filter":
            sample.refusal = sample.refusal or "a content filter stopped the answer"
        return Delta(text, logprobs=logprobs, index=choice.index)

    def piece(self, choice: Any, sample: PartialAnswer) -> tuple[str, tuple[TokenLogprob, ...]]:
        """Text and log-probabilities in a choice; what else it says goes to the sample."""
        message = getattr(choice, "message", None) or choice.delta
        sample.refusal += getattr(message, "refusal", None) or ""
        calls = [call.function for call in getattr(message, "tool_calls", None) or () if call.type != "custom"]
        text = "".join(call.arguments or "" for call in calls if call is not None)  # of the tool that answers
        return (message.content or "") + text, _logprobs(choice.logprobs)


def _logprobs(said: Any) -> tuple[TokenLogprob, ...]:
    """Log-probabilities. The API tells tokens as text alone: the ids are -1."""
    return tuple(
        TokenLogprob(t.logprob, -1, t.token, tuple((top.logprob, -1, top.token) for top in t.top_logprobs or ()))
        for t in getattr(said, "content", None) or ()
    )


CHAT = Api(
    request,
    lambda client: client.chat.completions.create,
    {"stream": True, "stream_options": {"include_usage": True}},
    ChatReader,
)
