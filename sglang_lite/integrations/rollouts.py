"""Runs programs as rollouts for reinforcement learning. slime.py and verl.py use it and pass the
results to their trainers.
"""

from __future__ import annotations

from collections.abc import Mapping

from sglang_lite.lang.backend.http.endpoint import RuntimeEndpoint
from sglang_lite.lang.function import SglFunction
from sglang_lite.lang.state import ProgramState
from sglang_lite.lang.trace import Trace
from sglang_lite.protocol import Generation, TokenSequence
from sglang_lite.protocol.anything import UserValue

# Parameters that change no token of a run. An answer's stop string is among its tokens in any case.
_WITHOUT_EFFECT = (
    "logprobs",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "no_stop_trim",
)


class Rollouts:
    """Runs of a program on servers that speak SGLang's `/generate`.

    Args:
        program: the program. A number that it returns is the reward.
    """

    def __init__(self, program: SglFunction) -> None:
        self._program = program
        self._servers: dict[str, RuntimeEndpoint] = {}

    async def run(
        self, url: str, columns: Mapping[str, UserValue], sampling: Mapping[str, UserValue]
    ) -> tuple[ProgramState, list[TokenSequence]]:
        """Runs the program. Returns its final state and the token sequences of its branches and
        samples. Sequences with a failed or rejected answer are left out.

        Args:
            url: address of the server.
            columns: values of a row by column. The program's arguments are the columns of the same
                names.
            sampling: the trainer's sampling parameters, for generations that don't set their own.

        Raises:
            ParameterError: the row lacks an argument, or a sampling parameter is unknown or
                invalid.
        """
        server = self._servers.get(url) or self._servers.setdefault(url, RuntimeEndpoint(url))
        arguments = {
            name: columns[name] for name in self._program.signature.parameters if name in columns
        }
        given = {
            name: value
            for name, value in sampling.items()
            if value is not None and name not in _WITHOUT_EFFECT
        }
        if given.get("repetition_penalty") == 1:
            del given["repetition_penalty"]
        if "sampling_seed" in given:
            given["seed"] = given.pop("sampling_seed")
        state = await self._program.arun(
            **arguments, **given, backend=server, return_prompt_token_ids=True, return_logprob=True
        )
        sequences = state.trajectory().sequences
        return state, [
            each
            for each in sequences
            if not any(span.failed or span.rejected for span in each.spans)
        ]


def returned_reward(state: ProgramState) -> float | None:
    """Returns the number that the program of a run returned, or None if it returned something else."""
    value = state.ret_value
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def response_tokens(sequence: TokenSequence) -> tuple[list[int], list[int], list[float]]:
    """Returns three lists for the tokens after the first generation's prompt: their ids; a mask
    with 1 for ids that the model drew; and their log-probabilities. Ids that the model did not draw
    have 0 in both the mask and the log-probabilities.
    """
    start = sequence.prompt_len
    mask = list(map(int, sequence.loss_mask[start:]))
    return list(sequence.ids[start:]), mask, [each or 0.0 for each in sequence.logprobs[start:]]


def response_text(trace: Trace, sequence: TokenSequence) -> str:
    """Returns the text of a sequence from its first generation to its last. The template's turn
    markers are left out.
    """
    first = sequence.spans[0]
    last = sequence.spans[-1]
    if first.sample:
        answers = (
            node.results[first.sample]
            for node in trace.nodes
            if (node.path, node.place) == (first.path, first.place)
        )
        return "".join(each.text for each in answers if isinstance(each, Generation))
    return "".join(
        node.text
        for node in trace.nodes
        if node.path == first.path and first.place <= node.place <= last.place and not node.rejected
    )
