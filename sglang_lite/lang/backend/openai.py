"""Backend for OpenAI's API and all servers that implement it, through the official SDK or, where it
is not installed, a built-in client.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

import httpx2
import msgspec

from sglang_lite.lang.argument_names import explains_wrong_arguments
from sglang_lite.lang.backend.apis.api import Api, Target
from sglang_lite.lang.backend.apis.openai_chat import CHAT, COMPLETIONS, parse_usage
from sglang_lite.lang.backend.apis.openai_responses import RESPONSES, input_items
from sglang_lite.lang.backend.capabilities import Capabilities
from sglang_lite.lang.backend.http.rate_limit import RateLimit
from sglang_lite.lang.backend.ladder.strategy import Policy, Strategy
from sglang_lite.lang.backend.profiles.profile import (
    STRATEGIES,
    Profile,
    find_profile,
    profile_by_name,
)
from sglang_lite.lang.backend.remote.backend import RemoteBackend
from sglang_lite.lang.backend.remote.builtin_clients import parse_answer
from sglang_lite.lang.backend.remote.connection import (
    Connector,
    sdk_client_factory,
    sdk_error_getter,
)
from sglang_lite.lang.backend.remote.selecting import MIN_LOGPROB, validate_tokenizer
from sglang_lite.lang.backend.rendering import without_stops_and_placeholders
from sglang_lite.lang.backend.token_counts import TiktokenEncoding

# SGLang's users import it from here
from sglang_lite.lang.backend.token_counts import TokenUsage as TokenUsage
from sglang_lite.lang.chat_template import get_chat_template
from sglang_lite.protocol import (
    BackendError,
    ChoiceScore,
    ParameterError,
    Prompt,
    RefusalError,
    Selection,
)
from sglang_lite.protocol.anything import Foreign, Json
from sglang_lite.text.chat_template import TurnTemplate

_APIS = ("chat", "responses", "completions")


class OpenAI(RemoteBackend):
    """Backend for models behind OpenAI's API. JSON schemas, types and choices are enforced by
    structured outputs, other regexes by the grammar of a custom tool (on the Responses API), and
    tool calls by the API's own tools. Requests contain only the parameters that were set. Nothing
    is stored at the provider.

    Args:
        model_name: name of the model; on Azure, of the deployment.
        is_chat_model: whether to use the chat API instead of the completions API; None to decide by
            the model's name.
        chat_template: template that renders turns as text, in `state.text()` and for completion
            models.
        is_azure: whether to connect to Azure; `azure_endpoint=`, `api_version=` … are arguments of
            its client.
        *args, **kwargs: arguments of the client: `api_key`, `base_url`, `timeout`,
            `max_retries` …
        profile: features of the model, by profile name ("vllm", "openai/gpt-5") or as a Profile.
            None: a model of OpenAI's is looked up by its name; another server is asked for its kind
                once, when that is first needed.
        policy: treatment of features that the model does not support: "strict" (the default),
            "emulate" or "warn"; see docs/backends.md.
        capabilities: features of the model; overrides `profile`. A parameter that only some servers
            have (top_k …) is sent under its name.
        api: API to use whatever the profile specifies: "chat", "responses" or "completions". With
            "responses", the model's encrypted reasoning is sent back in later turns of the same
            program; `n`, `seed`, `stop` and penalties are not supported.
        reasoning_effort: amount of reasoning: "low", "high" …; None for the provider's default.
        tokenizer: tokenizer of the model, for `select` of a base model by logit biases and for
            budgets: an object with `encode` and `decode`, for example tiktoken's
                `encoding_for_model(…)`.
        client: existing `AsyncOpenAI` or `AsyncAzureOpenAI` client to use, instead of arguments for
            a new one.
        rate_limit: limit on calls; None for the limit shared by all backends with the same server
            and key (see RateLimit).

    Attributes:
        token_usage: tokens used so far, as `prompt_tokens` and `completion_tokens`; `reset()` sets
            them to 0.

    Raises:
        ParameterError: the client rejects the arguments, or no API key is given.
    """

    provider = "openai"
    unset_max_tokens = None  # the API sets no limit by default
    strategies = frozenset({*STRATEGIES, "tools"}) - {"logit_bias_steps"}

    @explains_wrong_arguments
    def __init__(
        self,
        model_name: str,
        is_chat_model: bool | None = None,
        chat_template: TurnTemplate | None = None,
        is_azure: bool = False,
        *args: Foreign,
        profile: str | Profile | None = None,
        policy: Policy = "strict",
        capabilities: Capabilities | None = None,
        api: Literal["chat", "responses", "completions"] | None = None,
        reasoning_effort: str | None = None,
        tokenizer: TiktokenEncoding | None = None,
        client: Foreign = None,
        rate_limit: RateLimit | None = None,
        **kwargs: Foreign,
    ) -> None:
        if api is not None and (is_chat_model is not None or api not in _APIS):
            raise ParameterError(
                "api",
                f"{api!r} is not one of {', '.join(_APIS)}, or is_chat_model= is given, too.",
                hint="Give one of the two.",
            )
        if api is not None:
            is_chat_model = api != "completions"
        known = find_profile("openai", model_name)
        given = (
            profile if profile is None or isinstance(profile, Profile) else profile_by_name(profile)
        )
        if is_chat_model is None:
            is_chat_model = (given or known).api != "completions"
        self.is_chat_model = is_chat_model
        template = chat_template or get_chat_template("default")

        make = sdk_client_factory(
            "AsyncAzureOpenAI" if is_azure else "AsyncOpenAI", args, kwargs, client
        )

        def find() -> Profile:
            made = self._connection.latest_client
            if not is_chat_model:
                return find_profile("openai", "davinci-002")  # parameters of the completions API
            if is_azure or known.model or made.base_url.host.endswith("openai.com"):
                return known
            return find_profile(
                kind_of_server(str(made.base_url), made.api_key) or "compatible", model_name
            )

        def find_with_api() -> Profile:
            profile = given or find()
            return replace(profile, api=api or profile.api if is_chat_model else "completions")

        self.reasoning_effort = reasoning_effort
        self.tokenizer = validate_tokenizer(tokenizer)
        if not is_chat_model:
            self.strategies = frozenset() if tokenizer is None else frozenset({"logit_bias_steps"})
        super().__init__(
            model_name,
            Connector(
                "openai",
                "openai",
                make,
                sdk_error_getter("OpenAIError"),
                existing_client=client,
                major=3,
            ),
            find_with_api,
            policy,
            capabilities,
            without_stops_and_placeholders(template) if is_chat_model else template,
            rate_limit,
        )

    def target(self, strategy: Strategy) -> tuple[Api, Target]:
        profile = self.profile
        api = (
            RESPONSES
            if strategy.api == "responses"
            else CHAT
            if self.is_chat_model
            else COMPLETIONS
        )
        # Other servers may know only the older name of the limit.
        limit = (
            "max_completion_tokens" if profile.supports("max_completion_tokens") else "max_tokens"
        )
        may_reason = profile.supports("reasoning_effort")
        cache_hints = profile.supports("prompt_cache_key")
        return api, Target(
            self.model_name, limit, strategy.effort, may_reason=may_reason, cache_hints=cache_hints
        )

    async def decide(self, prompt: Prompt, choices: Sequence[str]) -> Selection:
        began = time.perf_counter()
        with self.errors.translate_errors():
            response = await _request_decision(
                self.client(), decision_request(self.model_name, prompt, choices)
            )
        with self.errors.report_unreadable_answer():
            return parse_decision(response, choices, self._name, time.perf_counter() - began)


_QUESTION = "Which of these texts is what the assistant says next?"


def decision_request(model: str, prompt: Prompt, choices: Sequence[str]) -> dict[str, Json]:
    """Builds the arguments of `decisions.create` for a single question. The choices are its
    possible answers.
    """
    options = [{"value": choice} for choice in choices]
    question = {"type": "choice", "instructions": _QUESTION, "choices": options}
    return {"model": model, "input": input_items(prompt.messages), "questions": [question]}


async def _request_decision(client: Foreign, request: Mapping[str, Json]) -> Foreign:
    """Calls the decisions endpoint. SDKs before 3.51 have no method for it."""
    if hasattr(client, "decisions"):
        return await client.decisions.create(**request)
    response = await client.post("/decisions", body=request, cast_to=httpx2.Response)
    return parse_answer(response.content)


def parse_decision(
    response: Foreign, choices: Sequence[str], name: str, seconds: float
) -> Selection:
    """Converts an answer of the decisions endpoint to a Selection. The score of a choice is the
    logarithm of its probability.

    Raises:
        RefusalError: the model refused to answer.
        BackendError: the answer does not name the choices.
    """
    answers: list[Any] = getattr(response, "answers", None) or []
    answer = answers[0] if len(answers) == 1 else None
    if getattr(answer, "type", None) == "refusal":
        raise RefusalError(f"{name} refused to answer.", hint="Change the prompt.")
    found = {each.value: each.probability for each in getattr(answer, "probabilities", None) or ()}
    if set(found) != set(choices):
        raise BackendError(
            f"{name}: the decision does not name the choices.",
            hint="Check what listens at base_url.",
        )
    scores = tuple(
        ChoiceScore(
            choice, (index,), (math.log(found[choice]) if found[choice] > 0 else MIN_LOGPROB,)
        )
        for index, choice in enumerate(choices)
    )
    usage = parse_usage(response.usage)
    usage = msgspec.structs.replace(usage, total_s=seconds)
    return Selection(
        scores, usage, meta={"model": response.model, "strategy": "decisions", "calls": 1}
    )


PATIENCE: Final = 2.0  # seconds to wait for each answer
_LARGEST: Final = 2**20  # bytes of the largest answer that is read


def _recognize_by_models(body: Mapping[str, Any]) -> str | None:
    """Recognizes a server by the `/v1/models` that it reports. Each known server names itself as
    the owner of its models.
    """
    models = body.get("data")
    owners = (
        {each.get("owned_by") for each in models if isinstance(each, dict)}
        if isinstance(models, list)
        else set()
    )
    profile_names = {
        "vllm": "vllm",
        "sglang": "sglang",
        "llamacpp": "llamacpp",
        "sglang_lite": "sglang_lite",
    }
    return profile_names.get(str(owners.pop())) if len(owners) == 1 else None


def _recognize_by_server_info(body: Mapping[str, Any]) -> str | None:
    if "sglang_lite" in body:
        return "sglang_lite"
    return "sglang" if "internal_states" in body or "mem_fraction_static" in body else None


_PROBES: Final[tuple[tuple[str, Callable[[Mapping[str, Any]], str | None]], ...]] = (
    ("v1/models", _recognize_by_models),
    ("server_info", _recognize_by_server_info),
    ("props", lambda body: "llamacpp" if "default_generation_settings" in body else None),
    # vLLM's answer has nothing else
    ("version", lambda body: "vllm" if body.keys() == {"version"} else None),
)


def kind_of_server(base_url: str, api_key: str | None) -> str | None:
    """Returns the name of a server's profile, or None if its software is unknown. Blocks until the
    server has answered.

    Args:
        base_url: address of the API as passed to an SDK, with or without "/v1" at its end.
    """
    root = base_url.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    with httpx2.Client(timeout=PATIENCE, headers=headers) as client:
        for path, read in _PROBES:
            try:
                answer = client.get(f"{root}/{path}")
                body = (
                    answer.json() if answer.is_success and len(answer.content) <= _LARGEST else None
                )
            except httpx2.TransportError:
                return None  # not reached: the next request reports that
            except ValueError:
                continue
            found = read(body) if isinstance(body, dict) else None
            if found is not None:
                return found
    return None
