"""Adapters, and their tensors in the form that a model's linear layers need.

Tensors are matched to the parameters of `parameters.py` by the names of the modules. Matrices that
the model stacks (q, k and v; gate and up) have one A per part, and one B with the outputs of all
parts. So the adapter adds (x A[p]^T) B[:, p] to part p of the layer's output y[p].
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import torch

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.kernels.lora_weights import LoraWeights
from sglang_lite.runtime.kernels.sizes import round_up_to_power_of_2
from sglang_lite.runtime.models.families import FAMILIES
from sglang_lite.runtime.models.lora.config import (
    ADAPTER_CONFIG,
    AdapterConfig,
    read_adapter_config,
    unsupported_error,
)
from sglang_lite.runtime.models.parameter_tensors import slice_parameter
from sglang_lite.runtime.models.parameters import (
    CheckpointSlice,
    head_name,
    input_projection_roles,
    layer_parameters,
    output_projection_role,
    parameters,
)
from sglang_lite.runtime.models.rotary_pairs import deinterleave_order
from sglang_lite.runtime.models.spec import (
    AttentionSpec,
    DenseSpec,
    LatentSpec,
    LayerSpec,
    ModelSpec,
    NoMixerSpec,
    WkvSpec,
)
from sglang_lite.runtime.models.weights.folder import pickled_tensors
from sglang_lite.runtime.models.weights.ranges import DTYPES, LocalRanges, read_header
from sglang_lite.runtime.models.weights.source import canonical_name

logger = logging.getLogger("sglang_lite")

_TABLE = re.compile(r"\b(embed_tokens|lm_head|embed_in|embed_out|score)\b")
PAGE_RANK = 8  # ranks are padded to a multiple of this
_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_NAME = re.compile(
    r"(?:base_model\.model\.)?(.+)\.(lora_(?:embedding_)?[AB])(?:\.default)?(?:\.weight)?"
)


@dataclass(frozen=True, slots=True)
class ProductShape:
    """Shape of a linear layer that takes adapters: its inputs, and the outputs of each stacked
    part.
    """

    inputs: int
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ProductDelta:
    """An adapter's matrices for one linear layer.

    Attributes:
        a: [parts, rank, inputs].
        b: [rank, outputs of all parts], with the scale, in the order of the model's outputs.
        outputs: number of outputs of each part.
    """

    a: torch.Tensor
    b: torch.Tensor
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Adapter:
    """Adapter whose tensors have been read.

    Attributes:
        name: name that requests use.
        generation: number that is unique among all adapters that the engine has read.
        rank: its largest rank, rounded up to a multiple of PAGE_RANK; all its matrices are padded
            to it.
        layers: its matrices in each layer, by the name of the linear layer.
        digest: digest of its tensors, which identifies it in cache files.
        invocation: tokens that activate a late adapter from their last occurrence in a prompt on;
            empty for one that is always active.
        pages: the tensors in the layout of a GPU's memory, instead of `layers`; or None.
    """

    name: str
    generation: int
    rank: int
    layers: tuple[Mapping[str, ProductDelta], ...]
    digest: str
    invocation: tuple[int, ...] = ()
    pages: torch.Tensor | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Tensors of the adapter."""
        if self.pages is not None:
            return [self.pages]
        return [
            each for layer in self.layers for delta in layer.values() for each in (delta.a, delta.b)
        ]

    @property
    def bytes(self) -> int:
        """Bytes that it takes in host memory."""
        if self.pages is not None and self.pages.is_pinned():
            return round_up_to_power_of_2(self.pages.nbytes)  # torch pins that many
        return sum(each.nbytes for each in self.tensors)


def product_shapes(spec: ModelSpec) -> tuple[Mapping[str, ProductShape], ...]:
    """Returns the shapes of the linear layers that take adapters. There is one mapping for each
    layer, with the names in `Layer` and `FeedForward` as keys.
    """
    shapes = []
    for index, layer in enumerate(spec.layers):
        sizes = {p.role: p.shape for p in layer_parameters(spec, index)}
        shapes.append(
            {
                product: ProductShape(sizes[roles[0]][1], tuple(sizes[role][0] for role in roles))
                for product, roles in _roles_by_product(layer).items()
            }
        )
    return tuple(shapes)


