"""Backend for Crusoe's managed inference: OpenAI's protocol with its own profile."""

from __future__ import annotations

import os
from typing import Any

from sglang_lite.lang.argument_names import explains_wrong_arguments
from sglang_lite.lang.backend.openai import OpenAI
from sglang_lite.protocol import ParameterError
from sglang_lite.protocol.anything import Foreign
from sglang_lite.text.chat_template import TurnTemplate

# Sources: docs.vllm.ai/en/latest/deployment/frameworks/crusoe and docs.crusoecloud.com, read on
# 2026-11-22.
BASE_URL = "https://api.inference.crusoecloud.com/v1"


class Crusoe(OpenAI):
    """Backend for models on Crusoe's managed inference, which serves OpenAI's chat API like vLLM.

    Args:
        model_name: name of the model.
        api_key: API key, or None for CRUSOE_API_KEY of the environment.
        base_url: address of the API, or None for Crusoe's own.
        chat_template: template that renders turns as text in `state.text()`.
        **kwargs: further arguments of `OpenAI`: `profile`, `policy`, `client`, `timeout`,
            `max_retries` …

    Raises:
        ParameterError: the client rejects the arguments, or no API key is given.
    """

    provider = "crusoe"

    @explains_wrong_arguments
    def __init__(
        self,
        model_name: str,
        api_key: str | None = None,
        base_url: str | None = None,
        chat_template: TurnTemplate | None = None,
        **kwargs: Foreign,
    ) -> None:
        connection: dict[str, Any] = {}
        if kwargs.get("client") is None:
            key = api_key or os.environ.get("CRUSOE_API_KEY")
            if not key:
                raise ParameterError(
                    "api_key", "no key is given.", hint="Give api_key=, or set CRUSOE_API_KEY."
                )
            connection = {"api_key": key, "base_url": base_url or BASE_URL}
        elif api_key is not None or base_url is not None:
            raise ParameterError(
                "client", "api_key= and base_url= have no effect beside it.", hint="Leave them out."
            )
        super().__init__(
            model_name, True, chat_template, **{"profile": "crusoe", **connection, **kwargs}
        )
