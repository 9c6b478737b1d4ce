"""Programs for language models, written as plain Python.

    import sglang_lite as sgl

    @sgl.function
    def capital(s, country):
        s += sgl.system("Answer in a short sentence.")
        s += sgl.user(f"What is the capital of {country}?")
        s += sgl.assistant(sgl.gen("answer", max_tokens=32, temperature=0))

    print(capital.run("Italy")["answer"])  # The capital of Italy is Rome.

Names are imported when they are first used: importing this package loads neither torch nor any
provider's SDK.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sglang_lite.version import __version__

if TYPE_CHECKING:
    from sglang_lite import errors, grammar, testing
    from sglang_lite.compat.sglang.engine import Engine
    from sglang_lite.compat.sglang.runtime import Runtime
    from sglang_lite.constraints.coerce import Grammar
    from sglang_lite.constraints.json_schema.prose import prose
    from sglang_lite.constraints.json_schema.quotes import quote
    from sglang_lite.errors import (
        BackendError,
        BatchError,
        BudgetError,
        CapabilityError,
        CodeError,
        CompileError,
        ConstraintError,
        DownloadError,
        EngineClosedError,
        ModelError,
        OverloadedError,
        ParameterError,
        ProgramError,
        RefusalError,
        RequestAbortedError,
        RequestTimeoutError,
        ResumeError,
        SglError,
        TemplateError,
        ToolError,
        TraceError,
        TruncatedError,
        UnknownVariableError,
        ValueValidationError,
    )
    from sglang_lite.grammar import describe
    from sglang_lite.lang.agent import use_tools
    from sglang_lite.lang.api import (
        assistant,
        assistant_begin,
        assistant_end,
        audio,
        flush_cache,
        function,
        gen,
        gen_int,
        gen_string,
        get_server_info,
        image,
        select,
        separate_reasoning,
        set_default_backend,
        system,
        system_begin,
        system_end,
        user,
        user_begin,
        user_end,
        video,
    )
    from sglang_lite.lang.backend.anthropic import Anthropic
    from sglang_lite.lang.backend.base import Backend as BaseBackend  # so all backends are
    from sglang_lite.lang.backend.crusoe import Crusoe
    from sglang_lite.lang.backend.http.endpoint import RuntimeEndpoint
    from sglang_lite.lang.backend.http.rate_limit import RateLimit
    from sglang_lite.lang.backend.litellm import LiteLLM
    from sglang_lite.lang.backend.openai import OpenAI
    from sglang_lite.lang.backend.profiles.prices import Price, price
    from sglang_lite.lang.backend.remote.fallback import Fallback
    from sglang_lite.lang.backend.scripted import ScriptedBackend
    from sglang_lite.lang.backend.vertexai import VertexAI
    from sglang_lite.lang.choices import (
        exact,
        greedy_token_selection,
        token_length_normalized,
        unconditional_likelihood_normalized,
    )
    from sglang_lite.lang.code_mode.code_tools import CodeTools
    from sglang_lite.lang.function import SglFunction
    from sglang_lite.lang.global_config import global_config
    from sglang_lite.lang.load_state import load
    from sglang_lite.lang.mcp import mcp
    from sglang_lite.lang.plain_text import plain
    from sglang_lite.lang.runs.recording import record
    from sglang_lite.lang.runs.replay import Replay
    from sglang_lite.lang.state import ProgramState, ProgramStateGroup
    from sglang_lite.lang.symbolic.graph import Graph
    from sglang_lite.lang.tools import ToolCall, idempotent
    from sglang_lite.protocol import Choices, Regex, SamplingParams
    from sglang_lite.runtime.config import EngineConfig
    from sglang_lite.srt.server_args import ServerArgs
    from sglang_lite.testing.server import server_for_tests

_HOMES = {
    "constraints.coerce": ("Grammar",),
    "constraints.json_schema.prose": ("prose",),
    "constraints.json_schema.quotes": ("quote",),
    "errors": (
        "BackendError", "BatchError", "BudgetError", "CapabilityError", "CodeError", "CompileError", "ConstraintError",
        "DownloadError", "EngineClosedError", "ModelError", "OverloadedError", "ParameterError", "ProgramError",
        "RefusalError", "RequestAbortedError", "RequestTimeoutError", "ResumeError", "SglError", "TemplateError",
        "ToolError", "TraceError", "TruncatedError", "UnknownVariableError", "ValueValidationError",
    ),
    "grammar": ("describe",),
    "lang.agent": ("use_tools",),
    "lang.api": (
        "assistant", "assistant_begin", "assistant_end", "audio", "flush_cache", "function", "gen", "gen_int",
        "gen_string", "get_server_info", "image", "select", "separate_reasoning", "set_default_backend",
        "system", "system_begin", "system_end", "user", "user_begin", "user_end", "video",
    ),
    "lang.backend.anthropic": ("Anthropic",),
    "lang.backend.base_backend": ("BaseBackend",),
    "lang.backend.crusoe": ("Crusoe",),
    "lang.backend.remote.fallback": ("Fallback",),
    "lang.backend.litellm": ("LiteLLM",),
    "lang.backend.vertexai": ("VertexAI",),
    "lang.backend.openai": ("OpenAI",),
    "lang.backend.profiles.prices": ("Price", "price"),
    "lang.runs.recording": ("record",),
    "lang.runs.replay": ("Replay",),
    "lang.backend.http.rate_limit": ("RateLimit",),
    "lang.backend.http.endpoint": ("RuntimeEndpoint",),
    "lang.backend.scripted": ("ScriptedBackend",),
    "lang.choices": (
        "exact", "greedy_token_selection", "token_length_normalized", "unconditional_likelihood_normalized",
    ),
    "lang.code_mode.code_tools": ("CodeTools",),
    "lang.function": ("SglFunction",),
    "lang.global_config": ("global_config",),
    "lang.load_state": ("load",),
    "lang.mcp": ("mcp",),
    "lang.plain_text": ("plain",),
    "lang.state": ("ProgramState", "ProgramStateGroup"),
    "lang.symbolic.graph": ("Graph",),
    "lang.tools": ("ToolCall", "idempotent"),
    "protocol": ("Choices", "Regex", "SamplingParams"),
    "runtime.config": ("EngineConfig",),
    "srt.server_args": ("ServerArgs",),
    "compat.sglang.engine": ("Engine",),
    "compat.sglang.runtime": ("Runtime",),
    "testing.server": ("server_for_tests",),
}  # fmt: skip
_HOME = {name: f"sglang_lite.{home}" for home, names in _HOMES.items() for name in names}

_MODULES = ("errors", "grammar", "testing")
# Modules whose names can be imported from here, but are not listed by `dir`: they are in sgl.errors
# and sgl.testing, `program.trace().graph()` returns a Graph, and `function` an SglFunction.
_NOT_SHOWN = (
    "errors",
    "lang.code_mode.code_tools",
    "lang.function",
    "lang.symbolic.graph",
    "testing.server",
)

__all__ = [  # a literal, for type checkers
    "Anthropic", "BackendError", "BaseBackend", "BatchError", "BudgetError", "CapabilityError", "Choices", "CodeError",
    "CodeTools", "CompileError", "ConstraintError", "Crusoe", "DownloadError", "Engine", "EngineClosedError",
    "EngineConfig", "Fallback", "Grammar", "Graph", "LiteLLM", "ModelError", "OpenAI", "OverloadedError",
    "ParameterError", "Price", "ProgramError", "ProgramState", "ProgramStateGroup", "RateLimit", "RefusalError",
    "Regex", "Replay", "RequestAbortedError", "RequestTimeoutError", "ResumeError", "Runtime", "RuntimeEndpoint",
    "SamplingParams", "ScriptedBackend", "ServerArgs", "SglError", "SglFunction", "TemplateError", "ToolCall",
    "ToolError", "TraceError", "TruncatedError", "UnknownVariableError", "ValueValidationError", "VertexAI",
    "__version__", "assistant", "assistant_begin", "assistant_end", "audio", "describe", "errors", "exact",
    "flush_cache", "function", "gen", "gen_int", "gen_string", "get_server_info", "global_config", "grammar",
    "greedy_token_selection", "idempotent", "image", "load", "mcp", "plain", "price", "prose", "quote", "record",
    "select", "separate_reasoning", "server_for_tests", "set_default_backend", "system", "system_begin", "system_end",
    "testing", "token_length_normalized", "unconditional_likelihood_normalized", "use_tools", "user", "user_begin",
    "user_end", "video",
]  # fmt: skip


def _suggest_name(name: str) -> str:
    """Returns the end of an error message about an unknown name: a question that suggests a similar
    name, or "" if no name is similar.
    """
    if name.startswith("_"):  # pytest and others look up thousands of these
        return ""
    import difflib

    near = difflib.get_close_matches(name, __all__, n=1, cutoff=0.5)
    return f". Did you mean sgl.{near[0]}?" if near else ""


if not TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name):
        if name in _MODULES:
            return importlib.import_module(f"sglang_lite.{name}")
        if name == "Multi":
            raise AttributeError(
                "sgl.Multi is gone. Several choices are selected with select(…, multi=True)."
            )
        if name not in _HOME:
            raise AttributeError(
                f"module 'sglang_lite' has no attribute {name!r}{_suggest_name(name)}"
            )
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    elsewhere = {name for home in _NOT_SHOWN for name in _HOMES[home]}
    return sorted(set(__all__) - elsewhere)
