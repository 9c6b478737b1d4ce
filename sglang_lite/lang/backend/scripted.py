"""Backend without a model, for tests of programs: answers from a script within microseconds."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TypeAlias

import msgspec

from sglang_lite.constraints.matching import validate
from sglang_lite.constraints.number_text import extract_leading_number
from sglang_lite.constraints.random_texts import sample
from sglang_lite.lang.argument_names import explains_wrong_arguments
from sglang_lite.lang.backend.base import ALL_CONSTRAINTS, Backend
from sglang_lite.lang.backend.capabilities import Capabilities
from sglang_lite.lang.backend.token_counts import TokenUsage
from sglang_lite.lang.chat_template import get_chat_template
from sglang_lite.lang.concurrency.loop import winds_down_at
from sglang_lite.protocol import (
    BackendError,
    ChoiceScore,
    Constraint,
    ConstraintError,
    Continuation,
    Delta,
    Generation,
    Number,
    ParameterError,
    Prompt,
    SamplingParams,
    Selection,
    Unset,
    Usage,
    ValueValidationError,
)
from sglang_lite.protocol.anything import UserValue
from sglang_lite.protocol.sampling import PARAMETERS, given_values
from sglang_lite.text.chat_template import TurnTemplate
from sglang_lite.text.stop import StopMatcher, compile_stop_pattern

_TOKEN = re.compile(r"\s*\S+|\s+")


@dataclass(frozen=True, slots=True)
class ScriptedRequest:
    """Request to a scripted backend. `choices` is set only if the request is a selection."""

    prompt: Prompt
    params: SamplingParams
    constraint: Constraint | None = None
    choices: tuple[str, ...] | None = None


Answer: TypeAlias = "str | Exception | Sequence[str | Exception] | Callable[[ScriptedRequest], str]"


class Rules:
    """Script that supplies answers.

    Args:
        answers: a callable that returns the answer to each request; a mapping from texts or
            compiled patterns to answers, where the key found nearest to the end of the prompt
            counts; or one answer for every request. An answer in a mapping, or for every
            request, may be a list, whose items are used one after another (the last one
            repeats). A callable among them is called with the request.
    """

    def __init__(self, answers: UserValue) -> None:
        self._answers = answers
        self._by_rule = isinstance(answers, Mapping)
        self._taken: dict[int, int] = {}

    def find_answer(self, text: str, call: UserValue) -> UserValue:
        """Returns the answer to a prompt, or None if no rule matches."""
        if callable(self._answers):
            return self._answers(call)
        rules = list(self._answers.items()) if self._by_rule else [("", self._answers)]
        found = [(_last_match_end(rule, text), i) for i, (rule, _) in enumerate(rules)]
        at, rule = max(found, key=lambda each: each[0], default=(-1, 0))
        if at < 0:
            return None
        answer = rules[rule][1]
        if not isinstance(answer, str) and isinstance(answer, Sequence):
            taken = self._taken.get(rule, 0)
            self._taken[rule] = taken + 1
            answer = answer[min(taken, len(answer) - 1)]
        return answer(call) if callable(answer) else answer


class ScriptedBackend(Backend):
    """Backend for tests that answers from a script, without a model.

    Args:
        answers: the script: a callable of each ScriptedRequest that returns its answer, or a
            mapping from texts or compiled patterns to answers. The key found nearest to the end of
            the prompt answers. An answer is text, an exception to raise, a list whose items answer
            in turn (the last one repeats), or a callable of the request.
        default: the answer if no rule matches ("" if unset). A node with a constraint that the
            default does not satisfy gets a random text that satisfies it, and a selection without
            the default among its choices a random choice.
        latency: seconds that each request takes (0.0), or a function of the request that returns
            them.
        seed: seed of the random texts (0). A request with a seed of its own uses that one.

    An answer is cut at the node's stop strings and patterns, at the end of a requested number, and
    after `max_tokens` words. In a run that winds down, requests take no more time, and text without
    a constraint is cut after its first word. An answer that breaks the node's constraint is an
    error, because a model could not have generated it.

    Attributes:
        calls: every request, in order.
        token_usage: words of all prompts and answers, as `prompt_tokens` and `completion_tokens`;
            `reset()` sets them to 0.
    """

    capabilities = Capabilities(
        ALL_CONSTRAINTS, images=True, sounds=True, adapters=True, winds_down=True
    )
    enforces = True

    @explains_wrong_arguments
    def __init__(
        self,
        answers: Callable[[ScriptedRequest], str] | Mapping[UserValue, Answer] | None = None,
        *,
        default: str | None = None,
        latency: float | Callable[[ScriptedRequest], float] = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if answers is not None and not callable(answers) and not isinstance(answers, Mapping):
            raise ParameterError(
                "answers",
                f"a {type(answers).__name__} is not a mapping or a callable.",
                hint='To answer every request, in order, give {"": ["first", "second"]}.',
            )
        self.calls: list[ScriptedRequest] = []
        self.token_usage = TokenUsage()
        self._rules = Rules(answers)
        self._default = default
        self._latency = latency
        self._random = Random(seed)

    @property
    def endpoint(self) -> ScriptedBackend:
        """The backend itself, for code that reads `endpoint` of SGLang's `Runtime`."""
        return self

    async def agenerate(
        self, prompt: Prompt, params: SamplingParams, constraint: Constraint | None, *, stream: bool
    ) -> AsyncGenerator[Delta | Generation, None]:
        call = ScriptedRequest(prompt, params, constraint)
        late = winds_down_at.get()
        await asyncio.sleep(_limit_latency(late, self._latency_of_call(call)))
        if late is not None and constraint is None and time.monotonic() >= late:
            limit = 1 if isinstance(params.max_tokens, Unset) else min(params.max_tokens, 1)
            call = replace(call, params=msgspec.structs.replace(params, max_tokens=limit))
        for generation in self._generate_samples(call):
            if stream:
                for piece in _TOKEN.findall(generation.text):
                    yield Delta(piece, index=generation.index)
            yield generation

    async def aselect(
        self, prompt: Prompt, choices: Sequence[str], *, unconditional: bool
    ) -> Selection:
        call = ScriptedRequest(prompt, SamplingParams(), choices=tuple(choices))
        await asyncio.sleep(_limit_latency(winds_down_at.get(), self._latency_of_call(call)))
        return self._answer_selection(call, unconditional)

    def answer_now(
        self, prompt: Prompt, params: SamplingParams, constraint: Constraint | None
    ) -> list[Generation] | None:
        return (
            None
            if self._latency
            else self._generate_samples(ScriptedRequest(prompt, params, constraint))
        )

    def select_now(
        self, prompt: Prompt, choices: Sequence[str], *, unconditional: bool
    ) -> Selection | None:
        return (
            None
            if self._latency
            else self._answer_selection(
                ScriptedRequest(prompt, SamplingParams(), choices=tuple(choices)), unconditional
            )
        )

    def _answer_selection(self, call: ScriptedRequest, unconditional: bool) -> Selection:
        self.calls.append(call)
        prompt = call.prompt.text
        choices = call.choices or ()
        answer = self._find_scripted_answer(call, prompt)
        scripted = [each for each in (answer, self._default) if each in choices]
        picked = scripted[0] if scripted else self._random.choice(choices)
        scores = []
        for choice in choices:
            # an empty choice is scored by the prompt's last token
            words = _TOKEN.findall(choice) or [""]
            each = (-0.01 if choice == picked else -5.0) / len(words)
            alone = (None, *(-3.0 for _ in words[1:])) if unconditional else None
            ids = tuple(hash(word) % 50_000 for word in words)
            scores.append(ChoiceScore(choice, ids, (each,) * len(words), alone))
        usage = Usage(prompt_tokens=_count_scripted_tokens(prompt))
        self.token_usage.add_usage(usage)
        return Selection(tuple(scores), usage)

    def get_model_name(self) -> str:
        return "scripted"

    def get_chat_template(self) -> TurnTemplate:
        return self.chat_template or get_chat_template("chatml")

    def _latency_of_call(self, call: ScriptedRequest) -> float:
        return self._latency(call) if callable(self._latency) else self._latency

    def _generate_samples(self, call: ScriptedRequest) -> list[Generation]:
        values = given_values(call.params)
        for parameter in PARAMETERS:
            if parameter.name in values:
                parameter.check_engine(values[parameter.name])
        self.calls.append(call)
        return [self._generate(call, index) for index in range(call.params.samples)]

    def _generate(self, call: ScriptedRequest, index: int) -> Generation:
        # joined anew on every access
        prompt = call.prompt.text
        params = call.params
        text = self._find_scripted_answer(call, prompt)
        if text is None:
            text = self._default or ""
            if call.constraint is not None and not self._is_default_valid(call):
                draw = (
                    self._random
                    if isinstance(params.seed, Unset)
                    else Random(f"{params.seed}:{index}")
                )
                text = _sample_text(call.constraint, draw)
        patterns = () if isinstance(params.stop_regex, Unset) else params.stop_regex
        stops = StopMatcher(
            () if isinstance(params.stop, Unset) else params.stop,
            {pattern: compile_stop_pattern(pattern) for pattern in patterns},
        )
        text = stops.push(text) + (stops.flush() if stops.matched is None else "")
        text = _leading_number_or_text(call.constraint, text)
        words = _TOKEN.findall(text)
        limit = math.inf if isinstance(params.max_tokens, Unset) else params.max_tokens
        cut = len(words) > limit
        if cut:
            text = "".join(words[: int(limit)])
        elif call.constraint is not None:
            _check_answer(call.constraint, text, stopped=stops.matched is not None)
        if stops.matched is not None and params.include_stop is True and not cut:
            text += stops.matched_text
        usage = Usage(
            prompt_tokens=_count_scripted_tokens(prompt),
            completion_tokens=_count_scripted_tokens(text),
        )
        self.token_usage.add_usage(usage)
        return Generation(
            text,
            finish_reason="length" if cut else "stop",
            matched=None if cut else stops.matched,
            usage=usage,
            index=index,
        )

    def _is_default_valid(self, call: ScriptedRequest) -> bool:
        if self._default is None or call.constraint is None:
            return False
        try:
            _check_answer(
                call.constraint,
                _leading_number_or_text(call.constraint, self._default),
                stopped=False,
            )
        except BackendError:
            return False
        return True

    def _find_scripted_answer(self, call: ScriptedRequest, prompt: str) -> str | None:
        answer: str | Exception | None = self._rules.find_answer(prompt, call)
        if isinstance(answer, Exception):
            raise answer
        return answer


