"""Attempts that show the model its own failed answer and the error: `gen(repair=True)`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_lite.lang.backend.base import Backend, refusal
from sglang_lite.lang.backend.rendering import with_user_reply
from sglang_lite.lang.execution.operations import FailedAttempt, GenOp
from sglang_lite.lang.expressions import GenOptions, SglGen
from sglang_lite.protocol import (
    Location,
    ParameterError,
    Prompt,
    SamplingParams,
    SglError,
    TemplateError,
    ValueValidationError,
)

if TYPE_CHECKING:
    from sglang_lite.text.chat_template import TurnTemplate


def check_repair(
    own: SglGen, backend: Backend, retries: int, role: str | None, params: SamplingParams, where: Location | None
) -> None:
    """Refuses a generation whose failed answer could not be shown to the model.

    Args:
        retries: number of retries of the run.
        role: role of the open turn, or None if no turn is open.
        params: sampling parameters of the node, merged with those of the run.

    Raises:
        ParameterError: the generation has no retries, or several samples.
        CapabilityError: no assistant's turn is open, or the backend has blocking hooks, which see no prompt.
    """
    own_retries = None if own.options is None else own.options.retries
    if not (retries if own_retries is None else own_retries):
        hint = "Set retries= to the number of attempts after the first."
        raise ParameterError("repair", "it has no effect with retries=0.", hint=hint, where=where)
    if params.samples > 1:
        raise ParameterError("repair", "it works with one sample only.", hint="Leave n out.", where=where)
    if not backend.capabilities.reads_prompts:
        raise refusal(backend, own, "repair with SGLang's blocking hooks", "Leave it out, or write agenerate.", where)
    if role != "assistant":
        instead = "Write turns: s += sgl.user(…), then s += sgl.assistant(sgl.gen(…))."
        raise refusal(backend, own, "repair outside an assistant's turn", instead, where)


def answer_to_show(refused: FailedAttempt) -> str | None:
    """Answer of a failed attempt, or None if the attempt had no answer."""
    if refused.answers:
        return refused.answers[0].text
    return refused.error.text if isinstance(refused.error, ValueValidationError) and refused.error.text else None


def shows(options: GenOptions, op: GenOp) -> bool:
    """Returns True if the next attempt's prompt contains the last attempt's answer."""
    return options.repair and bool(op.failed_attempts) and answer_to_show(op.failed_attempts[-1]) is not None


def repaired(prompt: Prompt, op: GenOp, template: TurnTemplate | None) -> Prompt:
    """Prompt of the next attempt: the original prompt, then the last answer and what was wrong with it.

    Raises:
        TemplateError: the model has no chat template.
    """
    if template is None:
        raise TemplateError("the model has no chat template, so no answer can be shown.", hint="Leave repair out.")
    refused = op.failed_attempts[-1]
    answer, error = answer_to_show(refused) or "", refused.error
    wrong = error.message if isinstance(error, SglError) else f"{error}" or type(error).__name__
    begun = prompt.partial.strip()
    again = f"Write again only what comes after {begun[-60:]!r}" if begun else "Answer again"
    return with_user_reply(prompt, answer, f"That will not do: {wrong} {again}, and nothing else.", template)
