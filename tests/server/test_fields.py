"""The tables of fields against the request types of the installed clients: a field that is new
there fails here.
"""

import typing

import pytest
from anthropic import types as anthropic
from anthropic.types import beta
from openai import types as openai
from openai.types import chat as openai_chat
from openai.types import responses as openai_responses

from sglang_lite.server import native
from sglang_lite.server.anthropic import messages, messages_request
from sglang_lite.server.openai import chat_request, completions, decisions_request, responses_items
from sglang_lite.server.openai import responses_request as responses
from sglang_lite.server.parameters import completion_fields
from sglang_lite.server.routes import ROUTES

HEADERS = {"betas"}  # of the clients' types: sent as a header

REQUESTS = [
    (chat_request.CHAT, openai_chat.completion_create_params, "CompletionCreateParams"),
    (completions.COMPLETIONS, openai.completion_create_params, "CompletionCreateParams"),
    (responses.RESPONSES, openai_responses.response_create_params, "ResponseCreateParams"),
    (responses.INPUT_TOKENS, openai_responses.input_token_count_params, "InputTokenCountParams"),
    (decisions_request.DECISIONS, openai.decision_create_params, "DecisionCreateParams"),
    (messages.MESSAGES, anthropic.message_create_params, "MessageCreateParams"),
    (messages.MESSAGES, beta.message_create_params, "MessageCreateParams"),
    (messages.COUNTED, anthropic.message_count_tokens_params, "MessageCountTokensParams"),
    (messages.COUNTED, beta.message_count_tokens_params, "MessageCountTokensParams"),
]
PARTS = [
    (chat_request.SystemMessage, openai_chat.ChatCompletionSystemMessageParam),
    (chat_request.DeveloperMessage, openai_chat.ChatCompletionDeveloperMessageParam),
    (chat_request.UserMessage, openai_chat.ChatCompletionUserMessageParam),
    (chat_request.AssistantMessage, openai_chat.ChatCompletionAssistantMessageParam),
    (chat_request.ToolMessage, openai_chat.ChatCompletionToolMessageParam),
    (chat_request.TextPart, openai_chat.ChatCompletionContentPartTextParam),
    (chat_request.RefusalPart, openai_chat.ChatCompletionContentPartRefusalParam),
    (chat_request.FunctionTool, openai_chat.ChatCompletionFunctionToolParam),
    (chat_request.CustomTool, openai_chat.ChatCompletionCustomToolParam),
    (chat_request.FunctionCall, openai_chat.ChatCompletionMessageFunctionToolCallParam),
    (chat_request.CustomCall, openai_chat.ChatCompletionMessageCustomToolCallParam),
    (completion_fields.StreamOptions, openai_chat.ChatCompletionStreamOptionsParam),
    (chat_request.AllowedTools, openai_chat.ChatCompletionAllowedToolChoiceParam),
    (chat_request.Allowed, openai_chat.ChatCompletionAllowedToolsParam),
    (chat_request.FunctionDefinition, openai.shared_params.FunctionDefinition),
    (responses.FunctionTool, openai_responses.FunctionToolParam),
    (responses.CustomTool, openai_responses.CustomToolParam),
    (responses.TextConfig, openai_responses.ResponseTextConfigParam),
    (responses.Reasoning, openai.shared_params.Reasoning),
    (completion_fields.EventOptions, openai_responses.response_create_params.StreamOptions),
    (responses.Allowed, openai_responses.ToolChoiceAllowedParam),
    (responses.NamedTool, openai_responses.ToolChoiceFunctionParam),
    (responses_items.MessageItem, openai_responses.EasyInputMessageParam),
    (responses_items.MessageItem, openai_responses.ResponseOutputMessageParam),
    (responses_items.FunctionCallItem, openai_responses.ResponseFunctionToolCallParam),
    (responses_items.CustomCallItem, openai_responses.ResponseCustomToolCallParam),
    (
        responses_items.FunctionOutputItem,
        openai_responses.response_input_item_param.FunctionCallOutput,
    ),
    (responses_items.CustomOutputItem, openai_responses.ResponseCustomToolCallOutputParam),
    (responses_items.ReasoningItem, openai_responses.ResponseReasoningItemParam),
    (responses_items.InputText, openai_responses.ResponseInputTextParam),
    (responses_items.OutputText, openai_responses.ResponseOutputTextParam),
    (responses_items.OutputRefusal, openai_responses.ResponseOutputRefusalParam),
    (messages_request.UserMessage, anthropic.UserMessageParam),
    (messages_request.AssistantMessage, anthropic.AssistantMessageParam),
    (messages_request.SystemMessage, anthropic.SystemMessageParam),
    (messages_request.TextBlock, anthropic.TextBlockParam),
    (messages_request.ImageBlock, anthropic.ImageBlockParam),
    (messages_request.DocumentBlock, anthropic.DocumentBlockParam),
    (messages_request.SearchResultBlock, anthropic.SearchResultBlockParam),
    (messages_request.ThinkingBlock, anthropic.ThinkingBlockParam),
    (messages_request.RedactedBlock, anthropic.RedactedThinkingBlockParam),
    (messages_request.ToolUseBlock, anthropic.ToolUseBlockParam),
    (messages_request.ToolResultBlock, anthropic.ToolResultBlockParam),
    (messages_request.OwnTool, anthropic.ToolParam),
    (messages_request.ToolChoice, anthropic.ToolChoiceToolParam),
    (messages_request.Thinking, anthropic.ThinkingConfigEnabledParam),
    (messages_request.OutputConfig, beta.BetaOutputConfigParam),
    (messages_request.JsonOutputFormat, anthropic.JSONOutputFormatParam),
]


