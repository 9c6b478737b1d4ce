"""Methods by which `select` chooses, at SGLang's module path."""

from sglang_lite.program.choosing import ChoicesDecision as ChoicesDecision
from sglang_lite.program.choosing import ChoicesSamplingMethod as ChoicesSamplingMethod
from sglang_lite.program.choosing import ExactChoice as ExactChoice
from sglang_lite.program.choosing import GreedyTokenSelection as GreedyTokenSelection
from sglang_lite.program.choosing import TokenLengthNormalized as TokenLengthNormalized
from sglang_lite.program.choosing import (
    UnconditionalLikelihoodNormalized as UnconditionalLikelihoodNormalized,
)
from sglang_lite.program.choosing import exact as exact
from sglang_lite.program.choosing import greedy_token_selection as greedy_token_selection
from sglang_lite.program.choosing import token_length_normalized as token_length_normalized
from sglang_lite.program.choosing import (
    unconditional_likelihood_normalized as unconditional_likelihood_normalized,
)
