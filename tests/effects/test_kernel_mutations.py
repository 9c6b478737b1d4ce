"""Sampling parameters whose effect kernels make: without it inside the kernel, the effect test of
the parameter fails.

A mutation is a change of the kernels' source, and is looked for in draws from random logits. That
an engine's answers have the effects, test_sampling.py sees; penalties, which change logits before
kernels draw, are looked for in them.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch

from sglang_lite.protocol import SglError
from sglang_lite.runtime.executor import logit_adjustments
from sglang_lite.runtime.kernels import sampling
from tests.effects.doors import ask_engine
from tests.effects.sampling_effects import EFFECTS, REPORTED, A, Ask, B, Effect, ids, likeliest
from tests.runtime.kernels import needs_kernels

# By parameter: a statement of kernels/sampling.py, and what it becomes. The first of each hides the
# parameter from the kernels, the others take the effect away where it is made.
SOURCE_MUTATIONS = {
    "temperature": [
        (
            "temperature = tl.load(temperatures + slot)",
            "temperature = tl.load(temperatures + slot) * 0.0 + 1.0",
        ),
        ("return x * (1.0 / temperature) -", "return x -"),
    ],
    "top_k": [
        ("top_k = tl.load(top_ks + slot)", "top_k = tl.load(top_ks + slot) * 0"),
        ("((top_k > 0) & (above >= top_k)) | (mass > most)", "mass > most"),
    ],
    "top_p": [
        ("top_p = tl.load(top_ps + slot)", "top_p = tl.load(top_ps + slot) * 0.0 + 1.0"),
        ("((top_k > 0) & (above >= top_k)) | (mass > most)", "(top_k > 0) & (above >= top_k)"),
    ],
    "min_p": [
        ("min_p = tl.load(min_ps + slot)", "min_p = tl.load(min_ps + slot) * 0.0"),
        ("floor = highest + tl.log(min_p) * temperature", "floor = floor * 1.0"),
    ],
    "sampling_order": [
        ("tl.load(sequentials + slot) > 0", "tl.load(sequentials + slot) < 0"),
        ("if sequential & (top_k > 0) & (top_p < 1.0):", "if sequential & (top_k < 0):"),
    ],
    "seed": [
        ("tl.load(seeds + slot)", "tl.load(seeds + slot) * 0"),
        ("a, b, c, d = tl.philox(seed, place,", "a, b, c, d = tl.philox(seed * 0, place,"),
    ],
}
# Penalties change logits, on all devices alike. By parameter the function that makes the effect.
LOGIT_MUTATIONS = {
    "frequency_penalty": "_subtract_counted",
    "presence_penalty": "_subtract_counted",
    "repetition_penalty": "_divide_repeated",
}


def falls_behind(ask: Ask) -> bool:
    """Whether a token that the prompt has, ahead of another by a hair, is not the one that is
    drawn.
    """
    alike = ask(repetition_penalty=1.0, logit_bias={A: 100, B: 100}, max_tokens=1, **REPORTED)
    scores = {token: score for score, token, _ in likeliest(alike)[0]}
    lead = scores[A] - scores[B]
    return ids(ask(logit_bias={A: 100, B: 100 + lead - 0.01}, max_tokens=1)) == [B]


CASES = {
    **{name: EFFECTS[name] for name in ("frequency_penalty", "presence_penalty")},
    "repetition_penalty": [Effect("repetition_penalty", 2.0, falls_behind, "kernels", {})],
}

pytestmark = needs_kernels
MUTATIONS = [
    pytest.param(name, *each, id=f"{name}: {each[0]}")
    for name, changes in SOURCE_MUTATIONS.items()
    for each in changes
]
NOT_CAPTURED = pytest.mark.skipif(
    torch.cuda.is_available(), reason="captured graphs have the kernels as they were"
)

# -------------------------------------------------------------------------------- draws from logits

ROWS, SIZE = 32, 24


def drawn(seed: float = 7, **given: float) -> torch.Tensor:
    """Ranks of tokens that kernels draw from random logits: one of each row, by the neutral values
    of what is not given.
    """
    logits = torch.randn((ROWS, SIZE), generator=torch.Generator().manual_seed(1)) * 2
    parameters = sampling.DeviceSampling.allocate(ROWS, torch.device("cpu"))
    for name, value in {"temperature": 1.0, "seed": seed, **given}.items():
        getattr(parameters, name).fill_(value)
    rows = torch.arange(ROWS, dtype=torch.int32)
    last, tokens = torch.zeros(ROWS, dtype=torch.int32), torch.zeros(ROWS, dtype=torch.int32)
    sampling.draw(logits, rows, rows, parameters, last, tokens)
    order = logits.argsort(dim=1, descending=True)
    found: torch.Tensor = (order == tokens.long()[:, None]).int().argmax(1)
    return found


def masses(ranks: torch.Tensor, first: int = SIZE) -> torch.Tensor:
    """Mass of the likelier tokens of each draw, among the first ones."""
    logits = torch.randn((ROWS, SIZE), generator=torch.Generator().manual_seed(1)) * 2
    shares = logits.sort(dim=1, descending=True).values[:, :first].softmax(1)
    return (shares.cumsum(1) - shares).gather(1, ranks[:, None].clamp(max=first - 1))[:, 0]


def ratios(ranks: torch.Tensor) -> torch.Tensor:
    """Probability of each draw, as a share of the likeliest token's."""
    logits = torch.randn((ROWS, SIZE), generator=torch.Generator().manual_seed(1)) * 2
    ordered = logits.sort(dim=1, descending=True).values
    return (ordered.gather(1, ranks[:, None])[:, 0] - ordered[:, 0]).exp()


