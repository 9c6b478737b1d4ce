"""Backend for Gemini on Vertex AI, through Google's Gen AI SDK (`google-genai`)."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_lite.lang.argument_names import explains_wrong_arguments
from sglang_lite.lang.backend.apis.api import Api, Target
from sglang_lite.lang.backend.apis.generate_content import GENERATE_CONTENT
from sglang_lite.lang.backend.capabilities import Capabilities
from sglang_lite.lang.backend.http.rate_limit import RateLimit
from sglang_lite.lang.backend.ladder.rung import Policy, Rung
from sglang_lite.lang.backend.profiles.profile import Profile, resolve_profile
from sglang_lite.lang.backend.remote.backend import RemoteBackend
from sglang_lite.lang.backend.remote.connection import Connector, ResponseHook
from sglang_lite.lang.backend.rendering import without_marks
from sglang_lite.lang.chat_template import get_chat_template
from sglang_lite.protocol import ParameterError
from sglang_lite.protocol.anything import Foreign


class VertexAI(RemoteBackend):
    """Backend for Gemini models on Vertex AI. Native structured outputs enforce schemas, types and choices; tools are
    the API's own. Requests contain only the parameters that were set.

    Args:
        model_name: name of the model.
        safety_settings: the API's settings: a list of dicts with `category` and `threshold`, or a dict from category to
            threshold.
        profile: features of the model, by profile name or as a Profile; None to look the model up by its name.
        policy: treatment of features that the model does not support: "strict" (the default), "emulate" or "warn"; see
            docs/backends.md.
        capabilities: features of the model; overrides `profile`.
        reasoning_effort: amount of reasoning: "minimal", "low", "medium" or "high"; None for the provider's default.
        client: existing `google.genai.Client` to use, instead of arguments for a new one.
        rate_limit: limit on calls; None for the limit shared by all backends with the same server and key (see
            RateLimit).
        **kwargs: arguments of the SDK's client: `credentials`, `http_options`, `api_key` (of the Gemini API, with
            `vertexai=False`) … The project is `project=`, or GCP_PROJECT_ID of the environment; the location is
            `location=`, or GCP_LOCATION.

    Attributes:
        token_usage: tokens used so far, as `prompt_tokens` and `completion_tokens`; `reset()` sets them to 0.

    Raises:
        BackendError: the SDK is not installed.
        ParameterError: no project is given, or the SDK rejects the arguments.
    """

    provider = "vertexai"

    @explains_wrong_arguments
    def __init__(
        self,
        model_name: str,
        safety_settings: Sequence[Mapping[str, Foreign]] | Mapping[str, str] | None = None,
        *,
        profile: str | Profile | None = None,
        policy: Policy = "strict",
        capabilities: Capabilities | None = None,
        reasoning_effort: str | None = None,
        client: Foreign = None,
        rate_limit: RateLimit | None = None,
        **kwargs: Foreign,
    ) -> None:
        if client is not None and kwargs:
            raise ParameterError(
                "client", "other arguments of the client have no effect beside it.", hint="Leave them out."
            )
        options = {"vertexai": True, **kwargs}
        if client is None and options["vertexai"] and "api_key" not in options:
            options.setdefault("project", os.environ.get("GCP_PROJECT_ID"))
            options.setdefault("location", os.environ.get("GCP_LOCATION"))
            if not options["project"]:
                raise ParameterError("project", "no project is given.", hint="Give project=, or set GCP_PROJECT_ID.")
        super().__init__(
            model_name, Connector("google.genai", "vertexai", _maker(options, client), _errors, client, _close),
            resolve_profile(profile, "vertexai", model_name), policy, capabilities,
            without_marks(get_chat_template("default")), rate_limit,
        )  # fmt: skip
        safety = _settings(safety_settings)
        self._settings = {"safety_settings": safety} if safety else {}
        self.reasoning_effort = reasoning_effort

    def target(self, rung: Rung) -> tuple[Api, Target]:
        return GENERATE_CONTENT, Target(self.model_name, effort=rung.effort, settings=self._settings)


def _maker(options: Mapping[str, Any], client: Any) -> Any:
    def make(sdk: Any, on_response: ResponseHook, before: Any) -> Any:
        if client is not None and not isinstance(client, sdk.Client):
            raise ParameterError("client", f"{type(client).__name__} is not a google.genai.Client.")
        try:
            return explains_wrong_arguments(sdk.Client)(**options) if client is None else client
        except ValueError as error:
            raise ParameterError("VertexAI", str(error)) from error

    return make


def _errors(sdk: Any) -> Any:
    from google.auth.exceptions import GoogleAuthError

    # The SDK uses the one of these that is installed.
    clients = [importlib.import_module(name) for name in ("httpx2", "httpx") if importlib.util.find_spec(name)]
    late = tuple(client.TimeoutException for client in clients)
    lost = tuple(client.TransportError for client in clients)
    return (sdk.errors.APIError, GoogleAuthError, *late, *lost), late, lost


async def _close(client: Any) -> None:
    await client.aio.aclose()
    client.close()


def _settings(settings: Sequence[Mapping[str, Any]] | Mapping[str, str] | None) -> list[dict[str, Any]]:
    if isinstance(settings, Mapping):
        return [{"category": category, "threshold": threshold} for category, threshold in settings.items()]
    return [dict(each) for each in settings or ()]
