"""The optional parts of the official JSON Schema suite, formats demanded: no wrong document is accepted, by the masks, a
rewriting or the validator, but in the parts that docs/constraints.md names.
"""

import json

import pytest

import sglang_lite as sgl
from sglang_lite.constraints.schema import json_schema, parse_json
from sglang_lite.protocol import ConstraintError, ValueValidationError
from tests.constraints.engine import accepts, compiled
from tests.constraints.suites import DRAFTS, official_groups, parts_accepted_wrongly


@pytest.mark.sampled(4)
@pytest.mark.parametrize("draft", DRAFTS)
def test_only_what_the_docs_name_is_wrongly_accepted(draft):
    accepted, rejected = set(), []
    for name, schema, resources, cases in official_groups(draft, "optional"):
        constraint = json_schema(schema, resources=resources)
        grammar, refusal = compiled(constraint)
        for case in cases:
            text = json.dumps(case["data"], ensure_ascii=False)
            valid = is_valid(constraint, text)
            if case["valid"] and valid is False:
                rejected.append((name, case["description"]))
            elif not case["valid"] and (
                valid or (refusal is None and (accepts(grammar, text) or sgl.grammar.matches(constraint, text)))
            ):
                accepted.add(f"{draft}/{name.split(': ')[0]}")
    assert accepted == {part for part in parts_accepted_wrongly() if part.startswith(f"{draft}/")}
    assert rejected == []


def is_valid(constraint, text):
    """None where the schema can't be followed."""
    try:
        parse_json(constraint, text)
        return True
    except ValueValidationError:
        return False
    except ConstraintError:
        return None
