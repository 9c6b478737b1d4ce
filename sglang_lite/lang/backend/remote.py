"""Base of backends on a provider's SDK: the client, checks against the model, constraints as JSON, errors.

Nothing here knows a provider's requests or answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from sglang_lite.lang.backend.base_backend import BaseBackend, Capabilities
from sglang_lite.lang.backend.ladder import (
    POLICIES,
    Asked,
    Policy,
    Refusal,
    Rung,
    capabilities_of,
    rung_of,
    turn_rules_of,
)
from sglang_lite.lang.backend.profile import Profile
from sglang_lite.lang.backend.remote_api import Api, PartialAnswer, Question, Reader
from sglang_lite.lang.backend.serving import served
from sglang_lite.lang.backend.turns import TurnRules
from sglang_lite.lang.chat_template import ChatTemplate as PlainTemplate
from sglang_lite.lang.concurrency.loop import executor
from sglang_lite.protocol import (
    BackendError,
    CapabilityError,
    Choices,
    Constraint,
    Delta,
    Generation,
    Location,
    Message,
    OverloadedError,
    ParameterError,
    Prompt,
    RefusalError,
    RequestTimeoutError,
    SamplingParams,
    Selection,
    Unset,
    Usage,
    ValueValidationError,
)
from sglang_lite.text.chat_template import ChatTemplate


class TokenUsage:
    """The tokens a backend has used since it was made, or reset."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.prompt_tokens = self.completion_tokens = 0


