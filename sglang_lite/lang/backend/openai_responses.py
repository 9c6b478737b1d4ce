"""Responses of OpenAI: requests and answers of a grammar, as the input of a custom tool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_lite.lang.backend.openai_usage import reasoning_of, usage_of
from sglang_lite.lang.backend.remote_api import Api, GrammarTool, PartialAnswer, Question
from sglang_lite.lang.results import as_dicts
from sglang_lite.protocol import Delta, Message, Usage
from sglang_lite.protocol.sampling import given


def request(question: Question) -> dict[str, Any]:
    """Arguments of `responses.create` that have the model call a tool whose input is of a grammar. (The chat API takes
    no tools of models that reason.)"""
    assert isinstance(question.shape, GrammarTool)
    grammar = {"type": "grammar", "syntax": question.shape.syntax, "definition": question.shape.definition}
    tool = {"type": "custom", "name": "answer", "description": "Its input is your whole answer.", "format": grammar}
    asked = given(question.params)
    if "max_tokens" in asked:
        asked["max_output_tokens"] = asked.pop("max_tokens")
    return {
        "model": question.target.model, "input": items_of(question.prompt.messages), "tools": [tool], "store": False,
        "tool_choice": {"type": "custom", "name": "answer"}, "parallel_tool_calls": False, **asked,
    }  # fmt: skip


class ResponsesReader:
    """Reader of a response."""

    def __init__(self) -> None:
        self.samples: dict[int, PartialAnswer] = {}
        self.usage = Usage()
        self.meta: dict[str, Any] = {}
        self.failure = ""

    def whole(self, said: Any) -> None:
        usage = getattr(said, "usage", None)
        self.usage = usage_of(usage)
        self.meta |= {"id": getattr(said, "id", None), "model": getattr(said, "model", None), **reasoning_of(usage)}
        error = getattr(said, "error", None)
        if error is not None:
            self.failure = error.message
        why = getattr(getattr(said, "incomplete_details", None), "reason", None)
        output = getattr(said, "output", None) or ()
        inputs = [item.input for item in output if item.type == "custom_tool_call"]
        parts = [part for item in output if item.type == "message" for part in item.content]
        refusal = "".join(part.refusal for part in parts if part.type == "refusal")
        if why == "content_filter":
            refusal = refusal or "a content filter stopped the answer"
        cut = why == "max_output_tokens"
        if not inputs and (refusal or cut):
            inputs = [""]
        self.samples = {i: PartialAnswer(text, refusal, reason=why or "stop", cut=cut) for i, text in enumerate(inputs)}

    def event(self, said: Any) -> Sequence[Delta]:
        response = getattr(said, "response", None)
        if response is not None and said.type in ("response.completed", "response.incomplete", "response.failed"):
            self.whole(response)
        return ()


def items_of(messages: tuple[Message, ...]) -> list[dict[str, Any]]:
    """Messages as the API takes them."""
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


RESPONSES = Api(request, lambda client: client.responses.create, {"stream": True}, ResponsesReader)
