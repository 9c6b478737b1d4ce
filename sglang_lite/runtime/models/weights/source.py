"""Interface of weight sources, which also report tensors that the model has not used."""

from __future__ import annotations

import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import torch

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.kernels.kv_layout import KVLayout

logger = logging.getLogger("sglang_lite")

# Suffixes of ignored tensors, which the model computes: frequencies, positions, masks, activation
# scales, decays.
_IGNORABLE = (
    "rotary_emb.inv_freq",
    "embeddings.position_ids",
    ".attention.bias",
    ".attention.masked_bias",
    ".attn.bias",
    ".attn.masked_bias",
    ".self_attn.slope_rate",
    ".self_attn.query_decay",
    ".self_attn.key_decay",
    ".self_attn.diagonal_decay",
    ".input_scale",
    ".q_scale",
    ".prob_scale",
)
# Scales that keys and values are divided by before they are stored in 8 bits; meaningless for other
# caches. The names are those of compressed-tensors, Quark and Model Optimizer, as vLLM reads them.
_KV_SCALE = re.compile(
    r"model\.layers\.(\d+)\.self_attn\.(?:.*\.)?(?:(k|v|kv)_scale|([kv])_proj\.output_scale)"
)
# Prefixes of the encoder in a model that takes images or sounds.
_ENCODER = (
    "vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.",
    "model.vision_model.", "model.connector.", "visual.", "model.visual.",
    "image_newline", "model.image_newline", "audio_tower.", "model.audio_tower.", "model.encoder.",
    "model.embed_vision.", "model.embed_audio.",
)  # fmt: skip


def is_encoder_tensor(name: str) -> bool:
    """Returns whether a tensor belongs to a model's encoder of images or sounds."""
    return name.startswith(_ENCODER)


