"""Models that transformers' own code runs over our pages, against transformers by itself."""

import copy
import json
import re

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import sglang_lite as sgl
from sglang_lite.protocol import SamplingParams
from sglang_lite.runtime.kernels.attention_metadata import (
    AttentionPlan,
    DecodeGroup,
    DecodeRows,
    ExtendRow,
)
from sglang_lite.runtime.loading.model_files import read_spec
from sglang_lite.runtime.models import transformers_model
from sglang_lite.runtime.models.transformers_model import InFloat64
from tests.runtime.models.fallback_refused import NOT_MADE, REFUSED, of_this_version
from tests.runtime.models.tiny import save
from tests.runtime.models.zoo import KINDS, tiny

TOKENS = 24
# Kinds with experts, each with a router of its own, and a size of which rounding changes choices.
EXPERTS = (
    "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3", "ernie4_5_moe", "gpt_oss", "hunyuan_v1_moe", "dbrx", "jetmoe",
    "hy_v3", "solar_open",
)  # fmt: skip
DEEP = {"num_hidden_layers": 8} | dict.fromkeys(
    ("num_experts", "num_local_experts", "n_routed_experts"), 16
)
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own, of models that few use


@pytest.fixture(autouse=True)
def _registered():
    transformers_model.register()
    transformers.logging.set_verbosity_error()


def wrapped(kind):
    model = tiny(kind)
    model.set_attn_implementation("eager")
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 95, (2, TOKENS), generator=generator)
    with torch.inference_mode():
        expected = torch.stack(
            [model(input_ids=row[None], use_cache=False).logits[0] for row in ids]
        ).float()
    model.set_attn_implementation(transformers_model.NAME)
    return transformers_model.TransformersModel(model, kind), ids, expected


@torch.inference_mode()
def computed(model, ids):
    """Logits of two rows whose slots lie scattered: in chunks, then token by token, both rows
    together.
    """
    slots = torch.randperm(2 * TOKENS, generator=torch.Generator().manual_seed(2)).view(2, TOKENS)
    cache, out = model.allocate_cache(2 * TOKENS), []
    for start, end in ((0, 7), (7, 12)):
        size = end - start
        rows = tuple(ExtendRow(i * size, i * size + size, slots[i, :end]) for i in range(2))
        plan = AttentionPlan(slots[:, start:end].flatten(), (), rows)
        hidden = model.forward(
            ids[:, start:end].flatten(), torch.arange(start, end).repeat(2), plan, cache
        )
        out.append(model.logits(hidden).view(2, size, -1))
    for at in range(12, TOKENS):
        both = DecodeRows(slots[:, : at + 1], torch.tensor([at + 1, at + 1]), ragged=False)
        plan = AttentionPlan(slots[:, at], (DecodeGroup(slice(0, 2), both),), ())
        hidden = model.forward(ids[:, at], torch.tensor([at, at]), plan, cache)
        out.append(model.logits(hidden).view(2, 1, -1))
    return torch.cat(out, 1)


@of_this_version
@pytest.mark.sampled(16)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in REFUSED | NOT_MADE])
def test_logits_are_transformers_own(kind):
    model, ids, expected = wrapped(kind)
    found = computed(model, ids)
    assert (found - expected).abs().max() <= 1e-4 * max(1, expected.abs().max())
    assert (found.argmax(-1) == expected.argmax(-1)).float().mean() > 0.95


@of_this_version
@pytest.mark.sampled(16)
# assistants continue another model's text, and run with no other here; kinds.tsv has their reason
@pytest.mark.parametrize("kind", [kind for kind in REFUSED if not kind.endswith("_assistant")])
def test_what_can_not_be_run_is_refused_for_its_reason(kind):
    with pytest.raises(sgl.ModelError, match=re.escape(REFUSED[kind])):
        wrapped(kind)


