"""Rollouts for slime, each of which is a run of a program. Pass the result of `generate_function`
to slime with `--custom-generate-function-path`.

slime is not needed to import this.
"""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeAlias

from sglang_lite.integrations.rollouts import (
    Rollouts,
    response_text,
    response_tokens,
    returned_reward,
)
from sglang_lite.lang.function import SglFunction
from sglang_lite.protocol import CapabilityError, TokenSequence
from sglang_lite.protocol.anything import Foreign, UserValue

_STATUS = {"length": "TRUNCATED", "abort": "ABORTED"}  # slime's status by finish reason


_Generate: TypeAlias = Callable[[Foreign, Foreign, Mapping[str, UserValue]], Awaitable[Foreign]]


def generate_function(program: SglFunction) -> _Generate:
    """Returns a function that runs a program as a rollout for slime. The function has the interface
    of slime's `generate(args, sample, sampling_params)`. It sends requests to the server or gateway
    at `args.sglang_router_ip` and `args.sglang_router_port`.

    Args:
        program: the program. Its arguments are a sample's `prompt` and `label`, and entries of its
            `metadata`, by those names. A number that it returns is the reward.

    Returns:
        A coroutine function that fills in slime's sample and returns it. The sample is marked as
        aborted if all answers were rejected. For a run with several branches or samples, the
        function returns a list of copies of the sample.
    """
    rollouts = Rollouts(program)

    async def generate(
        args: Foreign, sample: Foreign, sampling_params: Mapping[str, UserValue]
    ) -> Foreign:
        if sampling_params.get("custom_params"):
            raise CapabilityError(
                "custom_params are not for programs: no ids of the tokens that top_p keeps are recorded.",
                hint="Start slime with --rollout-top-p 1; a generation of the program may set top_p.",
            )
        url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
        columns = {**sample.metadata, "prompt": sample.prompt, "label": sample.label}
        state, sequences = await rollouts.run(url, columns, sampling_params)
        if not sequences:
            sample.status = sample.Status.ABORTED
            return sample
        samples = [sample, *(copy.deepcopy(sample) for _ in sequences[1:])]
        trace = state.trace()
        for each, sequence in zip(samples, sequences):
            _fill_sample(each, sequence)
            each.response = response_text(trace, sequence)
            if (reward := returned_reward(state)) is not None:
                each.reward = reward
        return samples if len(samples) > 1 else sample

    return generate


def _fill_sample(sample: Foreign, sequence: TokenSequence) -> None:
    ids, sample.loss_mask, sample.rollout_log_probs = response_tokens(sequence)
    sample.tokens = list(sequence.ids)
    sample.response_length = len(ids)
    versions = [span.weight_version for span in sequence.spans if span.weight_version is not None]
    sample.weight_versions = [*sample.weight_versions, *versions]
    sample.status = sample.Status[_STATUS.get(sequence.spans[-1].finish_reason, "COMPLETED")]
