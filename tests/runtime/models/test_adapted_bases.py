"""Adapters give peft's logits on bases in fewer bits, after new weights, and whatever else an
engine does with requests.
"""

from __future__ import annotations

import pytest
import torch

import sglang_lite as sgl
from tests.runtime.models import packings, test_fp8, test_gguf
from tests.runtime.models.adapters import Adapted
from tests.runtime.models.test_families import FAMILIES, SHAPE, engine, prompts
from tests.runtime.models.test_lora import adapted, ask, farthest
from tests.runtime.models.tiny import randomise, save

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # that peft reads
ADAPTERS = {"plain": {"r": 4}, "other": {"r": 12}}


def of_gguf(folder, family):
    model = test_gguf.model_of(family)
    return test_gguf.write(folder / "tiny.gguf", family, model), model


BASES = {
    "8-bit floats": lambda folder: test_fp8.write(folder, test_fp8.CONFIGS["channel"][0], "channel"),
    "8-bit floats in blocks": lambda folder: test_fp8.write(folder, test_fp8.CONFIGS["block"][0], "block"),
    "gguf, pairs side by side": lambda folder: of_gguf(folder, "llama"),
    "gguf, stacked": lambda folder: of_gguf(folder, "phi3"),
    **{name: lambda folder, form=form: packings.write(folder, form) for name, form in packings.FORMATS.items()
       if name in ("awq", "compressed-tensors, 8 bits", "nf4", "bitsandbytes, 8 bits")},
}  # fmt: skip


def paths_of(reference):
    return [f"{name}={folder}" for name, folder in reference.folders.items()]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("base", BASES)
def test_bases_in_fewer_bits_keep_them_and_adapters_are_added(base, tmp_path):
    (tmp_path / "base").mkdir()
    path, model = BASES[base](tmp_path / "base")
    reference = Adapted(model, tmp_path, ADAPTERS)
    with engine(path, lora_paths=paths_of(reference), threads=1) as running:
        asked = [
            (ask(running, ids, name), ids, name)
            for ids in prompts(9, 5)
            for name in (*ADAPTERS, None)
        ]
        for future, ids, name in asked:
            assert farthest(reference, ids, name, future.result(timeout=60)) <= 1e-3, name


def test_sixteen_adapters_and_none_in_one_batch(tmp_path):
    adapters = {f"adapter {i}": {"r": 4 * (i + 1)} for i in range(16)}
    base, reference = adapted("llama-2", tmp_path, adapters)
    with engine(
        base, lora_paths=paths_of(reference), max_loras_per_batch=16, max_running=17
    ) as running:
        running.pause_generation()  # until all have come
        asked = [
            (ask(running, ids, name, most=2), ids, name)
            for (ids,) in [prompts(9)]
            for name in (*adapters, None)
        ]
        running.continue_generation()
        for future, ids, name in asked:
            assert farthest(reference, ids, name, future.result(timeout=60)) <= 1e-4, name
        assert running.stats()["adapters_resident"] == 16


def test_new_weights_keep_the_adapters(tmp_path):
    kind, changes = FAMILIES["llama-2"]
    models = [randomise(kind(kind.config_class(**SHAPE | changes))) for _ in range(2)]
    with torch.no_grad():
        for tensor in models[1].parameters():
            tensor.mul_(0.8)
    bases = [save(model, tmp_path / f"base {i}") for i, model in enumerate(models)]
    references = [Adapted(model, tmp_path / str(i), ADAPTERS) for i, model in enumerate(models)]
    with engine(bases[0], lora_paths=paths_of(references[0])) as running:
        for base, reference in zip(bases, references):
            running.update_weights(str(base))
            for name in (*ADAPTERS, None):
                (ids,) = prompts(9)
                assert (
                    farthest(reference, ids, name, ask(running, ids, name).result(timeout=60))
                    <= 1e-4
                ), name


# -------------------------------------------------------------------------------------- as programs


def ids_of(text):
    return [ord(character) - 33 for character in text]


def greedy(reference, text, name, count):
    """Text that transformers' model continues with."""
    ids = ids_of(text)
    for _ in range(count):
        ids.append(int(reference(ids, name)[-1].argmax()))
    return "".join(chr(33 + each) for each in ids[len(text) :])


def free(name, adapter, count=6, **more):
    return sgl.gen(
        name, max_tokens=count, temperature=0, ignore_eos=True, lora_path=adapter, **more
    )


@sgl.function
def everything(s):
    s += "abab" + sgl.gen(
        "forced", regex="(one|two)hellohello", max_tokens=20, temperature=0, lora_path="plain"
    )
    s += free("after", "plain") + free("again", "plain") + free("other", "other") + free("none", [])
    branches = s.fork(2)
    for branch, name in zip(branches, ADAPTERS):
        branch += "x" + free("branch", name, 4) + free("samples", name, 3, n=2)
    branches.join()
    s += free("joined", "other", 4)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """(folder of the base, its adapters)"""
    return adapted("llama-2", tmp_path_factory.mktemp("llama"), ADAPTERS)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "settings", [{}, {"speculation": "prompt"}, {"overlap": False, "step_tokens": 8}]
)
@pytest.mark.parametrize("push_down", [True, False])
def test_forced_text_drafts_forks_and_samples_have_their_nodes_adapter(settings, push_down, llama):
    base, reference = llama
    with engine(base, lora_paths=paths_of(reference), **settings) as running:
        state = everything.run(backend=running, push_down=push_down)
        text = "abab" + state["forced"]
        for name, adapter in (
            ("after", "plain"),
            ("again", "plain"),
            ("other", "other"),
            ("none", None),
        ):
            assert state[name] == greedy(reference, text, adapter, 6), name
            text += state[name]
        for i, adapter in enumerate(ADAPTERS):
            one = greedy(reference, text + "x", adapter, 4)
            assert state["branch"][i] == one
            assert state["samples"][i] == [greedy(reference, text + "x" + one, adapter, 3)] * 2
        assert state["joined"] == greedy(reference, text, "other", 4)
