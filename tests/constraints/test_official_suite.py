"""The official JSON Schema test suite, draft 2020-12, through the masks of the engine: refused, or right in every case.

`official_suite.json` is a ratchet: what is refused, and which valid documents are only accepted when they are written in
our style (members in order, whole numbers without a fraction). Both may only become less.
"""

import itertools
import json
from pathlib import Path

import pytest

from sglang_lite.constraints.matching import matches
from sglang_lite.constraints.schema import json_schema, parse_json
from sglang_lite.protocol import ConstraintError, ValueValidationError
from tests.constraints.engine import accepts, compiled
from tests.constraints.style import styled

SUITE = Path("/work/shared/data/json_schema_suite_2020-12")
RATCHET = json.loads(Path(__file__).with_name("official_suite.json").read_text())
pytestmark = pytest.mark.skipif(not SUITE.exists(), reason=f"{SUITE} is not there")


def groups():
    for file in sorted(SUITE.glob("*.json")):
        for group in json.loads(file.read_text()):
            yield f"{file.stem}: {group['description']}", group["schema"], group["tests"]


def test_every_schema_is_refused_or_kept_in_every_case(capsys):
    refused, otherwise, wrong = [], [], []
    counts = dict.fromkeys(("schemas", "cases", "enforced", "contradictory", "right"), 0)
    for name, schema, cases in groups():
        counts["schemas"] += 1
        counts["cases"] += len(cases)
        constraint = json_schema(schema, format="annotate")  # as the suite expects of format
        grammar, refusal = compiled(constraint)
        if refusal is not None and "contradicts itself" in str(refusal):
            assert not any(case["valid"] for case in cases), name
            counts["contradictory"] += 1
            counts["right"] += len(cases)
            continue
        if refusal is not None:
            assert refusal.pointer is not None, name
            refused.append(name)
            continue
        counts["enforced"] += 1
        for case in cases:
            label = f"{name}: {case['description']}"
            given = json.dumps(case["data"], ensure_ascii=False)
            accepted, ours = accepts(grammar, given), styled(constraint, case["data"])
            counts["right"] += accepted == case["valid"]
            if case["valid"]:
                if not accepted:
                    otherwise.append(label)
                if ours is None or not accepts(grammar, ours):
                    wrong.append(f"rejected: {label}")
            elif accepted or ours is not None or any(accepts(grammar, text) for text in reordered(case["data"])):
                wrong.append(f"accepted: {label}")
    with capsys.disabled():
        print(f"\n  official suite: {counts}, refused {len(refused)}, right only in our style {len(otherwise)}")
    assert sorted(set(wrong) - set(RATCHET["read otherwise"])) == []
    assert sorted(refused) == sorted(RATCHET["refused"]), "the ratchet only goes one way"
    assert sorted(otherwise) == sorted(RATCHET["right only in our style"]), "the ratchet only goes one way"
    assert counts["enforced"] + counts["contradictory"] >= 0.9 * counts["schemas"]


def reordered(data):
    """The texts of an object with its members in any order."""
    if isinstance(data, dict) and 1 < len(data) < 5:
        for members in itertools.permutations(data.items()):
            yield json.dumps(dict(members), ensure_ascii=False)


def test_the_validator_agrees_with_the_suite_in_any_style():
    for name, schema, cases in groups():
        constraint = json_schema(schema, format="annotate")
        for case in cases:
            text = json.dumps(case["data"], indent=2)
            try:
                parse_json(constraint, text)
                valid = True
            except ValueValidationError:
                valid = False
            except ConstraintError:
                continue  # it refers to what is not there
            assert valid == case["valid"] or name in RATCHET["of a dialect of its own"], (
                f"{name}: {case['description']}"
            )
            if compiled(constraint)[1] is None:
                assert matches(constraint, text) == valid
