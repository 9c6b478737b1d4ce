"""The interface between the interpreter and whatever generates.

A backend implements the native hooks (`agenerate`, `aselect`: coroutines that stream), or SGLang's blocking ones
(`generate`, `generate_stream`, `select`), which are then run on a bounded pool of threads.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING

from sglang_lite.lang.backend.capabilities import CONSTRAINT_NAMES
from sglang_lite.lang.backend.capabilities import EVERYTHING as EVERYTHING
from sglang_lite.lang.backend.capabilities import Capabilities as Capabilities
from sglang_lite.lang.backend.prices import Price, price_of
from sglang_lite.lang.backend.turns import TurnRules
from sglang_lite.lang.concurrency.pool import ThreadPool
from sglang_lite.program.choosing import ChoicesDecision, ChoicesSamplingMethod
from sglang_lite.program.compiled import CompiledProgram
from sglang_lite.program.nodes import Program
from sglang_lite.protocol import (
    CapabilityError,
    Constraint,
    Delta,
    Generation,
    Location,
    ProgramEvent,
    ProgramSink,
    Prompt,
    SamplingParams,
    Selection,
    Usage,
)
from sglang_lite.protocol.anything import Json, UserValue
from sglang_lite.protocol.sampling import given
from sglang_lite.text.chat_template import TurnTemplate

if TYPE_CHECKING:
    from sglang_lite.lang.execution.push_down import ProgramAtBackend
    from sglang_lite.lang.execution.stream_executor import StreamExecutor
    from sglang_lite.lang.expressions import SglSamplingParams


_NODE_HOOKS = ("agenerate", "aselect", "generate", "generate_stream", "select")


def priority_keywords(priority: int) -> dict[str, int]:
    """Keywords for a priority: none where it says nothing, so that nobody else has to know of it."""
    return {"priority": priority} if priority else {}


def flushed(sink: ProgramSink, flush: Callable[[], object] | None) -> ProgramSink:
    """A sink with `flush` called after it."""

    def tell(event: ProgramEvent) -> None:
        sink(event)
        if flush is not None:
            flush()

    return tell


class BaseBackend:
    """Base of backends; subclass it for one of your own.

    Attributes:
        capabilities: what it can honour.
        remembers: it may have answers of an earlier run.
        enforces: its answers keep their constraints, or it raises; else every answer is held against its constraint.
        chat_template: how roles become text.
        support_concate_and_append: SGLang's flag for joining KV caches. Texts are joined, whatever it says.
        max_threads: of the pool that runs blocking hooks.
        unset_max_tokens: how long a generation gets that sets no `max_tokens`; None: as long as it likes.
        price: of its tokens, where that is not known by the model's name, or another.
    """

    capabilities: Capabilities = EVERYTHING
    enforces = False
    remembers = False
    support_concate_and_append = False
    max_threads = 64
    price: Price | None = None
    unset_max_tokens: int | None = 128

    def __init__(self) -> None:
        self.chat_template: TurnTemplate | None = None

    # ----------------------------------------------------------------------------------- native hooks

    def agenerate(
        self, prompt: Prompt, params: SamplingParams, constraint: Constraint | None, *, stream: bool
    ) -> AsyncGenerator[Delta | Generation, None]:
        """Generates `params.n` continuations: deltas if `stream`, and at its end each sample's Generation."""
        raise CapabilityError(f"{type(self).__name__} can't generate: it has neither agenerate nor generate.")

    async def aselect(self, prompt: Prompt, choices: Sequence[str], *, unconditional: bool) -> Selection:
        """Scores the choices as continuations of the prompt, with `unconditional` also without it."""
        raise CapabilityError(f"{type(self).__name__} can't select: it has neither aselect nor select.")

    def open_program(self, sink: ProgramSink, *, stream: bool, priority: int = 0) -> ProgramAtBackend:
        """Opens a program, to which a run adds its nodes while they are played. A backend that defines it is handed
        whole runs; one that does not gets one call per node.

        Args:
            sink: to be called with what each node brings, and when the program has ended, in this order and on the
                executor loop: `executor().post(sink, event)` of sglang_lite.lang.concurrency.loop.
            stream: deltas are wanted.
            priority: of the program; only given to who `takes_priority`, as everywhere below.
        """
        raise CapabilityError(f"{type(self).__name__} can't play programs.")

    def play_program(
        self, program: Program, sink: ProgramSink, flush: Callable[[], object] | None = None, priority: int = 0
    ) -> Callable[[], object]:
        """Plays a program that is whole; no deltas are wanted.

        Args:
            sink: to be called with what each node brings, and when the program has ended; on any thread, one at a time.
            flush: to be called after events that come together, of any programs with the same flush.

        Returns:
            What ends it, unless it has ended; on any thread.
        """
        if program.decision is not None:
            raise CapabilityError(f"{type(self).__name__} can't play decisions.")
        opened = self.open_program(flushed(sink, flush), stream=False, **priority_keywords(priority))
        opened.extend((), program.nodes)
        opened.close()
        return partial(opened.drop, ())

    @property
    def takes_priority(self) -> bool:
        """True if programs that it is handed may have a priority."""
        return False

    @property
    def plays_decisions(self) -> bool:
        """True if its `play_program` plays programs with decisions."""
        return False

    @property
    def plays_rows(self) -> bool:
        """True if it is handed a compiled program once, with all its rows: it has `play_rows` then."""
        return False

    def play_rows(
        self,
        compiled: CompiledProgram,
        rows: Mapping[int, Mapping[str, UserValue]],
        seeds: Mapping[int, int | None],
        window: int,
        timeout: float | None,
        priority: int = 0,
    ) -> AsyncGenerator[tuple[int, Sequence[ProgramEvent]], None]:
        """Plays a compiled program for rows. Runs on the executor loop; what is not asked for is played as far as the
        window goes. Closed before its end, it ends what is under way.

        Args:
            rows: arguments, by the numbers of the rows.
            seeds: of the rows, where they have one.
            window: how many rows may be under way.
            timeout: seconds for each row.

        Returns:
            Each row's number, with all of its events, as they end.
        """
        raise CapabilityError(f"{type(self).__name__} can't play rows.")

    def answer_now(
        self, prompt: Prompt, params: SamplingParams, constraint: Constraint | None
    ) -> Sequence[Generation] | None:
        """The answer, where it is there without waiting (a script, a recording, a cache); None: ask agenerate.

        It runs where the node was added, so that nothing is handed from thread to thread.
        """
        return None

    def select_now(self, prompt: Prompt, choices: Sequence[str], *, unconditional: bool) -> Selection | None:
        """Scores that are there without waiting, as `answer_now`; None: ask aselect."""
        return None

    def remembered(
        self, prompt: Prompt, params: SamplingParams, constraint: Constraint | None
    ) -> Sequence[Generation] | None:
        """Answers that an earlier run had to this question, to be used once; None: there are none."""
        return None

    def remembered_choice(self, prompt: Prompt, choices: Sequence[str], *, unconditional: bool) -> Selection | None:
        """`remembered` of a selection."""
        return None

    def begin_run(self, wait: Callable[[], object]) -> None:
        """Called when a run begins. `wait` waits until all that was added to
        the run so far has been played."""

    # -------------------------------------------------------------------------- SGLang's blocking hooks

    def generate(self, s: StreamExecutor, sampling_params: SglSamplingParams) -> tuple[Json, Json]:
        """The continuation of `s.text_` (a list where n > 1), and what is to be known about it."""
        raise CapabilityError(f"{type(self).__name__} has no generate.")

    def generate_stream(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> Iterator[tuple[str, dict[str, Json]]]:
        """`generate` in pieces; in one, unless a subclass does better."""
        text, meta = self.generate(s, sampling_params)
        yield text, meta

    def select(
        self, s: StreamExecutor, choices: list[str], temperature: float, choices_method: ChoicesSamplingMethod
    ) -> ChoicesDecision:
        """The choice that continues `s.text_`."""
        raise CapabilityError(f"{type(self).__name__} has no select.")

    @property
    def trace_name(self) -> str:
        """Name of what the nodes are played on, for the trace of a run."""
        return type(self).__name__

    def get_model_name(self) -> str:
        return type(self).__name__

    def cost(self, usage: Usage) -> float | None:
        """Dollars that a usage of one call costs; None: that is not known."""
        price = self.price or price_of(self.get_model_name())
        return None if price is None else price.of(usage)

    def identity(self) -> tuple[Json, ...]:
        """Data that its answers depend on beside the prompt and its parameters, plain and the same in every
        process. A checkpoint of a batch is only good for the backend that it was made with."""
        kind, template = type(self), self.get_chat_template()
        how = None if template is None else getattr(template, "source", template.name)
        return f"{kind.__module__}.{kind.__qualname__}", self.get_model_name(), how

    def tokenizer_digest(self) -> str | None:
        """Digest of its model's tokens: ids mean the same where it is the same. None: nobody knows."""
        return None

    def get_chat_template(self) -> TurnTemplate | None:
        """The chat template: how roles become text; None where the model has none."""
        if self.chat_template is None and self.blocking:
            from sglang_lite.lang.chat_template import get_chat_template

            return get_chat_template("default")  # what SGLang's BaseBackend gives
        return self.chat_template

    def tool_family(self) -> str | None:
        """Format of its model's calls of tools: a name of text.tool_formats; None: one JSON object."""
        return None

    def cache_prefix(self, prefix_str: str) -> None:
        """A hint: many prompts will start with this text."""

    def uncache_prefix(self, rid: str) -> None:
        """The hint no longer holds."""

    def end_request(self, rid: str | list[str]) -> None:
        """A request has ended."""

    def begin_program(self, s: StreamExecutor) -> None:
        """A program starts."""

    def end_program(self, s: StreamExecutor | list[StreamExecutor]) -> None:
        """A program has ended."""

    def commit_lazy_operations(self, s: StreamExecutor) -> None:
        """A hint, before a fork: several continuations of `s.text_` will follow."""

    def fork_program(self, src: StreamExecutor, dst: list[StreamExecutor], position_ids_offset: object = None) -> None:
        """A state was forked."""

    def fill_image(self, s: StreamExecutor) -> None:
        """An image was added."""

    def concatenate_and_append(self, src_rids: list[str], dst_rid: str) -> None:
        """Joins KV caches. Never called: texts are joined."""

    def flush_cache(self) -> bool | None:
        """Drops cached prefixes; None where there is no cache to drop."""
        return None

    def get_server_info(self) -> dict[str, Json] | None:
        """Information on what runs behind the backend; None where that is not known."""
        return None

    def shutdown(self) -> None:
        """Frees what the backend holds."""

    # ------------------------------------------------------------------------- what the interpreter asks

    @property
    def caches_prompts(self) -> bool:
        """True if what it is sent is kept by a provider, so that a prompt that begins alike is cheaper once the first
        token of an answer has come."""
        return False

    @cached_property
    def turn_rules(self) -> TurnRules | None:
        """Rules for several generations in one turn; None: each is asked for as if it were alone."""
        return None

    @cached_property
    def blocking(self) -> bool:
        """True if it has SGLang's blocking hooks instead of the native ones: what a subclass defines counts before what
        it inherits."""
        blocking, native = self._depth("generate", "generate_stream", "select"), self._depth("agenerate", "aselect")
        return blocking > native

    @cached_property
    def answers_now(self) -> bool:
        """True if `answer_now` and `select_now` are worth asking: no subclass has put other hooks over them."""
        now = self._depth("answer_now", "select_now")
        return now > 0 and now >= self._depth(*_NODE_HOOKS)

    @cached_property
    def plays_programs(self) -> bool:
        """True if it is to be handed whole runs: no subclass has put hooks for single nodes over `open_program`."""
        whole = self._depth("open_program")
        return whole > 0 and whole >= self._depth(*_NODE_HOOKS)

    @cached_property
    def hooks(self) -> frozenset[str]:
        """The names of BaseBackend's methods that a subclass has defined."""
        return frozenset(name for name in vars(BaseBackend) if getattr(type(self), name) is not vars(BaseBackend)[name])

    def _depth(self, *hooks: str) -> int:
        """Number of classes from BaseBackend down to the last one that defines one of these hooks."""
        line = type(self).__mro__[::-1]
        base = line.index(BaseBackend)
        return max(i - base for i, kind in enumerate(line) if i >= base and any(hook in vars(kind) for hook in hooks))

    @cached_property
    def pool(self) -> ThreadPool:
        """Threads that blocking hooks run on."""
        return ThreadPool(self.max_threads, "sglang_lite-hooks")

    def check(
        self, node: object, params: SamplingParams, constraint: Constraint | None, where: Location | None
    ) -> None:
        """Refuses a generation that the backend can't honour.

        Raises:
            CapabilityError: it names the node, the model and what else would do.
        """
        can = self.capabilities
        if constraint is not None and type(constraint) not in can.constraints:
            raise self.refusal(node, CONSTRAINT_NAMES[type(constraint)], _kinds(can.constraints), where)
        if can.params is not None:
            for name in given(params):
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
            scores: the choices' probabilities are needed: by a method, a temperature, or several answers.

        Raises:
            CapabilityError: as of `check`.
        """
        can = self.capabilities
        if not can.select:
            raise self.refusal(node, "select", "Generate text and compare, or use another backend.", where)
        if scores and not can.scores:
            instead = "Leave them out: it picks a choice without scores."
            raise self.refusal(node, "choices_method, temperature or multi", instead, where)

    def samples_at_once(self, params: SamplingParams, constraint: Constraint | None, count: int) -> bool:
        """Tells whether so many samples of a generation are worth one call: a provider charges their prompt once."""
        return False

    def refusal(self, node: object, feature: str, instead: str, where: Location | None) -> CapabilityError:
        """The error for what the model can't do."""
        name = f"{type(self).__name__}({self.get_model_name()!r})"
        return CapabilityError(f"{node!r}: {name} can't honour {feature}.", hint=instead, where=where)


async def only_answer(events: AsyncIterable[Delta | Generation]) -> Generation:
    """The one sample of a generation."""
    (answer,) = [event async for event in events if isinstance(event, Generation)]
    return answer


ALL_CONSTRAINTS = frozenset(CONSTRAINT_NAMES)


def _kinds(kinds: frozenset[type]) -> str:
    if not kinds:
        return "Leave the constraint out, or use another backend for this node: gen(backend=…)."
    enforced = ", ".join(sorted(CONSTRAINT_NAMES[kind] for kind in kinds))
    return f"It enforces: {enforced}. Or use another backend for this node: gen(backend=…)."
