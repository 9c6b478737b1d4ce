"""llama.cpp decoding many sequences in one batch, through llama-cpp-python's C interface."""

from __future__ import annotations

from typing import Any

import numpy as np


class LlamaBatch:
    """
    Args:
        file: the path of a GGUF file.
        sequences: that a batch may hold.
        tokens: that all of them may have together.
        threads: that compute.
    """

    def __init__(self, file: str, sequences: int, tokens: int, threads: int) -> None:
        import llama_cpp

        self._c: Any = llama_cpp
        llama_cpp.llama_backend_init()
        llama_cpp.llama_log_set(_silent(llama_cpp), None)
        self._model = llama_cpp.llama_model_load_from_file(
            file.encode(), llama_cpp.llama_model_default_params()
        )
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = (
            tokens,
            4096,
            512,
            sequences,
        )
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = True  # sequences may share cells
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(
            llama_cpp.llama_model_get_vocab(self._model)
        )
        self._batch = llama_cpp.llama_batch_init(4096, 0, 1)

    def tokens(self, text: str) -> list[int]:
        """Returns the ids of a text."""
        vocabulary = self._c.llama_model_get_vocab(self._model)
        said = text.encode()
        ids = (self._c.llama_token * (len(said) + 8))()
        count = self._c.llama_tokenize(vocabulary, said, len(said), ids, len(ids), True, True)
        return list(ids[:count])

    def run(self, prompts: list[list[int]], new: int, *, shared: int = 0) -> None:
        """Generates greedily. The first `shared` tokens, which all prompts have, are computed once."""
        self._c.llama_memory_clear(self._memory, True)
        if shared:
            self._decode([(token, at, 0, False) for at, token in enumerate(prompts[0][:shared])])
            for i in range(1, len(prompts)):
                self._c.llama_memory_seq_cp(self._memory, 0, i, -1, -1)
        drawn = [0] * len(prompts)
        rows: list[tuple[int, int, int, bool]] = []
        for i, prompt in enumerate(prompts):
            rows += [
                (t, shared + at, i, shared + at + 1 == len(prompt))
                for at, t in enumerate(prompt[shared:])
            ]
            if len(rows) > 3000 or i == len(prompts) - 1:
                for sequence, token in self._decode(rows):
                    drawn[sequence] = token
                rows = []
        for step in range(new - 1):
            for sequence, token in self._decode(
                [(token, len(prompts[i]) + step, i, True) for i, token in enumerate(drawn)]
            ):
                drawn[sequence] = token

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> list[tuple[int, int]]:
        """Computes (token, position, sequence, wanted) rows; gives (sequence, greedy token) of the
        wanted ones.
        """
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = (
                token,
                position,
                1,
                wanted,
            )
            batch.seq_id[i][0] = sequence
        if self._c.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        drawn = []
        for i, (_, _, sequence, wanted) in enumerate(rows):
            if wanted:
                logits = self._c.llama_get_logits_ith(self._context, i)
                drawn.append(
                    (
                        sequence,
                        int(np.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax()),
                    )
                )
        return drawn


_kept: list[Any] = []  # the C library keeps no reference to its callback


def _silent(llama_cpp: Any) -> Any:
    @llama_cpp.llama_log_callback
    def silent(level: int, text: bytes, data: Any) -> None:
        pass

    _kept.append(silent)
    return silent
