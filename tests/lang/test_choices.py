"""The rules of select. The numbers are those of SGLang's own fixture, and so are the picks."""

import pytest

import sglang_lite as sgl
from sglang_lite.program.choosing import decide_choice
from sglang_lite.protocol import CapabilityError, ChoiceScore, Selection

# Three choices that share their first tokens; what each rule must pick is known.
CHOICES = ["organ", "organism", "antidisestablishmentarianism"]
CONDITIONAL = [
    [[-0.1, 1, "organ"], [-0.2, 2, "ic"], [-0.05, 4, "</s>"]],
    [[-0.1, 1, "organ"], [-0.2, 2, "ism"], [-0.05, 5, "</s>"]],
    [[-0.2, 3, "ant"], [-0.01, 2, "idisestablish"], [-0.02, 6, "mentarianism"]],
]
"""(Built here so that each rule disagrees with the others.)"""


def call(method, conditional, unconditional=None):
    means = [sum(e[0] for e in entries) / max(len(entries), 1) for entries in conditional]
    return method(
        choices=CHOICES,
        normalized_prompt_logprobs=means,
        input_token_logprobs=conditional,
        output_token_logprobs=[[] for _ in TWO],
        unconditional_token_logprobs=unconditional,
    )


def test_token_length_normalized_takes_the_best_mean():
    decision = call(sgl.token_length_normalized, CONDITIONAL)
    assert decision.decision == "antidisestablishmentarianism"
    assert set(decision.meta_info) == {
        "normalized_prompt_logprobs",
        "input_token_logprobs",
        "output_token_logprobs",
    }


def test_greedy_walks_token_by_token():
    conditional = [
        [[-0.1, 1, None]],
        [[-0.1, 1, None], [-0.3, 2, None]],
        [[-0.2, 3, None], [-0.01, 4, None]],
    ]
    decision = call(sgl.greedy_token_selection, conditional)
    assert decision.decision == "organ"  # its own mean continues it: -0.1 > -0.3
    assert decision.meta_info["greedy_logprob_matrix"][0] == [-0.1, -0.1]


def test_unconditional_takes_what_the_prompt_helps_most():
    alone = [
        [[None, 1, None], [-0.3, 2, None], [-0.1, 4, None]],
        [[None, 1, None], [-5.0, 2, None], [-0.1, 5, None]],
        [[None, 3, None], [-0.1, 2, None], [-0.1, 6, None]],
    ]
    decision = call(sgl.unconditional_likelihood_normalized, CONDITIONAL, alone)
    assert decision.decision == "organism"
    assert decision.meta_info["normalized_unconditional_prompt_logprobs"][1] == pytest.approx(
        4.75 / 3
    )
    with pytest.raises(ValueError, match="needs them"):
        call(sgl.unconditional_likelihood_normalized, CONDITIONAL)


TWO = ("c0", "c1")


def selection(*sums):
    return Selection(tuple(ChoiceScore(f"c{i}", (i,), (value,)) for i, value in enumerate(sums)))


def test_probabilities_are_the_softmax_of_sums():
    assert selection(-1.0, -1.0).probs == {"c0": 0.5, "c1": 0.5}
    with pytest.raises(CapabilityError):
        Selection(()).probs


@pytest.mark.parametrize("method", [sgl.token_length_normalized, sgl.greedy_token_selection])
def test_a_temperature_draws_from_the_scores(method):
    picks = [
        decide_choice(selection(-0.1, -2.4), TWO, method, 1.0, seed).decision for seed in range(300)
    ]
    share = picks.count("c0") / 300
    assert 0.85 < share < 0.97  # exp(-0.1) against exp(-2.4): 0.909
    assert picks == [
        decide_choice(selection(-0.1, -2.4), TWO, method, 1.0, seed).decision for seed in range(300)
    ]


def test_a_temperature_with_unconditional_scores():
    scores = tuple(ChoiceScore(f"c{i}", (i,), (-1.0,), (None,)) for i in range(2))
    picked = decide_choice(Selection(scores), TWO, sgl.unconditional_likelihood_normalized, 0.5, 1)
    assert picked.decision in TWO


def test_a_backend_may_only_pick():
    assert (
        decide_choice(Selection((), picked="c1"), TWO, sgl.token_length_normalized).decision == "c1"
    )
    with pytest.raises(CapabilityError, match="neither scored"):
        decide_choice(Selection(()), TWO, sgl.token_length_normalized)


def test_greedy_needs_tokens():
    with pytest.raises(ValueError, match="at least one for every choice"):
        call(sgl.greedy_token_selection, [[], [], []])
