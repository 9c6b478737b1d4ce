"""Real-world schemas (a sample of MaskBench) through the masks. SGLANG_LITE_MASKBENCH=full takes
all of the sample.

`maskbench.json` is a ratchet: the schemas that are refused and those with a valid instance that is
rejected. Both may only become less.
"""

import json
import os
from pathlib import Path

import sglang_lite as sgl
from sglang_lite.constraints.json_schema.write_value import value_text
from sglang_lite.constraints.schema import json_schema, parse_json
from sglang_lite.protocol import ConstraintError, ValueValidationError
from sglang_lite.runtime.structured_output.base import masks_allow_tokens
from sglang_lite.runtime.structured_output.llguidance import LlguidanceEngine
from tests.constraints.engine import accepts, compiled
from tests.constraints.suites import maskbench

STRIDE = 1 if os.environ.get("SGLANG_LITE_MASKBENCH") == "full" else 20
RATCHET = json.loads(Path(__file__).with_name("maskbench.json").read_text())


def test_real_schemas_are_refused_or_kept(capsys):
    refused, rejected, accepted, ids = [], [], [], []
    for name, schema, cases in maskbench(STRIDE):
        ids.append(name)
        constraint = json_schema(schema)
        grammar, refusal = compiled(constraint)
        if refusal is not None:
            if "contradicts itself" not in str(refusal) or any(case["valid"] for case in cases):
                assert refusal.pointer is not None, name
                refused.append(name)
            continue
        for case in cases:
            text = json.dumps(case["data"], ensure_ascii=False)
            matched = sgl.grammar.matches(constraint, text)
            if case["valid"] and not matched:
                rejected.append(name)
            elif not case["valid"] and (matched or accepts(grammar, text)):
                accepted.append(name)
    passed = len(ids) - len({*refused, *rejected, *accepted})
    with capsys.disabled():
        print(
            f"\n  MaskBench: {passed} of {len(ids)} schemas pass = {100 * passed / len(ids):.1f} %, refused {refused}"
        )
    assert accepted == []
    assert sorted(refused) == sorted({*RATCHET["refused"]} & {*ids}), (
        "the ratchet only goes one way"
    )
    assert sorted({*rejected}) == sorted({*RATCHET["rejected"]} & {*ids}), (
        "the ratchet only goes one way"
    )
    assert passed >= 0.9 * len(ids)


def test_the_validator_agrees_with_the_sample():
    for name, schema, cases in maskbench(STRIDE):
        constraint = json_schema(schema)
        for case in cases:
            try:
                parse_json(constraint, json.dumps(case["data"]))
                valid = True
            except ValueValidationError:
                valid = False
            except ConstraintError:  # it refers to what is not there
                assert name in RATCHET["refused"]
                continue
            assert valid == case["valid"], name


def test_masks_of_a_real_vocabulary_allow_every_token_of_a_valid_text(model_file):
    from sglang_lite.runtime.models.weights.gguf_file import GgufFile
    from sglang_lite.runtime.tokens.from_gguf import tokenizer_from_gguf

    tokenizer = tokenizer_from_gguf(GgufFile(model_file).metadata, "test")
    engine = LlguidanceEngine(tokenizer, tokenizer.vocab_size, sorted(tokenizer.eos_ids))
    for name, schema, cases in maskbench(40):
        constraint = json_schema(schema)
        valid = [case["data"] for case in cases if case["valid"]]
        if valid and compiled(constraint)[1] is None:
            text = value_text(constraint, valid[0])
            assert text is not None
            assert masks_allow_tokens(engine.compile(constraint), engine.encode(text)), name