class RemoteBackend(BaseBackend):
    """A backend on a provider's SDK.

    Args:
        model_name: as the provider calls it.
        sdk: name of the SDK's package, which is also the extra to install.
        failure: name of the SDK's base of errors.
        connect: makes an asynchronous client, given the SDK.
        profile: what the model takes, or what finds that out when it is first needed.
        policy: what becomes of what the model does not take by itself. "strict" refuses it. "emulate" serves it in
            another way where there is one (docs/backends.md, "The ladder"), and the answer is checked. "warn" leaves
            out what can't be emulated as well, and says so in the node's metadata.
        capabilities: what the user says that the model can do; it wins over the profile.
        chat_template: how roles become text.

    Raises:
        BackendError: the SDK is not installed.
        ParameterError: it refuses the arguments.
    """

    enforces = True
    select_params = SamplingParams()  # of the generation that makes a selection

    def __init__(
        self,
        model_name: str,
        sdk: str,
        failure: str,
        connect: Callable[[Any], Any],
        profile: Profile | Callable[[], Profile],
        policy: Policy,
        capabilities: Capabilities | None,
        chat_template: ChatTemplate,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        if policy not in POLICIES:
            raise ParameterError("policy", f"{policy!r:.60} is none.", hint=f"Use {', '.join(map(repr, POLICIES))}.")
        self.policy, self._asking = policy, threading.Lock()
        self._find = _finder(profile, capabilities)
        self._found: tuple[Profile, Capabilities, TurnRules] | None = None
        try:
            self.sdk: Any = importlib.import_module(sdk)
        except ImportError as error:
            raise BackendError(f"{name} needs the {sdk} SDK.", hint=f"pip install 'sglang-lite[{sdk}]'") from error
        self.model_name, self.chat_template = model_name, chat_template
        self._name = f"{name}({model_name!r})"
        self.token_usage = TokenUsage()
        self._connect = connect
        self._failure: type[Exception] = getattr(self.sdk, failure)
        try:
            self._client: Any = connect(self.sdk)
        except self._failure as error:
            raise ParameterError(name, str(error)) from error
        self._loop: asyncio.AbstractEventLoop | None = None

    def client(self) -> Any:
        """The client. One that another event loop has used (before a fork of the process, say) is not used again."""
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop not in (None, loop):
            self._client = self._connect(self.sdk)
        self._loop = loop
        return self._client

    def shutdown(self) -> None:
        """Closes the connections; the next call would open new ones."""
        client, loop, self._client, self._loop = self._client, self._loop, None, None
        if loop is not None and loop is executor().loop:
            asyncio.run_coroutine_threadsafe(client.close(), loop).result()

    def get_model_name(self) -> str:
        return self.model_name

    def identity(self) -> tuple[Any, ...]:
        return *super().identity(), str(getattr(self._client, "base_url", ""))

    # -------------------------------------------------------------------------------- what is served, and how

    @property
    def profile(self) -> Profile:
        """What the model takes. A server that has to be asked what it is, is asked once."""
        return self._known[0]

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override] # they are found out when they are first needed
        return self._known[1]

    @property
    def turn_rules(self) -> TurnRules:
        return self._known[2]

    @property
    def _known(self) -> tuple[Profile, Capabilities, TurnRules]:
        if self._found is None:
            with self._asking:
                if self._found is None:
                    profile = self._find()
                    self._find = lambda: profile  # what found it is not needed any more
                    self._found = (
                        profile, capabilities_of(profile, self.policy), turn_rules_of(profile, self.policy)
                    )  # fmt: skip
        return self._found

    def rung(self, asked: Asked) -> Rung | Refusal:
        """The rung on which a node is served, or why it is not."""
        return rung_of(self.profile, self.policy, asked)

    def check(
        self, node: object, params: SamplingParams, constraint: Constraint | None, where: Location | None
    ) -> None:
        found = self.rung(Asked("gen", params, constraint))
        if isinstance(found, Refusal):
            raise self.refusal(node, found.feature, found.instead, where)

    def _rung(self, asked: Asked) -> Rung:
        found = self.rung(asked)
        if isinstance(found, Refusal):
            raise CapabilityError(f"{self._name} can't honour {found.feature}.", hint=found.instead)
        return found

    async def agenerate(
        self, prompt: Prompt, params: SamplingParams, constraint: Constraint | None, *, stream: bool
    ) -> AsyncGenerator[Delta | Generation, None]:
        rung = self._rung(Asked("gen", params, constraint))
        self.check_prompt(prompt)
        async for event in served(self, prompt, params, constraint, rung, stream=stream):
            yield event

    async def aselect(self, prompt: Prompt, choices: Sequence[str], *, unconditional: bool) -> Selection:
        """Has the model choose: with probabilities where it has an endpoint for that, else it only picks."""
        params = self.select_params
        if self.profile.takes("temperature"):
            params = msgspec.structs.replace(params, temperature=0.0)
        constraint = Choices(tuple(choices))
        rung = self._rung(Asked("select", params, constraint))
        if unconditional:
            raise CapabilityError(
                f"{self._name} scores nothing without the prompt.",
                hint="Use another choices_method, or a local engine.",
            )
        self.check_prompt(prompt)
        if rung.name == "decisions":
            return await self.decide(prompt, choices)
        events = served(self, prompt, params, constraint, rung, stream=False)
        (picked,) = [event async for event in events if isinstance(event, Generation)]
        return Selection((), picked.usage, picked.text, picked.meta)

    def call(
        self, prompt: Prompt, params: SamplingParams, rung: Rung, *, constrained: bool, stream: bool
    ) -> AsyncGenerator[Delta | Generation, None]:
        """Makes one call of the provider's API: see `serving.Caller`."""
        raise NotImplementedError

    async def decide(self, prompt: Prompt, choices: Sequence[str]) -> Selection:
        """Asks an endpoint for decisions, where the profile has one."""
        raise NotImplementedError

    def check_prompt(self, prompt: Prompt) -> None:
        """Refuses a prompt that a chat API would be shown only in part.

        Raises:
            CapabilityError: the model can't continue this text.
        """
        if self.capabilities.continues:
            return
        if prompt.role != "assistant":
            raise CapabilityError(
                f"{self._name} can't continue text outside an assistant's turn.",
                hint="Write turns: s += sgl.user(…), then s += sgl.assistant(sgl.gen(…)).",
            )
        if prompt.partial.strip() and not self.capabilities.prefill:
            raise CapabilityError(
                f"{self._name} can't continue what stands in the assistant's turn already: {prompt.partial[-60:]!r}.",
                hint="Say it in the user's turn, begin a new turn for each generation, or use a local engine.",
            )
        outside = self._outside(prompt)
        if outside:
            raise CapabilityError(
                f"{self._name} would not be shown the text outside the turns: {outside[:60]!r}.",
                hint="Put it into a turn: sgl.system(…) or sgl.user(…).",
            )

    def _outside(self, prompt: Prompt) -> str:
        """The text before the first turn that does not follow on the one before it. Blanks don't count."""
        template = self.get_chat_template()
        assert template is not None
        rest, roles = _squeezed(prompt.text), list[dict[str, str]]()
        for message in (*prompt.messages, Message("assistant", (prompt.partial,))):
            prefix, suffix = map(_squeezed, template.get_prefix_and_suffix(message.role, roles))
            if not rest.startswith(prefix):
                return rest.partition(prefix)[0]
            end = _squeezed("".join(part for part in message.content if isinstance(part, str))) + suffix
            at = rest.find(end, len(prefix))
            if at > len(prefix) and message.role != "assistant":
                return rest[len(prefix) : at]
            if at < 0:  # the open turn, or one that is not all shown (reasoning)
                break
            rest = rest[at + len(end) :]
            roles.append({"role": message.role, "content": ""})
        return ""

    # --------------------------------------------------------------------------------------- answers

    async def ask(
        self, api: Api, question: Question, *, constrained: bool, stream: bool
    ) -> AsyncGenerator[Delta | Generation, None]:
        """Makes one call: the deltas of a stream, and the samples at its end.

        Raises:
            BackendError: the call failed, or what came is no answer.
        """
        request, reader = api.request(question), api.reader()
        began, first = time.perf_counter(), 0.0
        with self.errors():
            create = api.create(self.client())
            if stream:
                async with await create(**request, **api.streamed) as events:
                    async for event in events:
                        for delta in reader.event(event):
                            first = first or time.perf_counter() - began
                            if delta.text:
                                yield delta
            else:
                reader.whole(await create(**request))
        times = {"first_token_s": first, "total_s": time.perf_counter() - began}
        usage = msgspec.structs.replace(reader.usage, **times)
        for each in self._samples(reader, question.params, usage, constrained=constrained):
            yield each

    def _samples(
        self, reader: Reader, params: SamplingParams, usage: Usage, *, constrained: bool
    ) -> Iterator[Generation]:
        """The samples of an answer that has been read."""
        if reader.failure:
            raise BackendError(f"{self._name}: {reader.failure} (response {reader.meta['id']})", hint="Try again.")
        wanted = 1 if isinstance(params.n, Unset) else params.n
        if len(reader.samples) != wanted:
            raise self.unreadable(f"{len(reader.samples)} answers came where {wanted} should have")
        for index, sample in sorted(reader.samples.items()):
            if sample.reason is None:
                raise self.unreadable("the stream ended before the answer was complete")
            # The cost is that of all samples together: the first one has it.
            cost = Usage() if index else usage
            yield self.generation(sample, params, cost, reader.meta, index, constrained=constrained)

    def generation(
        self,
        said: PartialAnswer,
        params: SamplingParams,
        usage: Usage,
        meta: Mapping[str, Any],
        index: int = 0,
        *,
        constrained: bool,
    ) -> Generation:
        """A finished sample, as it was said. Its usage is added to the totals.

        Raises:
            RefusalError: there is no answer.
            ValueValidationError: a constrained one was cut short.
            BackendError: it is empty.
        """
        self.token_usage.prompt_tokens += usage.prompt_tokens
        self.token_usage.completion_tokens += usage.completion_tokens
        if said.refusal:
            raise RefusalError(f"{self._name} refused to answer: {said.refusal}", hint="Change the prompt.")
        if said.cut and constrained:
            problem = f"{self._name} was cut short after {usage.completion_tokens} tokens."
            raise ValueValidationError(problem, text=said.text, hint="Raise max_tokens.")
        if not said.text and (said.cut or isinstance(params.stop, Unset)):
            spent = f" after {usage.completion_tokens} tokens, which reasoning may have used up" if said.cut else ""
            raise BackendError(
                f"{self._name} answered with no text{spent}.", hint="Raise max_tokens, or change the prompt."
            )
        return Generation(
            said.text,
            finish_reason="length" if said.cut else "stop",
            matched=said.matched,
            usage=usage,
            index=index,
            output_logprobs=said.logprobs,
            meta=meta,
        )

    def unreadable(self, what: str) -> BackendError:
        """The error for an answer that is none."""
        return BackendError(f"{self._name}: {what}.", hint="Check what listens at base_url, or try again.")

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Turns what the SDK raises inside into one of our errors."""
        import httpx2

        try:
            yield
        except self._failure as error:
            # An API may repeat its key: then not even the cause is shown.
            raise self._translated(error) from (error if self._redacted(str(error)) == str(error) else None)
        except httpx2.HTTPError as error:  # while an answer is read the SDKs leave it as it is
            raise self.unreadable(f"the connection failed in the middle of the answer ({error})") from error
        except json.JSONDecodeError as error:
            raise self.unreadable(f"the answer is not JSON ({error})") from error

    def _translated(self, error: Exception) -> BackendError:
        """Translates an error of the SDK, which has done its retries, into one of ours."""
        retries = "max_retries= of the backend says how often it is tried again"
        if isinstance(error, self.sdk.APITimeoutError):
            return RequestTimeoutError(
                f"{self._name} did not answer in time.", hint=f"timeout= sets the time, {retries}."
            )
        if isinstance(error, self.sdk.APIConnectionError):
            why = f"{type(error.__cause__).__name__}: {error.__cause__}"
            return BackendError(f"{self._name}: the connection failed ({why}).", hint=f"Check base_url; {retries}.")
        status, body = getattr(error, "status_code", 0), getattr(error, "body", None)
        told = body.get("error", body) if isinstance(body, dict) else body
        told = told if isinstance(told, dict) else {"message": told}
        kinds = {str(told.get("type")), str(told.get("code"))}
        message = self._redacted(str(told.get("message") or getattr(error, "message", error))[:1000])
        request = getattr(error, "request_id", None)
        known = [f"HTTP {status}"] * (status >= 400) + [f"request {request}"] * bool(request)
        text = f"{self._name}: {message}" + (f" ({', '.join(known)})" if known else "")
        if kinds & _BUSY or (status in (429, 503, 529) and "insufficient_quota" not in kinds):
            return OverloadedError(text, hint=f"Run fewer programs at a time (num_threads=); {retries}.")
        if status in (408, 504):
            return RequestTimeoutError(text, hint=f"timeout= sets the time, {retries}.")
        hint = _HINTS.get(status, "Change what the message names." if 400 <= status < 500 else f"Try again; {retries}.")
        return BackendError(text, hint=hint)

    def _redacted(self, text: str) -> str:
        for secret in (getattr(self._client, "api_key", None), getattr(self._client, "auth_token", None)):
            if secret and len(str(secret)) > 8:
                text = text.replace(str(secret), "…")
        return text


def _finder(profile: Profile | Callable[[], Profile], told: Capabilities | None) -> Callable[[], Profile]:
    """Finds the profile, with what the user has said over it."""

    def find() -> Profile:
        found = profile if isinstance(profile, Profile) else profile()
        return found if told is None else found.with_capabilities(told)

    return find


_BUSY = {"overloaded_error", "rate_limit_error", "rate_limit_exceeded"}
_HINTS = {
    401: "Check api_key=, or the variable of the environment that it is taken from.",
    402: "Check the account's billing.",
    403: "Check what the API key may do.",
    404: "Check model_name= and base_url=.",
    413: "Shorten the prompt.",
    429: "Check the account's quota and billing.",
}


def without_marks(template: ChatTemplate) -> ChatTemplate:
    """A template for an API that renders turns itself: without stop strings and placeholders of images."""
    return replace(template, stop_str=(), image_token="") if isinstance(template, PlainTemplate) else template


def _squeezed(text: str) -> str:
    return "".join(text.split())
