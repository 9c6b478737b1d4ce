"""Token counts in each chunk of a stream (`stream_options.continuous_usage_stats`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sglang_lite.protocol import Delta, Generation, ParameterError, Prompt
from sglang_lite.protocol.anything import Json
from sglang_lite.server.conversation.addresses import image_addresses
from sglang_lite.server.reader import RequestReader


@dataclass(slots=True)
class RunningUsage:
    """Counts of a stream's tokens so far.

    Args:
        prompt_tokens: number of tokens of all prompts; None if chunks have no counts.
    """

    prompt_tokens: int | None
    _generated: dict[object, int] = field(default_factory=dict, init=False)

    def add_event(self, sample: object, each: Delta | Generation) -> None:
        """Counts the tokens of a sample's event. The sample's name may be any hashable value."""
        if isinstance(each, Generation):
            self._generated[sample] = each.usage.completion_tokens
        else:
            self._generated[sample] = self._generated.get(sample, 0) + len(each.token_ids)

    @property
    def fields(self) -> dict[str, Json]:
        """Fields of the next chunk."""
        if self.prompt_tokens is None:
            return {}
        generated = sum(self._generated.values())
        return {
            "usage": {
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": generated,
                "total_tokens": self.prompt_tokens + generated,
            }
        }


def count_prompt_tokens(reader: RequestReader, prompt: Prompt | str | Sequence[int]) -> int:
    """Returns the number of tokens of a prompt, before it runs. Raises ParameterError if images of
    the prompt are still to be fetched.
    """
    if not isinstance(prompt, Prompt | str):
        return len(prompt)
    if isinstance(prompt, Prompt) and image_addresses(prompt):
        raise ParameterError(
            "stream_options.continuous_usage_stats",
            "counts the prompt's tokens, which the addresses of images don't tell.",
            hint="Send the images as data, or use include_usage.",
        )
    return len(reader.ids(prompt))