@pytest.mark.parametrize(
    ("kind", "window"), [("phimoe", 24), ("phimoe", None), ("gemma2", 24), ("mistral", 24)]
)
def test_a_window_beyond_the_trial_is_compared_too(kind, window):
    """A phimoe masks by its window, and its attention does not say so."""
    model = tiny(kind)
    model.config.sliding_window = window
    for part in model.modules():
        if getattr(part, "sliding_window", None) is not None:
            part.sliding_window = window
    if (kind, window) == ("phimoe", 24):
        with pytest.raises(sgl.ModelError, match="beyond its limits \\(sliding_window\\)"):
            transformers_model.TransformersModel(with_ours(model), kind)
    else:
        transformers_model.TransformersModel(with_ours(model), kind)
    assert model.config.sliding_window == window


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("mistral", None),
        ("gemma2", None),
        ("xmod", "its positions do not count from 0"),
    ],
)
def test_in_bfloat16_a_wrong_model_is_told_from_rounding(kind, reason):
    model = with_ours(tiny(kind, 24)).to(torch.bfloat16)
    if reason is None:
        transformers_model.TransformersModel(model, kind)
    else:
        with pytest.raises(sgl.ModelError, match=reason):
            transformers_model.TransformersModel(model, kind)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_rounding_alone_changes_is_no_state(dtype):
    """As with a choice of experts that a last bit decides."""
    model = with_ours(tiny("llama")).to(dtype)
    model.model.layers[0].mlp.register_forward_hook(
        lambda module, given, out: out + torch.sin(1000 * out)
    )
    transformers_model.TransformersModel(model, "llama")


@of_this_version
@pytest.mark.sampled(12)
@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_run_in_bfloat16(kind):
    """Their weights stay as they are."""
    model = with_ours(tiny(kind, **DEEP)).to(torch.bfloat16)
    before = copy.deepcopy(model.state_dict())
    found = transformers_model.TransformersModel(model, kind)
    assert found.dtype == torch.bfloat16
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


@of_this_version
@pytest.mark.sampled(12)
@pytest.mark.parametrize("kind", EXPERTS)
def test_in_bfloat16_a_thousandth_of_the_token_before_is_a_state(kind):
    """Less than rounding changes."""
    model = with_ours(tiny(kind, **DEEP)).to(torch.bfloat16)
    layers = (
        model.get_decoder().layers
        if hasattr(model.get_decoder(), "layers")
        else model.get_decoder().blocks
    )
    layers[1].register_forward_pre_hook(
        lambda module, given: (given[0] + given[0].roll(1, 1) / 1000, *given[1:])
    )
    with pytest.raises(sgl.ModelError, match="it keeps other state than keys and values"):
        transformers_model.TransformersModel(model, kind)


@of_this_version
@pytest.mark.sampled(14)
@pytest.mark.parametrize("kind", ["llama", "gpt2", *EXPERTS])
def test_in_float64_a_model_computes_what_its_copy_in_float64_does(kind):
    """And keeps no weight of its own in another dtype."""
    model = tiny(kind, **DEEP).to(torch.bfloat16)
    for each in (model, double := copy.deepcopy(model).double()):
        each.set_attn_implementation("eager")
        each.set_experts_implementation("eager")
    ids = torch.randint(2, 95, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        with InFloat64():
            found = model(input_ids=ids, use_cache=False).logits
            expected = double(input_ids=ids, use_cache=False).logits
        assert model(input_ids=ids, use_cache=False).logits.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@of_this_version
def test_a_module_may_take_a_view_of_what_attention_gives(monkeypatch):
    """However that lies in memory."""
    attention = transformers_model.attention

    def turned(*given, **rules):
        return attention(*given, **rules).transpose(0, 1).contiguous().transpose(0, 1)

    monkeypatch.setattr(transformers_model, "attention", turned)
    transformers_model.TransformersModel(with_ours(tiny("jetmoe")), "jetmoe")


def test_in_bfloat16_an_ignored_window_is_seen(monkeypatch):
    attend = transformers_model.TransformersModel.attend

    def everywhere(*given, sliding_window, **more):
        return attend(*given, **more)

    monkeypatch.setattr(transformers_model.TransformersModel, "attend", everywhere)
    with pytest.raises(sgl.ModelError, match="beyond its limits \\(sliding_window\\)"):
        transformers_model.TransformersModel(
            with_ours(tiny("mistral", 24)).to(torch.bfloat16), "mistral"
        )


def with_ours(model):
    model.set_attn_implementation(transformers_model.NAME)
    return model


@pytest.mark.parametrize(("longest", "refused"), [(128, True), (64, False)])
def test_rotation_by_the_longest_row_is_refused(longest, refused):
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64,
            "short_factor": [1.0] * 4, "long_factor": [8.0] * 4}  # fmt: skip
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=longest, rope_parameters=rope,
    )  # fmt: skip
    model = with_ours(transformers.LlamaForCausalLM(config).eval())
    if refused:
        with pytest.raises(
            sgl.ModelError, match="depends on the longest row of a batch \\(longrope\\)"
        ):
            transformers_model.TransformersModel(model, "llama")
    else:
        transformers_model.TransformersModel(model, "llama")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tiny("gpt_bigcode"), tmp_path_factory.mktemp("gpt_bigcode"))


