"""Folders of all kinds of models that transformers has: what is not run is refused by name, with
what to do.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import sglang_lite as sgl
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.loading.load_model import load
from tests.runtime.models import zoo
from tests.runtime.models.fallback_refused import of_this_version
from tests.runtime.models.tiny import save, tiny_tokenizer
from tests.runtime.models.zoo import small_config

pytestmark = [of_this_version, pytest.mark.filterwarnings("ignore")]
_TABLES = [
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_MAPPING_NAMES,
]  # fmt: skip
# What nobody who has a folder can know of: arguments and methods of transformers' own code.
INTERNALS = re.compile(
    r"get_decoder|position_ids|trust_remote_code|from_pretrained|names None|object has no attribute|\w\(\)"
)


def architecture(kind: str) -> str | None:
    names = next((table[kind] for table in _TABLES if kind in table), None)
    return names if names is None or isinstance(names, str) else names[0]


def configs(kind: str) -> list[dict[str, Any]]:
    """Configs of a kind: transformers' own, and a small one."""
    found = []
    for make in (CONFIG_MAPPING[kind], lambda: small_config(kind)):
        try:
            found.append(make().to_dict())
        except Exception:  # of transformers: the kind has no such config
            continue
    return found


def load_folder(folder: Path, config: dict[str, Any]) -> object:
    (folder / "config.json").write_text(json.dumps(config, default=str))
    (folder / "tokenizer.json").write_text(json.dumps(tiny_tokenizer()))
    return load(EngineConfig.make(model=str(folder), device="cpu", dtype="float32"), folder)


@pytest.mark.sampled(40)
@pytest.mark.parametrize("kind", [kind for kind in CONFIG_MAPPING if architecture(kind)])
def test_a_folder_without_weights_is_refused_for_its_architecture_or_for_them(kind, tmp_path):
    transformers.logging.set_verbosity_error()
    for config in configs(kind):
        with pytest.raises(sgl.ModelError) as caught:
            load_folder(tmp_path, {**config, "architectures": [architecture(kind)]})
        assert str(tmp_path) in str(caught.value)
        assert caught.value.hint, caught.value
        assert INTERNALS.search(str(caught.value)) is None, caught.value


BASE = {
    "hidden_size": 32, "num_layers": 2, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "vocab_size": 96, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("orion", "OrionForCausalLM"),
        ("telechat", "TelechatForCausalLM"),
        (None, "NewForCausalLM"),
    ],
)
def test_an_architecture_that_nobody_knows_is_named_with_and_without_weights(kind, name, tmp_path):
    for _ in range(2):
        with pytest.raises(
            sgl.ModelError,
            match=r"config.json names .*, for which neither sglang_lite nor transformers",
        ):
            load_folder(tmp_path, {**BASE, "model_type": kind, "architectures": [name]})
        save_file({"transformer.wte.weight": torch.zeros(96, 32)}, tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    "name", ["transformer.wte.weight", "model.layers.0.attention.query_key_value.weight"]
)
def test_tensors_of_another_architecture_are_named(name, tmp_path):
    save_file({name: torch.zeros(96, 32)}, tmp_path / "model.safetensors")
    with pytest.raises(
        sgl.ModelError,
        match=rf"'model.embed_tokens.weight' is missing. The files have {name}, which no model of the config's",
    ):
        load_folder(
            tmp_path, {**BASE, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
        )


def test_a_missing_file_of_weights_is_asked_for(tmp_path):
    known = {"model.layers.0.self_attn.q_proj.weight": torch.zeros(32, 32)}
    save_file(known, tmp_path / "model.safetensors")
    with pytest.raises(sgl.ModelError, match=r"Is a file of weights missing\?"):
        load_folder(tmp_path, {**BASE, "architectures": ["LlamaForCausalLM"]})


def test_a_field_that_transformers_code_lacks_is_named(tmp_path):
    config = {**CONFIG_MAPPING["dbrx"]().to_dict(), "architectures": ["DbrxForCausalLM"]}
    with pytest.raises(
        sgl.ModelError,
        match=r"config.json has no `rope_theta`, which its code reads. Use a model of the families",
    ):
        load_folder(tmp_path, config)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("xmod", "its code runs only after a call in Python"),
        ("emu3", "it loads Emu3ForCausalLM only as part of a larger model"),
        ("mllama", "it loads MllamaForCausalLM only as part of a larger model"),
    ],
)
def test_what_transformers_code_raises_is_said_in_plain_words(kind, message, tmp_path):
    file = save(zoo.tiny(kind), tmp_path) / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "default_language": None}))  # X-MOD's, as the hub has it
    with pytest.raises(sgl.ModelError, match=message):
        load(EngineConfig.make(model=str(tmp_path), device="cpu", dtype="float32"), tmp_path)
