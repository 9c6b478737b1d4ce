"""Each kind of causal language model in transformers, on texts beyond every limit of its config:
right, or refused for its reason.
"""

import re
from dataclasses import replace

import pytest
import torch
import transformers
from torch.nn.functional import pad

import sglang_lite as sgl
from sglang_lite.runtime.kernels.attention_metadata import (
    AttentionPlan,
    DecodeGroup,
    DecodeRows,
    ExtendRow,
)
from sglang_lite.runtime.kernels.state_rows import StateRows, StateWave
from sglang_lite.runtime.models import transformers_model
from tests.runtime.models.fallback_refused import BEYOND_LIMITS, NOT_MADE, REFUSED, of_this_version
from tests.runtime.models.zoo import KINDS, tiny

LIMIT = 24  # tokens of every window, chunk, count of chosen tokens … of a model
LENGTHS = (70, 150)
MADE = [kind for kind in KINDS if kind not in NOT_MADE]
# Whole numbers that transformers' code reads at each run, and that are no limits: what they are.
OTHERS = {
    "audio_token_id": "a token", "image_token_id": "a token", "video_token_id": "a token",
    "d_model_size": "a scale of embeddings", "hidden_size": "a scale of logits", "dim_model_base": "a scale of logits",
    "encoder_hash_byte_group_vocab": "rows of a table", "hc_sinkhorn_iters": "steps of an iteration",
    "max_length": "positions of a table", "num_segments": "rows of a table", "prompt_length": "tokens before a text",
    "unpadded_vocab_size": "logits", "vocab_size": "rows of a table",
}  # fmt: skip
# Kinds that don't run by themselves: the chunks of 24 of the first fail, and the others read another
# model's keys.
ALONE_UNRUN = ("xlstm", "gemma4_assistant", "gemma4_unified_assistant")
# The warnings are transformers' own, of models that few use.
pytestmark = [of_this_version, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def _registered():
    transformers_model.register()
    transformers.logging.set_verbosity_error()


@torch.inference_mode()
def theirs(model, ids):
    model.set_attn_implementation("eager")
    return model(input_ids=ids[None], use_cache=False).logits[0].float()


@torch.inference_mode()
def ours(model, rows):
    """Logits of rows that are computed together: in chunks of 32 tokens, the last two tokens one by
    one.
    """
    places = torch.randperm(sum(map(len, rows)), generator=torch.Generator().manual_seed(2)).split(
        [*map(len, rows)]
    )
    cache = model.allocate_cache(sum(map(len, rows)), states=len(rows))
    found = [[] for _ in rows]
    for start in range(0, max(map(len, rows)), 32):
        parts = [
            (i, start, min(start + 32, len(row) - 2))
            for i, row in enumerate(rows)
            if start < len(row) - 2
        ]
        reads, size = [], 0
        for i, first, end in parts:
            reads.append(ExtendRow(size, size + end - first, places[i][:end]))
            size += end - first
        step(
            model,
            cache,
            rows,
            places,
            parts,
            AttentionPlan(slots(places, parts), (), tuple(reads)),
            found,
        )
    for back in (2, 1):
        parts = [(i, len(row) - back, len(row) - back + 1) for i, row in enumerate(rows)]
        lengths = [end for _, _, end in parts]
        read_at = torch.stack(
            [pad(places[i][:end], (0, max(lengths) - end)) for i, _, end in parts]
        )
        group = DecodeGroup(
            slice(0, len(rows)), DecodeRows(read_at, torch.tensor(lengths), ragged=True)
        )
        step(
            model,
            cache,
            rows,
            places,
            parts,
            AttentionPlan(slots(places, parts), (group,), ()),
            found,
        )
    return [torch.cat(parts) for parts in found]


def slots(places, parts):
    return torch.cat([places[i][start:end] for i, start, end in parts])


def step(model, cache, rows, places, parts, plan, found):
    ids = torch.cat([rows[i][start:end] for i, start, end in parts])
    positions = torch.cat([torch.arange(start, end) for _, start, end in parts])
    if model.state_bytes:  # row i has place i
        ends = torch.tensor([0, *(end - start for _, start, end in parts)]).cumsum(0)
        read = torch.tensor([i if start else -1 for i, start, _ in parts])
        write = torch.tensor([i for i, _, _ in parts])
        made = StateRows(ends.int(), read.int(), write.int(), int(ends.diff().max()))
        plan = replace(plan, states=(StateWave(made),))
    logits = model.logits(model.forward(ids, positions, plan, cache))
    for (i, _, _), part in zip(parts, logits.split([end - start for _, start, end in parts])):
        found[i].append(part)


@pytest.mark.sampled(24)
@pytest.mark.parametrize("kind", MADE)
def test_texts_beyond_every_limit_are_right_or_refused(kind):
    model = tiny(kind, LIMIT)
    rows = [
        torch.randint(2, 95, (size,), generator=torch.Generator().manual_seed(size))
        for size in LENGTHS
    ]
    if reason := (REFUSED | BEYOND_LIMITS).get(kind):
        with pytest.raises(sgl.ModelError, match=re.escape(reason)):
            transformers_model.TransformersModel(with_ours(model), kind)
        return
    expected = [theirs(model, row) for row in rows]
    for found, wanted in zip(
        ours(transformers_model.TransformersModel(with_ours(model), kind), rows), expected
    ):
        assert (found - wanted).abs().max() <= 1e-4 * max(1, wanted.abs().max())


def with_ours(model):
    model.set_attn_implementation(transformers_model.NAME)
    return model


@pytest.mark.sampled(24)
@pytest.mark.parametrize("kind", [kind for kind in MADE if kind not in ALONE_UNRUN])
def test_every_limit_is_one_that_the_trial_narrows(kind):
    """Whatever whole number of a module or config changes transformers' own logits when it becomes
    3 is a limit, and named so, or is listed above.
    """
    model = tiny(kind, LIMIT)
    ids = torch.randint(2, 95, (40,), generator=torch.Generator().manual_seed(1))
    before = theirs(model, ids)
    found = {
        name
        for name, holders in whole_numbers(model).items()
        if matters(model, ids, before, name, holders)
    }
    assert [name for name in found if not transformers_model.LIMITS.search(name)] == [
        *filter(OTHERS.get, found)
    ]


def whole_numbers(model):
    """Objects that have a whole number above 12, or a list of such, by its name."""
    parts = list(model.modules())
    holders = {
        id(holder): holder
        for part in parts
        for holder in (part, vars(part).get("config"))
        if holder is not None
    }
    found = {}
    for holder in holders.values():
        if type(holder).__module__.startswith("torch."):
            continue
        for name, value in vars(holder).items():
            numbers = value if isinstance(value, list | tuple) else [value]
            if numbers and all(type(number) is int for number in numbers) and max(numbers) > 12:
                found.setdefault(name, []).append((holder, value))
    return found


def matters(model, ids, before, name, holders):
    for holder, value in holders:
        vars(holder)[name] = (
            3 if type(value) is int else type(value)(min(number, 3) for number in value)
        )
    try:
        return not torch.allclose(theirs(model, ids), before, atol=1e-5)
    except Exception:  # of any class: it is a shape
        return False
    finally:
        for holder, value in holders:
            vars(holder)[name] = value


def test_most_models_run():
    """The list of others can only shrink."""
    assert len(KINDS) - len(REFUSED) - len(NOT_MADE) >= 105
    assert {*REFUSED, *BEYOND_LIMITS, *NOT_MADE} <= {*KINDS}


@pytest.mark.parametrize("kind", NOT_MADE)
def test_what_is_not_compared_has_its_reason(kind):
    with pytest.raises(Exception, match=re.escape(NOT_MADE[kind])):
        tiny(kind)