def _roles_by_product(layer: LayerSpec) -> dict[str, tuple[str, ...]]:
    """Returns which matrices are stacked in each linear layer that takes adapters, such as "q", "k"
    and "v" in `qkv`.
    """
    products: dict[str, tuple[str, ...]] = {}
    mixer = layer.attention
    # unsupported: blocks shared by layers, time mixing (a separate input for each matrix), and
    # attention over earlier blocks (not tested)
    if layer.block is not None or isinstance(mixer, WkvSpec) or layer.depth is not None:
        return products
    if not isinstance(mixer, LatentSpec | NoMixerSpec):
        products = {
            "qkv": input_projection_roles(mixer),
            "output": (output_projection_role(mixer),),
        }
    if layer.feeds and isinstance(layer.feed_forward, DenseSpec):
        products["gate_up"] = ("gate", "up") if layer.feed_forward.gated else ("up",)
        products["down"] = ("down",)
    return products


@dataclass(frozen=True, slots=True)
class _Stored:
    """A and B of a module as stored, and the module's name in the file."""

    name: str
    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Matrices:
    """A [rank, inputs] and B [outputs, rank] of a module as stored, and the factor that scales
    their product.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """Files of an adapter at the time they were checked.

    Attributes:
        config: its config.
        file: file of its tensors.
        rank: its largest rank.
        stamp: size of the file, and its modification time.
    """

    config: AdapterConfig
    file: Path
    rank: int
    stamp: tuple[int, int]


AdapterRoom: TypeAlias = tuple[torch.Tensor, Sequence[Mapping[str, LoraWeights]]]
_Target: TypeAlias = tuple[int, str, CheckpointSlice]
_Modules: TypeAlias = dict[str, "_Stored"]  # by our name of the module


class AdapterReader:
    """Reader of a model's adapters.

    Args:
        spec: the model.
        model_name: its name; adapters that name another base cause a warning.
        dtype: dtype of their tensors.
        max_rank: largest rank of an adapter.
        room: allocates memory for an adapter of a given rank, zeroed, in the device's layout.
            Also returns views of it for A and B, by layer and linear layer, as in LoraWeights.
            Returns None if the reader should allocate separate tensors for each linear layer.
        targets: names of the modules that adapters may change, such as "q_proj"; empty for all.
    """

    def __init__(
        self,
        spec: ModelSpec,
        model_name: str,
        dtype: torch.dtype,
        max_rank: int,
        room: Callable[[int], AdapterRoom | None],
        targets: tuple[str, ...] = (),
    ) -> None:
        self._spec = spec
        self._model_name = model_name
        self._dtype = dtype
        self._room = room
        self._max_rank = max_rank
        self._allowed = targets
        self._inputs_first = FAMILIES[spec.architecture].transposed
        self._generations = itertools.count(1)
        self._modules_of_model: dict[str, list[_Target]] = {}  # by module
        tables = (each for each in parameters(spec) if each.layer is None)
        self._others = {  # other modules of the model
            piece.name.removesuffix(".weight") for parameter in tables for piece in parameter.slices
        } | {head_name(spec)}
        for index, layer in enumerate(spec.layers):
            taking = {role for roles in _roles_by_product(layer).values() for role in roles}
            for parameter in layer_parameters(spec, index):
                for piece in parameter.slices:
                    module = piece.name.removesuffix(".weight")
                    of = (index, parameter.role, piece.outputs_first)
                    for name in {module, re.sub(r"^backbone\.", "model.", module)}:
                        if parameter.role in taking:
                            self._modules_of_model.setdefault(name, []).append(of)
                        else:
                            self._others.add(name)

    def open(self, folder: Path) -> AdapterFiles:
        """Checks an adapter's config and the headers of its tensors. Reads no values.

        Args:
            folder: folder written by peft.

        Raises:
            ModelError: it is damaged, was trained for another base model, or uses something that is
                not supported.
        """
        config = read_adapter_config(folder)
        if config.inputs_first and not self._inputs_first:
            meaning = "matrices whose inputs come first, which this model has not"
            raise unsupported_error(folder / ADAPTER_CONFIG, "fan_in_fan_out", True, meaning)
        file = next((path for name in _FILES if (path := folder / name).is_file()), None)
        if file is None:
            raise ModelError(
                f"{folder}: the adapter has no weights: neither {' nor '.join(_FILES)} is a file there.",
                hint="Save it with peft.",
            )
        stamp = _file_identity(
            file
        )  # before reading the headers, so that later changes are detected
        modules = self._collect_modules(config, file, _load_meta_tensors(file))
        self._check_targets(config, modules)
        if outside := [token for token in config.invocation if token >= self._spec.vocab_size]:
            raise ModelError(
                f"{folder}: alora_invocation_tokens has {outside[0]}, which is no token of {self._model_name}.",
                hint="It was made for another model.",
            )
        if config.base and Path(config.base).name != Path(self._model_name).name:
            logger.warning(
                "%s: the adapter was trained on %s, and is used on %s.",
                folder,
                config.base,
                self._model_name,
            )
        return AdapterFiles(
            config, file, max(config.rank_of(each.name) for each in modules.values()), stamp
        )

    def read_adapter(self, name: str, files: AdapterFiles) -> Adapter:
        """Reads an adapter that `open` has checked.

        Args:
            name: name that requests will use.
            files: its files.

        Raises:
            ModelError: its file has changed since then, can't be read, or contains NaN.
        """
        config = files.config
        file = files.file
        if _file_identity(file) != files.stamp:
            raise ModelError(
                f"{file}: changed since the adapter was loaded.",
                hint="Unload the adapter, and load it again.",
            )
        rank = -(-files.rank // PAGE_RANK) * PAGE_RANK
        modules = self._collect_modules(config, file, _load_tensors(file))
        by_role: dict[tuple[int, str], _Matrices] = {}
        for module, stored in modules.items():
            for index, role, piece in self._modules_of_model[module]:
                scale = config.scale_of(stored.name)
                by_role[index, role] = _Matrices(stored.a, slice_parameter(stored.b, piece), scale)
        room = self._room(rank)
        layers = tuple(
            self._build_deltas(index, by_role, rank, room)
            for index in range(len(self._spec.layers))
        )
        adapter = Adapter(
            name,
            next(self._generations),
            rank,
            layers if room is None else (),
            "",
            config.invocation,
            None if room is None else room[0],
        )
        if not all(map(_is_finite, adapter.tensors)):
            unfit = (
                name
                for name, each in modules.items()
                if not (_is_finite(each.a) and _is_finite(each.b))
            )
            wrong = next(unfit, "a matrix")
            raise ModelError(
                f"{file}: {wrong} has NaN, infinite or too large elements.", hint="Train it again."
            )
        return replace(adapter, digest=_digest_adapter(adapter))

    def _build_deltas(
        self,
        index: int,
        by_role: Mapping[tuple[int, str], _Matrices],
        rank: int,
        room: AdapterRoom | None,
    ) -> dict[str, ProductDelta]:
        """Builds an adapter's matrices for a layer, by linear layer. With `room`, writes them into
        that memory instead and returns an empty dict.
        """
        layer = self._spec.layers[index]
        deltas = {}
        sizes = {p.role: p.shape for p in layer_parameters(self._spec, index)}
        for product, roles in _roles_by_product(layer).items():
            if not any((index, role) in by_role for role in roles):
                continue
            outputs = tuple(sizes[role][0] for role in roles)
            if room is None:  # as one page
                a = torch.zeros(1, len(roles), rank, sizes[roles[0]][1], dtype=self._dtype)
                b = torch.zeros(1, rank, sum(outputs), dtype=self._dtype)
                deltas[product] = ProductDelta(a[0], b[0], outputs)
            else:
                a = room[1][index][product].a
                b = room[1][index][product].b
            at = 0
            ranks = b.shape[1]
            for part, role in enumerate(roles):
                end = at + sizes[role][0]
                if (index, role) in by_role:
                    of = by_role[index, role]
                    for page, first in enumerate(range(0, len(of.a), ranks)):
                        rows = of.a[first : first + ranks]
                        columns = of.b[:, first : first + ranks].t()
                        a[page, part, : len(rows)] = rows
                        torch.mul(columns, of.scale, out=b[page, : len(rows), at:end])
                at = end
            if product == "qkv" and isinstance(layer.attention, AttentionSpec):
                order = deinterleave_order(layer.attention)
                if order is not None:
                    b.copy_(b[..., order])
        return deltas

    def _collect_modules(
        self, config: AdapterConfig, file: Path, tensors: Mapping[str, torch.Tensor]
    ) -> _Modules:
        """Returns the matrices of each module that an adapter changes. Does not read their values."""
        found: dict[str, dict[str, torch.Tensor]] = {}
        names: dict[str, str] = {}  # in the file, by our own
        left_out = set[str]()
        for name, tensor in tensors.items():
            match = _NAME.fullmatch(name)
            if match is None and _TABLE.search(name):
                raise self._embedding_error(
                    file, name.removesuffix(".weight").removesuffix(".base_layer")
                )
            if match is None:
                raise _merge_error(f"{file}: {name} is no matrix of an adapter (lora_A, lora_B).")
            if config.excludes_module(match[1]):
                left_out.add(match[1])
                continue
            if tensor.dtype not in _FLOATS:
                raise ModelError(
                    f"{file}: {name} is stored as {tensor.dtype}; matrices of adapters are float32, bfloat16 or "
                    "float16.",
                    hint="Save the adapter in one of these.",
                )
            module = canonical_name(match[1] + ".weight").removesuffix(".weight")
            if match[2] in found.setdefault(module, {}):
                raise ModelError(
                    f"{file}: {module}.{match[2]} is there twice.", hint="Save the adapter again."
                )
            found[module][match[2]] = tensor
            names[module] = match[1]
        self._log_excluded_modules(config, file, left_out, taken=bool(found))
        for module in found:
            if module not in self._modules_of_model:
                raise self._unknown_module_error(file, module)
        for module, pair in found.items():
            if not config.is_target(names[module]):
                raise ModelError(
                    f"{file}: the adapter changes {module}, which is none of its target_modules "
                    f"({ADAPTER_CONFIG}): peft does not read it.",
                    hint="Add it to target_modules, or take its matrices out of the file.",
                )
            if self._allowed and module.rpartition(".")[2] not in self._allowed:
                raise ModelError(
                    f"{file}: the adapter changes {module}, which lora_target_modules leaves out.",
                    hint=f"It has {', '.join(self._allowed)}.",
                )
            if missing := {"lora_A", "lora_B"} - pair.keys():
                raise ModelError(
                    f"{file}: {module} has no {missing.pop()}.", hint="Save the adapter again."
                )
            self._check_shapes(config, file, module, names[module], pair)
        return {
            module: _Stored(names[module], pair["lora_A"], pair["lora_B"])
            for module, pair in found.items()
        }

    def _log_excluded_modules(
        self, config: AdapterConfig, file: Path, modules: set[str], *, taken: bool
    ) -> None:
        """Logs which modules' matrices are ignored because the config excludes them, as in peft.
        Raises ModelError if the adapter has no other matrices.
        """
        if not taken:
            why = f": its config leaves out {min(modules)} and all others" if modules else ""
            raise ModelError(
                f"{file}: the adapter has no matrices{why}.", hint="Save it with peft."
            )
        if modules:
            logger.warning(
                "%s: matrices of %d modules (%s) are not used, in peft neither: exclude_modules and "
                "layers_to_transform of %s leave them out.",
                file,
                len(modules),
                min(modules),
                ADAPTER_CONFIG,
            )

    def _check_shapes(
        self,
        config: AdapterConfig,
        file: Path,
        module: str,
        name: str,
        pair: Mapping[str, torch.Tensor],
    ) -> None:
        piece = self._modules_of_model[module][0][2]
        rank = config.rank_of(name)
        if rank > self._max_rank:
            raise ModelError(
                f"{file}: {module} has rank {rank}, and max_lora_rank is {self._max_rank}.",
                hint="Raise max_lora_rank.",
            )
        for part, shape in (("lora_A", (rank, piece.shape[1])), ("lora_B", (piece.shape[0], rank))):
            if (stored := tuple(pair[part].shape)) != shape:
                raise ModelError(
                    f"{file}: {module}.{part} has shape {stored}; {self._model_name} and the adapter's config take "
                    f"{shape}.",
                    hint=f"Was the adapter made for another model? It says {config.base or 'nothing about that'}.",
                )

    def _unknown_module_error(self, file: Path, module: str) -> ModelError:
        if _TABLE.search(module):
            return self._embedding_error(file, module)
        if module in self._others or ".experts." in module:
            return _merge_error(
                f"{file}: the adapter changes {module}; only projections of attention, or of what is in its place, and "
                "of dense feed-forwards can."
            )
        return ModelError(
            f"{file}: the adapter changes {module}, which {self._model_name} does not have.",
            hint="It was made for another model.",
        )

    def _embedding_error(self, file: Path, module: str) -> ModelError:
        """Returns the error for an adapter that changes embeddings or a head."""
        problem = f"{file}: the adapter changes {module}: embeddings and heads are not supported."
        if not self._spec.tied_embeddings:
            return _merge_error(problem)
        return ModelError(
            problem,
            hint="Its base has one tensor for both. Untie them in transformers, "
            "head.weight = Parameter(head.weight.clone()) and config.tie_word_embeddings = False; then merge it with "
            "peft's merge_and_unload().",
        )

    def _check_targets(self, config: AdapterConfig, modules: _Modules) -> None:
        """Checks that the files have matrices for each target module in the config. Ignores a
        target if the config excludes all modules that it names.
        """
        if isinstance(config.targets, str):
            return
        known = [*(each.name for each in modules.values()), *modules]
        for target in config.targets:
            own = [
                each
                for each in (*self._modules_of_model, *self._others)
                if _matches_module_suffix(target, each)
            ]
            left_out = own and all(map(config.excludes_module, own))
            if not left_out and not any(_matches_module_suffix(target, module) for module in known):
                raise ModelError(
                    f"{config.folder}: target_modules has {target!r}, which has no matrices in the files.",
                    hint="Save it again with peft.",
                )


def _merge_error(problem: str) -> ModelError:
    return ModelError(problem, hint="Merge it into its base model with peft's merge_and_unload().")


def _matches_module_suffix(target: str, module: str) -> bool:
    return module == target or module.endswith(f".{target}")


def _digest_adapter(adapter: Adapter) -> str:
    found = hashlib.blake2b(str([[*layer] for layer in adapter.layers]).encode(), digest_size=16)
    for tensor in adapter.tensors:
        found.update(f"{tuple(tensor.shape)}".encode())
        found.update(tensor.view(torch.uint8).numpy().data)
    return found.hexdigest()


def _is_finite(matrix: torch.Tensor) -> bool:
    return all(bool(end.isfinite()) for end in matrix.aminmax())  # a tenth of `isfinite`'s time


def _file_identity(file: Path) -> tuple[int, int]:
    try:
        found = file.stat()
    except OSError as error:
        raise ModelError(
            f"{file}: can't be read: {error}", hint="Put it back, or unload the adapter."
        ) from error
    return found.st_size, found.st_mtime_ns


def _load_meta_tensors(file: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors of a file without their values."""
    if file.suffix == ".bin":
        return pickled_tensors(file, "meta")
    found = read_header(LocalRanges(), file)
    # others are refused, too
    dtypes = {name: DTYPES.get(each.format, torch.uint8) for name, each in found.items()}
    return {
        name: torch.empty(each.shape, dtype=dtypes[name], device="meta")
        for name, each in found.items()
    }


def _load_tensors(file: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors of a file. Never runs code in a pickled file."""
    if file.suffix == ".bin":
        return pickled_tensors(file)
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(
            f"{file}: damaged or truncated: {error}", hint="Fetch the file again."
        ) from error
