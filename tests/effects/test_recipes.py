"""Recipes of CONTRIBUTING.md, carried out with dummies in a copy of the package.

What does nothing must be found by the tests that are there, and what does something must need no
other file than the recipe names.
"""

import re
from pathlib import Path

import pytest

from sglang_lite.runtime.models.families import ARCHITECTURES
from tests.effects.package_copy import ROOT, PackageCopy

MOST_FOR_A_SAMPLING_PARAMETER, MOST_FOR_OTHERS = 8, 6
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()

pytestmark = pytest.mark.slow  # each runs tests in a process of its own


# Four parameters: one that works, one whose row names the wrong place, one that does nothing, and
# one that has no case.
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
    copy.insert(
        "sglang_lite/runtime/executor/logit_adjustments.py", EFFECT, before="    banned = ["
    )
    copy.run("-m", "tests.protocol.test_sampling_parameters")  # writes the table of the docs
    assert copy.failing(
        "tests/effects/test_sampling.py",
        "tests/protocol/test_sampling_parameters.py",
        "-k",
        "not sampling_py",
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
    table, place = (
        "sglang_lite/protocol/sampling.py",
        "sampler" if name == MISPLACED else "logit_adjustments",
    )
    copy.insert(
        table, ROW.format(name=name, place=place), before=")  # fmt: skip\n\n\ndef parameters_for("
    )
    copy.insert(table, f"    {name}: float | None\n", before="\n\nclass GenSamplingOptions")
    copy.insert(table, f"    {name}: float | None\n", before="\n\n@dataclass\nclass HookParams")
    copy.insert(table, f"    {name}: float | Unset = UNSET\n", before="\n    def __post_init__")
    copy.insert(
        "sglang_lite/runtime/requests/resolved_params.py",
        f"    {name}: float\n",
        before="\n    @property\n    def greedy",
    )
    entry = "leave out logits this many deviations below the largest (0.0; 0 to 100)."
    copy.insert(
        "sglang_lite/lang/api.py",
        f"        {name}: {entry}\n",
        before="        dtype: int, float, bool or str:",
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
    assert copy.failing("tests/effects/test_tables.py") == {
        "test_every_family_is_compared_with_transformers"
    }
    assert len(copy.opened) <= MOST_FOR_OTHERS


def check_a_kind_of_node(copy):
    player = "sglang_lite/lang/execution/immediate.py"
    copy.insert(
        player,
        "\n\nclass DummyNode(BaseNode, frozen=True, eq=False):\n    pass\n\n",
        before="\n\n# Functions that play an operation",
    )
    copy.insert(
        player,
        "from sglang_lite.program.nodes import BaseNode\n",
        before="from sglang_lite.program.nodes import",
    )
    copy.insert(
        player,
        "    DummyNode: lambda player, node: True,\n",
        before="    TurnEnd: _transcript_change_handler",
    )
    assert copy.failing("tests/effects/test_nodes.py", "-k", "Dummy") == {
        "test_a_kind_that_does_nothing_changes_a_program[DummyNode]"
    }
    assert len(copy.opened) <= MOST_FOR_OTHERS


# Three providers: one that works, one whose profile says nothing, and one that says what no profile
# knows.
PROFILE = """provider = "{name}"
read = 2026-11-22
{like}

[sources]
docs = "https://example.com/docs/"

[default]
facts = {facts}
"""
BACKEND = """\"\"\"Backend for a service that speaks OpenAI's protocol.\"\"\"

from sglang_lite.lang.backend.openai import OpenAI


class Dummy(OpenAI):
    provider = "dummy"

    def __init__(self, model_name, **kwargs):
        super().__init__(model_name, True, None, **{"profile": "dummy", **kwargs})
"""
ASKED = """
import sglang_lite as sgl
from sglang_lite.lang.backend.dummy import Dummy


@sgl.function
def program(s):
    s += sgl.user("Hi") + sgl.assistant(sgl.gen("a", regex="[ab]+"))


with sgl.server_for_tests(compatible=True) as server:
    server.answers = "ab"
    print("answer:", program.run(backend=Dummy("one", **server.openai))["a"])
    print("sent:", server.requests[-1].body["structured_outputs"])
"""


def check_a_provider(copy):
    folder = "sglang_lite/lang/backend"
    copy.append(
        f"{folder}/profiles/dummy.toml",
        PROFILE.format(name="dummy", like='like = "vllm"', facts="[]"),
    )
    copy.append(f"{folder}/dummy.py", BACKEND)
    assert re.findall("answer: .*|sent: .*", copy.run("-c", ASKED)) == [
        "answer: ab",
        "sent: {'regex': '[ab]+'}",
    ]
    check_recipe(copy, "A remote backend", 2)
    for name, facts in (("idle", "[]"), ("misspelt", '[{ source = "docs", takes = ["nothing"] }]')):
        copy.append(
            f"{folder}/profiles/{name}.toml", PROFILE.format(name=name, like="", facts=facts)
        )
    failing = copy.failing("tests/lang/backend/test_profiles.py")
    assert {name for name in failing if "dummy" in name} == set()
    assert {name for name in failing if "idle" in name or "misspelt" in name} >= {
        "test_every_fact_has_a_source_and_the_day_it_was_read[idle]",
        "test_every_fact_has_a_source_and_the_day_it_was_read[misspelt]",
    }


# Of a template of its own, and of one that has none.
TEMPLATE = """[dummy]
turns.user = ["", ""]
turns.assistant = ["x", ""]
stop_str = ["B"]

"""
STOPPED = """
import sglang_lite as sgl
from sglang_lite.lang.backend.local import LocalBackend
from sglang_lite.lang.chat_template import get_chat_template
from tests.runtime.thinkers import thinker


@sgl.function
def program(s):
    s += sgl.user("Hi") + sgl.assistant(sgl.gen("a"))


with sgl.Engine.of(thinker("abcdefghij.", starts=False)) as engine:  # which says ABC
    backend = LocalBackend(engine)
    backend.chat_template = get_chat_template("dummy")
    print("text:", program.run(backend=backend)["a"])
"""


def check_a_stop_string(copy):
    table = "sglang_lite/lang/chat_templates.toml"
    copy.insert(table, TEMPLATE, before="[default]")
    assert "text: A\n" in copy.run("-c", STOPPED)
    check_recipe(copy, "A chat template, or a stop string of one", 1)
    copy.insert(table, 'stop_str = ["\\n\\nHuman:"]\n', before="\n[chatml]")
    assert copy.failing("tests/lang/test_chat_templates.py") == {
        "test_there_are_sglangs_27_names",
        "test_stops_and_placeholders_are_the_models[claude]",
    }


def check_recipe(copy, name, count):
    """The recipe says that it opens as many files as were opened, and names them."""
    (recipe,) = re.findall(rf"^- \*{name}\*.*?(?=^- \*|\Z)", GUIDE, re.MULTILINE | re.DOTALL)
    assert f"*{name}*, {count}" in recipe
    assert len(copy.opened) == count <= MOST_FOR_OTHERS
    named = {path.replace("dummy", "NAME").removeprefix("sglang_lite/") for path in copy.opened}
    assert {path for path in named if f"`{path}`" not in recipe} == set()


CHECKS = [
    check_a_sampling_parameter,
    check_a_family,
    check_a_kind_of_node,
    check_a_provider,
    check_a_stop_string,
]


@pytest.mark.sampled(len(CHECKS))
@pytest.mark.parametrize("check", CHECKS)
def test_a_dummy_without_an_effect_is_found(check, tmp_path):
    check(PackageCopy(tmp_path))


def test_a_parameter_of_draws_is_named_by_few_files():
    files = [
        path
        for path in sorted(Path(ROOT, "sglang_lite").rglob("*.py"))
        if re.search(r"\bmin_p\b", path.read_text())
    ]
    assert len(files) <= MOST_FOR_A_SAMPLING_PARAMETER, files
