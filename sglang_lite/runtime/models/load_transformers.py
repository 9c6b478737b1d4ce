"""Loading of a model that transformers' own code runs."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.kernels.kv_layout import KVLayout
from sglang_lite.runtime.models.config_fields import read_json
from sglang_lite.runtime.models.transformers_model import NAME, TransformersModel, register


def kind_of(device: torch.device) -> type[TransformersModel]:
    """The class that runs a module on a device."""
    if device.type != "cuda":
        return TransformersModel
    from sglang_lite.runtime.models.gpu_transformers_model import GpuTransformersModel  # needs Triton

    return GpuTransformersModel


def outline(path: Path, device: torch.device) -> tuple[int, KVLayout | None]:
    """Size of the model in a folder, in numbers, and what a token of it takes, without any of its weights; None where
    that shows only when they are there.

    Args:
        device: that it is to run on.

    Raises:
        ModelError: transformers has no such model, or it can't be run so.
    """
    register()
    made = {"attn_implementation": NAME, "trust_remote_code": False}
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(config, **made)
    except Exception as error:  # as below
        raise _refused(path, error) from error
    numbers = sum(tensor.numel() for tensor in module.parameters())
    try:
        return numbers, kind_of(device)(module.eval(), str(path)).kv_layout
    except ModelError:
        raise
    except Exception:  # a choice by numbers, of experts for one, needs numbers
        return numbers, None


def _refused(path: Path, error: Exception) -> ModelError:
    if "trust_remote_code" in str(error):  # which transformers' own text tells to set
        named = read_json(path / "config.json").get("auto_map")
        code = ", ".join(sorted(map(str, named.values()))) if isinstance(named, dict) else "auto_map"
        return ModelError(
            f"{path}: config.json names code that the folder brings along ({code}); such code is never run.",
            hint="Use a model that transformers has code for, or one of docs/models.md.",
        )
    told = f"{type(error).__name__}: {error}".partition("\n")[0]
    return ModelError(f"{path}: there is no code of our own for it, and transformers' can't run it: {told}")


def load_transformers(
    path: Path, dtype: torch.dtype, device: torch.device, *, dummy: bool = False
) -> TransformersModel:
    """Loads the folder at `path`. No code of the folder is run.

    Args:
        dummy: random weights.

    Raises:
        ModelError: transformers has no such model, or it can't be run so.
    """
    register()
    made = {"dtype": dtype, "attn_implementation": NAME, "trust_remote_code": False}
    try:
        if dummy:
            with device:  # where random numbers are drawn fast
                config = AutoConfig.from_pretrained(path, trust_remote_code=False)
                module = AutoModelForCausalLM.from_config(config, **made)
        else:
            module = AutoModelForCausalLM.from_pretrained(path, **made)
        made_as = type(module).__name__
        if made_as not in (module.config.architectures or ()):
            raise ModelError(f"{path}: config.json names {module.config.architectures}, its model_type is {made_as}'s.")
        return kind_of(device)(module.to(device).eval(), str(path))
    except (ModelError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # transformers' code and each model's raise many kinds
        raise _refused(path, error) from error
