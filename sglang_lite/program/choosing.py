"""Methods by which `select` chooses, given the log-probabilities of the choices' tokens.

A custom method is a subclass of `ChoicesSamplingMethod`.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import EnumType
from typing import Any, TypeAlias, final

from sglang_lite.program.nodes import Method
from sglang_lite.protocol import CapabilityError, ParameterError, ProgramError, Selection, Unset
from sglang_lite.protocol.anything import Json, UserValue
from sglang_lite.protocol.parameter import check_known

# per choice, per token: [log-probability, token id, text or None]
_Entries: TypeAlias = list[list[Any]]
_Found: TypeAlias = tuple[int, dict[str, Any]]  # index of the best choice, and metadata


@dataclass
class ChoicesDecision:
    """Chosen text, and metadata that the method reports."""

    decision: str
    meta_info: dict[str, Any] | None = None


class ChoicesSamplingMethod(ABC):
    """Base class for methods of choosing. Called with keyword arguments, each a list in the order
    of `choices`:

    - choices: the texts.
    - normalized_prompt_logprobs: mean log-probability of each choice's tokens.
    - input_token_logprobs: per choice, per token: [log-probability, token id, text or None].
    - output_token_logprobs: per choice an empty list; nothing is generated.
    - unconditional_token_logprobs: like input_token_logprobs, but without the prompt, if the method
      requires them. The first entry's log-probability is None if nothing precedes the token.
    """

    @property
    def requires_unconditional_logprobs(self) -> bool:
        return False

    @abstractmethod
    def __call__(
        self,
        *,
        choices: list[str],
        normalized_prompt_logprobs: list[float],
        input_token_logprobs: list[list[Json]],
        output_token_logprobs: list[list[Json]],
        unconditional_token_logprobs: list[list[Json]] | None = None,
    ) -> ChoicesDecision: ...

    def scores(self, **keywords: UserValue) -> list[float]:
        """Returns a score for each choice. Takes the same keyword arguments as a call of the
        method. With a temperature, `select` draws from the softmax of the scores.
        """
        scores: list[float] = keywords["normalized_prompt_logprobs"]
        return scores


class _Rule(ChoicesSamplingMethod):
    """Base class for the built-in methods. Subclasses implement `_find_best`, which returns the
    index of the best choice, and metadata.
    """

    def __call__(
        self,
        *,
        choices: list[str],
        normalized_prompt_logprobs: list[float],
        input_token_logprobs: list[list[Json]],
        output_token_logprobs: list[list[Json]],
        unconditional_token_logprobs: list[list[Json]] | None = None,
    ) -> ChoicesDecision:
        best, details = self._find_best(
            normalized_prompt_logprobs, input_token_logprobs, unconditional_token_logprobs
        )
        meta_info = {
            "normalized_prompt_logprobs": normalized_prompt_logprobs,
            "input_token_logprobs": input_token_logprobs,
            "output_token_logprobs": output_token_logprobs,
        }
        return ChoicesDecision(choices[best], meta_info | details)

    @abstractmethod
    def _find_best(
        self, means: list[float], tokens: _Entries, alone: _Entries | None
    ) -> _Found: ...


class TokenLengthNormalized(_Rule):
    """Chooses the text with the highest mean log-probability per token. Favours long choices whose
    end is predictable.
    """

    def _find_best(self, means: list[float], tokens: _Entries, alone: _Entries | None) -> _Found:
        return _argmax(means), {}


class GreedyTokenSelection(_Rule):
    """Chooses the text that greedy decoding would produce. Token by token, only the choices with
    the best next token remain. A choice that has ended is extended with its mean log-probability.
    """

    def _find_best(self, means: list[float], tokens: _Entries, alone: _Entries | None) -> _Found:
        rows = [_logprobs_of_entries(entries) for entries in tokens]
        if not all(rows):
            raise ValueError(
                "input_token_logprobs: a choice has no tokens. Give at least one for every choice."
            )
        longest = max(map(len, rows))
        matrix = [row + [sum(row) / len(row)] * (longest - len(row)) for row in rows]
        candidates = list(range(len(rows)))
        for column in range(longest):
            best = max(matrix[i][column] for i in candidates)
            candidates = [i for i in candidates if matrix[i][column] == best]
            if len(candidates) == 1:
                break
        return candidates[0], {"greedy_logprob_matrix": matrix}

    def scores(self, **keywords: UserValue) -> list[float]:
        """Returns the log-probability of each choice if tokens are drawn one by one, and only those
        that continue one of the choices can be drawn.
        """
        paths = [
            [tuple(entry[1:2]) for entry in entries] for entries in keywords["input_token_logprobs"]
        ]
        rows = [_logprobs_of_entries(entries) for entries in keywords["input_token_logprobs"]]
        walks = []
        for path, row in zip(paths, rows):
            total = 0.0
            for at, value in enumerate(row):
                siblings = {
                    p[at]: r[at] for p, r in zip(paths, rows) if len(p) > at and p[:at] == path[:at]
                }
                total += value - _log_sum_exp(list(siblings.values()))
            walks.append(total)
        return walks


class UnconditionalLikelihoodNormalized(_Rule):
    """Chooses the text whose likelihood the prompt raises the most, measured by the mean of log
    P(token | prompt) - log P(token). If nothing precedes the text's first token without the prompt,
    log P of that token counts as 0.

    (The idea: https://blog.eleuther.ai/multiple-choice-normalization, "unconditional likelihood
    normalised".)
    """

    @property
    def requires_unconditional_logprobs(self) -> bool:
        return True

    def _find_best(self, means: list[float], tokens: _Entries, alone: _Entries | None) -> _Found:
        if alone is None:
            raise ValueError(
                "unconditional_token_logprobs: None. Give them: this method needs them."
            )
        gains = self._mean_token_gains(tokens, alone)
        details = {
            "unconditional_token_logprobs": alone,
            "normalized_unconditional_prompt_logprobs": gains,
        }
        return _argmax(gains), details

    def scores(self, **keywords: UserValue) -> list[float]:
        return self._mean_token_gains(
            keywords["input_token_logprobs"], keywords["unconditional_token_logprobs"]
        )

    def _mean_token_gains(self, conditional: _Entries, alone: _Entries) -> list[float]:
        """Returns, for each choice, how much the prompt raises the mean log-probability of the
        choice's tokens. (With and without the prompt, the number of tokens may differ, because the
        end of the prompt may merge with the choice.)
        """
        return [
            (sum(_logprobs_of_entries(c)) - sum(_logprobs_of_entries(u))) / len(c)
            for c, u in zip(conditional, alone)
        ]


token_length_normalized = TokenLengthNormalized()
greedy_token_selection = GreedyTokenSelection()
unconditional_likelihood_normalized = UnconditionalLikelihoodNormalized()

METHODS: dict[str, ChoicesSamplingMethod] = {
    "token_length_normalized": token_length_normalized,
    "greedy_token_selection": greedy_token_selection,
    "greedy": greedy_token_selection,
    "unconditional_likelihood_normalized": unconditional_likelihood_normalized,
}


@final
class ExactChoice:
    """Method of `sgl.exact`: chooses the text that the model itself would most likely write. Token
    scores don't determine that text, so `select` becomes a `gen(exact=True)`.
    """

    def __repr__(self) -> str:
        return "sgl.exact"


exact = ExactChoice()


def builtin_method_name(method: ChoicesSamplingMethod) -> Method | None:
    """Returns the name of a built-in method, or None for a custom method."""
    return _NAMES.get(id(method))


_NAMES: dict[int, Method] = {
    id(token_length_normalized): "token_length_normalized",
    id(greedy_token_selection): "greedy_token_selection",
    id(unconditional_likelihood_normalized): "unconditional_likelihood_normalized",
}


def check_choices(choices: object) -> tuple[str, ...]:
    """Checks the choices of a selection and returns them as a tuple of strings.

    Raises:
        ParameterError: `choices` is not a list of strings, or is empty.
        TraceError: one of them is a symbol.
    """
    if isinstance(choices, EnumType):
        name = choices.__name__
        hint = (
            f"Give its values: [each.value for each in {name}], or a generation: gen(type={name})."
        )
        raise ParameterError(
            "choices", f"{choices!r:.80} is a class, not a list of strings.", hint=hint
        )
    texts = () if isinstance(choices, str) or not isinstance(choices, Iterable) else tuple(choices)
    if not texts:
        raise ParameterError("choices", f"{choices!r:.80} is not a list of at least one string.")
    check_known("one of the choices", *texts)
    for choice in texts:
        if not isinstance(choice, str):
            hint = (
                "Write strings: [str(each) for each in choices]."
                if isinstance(choice, int | float)
                else ""
            )
            raise ParameterError("choices", f"{choice!r:.80} is not a string.", hint=hint)
    return texts


def decide_choice(
    selection: Selection,
    choices: Sequence[str],
    method: ChoicesSamplingMethod,
    temperature: float = 0.0,
    seed: int | Unset = Unset.UNSET,
) -> ChoicesDecision:
    """Returns the choice that a method makes. With a temperature, returns a random choice, drawn
    from the softmax of the method's scores. If the backend has already picked a choice, returns
    that one.

    Raises:
        ProgramError: the method returned none of `choices`.
        CapabilityError: the backend returned no scores, and either picked nothing or scores are
            needed.
    """
    if not selection.scores:
        if selection.picked is None:
            raise CapabilityError("the backend neither scored the choices nor picked one.")
        if temperature > 0 or method is not token_length_normalized:
            raise CapabilityError(
                f"the backend picked {selection.picked!r:.60} and gave no scores for choices_method or temperature.",
                hint="Leave them out, or use a local engine.",
            )
        return ChoicesDecision(selection.picked)
    scores = selection.scores
    entries = [[[lp, i, None] for lp, i in zip(s.logprobs, s.token_ids)] for s in scores]
    keywords: dict[str, Any] = {
        "choices": [s.text for s in scores],
        "normalized_prompt_logprobs": [sum(s.logprobs) / len(s.logprobs) for s in scores],
        "input_token_logprobs": entries,
        "output_token_logprobs": [[] for _ in scores],
        "unconditional_token_logprobs": None,
    }
    if method.requires_unconditional_logprobs:
        keywords["unconditional_token_logprobs"] = [
            [[lp, None, None] for lp in s.unconditional or ()] for s in scores
        ]
    decision = check_decision(method(**keywords), choices)
    if selection.picked is not None:
        return ChoicesDecision(selection.picked, decision.meta_info)
    if temperature > 0:
        values = method.scores(**keywords)
        top = max(values)
        weights = [math.exp((v - top) / temperature) for v in values]
        draw = random.Random(None if isinstance(seed, Unset) else seed)
        return ChoicesDecision(draw.choices(keywords["choices"], weights)[0], decision.meta_info)
    return decision


# `decision` may be any value, since a user's code returned it
def check_decision(decision: Any, choices: Sequence[str]) -> ChoicesDecision:
    """Checks the decision of a method or of a user's hook, and returns it. Raises ProgramError if
    the decision is not one of the choices.
    """
    if getattr(decision, "decision", None) not in choices:
        raise ProgramError(
            f"{decision!r:.80} is not a ChoicesDecision for one of {list(choices)!r:.80}."
        )
    found: ChoicesDecision = decision
    return found


def resolve_method(method: object) -> ChoicesSamplingMethod | ExactChoice:
    """Returns a method of choosing. Accepts the method itself, or the name of a built-in method.

    Raises:
        ParameterError: `method` is neither.
    """
    if isinstance(method, ExactChoice) or method == "exact":
        return exact
    found = METHODS.get(method) if isinstance(method, str) else method
    if not isinstance(found, ChoicesSamplingMethod):
        raise ParameterError(
            "choices_method",
            f"{method!r:.60} is not a method.",
            hint=f"Give a ChoicesSamplingMethod or {', '.join(METHODS)}, exact.",
        )
    return found


def _logprobs_of_entries(entries: list[Any]) -> list[float]:
    """Returns the log-probabilities of [log-probability, id, text] entries. A None, for a token
    that nothing precedes, becomes 0.
    """
    return [0.0 if entry[0] is None else float(entry[0]) for entry in entries]


def _log_sum_exp(values: Sequence[float]) -> float:
    top = max(values)
    return top + math.log(sum(math.exp(v - top) for v in values))


def _argmax(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)
