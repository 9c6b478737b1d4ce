"""Reader of `quantization_config`: recognises the supported formats of matrices, as each quantisation tool writes them.

It reads no tensors; fp8.py does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.models.config_fields import Json, read_json
from sglang_lite.runtime.models.weights.source import WeightSource


@dataclass(frozen=True, slots=True)
class Quantisation:
    """Format of a folder's matrices, as declared by its files.

    Attributes:
        source: file that declares the format, for messages.
        block: rows and columns of the blocks of a matrix if each block has a scale, or None.
        scales: whether matrices are declared to have scales.
    """

    source: str
    block: tuple[int, int] | None
    scales: bool

    def check(self, source: WeightSource) -> None:
        """Raises ModelError if scales are declared but the checkpoint has none."""
        if self.scales and not source.has_scales:
            raise ModelError(
                f"{self.source}: quantization_config says that the weights are in 8 bits, but no tensor has a scale.",
                hint="Remove quantization_config, if the checkpoint is not quantised.",
            )


def read_quantisation(folder: Path) -> Quantisation:
    """Reads the declaration in `config.json`, or in the `hf_quant_config.json` that Model Optimizer writes.

    Raises:
        ModelError: a file is not valid JSON, or the quantisation is not supported.
    """
    file = folder / "config.json"
    content = read_json(file)
    modelopt = folder / "hf_quant_config.json"
    if not content.get("quantization_config") and modelopt.exists():
        file = modelopt
        quantisation = read_json(file).get("quantization")
        if isinstance(quantisation, dict):
            quantisation = {"quant_method": "modelopt", **quantisation}
        content["quantization_config"] = quantisation
    return Quantisation(str(file), scale_block_size(content, str(file)), declares_weight_scales(content))


def scale_block_size(config: Mapping[str, Json], source: str) -> tuple[int, int] | None:
    """Rows and columns of a block if a config declares that each block of a matrix has a scale; None if it does not.

    Args:
        config: parsed `config.json`.
        source: name of the file, for messages.

    Raises:
        ModelError: matrices are quantised in a way that is not supported, or the declaration is malformed.
    """
    given = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    if not given:
        return None
    try:
        return _block(given)
    except _UnsupportedError as error:
        raise ModelError(
            f"{source}: weights quantised with {error} are not supported.",
            hint="Use a checkpoint in 8-bit floating point (fp8, fbgemm_fp8, modelopt, compressed-tensors), an "
            "unquantised one, or a GGUF file.",
        ) from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{source}: quantization_config can't be understood: {error!r}") from error


def declares_weight_scales(config: Mapping[str, Json]) -> bool:
    """True if a config, accepted by `scale_block_size`, declares 8-bit matrices, not only 8-bit keys and values."""
    given = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config") or {}
    match given.get("quant_method"):
        case "modelopt":
            return given.get("quant_algo") is not None
        case "compressed-tensors":
            return any(group.get("weights") is not None for group in given["config_groups"].values())
    return bool(given)


class _UnsupportedError(Exception):
    pass


def _block(config: Mapping[str, Json]) -> tuple[int, int] | None:
    method = config.get("quant_method", "unknown")
    match method:
        case "fp8":
            if config.get("fmt", "e4m3") != "e4m3":
                raise _UnsupportedError(f"{method!r} ({config['fmt']})")
            return _pair(config.get("weight_block_size"))
        case "fbgemm_fp8":
            return None
        case "modelopt":
            if config.get("quant_algo") not in (None, "FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
                raise _UnsupportedError(f"{method!r} ({config.get('quant_algo')})")
            return None
        case "compressed-tensors":
            return _compressed_tensors_block(config)
    raise _UnsupportedError(repr(method))


def _compressed_tensors_block(config: Mapping[str, Json]) -> tuple[int, int] | None:
    if config.get("transform_config"):
        raise _UnsupportedError("'compressed-tensors' (rotated by a transform)")
    blocks = set()
    for group in config["config_groups"].values():
        weights = group.get("weights")
        if weights is None:
            continue
        kind, bits, strategy = weights.get("type"), weights.get("num_bits"), weights.get("strategy")
        if (kind, bits) != ("float", 8) or strategy not in ("tensor", "channel", "block"):
            raise _UnsupportedError(f"'compressed-tensors' ({kind}, {bits} bits, a scale for each {strategy})")
        if strategy == "block":
            blocks.add(_pair(weights["block_structure"]))
    if len(blocks) > 1:
        raise _UnsupportedError("'compressed-tensors' (blocks of several sizes)")
    return blocks.pop() if blocks else None


def _pair(block: Sequence[int] | None) -> tuple[int, int] | None:
    if block is None:
        return None
    if not isinstance(block, list | tuple) or len(block) != 2:
        raise ValueError(f"{block} is no size of a block")
    rows, columns = block
    if not (isinstance(rows, int) and isinstance(columns, int) and rows > 0 and columns > 0):
        raise ValueError(f"{block} is no size of a block")
    return rows, columns
