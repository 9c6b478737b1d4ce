"""Loads models that run through transformers' own code."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    __version__,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.kernels.kv_layout import KVLayout
from sglang_lite.runtime.models.config_fields import abbreviate, read_json
from sglang_lite.runtime.models.memory_check import check_free_memory
from sglang_lite.runtime.models.transformers_config import RENAMED_TYPES, explain_not_causal
from sglang_lite.runtime.models.transformers_model import NAME, TransformersModel, register
from sglang_lite.runtime.models.weights.folder import weight_files

_LACKING = re.compile(r"has no attribute '(\w+)'")
_CALL = re.compile(r"\w+\(\)")  # a method that a message asks to call
_LONGEST = 300  # characters of transformers' own message that are shown


def model_class_for(device: torch.device) -> type[TransformersModel]:
    """Returns the class that runs transformers modules on a device."""
    if device.type != "cuda":
        return TransformersModel
    # needs Triton
    from sglang_lite.runtime.models.gpu_transformers_model import GpuTransformersModel

    return GpuTransformersModel


def read_model_outline(path: Path, device: torch.device) -> tuple[int, KVLayout | None]:
    """Returns the number of a model's parameters and the layout of its KV cache, without reading
    weights.

    The layout is None if the trial run that determines it needs values, as routers do to choose
    experts.

    Args:
        path: folder of the model.
        device: device that the model is to run on.

    Raises:
        ModelError: transformers has no code for the model, or the model can't run on our KV cache.
    """
    module = _build_meta_module(path)
    return sum(tensor.numel() for tensor in module.parameters()), _trial_kv_layout(
        module, path, device
    )


def _trial_kv_layout(
    skeleton: PreTrainedModel, path: Path, device: torch.device
) -> KVLayout | None:
    """Finds the KV cache layout of a module on the meta device with a trial run. Returns None if
    the trial run needs values or fails in another way. Raises ModelError if the model can't run on
    our KV cache.
    """
    try:
        return model_class_for(device)(skeleton, str(path)).kv_layout
    except ModelError:
        raise
    except Exception:  # data-dependent code, such as a choice of experts
        return None


def _build_meta_module(path: Path) -> PreTrainedModel:
    """Builds the module of a folder's config on the meta device, with all shapes but no values.

    Raises:
        ModelError: transformers has no code for the model, or its attention can't be replaced.
    """
    register()
    config = None
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        with torch.device("meta"):
            module: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, attn_implementation=NAME, trust_remote_code=False
            )
    except Exception as error:  # transformers' code and each model's raise many kinds
        raise _load_error(path, error, config) from error
    return module.eval()


def _load_error(path: Path, error: Exception, config: PreTrainedConfig | None) -> ModelError:
    if "trust_remote_code" in str(error):  # transformers' own message asks the user to set it
        auto_map = read_json(path / "config.json").get("auto_map")
        code = (
            ", ".join(sorted(map(str, auto_map.values())))
            if isinstance(auto_map, dict)
            else "auto_map"
        )
        return ModelError(
            f"{path}: config.json names code that the folder brings along ({code}); such code is never run.",
            hint="Use a model that transformers has code for, or one of docs/models.md.",
        )
    if (
        config is None
        and (kind := read_json(path / "config.json").get("model_type")) not in CONFIG_MAPPING_NAMES
    ):
        named = f"the model_type {abbreviate(kind)}" if kind is not None else "no model_type"
        return ModelError(
            f"{path}: config.json names {named}, for which neither sglang_lite nor transformers {__version__} has "
            "code.",
            hint="Use a model of the families in docs/models.md, or a GGUF file of this one.",
        )
    if config is not None and (why := explain_not_causal(config.model_type)):
        names = [str(each) for each in read_json(path / "config.json").get("architectures") or ()]
        part = next((name for name in names if name.endswith("ForCausalLM")), None)
        reason = f"it loads {part} only as part of a larger model." if part else why
    elif isinstance(error, KeyError) and error.args == (NAME,):  # its own table of attentions
        reason = "its attention can't be replaced."
    else:
        reason = _explain_failure(error)
    return ModelError(
        f"{path}: there is no code of our own for it, and transformers' can't run it: {reason[:_LONGEST]}",
        hint="Use a model of the families in docs/models.md, or correct config.json.",
    )


def _explain_failure(error: Exception) -> str:
    """Returns the reason why transformers' code fails with a config.json. Leaves out advice that
    only makes sense to a caller of transformers.
    """
    text = " ".join(str(error).split())  # some errors name the cause in a later line
    if isinstance(error, AttributeError) and (field := _LACKING.search(text)):
        return f"config.json has no `{field[1]}`, which its code reads."
    if _CALL.search(text):
        return "its code runs only after a call in Python, which nothing makes here."
    return f"its code fails with this config.json: {type(error).__name__}: {text}"


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
        ModelError: transformers has no code for the model, the model can't run on our KV cache, or
            memory for its weights isn't free.
    """
    skeleton = _build_meta_module(path)
    config = skeleton.config
    class_name = type(skeleton).__name__
    _trial_kv_layout(skeleton, path, device)  # rejects unsupported models before weights are read
    # From the file, as transformers may have used only part of the config.
    names = read_json(path / "config.json").get("architectures")
    named = class_name in (names if isinstance(names, list) else [names])
    if not named and config.model_type not in RENAMED_TYPES:
        raise ModelError(
            f"{path}: config.json names {abbreviate(names)}, its model_type is {class_name}'s.",
            hint="Use a model of the families in docs/models.md.",
        )
    if not dummy:
        weight_files(path)  # its error lists what it looked for
    quantised = not dummy and getattr(config, "quantization_config", None) is not None
    item = 0.5 if quantised else dtype.itemsize  # a lower bound for quantised checkpoints
    weights = int(sum(tensor.numel() for tensor in skeleton.parameters()) * item)
    check_free_memory({"weights": weights}, device, str(path), "Take a smaller model or dtype.")
    options = {"dtype": dtype, "attn_implementation": NAME, "trust_remote_code": False}
    try:
        if dummy:
            with device:  # a GPU draws random numbers faster
                module = AutoModelForCausalLM.from_config(config, **options)
        else:
            module = AutoModelForCausalLM.from_pretrained(path, **options)
        return model_class_for(device)(module.to(device).eval(), str(path))
    except (ModelError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # transformers' code and each model's raise many kinds
        raise _load_error(path, error, config) from error
