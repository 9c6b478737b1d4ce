"""Reader of `quantization_config`, which recognises the supported formats of matrices as each
quantisation tool declares them.

It reads no tensors; the files of the packings beside this one do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sglang_lite.protocol import ModelError, ParameterError
from sglang_lite.runtime.models.config_fields import Json, read_json
from sglang_lite.runtime.models.folder_config import config_file, read_config
from sglang_lite.runtime.models.weights import bitsandbytes, compressed_tensors, fp4
from sglang_lite.runtime.models.weights.awq import awq
from sglang_lite.runtime.models.weights.blocks import Format
from sglang_lite.runtime.models.weights.gptq import BITS, gptq
from sglang_lite.runtime.models.weights.packing import Packing
from sglang_lite.runtime.models.weights.rounding import NF4
from sglang_lite.runtime.models.weights.source import WeightSource
from sglang_lite.runtime.models.weights.torchao import FLOATS, INTEGERS, torchao


@dataclass(frozen=True, slots=True)
class Matrices:
    """How matrices are declared to be stored.

    Attributes:
        names: values of `Engine(quantization=)` that mean this format.
        packings: packings of matrices; empty if they are not packed, but plain 8-bit floating
            point.
        block: rows and columns of the blocks of an 8-bit matrix if each block has a scale, or None.
        scales: whether 8-bit floating-point matrices are declared, which have scales.
        format: format of random matrices of this kind, whose group is 0 for a whole row; None for
            16 bits or `scales`.
        stacks: whether only stacks of experts are quantised, in MXFP4.
        integer_inputs: whether inputs are also declared to be rounded to 8-bit integers (w8a8).
    """

    names: tuple[str, ...] = ()
    packings: tuple[Packing, ...] = ()
    block: tuple[int, int] | None = None
    scales: bool = False
    format: Format | None = None
    stacks: bool = False
    integer_inputs: bool = False

    @property
    def fp4(self) -> bool:
        """True if numbers are 4-bit floating point (e2m1), which newer GPUs multiply directly."""
        return self.stacks or (self.format is not None and self.format.table == fp4.E2M1)


PLAIN = Matrices()
Q4_K = Matrices(("gguf",), format=Format(4, 32, minimum=True))  # most matrices of most GGUF files


@dataclass(frozen=True, slots=True)
class Quantisation:
    """Format of a folder's matrices, as declared by its files.

    Attributes:
        source: file that declares the format, for messages.
        matrices: the declaration.
    """

    source: str
    matrices: Matrices = PLAIN

    def check_checkpoint(self, source: WeightSource) -> None:
        """Raises ModelError if quantised matrices are declared but the checkpoint has none."""
        if self.matrices.packings and not source.has_packed_matrices:
            method = self.matrices.names[0]
            parts = [packing.parts[0] for packing in self.matrices.packings]
            raise ModelError(
                f"{self.source}: quantization_config says that matrices are packed by {method}, but no tensor is named "
                f"…{' or …'.join(parts)}.",
                hint="Remove quantization_config, if the checkpoint is not quantised.",
            )
        if self.matrices.scales and not (self.matrices.packings or source.has_scales):
            raise ModelError(
                f"{self.source}: quantization_config says that the weights are in 8 bits, but no tensor has a scale.",
                hint="Remove quantization_config, if the checkpoint is not quantised.",
            )

    def check_requested_format(self, name: str | None) -> None:
        """Raises ParameterError if `Engine(quantization=name)` contradicts the declaration, or
        would quantise matrices that are quantised already.
        """
        names = self.matrices.names
        if name is None or name in (names or ON_LOADING):
            return
        found = f"declares {names[0]}" if names else "declares no quantised weights"
        raise ParameterError(
            "quantization",
            f"{name!r} contradicts {self.source}, which {found}.",
            hint="Leave it out.",
        )


# names of `Engine(quantization=)` that quantise plain matrices
ON_LOADING = ("fp8", "int4", "int8", "nf4")


def read_quantisation(folder: Path) -> Quantisation:
    """Reads the declaration in `config.json`, or in the `hf_quant_config.json` that Model Optimizer
    writes.

    Raises:
        ModelError: a file is not valid JSON, or the quantisation is not supported.
    """
    file = config_file(folder)
    content = read_config(folder)
    given = content.get("quantization_config") or (content.get("text_config") or {}).get(
        "quantization_config"
    )
    modelopt = folder / "hf_quant_config.json"
    if modelopt.exists():
        quantisation = read_json(modelopt).get("quantization")
        if given and quantisation and given.get("quant_method") != "modelopt":
            raise ModelError(
                f"{file} and {modelopt} declare two quantisations.",
                hint="Remove the one that is wrong.",
            )
        if not given:
            file = modelopt
            given = quantisation
            if isinstance(quantisation, dict):
                given = {"quant_method": "modelopt", **quantisation}
    return Quantisation(str(file), parse_quantization_config(given, str(file)))


def parse_quantization_config(given: Json, source: str) -> Matrices:
    """Reads what a `quantization_config` declares.

    Args:
        given: the parsed config, or None.
        source: name of the file, for messages.

    Raises:
        ModelError: matrices are quantised in a way that is not supported, or the declaration is
            malformed.
    """
    if not given:
        return PLAIN
    try:
        method = given.get("quant_method", "unknown")
        if method not in _METHODS:
            raise _UnsupportedError(repr(method))
        return _METHODS[method](given)
    except _UnsupportedError as error:
        raise ModelError(
            f"{source}: weights quantised with {error} are not supported.",
            hint=f"Supported are {', '.join(_METHODS)}; unquantised checkpoints; and GGUF files.",
        ) from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(
            f"{source}: quantization_config can't be understood: {error!r}",
            hint="Correct it, or fetch the file again.",
        ) from error


class _UnsupportedError(Exception):
    pass


def _read_fp8_format(config: Mapping[str, Json]) -> Matrices:
    if config.get("fmt", "e4m3") != "e4m3":
        raise _UnsupportedError(f"'fp8' ({config['fmt']})")
    return Matrices(("fp8",), block=_read_block_size(config.get("weight_block_size")), scales=True)


def _read_modelopt_format(config: Mapping[str, Json]) -> Matrices:
    match config.get("quant_algo"):
        case None:  # only keys and values
            return PLAIN
        case "FP8" | "FP8_PER_CHANNEL_PER_TOKEN":
            return Matrices(("modelopt_fp8", "modelopt", "fp8"), scales=True)
        case "NVFP4":
            _require(
                config.get("group_size", 16) == 16, "group_size", config.get("group_size"), "16"
            )
            return Matrices(
                ("modelopt_fp4", "modelopt"), (fp4.modelopt_nvfp4_packing(),), format=_NVFP4
            )
        case "MIXED_PRECISION":
            kinds = {layer["quant_algo"] for layer in config["quantized_layers"].values()}
            if others := kinds - {None, "FP8", "NVFP4"}:
                raise _UnsupportedError(
                    f"'modelopt' (MIXED_PRECISION with {', '.join(sorted(others))})"
                )
            few = "NVFP4" in kinds
            packings = (fp4.modelopt_nvfp4_packing(),) if few else ()
            return Matrices(
                ("modelopt", "modelopt_fp4", "modelopt_fp8"),
                packings,
                scales="FP8" in kinds,
                format=_NVFP4 if few else None,
            )
        case other:
            raise _UnsupportedError(f"'modelopt' ({other})")


def _read_gptq_format(config: Mapping[str, Json]) -> Matrices:
    version = config.get("checkpoint_format", "gptq")
    if version not in ("gptq", "gptq_v2"):
        raise _UnsupportedError(f"'gptq' (checkpoint_format {version!r})")
    own = [
        each
        for pattern, each in (config.get("dynamic") or {}).items()
        if not pattern.startswith("-:")
    ]
    schemes = [_gptq_scheme({**config, **each}) for each in ({}, *own)]
    packing = gptq(list(dict.fromkeys(schemes)), second_version=version == "gptq_v2")
    return Matrices(("gptq", "gptq_marlin"), (packing,), format=_integer_format(*schemes[0]))


def _gptq_scheme(config: Mapping[str, Json]) -> tuple[int, int | None]:
    """Returns the number of bits of each number, and the number of inputs in a group: -1 for all,
    None if not declared.
    """
    bits = config.get("bits")
    if not isinstance(bits, int) or bits not in BITS:
        raise ValueError(f"bits is {bits!r}, not one of {', '.join(map(str, BITS))}")
    return bits, _require_group_size(config.get("group_size"))


def _read_awq_format(config: Mapping[str, Json]) -> Matrices:
    bits = config.get("bits", config.get("w_bit"))
    _require(bits == 4, "bits", bits, "4")
    if str(config.get("version", "gemm")).lower() != "gemm":
        raise _UnsupportedError(f"'awq' (version {config['version']!r})")
    group = _require_group_size(config.get("group_size", config.get("q_group_size")))
    return Matrices(("awq", "awq_marlin"), (awq(group),), format=_integer_format(4, group))


def _read_bitsandbytes_format(config: Mapping[str, Json]) -> Matrices:
    if config.get("load_in_8bit"):
        return Matrices(("bitsandbytes",), (bitsandbytes.eight_bit_packing(),), format=_BYTES)
    kind = config.get("bnb_4bit_quant_type", "fp4")
    _require(kind in ("nf4", "fp4"), "bnb_4bit_quant_type", kind, "nf4 or fp4")
    _require(config.get("load_in_4bit") is True, "load_in_4bit", config.get("load_in_4bit"), "true")
    packing = bitsandbytes.four_bit_packing(kind)
    return Matrices(("bitsandbytes",), (packing,), format=Format(4, 64, minimum=False, table=NF4))


_FLOATS = "8-bit floats"
_INTEGERS = "integers"


def _read_compressed_tensors_format(config: Mapping[str, Json]) -> Matrices:
    if config.get("transform_config"):
        raise _UnsupportedError("'compressed-tensors' (rotated by a transform)")
    if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise _UnsupportedError(
            f"'compressed-tensors' (sparse: {config['sparsity_config']['format']})"
        )
    groups = [each for each in config["config_groups"].values() if each.get("weights") is not None]
    found: dict[str, list[Any]] = {}
    for kind, setting in (_classify_group(each["weights"]) for each in groups):
        found[kind] = list(dict.fromkeys([*found.get(kind, ()), setting]))
    inputs = [each.get("input_activations") or {} for each in groups]
    # a module has the first packing whose first tensor it has: nvfp4's is unique
    kinds = sorted(found, reverse=True)
    made = [_matrices_of_kind(kind, found[kind], inputs) for kind in kinds]
    if len(made) < 2:
        return made[0] if made else PLAIN
    floats = _FLOATS in found
    integers = found.get(_INTEGERS, [])
    # the tensors of these kinds have the same names, so they can't be told apart
    if integers and ("mxfp4" in found or (floats and 8 in {bits for bits, _ in integers})):
        raise _UnsupportedError(f"'compressed-tensors' ({' and '.join(kinds)} in one checkpoint)")
    return Matrices(
        ("compressed-tensors",),
        tuple(packing for each in made for packing in each.packings[: 1 if floats else None]),
        next((each.block for each in made if each.block), None),
        floats,
        made[0].format,
    )


def _matrices_of_kind(
    kind: str, settings: Sequence[Any], inputs: Sequence[Mapping[str, Json]]
) -> Matrices:
    """Returns the format of compressed-tensors matrices of the given kind.

    Args:
        kind, settings: as `_classify_group` returns them.
        inputs: each group's declaration of its inputs.
    """
    match kind:
        case "nvfp4":
            return Matrices(
                ("compressed-tensors",), (fp4.compressed_tensors_nvfp4_packing(),), format=_NVFP4
            )
        case "mxfp4":
            return Matrices(
                ("compressed-tensors",), (fp4.compressed_tensors_mxfp4_packing(),), format=_MXFP4
            )
        case "integers":
            rows_of_bytes = settings == [(8, None)]
            integers = rows_of_bytes and all(
                (x.get("type"), x.get("num_bits")) == ("int", 8) for x in inputs
            )
            packings = (
                compressed_tensors.word_packing(settings),
                compressed_tensors.byte_packing(integer_inputs=integers),
            )
            form = (
                _BYTES if rows_of_bytes else _integer_format(settings[0][0], settings[0][1] or -1)
            )
            names = (
                ("compressed-tensors", "w8a8_int8") if rows_of_bytes else ("compressed-tensors",)
            )
            return Matrices(names, packings, format=form, integer_inputs=integers)
    if len(set(settings) - {None}) > 1:
        raise _UnsupportedError("'compressed-tensors' (blocks of several sizes)")
    block = next((setting for setting in settings if setting is not None), None)
    return Matrices(("compressed-tensors", "w8a8_fp8", "fp8"), block=block, scales=True)


def _classify_group(weights: Mapping[str, Json]) -> tuple[str, Any]:
    """Returns the kind of matrices that a group of compressed-tensors has, such as "nvfp4", and the
    settings of that kind. The settings are the block size of 8-bit floats, or the bits and group
    size of integers.
    """
    kind = weights.get("type")
    bits = weights.get("num_bits")
    strategy = weights.get("strategy")
    if (kind, bits) == ("float", 8) and strategy in ("tensor", "channel", "block"):
        return _FLOATS, _read_block_size(
            weights["block_structure"]
        ) if strategy == "block" else None
    if (kind, bits, weights.get("group_size")) in (("float", 4, 16), ("float", 4, 32)):
        return "nvfp4" if weights["group_size"] == 16 else "mxfp4", None
    if kind == "int" and bits in range(2, 9) and strategy in ("tensor", "channel", "group"):
        group = _require_group_size(weights.get("group_size")) if strategy == "group" else None
        return _INTEGERS, (bits, group)
    raise _UnsupportedError(
        f"'compressed-tensors' ({kind}, {bits} bits, a scale for each {strategy})"
    )


def _read_fbgemm_format(config: Mapping[str, Json]) -> Matrices:
    return Matrices(("fbgemm_fp8", "fp8"), scales=True)


def _read_mxfp4_format(config: Mapping[str, Json]) -> Matrices:
    return Matrices(("mxfp4",), (fp4.mxfp4_experts_packing(),), stacks=True)


def _read_torchao_format(config: Mapping[str, Json]) -> Matrices:
    kinds = config["quant_type"]
    kind = (
        kinds["default"]["_type"]
        if isinstance(kinds, dict) and kinds.keys() == {"default"}
        else kinds
    )
    if kind in FLOATS:
        return Matrices(("torchao",), (torchao(None),), scales=True)
    if kind not in INTEGERS:
        raise _UnsupportedError(f"'torchao' ({kind})")
    return Matrices(("torchao",), (torchao(9.0),), format=_BYTES)


_METHODS: dict[str, Callable[[Mapping[str, Json]], Matrices]] = {
    "fp8": _read_fp8_format,
    "fbgemm_fp8": _read_fbgemm_format,
    "modelopt": _read_modelopt_format,
    "compressed-tensors": _read_compressed_tensors_format,
    "gptq": _read_gptq_format,
    "awq": _read_awq_format,
    "bitsandbytes": _read_bitsandbytes_format,
    "mxfp4": _read_mxfp4_format,
    "torchao": _read_torchao_format,
}


_BYTES = Format(8, 0, minimum=False)
_NVFP4 = Format(4, 16, minimum=False, table=fp4.E2M1)
_MXFP4 = replace(_NVFP4, group=32)


def _integer_format(bits: int, group: int | None) -> Format:
    """Returns the format of integers with a scale per group of inputs. `group` is -1 for all
    inputs, None if not declared.
    """
    return Format(4 if bits <= 4 else 8, 128 if group is None else max(group, 0), minimum=bits <= 4)


def _require(valid: bool, field: str, value: object, wanted: str) -> None:
    if not valid:
        raise ValueError(f"{field} is {value!r}, not {wanted}")


def _require_group_size(size: Json) -> int | None:
    """Checks the declared number of columns in a group and returns it: -1 for the whole row, None
    if not declared.
    """
    if size is not None and (
        not isinstance(size, int) or isinstance(size, bool) or size < -1 or size == 0
    ):
        raise ValueError(f"group_size is {size!r}, not -1 or a number above 0")
    return size


def _read_block_size(block: Sequence[int] | None) -> tuple[int, int] | None:
    if block is None:
        return None
    if not isinstance(block, list | tuple) or len(block) != 2:
        raise ValueError(f"{block} is no size of a block")
    rows, columns = block
    if not (isinstance(rows, int) and isinstance(columns, int) and rows > 0 and columns > 0):
        raise ValueError(f"{block} is no size of a block")
    return rows, columns
