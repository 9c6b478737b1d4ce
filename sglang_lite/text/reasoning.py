"""Splitting what a model thinks from what it answers, as the text arrives."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sglang_lite.protocol import ParameterError


@dataclass(frozen=True, slots=True)
class Format:
    """How a family of models marks its reasoning.

    Attributes:
        start, end: around it.
        open: the text starts inside it: the template has written the start mark already.
        dropped: marks of the answer that are no part of it; one ends reasoning that is not ended.
    """

    start: str
    end: str
    open: bool = False
    dropped: tuple[str, ...] = ()


_THINK = Format("<think>", "</think>")
_OPEN = Format("<think>", "</think>", open=True)

_HARMONY = Format(
    "<|channel|>analysis<|message|>", "<|end|>",
    dropped=("<|start|>assistant<|channel|>final<|message|>", "<|channel|>final<|message|>"),
)  # fmt: skip

# By the names that SGLang gives them.
FORMATS = {
    "deepseek-r1": _OPEN, "deepseek-v3": _THINK, "deepseek-v4": _THINK, "deepseek-v41": _THINK, "dots": _THINK,
    "glm45": _THINK, "ling3": _THINK, "kimi": Format("◁think▷", "◁/think▷"), "kimi_k2": _THINK,
    "kimi_k3": Format("<|open|>think<|sep|>", "<|close|>think<|sep|>", open=True), "mimo": _THINK,
    "poolside_v1": _THINK, "qwen3": _THINK, "qwen3-thinking": _OPEN, "minimax": _OPEN, "minimax-append-think": _OPEN,
    "minimax-m3": Format("<mm:think>", "</mm:think>"), "nanbeige": _THINK, "step3": _OPEN, "step3p5": _OPEN,
    "mistral": Format("[THINK]", "[/THINK]"), "nemotron_3": _THINK, "granite_thinking_parser": _THINK,
    "interns1": _THINK, "gemma4": Format("<|channel>thought\n", "<channel|>"), "gigachat35": _OPEN, "iquest_q1": _OPEN,
    "cohere_command4": Format(
        "<|START_THINKING|>", "<|END_THINKING|>", open=True, dropped=("<|START_TEXT|>", "<|END_TEXT|>")
    ),
    "apertus2509": Format("<|inner_prefix|>", "<|inner_suffix|>"),
    "inkling": Format(
        "<|content_thinking|>", "<|end_message|>",
        dropped=(
            "<|message_model|><|content_text|>", "<|message_model|>", "<|content_text|>", "<|end_message|>",
            "<|content_model_end_sampling|>",
        ),
    ),
    "gpt-oss": _HARMONY, "beam": _HARMONY, "hunyuan": _THINK,
    "k2_horizon": Format("<ifm|think>", "</ifm|think>", open=True),
    "muse": Format(
        " to=self<|message|>", "<|eom|>",
        dropped=("<|start|>assistant to=user<|message|>", " to=user<|message|>", "<|eot|>"),
    ),
}  # fmt: skip


class ReasoningParser:
    """
    Args:
        model_type: a key of FORMATS.

    Raises:
        ParameterError: an unknown model type.
    """

    def __init__(self, model_type: str) -> None:
        known = FORMATS.get(model_type.lower())
        if known is None:
            raise ParameterError("model_type", f"{model_type!r} is unknown.", hint=f"Known: {', '.join(FORMATS)}.")
        self._format = known
        self._inside = known.open
        self._opening = known.open  # the text may repeat the start mark that the template has written
        self._begun = {True: False, False: False}  # whether reasoning and answer have begun: blanks before are dropped
        self._held = ""

    def push(self, piece: str) -> tuple[str, str]:
        """Takes the next text; returns what of the reasoning and of the answer is certain."""
        text = self._held + piece
        self._held = ""
        if self._opening:
            start, stripped = self._format.start, text.lstrip()
            if start.startswith(stripped):
                self._held = text
                return "", ""
            self._opening = False
            text = stripped.removeprefix(start)
        found = {True: "", False: ""}
        while text:
            marks = (self._format.end if self._inside else self._format.start, *self._format.dropped)
            hits = [(text.index(mark), mark) for mark in marks if mark in text]
            if not hits:
                self._held = max((_overlap(text, mark) for mark in marks), key=len)
                found[self._inside] += self._trimmed(text[: len(text) - len(self._held)])
                break
            at, mark = min(hits)
            found[self._inside] += self._trimmed(text[:at])
            text = text[at + len(mark) :]
            self._inside = mark == self._format.start
        return found[True], found[False]

    def flush(self) -> tuple[str, str]:
        """What is still held back, at the end."""
        held, self._held = self._trimmed(self._held), ""
        return (held, "") if self._inside else ("", held)

    def _trimmed(self, text: str) -> str:
        if not self._begun[self._inside]:
            text = text.lstrip()
            self._begun[self._inside] = bool(text)
        return text

    @staticmethod
    def split(model_type: str, text: str) -> tuple[str, str]:
        """Reasoning and answer of a whole text."""
        parser = ReasoningParser(model_type)
        (thought, answer), (more_thought, more_answer) = parser.push(text), parser.flush()
        return thought + more_thought, answer + more_answer


def before_answer(model_type: str) -> str:
    """A regex of what stands before the answer: the reasoning with its marks (where the model may leave it out, that
    or nothing), and blanks."""
    known = FORMATS[model_type.lower()]
    before = _up_to(known.end)
    if not known.open:
        before = f"{_BLANKS}(?:{re.escape(known.start)}{before})?"
    if known.dropped:
        before += f"(?:{'|'.join(map(re.escape, known.dropped))})?"
    return before + _BLANKS


_BLANKS = r"[ \t\n]{0,8}"


def _up_to(mark: str) -> str:
    """A regex of any text that ends with the first `mark` in it. (Of a mark whose first character stands in it twice,
    the part before the second one may not stand in the text at all.)"""
    first, again = mark[0], mark.find(mark[0], 1)
    head = mark[:again] if again > 0 else mark
    begun = [head[1:i] for i in range(1, len(head))]  # what may follow the first character without being the mark
    stays = "|".join(re.escape(part + first) for part in begun)
    leaves = "|".join(f"{re.escape(part)}[^{re.escape(first + head[len(part) + 1])}]" for part in begun)
    start = f"{re.escape(first)}(?:{stays})*"
    return f"(?:[^{re.escape(first)}]|{start}(?:{leaves}))*{start}{re.escape(head[1:] + mark[len(head) :])}"


def _overlap(text: str, mark: str) -> str:
    """The longest end of `text` that is a beginning of `mark`."""
    return next((text[-k:] for k in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-k:])), "")
