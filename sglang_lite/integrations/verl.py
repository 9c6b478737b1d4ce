"""Agent loop for verl, in which each rollout is a run of a program. Needs the package verl."""

from __future__ import annotations

import importlib
import time
from functools import lru_cache

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

from sglang_lite.integrations.rollouts import Rollouts, response_tokens, returned_reward
from sglang_lite.lang.function import SglFunction
from sglang_lite.protocol import CapabilityError, ParameterError
from sglang_lite.protocol.anything import Foreign, UserValue


class ProgramAgentLoop(AgentLoopBase):
    """Agent loop that runs a program on a server. verl creates it from an entry of its
    `agent_loop_config_path`:

        - name: guess
          _target_: sglang_lite.integrations.verl.ProgramAgentLoop
          program: my_programs.guess
          url: http://127.0.0.1:30000

    Args:
        program: import path of the program. Its arguments are the row's columns of the same names,
            such as `raw_prompt`, the conversation. A number that it returns is the reward.
        url: address of the server, which the trainer sends its weights to.
        **verl: arguments of verl's own base class.

    Raises:
        ParameterError: `program` is not the path of a program.
    """

    def __init__(self, *, program: str, url: str, **verl: Foreign) -> None:
        super().__init__(**verl)
        module, _, name = program.rpartition(".")
        found = getattr(importlib.import_module(module), name, None) if module else None
        if not isinstance(found, SglFunction):
            raise ParameterError(
                "program", f"{program!r} is not the path of a program.", hint="Write module.name."
            )
        self._rollouts = _cached_rollouts(found)
        self._url = url
        self._longest = self.rollout_config.response_length

    async def run(
        self, sampling_params: dict[str, UserValue], **columns: UserValue
    ) -> AgentLoopOutput:
        """Runs the program with the values of one row.

        Raises:
            CapabilityError: the run has several branches or samples, but verl takes one sequence
                per row.
        """
        started = time.monotonic()
        state, sequences = await self._rollouts.run(self._url, columns, sampling_params)
        if len(sequences) != 1:
            raise CapabilityError(
                f"the run has {len(sequences)} sequences, and verl takes one of each row.",
                hint="Write the program without fork() and n, or so that each prompt continues the one before.",
            )
        (sequence,) = sequences
        ids, mask, logprobs = (each[: self._longest] for each in response_tokens(sequence))
        return AgentLoopOutput(
            prompt_ids=list(sequence.ids[: sequence.prompt_len]),
            response_ids=ids,
            response_mask=mask,
            response_logprobs=logprobs,
            reward_score=returned_reward(state),
            num_turns=2 * len(sequence.spans),
            metrics=AgentLoopMetrics(generate_sequences=time.monotonic() - started),
        )


@lru_cache
def _cached_rollouts(program: SglFunction) -> Rollouts:
    """Returns a program's Rollouts, the same object each time. verl creates an agent loop for each
    row; all these loops share one set of connections.
    """
    return Rollouts(program)
