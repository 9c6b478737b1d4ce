"""Every conformance program means the same on every backend.

On scripted backends a program gives what its file says. On the engine, whose answers nobody knows
beforehand, it gives the same whether the engine plays whole programs or is asked node by node.
"""

from __future__ import annotations

import pytest

import sglang_lite as sgl
from sglang_lite import Engine
from sglang_lite.lang.backend.local import LocalBackend
from sglang_lite.lang.chat_template import get_chat_template
from sglang_lite.protocol import Generation, Prompt, SamplingParams, Span
from tests.conformance.case import cases, expected, node_by_node, outcome
from tests.constraints.test_generation import random_model

CASES = cases()


class Waiting(sgl.ScriptedBackend):
    """Answers on the executor loop, after others had their turn."""

    def answer_now(self, prompt, params, constraint):
        return None

    def select_now(self, prompt, choices, *, unconditional):
        return None


class Blocking(sgl.BaseBackend):
    """SGLang's blocking hooks over a script."""

    def __init__(self, answers):
        super().__init__()
        self._script = sgl.ScriptedBackend(answers)
        self.chat_template = self._script.get_chat_template()

    def generate(self, s, sampling_params):
        stop, most = sampling_params.stop, sampling_params.max_new_tokens
        params = SamplingParams(
            stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
            max_tokens=most,
            n=sampling_params.n,
        )
        found = self._script.answer_now(Prompt((Span(s.text_),)), params, None)
        texts = [(generation.text, _meta(generation)) for generation in found]
        return texts[0] if len(texts) == 1 else ([t for t, _ in texts], [m for _, m in texts])

    def select(self, s, choices, temperature, choices_method):
        found = self._script.select_now(Prompt((Span(s.text_),)), choices, unconditional=False)
        best = max(found.scores, key=lambda score: sum(score.logprobs))
        return sgl.lang.choices.ChoicesDecision(best.text, {})


def _meta(generation: Generation):
    return {"finish_reason": {"type": generation.finish_reason, "matched": generation.matched}}


@pytest.fixture(scope="module")
def engine():
    with Engine.of(random_model(), max_running=64) as engine:
        yield engine


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", [sgl.ScriptedBackend, Waiting, Blocking])
def test_a_script_gives_what_the_file_says(name, backend):
    case = CASES[name]
    if backend is Blocking and not case.blocking:
        return
    assert outcome(case, backend(case.answers)) == expected(case)


@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if case.streams and not case.raises]
)
def test_the_pieces_of_a_stream_are_the_text(name):
    case = CASES[name]
    state = case.program.run(
        backend=Waiting(case.answers), stream=True, **case.arguments, **case.settings
    )
    if isinstance(case.text, str):
        assert "".join(state.text_iter()) == case.text
    else:
        with pytest.raises(case.text):
            list(state.text_iter())


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.engine])
def test_the_engine_plays_whole_programs_as_it_plays_their_nodes(engine, name):
    case = CASES[name]
    settings = {"seed": 3, "max_new_tokens": 24}
    whole, (apart, alone) = LocalBackend(engine), node_by_node(engine)
    whole.chat_template = apart.chat_template = get_chat_template("chatml")
    found = outcome(case, whole, **settings)
    assert found == outcome(case, apart, **settings, **alone)
    assert found.raised == case.raises


def test_there_are_enough_of_them():
    assert len(CASES) >= 80
