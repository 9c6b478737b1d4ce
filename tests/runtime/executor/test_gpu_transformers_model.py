"""Models that transformers' own code runs on a GPU, against transformers by itself.

With a GPU, on it and through captured graphs; without one, on the CPU under Triton's
interpreter.
"""

import pytest
import torch
import transformers

import sglang_lite as sgl
from sglang_lite.protocol import ModelError
from sglang_lite.runtime.executor.cuda_graphs import CudaGraphs, graph_sizes
from sglang_lite.runtime.models import load_transformers
from sglang_lite.runtime.models.gpu_transformers_model import GpuTransformersModel
from tests.runtime.kernels import needs_kernels
from tests.runtime.models.tiny import save
from tests.runtime.models.zoo import tiny

pytestmark = [needs_kernels, pytest.mark.filterwarnings("ignore")]
GPU = torch.cuda.is_available()
TOKENS = 4 if GPU else 2
# with a prefix that they share
PROMPTS = [[*range(5, 20 + i % 5), 20 + i] for i in range(6 if GPU else 3)]


@pytest.fixture
def engine_of(tmp_path, monkeypatch):
    """Makes an engine of a kind of model."""
    opened = []
    if not GPU:
        monkeypatch.setattr(
            load_transformers, "model_class_for", lambda device: GpuTransformersModel
        )

    def make(kind, **settings):
        folder = save(model_of(kind), tmp_path)
        config = {
            "dtype": "float32",
            "threads": 1,
            "max_running": 4,
            "step_tokens": 64,
            "max_total_tokens": 800,
        }
        opened.append(
            sgl.Engine(folder, in_process=True, model_impl="transformers", **config, **settings)
        )
        return opened[-1]

    yield make
    for engine in opened:
        engine.close()


def model_of(kind):
    if kind != "gemma4 with small heads":
        return tiny(kind)
    config = transformers.Gemma4TextConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, global_head_dim=16, num_global_key_value_heads=1, attention_k_eq_v=True,
        max_position_embeddings=64, sliding_window=5, layer_types=["sliding_attention", "full_attention"],
        vocab_size_per_layer_input=96, hidden_size_per_layer_input=8, num_kv_shared_layers=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.Gemma4ForCausalLM(config).eval()


def expected(kind, prompt):
    ids, model = torch.tensor([prompt]), model_of(kind)
    with torch.inference_mode():
        for _ in range(TOKENS):
            ids = torch.cat((ids, model(input_ids=ids).logits[:, -1:].argmax(-1)), 1)
    return ids[0, len(prompt) :].tolist()


def generated(engine, prompts):
    params = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    return [
        result["output_ids"]
        for result in engine.generate(input_ids=prompts, sampling_params=params)
    ]


# Norms of root mean squares, learned positions, windows beside soft caps, experts.
@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ["qwen3", "gpt2", "gemma2", "mixtral"])
def test_tokens_are_transformers_own(engine_of, kind):
    engine = engine_of(kind)
    assert isinstance(engine.core.runner.model, GpuTransformersModel)
    wanted = [expected(kind, prompt) for prompt in PROMPTS]
    assert generated(engine, PROMPTS) == wanted
    assert generated(engine, PROMPTS) == wanted  # from the cache


def test_decoding_steps_are_graphs(engine_of, monkeypatch):
    if not GPU:
        monkeypatch.setattr(
            CudaGraphs,
            "capture_function",
            lambda self, compute: (graph := Again(compute), graph.logits),
        )
    engine = engine_of("qwen3")
    if not GPU:
        engine.core.runner.graphs.sizes = graph_sizes(4)
    assert generated(engine, PROMPTS) == [expected("qwen3", prompt) for prompt in PROMPTS]
    assert engine.core.runner.graphs.captured


def test_layers_may_differ_in_their_heads(engine_of):
    engine = engine_of("gemma4 with small heads")
    wanted = [expected("gemma4 with small heads", prompt) for prompt in PROMPTS[:2]]
    assert generated(engine, PROMPTS[:2]) == wanted
    assert generated(engine, PROMPTS[:1]) == wanted[:1]  # from the cache
    assert bool(engine.core.runner.graphs.captured) == GPU


@pytest.mark.skipif(not GPU, reason="slow without one")
def test_layers_whose_heads_are_too_large_for_our_kernels_take_torch_beside_them(engine_of):
    """Heads of 8 numbers and of 512."""
    engine = engine_of("gemma4_text")
    assert generated(engine, PROMPTS) == [expected("gemma4_text", prompt) for prompt in PROMPTS]
    assert not engine.core.runner.graphs.captured


class Again:
    """In place of a CUDA graph where there is none: computes again into the same tensor, from what
    is in others.
    """

    def __init__(self, compute):
        self.compute, self.logits = compute, compute()

    def replay(self):
        self.logits.copy_(self.compute())


@pytest.mark.skipif(not GPU, reason="on a CPU no operation waits")
def test_a_module_that_waits_for_the_device_runs_without_graphs_and_says_so(
    engine_of, monkeypatch, caplog
):
    activation = type(tiny("llama").model.layers[0].mlp.act_fn)
    forward = activation.forward
    monkeypatch.setattr(
        activation, "forward", lambda self, x: forward(self, x) if x.sum().item() else x
    )
    engine = engine_of("llama")
    assert "runs without CUDA graphs" in caplog.text
    assert not engine.core.runner.graphs.captured
    assert generated(engine, PROMPTS[:1]) == [expected("llama", PROMPTS[0])]


@pytest.mark.parametrize(
    ("kind", "norms", "attentions"),
    [
        ("llama", 5, 2),
        ("qwen3", 9, 2),
        ("gemma2", 0, 2),  # its norms multiply by 1 + weight
        ("gpt2", 0, 0),
        ("gpt_oss", 5, 0),  # its tables of the rotation have half the size
    ],
)
def test_parts_are_shortened_where_they_compute_the_common_thing(kind, norms, attentions):
    load_transformers.register()
    module = tiny(kind).to("cuda" if GPU else "cpu")
    module.set_attn_implementation(load_transformers.NAME)
    body = module.get_decoder()
    GpuTransformersModel(module, kind)
    short = [
        type(part).__name__
        for part in module.modules()
        if "forward" in vars(part) and part is not body
    ]
    assert sum(name.endswith("Norm") for name in short) == norms
    assert sum(name.endswith("Attention") for name in short) == attentions


def test_keys_of_another_size_than_their_values_are_refused_by_name():
    load_transformers.register()
    module = tiny("deepseek_v2")
    module.set_attn_implementation(load_transformers.NAME)
    with pytest.raises(
        ModelError,
        match=r'DeepseekV2ForCausalLM .* keys and its values differ in size or heads: use device="cpu"',
    ):
        GpuTransformersModel(module, "deepseek_v2")
