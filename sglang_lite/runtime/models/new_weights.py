"""New weights for a loaded decoder: staged and checked first, then written part by part.

On a GPU they overwrite the old tensors, whose addresses captured graphs hold. On a CPU new parts
replace the old ones. Besides the model itself, this needs memory for the staged weights and for one
part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.kernels.kv_layout import KVLayout
from sglang_lite.runtime.models.decoder import Decoder
from sglang_lite.runtime.models.layers.linear import stacked_rows
from sglang_lite.runtime.models.vision_tower import read_encoder_weights
from sglang_lite.runtime.models.weight_parts import (
    ROPES,
    PartKey,
    WeightParts,
    look_up_part,
    part_builders,
)
from sglang_lite.runtime.models.weight_reader import BLOCK_PARTS, WeightReader
from sglang_lite.runtime.models.weights.blocks import Blocks
from sglang_lite.runtime.models.weights.source import (
    EncodedStack,
    PlainRows,
    Stored,
    WeightSource,
    is_encoder_tensor,
)

# Bytes of parts that are kept until they are written, on a CPU and on a GPU; parts beyond are built
# twice.
_STAGED_BYTES = 1 << 30
_STAGED_ON_GPU = 1 << 28


class StagedWeights:
    """New weights of a decoder that have passed all checks.

    Each tensor occurs once, has the right shape and is finite. On a GPU, each new part also has the
    same structure as the one that it replaces.

    Args:
        model: loaded decoder, unchanged so far.
        open_source: opens the source of the weights from its beginning.
        whole: whether the source must have all tensors. If not, tensors that a part lacks are read
            from the model.

    Raises:
        ModelError: a tensor is missing, has no key, has another shape, is not finite, or the
            model can't hold it.
    """

    def __init__(
        self, model: Decoder, open_source: Callable[[], WeightSource], *, whole: bool
    ) -> None:
        self._model = model
        self._open = open_source
        self._whole = whole
        self._map = WeightParts(model)
        # new parts, of any kind; None for those beyond the limit of memory, which are built again
        self._parts: dict[PartKey, Any] = {}
        source, functions = self._open_reader()
        given = source.names
        limit = _STAGED_BYTES if model.device.type == "cpu" else _STAGED_ON_GPU
        parts = {self._map.key(name) for name in given}
        for key, build in functions.items():
            if key not in parts and not (whole and key != ROPES):
                continue
            part = build()
            if model.fused:
                _check_shared_tensors(
                    list(tensor_pairs(look_up_part(model, key), part, _part_name(key)))
                )
            self._parts[key] = part if source.taken_bytes <= limit else None
            del part  # before the next one takes memory
        encoder = [
            name for name, _ in read_encoder_weights(model.encoder_weights, source, whole=whole)
        ]
        if (
            model.tower is not None
            and not whole
            and (other := next(filter(self._is_surplus, given), None)) is not None
        ):
            raise ModelError(f"{source.label}: the model has no place for {other}.")
        source.check_all_used(model.unused_tensors)
        self.kv_scales = (
            source.kv_scales(model.spec.kv_layout) if model.kv_scales is not None else {}
        )
        self.names = frozenset((*given, *encoder))

    def _is_surplus(self, name: str) -> bool:
        """Returns whether a tensor belongs to an encoder and this model has no place for it. A
        complete checkpoint may contain such tensors.
        """
        return is_encoder_tensor(name) and self._map.shape(name) is None

    # builds any part
    def _open_reader(self) -> tuple[_NewTensors, Mapping[PartKey, Callable[[], Any]]]:
        model = self._model
        source = _NewTensors(self._open(), model, None if self._whole else self._map)
        reader = WeightReader(
            model.spec,
            source,
            model.precision,
            model.device,
            fused=model.fused,
            linears=model.linears,
        )
        return source, part_builders(model, reader)

    def write_to_model(self) -> None:
        """Writes the weights into the model. May be called once.

        If it fails, only some of the new weights may have been written. Call
        `Decoder.choose_small_batch_step` afterwards.
        """
        later = self._open_reader()[1] if None in self._parts.values() else {}
        for key in list(self._parts):
            part = self._parts.pop(key)
            self._put_part(key, later[key]() if part is None else part)
            del part
        encoder = self._model.encoder_weights
        for name, values in read_encoder_weights(
            encoder, self._open_reader()[0], whole=self._whole
        ):
            encoder[name].copy_(values)

    def _put_part(self, key: PartKey, part: Any) -> None:  # any part
        model, (layer, name) = self._model, key
        if model.fused:
            for old, new in tensor_pairs(look_up_part(model, key), part, _part_name(key)):
                old.copy_(new)
        elif key == (None, "embedding") and model.spec.tied_embeddings:
            model.embedding, model.head = part
        else:
            setattr(model if layer is None else model.layers[layer], name, part)
            for borrower, lender in model.spec.repeated_layers.items():
                if lender == layer:
                    setattr(model.layers[borrower], name, part)
            if name in BLOCK_PARTS:
                for borrower, lender in model.spec.borrowed_blocks.items():
                    if lender == layer:
                        setattr(model.layers[borrower], name, part)


def _part_name(key: PartKey) -> str:
    return key[1] if key[0] is None else f"layer {key[0]}, {key[1]}"


class _NewTensors(WeightSource):
    """A source's tensors, moved to the model's device and checked to be finite.

    If the source has only some tensors of a part, the others are read from the model.

    Args:
        given: source of new tensors.
        model: decoder that they are for.
        parts: current tensors of the decoder; None if the source must have all tensors.
    """

    def __init__(self, given: WeightSource, model: Decoder, parts: WeightParts | None) -> None:
        super().__init__(given.label, dict.fromkeys(given.names, Path()))
        self._given = given
        self._device = model.device
        self._map = parts
        self._dtype = model.precision.compute  # numbers of a wider dtype may overflow in it
        self.taken_bytes = 0
        self._lacking: set[str] = set()
        for name in self.names if parts is not None else ():
            assert parts is not None
            if (key := parts.key(name)) is not None:
                self._lacking.update(parts.missing_tensors(key, frozenset(self.names)))

    @property
    def has_scales(self) -> bool:
        return self._given.has_scales

    @property
    def has_packed_matrices(self) -> bool:
        return self._given.has_packed_matrices

    def has_tensor(self, name: str) -> bool:
        return name in self._lacking or self._given.has_tensor(name)

    def take_tensor_or_stack(self, name: str, shape: tuple[int, ...]) -> Stored:
        if name in self._lacking:
            assert self._map is not None
            return self._map.read_held_tensor(name)
        taken = self._given.take_tensor_or_stack(name, shape)
        if isinstance(taken, PlainRows):  # read once, to be checked and to be used
            taken = taken.read_stored_rows(0, taken.shape[0])
        if isinstance(taken, torch.Tensor):
            taken = taken.to(self._device)
        self.taken_bytes += math.prod(shape) * taken.dtype.itemsize
        if not _is_finite(taken, self._dtype):
            raise ModelError(
                f"{self.label}: {name} has NaN or infinite elements.",
                hint="The old weights are kept.",
            )
        return taken

    def ignore_tensor(self, name: str) -> None:
        self._given.ignore_tensor(name)

    def kv_scales(self, layout: KVLayout) -> dict[tuple[int, str], torch.Tensor]:
        return self._given.kv_scales(layout)

    def check_all_used(self, may_ignore: tuple[str, ...] = ()) -> None:
        self._given.check_all_used(may_ignore)

    def _read_stored(self, name: str, file: Path) -> Stored:
        raise AssertionError("take_tensor_or_stack() needs no file")


def _is_finite(weight: Stored, dtype: torch.dtype) -> bool:
    if isinstance(weight, torch.Tensor):
        # if there is a NaN, minimum and maximum are both NaN
        return bool(torch.stack(torch.aminmax(weight)).to(dtype).isfinite().all())
    if isinstance(weight, Blocks) and _has_finite_bound(weight, dtype):
        return True
    if isinstance(weight, EncodedStack):
        return all(
            _is_finite(weight.matrix(expert, slice(None)), dtype)
            for expert in range(weight.shape[0])
        )
    return all(_is_finite(rows, dtype) for _, rows in stacked_rows([weight]))


def _has_finite_bound(blocks: Blocks, dtype: torch.dtype) -> bool:
    """Returns whether scales and minima are enough to prove that all values are finite. The matrix
    then need not be decoded for the check.
    """
    largest = 128.0 if blocks.table is None else max(map(abs, blocks.table))
    bound = blocks.scale.abs().amax() * largest
    if blocks.minimum is not None:
        bound = bound + blocks.minimum.abs().amax()
    return bool(bound.to(dtype).isfinite())


# parts
def tensor_pairs(old: Any, new: Any, what: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields pairs of tensors: each tensor of the old part, and the one that replaces it.

    Raises:
        ModelError: the parts differ in more than the values of their tensors.
    """
    if old is new:
        return
    alike = type(old) is type(new)
    if alike and isinstance(old, torch.Tensor):
        alike = (old.shape, old.dtype, old.stride()) == (new.shape, new.dtype, new.stride())
        if alike:
            yield old, new
    elif alike and isinstance(old, tuple | list) and len(old) == len(new):
        for one, other in zip(old, new):
            yield from tensor_pairs(one, other, what)
    elif alike and is_dataclass(old):
        for field in fields(old):
            yield from tensor_pairs(getattr(old, field.name), getattr(new, field.name), what)
    elif alike and hasattr(old, "__dict__"):
        for name, one in vars(old).items():
            yield from tensor_pairs(one, vars(new)[name], what)
    elif alike:
        alike = old == new
    if not alike:
        raise ModelError(
            f"{what}: the new weights have another form than the running ones, which can't be overwritten by them.",
            hint="Give weights in the format that the engine was started with, or start it again.",
        )


def _check_shared_tensors(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Raises ModelError if tensors that share memory would get different values."""
    found: dict[tuple[int, torch.Size], torch.Tensor] = {}
    for old, new in pairs:
        first = found.setdefault((old.data_ptr(), old.shape), new)
        if first is not new and first.data_ptr() != new.data_ptr() and not torch.equal(first, new):
            raise ModelError(
                "the new head differs from the embedding, and the running model has one table for both.",
                hint="Start an engine with the new weights.",
            )
