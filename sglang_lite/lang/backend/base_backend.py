"""Interface between the interpreter and the implementations that generate text.

A backend implements either the native hooks (`agenerate` and `aselect`: coroutines that can stream) or SGLang's
blocking hooks (`generate`, `generate_stream`, `select`), which run on a bounded pool of threads.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from sglang_lite.lang.backend.capabilities import CONSTRAINT_NAMES
from sglang_lite.lang.backend.capabilities import EVERYTHING as EVERYTHING
from sglang_lite.lang.backend.capabilities import Capabilities as Capabilities
from sglang_lite.lang.backend.profiles.prices import Price, find_price
from sglang_lite.lang.concurrency.pool import ThreadPool
from sglang_lite.program.choosing import ChoicesDecision, ChoicesSamplingMethod
from sglang_lite.protocol import (
    CapabilityError,
    Constraint,
    Delta,
    Generation,
    Location,
    ProgramSink,
    Prompt,
    SamplingParams,
    Selection,
    Usage,
)
from sglang_lite.protocol.anything import Json
from sglang_lite.protocol.sampling import given_values
from sglang_lite.text.chat_template import TurnTemplate

if TYPE_CHECKING:
    from sglang_lite.lang.backend.planning import Planner, RunFacts
    from sglang_lite.lang.backend.token_counts import Tokenizer
    from sglang_lite.lang.execution.push_down import ProgramAtBackend
    from sglang_lite.lang.execution.stream_executor import StreamExecutor
    from sglang_lite.lang.expressions import SglSamplingParams


_NODE_HOOKS = ("agenerate", "aselect", "generate", "generate_stream", "select")


def priority_keywords(priority: int) -> dict[str, int]:
    """Keyword arguments for a priority: empty if it is 0, so that backends without priorities need no parameter for
    it."""
    return {"priority": priority} if priority else {}


class BaseBackend:
    """Base class of backends. Subclass it to write your own.

    Attributes:
        capabilities: features that the backend supports with its model.
        enforces: True if answers satisfy their constraints or an error is raised. If False, every answer is validated
            against its constraint.
        chat_template: template that renders turns as text, or None.
        support_concate_and_append: SGLang's flag for joining KV caches. Without effect: texts are joined in any case.
        max_threads: maximum number of threads that run blocking hooks.
        unset_max_tokens: token limit of a generation that sets no `max_tokens`, or None if the backend sets none.
        price: price of the model's tokens, which overrides the price table.
        tokenizer: tokenizer of the model, with which budgets count what a server does not report; None if unknown.
    """

    capabilities: Capabilities = EVERYTHING
    enforces = False
    support_concate_and_append = False
    max_threads = 64
    price: Price | None = None
    tokenizer: Tokenizer | None = None
    unset_max_tokens: int | None = 128

    def __init__(self) -> None:
        self.chat_template: TurnTemplate | None = None

    # ----------------------------------------------------------------------------------- native hooks

    def agenerate(
        self, prompt: Prompt, params: SamplingParams, constraint: Constraint | None, *, stream: bool
    ) -> AsyncGenerator[Delta | Generation, None]:
        """Generates `params.n` continuations of the prompt. Yields deltas if `stream`, and a Generation at the end of
        each sample."""
        raise CapabilityError(f"{type(self).__name__} can't generate: it has neither agenerate nor generate.")

    async def aselect(self, prompt: Prompt, choices: Sequence[str], *, unconditional: bool) -> Selection:
        """Scores the choices as continuations of the prompt and, if `unconditional`, also without the prompt."""
        raise CapabilityError(f"{type(self).__name__} can't select: it has neither aselect nor select.")

    def open_program(self, sink: ProgramSink, *, stream: bool, priority: int = 0) -> ProgramAtBackend:
        """Opens a program, to which a run adds its nodes while earlier ones are played. A backend that defines this
        hook receives whole runs; other backends receive one call per node.

        Args:
            sink: callback for the events of the nodes and, last, for the end of the program. Call it on the executor
                loop: `executor().post(sink, event)` of sglang_lite.lang.concurrency.loop.
            stream: whether to deliver deltas.
            priority: priority of the program. Here and below, it is only passed to backends with `takes_priority`.
        """
        raise CapabilityError(f"{type(self).__name__} can't play programs.")

    @property
    def takes_priority(self) -> bool:
        """True if programs on this backend may have a priority."""
        return False

    def answer_now(
        self, prompt: Prompt, params: SamplingParams, constraint: Constraint | None
    ) -> Sequence[Generation] | None:
        """Returns the answer if it is available without waiting (from a script, a recording or a cache), or None to
        call `agenerate`.

        Runs on the thread that adds the node, so that no work moves between threads.
        """
        return None

    def select_now(self, prompt: Prompt, choices: Sequence[str], *, unconditional: bool) -> Selection | None:
        """Returns the selection if it is available without waiting, or None to call `aselect`. Called like
        `answer_now`."""
        return None

    def begin_run(self, wait: Callable[[], object]) -> None:
        """Called when a run begins. `wait()` blocks until everything that was added to the run so far has been
        played."""

    # -------------------------------------------------------------------------- SGLang's blocking hooks

    def generate(self, s: StreamExecutor, sampling_params: SglSamplingParams) -> tuple[Json, Json]:
        """Generates the continuation of `s.text_`: its text (a list if n > 1), and metadata."""
        raise CapabilityError(f"{type(self).__name__} has no generate.")

    def generate_stream(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> Iterator[tuple[str, dict[str, Json]]]:
        """Yields the continuation of `s.text_` in pieces, with metadata. The default yields a single piece."""
        text, meta = self.generate(s, sampling_params)
        yield text, meta

    def select(
        self, s: StreamExecutor, choices: list[str], temperature: float, choices_method: ChoicesSamplingMethod
    ) -> ChoicesDecision:
        """Decides which choice continues `s.text_`."""
        raise CapabilityError(f"{type(self).__name__} has no select.")

    @property
    def trace_name(self) -> str:
        """Name of the backend in the trace of a run."""
        return type(self).__name__

    def get_model_name(self) -> str:
        return type(self).__name__

    def cost(self, usage: Usage) -> float | None:
        """Cost of one call's usage in US dollars, or None if unknown."""
        price = self.price or find_price(self.get_model_name())
        return None if price is None else price.of(usage)

    def identity(self) -> tuple[Json, ...]:
        """Plain data, equal in every process, that answers depend on besides the prompt and its parameters. A
        checkpoint of a batch is valid only for backends with the same identity."""
        kind, template = type(self), self.get_chat_template()
        how = None if template is None else getattr(template, "source", template.name)
        return f"{kind.__module__}.{kind.__qualname__}", self.get_model_name(), how

    def tokenizer_digest(self) -> str | None:
        """Digest of the model's tokenizer, or None if unknown. Token ids mean the same on backends with equal
        digests."""
        return None

    def get_chat_template(self) -> TurnTemplate | None:
        """Template that renders turns as text, or None if the model has none."""
        if self.chat_template is None and self.blocking:
            from sglang_lite.lang.chat_template import get_chat_template

            return get_chat_template("default")  # the default of SGLang's BaseBackend
        return self.chat_template

    def tool_family(self) -> str | None:
        """Format in which the model writes tool calls (a name of text.tool_formats), or None for one JSON object."""
        return None

    def cache_prefix(self, prefix_str: str) -> None:
        """Hint that many prompts will start with this text."""

    def uncache_prefix(self, rid: str) -> None:
        """Hint that a prefix need not be cached any longer."""

    def end_request(self, rid: str | list[str]) -> None:
        """Called when a request has ended."""

    def begin_program(self, s: StreamExecutor) -> None:
        """Called when a program starts."""

    def end_program(self, s: StreamExecutor | list[StreamExecutor]) -> None:
        """Called when a program has ended."""

    def commit_lazy_operations(self, s: StreamExecutor) -> None:
        """Hint, before a fork, that several continuations of `s.text_` will follow."""

    def fork_program(self, src: StreamExecutor, dst: list[StreamExecutor], position_ids_offset: object = None) -> None:
        """Called when a state was forked."""

    def fill_image(self, s: StreamExecutor) -> None:
        """Called when an image was added."""

    def concatenate_and_append(self, src_rids: list[str], dst_rid: str) -> None:
        """Joins KV caches. Never called, because texts are joined instead."""

    def flush_cache(self) -> bool | None:
        """Drops cached prefixes. Returns None if the backend has no cache."""
        return None

    def get_server_info(self) -> dict[str, Json] | None:
        """Information on the server behind the backend, or None if unknown."""
        return None

    def shutdown(self) -> None:
        """Frees the resources of the backend."""

    # --------------------------------------------------------------------------- used by the interpreter

    def planner(self, run: RunFacts) -> Planner | None:
        """Planner of the calls of a run's main branch, or None if each node is asked for as if it stood alone."""
        return None

    @cached_property
    def blocking(self) -> bool:
        """True if SGLang's blocking hooks are used instead of the native ones. The hooks that the more derived class
        defines take precedence."""
        blocking, native = self._depth("generate", "generate_stream", "select"), self._depth("agenerate", "aselect")
        return blocking > native

    @cached_property
    def answers_now(self) -> bool:
        """True if `answer_now` or `select_now` is worth calling: no more derived class overrides the other hooks for
        single nodes."""
        now = self._depth("answer_now", "select_now")
        return now > 0 and now >= self._depth(*_NODE_HOOKS)

    @cached_property
    def plays_programs(self) -> bool:
        """True if the backend receives whole runs: `open_program` is defined, and no more derived class overrides the
        hooks for single nodes."""
        whole = self._depth("open_program")
        return whole > 0 and whole >= self._depth(*_NODE_HOOKS)

    @cached_property
    def hooks(self) -> frozenset[str]:
        """Names of BaseBackend's methods that a subclass overrides."""
        return frozenset(name for name in vars(BaseBackend) if getattr(type(self), name) is not vars(BaseBackend)[name])

    def _depth(self, *hooks: str) -> int:
        """Number of classes from BaseBackend down to the most derived one that defines one of these hooks."""
        line = type(self).__mro__[::-1]
        base = line.index(BaseBackend)
        return max(i - base for i, kind in enumerate(line) if i >= base and any(hook in vars(kind) for hook in hooks))

    @cached_property
    def pool(self) -> ThreadPool:
        """Threads that run the blocking hooks."""
        return ThreadPool(self.max_threads, "sglang_lite-hooks")

    def check(
        self, node: object, params: SamplingParams, constraint: Constraint | None, where: Location | None
    ) -> None:
        """Refuses a generation that the backend can't honour.

        Raises:
            CapabilityError: the backend does not support the constraint or a parameter. The message names the node, the
                model and alternatives.
        """
        can = self.capabilities
        if constraint is not None and type(constraint) not in can.constraints:
            raise self.refusal(node, CONSTRAINT_NAMES[type(constraint)], _kinds(can.constraints), where)
        if can.params is not None:
            for name in given_values(params):
                if name not in can.params:
                    takes = f"It accepts: {', '.join(sorted(can.params)) or 'no parameters'}."
                    raise self.refusal(
                        node,
                        name,
                        f"Leave it out, or use another backend for this node: gen(backend=…). {takes}",
                        where,
                    )

    def check_selection(self, node: object, choices: Sequence[str], *, scores: bool, where: Location | None) -> None:
        """Refuses a selection that the backend can't make.

        Args:
            scores: whether the choices' probabilities are needed, for a method, a temperature or several answers.

        Raises:
            CapabilityError: the backend can't select, or reports no scores although they are needed.
        """
        can = self.capabilities
        if not can.select:
            raise self.refusal(node, "select", "Generate text and compare, or use another backend.", where)
        if scores and not can.scores:
            instead = "Leave them out: it picks a choice without scores."
            raise self.refusal(node, "choices_method, temperature or multi", instead, where)

    def refusal(self, node: object, feature: str, instead: str, where: Location | None) -> CapabilityError:
        """Error for a feature that the backend does not support."""
        name = f"{type(self).__name__}({self.get_model_name()!r})"
        return CapabilityError(f"{node!r}: {name} can't honour {feature}.", hint=instead, where=where)


async def only_answer(events: AsyncIterable[Delta | Generation]) -> Generation:
    """Single sample of a generation, without its deltas."""
    (answer,) = [event async for event in events if isinstance(event, Generation)]
    return answer


ALL_CONSTRAINTS = frozenset(CONSTRAINT_NAMES)


def _kinds(kinds: frozenset[type]) -> str:
    if not kinds:
        return "Leave the constraint out, or use another backend for this node: gen(backend=…)."
    enforced = ", ".join(sorted(CONSTRAINT_NAMES[kind] for kind in kinds))
    return f"It enforces: {enforced}. Or use another backend for this node: gen(backend=…)."
