"""Building of requests: prompts become token ids, and parameters are checked.

Knows nothing of how they are run.
"""

from __future__ import annotations

import itertools
import random
import secrets
import struct
from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sglang_lite.program.nodes import Fork, Gen, Node
from sglang_lite.protocol import ParameterError, Prompt, SamplingParams, Span
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.output_builder import OutputBuilder, Sink
from sglang_lite.runtime.request import Request
from sglang_lite.runtime.resolved_params import ResolvedParams, resolve_params, shown
from sglang_lite.runtime.tokens.token_log import TokenLog
from sglang_lite.runtime.tokens.tokenizer import Tokenizer
from sglang_lite.runtime.uniforms import sample_seed


class RequestBuilder:
    """
    Args:
        model_name, tokenizer: of the model.
        vocab_size: the model's, padding included.
        eos_ids: tokens that end a generation.
        longest: longest sequence in tokens, prompt and answer.
        seed: of the requests that set none; None for fresh randomness.
        all_special: every text can name special tokens.
        paced: streams are told of now and then, and not at every step.
    """

    def __init__(
        self,
        model_name: str,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_ids: frozenset[int],
        longest: int,
        seed: int | None,
        *,
        all_special: bool = False,
        paced: bool = False,
    ) -> None:
        self._paced = paced
        self._model_name, self._tokenizer = model_name, tokenizer
        self._vocab_size, self._eos_ids = vocab_size, eos_ids
        self._longest, self._first_seed, self._all_special = longest, seed, all_special
        self._fresh = random.Random(secrets.randbits(256))  # asking the system lets go of the interpreter's lock
        self._ids = itertools.count()
        self._draws = itertools.count()

    def prompt_ids(self, prompt: Prompt | str | Sequence[int]) -> Sequence[int]:
        """The token ids of a prompt.

        Raises:
            ParameterError: it is empty, not text, or has an image.
        """
        ids: Sequence[int]
        if isinstance(prompt, str | Prompt):
            ids = self.log(prompt).ids()
        elif isinstance(prompt, list | tuple | array):
            ids = prompt[:]
        else:
            raise ParameterError("prompt", f"{type(prompt).__name__} is neither text nor a list of token ids.")
        _check_not_empty(ids)
        return ids

    def log(self, prompt: Prompt | str) -> TokenLog:
        """A prompt that can grow.

        Raises:
            ParameterError: it has an image.
        """
        self.check_images(prompt)
        spans = prompt.spans if isinstance(prompt, Prompt) else (Span(prompt),)
        return TokenLog(self._tokenizer, spans, all_special=self._all_special)

    def check_images(self, prompt: Prompt | str) -> None:
        """Raises ParameterError: a prompt has an image."""
        if isinstance(prompt, Prompt) and prompt.images:
            raise ParameterError("prompt", f"{self._model_name} can't see images.")

    def build(
        self,
        ids: Sequence[int],
        params: ResolvedParams,
        sink: Sink,
        *,
        stream: bool = False,
        namespace: str = "",
        score_from: int | None = None,
        given: Sequence[int] = (),
    ) -> list[Request]:
        """Requests that are not started yet, one a sample.

        Args:
            given: ids that the output begins with. Then they are to be resumed first.

        Raises:
            ParameterError: as `tokens` and `output`.
        """
        tokens = self.tokens(ids, params)
        output = self.output(given, len(tokens), params)
        start = params.logprob_start_len if params.return_logprob else -1
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_ids)
        requests = []
        for index in range(params.n):
            number = next(self._ids)
            requests.append(
                Request(
                    id=number,
                    tokens=np.concatenate((tokens, output)) if len(output) else tokens,
                    prompt_len=len(tokens),
                    limit=len(tokens) + 1 if params.asks_next else min(len(tokens) + params.max_tokens, self._longest),
                    params=params,
                    seed=self._seed() if params.seed is None else sample_seed(params.seed, index),
                    output=OutputBuilder(number, self._tokenizer, params, ends, sink, stream=stream),
                    namespace=namespace,
                    paced=stream and self._paced,
                    score_from=score_from if score_from is not None else start if start >= 0 else None,
                    given=len(output),
                )
            )
        return requests

    def resolved(self, params: SamplingParams) -> ResolvedParams:
        """Parameters with the engine's defaults. Raises ParameterError: a bad one."""
        return resolve_params(params, self._vocab_size)

    def refused(self, nodes: Sequence[Node]) -> dict[int, ParameterError]:
        """The errors of bad parameters among nodes, by index; of a fork its branches' first one."""
        errors: dict[int, ParameterError] = {}
        for i, node in enumerate(nodes):
            if isinstance(node, Gen):
                try:
                    self.resolved(node.params)
                except ParameterError as error:
                    errors[i] = error
            elif isinstance(node, Fork):
                for branch in node.branches:
                    if inside := self.refused(branch):
                        errors.setdefault(i, next(iter(inside.values())))
        return errors

    def tokens(self, ids: Sequence[int], params: ResolvedParams) -> Ints:
        """The prompt of a request that could be run.

        Raises:
            ParameterError: it is empty, an id is no token's, or it does not fit.
        """
        _check_not_empty(ids)
        tokens = self._as_tokens("input_ids", ids)
        room = self._longest - len(ids)
        if room < (1 if params.max_tokens else 0):
            raise ParameterError(
                "prompt",
                f"{len(ids):,} tokens long; {self._model_name} takes {self._longest:,}, the answer included.",
                hint="Shorten it. Where the model itself takes more, raise context_length and max_total_tokens.",
            )
        if params.return_logprob and params.logprob_start_len > len(ids):
            raise ParameterError(
                "logprob_start_len", f"{params.logprob_start_len:,} is beyond the prompt's {len(ids):,} tokens."
            )
        return tokens

    def output(self, given: Sequence[int], prompt_len: int, params: ResolvedParams) -> Ints:
        """The ids that an output begins with.

        Raises:
            ParameterError: an id is no token's, they are too many, or there are several samples.
        """
        if not isinstance(given, list | tuple | array | np.ndarray):
            raise ParameterError("output_ids", f"{type(given).__name__} is no list of token ids.")
        if not len(given):
            return np.empty(0, dtype=np.int32)
        if params.n > 1:
            raise ParameterError("output_ids", f"they continue one output; n is {params.n}.", hint="Ask one by one.")
        room = min(params.max_tokens, self._longest - prompt_len)
        if len(given) > room:
            raise ParameterError("output_ids", f"{len(given):,} ids; the output has at most {room:,} (max_tokens).")
        return self._as_tokens("output_ids", given)

    def _as_tokens(self, name: str, ids: Sequence[int]) -> Ints:
        tokens, vocab_size = _whole_numbers(ids), self._vocab_size
        if tokens is None or not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
            bad = next((i for i in ids if type(i) is not int or not 0 <= i < vocab_size), ids)
            raise ParameterError(name, f"{shown(bad)} is no token id (0 to {vocab_size - 1:,}).")
        return tokens.astype(np.int32, copy=False)

    def _seed(self) -> int:
        if self._first_seed is None:
            return self._fresh.getrandbits(64)
        return (self._first_seed << 32) + next(self._draws)


def _whole_numbers(ids: Sequence[int]) -> NDArray[np.integer] | None:
    """Ids as an array of one dimension; None: one is no whole number, or has more than 32 bits."""
    if isinstance(ids, array | np.ndarray):
        tokens = np.array(ids)
        return tokens if tokens.dtype.kind == "i" and tokens.ndim == 1 else None
    tokens = np.empty(len(ids), dtype=np.int32)
    try:
        struct.pack_into(f"{len(ids)}i", tokens.data, 0, *ids)  # in a fifth of the time that numpy takes for a list
    except struct.error:
        return None
    return None if isinstance(ids[0], bool) else tokens


def _check_not_empty(ids: Sequence[int]) -> None:
    if not len(ids):
        raise ParameterError("prompt", "is empty.", hint="A model continues text: give it at least one token.")
