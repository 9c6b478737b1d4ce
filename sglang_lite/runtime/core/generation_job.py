"""Running generation of a program: its requests, one per sample, and their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from sglang_lite.program.nodes import Gen, Text
from sglang_lite.protocol import (
    Constraint,
    Continuation,
    Generation,
    ParameterError,
    SglError,
    Span,
)
from sglang_lite.runtime.core.exact_draws import ExactDraws
from sglang_lite.runtime.core.healing import Healing
from sglang_lite.runtime.core.prepared_node import (
    EngineAsk,
    EngineBranch,
    PreparedNode,
    prepare_generation_after,
)
from sglang_lite.runtime.core.token_text import OpenGrammar, TokenText
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.requests.output_builder import Event, Finish
from sglang_lite.runtime.requests.request import Request
from sglang_lite.runtime.requests.request_media import RequestMedia
from sglang_lite.runtime.requests.resolved_params import ResolvedParams
from sglang_lite.runtime.requests.scheduled_branch import ScheduledBranch
from sglang_lite.runtime.structured_output.base import CompiledGrammar, Matcher
from sglang_lite.runtime.structured_output.request_matcher import RequestMatcher
from sglang_lite.runtime.tokens.token_log import TokenLog
from sglang_lite.runtime.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:
    from sglang_lite.runtime.core.engine_program import EngineProgram


class GenerationJob:
    """Generation of a `Gen` node. All methods but `_prepare` run on the loop's thread.

    The job of the previous generation can begin this job's request as soon as the previous request
    has ended, even before the player asks for this node. The end of the previous request is then
    reported to the program later, while the device computes.

    Args:
        program: program of the node; receives all events.
        branch: branch of the node.
        entry: the node.
        scheduled: the scheduler's state of the branch.
        ask: the player's ask for the node, once there is one. After the player has given up this
            ask, no events are sent for it.
    """

    def __init__(
        self,
        program: EngineProgram,
        branch: EngineBranch,
        entry: PreparedNode,
        scheduled: ScheduledBranch,
        ask: EngineAsk | None = None,
    ) -> None:
        self._program = program
        self._branch = branch
        self._entry = entry
        self._scheduled = scheduled
        self._ask = ask
        self._began = program.context.loop.clock.now()
        self._generations: dict[int, Generation] = {}
        self._requests: list[Request] = []
        # draws the requests' texts or heals their prompts before they start
        self._before_start: ExactDraws | Healing | None = None
        self._submitted = False
        self._following: PreparedNode | None = None  # next generation, once prepared
        # job of `_following`; its request waits for a prompt or has begun
        self._ahead: GenerationJob | None = None
        self._begins_next = False  # True once the request of `_ahead` has begun
        # tokens of the text before the node, if its request was built without a prompt
        self._between: Ints = np.empty(0, dtype=np.int32)
        self._catch_up: Callable[[], None] = (
            _skip_catch_up  # reports the end of the previous request
        )

    @property
    def _is_current(self) -> bool:
        return self._ask is not None and self._ask.is_current

    def start(self, *, in_slot: bool = False) -> Request | None:
        """Starts the requests once everything prepared on other threads is ready.

        Args:
            in_slot: whether the next request can continue in the slot of the branch's previous
                request, which has just ended.

        Returns:
            The next request if it continues in the slot, otherwise None.
        """
        ask = self._ask
        entry = self._entry
        text = self._branch.text
        if ask is None or not ask.is_current:
            return None
        assert text is not None
        if isinstance(entry.params, SglError):
            self._program.fail_node(ask, entry.params)
            return None
        for awaited in (entry.grammar, entry.ids, entry.matcher):
            if awaited is not None and not awaited.done():
                awaited.add_done_callback(lambda _: self._program.post(self.start))
                return None
        ready = self._move_text_to_log(text)
        log = text.log
        assert entry.params is not None
        quick = entry.params.n == 1 and (entry.grammar is None or entry.matcher is not None)
        quick = quick and not (entry.params.exact or entry.params.heal)
        if (
            in_slot
            and ready
            and quick
            and self._program.context.builder.has_adapter_in_memory(entry.params)
        ):
            try:
                self._build_requests(log, entry.params)
            except SglError as error:
                self._program.fail_node(ask, error)
                return None
            self._submitted = True
            self._wind_down_if_program_does()
            return self._requests[0]
        self._program.run_off_loop(
            partial(self._prepare, log, text.pop_new_spans(), entry.params, text.copy_grammar())
        )
        return None

    def _move_text_to_log(self, text: TokenText) -> bool:
        """Moves the text before the generation into the log, if its ids are known. Returns whether
        all ids are known and the generation is outside a grammar.
        """
        entry = self._entry
        log = text.log
        if entry.ids is not None and entry.ids.exception() is None and log.fixed:
            spans = [*log.open, *text.new]
            if entry.text == spans:  # as predicted
                log.set_open_text(spans, entry.ids.result())
                text.pop_new_spans()
        return not text.new and log.ready and text.grammar is None

    # -------------------------------------------------------------------------- the next generation

    def prepare_next_generation(self) -> None:
        """Starts preparing the next generation, which may then continue in this one's slot."""
        if self._following is None and self._ask is not None:
            self._following = prepare_generation_after(self._ask, self._program.context)
        if self._following is not None and self._ahead is None and self._requests:
            self._program.context.loop.postponed.postpone_call(self._build_next_request)

    def _build_next_request(self) -> None:
        """Builds the next generation's request in advance, if everything but its prompt is known."""
        following = self._following
        if (
            self._ahead is None
            and self._is_current
            and following is not None
            and self._only_text_precedes(following)
        ):
            ahead = GenerationJob(self._program, self._branch, following, self._scheduled)
            self._ahead = ahead if ahead.build_without_prompt() else None

    def _only_text_precedes(self, following: PreparedNode) -> bool:
        """Returns whether there is only text between this generation and a following one."""
        for _, entry in self._branch.queue:
            if entry is following or not isinstance(entry.node, Text):
                return entry is following
        return False

    def build_without_prompt(self) -> bool:
        """Builds a request whose prompt is not known yet. Returns False if that can't be done."""
        program = self._program
        node = self._entry.node
        ids = self._entry.ids
        params = self._entry.params
        if (
            ids is None
            or not ids.done()
            or ids.exception() is not None
            or self._entry.grammar is not None
        ):
            return False
        if (
            not isinstance(params, ResolvedParams)
            or params.n > 1
            or not params.max_tokens
            or params.scores_tokens
        ):
            return False
        if params.exact or params.heal:
            return False
        if params.thinking is not None:  # its matcher needs the prompt
            return False
        assert isinstance(node, Gen)
        if not program.context.builder.has_adapter_in_memory(params):
            return False
        try:
            request = program.context.builder.build_ahead(
                params,
                partial(self._on_event, 0),
                stream=program.stream or node.stream,
                namespace=program.namespace,
            )
        except ParameterError:  # reported when the node is started
            return False
        request.branch = self._scheduled
        request.priority = self._scheduled.program.priority
        request.follow = self
        request.output.origin = node.name, node.constraint
        self._requests = [request]
        self._between = np.array(ids.result(), dtype=np.int32)
        return True

    def begin_next_request(
        self, tokens: Ints, finish: Finish, postpone: Callable[[], Callable[[], None]]
    ) -> Request | None:
        """Begins the next request, like `Follower.begin_next_request`."""
        self._catch_up()
        following = self._following
        text = self._branch.text
        if self._ahead is None or following is None or text is None or text.grammar is not None:
            return None
        if not self._is_current or not self._only_text_precedes(following):
            return None
        request = self._requests[0]
        kept = count_kept_tokens(request, tokens, finish, self._program.context.tokenizer)
        if kept is None:
            return None
        begun = self._ahead.begin_prebuilt_request(tokens[:kept], request.media, postpone)
        self._begins_next = begun is not None
        return begun

    def begin_prebuilt_request(
        self, tokens: Ints, media: RequestMedia | None, postpone: Callable[[], Callable[[], None]]
    ) -> Request | None:
        """Begins the request that was built in advance, before the player asks for the node.
        Returns None if its prompt is too long.

        Args:
            tokens: tokens before the text between the generations.
            media: images among these tokens.
            postpone: as in `Follower.begin_next_request`.
        """
        request = self._requests[0]
        entry = self._entry
        node = self._entry.node
        assert isinstance(node, Gen)
        if not self._program.context.builder.set_prompt_and_begin(
            request, np.concatenate((tokens, self._between))
        ):
            return None
        request.media = None if media is None else replace(media)
        self._began = self._program.context.loop.clock.now()
        request.times.deadline = None if node.timeout is None else self._began + node.timeout
        entry.begun = self
        self._submitted = True
        self._catch_up = postpone()
        self._wind_down_if_program_does()
        return request

    def continue_program(self, _: Generation) -> Request | None:
        """Continues the program, like `Follower.continue_program`."""
        # the node was given up in the same step in which its request ended
        if self._ask is None or not self._ask.is_current:
            return None
        following = self._program.finish_node(
            self._ask, self._appended_spans, in_slot=not self._begins_next
        )
        if self._ahead is not None:
            self._ahead.mark_previous_reported()
        return following

    def mark_previous_reported(self) -> None:
        """Marks the end of the previous request as reported. If the program has not asked for this
        job's node by then, drops the job and aborts its request.
        """
        self._catch_up = _skip_catch_up
        if self._ask is None:
            self._entry.begun = None
            self.abort()

    def adopt_ask(self, ask: EngineAsk) -> bool:
        """Assigns the program's ask for the node to this job, whose request has already begun.
        Returns False and aborts the request if its prompt differs from the text before the node.
        """
        text = ask.branch.text
        request = self._requests[0]
        assert text is not None
        if self._move_text_to_log(text) and np.array_equal(
            text.log.ids(), request.tokens[: request.prompt_len]
        ):
            self._ask = ask
            return True
        self.abort()
        return False

    # ------------------------------------------------------------------------------------- requests

    def _prepare(
        self, log: TokenLog, new: Sequence[Span], params: ResolvedParams, within: OpenGrammar | None
    ) -> Callable[[], object]:
        # This may change the log. The branch waits, and doesn't use the log meanwhile.
        try:
            log.append(new)
            self._build_requests(log, params, within)
        except SglError as error:
            return partial(self._fail_own_node, error)
        return self._submit

    def _build_requests(
        self, log: TokenLog, params: ResolvedParams, within: OpenGrammar | None = None
    ) -> None:
        """Builds the requests. Can be called on the loop's thread only if no grammar has to be
        advanced over existing text.

        Args:
            log: prompt of the branch.
            params: parameters of the generation.
            within: grammar that encloses the preceding text, if any.

        Raises:
            ParameterError: the prompt has grown too long.
            ConstraintError: the constraint can't be enforced, or the open grammar does not allow
                the preceding text.
        """
        program = self._program
        entry = self._entry
        node = self._entry.node
        assert isinstance(node, Gen)
        requests = program.context.builder.build_requests(
            log.ids(),
            params,
            partial(self._on_event, 0),
            stream=program.stream or node.stream,
            namespace=program.namespace,
            media=log.media,
            # text inside a grammar that spans several nodes is not respelled
            text_tokens=log.count_text_tokens() if within is None else 0,
        )
        for index, request in enumerate(requests):
            request.branch = self._scheduled
            request.priority = self._scheduled.program.priority
            request.output.sink = partial(self._on_event, index)
            request.output.origin = node.name, _continued_constraint(node, within)
            request.times.deadline = None if node.timeout is None else self._began + node.timeout
        compiled = None if entry.grammar is None else entry.grammar.result()
        if params.exact:
            if len(requests) == 1:
                requests[0].follow = self
            constraint = _continued_constraint(node, within)
            self._before_start = ExactDraws(program.context, requests, constraint)
            self._requests = requests
            return
        if requests[0].respelled:
            self._before_start = Healing(
                program.context,
                requests,
                node.constraint,
                compiled,
                lambda healing: program.run_off_loop(
                    partial(self._prepare_healed, healing, compiled)
                ),
            )
            self._requests = requests
            return
        if within is not None:
            compiled = program.context.compiler.continuation_grammar(
                within.grammar, within.text, compiled
            )
        made = (
            entry.matcher.result()
            if entry.matcher is not None and within is None and len(requests) == 1
            else None
        )
        for request in requests:
            request.output.matcher = self._make_matcher(request, compiled, within, made)
        if len(requests) == 1:
            requests[0].follow = self
        self._requests = requests

    def _make_matcher(
        self,
        request: Request,
        grammar: CompiledGrammar | None,
        within: OpenGrammar | None = None,
        made: Matcher | None = None,
    ) -> RequestMatcher | None:
        node = self._entry.node
        assert isinstance(node, Gen)
        constraint = _continued_constraint(node, within)
        if grammar is None or constraint is None:
            return request.make_free_matcher()
        return request.constrain(constraint, grammar, made)

    def _prepare_healed(
        self, healing: Healing, grammar: CompiledGrammar | None
    ) -> Callable[[], object]:
        """Heals the requests' prompts, and prepares the requests."""
        try:
            healing.set_prompts()
            for request in self._requests:
                matcher = self._make_matcher(request, grammar)
                if request.output.begins_with_text:
                    request.begin_with_given_text(matcher)
                else:
                    request.output.matcher = matcher
        except SglError as error:
            return partial(self._fail_own_node, error)
        if len(self._requests) == 1:
            self._requests[0].follow = self
        self._before_start = None
        return self._submit

    def _submit(self) -> None:
        if self._is_current:
            self._submitted = True
            if self._before_start is not None:
                self._before_start.start()
                return
            self._wind_down_if_program_does()
            for request in self._requests:
                self._program.context.loop.receive_request(request)
            self.prepare_next_generation()

    def wind_down(self) -> None:
        """Ends the job's requests early, and those of the next generation if it has begun; see
        `EngineProgram.wind_down`.
        """
        if self._submitted:
            self._program.context.loop.wind_down_now(self._requests)
        if self._ahead is not None:
            self._ahead.wind_down()

    def _wind_down_if_program_does(self) -> None:
        if self._program.winds_down:
            self.wind_down()

    def _fail_own_node(self, error: SglError) -> None:
        if self._ask is not None:
            self._program.fail_node(self._ask, error)

    def unfinished_results(self) -> list[Generation]:
        """Returns results for the requests that have not ended. They have no text, but report
        usage.
        """
        table = self._program.context.loop.scheduler.store.table
        return [
            request.build_aborted_result(
                len(request.tokens) if request.handle is None else int(table.known[request.slot])
            )
            for index, request in enumerate(self._requests)
            if self._submitted and index not in self._generations
        ]

    def abort(self) -> None:
        """Aborts the requests, because the node was given up."""
        if self._submitted:
            for index, request in enumerate(self._requests):
                if index not in self._generations:
                    self._program.context.loop.abort(request)
        self._requests = []  # breaks the reference cycle, like at the normal end
        if self._ahead is not None:
            self._ahead.mark_previous_reported()

    def _on_event(self, index: int, event: Event) -> None:
        self._catch_up()
        ask = self._ask
        if ask is None or not ask.is_current:
            return
        if isinstance(event, SglError):
            self._program.fail_node(ask, event)
            return
        self._program.send_event(
            ask, msgspec.structs.replace(event, index=index) if index else event
        )
        if isinstance(event, Generation):
            self._generations[index] = event
            count = len(self._requests)
            if len(self._generations) < count:
                return
            self._requests = []  # breaks the reference cycle, which avoids garbage collection
            if count > 1:
                self._program.finish_node(ask, self._appended_spans)

    @property
    def _appended_spans(self) -> Sequence[Span] | None:
        """Text that the first sample adds; None if the answer is judged."""
        node = self._entry.node
        return None if isinstance(node, Gen) and node.judged else self._generations[0].spans


def count_kept_tokens(
    request: Request, tokens: Ints, finish: Finish, tokenizer: Tokenizer
) -> int | None:
    """Returns how many of a finished request's tokens are kept when text is appended to its answer:
    those of the prompt and the answer, without a stop token.

    Returns None if this is unknown until the result is built.

    Args:
        request: request that has ended.
        tokens: all tokens of the request.
        finish: reason for the request's end.
        tokenizer: tokenizer of the model.
    """
    if (
        request.output.matcher is not None
        or isinstance(finish.matched, str)
        or request.params.include_stop
    ):
        return None
    kept = len(tokens) - (finish.matched is not None)  # without a stop token
    return (
        kept
        if kept > request.prompt_len and tokenizer.ends_with_whole_character(int(tokens[kept - 1]))
        else None
    )


def _skip_catch_up() -> None:
    """Does nothing: there is no previous request whose end has to be reported."""


def _continued_constraint(node: Gen, within: OpenGrammar | None) -> Constraint | None:
    return (
        node.constraint
        if within is None
        else Continuation(within.constraint, within.text, node.constraint)
    )
