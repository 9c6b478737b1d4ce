"""`Fallback`: a backend that sends each node to the first of several backends, and to the next one
if that backend is busy or can't be reached.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec

from sglang_lite.lang.argument_names import explains_wrong_arguments
from sglang_lite.lang.backend.base import Backend, name_of, name_with_model
from sglang_lite.lang.backend.capabilities import (
    Capabilities,
    Demands,
    TurnRules,
    combine_turn_rules,
)
from sglang_lite.lang.backend.default import BackendLike, as_backend
from sglang_lite.lang.backend.planning import Planner, RunFacts
from sglang_lite.lang.backend.remote.planner import CallPlanner
from sglang_lite.lang.backend.rendering import rerender_with_template
from sglang_lite.lang.backend.token_counts import add_unreported_usage
from sglang_lite.protocol import (
    BackendError,
    Constraint,
    Delta,
    Generation,
    Location,
    ParameterError,
    Prompt,
    SamplingParams,
    Selection,
)
from sglang_lite.protocol.anything import Json

_Answer = TypeVar("_Answer", Generation, Selection)
# Flags that are set if all backends have them.
_SHARED = ("select", "scores", "continues", "prefill", "images", "videos", "sounds", "winds_down")
# rules of a backend that has none: it continues any text
_CONTINUES = TurnRules("continued", "continued")


class Fallback(Backend):
    """Backend that tries several backends in order. Each node is sent to the first one. The next
    one is tried only after a temporary error (`error.retryable`, such as an overloaded server or a
    timeout) and only if no part of an answer was shown. Other errors are raised immediately, such
    as a refusal or an invalid value. The node's metadata names the backend that answered
    (`backend`) and lists those that failed (`failed`: pairs of a name and an error).

    Args:
        backends: at least two backends, in order of preference. A node that one of them can't
            honour is refused, because any of them may have to answer.

    Raises:
        ParameterError: fewer than two backends are given, or one has SGLang's blocking hooks.
    """

    @explains_wrong_arguments
    def __init__(self, backends: Sequence[BackendLike]) -> None:
        super().__init__()
        if not isinstance(backends, list | tuple) or len(backends) < 2:
            raise ParameterError("backends", "give a list of at least two backends.")
        self.backends = tuple(map(as_backend, backends))
        for backend in self.backends:
            if not backend.capabilities.reads_prompts:
                raise ParameterError(
                    "backends",
                    f"{name_of(backend)} has SGLang's blocking hooks.",
                    hint="Write agenerate and aselect.",
                )
        self.chat_template = self.backends[0].get_chat_template()
        self.capabilities = _common_capabilities(
            [backend.capabilities for backend in self.backends]
        )
        self.enforces = all(backend.enforces for backend in self.backends)

    def get_model_name(self) -> str:
        return ", ".join(backend.get_model_name() for backend in self.backends)

    def planner(self, run: RunFacts) -> Planner | None:
        return None if self.capabilities.turns is None else CallPlanner(self, run)

    def identity(self) -> tuple[Json, ...]:
        return *super().identity(), *(backend.identity() for backend in self.backends)

    def check(self, node: object, demands: Demands, where: Location | None) -> None:
        for backend in self.backends:
            backend.check(node, demands, where)

    async def agenerate(
        self, prompt: Prompt, params: SamplingParams, constraint: Constraint | None, *, stream: bool
    ) -> AsyncGenerator[Delta | Generation, None]:
        failed = list[tuple[str, str]]()
        for backend in self.backends:
            begun = False
            try:
                own_prompt = self._render_for(prompt, backend)
                async with aclosing(
                    backend.agenerate(own_prompt, params, constraint, stream=stream)
                ) as events:
                    async for event in events:
                        begun = True
                        yield (
                            self._record_answering_backend(backend, event, failed)
                            if isinstance(event, Generation)
                            else event
                        )
            except BackendError as error:
                if begun or not error.retryable or backend is self.backends[-1]:
                    raise
                self._record_failed_backend(failed, backend, error)
            else:
                return

    async def aselect(
        self, prompt: Prompt, choices: Sequence[str], *, unconditional: bool
    ) -> Selection:
        failed = list[tuple[str, str]]()
        for backend in self.backends:
            try:
                picked = await backend.aselect(
                    self._render_for(prompt, backend), choices, unconditional=unconditional
                )
                return self._record_answering_backend(backend, picked, failed)
            except BackendError as error:
                if not error.retryable or backend is self.backends[-1]:
                    raise
                self._record_failed_backend(failed, backend, error)
        raise AssertionError("unreachable")

    def shutdown(self) -> None:
        for backend in self.backends:
            backend.shutdown()

    @staticmethod
    def _record_failed_backend(
        failed: list[tuple[str, str]], backend: Backend, error: BackendError
    ) -> None:
        failed.append((name_with_model(backend), str(error)))
        if error.usage is not None:
            add_unreported_usage(error.usage)  # the answer will carry only its own

    def _render_for(self, prompt: Prompt, backend: Backend) -> Prompt:
        """Renders the prompt with a backend's own chat template."""
        return (
            prompt
            if backend is self.backends[0]
            else rerender_with_template(prompt, backend.get_chat_template(), self.chat_template)
        )

    def _record_answering_backend(
        self, backend: Backend, answer: _Answer, failed: Sequence[Any]
    ) -> _Answer:
        known = {"failed": tuple(failed)} if failed else {}
        meta = {**answer.meta, "backend": name_with_model(backend), **known}
        return msgspec.structs.replace(answer, meta=meta)


def _common_capabilities(each: Sequence[Capabilities]) -> Capabilities:
    """Returns the capabilities that all of the backends have."""
    limited = [can.params for can in each if can.params is not None]
    rules = [can.turns for can in each]
    return Capabilities(
        constraints=frozenset.intersection(*(can.constraints for can in each)),
        params=frozenset.intersection(*limited) if limited else None,
        **{flag: all(getattr(can, flag) for can in each) for flag in _SHARED},
        turns=combine_turn_rules([own or _CONTINUES for own in rules]) if any(rules) else None,
        caches_prompts=each[0].caches_prompts,
    )
