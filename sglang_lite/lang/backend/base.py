"""Interface that the interpreter uses to call implementations that generate text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from sglang_lite.constraints.json_schema.keywords import REPEATS
from sglang_lite.constraints.json_schema.repeats import has_repeats_keyword
from sglang_lite.lang.backend.capabilities import (
    CONSTRAINT_NAMES,
    EVERYTHING,
    MEDIA_NAMES,
    Capabilities,
    Demands,
)
from sglang_lite.lang.backend.profiles.prices import Price, find_price
from sglang_lite.lang.backend.token_counts import TiktokenEncoding, count_text_tokens
from sglang_lite.lang.concurrency.pool import ThreadPool
from sglang_lite.notebook.markup import shorten_text
from sglang_lite.program.nodes import Node, Path, Verdict
from sglang_lite.protocol import (
    CapabilityError,
    Constraint,
    Delta,
    Generation,
    Location,
    MediaKind,
    ProgramSink,
    Prompt,
    SamplingParams,
    Selection,
    Unset,
    Usage,
)
from sglang_lite.protocol.anything import Json
from sglang_lite.protocol.sampling import adapter_of, given_values
from sglang_lite.text.chat_template import TurnTemplate

if TYPE_CHECKING:
    from sglang_lite.lang.backend.planning import Planner, RunFacts


ALL_CONSTRAINTS = frozenset(CONSTRAINT_NAMES)
# Events of a branch, under SGLang's names. "commit_lazy_operations" comes before a fork.
EVENTS = ("begin_program", "end_program", "commit_lazy_operations", "fork_program", "fill_image")
# Methods through which a class can answer instead of through `agenerate` and `aselect`.
_ABILITIES = {"answers_now": ("answer_now", "select_now"), "plays_programs": ("open_program",)}


# Name of the adapter that scores a selection, or None for the model itself. Read by backends with
# the capability `adapters`.
asked_adapter: ContextVar[str | None] = ContextVar("sglang_lite_asked_adapter", default=None)


def set_selection_adapter(lora_path: tuple[str, ...] | Unset) -> None:
    """Sets the LoRA adapter for the following selections in this context (`asked_adapter`)."""
    asked_adapter.set(adapter_of(lora_path))


class KeepsPrefixes(Protocol):
    """Interface for saving the keys and values of a prompt to a file and loading them again."""

    def export_prefix(self, prompt: Prompt, path: str, *, secret: str | None) -> object: ...

    def import_prefix(self, path: str, *, trust_cache: bool, secret: str | None) -> object: ...


class ProgramAtBackend(Protocol):
    """Program that is open at a backend. Its methods are thread-safe and do not block."""

    def extend(self, path: Path, nodes: Sequence[Node]) -> None:
        """Appends nodes to a branch. Raises SglError if the backend rejects them."""
        ...

    def judge(self, path: Path, place: int, verdict: Verdict) -> None:
        """Delivers the caller's verdict on a node's answer, or at a pause. `place` is the index of
        the node in its branch.
        """
        ...

    def drop_branch(self, path: Path) -> None:
        """Ends a branch that the caller has abandoned: at the node that is being answered, or else
        at the next one that needs an answer. Earlier nodes may still be played. A later rollback to
        an earlier mark revives the branch.
        """
        ...

    def expect_pause(self, path: Path, seconds: float) -> None:
        """Announces that nothing will be added to a branch for some seconds. They are counted from
        the branch's last answer or, if it has already arrived, from now.
        """
        ...

    def wind_down(self) -> None:
        """Ends all generations early, including later ones. For example, text ends at the next
        token, and JSON where closing brackets complete it. Only called if the backend has the
        capability `winds_down` or `winds_down_programs`.
        """
        ...

    def close(self) -> None:
        """Announces that no more nodes will come."""
        ...


class Listener(ABC):
    """Listener to events of a run's branches. It receives an event only after everything before the
    event has been executed.

    Attributes:
        events: names of the events that it receives, out of `EVENTS`.
        threads: threads on which it is called.
    """

    events: frozenset[str]
    threads: ThreadPool

    @abstractmethod
    # players, of a package above
    def notify_event(self, event: str, branch: Any, children: Sequence[Any]) -> None:
        """Notifies the listener of an event of a branch. May block.

        Args:
            children: branches that were forked, for a fork.
        """


class Backend:
    """Base class of backends. A subclass defines `agenerate` and `aselect`, and other methods for
    further features.

    Attributes:
        capabilities: features that the backend supports with its model.
        enforces: True if answers satisfy their constraints or an error is raised. If False, every
            answer is validated against its constraint.
        chat_template: template that renders turns as text, or None.
        template_cure: advice for a model without a chat template, worded as the end of a hint.
        unset_max_tokens: token limit of a generation that sets no `max_tokens`, or None if there is
            none.
        price: price of the model's tokens, which overrides the price table.
        tokenizer: tokenizer of the model, used by budgets to count what a server does not report;
            None if unknown.
        trace_name: name in messages and in the trace of a run; "" for the name of the class.
        on_run: called when a run begins, with a function that blocks until everything added to the
            run so far has been played; or None.
        answer_pool: threads on which `answer_now` and `select_now` are called because they block;
            None if they return immediately.
        event_listener: listener to the events of branches, or None.
        answers_now, plays_programs: True if `answer_now` and `select_now`, or `open_program`, are
            used. This requires that they are defined in the class that defines `agenerate` and
            `aselect`, or in a subclass of it.
    """

    capabilities: Capabilities = EVERYTHING
    enforces = False
    chat_template: TurnTemplate | None = None
    template_cure = 'set backend.chat_template = get_chat_template("chatml"), from sglang_lite.lang.chat_template.'
    unset_max_tokens: int | None = 128
    price: Price | None = None
    tokenizer: TiktokenEncoding | None = None
    trace_name = ""
    on_run: Callable[[Callable[[], object]], object] | None = None
    answer_pool: ThreadPool | None = None
    event_listener: Listener | None = None
    answers_now: bool = False
    plays_programs: bool = False

    def __init_subclass__(cls, **keywords: object) -> None:
        super().__init_subclass__(**keywords)
        own = vars(cls).keys()
        for ability, methods in _ABILITIES.items():
            if not own.isdisjoint(methods):
                setattr(cls, ability, True)
            elif "agenerate" in own or "aselect" in own:
                setattr(cls, ability, False)

    # -------------------------------------------------------------------------------------- answers

    def agenerate(
        self, prompt: Prompt, params: SamplingParams, constraint: Constraint | None, *, stream: bool
    ) -> AsyncGenerator[Delta | Generation, None]:
        """Generates `params.n` continuations of the prompt. Yields deltas if `stream`, and one
        Generation at the end of each sample.
        """
        raise CapabilityError(
            f"{type(self).__name__} can't generate: it has neither agenerate nor generate."
        )

    async def aselect(
        self, prompt: Prompt, choices: Sequence[str], *, unconditional: bool
    ) -> Selection:
        """Scores the choices as continuations of the prompt and, if `unconditional`, also without
        the prompt.
        """
        raise CapabilityError(
            f"{type(self).__name__} can't select: it has neither aselect nor select."
        )

    def answer_now(
        self, prompt: Prompt, params: SamplingParams, constraint: Constraint | None
    ) -> Sequence[Generation] | None:
        """Returns the answer if it is available without waiting (from a script, a recording or a
        cache), or None to have `agenerate` called.

        Runs on the thread that adds the node, to avoid moving work between threads, or on a thread
        of `answer_pool`.
        """
        return None

    def select_now(
        self, prompt: Prompt, choices: Sequence[str], *, unconditional: bool
    ) -> Selection | None:
        """Returns the selection if it is available without waiting, or None to have `aselect`
        called. Called like `answer_now`.
        """
        return None

    def open_program(
        self, sink: ProgramSink, *, stream: bool, priority: int = 0
    ) -> ProgramAtBackend:
        """Opens a program, to which a run adds nodes while earlier ones are being executed. A
        backend that defines this method receives whole runs; other backends receive one call per
        node.

        Args:
            sink: callback for the events of the nodes and, last, for the end of the program. After
                an answer, the thread that calls the sink continues the run. Only one thread may
                call it at a time, and not from within a method of the program. A thread with other
                work calls it on the executor loop: `executor().post(sink, event)` of
                sglang_lite.lang.concurrency.loop.
            stream: whether to deliver deltas.
            priority: priority of the program; only passed to backends with the capability.
        """
        raise CapabilityError(f"{type(self).__name__} can't play programs.")

    # ------------------------------------------------------------------------------------- planning

    def planner(self, run: RunFacts) -> Planner | None:
        """Returns a planner that combines or orders the calls of a run's main branch. Returns None
        if each node makes its own call.
        """
        return None

    def check(self, node: object, demands: Demands, where: Location | None) -> None:
        """Rejects a node that the backend can't honour.

        Raises:
            CapabilityError: the backend does not support the constraint, a parameter or the
                selection. The message names the node, the model and alternatives.
        """
        can = self.capabilities
        constraint = demands.constraint
        if demands.kind == "select":
            if not can.select:
                raise unsupported_feature_error(
                    self,
                    node,
                    "select",
                    "Generate text and compare, or use another backend.",
                    where,
                )
            if demands.scores and not can.scores:
                instead = "Leave them out: it picks a choice without scores."
                raise unsupported_feature_error(
                    self, node, "choices_method, temperature or multi", instead, where
                )
            return
        if constraint is not None and type(constraint) not in can.constraints:
            raise unsupported_feature_error(
                self,
                node,
                CONSTRAINT_NAMES[type(constraint)],
                _supported_kinds_hint(can.constraints),
                where,
            )
        if can.params is None:
            return
        if "repeats" not in can.params and has_repeats_keyword(constraint):
            raise unsupported_feature_error(
                self,
                node,
                REPEATS,
                "Leave the keyword out, or use another backend: gen(backend=…).",
                where,
            )
        for name in given_values(demands.params):
            if name not in can.params:
                takes = f"It accepts: {', '.join(sorted(can.params)) or 'no parameters'}."
                instead = (
                    f"Leave it out, or use another backend for this node: gen(backend=…). {takes}"
                )
                raise unsupported_feature_error(self, node, name, instead, where)

    # ------------------------------------------------------------------------------------ the model

    def __repr__(self) -> str:
        return f"{name_of(self)}({shorten_text(self.get_model_name(), 200)!r})"

    def get_model_name(self) -> str:
        return type(self).__name__

    def get_chat_template(self) -> TurnTemplate | None:
        """Returns the template that renders turns as text, or None if the model has none."""
        return self.chat_template

    def tool_family(self) -> str | None:
        """Returns the format in which the model writes tool calls (a name of text.tool_formats), or
        None for one JSON object.
        """
        return None

    @property
    def token_text(self) -> Callable[[int], str] | None:
        """Function that returns the text of a token, by its id; None if the model's tokens are not
        known.
        """
        return None

    @property
    def count_tokens(self) -> Callable[[str], int]:
        """Function that counts the tokens of a text. If the model's tokenizer is not known, it
        estimates them and errs on the high side.
        """
        return partial(count_text_tokens, tokenizer=self.tokenizer)

    @property
    def control_texts(self) -> Sequence[str] | None:
        """Texts that the model reads as control tokens outside turns. None if they are not known."""
        return None

    @property
    def tokenizer_digest(self) -> str | None:
        """Digest of the model's tokenizer, or None if unknown. Token ids mean the same on backends
        with equal digests.
        """
        return None

    def identity(self) -> tuple[Json, ...]:
        """Returns everything that answers depend on besides the prompt and its parameters, such as
        the model. The value is plain data and equal in every process. A checkpoint of a batch is
        valid only for backends with the same identity.
        """
        kind = type(self)
        template = self.get_chat_template()
        how = None if template is None else getattr(template, "source", template.name)
        return f"{kind.__module__}.{kind.__qualname__}", self.get_model_name(), how

    def cost(self, usage: Usage) -> float | None:
        """Returns the cost of one call's usage in US dollars, or None if unknown."""
        price = self.price or find_price(self.get_model_name())
        return None if price is None else price.of(usage)

    # ----------------------------------------------------------------------------------- the server

    def flush_cache(self) -> bool | None:
        """Drops cached prefixes. Returns None if the backend has no cache."""
        return None

    @property
    def prefix_files(self) -> KeepsPrefixes:
        """Object that saves the keys and values of prompts to files and loads them. Raises
        CapabilityError if the backend has none.
        """
        raise CapabilityError(
            f"{name_of(self)} keeps no keys and values in files; an engine of this program does.",
            hint="Leave cache=True, trust_cache=True and secret= out: the text is computed again.",
        )

    def get_server_info(self) -> dict[str, Json] | None:
        """Returns information about the server behind the backend, or None if unknown."""
        return None

    def shutdown(self) -> None:
        """Frees the resources of the backend."""