def test_an_engine_runs_it_as_any_other(folder):
    """Chunks, a prefix from the cache, many at once, and choices."""
    reference = tiny("gpt_bigcode")
    prompts = [[*range(5, 8 + i % 5), 20 + i] for i in range(12)]
    params = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
    with sgl.Engine(
        folder, in_process=True, dtype="float32", threads=1, step_tokens=8, max_running=4
    ) as engine:
        options = {"max_new_tokens": 10, "temperature": 0, "ignore_eos": True}
        results = engine.generate(input_ids=prompts, sampling_params=options)
        again = engine.complete(prompts[0], params)
        assert again.usage.cached_tokens == len(prompts[0]) - 1
        choice = engine.select("ab", ["cd", "x"])
    for prompt, result in zip(prompts, results):
        ids = torch.tensor([prompt])
        for _ in range(10):
            with torch.inference_mode():
                ids = torch.cat((ids, reference(input_ids=ids).logits[:, -1:].argmax(-1)), 1)
        assert result["output_ids"] == ids[0, len(prompt) :].tolist()
    assert len(choice.scores) == 2


def test_our_code_and_transformers_give_the_same(tmp_path):
    folder = save(tiny("llama"), tmp_path)
    texts = []
    for implementation in ("native", "transformers"):
        with sgl.Engine(
            folder, in_process=True, dtype="float32", threads=1, model_impl=implementation
        ) as engine:
            texts.append(
                engine.complete(
                    "abc", SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
                ).token_ids
            )
    assert texts[0] == texts[1]


def test_in_a_process_of_its_own_it_says_by_what_it_runs(folder, caplog):
    caplog.set_level("INFO", "sglang_lite")
    with sgl.Engine(folder, dtype="float32", threads=1) as engine:
        assert engine.complete("abc", SamplingParams(max_tokens=3)).usage.completion_tokens <= 3
    assert (
        "GPTBigCodeForCausalLM runs by transformers' code, as there is none of our own"
        in caplog.text
    )


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"model_impl": "native"}, "architecture GPTBigCodeForCausalLM is not supported"),
        (
            {"dtype": "int8"},
            "dtype: GPTBigCodeForCausalLM runs by transformers' code, which has no int8",
        ),
        ({"load_format": "safetensors"}, "load_format: transformers' code chooses the file"),
        ({"deterministic": True}, "deterministic: GPTBigCodeForCausalLM"),
        ({"model_impl": "other"}, "model_impl"),
    ],
)
def test_what_it_can_not_do_is_refused(folder, setting, message):
    with pytest.raises(sgl.SglError, match=message):
        sgl.Engine(folder, in_process=True, **setting)


