"""Loader of models that run through transformers' own code."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.kernels.kv_layout import KVLayout
from sglang_lite.runtime.models.config_fields import read_json
from sglang_lite.runtime.models.transformers_model import NAME, TransformersModel, register


def kind_of(device: torch.device) -> type[TransformersModel]:
    """Class that runs a module of transformers on a device."""
    if device.type != "cuda":
        return TransformersModel
    from sglang_lite.runtime.models.gpu_transformers_model import GpuTransformersModel  # needs Triton

    return GpuTransformersModel


def outline(path: Path, device: torch.device) -> tuple[int, KVLayout | None]:
    """Returns the number of a model's parameters and the layout of its KV cache, without reading weights.

    The layout is None if the trial run that finds it fails without values, as with a choice of experts.

    Args:
        path: folder of the model.
        device: device that the model is to run on.

    Raises:
        ModelError: transformers has no code for the model, or the model can't run on our KV cache.
    """
    register()
    options = {"attn_implementation": NAME, "trust_remote_code": False}
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(config, **options)
    except Exception as error:  # transformers' code and each model's raise many kinds
        raise _refused(path, error) from error
    parameters = sum(tensor.numel() for tensor in module.parameters())
    try:
        return parameters, kind_of(device)(module.eval(), str(path)).kv_layout
    except ModelError:
        raise
    except Exception:  # data-dependent code, such as a choice of experts, can't run without values
        return parameters, None


def _refused(path: Path, error: Exception) -> ModelError:
    if "trust_remote_code" in str(error):  # transformers' own message asks the user to set it
        auto_map = read_json(path / "config.json").get("auto_map")
        code = ", ".join(sorted(map(str, auto_map.values()))) if isinstance(auto_map, dict) else "auto_map"
        return ModelError(
            f"{path}: config.json names code that the folder brings along ({code}); such code is never run.",
            hint="Use a model that transformers has code for, or one of docs/models.md.",
        )
    reason = f"{type(error).__name__}: {error}".partition("\n")[0]
    return ModelError(f"{path}: there is no code of our own for it, and transformers' can't run it: {reason}")


def load_transformers(
    path: Path, dtype: torch.dtype, device: torch.device, *, dummy: bool = False
) -> TransformersModel:
    """Loads a model from a folder through transformers, without running code from the folder.

    Args:
        path: folder of the model.
        dtype: dtype of weights and activations.
        device: device that the model runs on.
        dummy: whether to use random weights instead of the folder's.

    Raises:
        ModelError: transformers has no code for the model, or the model can't run on our KV cache.
    """
    register()
    options = {"dtype": dtype, "attn_implementation": NAME, "trust_remote_code": False}
    try:
        if dummy:
            with device:  # a GPU draws random numbers faster
                config = AutoConfig.from_pretrained(path, trust_remote_code=False)
                module = AutoModelForCausalLM.from_config(config, **options)
        else:
            module = AutoModelForCausalLM.from_pretrained(path, **options)
        class_name = type(module).__name__
        if class_name not in (module.config.architectures or ()):
            raise ModelError(
                f"{path}: config.json names {module.config.architectures}, its model_type is {class_name}'s."
            )
        return kind_of(device)(module.to(device).eval(), str(path))
    except (ModelError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # transformers' code and each model's raise many kinds
        raise _refused(path, error) from error
