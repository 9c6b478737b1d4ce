"""Texts that a model with random logits generates under random schemas are valid, or were cut
short.

SGLANG_LITE_RANDOM_SCHEMAS=1000 takes that many schemas.
"""

import os
import random
import threading
from typing import Annotated

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

import sglang_lite as sgl
from sglang_lite import Engine
from sglang_lite.constraints.json_schema.normal_form import normalise
from sglang_lite.constraints.schema import json_schema, parse_json
from sglang_lite.protocol import Choices, ConstraintError, Generation, SamplingParams
from sglang_lite.runtime.loading.load_model import LoadedModel
from sglang_lite.runtime.tokens.tokenizer import Tokenizer
from tests.constraints.random_schemas import schema
from tests.runtime.scripted import ScriptedModel

COUNT = int(os.environ.get("SGLANG_LITE_RANDOM_SCHEMAS", "75"))
SAMPLES = 3

PIECES = ['", "', '": ', '{"', '{}', '"}', '"]', "]}", "[]", "[{", "}, {", ", ", "true", "false", "null", "aa", "ab", "b",
          '"a": ', '"b": ', '"a', '"b', "2024-", "-02", "10", "0.5", "é", "\\n", "\n\n", "  "]  # fmt: skip
TOKENS = list(
    dict.fromkeys([*(bytes([byte]) for byte in range(256)), *(piece.encode() for piece in PIECES)])
)
EOS = len(TOKENS)
# Else strings and objects would hardly ever end, and their names would hardly ever be those of the
# schema.
LIKELY = torch.tensor(
    [3.0 * (t in b'"}]:ab0' or (len(t) > 1 and not t.isspace())) for t in TOKENS] + [3.0]
)


class RandomModel(ScriptedModel):
    """Logits that are a random function of all tokens so far."""

    def logits(self, hidden):
        rows = [
            np.random.default_rng(state).normal(0, 2, EOS + 1)
            for state in hidden[:, 0].numpy().view(np.uint64)
        ]
        return torch.from_numpy(np.array(rows, np.float32)) + LIKELY


def random_model():
    alphabet = byte_alphabet()
    names = ["".join(alphabet[byte] for byte in token) for token in TOKENS]
    backend = Backend(models.BPE({name: i for i, name in enumerate([*names, "<end>"])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer = Tokenizer(backend, [*TOKENS, b"<end>"], [EOS], eos_ids=[EOS])
    return LoadedModel("random", RandomModel(), tokenizer, EOS + 1, frozenset({EOS}), 512)


def byte_alphabet():
    """GPT-2's: printed characters stand for themselves, the others for those from 256 on."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    return {byte: chr(byte) for byte in printed} | {
        byte: chr(256 + i) for i, byte in enumerate(others)
    }


@pytest.fixture(scope="module")
def engine():
    with Engine.of(random_model()) as engine:
        yield engine


def enforced_schemas(count):
    """Random schemas that are enforced, most of them of objects or arrays."""
    seed = 0
    while count:
        seed += 1
        drawn = schema(random.Random(seed))
        if isinstance(drawn, dict) and seed % 3:
            drawn["type"] = "object" if seed % 3 == 1 else "array"
        constraint = json_schema(drawn)
        try:
            normalise(constraint)
        except ConstraintError:
            continue
        count -= 1
        yield seed, constraint


def test_finished_outputs_are_valid_and_the_others_ran_out_of_tokens(engine, capsys):
    answers, left = [], threading.Semaphore(0)

    def sink(seed, constraint):
        def take(event):
            answers.append((seed, constraint, event))
            left.release()

        return take

    for seed, constraint in enforced_schemas(COUNT):
        params = SamplingParams(max_tokens=100, n=SAMPLES, seed=seed, temperature=1.0)
        engine.submit("x", params, constraint, sink=sink(seed, constraint))
    for _ in range(COUNT * SAMPLES):
        assert left.acquire(timeout=120)
    finished, invalid = [], []
    for seed, constraint, answer in answers:
        assert isinstance(answer, Generation), (seed, constraint, answer)
        assert answer.finish_reason in ("stop", "length"), (seed, answer)
        if answer.finish_reason == "stop":
            finished.append(answer)
            try:
                parse_json(constraint, answer.text)
            except ValueError as error:
                invalid.append((seed, constraint.schema, answer.text, str(error)))
    with capsys.disabled():
        print(
            f"\n  {COUNT} random schemas, {len(answers)} generations: {len(finished)} finished, {len(invalid)} invalid"
        )
    assert invalid == []
    assert len(finished) > 0.4 * len(answers)


@pytest.mark.parametrize("seed", range(4))
def test_what_is_forced_from_the_middle_of_a_character_on_is_generated(engine, seed):
    constraint = Choices(("ênd of it", "ünd of it"))  # of which no character is a token
    generation = engine.complete("x", SamplingParams(max_tokens=50, seed=seed), constraint)
    assert (generation.text in constraint.options, generation.finish_reason) == (True, "stop")


@pytest.mark.parametrize("seed", range(10))
def test_generated_quotes_are_spans_and_the_metadata_says_which(engine, seed):
    rng = random.Random(seed)
    some = ["aa", "ab", "b", "\u00e9", " ", " ", '"', "\\", "\r\n", "0.5", "\U0001f600", ", "]
    documents = ["".join(rng.choice(some) for _ in range(length)) + "." for length in (5, 30)]

    @sgl.function
    def cite(s):
        s += "x" + sgl.gen(
            "quotes",
            type=list[Annotated[str, sgl.quote(*documents)]],
            max_tokens=400,
            temperature=1,
        )

    states = [cite.run(backend=engine, seed=5 * seed + i) for i in range(5)]
    finished = [state for state in states if state.error() is None]
    for state in finished:
        found = state.get_meta_info("quotes")["quotes"]
        assert [each["pointer"] for each in found] == [f"/{i}" for i in range(len(state["quotes"]))]
        assert [documents[each["source"]][each["start"] : each["end"]] for each in found] == state[
            "quotes"
        ]
    assert all("max_tokens ended" in str(state) for state in states if state not in finished)
    assert finished