def _limit_latency(late: float | None, seconds: float) -> float:
    """Shortens the latency of a request so that the request ends by the time `late`, at which the
    run starts to wind down (`time.monotonic()`; None for never).
    """
    return seconds if late is None else min(seconds, max(late - time.monotonic(), 0.0))


def _last_match_end(rule: str | re.Pattern[str], text: str) -> int:
    """Returns where the last match of a rule ends in a text, or -1 if there is no match."""
    if isinstance(rule, str):
        at = text.rfind(rule)
        return at + len(rule) if at >= 0 else -1
    return max((match.end() for match in rule.finditer(text)), default=-1)


def _sample_text(constraint: Constraint, random: Random) -> str:
    if not isinstance(constraint, Continuation):
        return sample(constraint, random)
    if constraint.text and constraint.part is None:
        raise BackendError(
            "no rule answers this generation inside an open grammar, and ScriptedBackend can't make up such text.",
            hint="Add a rule.",
        )
    return sample(constraint.part or constraint.whole, random)


def _leading_number_or_text(constraint: Constraint | None, text: str) -> str:
    """Returns the number at the beginning of a text if the constraint is a number. Otherwise, or if
    the text begins with no number, returns the text.
    """
    number = constraint.part if isinstance(constraint, Continuation) else constraint
    return (extract_leading_number(number, text) or text) if isinstance(number, Number) else text


def _check_answer(constraint: Constraint, text: str, *, stopped: bool) -> None:
    try:
        if isinstance(constraint, Continuation):
            _check_continuation(constraint, text, stopped=stopped)
        else:
            validate(constraint, text)
    except ValueValidationError as error:
        raise BackendError(
            f"the scripted answer {text!r} does not satisfy {constraint!r:.500}."
        ) from error


def _check_continuation(constraint: Continuation, text: str, *, stopped: bool) -> None:
    from sglang_lite.constraints.byte_matcher import ByteMatcher

    try:
        walk = ByteMatcher(constraint.whole)
        walk.push(constraint.text + text)
        if constraint.part is not None:
            validate(constraint.part, text)
        elif not stopped:
            walk.check_complete()
    except ConstraintError as error:
        raise ValueValidationError(str(error), text=text) from error


def _count_scripted_tokens(text: str) -> int:
    return len(text.split()) + text[-1:].isspace()  # the number of matches of _TOKEN, but faster
