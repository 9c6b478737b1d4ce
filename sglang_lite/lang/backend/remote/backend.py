"""Base class of backends on a provider's SDK: features of the model, rejected nodes, and the
strategy for each node.

Independent of the form of a provider's requests and answers.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import msgspec

from sglang_lite.errors import Origin
from sglang_lite.lang.backend.apis.api import Api, ApiRequest, ProviderItems, Target
from sglang_lite.lang.backend.base import Backend, unsupported_feature_error
from sglang_lite.lang.backend.capabilities import Capabilities, Demands
from sglang_lite.lang.backend.http.rate_limit import RateLimit
from sglang_lite.lang.backend.ladder.choose import ANY_CHOICE, capabilities_of, choose_strategy
from sglang_lite.lang.backend.ladder.strategy import POLICIES, Policy, Refusal, Strategy
from sglang_lite.lang.backend.planning import Planner, RunFacts, scores_needed
from sglang_lite.lang.backend.profiles.prices import price as known_price
from sglang_lite.lang.backend.profiles.profile import Profile, check_model_name
from sglang_lite.lang.backend.remote.client import ApiClient
from sglang_lite.lang.backend.remote.connection import ApiConnection, Connector
from sglang_lite.lang.backend.remote.explain import Explainer, Explanation, Price, TracedBackend
from sglang_lite.lang.backend.remote.planner import CallPlanner
from sglang_lite.lang.backend.remote.selecting import select_by_strategy
from sglang_lite.lang.backend.remote.serving import serve
from sglang_lite.lang.backend.rendering import text_outside_turns, with_tools
from sglang_lite.lang.backend.token_counts import TokenUsage
from sglang_lite.lang.expressions import BaseProgram
from sglang_lite.protocol import (
    CapabilityError,
    Choices,
    Constraint,
    Delta,
    Generation,
    Location,
    ParameterError,
    Prompt,
    SamplingParams,
    Selection,
)
from sglang_lite.protocol.anything import Foreign, Json, UserValue
from sglang_lite.text.chat_template import TurnTemplate

# APIs whose samples are whole turns; the others also have items to send back
_SAMPLED = ("chat", "completions")
_Answer = TypeVar("_Answer", Generation, Selection)


class RemoteBackend(Backend):
    """Base class of backends on a provider's SDK.

    Args:
        model_name: name of the model at the provider.
        connect: factory of the SDK's clients.
        profile: features of the model, or a function that determines them when they are first
            needed.
        policy: treatment of features that the model does not support. "strict" rejects the node.
            "emulate" serves it in another way if possible (docs/backends.md, "The ladder") and
            checks the answer. "warn" also leaves out parameters that can't be emulated, and reports
            this in the node's metadata.
        capabilities: features of the model, stated by the user; overrides the profile.
        chat_template: template that renders turns as text.
        rate_limit: limit on calls; None for the limit shared by all backends of this process with
            the same server and key, which adapts to the headers of answers.

    Attributes:
        errors: translator of the SDK's errors.
        strategies: names of the strategies (and "tools") for which the backend can make requests.
            The profile's other strategies are ignored.
        reasoning_effort: amount of reasoning, or None for the model's default.

    Raises:
        BackendError: the SDK is not installed.
        ParameterError: an argument is not valid, or the SDK rejects it.
    """

    enforces = True
    provider = ""  # name of the provider, for errors and metadata
    strategies = frozenset({"json_schema", "strict_tool", "tools"})
    reasoning_effort: str | None = None
    select_params = SamplingParams()  # for the generation that makes a selection

    def __init__(
        self,
        model_name: str,
        connect: Connector,
        profile: Profile | Callable[[], Profile],
        policy: Policy,
        capabilities: Capabilities | None,
        chat_template: TurnTemplate,
        rate_limit: RateLimit | None = None,
    ) -> None:
        super().__init__()
        check_model_name(model_name)
        if policy not in POLICIES:
            raise ParameterError(
                "policy",
                f"{policy!r:.60} is not a policy.",
                hint=f"Use {', '.join(map(repr, POLICIES))}.",
            )
        if rate_limit is not None and not isinstance(rate_limit, RateLimit):
            raise ParameterError("rate_limit", f"{rate_limit!r:.60} is not a RateLimit.")
        self.policy = policy
        self._finding = threading.Lock()
        self._find = profile
        self._stated = capabilities
        self._found: tuple[Profile, Capabilities] | None = None
        self.model_name = model_name
        self.chat_template = chat_template
        self._name = f"{type(self).__name__}({model_name!r})"
        self.token_usage = TokenUsage()
        self._connection = ApiConnection(type(self).__name__, connect, rate_limit)
        self.errors = self._connection.error_translator(
            self._name, Origin(self.provider, model_name)
        )
        self._client = ApiClient(self._connection, self.errors, self.token_usage, ProviderItems())

    def client(self) -> Foreign:
        """Returns the SDK's client for the running event loop."""
        return self._connection.client()

    def shutdown(self) -> None:
        """Closes the connections. The next call opens new ones."""
        self._connection.close()

    @property
    def control_texts(self) -> Sequence[str]:
        return ()  # APIs treat all text as text

    def get_model_name(self) -> str:
        return self.model_name

    def identity(self) -> tuple[Json, ...]:
        return *super().identity(), self._connection.server

    # ---------------------------------------------------------------------- what is served, and how

    @property
    def profile(self) -> Profile:
        """Profile of the model. If the kind of server has to be looked up, this is done once."""
        return self._known[0]

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override] # found out on first use
        return self._known[1]

    def planner(self, run: RunFacts) -> Planner:
        return CallPlanner(self, run, self.shares_prompt_cost)

    @property
    def _known(self) -> tuple[Profile, Capabilities]:
        if self._found is None:
            with self._finding:
                if self._found is None:
                    found = self._find if isinstance(self._find, Profile) else self._find()
                    if self._stated is not None:
                        found = found.with_capabilities(self._stated)
                    # only strategies that have a request
                    found = self._find = found.restrict_to_strategies(self.strategies)
                    self._found = found, capabilities_of(found, self.policy)
        return self._found

    def explain(
        self,
        program: BaseProgram,
        *,
        explore: int = 16,
        params: SamplingParams = SamplingParams(),
        retries: int = 0,
        count: Callable[[str], int] | None = None,
        price: Price | None = known_price,
        **arguments: UserValue,
    ) -> Explanation:
        """Explains how a program's nodes would be served, without making a call. Lists each node's
        strategy, its number of calls and tokens, and its price, or the reason why it is rejected.

        Args:
            program: program to explain.
            explore: maximum number of paths through the body to follow.
            params, retries: settings of the run, for nodes that don't set them.
            count: function that counts the tokens of a text, or None for a quarter of its
                characters.
            price: function that returns the dollars for a model's usage; by default, the prices of
                profiles/prices.toml. None for no prices.
            **arguments: arguments of the program; missing ones are symbols, as in `program.trace`.

        Raises:
            TraceError: the body branches on a value that only a run knows, in a way that can't be
                explored.
        """
        facts = RunFacts.for_new_run(params, program.api_drafts)
        traced = program.trace(backend=TracedBackend(self, facts), explore=explore, **arguments)
        return Explainer(self, params, retries, count, price).explain(
            traced.graph(), traced.answers
        )

    def strategy(self, demands: Demands) -> Strategy | Refusal:
        """Returns the strategy for a node, or the reason why the node is rejected."""
        return choose_strategy(
            self.profile, self.policy, replace(demands, effort=self.reasoning_effort)
        )

    def check(self, node: object, demands: Demands, where: Location | None) -> None:
        if demands.kind == "select":
            choices = demands.constraint if isinstance(demands.constraint, Choices) else ANY_CHOICE
            demands = self.selection(choices.options, scores=demands.scores)
        found = self.strategy(demands)
        if isinstance(found, Refusal):
            raise unsupported_feature_error(self, node, found.feature, found.instead, where)

    def shares_prompt_cost(
        self, params: SamplingParams, constraint: Constraint | None, count: int
    ) -> bool:
        """Returns True if one call for `count` samples is cheaper than separate calls, because the
        provider charges for the prompt only once.
        """
        if self.profile.api not in _SAMPLED:
            return False
        found = self.strategy(Demands("gen", msgspec.structs.replace(params, n=count), constraint))
        return isinstance(found, Strategy) and found.native and found.api in _SAMPLED

    def _strategy_or_raise(self, demands: Demands) -> Strategy:
        found = self.strategy(demands)
        if isinstance(found, Refusal):
            raise CapabilityError(f"{self._name} can't honour {found.feature}.", hint=found.instead)
        return found

    async def agenerate(
        self, prompt: Prompt, params: SamplingParams, constraint: Constraint | None, *, stream: bool
    ) -> AsyncGenerator[Delta | Generation, None]:
        strategy = self._strategy_or_raise(Demands("gen", params, constraint))
        self.check_prompt(prompt)
        if prompt.tools is not None and self.capabilities.continues:
            prompt = with_tools(prompt, self.get_chat_template())
        async for event in serve(self, prompt, params, constraint, strategy, stream=stream):
            yield self._with_cost(event) if isinstance(event, Generation) else event

    def _with_cost(self, answer: _Answer) -> _Answer:
        """Adds the cost of an answer in dollars to its metadata. The cost is None if a price is
        unknown.
        """
        return msgspec.structs.replace(
            answer, meta={**answer.meta, "cost": known_price(answer.usage, self.model_name)}
        )

    def selection(self, choices: Sequence[str], *, scores: bool = False) -> Demands:
        """Returns the demands of a selection among the given choices. Its strategy is chosen from
        them.
        """
        params = self.select_params
        if self.profile.supports("temperature"):
            params = msgspec.structs.replace(params, temperature=0.0)
        return Demands("select", params, Choices(tuple(choices)), scores)

    async def aselect(
        self, prompt: Prompt, choices: Sequence[str], *, unconditional: bool
    ) -> Selection:
        """Makes the model choose. The result has a score for each choice if the strategy provides
        scores; otherwise it has only the picked choice.
        """
        choices = list(dict.fromkeys(choices))
        demands = self.selection(choices, scores=scores_needed.get())
        strategy = self._strategy_or_raise(demands)
        if unconditional:
            raise CapabilityError(
                f"{self._name} can't score choices without the prompt.",
                hint="Use another choices_method, or a local engine.",
            )
        if not all(choices) and strategy.name in (
            "decisions",
            "token_logprobs",
            "logit_bias_steps",
        ):
            raise CapabilityError(
                f"{self._name} can't score an empty choice.",
                hint="Leave it out, or use a local engine.",
            )
        self.check_prompt(prompt)
        if strategy.name == "decisions":
            return await self.decide(prompt, choices)
        return self._with_cost(await select_by_strategy(self, prompt, demands, strategy))

    def call_api(
        self,
        prompt: Prompt,
        params: SamplingParams,
        strategy: Strategy,
        *,
        constrained: bool,
        stream: bool,
    ) -> AsyncGenerator[Delta | Generation, None]:
        """Makes one call to the provider's API. Also sends the items that the API expects back from
        earlier turns. Yields deltas if `stream`, then the samples as the API returns them, without
        checking or converting them.

        Args:
            constrained: whether the answer has a constraint, so that an answer that was cut short
                is an error.
        """
        api, target = self.target(strategy)
        request = ApiRequest(
            target,
            prompt,
            params,
            strategy.shape,
            self._client.provider_items.items_by_message(prompt.messages),
        )
        return self._client.request_answer(
            api, request, self.tokenizer, constrained=constrained, stream=stream
        )

    def target(self, strategy: Strategy) -> tuple[Api, Target]:
        """Returns the API that a strategy calls, and the model's settings for it.

        Raises:
            CapabilityError: the subclass does not define this method.
        """
        raise CapabilityError(
            f"{self._name} has no `target`.", hint="Define `target` in the subclass."
        )

    async def decide(self, prompt: Prompt, choices: Sequence[str]) -> Selection:
        """Asks the provider's decisions endpoint to pick a choice. A subclass with "decisions" in
        its `strategies` must define this method.
        """
        raise CapabilityError(
            f"{self._name} has no `decide`.",
            hint='Define `decide` in the subclass, or remove "decisions" from its strategies.',
        )

    def check_prompt(self, prompt: Prompt) -> None:
        """Rejects a prompt if a chat API would show only part of it to the model.

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
                f"{self._name} can't continue text that is already in the assistant's turn: {prompt.partial[-60:]!r}.",
                hint="Move it to the user's turn, begin a new turn for each generation, or use a local engine.",
            )
        outside = text_outside_turns(prompt, self.get_chat_template())
        if outside:
            raise CapabilityError(
                f"{self._name} would not see the text outside the turns: {outside[:60]!r}.",
                hint="Put it into a turn: sgl.system(…) or sgl.user(…).",
            )
