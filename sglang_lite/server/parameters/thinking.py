"""Limits on thinking, from the fields of all chat protocols."""

from __future__ import annotations

import msgspec

from sglang_lite.protocol import UNSET, ParameterError, SamplingParams
from sglang_lite.text.chat_format import RenderedConversation
from sglang_lite.text.reasoning import thinking_for_effort


def set_thinking_limit(
    params: SamplingParams, rendered: RenderedConversation, effort: str | None
) -> SamplingParams:
    """Adds the limit on thinking to the parameters of an answer.

    Args:
        params: parameters, with the limit that the request names in tokens, if any.
        rendered: the conversation; without reasoning there is nothing to limit.
        effort: the request's effort, or None. Limits thinking to a share of the answer's tokens,
            unless `params` has a limit.
    """
    if rendered.reasoning is None:
        return msgspec.structs.replace(params, thinking=UNSET)
    share = None if effort is None else thinking_for_effort(effort)
    if params.thinking is UNSET and share is not None:
        params = msgspec.structs.replace(params, thinking=(share,))
    if params.thinking is UNSET and rendered.constraint is None:
        return params
    return msgspec.structs.replace(params, reasoning_format=(rendered.reasoning,))


def set_thinking_budget(params: SamplingParams, field: str, budget: int | None) -> SamplingParams:
    """Adds a limit on thinking in tokens to parameters; None adds none. Raises ParameterError, with
    the name of the field, if the limit is below 0.
    """
    if budget is None:
        return params
    if budget < 0:
        raise ParameterError(field, f"{budget} is outside its range: at least 0.")
    return msgspec.structs.replace(params, thinking=budget)


def report_ignored_thinking(
    rendered: RenderedConversation,
    budgets: dict[str, int | None],
    effort: tuple[str, str | None],
    unused: list[str],
) -> None:
    """Reports which fields about thinking have no effect.

    Args:
        rendered: the conversation.
        budgets: limits in tokens by field.
        effort: name and value of the field with the effort.
        unused: names of fields without effect, according to the template; updated.
    """
    name, value = effort
    if rendered.reasoning is None:
        unused += [field for field, budget in budgets.items() if budget is not None]
    elif value is not None and thinking_for_effort(value) is not None and name in unused:
        unused.remove(name)
