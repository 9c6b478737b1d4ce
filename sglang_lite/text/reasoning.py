"""Separates a model's reasoning from its answer as the text arrives."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from sglang_lite.protocol import (
    Choices,
    Constraint,
    InOrder,
    ParameterError,
    Regex,
    Repeated,
    StructuralTag,
    Tag,
)
from sglang_lite.text.stop import partial_match_start


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Marks that a model family writes around its reasoning.

    Attributes:
        start, end: marks before and after reasoning.
        open: True if the text starts inside reasoning because the template has already written the
            start mark.
        dropped: marks around the answer that are not part of it. One of them also ends open
            reasoning.
    """

    start: str
    end: str
    open: bool = False
    dropped: tuple[str, ...] = ()


_THINK = ReasoningFormat("<think>", "</think>")
_OPEN = ReasoningFormat("<think>", "</think>", open=True)

_HARMONY = ReasoningFormat(
    "<|channel|>analysis<|message|>",
    "<|end|>",
    dropped=("<|start|>assistant<|channel|>final<|message|>", "<|channel|>final<|message|>"),
)

# Formats by SGLang's names for them.
FORMATS = {
    "deepseek-r1": _OPEN, "deepseek-v3": _THINK, "deepseek-v4": _THINK, "deepseek-v41": _THINK, "dots": _THINK,
    "glm45": _THINK, "ling3": _THINK, "kimi": ReasoningFormat("◁think▷", "◁/think▷"), "kimi_k2": _THINK,
    "kimi_k3": ReasoningFormat("<|open|>think<|sep|>", "<|close|>think<|sep|>", open=True), "mimo": _THINK,
    "poolside_v1": _THINK, "qwen3": _THINK, "qwen3-thinking": _OPEN, "minimax": _OPEN, "minimax-append-think": _OPEN,
    "minimax-m3": ReasoningFormat("<mm:think>", "</mm:think>"), "nanbeige": _THINK, "step3": _OPEN, "step3p5": _OPEN,
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"), "nemotron_3": _THINK, "granite_thinking_parser": _THINK,
    "interns1": _THINK, "gemma4": ReasoningFormat("<|channel>thought\n", "<channel|>"), "gigachat35": _OPEN,
    "iquest_q1": _OPEN,
    "cohere_command4": ReasoningFormat(
        "<|START_THINKING|>", "<|END_THINKING|>", open=True, dropped=("<|START_TEXT|>", "<|END_TEXT|>")
    ),
    "apertus2509": ReasoningFormat("<|inner_prefix|>", "<|inner_suffix|>"),
    "inkling": ReasoningFormat(
        "<|content_thinking|>", "<|end_message|>",
        dropped=(
            "<|message_model|><|content_text|>", "<|message_model|>", "<|content_text|>", "<|end_message|>",
            "<|content_model_end_sampling|>",
        ),
    ),
    "gpt-oss": _HARMONY, "beam": _HARMONY, "hunyuan": _THINK,
    "k2_horizon": ReasoningFormat("<ifm|think>", "</ifm|think>", open=True),
    "muse": ReasoningFormat(
        " to=self<|message|>", "<|eom|>",
        dropped=("<|start|>assistant to=user<|message|>", " to=user<|message|>", "<|eot|>"),
    ),
}  # fmt: skip


def reasoning_format(model_type: str) -> ReasoningFormat:
    """Returns the format of a model type. Raises ParameterError if the model type is unknown."""
    found = FORMATS.get(model_type.lower()) if isinstance(model_type, str) else None
    if found is None:
        raise ParameterError(
            "model_type", f"{model_type!r} is unknown.", hint=f"Known: {', '.join(FORMATS)}."
        )
    return found


def detect_model_type(template: str) -> str | None:
    """Returns the key of FORMATS for a model's chat template, or None if the template shows no
    reasoning.
    """
    if "<think>" in template and "</think>" in template:
        return "qwen3"
    others = (name for name, candidate in FORMATS.items() if candidate.start != _THINK.start)
    return next(
        (n for n in others if FORMATS[n].start.strip() in template and FORMATS[n].end in template),
        None,
    )


_NEWLINES = r"((?:\\n|\n)*)"  # in a template's source, also escaped in Jinja's strings

# Percentage of `max_tokens` that a model may think at each `reasoning_effort`. OpenRouter uses
# the same: https://openrouter.ai/docs/use-cases/reasoning-tokens
EFFORTS: Final[Mapping[str, int]] = {
    "none": 0,
    "minimal": 10,
    "low": 20,
    "medium": 50,
    "high": 80,
    "xhigh": 95,
    "max": 95,
}


def thinking_for_effort(effort: str) -> str | None:
    """Returns the parameter `thinking` for a `reasoning_effort`. Returns None for other efforts,
    which only the model's template can interpret.
    """
    return f"{EFFORTS[effort]}%" if effort in EFFORTS else None


