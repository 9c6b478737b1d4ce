"""`sglang-lite families`: lists the model families, and writes a model's layers as pseudo-code."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_lite.protocol import ModelError
from sglang_lite.protocol.anything import Json
from sglang_lite.runtime.host.installed import check_engine_packages

if TYPE_CHECKING:
    from sglang_lite.runtime.models.spec import ModelSpec

# Fields that transformers' default configs leave without a usable value.
_SIZES: dict[str, dict[str, Json]] = {
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "deepseek_v2": {
        "num_experts_per_tok": 6,
        "n_routed_experts": 64,
        "n_group": 1,
        "topk_group": 1,
    },
    "dots1": {"num_experts_per_tok": 6, "n_routed_experts": 128, "n_shared_experts": 2},
    "glm4_moe": {"head_dim": 128},
    "granitemoehybrid": {"layer_types": [*["mamba"] * 7, "attention"] * 4},
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    help_text = "a family, such as qwen3, or a model, as for Engine (default: list the families)"
    parser.add_argument("name", nargs="?", metavar="NAME", help=help_text)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from sglang_lite.runtime.models.families import FAMILIES
    from sglang_lite.runtime.models.pseudo_code import pseudo_code

    if options.name is None:
        for name, family in FAMILIES.items():
            print(f"{name:16} {', '.join(family.architectures)}")
        return 0
    check_engine_packages("sglang-lite families NAME")
    spec = (
        _build_default_spec(options.name)
        if options.name in FAMILIES
        else _resolve_model_spec(options.name)
    )
    print("\n".join(pseudo_code(spec)))
    return 0


def _build_default_spec(name: str) -> ModelSpec:
    """Returns a model of a family with the sizes of transformers' default config."""
    from transformers import AutoConfig
    from transformers.models.auto import modeling_auto

    from sglang_lite.runtime.models.families import FAMILIES
    from sglang_lite.runtime.models.read_config import spec_from_config

    logging.getLogger("transformers").setLevel(logging.ERROR)  # it comments on its own defaults
    model_types = {
        architecture: model_type
        for names in (
            modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
            modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        )
        for model_type, architecture in names.items()
    }
    architecture = next(each for each in FAMILIES[name].architectures if each in model_types)
    config = AutoConfig.for_model(model_types[architecture]).to_dict()
    config = {**config, **(config.get("text_config") or {}), **_SIZES.get(name, {})}
    config |= {"architectures": [architecture], "eos_token_id": None, "bos_token_id": None}
    return spec_from_config(config, f"transformers' config of {name}")


def _resolve_model_spec(name: str) -> ModelSpec:
    from sglang_lite.runtime.loading.model_files import read_spec
    from sglang_lite.runtime.models.families import FAMILIES
    from sglang_lite.runtime.models.resolve import resolve
    from sglang_lite.runtime.models.spec import ModelSpec

    spec = read_spec(Path(resolve(name, None)))
    if not isinstance(spec, ModelSpec):
        raise ModelError(
            f"{name}: its layers are computed by transformers' code, so they are in no table here.",
            hint=f"Give a model of one of these families: {', '.join(FAMILIES)}.",
        )
    return spec
