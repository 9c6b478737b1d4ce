"""The optional parts of the official JSON Schema suite, formats demanded: no wrong document is
accepted, by the masks, a rewriting or the validator, but in the parts that docs/constraints.md
names.

`optional_suite.json` is a ratchet: the right documents that masks do not write. It may only become
shorter.
"""

import json
from pathlib import Path

import pytest

import sglang_lite as sgl
from sglang_lite.constraints.schema import json_schema, parse_json
from sglang_lite.protocol import ConstraintError, ValueValidationError
from tests.constraints.engine import accepts, compiled
from tests.constraints.suites import DRAFTS, official_groups, parts_accepted_wrongly

RATCHET = json.loads(Path(__file__).with_name("optional_suite.json").read_text())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("draft", DRAFTS)
def test_only_what_the_docs_name_is_wrongly_accepted(draft):
    accepted, rejected, unwritten = set(), [], []
    for name, schema, resources, cases in official_groups(draft, "optional"):
        constraint = json_schema(schema, resources=resources)
        grammar, refusal = compiled(constraint)
        for case in cases:
            text = json.dumps(case["data"], ensure_ascii=False)
            valid = is_valid(constraint, text)
            if case["valid"] and (refusal is not None or not accepts(grammar, text)):
                unwritten.append(f"{name}: {case['description']}")
            if case["valid"] and valid is False:
                rejected.append((name, case["description"]))
            elif not case["valid"] and (
                valid
                or (
                    refusal is None
                    and (accepts(grammar, text) or sgl.grammar.matches(constraint, text))
                )
            ):
                accepted.add(f"{draft}/{name.split(': ')[0]}")
    assert accepted == {part for part in parts_accepted_wrongly() if part.startswith(f"{draft}/")}
    assert rejected == []
    assert unwritten == RATCHET[draft], "the ratchet only goes one way"


def test_few_right_documents_are_not_written():
    assert sum(map(len, RATCHET.values())) <= 20


def is_valid(constraint, text):
    """None where the schema can't be followed."""
    try:
        parse_json(constraint, text)
        return True
    except ValueValidationError:
        return False
    except ConstraintError:
        return None
