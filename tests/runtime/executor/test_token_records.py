"""Experts and hidden states of tokens, as engines record them, against those of transformers."""

import base64
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeForCausalLM,
)

import sglang_lite as sgl
from sglang_lite.runtime.models.gpu_decoder import GpuDecoder
from tests.runtime.kernels import needs_kernels
from tests.runtime.models.test_experts import CONFIG
from tests.runtime.models.test_families import engine
from tests.runtime.models.tiny import VOCAB, randomise, save
from tests.server.conftest import serving

WINDOWED = GptOssConfig(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=128, num_local_experts=6, num_experts_per_tok=3,
    sliding_window=4, eos_token_id=1, bos_token_id=0, pad_token_id=0,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
)  # fmt: skip
RECORDS = {"enable_return_routed_experts": True, "enable_return_hidden_states": True}
ASKED: Any = {"return_routed_experts": True, "return_hidden_states": True}


@pytest.fixture(
    scope="module",
    params=[(Qwen3MoeForCausalLM, CONFIG), (GptOssForCausalLM, WINDOWED)],
    ids=["all", "windows"],
)
def mixture(request, tmp_path_factory):
    kind, config = request.param
    reference = randomise(kind(config))
    return save(reference, tmp_path_factory.mktemp("mixture")), reference


def expected(reference, ids):
    """Experts of each token and layer in order of their number, and hidden states."""
    with torch.no_grad():
        seen = reference(
            torch.tensor([list(ids)]), output_router_logits=True, output_hidden_states=True
        )
    most = reference.config.num_experts_per_tok
    chosen = [
        logits.view(len(ids), -1).topk(most).indices.sort().values for logits in seen.router_logits
    ]
    return torch.stack(chosen, 1).numpy(), seen.hidden_states[-1][0].numpy()


def check(reference, ids, experts, states):
    """Returns how many tokens were recorded."""
    experts, states = np.asarray(experts), np.asarray(states)
    routed, hidden = expected(reference, ids)
    count = len(experts)
    assert np.array_equal(np.sort(experts), routed[:count])
    assert np.abs(states - hidden[:count]).max() < 1e-4
    assert len(states) == count
    return count


@sgl.function
def shapes(s):
    s += "a prompt of a few tokens" + sgl.gen("first", max_tokens=5)
    forks = s.fork(2)
    for number, fork in enumerate(forks):
        fork += "more" * (number + 1) + sgl.gen("branch", max_tokens=4)
    forks.join("concate_and_append")
    s += "b" + sgl.gen("last", max_tokens=3) + sgl.gen("forced", max_tokens=4, regex="cd")


@sgl.function
def short(s):
    s += "a few" + sgl.gen("answer", max_tokens=3)


@pytest.mark.parametrize(
    "settings", [{}, {"page_size": 4, "prefix_cache": False}], ids=["tree", "no cache"]
)
def test_trajectories_have_what_each_token_passed_through(mixture, settings):
    folder, reference = mixture
    with engine(folder, **RECORDS, **settings) as running:
        given = {"return_prompt_token_ids": True, "ignore_eos": True}
        trajectory = shapes.run(backend=running, seed=1, **given, **ASKED).trajectory()
    assert len(trajectory) == 3
    for each in trajectory:
        count = check(reference, each.ids, each.routed_experts, each.hidden_states)
        forced = each.spans[-1].name == "forced"
        assert (
            len(each.ids) - 3 <= count <= len(each.ids) - 1
            if forced
            else count == len(each.ids) - 1
        )


def test_cached_tokens_have_them_too(mixture):
    folder, reference = mixture
    tiers = {} if reference.config.model_type == "gpt_oss" else {"enable_hierarchical_cache": True}
    # the pool holds two of them
    prompts = [[number, *range(20, 50)] for number in (5, 5, 6, 7, 8, 5)]
    with engine(
        folder,
        **RECORDS,
        page_size=4,
        max_total_tokens=72,
        max_running=1,
        context_length=64,
        **tiers,
    ) as running:
        for prompt in prompts:
            answer = running.generate(
                input_ids=prompt,
                sampling_params={"max_new_tokens": 3, "ignore_eos": True, "temperature": 0},
                **ASKED,
            )
            meta = answer["meta_info"]
            ids = [*prompt, *answer["output_ids"]]
            experts = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32)
            layers, most = reference.config.num_hidden_layers, reference.config.num_experts_per_tok
            first, *others = meta["hidden_states"]
            assert len(first) == len(prompt)
            check(reference, ids, experts.reshape(len(ids) - 1, layers, most), [*first, *others])
        assert meta["cached_tokens"] > 0 or not tiers
        assert (
            running.generate(input_ids=prompts[0], sampling_params={"max_new_tokens": 1})[
                "meta_info"
            ]
            .keys()
            .isdisjoint(("routed_experts", "hidden_states"))
        )


@needs_kernels
def test_fused_kernels_record_the_same(tmp_path, monkeypatch):
    reference = randomise(Qwen3MoeForCausalLM(CONFIG))
    if not torch.cuda.is_available():
        monkeypatch.setattr("sglang_lite.runtime.loading.load_model.Decoder", GpuDecoder)
    small = {
        "max_total_tokens": 64,
        "max_running": 2,
        "page_size": 4,
        "step_tokens": 4,
        "threads": 1,
    }
    with engine(save(reference, tmp_path), **RECORDS, **small) as running:
        given = {"return_prompt_token_ids": True, "ignore_eos": True, **ASKED}
        (each,) = short.run(backend=running, seed=1, **given).trajectory()
    assert check(reference, each.ids, each.routed_experts, each.hidden_states) == len(each.ids) - 1


def test_servers_give_them_to_programs_and_other_clients(tmp_path):
    reference = randomise(Qwen3MoeForCausalLM(CONFIG))
    with engine(save(reference, tmp_path), **RECORDS) as running, serving(running) as url:
        given = {"return_prompt_token_ids": True, "ignore_eos": True}
        for each in shapes.run(
            backend=sgl.RuntimeEndpoint(url), seed=1, **given, **ASKED
        ).trajectory():
            check(reference, each.ids, each.routed_experts, each.hidden_states)
        body = {
            "text": "abc",
            "sampling_params": {"max_new_tokens": 2, "ignore_eos": True},
            **ASKED,
        }
        meta = httpx2.post(f"{url}/generate", json=body).json()["meta_info"]
        assert len(base64.b64decode(meta["routed_experts"])) == 4 * 2 * 2 * 4
        assert [np.shape(each) for each in meta["hidden_states"]] == [(3, 32), (32,)]


def test_what_is_not_recorded_is_refused(tmp_path):
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
    )
    folder = save(randomise(LlamaForCausalLM(config)), tmp_path)
    with engine(folder) as running:
        for name in ASKED:
            with pytest.raises(
                sgl.ParameterError, match=f"{name}: this engine records none.*enable_{name}=True"
            ):
                running.generate("a", return_routed_experts=name == "return_routed_experts",
                                 return_hidden_states=name == "return_hidden_states")  # fmt: skip
    with pytest.raises(sgl.ParameterError, match="this model has no experts"):
        engine(folder, enable_return_routed_experts=True)
    with pytest.raises(sgl.ParameterError, match="transformers' code runs this model"):
        engine(folder, enable_return_hidden_states=True, model_impl="transformers", device="cpu")
    with pytest.raises(sgl.ParameterError, match="first layers' experts with pp_size"):
        engine(folder, enable_return_routed_experts=True, pp_size=2)