def name_of(backend: Backend) -> str:
    """Returns the name of a backend for messages and traces."""
    return backend.trace_name or type(backend).__name__


def name_with_model(backend: Backend) -> str:
    """Returns the name of a backend with its model, for messages."""
    return f"{name_of(backend)}({backend.get_model_name()!r})"


def check_adapter(
    backend: Backend, node: object, adapter: tuple[str, ...] | Unset, where: Location | None
) -> None:
    """Raises CapabilityError if a selection has an adapter and the backend's selections accept
    none.
    """
    if adapter_of(adapter) is not None and not backend.capabilities.adapters:
        raise unsupported_feature_error(
            backend, node, "lora_path", "Leave it out, or use a local engine or its server.", where
        )


def unsupported_feature_error(
    backend: Backend, node: object, feature: str, instead: str, where: Location | None
) -> CapabilityError:
    """Makes the error for a feature that a backend does not support.

    Args:
        instead: advice on what to do instead.
    """
    problem = f"{node!r}: {name_with_model(backend)} can't honour {feature}."
    return CapabilityError(problem, hint=instead, where=where)


def unsupported_medium_error(
    backend: Backend, node: object, kind: MediaKind, where: Location | None
) -> CapabilityError:
    """Makes the error for an image, a video or a sound that a backend does not accept."""
    told = "says" if kind == "audio" else "shows"
    return unsupported_feature_error(
        backend, node, MEDIA_NAMES[kind], f"Describe what it {told}, or use another backend.", where
    )