# Prefix that a decoder's names lack if it was saved without its head -> how these names begin.
_WITHOUT_HEAD = {
    "model.": ("embed_tokens.", "layers.", "norm.", "final_layernorm.", "decoder."),
    "transformer.": ("wte.", "wpe.", "word_embeddings.", "h.", "ln_f."),
}
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class EncodedMatrix(ABC):
    """Matrix in a checkpoint's own encoding.

    Args:
        shape: (rows, columns).
        dtype: dtype of the values if they are stored one by one; float32 for other encodings.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype

    @abstractmethod
    def decode(self, start: int, end: int) -> torch.Tensor:
        """Returns rows start … end-1, or as many of them as exist, as float32."""

    def slice_part(self, rows: slice, columns: slice = slice(None)) -> EncodedMatrix:
        """Returns the part of the matrix at some rows and columns, in the same encoding.

        Raises:
            ValueError: they cut through numbers that are encoded together.
        """
        return _DecodedPart(self, rows, columns)


class _DecodedPart(EncodedMatrix):
    """Part of a matrix whose encoding can't be sliced. Decodes whole rows and slices them
    afterwards.
    """

    def __init__(self, whole: EncodedMatrix, rows: slice, columns: slice) -> None:
        own = range(whole.shape[0])[rows]
        super().__init__((len(own), len(range(whole.shape[1])[columns])), whole.dtype)
        self._whole = whole
        self._rows = own
        self._columns = columns

    def decode(self, start: int, end: int) -> torch.Tensor:
        own = self._rows[start:end]
        return self._whole.decode(own.start, own.stop)[:, self._columns]


class PlainRows(EncodedMatrix):
    """Matrix whose numbers are stored one by one, and read when needed."""

    def decode(self, start: int, end: int) -> torch.Tensor:
        return self.read_stored_rows(start, end).float()

    @abstractmethod
    def read_stored_rows(self, start: int, end: int) -> torch.Tensor:
        """Returns rows start … end-1 as stored."""

    def slice_part(self, rows: slice, columns: slice = slice(None)) -> PlainRows:
        return _PlainPart(self, rows, columns)


class _PlainPart(PlainRows):
    """Part of a matrix whose numbers are stored one by one."""

    def __init__(self, whole: PlainRows, rows: slice, columns: slice) -> None:
        own = range(whole.shape[0])[rows]
        super().__init__((len(own), len(range(whole.shape[1])[columns])), whole.dtype)
        self._whole = whole
        self._rows = own
        self._columns = columns

    def read_stored_rows(self, start: int, end: int) -> torch.Tensor:
        own = self._rows[start:end]
        return self._whole.read_stored_rows(own.start, own.stop)[:, self._columns]


class EncodedStack(ABC):
    """Matrices of experts in a checkpoint's own encoding.

    Args:
        shape: shape of the tensor that it stands for: (experts, ...).
    """

    dtype = torch.float32

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)

    @abstractmethod
    def matrix(self, expert: int, outputs: slice) -> EncodedMatrix:
        """Returns the matrix [outputs, inputs] of an expert, or some of its outputs."""


Weight: TypeAlias = torch.Tensor | EncodedMatrix
Stored: TypeAlias = Weight | EncodedStack


def canonical_name(name: str) -> str:
    """Returns the canonical name of a folder's tensor.

    Vision-language models prefix the decoder's names with `language_model.`,
    `model.language_model.` or `model.text_model.`, and a decoder saved without its head lacks the
    prefix `model.` or `transformer.`. transformers 5.17 saves the decoder of Qwen2-Audio with one
    `model.` too many.
    """
    name = name.replace("language_model.model.model.", "language_model.model.", 1)
    name = name.replace("language_model.", "", 1).replace("model.text_model.", "model.", 1)
    prefix = next((each for each, names in _WITHOUT_HEAD.items() if name.startswith(names)), "")
    return prefix + name


class WeightSource(ABC):
    """Checkpoint that is read one tensor at a time.

    Args:
        label: file or folder, for messages.
        files: file of each tensor, by Hugging Face name.
    """

    def __init__(self, label: str, files: Mapping[str, Path]) -> None:
        self.label = label
        self._unused = dict(files)
        self._list_known: Callable[[], Iterable[str]] | None = None

    def expect(self, names: Callable[[], Iterable[str]]) -> None:
        """Sets the function that lists the names of all tensors that the model may have. It is called
        only to explain why a tensor is missing.
        """
        self._list_known = names

    def has_tensor(self, name: str) -> bool:
        return name in self._unused

    @property
    def names(self) -> Iterable[str]:
        """Names of the tensors that have not been taken yet."""
        return self._unused.keys()

    @property
    def has_scales(self) -> bool:
        """True if a matrix that has not been taken yet has a scale tensor."""
        return any(name.endswith(("weight_scale", "weight_scale_inv")) for name in self._unused)

    @property
    def has_packed_matrices(self) -> bool:
        """True if the checkpoint has packed matrices."""
        return False

    def take_tensor(self, name: str, shape: tuple[int, ...]) -> Weight:
        """Returns a tensor, which can be taken only once: floats in memory that the caller owns, or
        an encoded matrix.

        Raises:
            ModelError: the tensor is missing, truncated, has another shape, or is not floating
                point.
        """
        weight = self.take_tensor_or_stack(name, shape)
        assert not isinstance(weight, EncodedStack), "a stack has three dimensions"
        return weight

    def take_tensor_or_stack(self, name: str, shape: tuple[int, ...]) -> Stored:
        """Returns the same as `take_tensor`, but allows the tensor to be a stack of experts'
        matrices.
        """
        if name not in self._unused:
            module = name.removesuffix(".weight")
            near = sorted(other for other in self._unused if other.startswith(f"{module}."))
            hint = (
                "Does quantization_config say how the weights are packed?"
                if near
                else self._explain_unknown_names() or "Is a file of weights missing?"
            )
            if {
                re.sub(r"\b[qkv]_proj", "qkv_proj", name),
                re.sub(r"\b(gate|up)_proj", "gate_up_proj", name),
            } & (self._unused.keys() - {name}):
                hint = "It is stacked with others, as SGLang's own sharded files have it. Take the model's own files."
            beside = (
                f" Beside it there {'is' if len(near) == 1 else 'are'} {', '.join(near[:4])}."
                if near
                else ""
            )
            raise ModelError(f"{self.label}: the tensor {name!r} is missing.{beside}", hint=hint)
        file = self._unused.pop(name)
        weight = self._read_stored(name, file)
        if (
            isinstance(weight, torch.Tensor)
            and weight.ndim == 3
            and weight.mT.shape == shape != weight.shape
        ):
            # experts with inputs before outputs, as transformers 4 saved Qwen3-VL's
            weight = weight.mT
        if tuple(weight.shape) != shape:
            raise ModelError(
                f"{file}: {name} has shape {tuple(weight.shape)}, the config says {shape}.",
                hint="One of them is of another model, or damaged: fetch both again.",
            )
        if weight.dtype not in _FLOATS:
            raise ModelError(
                f"{file}: {name} is stored as {weight.dtype}, which is not supported.",
                hint="Use the unquantised checkpoint, or a GGUF file.",
            )
        return weight

    def _explain_unknown_names(self) -> str:
        """Returns the names that were read and that the model has no place for, as a hint. Returns ""
        if there are none.
        """
        if self._list_known is None:
            return ""
        known = set(self._list_known())
        unknown = sorted(
            each
            for each in self._unused
            if each not in known and not each.endswith(_IGNORABLE) and not is_encoder_tensor(each)
        )
        if not unknown:
            return ""
        more = f" and {len(unknown) - 3:,} others" if len(unknown) > 3 else ""
        return (
            f"The files have {', '.join(unknown[:3])}{more}, which no model of the config's architecture has here: "
            "the weights are of another architecture, or name their tensors in a way that is not known here."
        )

    def ignore_tensor(self, name: str) -> None:
        """Marks a tensor and its scales as used without reading them. Does nothing if the
        checkpoint has no tensor of that name.
        """
        for suffix in ("", "_scale", "_scale_inv"):
            self._unused.pop(name + suffix, None)

    def kv_scales(self, layout: KVLayout) -> dict[tuple[int, str], torch.Tensor]:
        """Returns the checkpoint's scales of 8-bit keys and values: float32 [kv_heads], with the
        layer and "k" or "v" as the key. Scales that the checkpoint lacks are left out.

        Raises:
            ModelError: a scale is not a finite number above 0, or fits neither a layer nor its KV
                heads.
        """
        scales = {}
        heads = dict(enumerate(planes[0].heads for planes in layout.layers))
        for name, file in self._unused.items():
            if match := _KV_SCALE.fullmatch(name):
                stored = self._read_stored(name, file)
                assert not isinstance(stored, EncodedStack)
                scale = (
                    stored.decode(0, stored.shape[0])
                    if isinstance(stored, EncodedMatrix)
                    else stored
                )
                scale = scale.float().flatten()
                kv_heads = heads.get(int(match[1]), 0)
                if len(scale) not in (1, kv_heads) or not (scale.isfinite() & (scale > 0)).all():
                    raise ModelError(
                        f"{file}: {name} is not one number above 0, nor one for each of {kv_heads} KV heads.",
                        hint='Use kv_dtype="auto".',
                    )
                for side in match[2] or match[3]:
                    scales[int(match[1]), side] = scale.expand(kv_heads)
        return scales

    def check_all_used(self, may_ignore: tuple[str, ...] = ()) -> None:
        """Checks that all tensors have been used, with three exceptions: ignorable tensors, an
        encoder's tensors, and scales of keys and values.

        Args:
            may_ignore: prefixes of further tensors that may be unused.

        Raises:
            ModelError: the model has no place for some tensors.
        """
        if others := sum(map(is_encoder_tensor, self._unused)):
            logger.info(
                "%s: %d tensors of an encoder of images or sounds are not loaded.",
                self.label,
                others,
            )
        unused = sorted(
            n
            for n in self._unused
            if not (
                n.endswith(_IGNORABLE)
                or n.startswith((*_ENCODER, *may_ignore))
                or _KV_SCALE.fullmatch(n)
            )
        )
        if unused:
            more = f" and {len(unused) - 5} more" if len(unused) > 5 else ""
            raise ModelError(
                f"{self._unused[unused[0]]}: the model has no place for {', '.join(unused[:5])}{more}.",
                hint="The checkpoint is of another architecture than its config says.",
            )

    @abstractmethod
    def _read_stored(self, name: str, file: Path) -> Stored: ...
