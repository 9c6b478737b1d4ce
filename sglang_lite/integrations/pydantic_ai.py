"""Model for Pydantic AI. Needs the package pydantic-ai-slim[openai], whose code for chat
completions it uses.
"""

from __future__ import annotations

from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.profiles.openai import OpenAIModelProfile
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

from sglang_lite.engine.engine import Engine
from sglang_lite.integrations.openai import async_client

# Output types become constraints, even together with tools.
_PROFILE = OpenAIModelProfile(
    supports_json_schema_output=True,
    supports_json_object_output=True,
    default_structured_output_mode="native",
    openai_supports_strict_tool_definition=True,
)


class SglangLiteModel(OpenAIChatModel):
    """Pydantic AI model that runs on an engine of this process.

    Args:
        engine: the engine, which stays open.
        settings: default settings of calls, which the agent can override.
    """

    def __init__(self, engine: Engine, *, settings: ModelSettings | None = None) -> None:
        provider = OpenAIProvider(openai_client=async_client(engine))
        super().__init__(engine.model_name, provider=provider, profile=_PROFILE, settings=settings)

    @property
    def system(self) -> str:
        return "sglang_lite"