async def collect_single_answer(events: AsyncIterable[Delta | Generation]) -> Generation:
    """Returns the single sample of a generation, ignoring its deltas."""
    (answer,) = [event async for event in events if isinstance(event, Generation)]
    return answer


def _supported_kinds_hint(kinds: frozenset[type]) -> str:
    if not kinds:
        return "Leave the constraint out, or use another backend for this node: gen(backend=…)."
    enforced = ", ".join(sorted(CONSTRAINT_NAMES[kind] for kind in kinds))
    return f"It enforces: {enforced}. Or use another backend for this node: gen(backend=…)."


class DelegatingBackend(Backend):
    """Backend that delegates everything except answering to another backend. Subclasses define the
    answering.

    Args:
        backend: backend to delegate to.
    """

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self.backend = backend
        self.chat_template = backend.chat_template
        self.template_cure = backend.template_cure
        self.capabilities = backend.capabilities
        self.unset_max_tokens = backend.unset_max_tokens
        self.tokenizer = backend.tokenizer
        self.trace_name = name_of(backend)

    def get_model_name(self) -> str:
        return self.backend.get_model_name()

    def identity(self) -> tuple[Json, ...]:
        return self.backend.identity()

    def get_chat_template(self) -> TurnTemplate | None:
        return self.backend.get_chat_template()

    @property
    def token_text(self) -> Callable[[int], str] | None:
        return self.backend.token_text

    @property
    def count_tokens(self) -> Callable[[str], int]:
        return self.backend.count_tokens

    @property
    def control_texts(self) -> Sequence[str] | None:
        return self.backend.control_texts

    @property
    def tokenizer_digest(self) -> str | None:
        return self.backend.tokenizer_digest

    def tool_family(self) -> str | None:
        return self.backend.tool_family()

    def cost(self, usage: Usage) -> float | None:
        return self.backend.cost(usage)

    @property
    def prefix_files(self) -> KeepsPrefixes:
        return self.backend.prefix_files

    def check(self, node: object, demands: Demands, where: Location | None) -> None:
        self.backend.check(node, demands, where)
