"""Few tokens on a CPU have the hidden states of torch's operators, whichever way they are computed."""

import shutil

import pytest
import torch

from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.kernels.attention_metadata import AttentionPlan, ExtendRow
from sglang_lite.runtime.kernels.few_tokens import FewTokens
from sglang_lite.runtime.load import load_model
from sglang_lite.runtime.models import decoder, few_tokens
from tests.runtime.models.tiny import VOCAB, randomise, save
from tests.runtime.models.zoo import tiny

COMMON = ("llama", "qwen2", "qwen3", "mistral")  # with biases, norms of heads, and a window of 4 tokens
OTHERS = ("gemma2", "mixtral", "phi", "starcoder2", "olmo2")
SLOTS = 40

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="compiled operators need a C++ compiler"
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {kind: save(randomise(tiny(kind)), tmp_path_factory.mktemp(kind)) for kind in (*COMMON, *OTHERS)}


@pytest.fixture
def steps(monkeypatch):
    """Activations that compiled operators have computed."""
    sizes = []

    def silu_mul(self, gate_up):
        sizes.append(gate_up.shape[1])
        return compiled(self, gate_up)

    compiled = FewTokens.silu_mul
    monkeypatch.setattr(FewTokens, "silu_mul", silu_mul)
    return sizes


def hidden(folder, dtype, slots, **settings):
    """Of nine tokens in one step, and of four in one each."""
    model = load_model(EngineConfig(str(folder), device="cpu", dtype=dtype, **settings), folder, iter).model
    cache = model.allocate_cache(SLOTS)
    ids = torch.arange(13) * 7 % VOCAB
    found = []
    with torch.inference_mode():
        for start, end in ((0, 9), (9, 10), (10, 11), (11, 12), (12, 13)):
            read_at = slice(slots.start, slots.start + end) if isinstance(slots, slice) else slots[:end]
            store_at = torch.arange(SLOTS)[slots][start:end]
            plan = AttentionPlan(store_at, (), (ExtendRow(0, end - start, read_at),))
            found.append(model.forward(ids[start:end], torch.arange(start, end), plan, cache).float())
    return torch.cat(found)


@pytest.mark.parametrize(
    "slots", [slice(5, SLOTS), torch.arange(SLOTS).int() * 7 % SLOTS], ids=["side by side", "anywhere"]
)
@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-4), ("bfloat16", 3e-2), ("int8", 1e-1)])
@pytest.mark.parametrize("kind", COMMON)
def test_tokens_have_the_hidden_states_of_torch_operators(folders, steps, monkeypatch, kind, dtype, limit, slots):
    if dtype == "int8" and not torch.cpu._is_vnni_supported():  # noqa: SLF001 # torch has no other name for it
        pytest.skip("int8 needs VNNI")
    found = hidden(folders[kind], dtype, slots)
    assert len(steps) == 5 * 2
    monkeypatch.setattr(decoder, "few_tokens_step", lambda *_: None)
    expected = hidden(folders[kind], dtype, slots)
    assert len(steps) == 5 * 2
    assert (found - expected).norm() <= limit * expected.norm()


def test_long_rows_are_read_by_all_threads(folders, steps, monkeypatch):
    whole = hidden(folders["qwen3"], "float32", slice(0, SLOTS))
    monkeypatch.setattr(few_tokens, "_READ_ALONE", 0)
    monkeypatch.delattr(FewTokens, "attend")
    assert torch.allclose(hidden(folders["qwen3"], "float32", slice(0, SLOTS)), whole, atol=1e-4)
    assert len(steps) == 2 * 5 * 2


def test_many_tokens_have_torch_operators(folders, steps, monkeypatch):
    monkeypatch.setattr(few_tokens, "_MOST_NUMBERS", 0)
    hidden(folders["llama"], "float32", slice(0, SLOTS))
    assert len(steps) == 4 * 2


@pytest.mark.parametrize("kind", OTHERS)
def test_models_of_other_kinds_have_torch_operators(folders, steps, kind):
    hidden(folders[kind], "float32", slice(0, SLOTS))
    assert not steps


def test_rows_that_must_not_depend_on_others_have_torch_operators(folders, steps):
    hidden(folders["llama"], "float32", slice(0, SLOTS), deterministic=True)
    assert not steps
