"""Adapters give peft's logits, alone and mixed in a batch; what can't be honoured is refused by
name.
"""

import json
import shutil
import threading
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import sglang_lite as sgl
from sglang_lite.runtime.models.lora.adapter import Adapter, AdapterReader, ProductDelta
from sglang_lite.runtime.models.lora.cpu_step import AdapterSet, CpuLoraStep
from tests.runtime.models.adapters import Adapted
from tests.runtime.models.test_families import FAMILIES, SHAPE, asked, engine, limit, prompts
from tests.runtime.models.tiny import randomise, save

DENSE = [
    "llama-2", "llama-biases", "smollm2", "mistral-window", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "smollm3", "olmo2",
    "granite", "glm", "glm4", "exaone4", "seed-oss", "helium", "ernie4.5", "starcoder2", "phi", "stablelm-parallel", "cohere",
    "nemotron", "gpt-neox", "olmo", "gpt2", "gptj", "opt", "falcon-grouped", "lfm2", "lfm2-biases", "qwen3.5", "olmo-hybrid",
    "gemma4",
]  # fmt: skip
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`"),  # that peft reads
    pytest.mark.filterwarnings("ignore:fan_in_fan_out"),  # which peft sets itself for GPT-2
]
RANKS = {"one": 4, "two": 8, "three": 12, "four": 64}


def adapted(family, folder, adapters):
    model, changes = FAMILIES[family]
    if isinstance(model, str):  # one of the newest
        model = getattr(transformers, model)
    reference = randomise(model(model.config_class(**SHAPE | changes)))
    return save(reference, folder / "base"), Adapted(reference, folder, adapters)


def ask(running, ids, name, most=4):
    future: Future = Future()
    params = msgspec.structs.replace(
        asked(most=most), **({} if name is None else {"lora_path": (name,)})
    )
    running.submit(ids, params, sink=future.set_result)
    return future


def farthest(reference, ids, name, generation):
    """Distance of a log-probability that the engine gave from peft's."""
    theirs = reference([*ids, *generation.token_ids], name)[:-1]
    entries = [*(generation.prompt_logprobs or ()), *generation.output_logprobs]
    ours = torch.tensor(
        [[value for value, _, _ in sorted(entry.top, key=lambda top: top[1])] for entry in entries]
    )
    return (ours - theirs[-len(entries) :]).abs().max()


@pytest.mark.sampled(8)
@pytest.mark.parametrize("family", DENSE)
def test_logits_equal_those_of_peft(family, tmp_path):
    base, reference = adapted(family, tmp_path, {name: {"r": rank} for name, rank in RANKS.items()})
    paths = [f"{name}={folder}" for name, folder in reference.folders.items()]
    batch = prompts(20, 9, 17, 13, 11)
    with engine(base, lora_paths=paths, max_loras_per_batch=3, max_running=8) as running:
        names = [*RANKS, None]
        alone = [ask(running, ids, name).result(timeout=30) for ids, name in zip(batch, names)]
        mixed = [(ask(running, ids, name), ids, name) for ids in batch for name in names]
        for generation, ids, name in [
            *zip(alone, batch, names),
            *((f.result(timeout=30), *of) for f, *of in mixed),
        ]:
            assert farthest(reference, ids, name, generation) <= limit(reference), name


@pytest.mark.parametrize(
    ("family", "modules"),
    [
        # queries, keys, values and gates of linear attention by key head
        ("qwen3-next", ["in_proj_qkvz", "in_proj_ba", "linear_attn.out_proj", "q_proj", "o_proj"]),
        ("bamba", ["in_proj", "q_proj", "v_proj", "down_proj"]),
        ("nemotron-h", ["in_proj", "q_proj", "v_proj", "o_proj"]),  # also called backbone
        ("jamba", ["in_proj", "out_proj", "q_proj"]),
        ("recurrent-gemma", ["linear_x", "linear_y", "linear_out", "q_proj"]),
        ("minimax", ["qkv_proj", "output_gate", "out_proj", "q_proj"]),
        ("xlstm", ["mlstm_layer.q", "ogate_preact", "out_proj", "proj_up_gate", "proj_down"]),
        # in layers that read other layers' keys, only the others
        ("gemma4-e4b", ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]),
    ],
)
def test_adapters_of_projections_that_one_matrix_stores(family, modules, tmp_path):
    adapters = {name: {"r": rank, "target_modules": modules} for name, rank in RANKS.items()}
    base, reference = adapted(family, tmp_path, adapters)
    (ids,) = prompts(20)
    paths = [f"{name}={folder}" for name, folder in reference.folders.items()]
    with engine(base, lora_paths=paths, max_loras_per_batch=2) as running:
        for name in (*RANKS, None, *RANKS):
            generation = ask(running, ids, name).result(timeout=30)
            assert farthest(reference, ids, name, generation) <= limit(reference), name


def test_adapters_of_time_mixing_are_refused(tmp_path):
    adapters = {"one": {"r": 4, "target_modules": ["attention.key"]}}
    base, reference = adapted("rwkv-plain", tmp_path, adapters)
    with pytest.raises(
        sgl.ModelError, match=r"the adapter changes rwkv\.blocks\.0\.attention\.key"
    ):
        engine(base, lora_paths=[f"one={reference.folders['one']}"])


LATE = {"r": 8, "alora_invocation_tokens": [7, 11], "task_type": "CAUSAL_LM"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", ["llama-2", "qwen3", "gemma3"])
def test_late_adapters_compute_tokens_from_their_last_invocation_on_as_peft_s_do(family, tmp_path):
    adapters = {
        "late": LATE,
        "later": LATE | {"alora_invocation_tokens": [9, 12]},
        "whole": {"r": 4},
    }
    base, reference = adapted(family, tmp_path, adapters)
    paths = [f"{name}={folder}" for name, folder in reference.folders.items()]
    document = list(range(20, 43))
    batch = [
        [7, 11, *document],
        [*document, 7, 11],
        [*document, 7, 11, 30, 9, 12, 7, 11, 31, 9, 12, 9],
        [*document, 7, 30, 11, 31],  # never invoked
    ]
    with engine(base, lora_paths=paths, max_running=8, page_size=4, step_tokens=16) as running:
        names = [*adapters, None]
        alone = [
            (ask(running, ids, name).result(timeout=30), ids, name)
            for ids in batch
            for name in names
        ]
        mixed = [(ask(running, ids, name), ids, name) for ids in batch for name in names]
        for generation, ids, name in [*alone, *((f.result(timeout=30), *of) for f, *of in mixed)]:
            assert farthest(reference, ids, name, generation) <= 1e-4, (name, ids)


def test_choices_that_invoke_a_late_adapter_are_scored_as_peft_scores_them(tmp_path):
    base, reference = adapted("llama-2", tmp_path, {"late": LATE})
    invocation, choices = "(,", ["ab", "x(,y", ",w", "c"]  # tokens are characters
    with engine(base, lora_paths=[f"late={reference.folders['late']}"], page_size=4) as running:
        for step, end in enumerate(("", f"{invocation}45", f"{invocation}45("), 1):
            # of which nothing is cached
            prompt = "".join(chr(50 + step * i % 41) for i in range(80)) + end
            for score in running.select(prompt, choices, lora_path="late").scores:
                ids = list(running.tokenizer.encode(prompt + score.text))
                places = range(len(ids) - len(score.token_ids), len(ids))
                rows = reference(ids, "late")
                theirs = [float(rows[at - 1, ids[at]]) for at in places]
                assert list(score.logprobs) == pytest.approx(theirs, abs=1e-4), (end, score.text)


def test_an_adapter_that_overflows_leaves_tokens_of_others_alone():
    def adapter(value):
        delta = ProductDelta(torch.full((1, 8, 4), value), torch.ones(8, 6), (6,))
        return Adapter("", 1, 8, ({"down": delta},), "")

    step = CpuLoraStep(AdapterSet([adapter(0.5), adapter(3e38)]), np.array([0, -1, 0, 1]))
    y = step.layer(0).add_adapter_deltas("down", torch.full((4, 4), 8.0), torch.zeros(4, 6))
    assert y[:3].tolist() == [[128.0] * 6, [0.0] * 6, [128.0] * 6]
    assert not y[3].isfinite().any()


# ---------------------------------------------------------------------------------- what is refused


def changed_config(**changes):
    def change(folder):
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def changed_tensors(change):
    def changed(folder):
        path = folder / "adapter_model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return changed


Q = "base_model.model.model.layers.0.self_attn.q_proj"


def renamed(old, new):
    return changed_tensors(lambda tensors: tensors.update({new: tensors.pop(old)}))


def cut(tensors):
    tensors[f"{Q}.lora_A.weight"] = tensors[f"{Q}.lora_A.weight"][:, 1:].contiguous()


LINEAR = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
REFUSED = {
    "another base": (changed_tensors(cut), r"q_proj.lora_A has shape \(4, 31\); .* take \(4, 32\)"),
    "rank 0": (changed_config(r=0), "`r`: 0 is no rank"),
    "rank above": (changed_config(r=65), "has rank 65, and max_lora_rank is 64"),
    "unknown projection": (renamed(f"{Q}.lora_A.weight", f"{Q}x.lora_A.weight"), "changes .*q_projx, which .* does not have"),
    "no A": (changed_tensors(lambda t: t.pop(f"{Q}.lora_A.weight")), "q_proj has no lora_A"),
    "no B": (changed_tensors(lambda t: t.pop(f"{Q}.lora_B.weight")), "q_proj has no lora_B"),
    "twice": (
        changed_tensors(lambda t: t.update({f"model.layers.0.self_attn.q_proj.{name}.weight": t[f"{Q}.{name}.weight"] + 1
                                            for name in ("lora_A", "lora_B")})), "q_proj.lora_[AB] is there twice",
    ),
    "eight bits": (
        changed_tensors(lambda t: t.update({name: each.to(torch.float8_e4m3fn) for name, each in t.items()})),
        "is stored as torch.float8_e4m3fn; matrices of adapters are float32, bfloat16 or float16",
    ),
    "head": (renamed(f"{Q}.lora_A.weight", "base_model.model.lm_head.lora_A.weight"), "lm_head: embeddings and heads.*merge_and_unload"),
    "no matrix": (renamed(f"{Q}.lora_A.weight", f"{Q}.weight"), "q_proj.weight is no matrix of an adapter"),
    "no target": (changed_config(target_modules=["k_proj"]), "which is none of its target_modules .*peft does not read it"),
    "target": (changed_config(target_modules=[*LINEAR, "w1"]), "target_modules has 'w1', which has no matrices"),
    "DoRA": (changed_config(use_dora=True), "`use_dora` is True: DoRA"),
    "LoftQ": (changed_config(loftq_config={"loftq_bits": 4}), "`loftq_config` is .*LoftQ"),
    "modules": (changed_config(modules_to_save=["lm_head"]), "`modules_to_save` is .*trained as a whole"),
    "bias": (changed_config(bias="all"), "`bias` is 'all': trained biases"),
    "fan in": (changed_config(fan_in_fan_out=True), "`fan_in_fan_out` is True"),
    "PiSSA": (changed_config(init_lora_weights="pissa"), "`init_lora_weights` is 'pissa'"),
    "invocation": (changed_config(alora_invocation_tokens=[1, -1]), "`alora_invocation_tokens`: -1 is no token id"),
    "invocations": (changed_config(alora_invocation_tokens=7), "`alora_invocation_tokens`: 7 is no list of token ids"),
    "foreign token": (changed_config(alora_invocation_tokens=[1 << 20]), "has 1048576, which is no token of"),
    "another kind": (changed_config(peft_type="IA3"), "`peft_type` is 'IA3': only LORA.*merge_and_unload"),
    "prompts": (changed_config(peft_type="PREFIX_TUNING"), "`peft_type` is 'PREFIX_TUNING'.*can't be merged"),
    "tokens": (changed_config(trainable_token_indices=[3]), "`trainable_token_indices` is .*trained embeddings.*merge_and_unload"),
    "saved embeddings": (
        changed_tensors(lambda t: t.update({"base_model.model.model.embed_tokens.weight": t[f"{Q}.lora_A.weight"] + 1})),
        r"changes base_model.model.model.embed_tokens: embeddings and heads .*tie_word_embeddings = False.*merge_and_unload",
    ),
    "excluded by a number": (changed_config(exclude_modules=[3]), r"`exclude_modules`: \[3\] is neither a list of names"),
    "excluded by a bad pattern": (changed_config(exclude_modules="(q_proj"), r"adapter_config.json: the pattern '\(q_proj' can't be"),
    "layers": (changed_config(layers_to_transform="x"), "`layers_to_transform`: 'x' has something else than numbers"),
    "all excluded": (changed_config(exclude_modules=".*"), "no matrices: its config leaves out .* and all others"),
    "pattern": (changed_config(rank_pattern={"(q_proj": 8}), "the pattern .* can't be matched"),
    "alpha": (changed_config(lora_alpha="x"), "`lora_alpha`: 'x' is no number"),
    "damaged": (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"x" * 99), "damaged or truncated"),
    "no weights": (lambda folder: (folder / "adapter_model.safetensors").unlink(), "the adapter has no weights"),
    "no config": (lambda folder: (folder / "adapter_config.json").unlink(), "no adapter, as it has no adapter_config.json"),
    "no folder": (shutil.rmtree, "no folder, so no adapter"),
}  # fmt: skip


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """(folder of the base, its adapters)"""
    return adapted(
        "smollm2", tmp_path_factory.mktemp("llama"), {"plain": {"r": 4}, "other": {"r": 4}}
    )


@pytest.fixture(scope="module")
def running(llama):
    with engine(llama[0], enable_lora=True, max_loras_per_batch=2) as made:
        yield made


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(kind, llama, running, tmp_path):
    change, message = REFUSED[kind]
    folder = shutil.copytree(llama[1].folders["plain"], tmp_path / "adapter")
    change(folder)
    with pytest.raises(sgl.ModelError, match=message):
        running.load_lora_adapter("new", folder)
    assert running.loras() == []


@sgl.function
def program(s):
    s += "a" + sgl.gen("own", max_tokens=2, lora_path="new")


def test_numbers_that_are_none_are_found_when_they_are_read(llama, running, tmp_path):
    folder = shutil.copytree(llama[1].folders["plain"], tmp_path / "adapter")
    changed_tensors(lambda tensors: tensors[f"{Q}.lora_B.weight"][0, :1].fill_(torch.nan))(folder)
    with pytest.raises(sgl.ModelError, match="q_proj has NaN, infinite or too large elements"):
        running.load_lora_adapter("new", folder, pinned=True)
    assert running.loras() == []
    running.load_lora_adapter("new", folder)
    (ids,) = prompts(9)
    with pytest.raises(sgl.ModelError, match="q_proj has NaN, infinite or too large elements"):
        running.generate(input_ids=ids, lora_path="new")
    for push_down in (True, False):
        state = program.run(backend=running, push_down=push_down)
        with pytest.raises(sgl.ModelError, match="q_proj has NaN, infinite or too large elements"):
            state["own"]
    assert farthest(llama[1], ids, None, ask(running, ids, None).result(timeout=30)) <= 1e-4
    running.unload_lora_adapter("new")


def test_a_file_that_has_changed_or_vanished_fails_the_requests_for_it(llama, running, tmp_path):
    folder = shutil.copytree(llama[1].folders["plain"], tmp_path / "adapter")
    running.load_lora_adapter("new", folder)
    changed_tensors(lambda tensors: tensors.pop(f"{Q}.lora_A.weight"))(folder)
    (ids,) = prompts(9)
    with pytest.raises(sgl.ModelError, match="changed since the adapter was loaded"):
        running.generate(input_ids=ids, lora_path="new")
    shutil.rmtree(folder)
    with pytest.raises(sgl.ModelError, match=r"can't be read: .*No such file"):
        running.generate(input_ids=ids, lora_path="new")
    running.unload_lora_adapter("new")


def test_nobody_waits_for_an_adapter_that_is_read_for_another_request(llama, running, monkeypatch):
    reading, read = threading.Event(), AdapterReader.read_adapter
    monkeypatch.setattr(AdapterReader, "read_adapter", lambda *of: reading.wait(30) and read(*of))
    running.load_lora_adapter("slow", llama[1].folders["plain"])
    (ids,) = prompts(9)
    slow = [ask(running, ids, "slow") for _ in range(2)]  # which returns at once
    assert farthest(llama[1], ids, None, ask(running, ids, None).result(timeout=30)) <= 1e-4
    aborted: Future = Future()
    running.submit(
        ids, msgspec.structs.replace(asked(most=4), lora_path=("slow",)), sink=aborted.set_result
    ).abort()
    assert isinstance(aborted.result(timeout=30), sgl.RequestAbortedError)
    assert not any(each.done() for each in slow)
    reading.set()
    assert all(farthest(llama[1], ids, "plain", each.result(timeout=30)) <= 1e-4 for each in slow)
    running.unload_lora_adapter("slow")


def test_a_thousand_adapters_are_registered_by_their_headers(llama, running):
    folder = llama[1].folders["plain"]
    before = running.stats()
    for number in range(1000):
        running.load_lora_adapter(str(number), folder)
    found = running.stats()
    assert found["adapters"] == 1000
    assert (found["adapter_bytes"], found["adapter_reads"]) == (0, before["adapter_reads"])
    (ids,) = prompts(9)
    assert farthest(llama[1], ids, "plain", ask(running, ids, "500").result(timeout=30)) <= 1e-4
    assert running.stats()["adapter_reads"] == before["adapter_reads"] + 1
    for number in range(1000):
        running.unload_lora_adapter(str(number))


def test_an_adapter_that_names_another_base_is_used_with_a_warning(
    llama, running, tmp_path, caplog
):
    folder = shutil.copytree(llama[1].folders["plain"], tmp_path / "adapter")
    changed_config(base_model_name_or_path="owner/another")(folder)
    running.load_lora_adapter("foreign", folder)
    assert "was trained on owner/another, and is used on" in caplog.text
    (ids,) = prompts(9)
    assert farthest(llama[1], ids, "plain", ask(running, ids, "foreign").result(timeout=30)) <= 1e-4
    running.unload_lora_adapter("foreign")


def test_pickled_weights_are_read_and_code_in_them_is_not_run(llama, running, tmp_path):
    folder = shutil.copytree(llama[1].folders["plain"], tmp_path / "adapter")
    tensors = load_file(folder / "adapter_model.safetensors")
    (folder / "adapter_model.safetensors").unlink()
    torch.save(tensors, folder / "adapter_model.bin")
    running.load_lora_adapter("pickled", folder)
    (ids,) = prompts(9)
    assert farthest(llama[1], ids, "plain", ask(running, ids, "pickled").result(timeout=30)) <= 1e-4
    running.unload_lora_adapter("pickled")
    torch.save({"a": pytest.raises}, folder / "adapter_model.bin")
    with pytest.raises(sgl.ModelError, match="can't be read as tensors"):
        running.load_lora_adapter("pickled", folder)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "can't be one"),
        ("a:b", "can't be one"),
        ("plain", "is taken"),
        ("base", "is the model's"),
    ],
)
def test_names_that_cannot_be_told_apart_are_refused(name, message, llama):
    folders = llama[1].folders
    with (
        engine(
            llama[0], served_model_name="base", lora_paths={"plain": str(folders["plain"])}
        ) as made,
        pytest.raises(sgl.ParameterError, match=f"lora_name: .*{message}"),
    ):
        made.load_lora_adapter(name, folders["other"])


def test_calls_and_requests_of_what_is_not_there_fail_alone(llama, running):
    (ids,) = prompts(9)
    running.load_lora_adapter("pinned", llama[1].folders["plain"], pinned=True)
    with pytest.raises(sgl.ParameterError, match="1 adapters are pinned already"):
        running.load_lora_adapter("also", llama[1].folders["other"], pinned=True)
    with pytest.raises(sgl.ParameterError, match=r"there is no adapter 'none' .*loaded: pinned"):
        running.unload_lora_adapter("none")
    with pytest.raises(sgl.ParameterError, match="lora_path: there is no adapter 'none'"):
        running.generate(input_ids=ids, lora_path="none")
    running.unload_lora_adapter("pinned")
    with engine(llama[0]) as without:
        with pytest.raises(sgl.ParameterError, match="the engine was made without adapters"):
            without.generate(input_ids=ids, lora_path="plain")
        with pytest.raises(sgl.ParameterError, match="the engine was made without adapters"):
            without.load_lora_adapter("plain", llama[1].folders["plain"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(lora_paths="a"), "lora_paths: 'a' is no list"),
        (dict(lora_paths=["a=x", "a=y"]), "two adapters are named 'a'"),
        (dict(lora_paths=['{"lora_name": "a"}']), "has not lora_name, lora_path"),
        (dict(lora_paths=["{"]), "is no JSON"),
        (dict(enable_lora=True, deterministic=True), "deterministic: .* not with adapters"),
        (dict(enable_lora=True, model_impl="transformers"), "transformers' code, which takes no adapters"),
        (dict(max_loras_per_batch=0), "max_loras_per_batch: 0 is not a whole number"),
        (dict(max_loaded_loras=4), "max_loaded_loras: is less than max_loras_per_batch"),
        (dict(lora_eviction_policy="new"), "lora_eviction_policy: 'new' is not one of"),
        (dict(lora_target_modules=[1]), "lora_target_modules: .* is no list"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_are_refused(settings, message, llama):
    with pytest.raises(sgl.ParameterError, match=message):
        engine(llama[0], **settings).close()


def test_modules_that_are_left_out_may_not_be_changed(llama):
    with (
        engine(llama[0], enable_lora=True, lora_target_modules=["q_proj"]) as made,
        pytest.raises(sgl.ModelError, match="which lora_target_modules leaves out"),
    ):
        made.load_lora_adapter("plain", llama[1].folders["plain"])


def test_patterns_of_ranks_and_scales_are_peft_s(tmp_path):
    patterns = {
        "r": 4, "rank_pattern": {"q_proj": 8, "layers.1.mlp.down_proj": 16}, "alpha_pattern": {"^model.layers.0.*": 2},
        "target_modules": r".*\.(q_proj|v_proj|up_proj|down_proj)",
    }  # fmt: skip
    base, reference = adapted(
        "smollm2",
        tmp_path,
        {
            "one": patterns,
            "two": {"r": 4, "use_rslora": True, "target_modules": ["o_proj", "k_proj"]},
        },
    )
    with engine(
        base, lora_paths=[f"{name}={folder}" for name, folder in reference.folders.items()]
    ) as made:
        for ids in prompts(9, 14):
            for name in ("one", "two"):
                assert (
                    farthest(reference, ids, name, ask(made, ids, name).result(timeout=30)) <= 1e-4
                )


LEAVING_OUT: dict[str, dict[str, Any]] = {
    "names": {"exclude_modules": ["k_proj", "model.layers.1.mlp.up_proj"]},
    "a pattern": {"exclude_modules": r".*layers\.[02]\..*_proj"},
    "a target as a whole": {"exclude_modules": ["up_proj"], "target_modules": ["q_proj", "up_proj"]},
    "a pattern of targets": {"target_modules": r".*\.(q_proj|up_proj)", "exclude_modules": ["model.layers.0.mlp.up_proj"]},
    "layers": {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [0, 2]},
    "one layer": {"target_modules": ["q_proj", "model.layers.0.mlp.down_proj"], "layers_to_transform": 1},
    "layers by a pattern": {"target_modules": ["v_proj"], "layers_to_transform": [2], "layers_pattern": ["blocks", "layers"]},
}  # fmt: skip


@pytest.mark.parametrize("kind", LEAVING_OUT)
def test_modules_that_the_config_leaves_out_are_peft_s(kind, tmp_path, caplog):
    base, reference = adapted("smollm2", tmp_path, {"made": {"r": 4, **LEAVING_OUT[kind]}})
    batch = prompts(9, 14)
    with engine(base, lora_paths=[f"made={reference.folders['made']}"]) as made:
        for ids in batch:
            assert (
                farthest(reference, ids, "made", ask(made, ids, "made").result(timeout=30)) <= 1e-4
            )
    assert "are not used" not in caplog.text


@pytest.mark.parametrize("kind", LEAVING_OUT)
def test_matrices_of_modules_that_are_left_out_are_not_used_as_in_peft(
    kind, llama, tmp_path, caplog
):
    folder = shutil.copytree(llama[1].folders["plain"], tmp_path / "adapter")
    targets = LINEAR if "layer" in kind else "all-linear"
    changed_config(**LEAVING_OUT[kind] | {"target_modules": targets})(folder)
    base = AutoModelForCausalLM.from_pretrained(llama[0], dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, folder).eval()
    (ids,) = prompts(9)
    with engine(llama[0], lora_paths=[f"made={folder}"]) as made:
        found = ask(made, ids, "made").result(timeout=30)
    assert "are not used, in peft neither" in caplog.text
    with torch.no_grad():
        rows = theirs(torch.tensor([[*ids, *found.token_ids]])).logits[0].log_softmax(-1)[:-1]
    ours = [[value for value, _, _ in sorted(entry.top, key=lambda top: top[1])]
            for entry in (*(found.prompt_logprobs or ()), *found.output_logprobs)]  # fmt: skip
    assert (torch.tensor(ours) - rows[-len(ours) :]).abs().max() <= 1e-4


WHOLE: dict[str, dict[str, Any]] = {
    "a trained head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "a head": {"target_modules": ["q_proj", "lm_head"]},
    "embeddings": {"target_modules": ["q_proj", "embed_tokens"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [3, 7]},
    "DoRA": {"target_modules": ["q_proj"], "use_dora": True},
    "biases": {"target_modules": ["q_proj"], "lora_bias": True},
    "trained biases": {"target_modules": ["q_proj"], "bias": "lora_only"},
}


@pytest.mark.filterwarnings("ignore")  # of peft's, about heads and biases
@pytest.mark.parametrize("family", ["qwen2", "llama-biases"])
@pytest.mark.parametrize("kind", WHOLE)
def test_what_is_refused_works_once_it_is_merged_as_the_hint_advises(kind, family, tmp_path):
    base, reference = adapted(family, tmp_path, {"made": {"r": 4, **WHOLE[kind]}})
    (ids,) = prompts(9)
    with (
        engine(base, enable_lora=True) as running,
        pytest.raises(sgl.ModelError, match=r"merge_and_unload\(\)") as caught,
    ):
        running.load_lora_adapter("made", reference.folders["made"])
    model = AutoModelForCausalLM.from_pretrained(base)
    if "tie_word_embeddings = False" in str(caught.value):
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
        model.config.tie_word_embeddings = False
    merged = peft.PeftModel.from_pretrained(model, reference.folders["made"])
    folder = tmp_path / "merged"
    merged.merge_and_unload().save_pretrained(folder)
    shutil.copy(base / "tokenizer.json", folder)
    with engine(folder) as running:
        assert farthest(reference, ids, "made", ask(running, ids, None).result(timeout=30)) <= 1e-3


def test_a_folder_with_nothing_but_an_adapter_is_its_base_with_the_adapter(llama, tmp_path):
    base, reference = llama
    folder = shutil.copytree(reference.folders["plain"], tmp_path / "mine")
    changed_config(base_model_name_or_path=str(base))(folder)
    (ids,) = prompts(9)
    with engine(folder, lora_paths={"other": str(reference.folders["other"])}) as made:
        assert [(each["lora_name"], each["pinned"]) for each in made.loras()] == [
            ("mine", True),
            ("other", False),
        ]
        for asked_for, name in ((None, "plain"), ("mine", "plain"), ("other", "other")):
            assert (
                farthest(reference, ids, name, ask(made, ids, asked_for).result(timeout=30)) <= 1e-4
            )
    changed_config(base_model_name_or_path=None)(folder)
    with pytest.raises(sgl.ModelError, match="does not say which model it was trained on"):
        engine(folder)
