"""Ways to choose, for SGLang's users to import."""

from sglang_lite.program.choosing import (
    METHODS,
    ChoicesDecision,
    ChoicesSamplingMethod,
    GreedyTokenSelection,
    TokenLengthNormalized,
    UnconditionalLikelihoodNormalized,
    greedy_token_selection,
    method_of,
    token_length_normalized,
    unconditional_likelihood_normalized,
)

__all__ = [
    "METHODS",
    "ChoicesDecision",
    "ChoicesSamplingMethod",
    "GreedyTokenSelection",
    "TokenLengthNormalized",
    "UnconditionalLikelihoodNormalized",
    "greedy_token_selection",
    "method_of",
    "token_length_normalized",
    "unconditional_likelihood_normalized",
]
