"""Real-world schemas (a sample of MaskBench) through the masks of the engine. SGLANG_LITE_MASKBENCH=full takes all."""

import json
import lzma
import os
from pathlib import Path

import numpy as np
import pytest

from sglang_lite.constraints.schema import json_schema, parse_json
from sglang_lite.protocol import ValueValidationError
from tests.constraints.engine import accepts, compiled
from tests.constraints.style import styled

SAMPLE = Path("/work/shared/data/maskbench_sample.jsonl.xz")
STRIDE = 1 if os.environ.get("SGLANG_LITE_MASKBENCH") == "full" else 5
pytestmark = pytest.mark.skipif(not SAMPLE.exists(), reason=f"{SAMPLE} is not there")


def rows(stride):
    with lzma.open(SAMPLE, "rt") as lines:
        return [json.loads(line) for i, line in enumerate(lines) if i % stride == 0]


def test_real_schemas_are_refused_or_kept(capsys):
    counts = dict.fromkeys(("schemas", "refused", "pass", "pass in our style"), 0)
    wrong = []
    for row in rows(STRIDE):
        counts["schemas"] += 1
        constraint = json_schema(row["schema"])
        grammar, refusal = compiled(constraint)
        if refusal is not None:
            assert refusal.pointer is not None or not any(case["valid"] for case in row["tests"]), row["id"]
            counts["refused"] += 1
            continue
        exact = ours = True
        for i, case in enumerate(row["tests"]):
            text = styled(constraint, case["data"])
            accepted = accepts(grammar, json.dumps(case["data"], ensure_ascii=False))
            exact &= accepted == case["valid"]
            if not case["valid"]:
                if accepted or text is not None:
                    wrong.append(f"accepted: {row['id']} {i}")
            elif text is None or not accepts(grammar, text):
                ours = False
                wrong.append(f"rejected: {row['id']} {i}")
        counts["pass"] += exact
        counts["pass in our style"] += ours
    with capsys.disabled():
        print(f"\n  MaskBench: {counts}")
    assert wrong == []
    assert counts["pass"] >= 0.92 * counts["schemas"]
    assert counts["pass in our style"] >= 0.96 * counts["schemas"]


def test_the_validator_agrees_with_the_sample():
    for row in rows(STRIDE):
        constraint = json_schema(row["schema"])
        for case in row["tests"]:
            try:
                parse_json(constraint, json.dumps(case["data"]))
                valid = True
            except ValueValidationError:
                valid = False
            assert valid == case["valid"], row["id"]


def test_masks_of_a_real_vocabulary_allow_every_token_of_a_valid_text(model_file):
    from sglang_lite.runtime.grammar.llguidance import LlguidanceEngine
    from sglang_lite.runtime.models.weights.gguf import GgufFile
    from sglang_lite.runtime.tokens.tokenizer import tokenizer_from_gguf

    tokenizer = tokenizer_from_gguf(GgufFile(model_file).metadata, "test")
    size = tokenizer.vocab_size
    engine = LlguidanceEngine(tokenizer, size, sorted(tokenizer.eos_ids))
    mask = np.zeros((size + 31) // 32, np.int32)
    for row in rows(40):
        constraint = json_schema(row["schema"])
        valid = [case["data"] for case in row["tests"] if case["valid"]]
        if not valid or compiled(constraint)[1] is not None:
            continue
        matcher, text = engine.compile(constraint).matcher(), styled(constraint, valid[0])
        for token in tokenizer.backend.encode(text, add_special_tokens=False).ids[:300]:
            matcher.fill_mask(mask)
            assert mask[token // 32] >> (token % 32) & 1, row["id"]
            assert matcher.accept(token)
