"""`sgl.plain`: prompt text in which control tokens count as plain text."""

from __future__ import annotations

from sglang_lite.lang.argument_names import explains_wrong_arguments
from sglang_lite.lang.tracebacks import user_location
from sglang_lite.program.nodes import Text
from sglang_lite.protocol import ParameterError
from sglang_lite.protocol.parameter import Deferred


@explains_wrong_arguments
def plain(text: str) -> Text:
    """Returns text for a prompt in which control tokens, such as `<|im_start|>`, count as plain
    text. Inside turns this is always the case. Use it outside turns for text written by users or
    tools.

    Raises:
        ParameterError: `text` is not a string.
    """
    if isinstance(text, Deferred):  # a symbol of a trace: its mark stands for it in text
        return Text(f"{text}", special=False, where=user_location())
    if not isinstance(text, str):
        raise ParameterError(
            "plain", f"{text!r:.60} is not a string.", hint="Turn it into one: sgl.plain(str(…))."
        )
    return Text(str.__str__(text), special=False, where=user_location())