def test_a_model_that_keeps_another_state_is_refused_by_name(tmp_path):
    config = transformers.MambaConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=1, state_size=4
    )
    config.max_position_embeddings = 64
    folder = save(transformers.MambaForCausalLM(config), tmp_path)
    with pytest.raises(sgl.ModelError, match="MambaForCausalLM can't be run through transformers"):
        sgl.Engine(folder, in_process=True, dtype="float32", model_impl="transformers")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "recurrent_gemma",
            "RecurrentGemmaForCausalLM keeps the state of recurrent layers (`lru_width`)",
        ),
        ("rwkv", "RwkvForCausalLM keeps the state of RWKV's layers"),
        ("xlstm", "xLSTMForCausalLM keeps the state of xLSTM's layers"),
    ],
)
def test_a_model_of_no_length_is_refused_for_the_state_that_it_keeps(tmp_path, kind, message):
    config = CONFIG_MAPPING[kind]().to_dict() | {"architectures": [message.partition(" ")[0]]}
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    with pytest.raises(sgl.ModelError, match=re.escape(message)):
        sgl.Engine(tmp_path, in_process=True, dtype="float32", model_impl="transformers")


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("kind", "architecture", "message"),
    [
        (
            "vipllava",
            "VipLlavaForConditionalGeneration",
            "vipllava is no causal language model in transformers",
        ),
        (
            "deberta-v2",
            "DebertaV2ForMaskedLM",
            "deberta-v2 is no causal language model in transformers",
        ),
        (
            "bart",
            "BartForConditionalGeneration",
            "BartForConditionalGeneration has an encoder beside its decoder",
        ),
        (
            "whisper",
            "WhisperForConditionalGeneration",
            "hears nothing without a tokenizer and preprocessor_config",
        ),
        ("roformer", "RoFormerForCausalLM", "its code has no decoder that runs by itself"),
        ("gpt_neo", "GPTNeoForCausalLM", "its attention can't be replaced"),
    ],
)
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_refusal_names_its_reason_before_weights_are_read(
    tmp_path, kind, architecture, message, load_format
):
    config = CONFIG_MAPPING[kind]().to_dict() | {
        "architectures": [architecture],
        "max_position_embeddings": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    with pytest.raises(sgl.ModelError, match=message):
        sgl.Engine(
            tmp_path,
            in_process=True,
            skip_tokenizer_init=True,
            load_format=load_format,
            dtype="float32",
        )


@of_this_version
@pytest.mark.sampled(60)
@pytest.mark.parametrize(
    "kind", [kind for kind in CONFIG_MAPPING if kind not in KINDS and kind != "nougat"]
)  # no config
def test_what_continues_no_text_is_refused_for_that(tmp_path, kind):
    """Models of images and sound, encoders, and encoders with decoders, whatever fields their
    configs lack.
    """
    config = CONFIG_MAPPING[kind]().to_dict() | {"architectures": ["Other"], "model_type": kind}
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    with pytest.raises(sgl.ModelError, match=f"{kind} is no causal language model in transformers"):
        sgl.Engine(tmp_path, in_process=True, skip_tokenizer_init=True, dtype="float32")


@pytest.mark.parametrize("name", ["max_seq_len", "model_max_length"])
def test_a_limit_of_positions_has_many_names(tmp_path, name):
    config = {
        "model_type": "gpt_bigcode",
        "architectures": ["GPTBigCodeForCausalLM"],
        "vocab_size": 96,
        name: 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_spec(tmp_path).max_positions == 64


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_model_larger_than_memory_is_refused_before_it_is_loaded(tmp_path, load_format):
    """Of the size of Llama 4 Maverick, by its config: a load would end the process."""
    config = transformers.GPTBigCodeConfig(
        n_embd=16384, n_layer=128, n_head=128, architectures=["GPTBigCodeForCausalLM"]
    )
    config.save_pretrained(tmp_path)
    save_file({"wte.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(
        sgl.ModelError, match=r"needs [\d,.]+ GiB \(weights 1,[\d.]+ GiB\); .* free on cpu"
    ):
        sgl.Engine(
            tmp_path,
            in_process=True,
            skip_tokenizer_init=True,
            load_format=load_format,
            dtype="float32",
        )


@pytest.mark.parametrize(
    "changes",
    [
        {
            "model_type": "own",
            "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},
        },
        {
            "auto_map": {"AutoModelForCausalLM": "other/repository--own.OwnModel"},
            "model_type": "vit",
        },
    ],
)
def test_code_of_a_folder_is_refused_in_our_words(tmp_path, changes):
    """Neither run, nor by advice to set what there is not."""
    config = {
        "architectures": ["OwnModel"],
        "vocab_size": 96,
        "max_position_embeddings": 64,
        **changes,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    for load_format in ("auto", "dummy"):
        with pytest.raises(
            sgl.ModelError, match=r"brings along \(.*own.OwnModel\); such code is never run"
        ) as told:
            sgl.Engine(tmp_path, in_process=True, skip_tokenizer_init=True, load_format=load_format)
        assert "trust_remote_code" not in str(told.value)
    assert not (tmp_path / "ran").exists()
