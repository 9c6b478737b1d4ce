"""The official JSON Schema test suite through `sgl.grammar.matches` and, byte by byte, through the
masks.

`official_suite.json` is a ratchet: what is refused, and which valid documents are rejected. Both
may only become less.
"""

import itertools
import json
from pathlib import Path

import pytest

import sglang_lite as sgl
from sglang_lite.constraints.schema import json_schema, parse_json
from sglang_lite.protocol import ConstraintError, ValueValidationError
from tests.constraints.engine import accepts, compiled
from tests.constraints.suites import DRAFTS, official_groups

RATCHET = json.loads(Path(__file__).with_name("official_suite.json").read_text())


@pytest.mark.sampled(5)
@pytest.mark.parametrize("draft", DRAFTS)
def test_every_case_is_right_or_its_schema_refused(draft, capsys):
    ratchet = RATCHET[draft]
    refused, rejected, accepted = [], [], []
    cases_in_all = right = exact = 0
    for name, schema, resources, cases in official_groups(draft):
        cases_in_all += len(cases)
        # as the suite expects of format
        constraint = json_schema(schema, format="annotate", resources=resources)
        grammar, refusal = compiled(constraint)
        # an answer: nothing is valid
        if refusal is not None and "contradicts itself" in str(refusal):
            wrong = [case for case in cases if case["valid"]]
            assert not wrong, name
            right += len(cases)
            exact += len(cases)
            continue
        if refusal is not None:
            assert refusal.pointer is not None, name
            refused.append(name)
            continue
        for case in cases:
            label, text = (
                f"{name}: {case['description']}",
                json.dumps(case["data"], ensure_ascii=False),
            )
            matched, walked = sgl.grammar.matches(constraint, text), accepts(grammar, text)
            right += matched == case["valid"]
            exact += walked == case["valid"]
            if case["valid"]:
                if not matched:
                    rejected.append(label)
            elif (
                matched
                or walked
                or any(accepts(grammar, other) for other in reordered(case["data"]))
            ):
                accepted.append(label)
    with capsys.disabled():
        share = f"{100 * right / cases_in_all:.1f} % (byte for byte in our style {100 * exact / cases_in_all:.1f} %)"
        print(
            f"\n  official suite, {draft}: {right} of {cases_in_all} right = {share}, {len(refused)} schemas refused"
        )
    assert accepted == []
    assert sorted(refused) == sorted(ratchet["refused"]), "the ratchet only goes one way"
    assert sorted(rejected) == sorted(ratchet["rejected"]), "the ratchet only goes one way"
    assert right >= 0.98 * cases_in_all


def reordered(data):
    """The texts of an object with its members in any order."""
    if isinstance(data, dict) and 1 < len(data) < 5:
        for members in itertools.permutations(data.items()):
            yield json.dumps(dict(members), ensure_ascii=False)


@pytest.mark.parametrize("draft", DRAFTS)
def test_the_validator_agrees_with_the_suite_in_any_style(draft):
    for name, schema, resources, cases in official_groups(draft):
        constraint = json_schema(schema, format="annotate", resources=resources)
        for case in cases:
            text = json.dumps(case["data"], indent=2)
            try:
                parse_json(constraint, text)
                valid = True
            except ValueValidationError:
                valid = False
            except ConstraintError:
                continue  # it refers to what is not there
            assert valid == case["valid"], f"{name}: {case['description']}"