@dataclass(frozen=True, slots=True)
class ClosingText:
    """Parts of the text that a model writes to end a thought.

    Attributes:
        before: newlines before the end mark.
        end: the end mark.
        after: newlines after the end mark, at most two.
        mark: mark of the answer after these newlines, needed by models with several kinds of
            messages.
    """

    before: str
    end: str
    after: str
    mark: str

    @property
    def text(self) -> str:
        """The whole text."""
        return f"{self.before}{self.end}{self.after}{self.mark}"


def thought_closing_text(found: ReasoningFormat, template: str) -> ClosingText:
    """Returns the text with which a model ends a thought.

    Args:
        found: format of the model's reasoning.
        template: chat template of the model, which shows the newlines around the end mark; "" if it
            has none.
    """
    ending = _NEWLINES + re.escape(found.end) + _NEWLINES
    # skip empty thoughts
    template = re.sub(re.escape(found.start.strip()) + ending, "", template)
    shown = (
        [len(side.replace("\\n", "\n")) for side in each] for each in re.findall(ending, template)
    )
    before, after = max(shown, key=sum, default=(0, 0))
    mark = found.dropped[0] if found.dropped else ""
    return ClosingText("\n" * before, found.end, "\n" * min(after, 2), mark)


def allow_reasoning_before(
    model_type: str, answer: Constraint, between: str | None = None
) -> Constraint:
    """Returns a constraint that allows reasoning in a model's marks before a constrained answer.

    Args:
        model_type: key of FORMATS.
        answer: constraint on the answer.
        between: text between reasoning and answer. If None, one of the model's answer marks, if it
            has any.

    Raises:
        ParameterError: the model type is unknown.
    """
    found = reasoning_format(model_type)
    until = StructuralTag(
        (Tag(found.end, Choices(("",)), ""),),
        (found.end,),
        at_least_one=True,
        stop_after_first=True,
    )
    marks = Choices(found.dropped or ("",) if between is None else (between,))
    rest = InOrder((until, Regex(r"\n{0,2}"), marks))
    if found.open:
        return InOrder((rest, answer))
    return InOrder((Repeated(InOrder((Choices((found.start,)), rest)), 0, 1), answer))


class ReasoningParser:
    """Incremental splitter of a model's output into reasoning and answer.

    Args:
        model_type: key of FORMATS.
        once: whether reasoning only comes before the answer. If so, start marks inside the answer
            are ordinary text; otherwise reasoning may recur.

    Raises:
        ParameterError: the model type is unknown.
    """

    def __init__(self, model_type: str, *, once: bool = False) -> None:
        found = self._format = reasoning_format(model_type)
        self._once = once
        self._answered = False
        self._inside = found.open
        # the model may repeat the start mark that the template has written
        self._opening = found.open
        # keyed by _inside: whether text has begun, so that blanks are kept
        self._text_started = {True: False, False: False}
        self._pending = ""

    def push(self, piece: str) -> tuple[str, str]:
        """Appends a piece of text. Returns the (reasoning, answer) text that has become certain."""
        text = self._pending + piece
        self._pending = ""
        if self._opening:
            start = self._format.start
            stripped = text.lstrip()
            if start.startswith(stripped):
                self._pending = text
                return "", ""
            self._opening = False
            text = stripped.removeprefix(start)
        found = {True: "", False: ""}
        while text:
            if self._once and not self._inside and not self._answered:
                start = self._format.start.lstrip()
                stripped = text.lstrip()
                if start.startswith(stripped) and start != stripped:
                    self._pending = text
                    break
                self._answered = not stripped.startswith(start)
            if self._inside:
                marks: tuple[str, ...] = (self._format.end, *self._format.dropped)
            else:
                marks = (*(() if self._answered else (self._format.start,)), *self._format.dropped)
            hits = [(text.index(mark), mark) for mark in marks if mark in text]
            if not hits:
                at = min((partial_match_start(text, 0, mark) for mark in marks), default=len(text))
                self._pending = text[at:]
                found[self._inside] += self._trim_start(text[:at])
                break
            at, mark = min(hits)
            found[self._inside] += self._trim_start(text[:at])
            text = text[at + len(mark) :]
            ended = self._inside
            self._inside = mark == self._format.start
            if ended and not self._inside:
                self._answered = self._once
        return found[True], found[False]

    def flush(self) -> tuple[str, str]:
        """Returns the (reasoning, answer) text that is still held back at the end of the output."""
        pending = self._trim_start(self._pending)
        self._pending = ""
        return (pending, "") if self._inside else ("", pending)

    def _trim_start(self, text: str) -> str:
        if not self._text_started[self._inside]:
            text = text.lstrip()
            self._text_started[self._inside] = bool(text)
        return text

    @staticmethod
    def split(model_type: str, text: str, *, once: bool = False) -> tuple[str, str]:
        """Returns the reasoning and the answer of a complete text."""
        parser = ReasoningParser(model_type, once=once)
        (thought, answer), (more_thought, more_answer) = parser.push(text), parser.flush()
        return thought + more_thought, answer + more_answer
