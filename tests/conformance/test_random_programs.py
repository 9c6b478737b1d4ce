"""Random programs mean the same whether an engine plays them whole or is asked node by node.

SGLANG_LITE_PROGRAMS=3000 takes that many; SGLANG_LITE_FIRST=1234 begins with that one.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from sglang_lite import Engine
from sglang_lite.lang.backend.local import LocalBackend
from sglang_lite.lang.chat_template import get_chat_template
from sglang_lite.protocol import SamplingParams
from sglang_lite.runtime.loading.load_model import LoadedModel
from sglang_lite.runtime.tokens.tokenizer import Tokenizer
from tests.conformance.case import node_by_node
from tests.conformance.random_programs import drawn, smaller
from tests.conformance.random_steps import ran
from tests.constraints.test_generation import TOKENS as PIECES
from tests.constraints.test_generation import byte_alphabet
from tests.lang.fakes import within
from tests.runtime.scripted import ScriptedModel

COUNT = int(os.environ.get("SGLANG_LITE_PROGRAMS", "60"))
FIRST = int(os.environ.get("SGLANG_LITE_FIRST", "0"))
AT_ONCE = 6
PATIENCE = 60  # seconds for a run
ENGINES = {
    "as it is": {},
    "step by step": {"overlap": False, "jump_forward": "off"},
    "short of memory": {"max_total_tokens": 1024, "max_running": 12, "page_size": 16},
    "short of rows": {"max_running": 2, "step_tokens": 16, "policy": "fcfs"},
    "without a cache": {"prefix_cache": False, "max_total_tokens": 1024, "page_size": 4},
}
MERGES = [("a", "b"), ("b", "a"), (" ", "a"), (" ", "b"), ("ab", "b"), ("a", "ab"), (":", " "), (",", " "), ("b", " "),
          (" ", "ab"), ("ab", "ba"), ("\n", "\n")]  # fmt: skip
TOKENS = list(dict.fromkeys([*PIECES, *((left + right).encode() for left, right in MERGES)]))
EOS = len(TOKENS)
LIKELY = torch.tensor([3.0 * (token.strip(b'ab0:,"}] \n') == b"") for token in TOKENS] + [3.0])


class Model(ScriptedModel):
    """Logits that are a random function of all tokens so far, over a vocabulary that merges text."""

    def logits(self, hidden):
        rows = [
            np.random.default_rng(state).normal(0, 2, EOS + 1)
            for state in hidden[:, 0].numpy().view(np.uint64)
        ]
        return torch.from_numpy(np.array(rows, np.float32)) + LIKELY


def model():
    alphabet = byte_alphabet()

    def spelled(token):
        return "".join(alphabet[byte] for byte in token)

    names = {spelled(token): i for i, token in enumerate(TOKENS)}
    rules = [(spelled(left.encode()), spelled(right.encode())) for left, right in MERGES]
    backend = Backend(models.BPE({**names, "<end>": EOS}, rules))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    return LoadedModel("random", Model(), Tokenizer(backend, [*TOKENS, b"<end>"], [EOS], eos_ids=[EOS]), EOS + 1,
                       frozenset({EOS}), 1024)  # fmt: skip


@pytest.mark.parametrize("number", range(len(ENGINES)), ids=list(ENGINES))
def test_a_random_program_means_the_same_whole_and_node_by_node(number, caplog):
    caplog.set_level("CRITICAL", "sglang_lite")  # branches that failed and that nobody read
    config = list(ENGINES.values())[number]
    seeds = range(FIRST + number, FIRST + COUNT, len(ENGINES))
    with Engine.of(model(), deterministic=True, **config) as engine:
        whole, (apart, alone) = LocalBackend(engine), node_by_node(engine)
        whole.chat_template = apart.chat_template = get_chat_template("chatml")

        def both(program):
            return (
                within(PATIENCE, partial(ran, program, whole)),
                within(PATIENCE, partial(ran, program, apart, **alone)),
            )

        with ThreadPoolExecutor(AT_ONCE) as pool:
            outcomes = list(pool.map(both, map(drawn, seeds)))
        for seed, (one, other) in zip(seeds, outcomes):
            if one != other:
                less = smaller(
                    drawn(seed), lambda program: len({repr(found) for found in both(program)}) > 1
                )
                one, other = both(less)
                raise AssertionError(
                    f"program {seed}: {less}\nwhole:        {one}\nnode by node: {other}"
                )
        for _ in range(1000):  # branches that nobody has read
            stats = engine.stats()
            if not stats["running"] + stats["waiting"]:
                break
            engine.complete("a", SamplingParams(max_tokens=1))
        assert (stats["running"], stats["waiting"]) == (0, 0)
