"""Keys and values in 8 bits, of models whose keys are large and whose values are small."""

from concurrent.futures import Future

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import sglang_lite as sgl
from sglang_lite.protocol import SamplingParams
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.loading import load_model as load
from sglang_lite.runtime.models.gpu_decoder import GpuDecoder
from tests.runtime.kernels import BACKENDS, needs_kernels
from tests.runtime.models.tiny import VOCAB, randomise, save

GPU = torch.cuda.is_available()
HIDDEN, HEADS, KV_HEADS, DIM = 64, 4, 2, 16
TINY = Qwen2Config(
    vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=2, num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS, max_position_embeddings=256, bos_token_id=0, eos_token_id=1, pad_token_id=None,
    tie_word_embeddings=False,
)  # fmt: skip
PROMPT = [5, 17, 3, 80, 22, 9, 41, 77, 60, 12, 33, 90, 4, 8]


def model_with(key, value):
    """Qwen2 with a bias of `key` in the pair of a key's elements that turns fastest, so that it
    says where a token is, and with values of about `value`. Queries and the output matrix make up
    for both.
    """
    model = randomise(Qwen2ForCausalLM(TINY))
    fastest = [0, DIM // 2]
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            attention.k_proj.bias.view(KV_HEADS, DIM)[:, fastest[0]] = key
            attention.q_proj.weight.view(HEADS, DIM, HIDDEN)[:, fastest] *= 4 / key
            attention.q_proj.bias.view(HEADS, DIM)[:, fastest] *= 4 / key
            attention.v_proj.weight *= value
            attention.v_proj.bias *= value
            attention.o_proj.weight /= value
    return model


def expected_of(reference):
    with torch.no_grad():
        rows = reference(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    return [rows[i, token].item() for i, token in enumerate(PROMPT[1:])]


def logprobs(engine):
    future = Future()
    params = SamplingParams(max_tokens=0, return_logprob=True, logprob_start_len=1)
    engine.submit(PROMPT, params, sink=future.set_result)
    return [entry.logprob for entry in future.result(timeout=120).prompt_logprobs]


@pytest.fixture(autouse=True)
def _everything_has_eight_bits(monkeypatch):
    """As a GPU does that this machine may not have."""
    monkeypatch.setattr(load, "computes_in_eight_bits", lambda device: True)


@pytest.fixture(params=["cpu", *(pytest.param(name, marks=needs_kernels) for name in BACKENDS)])
def engine(request, monkeypatch):
    """Makes engines with 8-bit keys and values: the CPU's, and the GPU's with each backend of
    attention.
    """
    opened = []

    def make(folder):
        settings = {"device": "cpu"}
        if request.param in BACKENDS:
            settings = {"device": "cuda" if GPU else "cpu", "attention_backend": request.param}
            if not GPU:
                monkeypatch.setattr(load, "Decoder", GpuDecoder)
        opened.append(
            sgl.Engine(
                model=str(folder),
                dtype="float32",
                kv_dtype="fp8",
                max_running=2,
                max_total_tokens=200,
                **settings,
                in_process=True,
            )
        )
        return opened[-1]

    yield make
    for one in opened:
        one.close()


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("key", "value"), [(2000.0, 1.0), (4.0, 1e-3), (1000.0, 1e-3)])
def test_large_keys_and_small_values_stay_near(engine, tmp_path, key, value):
    """Stored as they are, the means would be 0.6, 0.7 and 0.7."""
    reference, running = model_with(key, value), engine(save(model_with(key, value), tmp_path))
    gaps = [abs(a - b) for a, b in zip(logprobs(running), expected_of(reference))]
    # there, a number that is rounded up may come out as half
    interpreted = running.core.runner.model.fused and not GPU
    assert sum(gaps) / len(gaps) < (0.45 if interpreted else 0.2)


@pytest.mark.parametrize("engine", BACKENDS[:1], indirect=True)
@needs_kernels
def test_other_weights_have_other_scales(engine, tmp_path):
    folders = [tmp_path / name for name in "ab"]
    save(model_with(4.0, 1.0), folders[0])
    save(model_with(1000.0, 1e-3), folders[1])
    running = engine(folders[0])
    running.update_weights(str(folders[1]))
    assert logprobs(running) == pytest.approx(logprobs(engine(folders[1])), abs=1e-3)


def scales_of(folder):
    loaded = load.load_model(
        EngineConfig(model=str(folder), device="cpu", dtype="float32", kv_dtype="fp8"), folder
    )
    scales = loaded.model.allocate_cache(1).scales
    return torch.stack(scales.k), torch.stack(scales.v)


def test_scales_are_powers_of_two_and_leave_room(tmp_path):
    reference = model_with(1000.0, 1e-3)
    with torch.no_grad():
        attention = reference.model.layers[1].self_attn
        attention.v_proj.weight[:DIM] = attention.v_proj.bias[:DIM] = 0  # a head without values
        attention.k_proj.weight[DIM:] *= 1000
        told = reference(
            torch.randint(VOCAB, (1, 200), generator=torch.Generator().manual_seed(1)),
            use_cache=True,
        )
    folder = save(reference, tmp_path)
    keys, values = scales_of(folder)
    assert values[1, 0] == 1
    for side, scales in (("keys", keys), ("values", values)):
        assert (torch.frexp(scales).mantissa == 0.5).all()
        largest = torch.stack(
            [getattr(layer, side)[0].abs().amax((1, 2)) for layer in told.past_key_values.layers]
        )
        stored = (largest / scales)[largest > 0]
        assert (stored > 448 / 16).all()
        assert (stored < 448 / 2).all()
    again = scales_of(folder)
    assert torch.equal(keys, again[0])
    assert torch.equal(values, again[1])


def test_a_model_without_numbers_is_refused(tmp_path):
    reference = model_with(4.0, 1.0)
    with torch.no_grad():
        reference.model.layers[0].self_attn.v_proj.weight[3, 5] = float("nan")
    with pytest.raises(sgl.ModelError, match=r"values of this model are NaN .*kv_dtype=\"auto\""):
        scales_of(save(reference, tmp_path))
