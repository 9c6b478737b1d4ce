"""Recipes of CONTRIBUTING.md, carried out with dummies in a copy of the package.

What does nothing must be found by the tests that are there, and what does something must need no other file than the
recipe names.
"""

import re
from pathlib import Path

import pytest

from sglang_lite.runtime.models.families import ARCHITECTURES
from tests.effects.package_copy import ROOT, PackageCopy

MOST_FOR_A_SAMPLING_PARAMETER, MOST_FOR_OTHERS = 8, 6

pytestmark = pytest.mark.slow  # each runs tests in a process of its own


# Four parameters: one that works, one whose row names the wrong place, one that does nothing, and one that has no case.
WORKS, MISPLACED, IDLE, UNSEEN = "top_n_sigma", "misplaced_sigma", "idle_sigma", "unseen_sigma"
ROW = """    Parameter(
        "{name}", "float", 0.0, "leave out logits this many deviations below the largest", Range(0, 100), places=_OURS,
        effect_in=("runtime/executor/{place}.py",),
    ),
"""
EFFECT = """    for i, row in rows:
        if sigma := row.params.top_n_sigma or row.params.misplaced_sigma:
            logits[i][logits[i] < logits[i].max() - sigma * logits[i].std()] = float("-inf")
"""
CASE = """

@effect("{name}", 0.0001, **DRAWN)
def draws_within_deviations_for_{name}(ask: Ask) -> bool:
    return ranks(ask(**REPORTED)) == [0] * 12
"""


def check_a_sampling_parameter(copy):
    for name in (WORKS, MISPLACED, IDLE, UNSEEN):
        _add_parameter(copy, name)
    table = "sglang_lite/runtime/requests/resolved_params.py"
    copy.insert(table, f" or self.{WORKS} or self.{MISPLACED}", before=" or self.min_tokens)")
    copy.insert("sglang_lite/runtime/executor/logit_adjustments.py", EFFECT, before="    banned = [")
    copy.run("-m", "tests.test_sampling_parameters")  # writes the table of the docs
    assert copy.failing(
        "tests/effects/test_sampling.py", "tests/test_sampling_parameters.py", "-k", "not sampling_py"
    ) == {
        "test_every_parameter_has_a_case",
        f"test_a_parameter_has_an_effect[{IDLE}=0.0001]",
        f"test_a_parameter_of_gen_has_its_effect_in_a_program[{IDLE}=0.0001]",
        f"test_a_parameter_has_its_effect_on_a_server[{IDLE}=0.0001]",
        f"test_without_its_place_a_parameter_has_no_effect[{MISPLACED}-runtime/executor/sampler.py]",
        f"test_without_its_place_a_parameter_has_no_effect[{UNSEEN}-runtime/executor/logit_adjustments.py]",
    }
    assert len(copy.opened) <= MOST_FOR_A_SAMPLING_PARAMETER


def _add_parameter(copy, name):
    """Adds a parameter as the recipe says, but for its effect."""
    table, place = "sglang_lite/protocol/sampling.py", "sampler" if name == MISPLACED else "logit_adjustments"
    copy.insert(table, ROW.format(name=name, place=place), before=")  # fmt: skip\n\n\ndef named(")
    copy.insert(table, f"    {name}: float | None\n", before="\n\nclass GenSamplingOptions")
    copy.insert(table, f"    {name}: float | None\n", before="\n\n@dataclass\nclass HookParams")
    copy.insert(table, f"    {name}: float | Unset = UNSET\n", before="\n    def __post_init__")
    copy.insert("sglang_lite/runtime/requests/resolved_params.py", f"    {name}: float\n", before="\n    @property")
    entry = "leave out logits this many deviations below the largest (0.0; 0 to 100)."
    copy.insert(
        "sglang_lite/lang/api.py", f"        {name}: {entry}\n", before="        dtype: int, float, bool or str:"
    )
    if name != UNSEEN:
        copy.append("tests/effects/sampling_effects.py", CASE.format(name=name))


LOADED = """
import json, pathlib, sys
from sglang_lite.runtime.models.read_config import spec_from_config
fields = dict(architectures=["DummyForCausalLM"], model_type="dummy", hidden_size=64, intermediate_size=96, vocab_size=9,
              num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=32)
print("layers:", len(spec_from_config(fields, "config.json").layers))
"""


def check_a_family(copy):
    assert "DummyForCausalLM" not in ARCHITECTURES
    row = '    "dummy": Family(("DummyForCausalLM",)),\n'
    copy.insert("sglang_lite/runtime/models/families.py", row, before='    "mistral": Family(')
    assert "layers: 3" in copy.run("-c", LOADED)
    assert copy.failing("tests/effects/test_tables.py") == {"test_every_family_is_compared_with_transformers"}
    assert len(copy.opened) <= MOST_FOR_OTHERS


def check_a_kind_of_node(copy):
    player = "sglang_lite/lang/execution/immediate.py"
    copy.insert(
        player,
        "\n\nclass DummyNode(BaseNode, frozen=True, eq=False):\n    pass\n\n",
        before="\n\n# Functions that play an operation",
    )
    copy.insert(
        player, "from sglang_lite.program.nodes import BaseNode\n", before="from sglang_lite.program.nodes import"
    )
    copy.insert(player, "    DummyNode: lambda player, node: True,\n", before="    TurnEnd: _on_transcript")
    assert copy.failing("tests/effects/test_nodes.py", "-k", "Dummy") == {
        "test_a_kind_that_does_nothing_changes_a_program[DummyNode]"
    }
    assert len(copy.opened) <= MOST_FOR_OTHERS


@pytest.mark.sampled(3)
@pytest.mark.parametrize("check", [check_a_sampling_parameter, check_a_family, check_a_kind_of_node])
def test_a_dummy_without_an_effect_is_found(check, tmp_path):
    check(PackageCopy(tmp_path))


def test_a_parameter_of_draws_is_named_by_few_files():
    files = [
        path for path in sorted(Path(ROOT, "sglang_lite").rglob("*.py")) if re.search(r"\bmin_p\b", path.read_text())
    ]
    assert len(files) <= MOST_FOR_A_SAMPLING_PARAMETER, files