def of_module(module, prefix):
    """The fields of the request types of a client's module."""
    kinds = [
        each
        for name, each in vars(module).items()
        if name.startswith(prefix) and hasattr(each, "__total__")
    ]
    assert kinds
    return {name for kind in kinds for name in kind.__annotations__}


def literals(hint):
    """The texts in a type."""
    return (
        {hint}
        if isinstance(hint, str)
        else {text for each in typing.get_args(hint) for text in literals(each)}
    )


def names_of(record):
    config = record.__struct_config__
    return {
        *record.__struct_encode_fields__,
        *(() if config.tag_field is None else (config.tag_field,)),
    }


@pytest.mark.parametrize(
    ("fields", "module", "prefix"), REQUESTS, ids=lambda each: getattr(each, "__name__", "")
)
def test_each_field_of_a_request_is_honoured_neutral_or_refused(fields, module, prefix):
    listed = [*fields.known, *fields.neutral, *fields.refused]
    assert of_module(module, prefix) - set(listed) - HEADERS == set()
    assert len(set(listed)) == len(listed)


@pytest.mark.parametrize(("record", "theirs"), PARTS, ids=lambda each: each.__name__)
def test_each_field_inside_a_request_is_read(record, theirs):
    assert set(theirs.__annotations__) - names_of(record) == set()


@pytest.mark.parametrize(("union", "hosted", "own"), [
    (openai_responses.ToolParam, responses.HOSTED, {"function", "custom", "namespace"}),
    (anthropic.ToolUnionParam, messages_request.HOSTED, {"custom"}),
    (beta.BetaToolUnionParam, messages_request.HOSTED, {"custom"}),
], ids=["openai", "anthropic", "beta"])  # fmt: skip
def test_each_hosted_tool_is_known_by_its_type(union, hosted, own):
    hints = [
        typing.get_type_hints(tool, include_extras=False)["type"] for tool in typing.get_args(union)
    ]
    kinds = {kind for hint in hints for kind in literals(hint)}
    assert len(kinds) > 10
    assert {kind for kind in kinds if not hosted.fullmatch(kind)} == own


@pytest.mark.parametrize(
    "fields",
    {id(route.fields): route.fields for route in ROUTES if route.fields is not None}.values(),
    ids=lambda f: f.record.__name__,
)
def test_each_neutral_field_says_why(fields):
    assert all(text.endswith(".") for text in fields.neutral.values())


def test_a_sampling_parameter_in_the_wrong_place_is_told_of_its_own():
    with pytest.raises(ValueError, match="It belongs in sampling_params"):
        native.GENERATE.parse_record({"text": "a", "max_new_tokens": 6})


def test_the_nearest_field_is_named():
    with pytest.raises(ValueError, match="Did you mean max_tokens"):
        messages.MESSAGES.parse_record({"max_tokenz": 1})
    unused: list = []
    assert messages.COUNTED.parse_record({"messages": [], "max_tokenz": 1}, unused).messages == []
    assert unused == ["max_tokenz"]
