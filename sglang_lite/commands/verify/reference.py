"""How transformers reads a model: its tokenizer, and what its code computes from the same token
ids.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import math
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch

from sglang_lite.commands.verify.engines import GreedyAnswer
from sglang_lite.commands.verify.records import Subject, Unread
from sglang_lite.commands.verify.subject import explain_memory_shortage, min_float32_weight_bytes
from sglang_lite.protocol.anything import Foreign

# For a GGUF file, transformers temporarily stores the float32 tensors twice: as decoded, and in the
# model (measured with the 0.5B model: at most 4.0 GB for 2.5 GB of weights). For a folder, it uses
# hardly more memory than the weights.
_GGUF_TIMES: Final = 1.7
_FOLDER_TIMES: Final = 1.1


@dataclass(frozen=True, slots=True)
class Parting:
    """First position at which transformers would have chosen another token.

    Attributes:
        position: index of the token in the answer.
        ours, theirs: ids of our token and of transformers' token.
        margin: transformers' log-probability of `theirs`, minus its log-probability of `ours`.
    """

    position: int
    ours: int
    theirs: int
    margin: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Difference between an answer and what transformers computes for the same tokens.

    Attributes:
        parting: where the greedy tokens start to differ; None if they are the same.
        difference: largest difference of a log-probability, among the compared tokens and the
            likeliest tokens in their positions.
    """

    parting: Parting | None
    difference: float


def largest_or_infinite(values: Iterable[float]) -> float:
    """Returns the largest of the values, or infinity if one is NaN, which `max` might ignore."""
    return max((math.inf if math.isnan(value) else value for value in values), default=0.0)


class ReferenceModel:
    """A model in float32, run by transformers' code."""

    def __init__(self, model: Foreign) -> None:
        self._model = model

    def compare(self, answer: GreedyAnswer) -> Comparison:
        """Computes the prompt and the answer in one forward pass, and compares each position from
        `answer.start` on.
        """
        rows = self._compute_logprobs(answer.ids, answer.start)
        differences = []
        for row, token, logprob, top in zip(
            rows, answer.ids[answer.start :], answer.logprobs, answer.top
        ):
            for value, each in ((logprob, token), *top):
                differences.append(abs(row[each].item() - value))
        parting = None
        first = len(answer.prompt) - answer.start
        for position, (row, ours) in enumerate(zip(rows[first:], answer.tokens)):
            if (theirs := int(row.argmax())) != ours:
                parting = Parting(position, ours, theirs, (row[theirs] - row[ours]).item())
                break
        return Comparison(parting, largest_or_infinite(differences))

    def explain_prompt_memory_shortage(self, subject: Subject, tokens: int) -> str:
        """Returns the reason why the memory does not suffice for a prompt of this many tokens, or
        "" if it suffices.
        """
        config = self._model.config.get_text_config()
        # Without fused attention, transformers keeps the scores of all heads; with it, only a mask.
        fused = self._model.get_correct_attn_implementation(None) != "eager"
        heads = 1 if fused else config.num_attention_heads
        inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        return explain_memory_shortage(
            subject,
            4 * tokens * (heads * tokens + 4 * inner),
            f"transformers' code for {tokens:,} tokens",
        )

    def _compute_logprobs(self, ids: tuple[int, ...], start: int) -> torch.Tensor:
        """Returns the log-probabilities of all tokens at the positions from `start` on: float32
        [positions, vocabulary].
        """
        count = len(ids) - start + 1  # the last one is for the token that would follow
        few = "logits_to_keep" in inspect.signature(self._model.forward).parameters
        keep = {"logits_to_keep": count} if few else {}
        with torch.inference_mode():
            found = self._model(
                torch.tensor([ids], device=self._model.device), use_cache=False, **keep
            )
            logits: torch.Tensor = found.logits[0, -count:-1].float()
            return logits.log_softmax(-1).cpu()


def read_model(subject: Subject) -> ReferenceModel | Unread:
    """Loads the model with transformers' code in float32, on the engine's device. Fetches nothing
    and runs no code from the model's folder.
    """
    times = _GGUF_TIMES if subject.path.is_file() else _FOLDER_TIMES
    if reason := explain_memory_shortage(
        subject, int(min_float32_weight_bytes(subject) * times), "transformers' code in float32"
    ):
        return Unread(reason)
    with _silence_transformers():
        try:
            from transformers import AutoModelForCausalLM

            where, options = _from_pretrained_arguments(subject)
            model, loaded = AutoModelForCausalLM.from_pretrained(
                where, dtype=torch.float32, output_loading_info=True, **options
            )
        except Exception as error:  # foreign code, of any model
            return Unread(f"transformers can't load it: {_first_line(error)}")
    if missing := sorted(loaded["missing_keys"]):
        return Unread(
            f"transformers finds no weights for {missing[0]} and {len(missing) - 1} others in the files"
        )
    return ReferenceModel(model.eval().to(torch.device(subject.description.device or "cpu")))


def read_tokenizer(subject: Subject) -> Foreign | Unread:
    """Loads transformers' tokenizer of the model. Fetches nothing and runs no code from the model's
    folder.
    """
    with _silence_transformers():
        try:
            from transformers import AutoTokenizer

            where, options = _from_pretrained_arguments(subject)
            return AutoTokenizer.from_pretrained(where, **options)
        except Exception as error:  # as above
            return Unread(f"transformers can't load the tokenizer: {_first_line(error)}")


def _from_pretrained_arguments(subject: Subject) -> tuple[str, dict[str, Any]]:
    options = {"local_files_only": True, "trust_remote_code": False}
    if subject.path.is_file():
        return str(subject.path.parent), {**options, "gguf_file": subject.path.name}
    return str(subject.path), options


@contextlib.contextmanager
def _silence_transformers() -> Iterator[None]:
    """Keeps transformers from showing progress bars, warnings and messages."""
    from transformers.utils import logging as messages

    level = messages.get_verbosity()
    bars = messages.is_progress_bar_enabled()
    messages.set_verbosity(logging.CRITICAL)
    messages.disable_progress_bar()
    try:
        # bars that no setting hides
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        messages.set_verbosity(level)
        if bars:
            messages.enable_progress_bar()


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
