"""Every sampling parameter has an effect, made at the places that its row names."""

from functools import partial

import pytest
import torch

from sglang_lite.protocol import SamplingParams, SglError
from sglang_lite.protocol.sampling import PARAMETERS
from sglang_lite.runtime.requests.resolved_params import ResolvedParams, resolve_params
from tests.effects.doors import ask_completions, ask_engine, ask_program, ask_server
from tests.effects.mutations import hide_field
from tests.effects.sampling_effects import EFFECTS
from tests.runtime.kernels import needs_kernels

# Parameters whose value can't be hidden from a place, with the reason.
NOT_HIDDEN = {"n": "the caller waits for as many answers as it asked for, which then never come."}
CASES = [
    pytest.param(case, id=f"{name}={case.value}")
    for name, cases in EFFECTS.items()
    for case in cases
]
PLACES = [
    pytest.param(parameter, place, id=f"{parameter.name}-{place}")
    for parameter in PARAMETERS
    if parameter.name not in NOT_HIDDEN
    for place in parameter.effect_in
]


def test_every_parameter_has_a_case():
    missing = [each.name for each in PARAMETERS if each.name not in EFFECTS]
    assert not missing, f"{', '.join(missing)}: add a case to tests/effects/sampling_effects.py."
    assert not EFFECTS.keys() - {each.name for each in PARAMETERS}


def test_every_parameter_names_a_place():
    assert not [each.name for each in PARAMETERS if not each.effect_in]


@pytest.mark.parametrize("case", CASES)
def test_a_parameter_has_an_effect(case, engines):
    answer = partial(ask_engine, engines(case.engine))
    assert not case.seen(answer, given=False)
    assert case.seen(answer, given=True)


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="rows name the places that a CPU's engine reads"
)
@pytest.mark.parametrize(("parameter", "place"), PLACES)
def test_without_its_place_a_parameter_has_no_effect(parameter, place, engines):
    default = getattr(resolve_params(SamplingParams(), 10), parameter.name)
    with hide_field(ResolvedParams, parameter.name, place, default):
        assert not all(_seen(case, engines(case.engine)) for case in EFFECTS[parameter.name])


def _seen(case, engine):
    try:
        return case.seen(partial(ask_engine, engine), given=True)
    except SglError:  # without the parameter the request is refused
        return False


def _cases(*places, but=()):
    """Cases of the parameters that can be given in one of some places."""
    names = [
        each.name
        for each in PARAMETERS
        if not {*places}.isdisjoint(each.places) and each.name not in but
    ]
    return [
        pytest.param(case, id=f"{name}={case.value}")
        for name in names
        for case in EFFECTS.get(name, ())
    ]


@pytest.mark.parametrize("case", _cases("gen", but=("return_logprob",)))
def test_a_parameter_of_gen_has_its_effect_in_a_program(case, engines):
    answer = partial(ask_program, engines(case.engine))
    assert not case.seen(answer, given=False)
    assert case.seen(answer, given=True)


@pytest.mark.parametrize("case", _cases("sampling_params", "request"))
def test_a_parameter_has_its_effect_on_a_server(case, servers):
    answer = partial(ask_server, servers(case.engine))
    assert not case.seen(answer, given=False)
    assert case.seen(answer, given=True)


@pytest.mark.parametrize("case", _cases("openai", "completions"))
def test_a_parameter_of_openais_routes_has_its_effect(case, servers):
    answer = partial(ask_completions, servers(case.engine))
    assert not case.seen(answer, given=False)
    assert case.seen(answer, given=True)


# What kernels have a word of a slot for. In a small vocabulary the joint order is hard to tell from
# the other one.
DRAWS = {"temperature", "top_k", "top_p", "min_p", "sampling_order", "seed"}
ON_KERNELS = [
    each for each in CASES if each.values[0].parameter in DRAWS and each.values[0].value != "joint"
]


@needs_kernels
@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", ON_KERNELS)
def test_a_parameter_of_draws_has_its_effect_in_kernels(case, engines):
    answer = partial(ask_engine, engines("kernels"), ignore_eos=True)
    assert not case.seen(answer, given=False)
    assert case.seen(answer, given=True)
