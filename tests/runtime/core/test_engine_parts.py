"""An engine's core without parts generates text, and rejects what a part would do."""

import pytest

from sglang_lite.protocol import CapabilityError, ParameterError, SamplingParams
from sglang_lite.runtime.calls import LoadLoraAdapter, Loras, UnloadLoraAdapter
from sglang_lite.runtime.core.submission import GenerateRequest
from tests.runtime.media.seeing import png, seen
from tests.runtime.scripted import SteppedEngine, ended


def ask(core, prompt="ab", **params):
    core.submit(GenerateRequest(prompt, SamplingParams(max_tokens=2, **params)), lambda event: None)


def test_a_core_without_parts_generates_what_one_with_parts_does():
    texts = []
    for parts in ([], None):
        engine = SteppedEngine(parts=parts)
        _, events = engine.start("ab", SamplingParams(max_tokens=5, temperature=0))
        engine.drain()
        texts.append(ended(events).text)
    assert texts[0] == texts[1] != ""


@pytest.mark.parametrize("parts", [[], None])
def test_a_parameter_that_no_part_takes_is_rejected(parts):
    core = SteppedEngine(parts=parts).core
    with pytest.raises(ParameterError, match=r"lora_path: the engine was made without adapters\."):
        ask(core, lora_path=("nobody",))
    with pytest.raises(ParameterError, match="image"):
        ask(core, seen("ab", png(28, 28)))
    core.close()


def test_a_call_that_no_part_answers_is_rejected():
    core = SteppedEngine(parts=[]).core
    for call in (LoadLoraAdapter("a", "b", pinned=False), UnloadLoraAdapter("a"), Loras()):
        with pytest.raises(CapabilityError):
            core.submit_call(call)
