"""Ends of constrained generations: `stop` means that its text is complete."""

import json
import re

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

import sglang_lite as sgl
from sglang_lite.constraints.schema import json_schema
from sglang_lite.program.nodes import Gen, Program, Text
from sglang_lite.protocol import (
    Choices,
    Generation,
    JsonSchema,
    Prompt,
    Regex,
    SamplingParams,
    Span,
)
from sglang_lite.runtime.loading.load_model import LoadedModel
from sglang_lite.runtime.tokens.tokenizer import Tokenizer
from tests.runtime.scripted import ScriptedModel, SteppedEngine, ended

TOKENS = ["Ā", *'{}":,', "Ġ", *"abcdefghijklmnopqrstuvwxyz0123456789", '{"', '":']
END = TOKENS.index('"')  # which JSON needs
OBJECT = {"type": "object", "required": ["a", "b"], "additionalProperties": False,
          "properties": {"a": {"type": "boolean"}, "b": {"type": "string", "maxLength": 3}}}  # fmt: skip


class Wants(ScriptedModel):
    """Likes its end of sequence best, then what comes first in the vocabulary."""

    def logits(self, hidden):
        logits = -torch.arange(len(TOKENS), dtype=torch.float32).repeat(len(hidden), 1) / 10
        logits[:, END] = 1.0
        return logits


def engine_for(**config):
    backend = Backend(models.BPE({token: i for i, token in enumerate(TOKENS)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    spelled = [token.replace("Ġ", " ").replace("Ā", "\x00").encode() for token in TOKENS]
    tokenizer = Tokenizer(backend, spelled, [0], eos_ids=[END])
    model = LoadedModel("wants", Wants(), tokenizer, len(TOKENS), frozenset({END}), 256)
    return SteppedEngine(model=model, max_total_tokens=192, context_length=128, **config)


def generate(engine, constraint, **given):
    params = SamplingParams(**{"temperature": 0, "max_tokens": 60, **given})
    engine.compile_grammar(constraint)
    _, events = engine.start("go", params, constraint=constraint, stream=bool(params.stop))
    engine.drain()
    return ended(events)


@pytest.mark.parametrize("jump", ["safe", "off"])
@pytest.mark.parametrize("logprobs", [False, True])
def test_an_end_of_sequence_that_is_text_of_the_grammar_is_text(jump, logprobs):
    generation = generate(
        engine_for(jump_forward=jump), json_schema(OBJECT), return_logprob=logprobs
    )
    assert generation.finish_reason == "stop"
    assert set(json.loads(generation.text)) == {"a", "b"}


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_it_ends_a_text_that_is_complete(temperature):
    """As may any token that does not go on, and no letter, which would go on with the word."""
    ends = set()
    for seed in range(1 if temperature == 0 else 20):
        generation = generate(engine_for(), Regex("[ab]{2,}"), temperature=temperature, seed=seed)
        assert generation.finish_reason == "stop"
        assert re.fullmatch("[ab]{2,}", generation.text)
        last = generation.token_ids[-1]
        assert generation.matched == (END if last == END else None)
        assert len(generation.text) == len(generation.token_ids) - 1
        assert not TOKENS[last][0].isalpha() or TOKENS[last] in "ĀĠ"
        ends.add(last)
    assert ends == {END} if temperature == 0 else len(ends) > 3


@pytest.mark.parametrize(("backend", "constraint"), [
    (backend, constraint)
    for backend in ("llguidance", "xgrammar", "outlines")
    for constraint in (json_schema(OBJECT), Regex('"[ab]"'), Regex('x"?y'), Choices(('"a"', '"b"')))
    if backend != "outlines" or not isinstance(constraint, JsonSchema)  # it takes none
])  # fmt: skip
def test_a_generation_that_ends_inside_its_constraint_is_never_a_stop(backend, constraint):
    """An engine may know no way to continue: then the request fails."""
    engine = engine_for(constraint_backend=backend)
    for limit in (1, 2, 3, 60):
        try:
            end = generate(engine, constraint, max_tokens=limit)
        except sgl.ConstraintError:
            continue
        if isinstance(end, Generation) and end.finish_reason == "stop":
            assert sgl.grammar.matches(constraint, end.text), end.text


def test_the_users_stop_token_ends_it_anywhere():
    engine = engine_for()
    inside = generate(engine, json_schema(OBJECT), stop_token_ids=(END,))
    assert (inside.finish_reason, inside.matched) == ("stop", END)
    engine.check_empty()


def test_half_a_character_at_the_end_is_left_out(small_engine):
    """Bytes of a character that a model has begun to write are no text; its ids stay."""
    whole = "日本" * 4
    ids = small_engine.tokenizer.encode(whole, first=False)
    assert len(ids) > len(whole)  # some of its tokens are parts of a character
    seen = set()
    for limit in range(1, 8):
        cut = Gen("a", SamplingParams(temperature=0, max_tokens=limit), Choices((whole,)))
        program = Program((cut, Text(" is"), Gen("b", SamplingParams(temperature=0, max_tokens=2))))
        result, played = small_engine.play("x", program)
        generation, after = (each.event for each in played)
        assert whole.startswith(generation.text)
        assert len(generation.token_ids) == limit
        kept = [i for span in generation.spans for i in span.ids or ()]
        assert small_engine.tokenizer.decode(kept) == generation.text
        assert result.text == generation.text + " is" + after.text
        spans = (Span("x"), *generation.spans, Span(" is"))
        assert (
            small_engine.complete(Prompt(spans), SamplingParams(temperature=0, max_tokens=2)).text
            == after.text
        )
        seen.add(len(kept) == limit)
    assert seen == {True, False}
