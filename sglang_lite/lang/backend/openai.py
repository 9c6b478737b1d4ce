"""OpenAI's API, and every server that speaks it, through the official SDK."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from typing import Any

from sglang_lite.lang.backend.base_backend import Capabilities
from sglang_lite.lang.backend.openai_chat import CHAT
from sglang_lite.lang.backend.openai_completions import COMPLETIONS
from sglang_lite.lang.backend.openai_responses import RESPONSES
from sglang_lite.lang.backend.remote import JSON, RemoteBackend, chat_model, without_marks
from sglang_lite.lang.backend.remote_api import Question, RegexTool, Target
from sglang_lite.lang.backend.structured import Form, form_of
from sglang_lite.lang.chat_template import get_chat_template
from sglang_lite.protocol import Constraint, Delta, Generation, Location, Prompt, Regex, SamplingParams, Unset
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
        self._api = CHAT if is_chat_model else COMPLETIONS
        # Other servers may know only the older name.
        self._target = Target(model_name, "max_completion_tokens" if official and is_chat_model else "max_tokens")

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
        shape = RegexTool(constraint) if isinstance(constraint, Regex) and form is None else form
        api = RESPONSES if isinstance(shape, RegexTool) else self._api
        shown = stream and (shape is None or (isinstance(shape, Form) and not shape.wrapped))  # others when whole
        async for event in self.ask(api, Question(self._target, prompt, params, shape), constraint, stream=shown):
            yield event