BOTH = {"top_k": 4, "top_p": 0.5}
# What draws have with a parameter alone.
DRAWS = {
    "temperature": lambda **own: drawn(**({"temperature": 0.05} if own["given"] else {})).max() < 3,
    "top_k": lambda **own: (
        set(drawn(**({"top_k": 3} if own["given"] else {})).tolist()) == {0, 1, 2}
    ),
    "top_p": lambda **own: bool(
        (masses(drawn(**({"top_p": 0.3} if own["given"] else {}))) <= 0.3).all()
    ),
    "min_p": lambda **own: bool(
        (ratios(drawn(**({"min_p": 0.5} if own["given"] else {}))) >= 0.5 - 1e-6).all()
    ),
    "sampling_order": lambda **own: bool(
        (
            masses(drawn(**BOTH, **({"sequential": 1} if own["given"] else {})), 4) <= 0.5 + 1e-6
        ).all()
    ),
    "seed": lambda **own: (drawn(7) == drawn(8 if own["given"] else 7)).float().mean() < 0.9,
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_parameter_has_an_effect_on_draws(name):
    assert DRAWS[name](given=True)
    assert not DRAWS[name](given=False)


@NOT_CAPTURED
@pytest.mark.parametrize(("name", "old", "new"), MUTATIONS)
def test_without_its_effect_in_the_kernel_draws_show_none(name, old, new, tmp_path):
    with kernels_with(old, new, tmp_path) as launched:
        assert not DRAWS[name](given=True)
    assert launched, "no mutated kernel was launched"


# ------------------------------------------------------------------------------ an engine's answers


@pytest.mark.sampled(len(LOGIT_MUTATIONS))
@pytest.mark.parametrize("name", LOGIT_MUTATIONS)
def test_penalties_have_their_effects_on_an_engine_with_kernels(name, engines):
    assert _shown(name, engines)


@pytest.mark.parametrize(("name", "function"), LOGIT_MUTATIONS.items())
def test_without_what_changes_logits_a_penalty_shows_none(name, function, engines, monkeypatch):
    monkeypatch.setattr(logit_adjustments, function, lambda logits, rows: None)
    assert not _shown(name, engines)


def _shown(name, engines):
    """Whether all cases of a parameter show its effect with it, and none without it."""
    # which has A, and not B
    answer = partial(ask_engine, engines("kernels"), ignore_eos=True, prompt="The river")
    return all(
        _seen(case, answer, given=True) and not _seen(case, answer, given=False)
        for case in CASES[name]
    )


def _seen(case: Effect, answer, *, given):
    try:
        return case.seen(answer, given=given)
    except (SglError, AssertionError):  # of NaN, for one
        return False


@contextmanager
def kernels_with(old: str, new: str, folder: Path) -> Iterator[list[str]]:
    """Launches kernels whose source is changed, in place of the right ones. Yields the names of
    those that were launched.

    Args:
        old: text of their source.
        new: what stands there instead.
        folder: folder for the changed source, which the interpreter reads.
    """
    changed = _module_with(old, new, folder)
    launched: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_scan", "_pick"):
            patch.setattr(sampling, name, _Launcher(name, getattr(changed, name), launched))
        yield launched


def _module_with(old: str, new: str, folder: Path) -> ModuleType:
    source = Path(sampling.__file__).read_text(encoding="utf-8")
    assert old in source, f"kernels/sampling.py does not say {old!r} any more"
    file = folder / f"sampling_{next(_numbers)}.py"
    file.write_text(source.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Launcher:
    """Kernel that notes its launches.

    Args:
        name: its name.
        kernel: kernel of Triton.
        launched: takes the name at each launch.
    """

    def __init__(self, name, kernel, launched: list[str]) -> None:
        self._name, self._kernel, self._launched = name, kernel, launched

    def __getitem__(self, grid):
        self._launched.append(self._name)
        return self._kernel[grid]


_numbers = itertools.count()
