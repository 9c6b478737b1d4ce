"""Describes a model without loading it: how it would run, its sizes, and why it would be rejected."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from sglang_lite.protocol import MediaKind, SglError
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.embedding.layers import Bert
from sglang_lite.runtime.embedding.load import encoder_dtype
from sglang_lite.runtime.embedding.spec import BertSpec, EncoderSpec, encoder_spec, is_encoder
from sglang_lite.runtime.embedding.tokenizer import encoder_tokenizer
from sglang_lite.runtime.kernels.block_product import supports_shape
from sglang_lite.runtime.loading.load_model import pick_device, precision
from sglang_lite.runtime.loading.model_files import open_model_files, read_spec
from sglang_lite.runtime.media.placeholders import NAMES, MediaFormat
from sglang_lite.runtime.models.aliases import ALIASES, HubFile, HubModel, PackagedModel
from sglang_lite.runtime.models.folder_config import read_config
from sglang_lite.runtime.models.hub import read_hub_headers
from sglang_lite.runtime.models.layers.linear import keeps_only_blocks, load_block_library
from sglang_lite.runtime.models.parameter_tensors import ParameterTensors
from sglang_lite.runtime.models.parameters import head_name, parameters, tensor_names
from sglang_lite.runtime.models.precision import Precision
from sglang_lite.runtime.models.resolve import resolve
from sglang_lite.runtime.models.spec import ModelSpec
from sglang_lite.runtime.models.transformers_config import TransformersSpec
from sglang_lite.runtime.models.weights.gguf_blocks import BITS, IN_FOUR_BITS, READERS
from sglang_lite.runtime.models.weights.gguf_file import GgufFile
from sglang_lite.runtime.models.weights.headers import (
    Headers,
    HeaderSource,
    headers_from_hub_metadata,
    read_headers,
)
from sglang_lite.runtime.models.weights.quantised_formats import read_quantisation
from sglang_lite.runtime.models.weights.source import is_encoder_tensor


@dataclass(frozen=True, slots=True)
class Description:
    """Description of a model. None stands for an unknown value.

    Attributes:
        path: path of its file or folder.
        architecture: name of its architecture in the file.
        runs: "native" for our own code, "transformers" for transformers' code, "" if the model is
            rejected.
        why: reason for `runs`.
        serves: uses of the model: "generate", "embed", "score", "classify", "reward".
        stored_bytes: size of the weights in the file, in bytes.
        formats: number formats of the stored weights, the one with most bytes first.
        loaded_bytes: size of the weights in memory, in bytes.
        products: how matrices that are stored in few bits are multiplied; "" if there are none.
        dtype, device: data type and device of the computation.
        cache_bytes: size of one token's keys and values, in bytes; 0 for a model that keeps none.
        window: longest window of layers that keep only the last tokens; None if no layer does.
        window_bytes: size of one token's keys and values in these layers, in bytes.
        state_bytes: size of a sequence's state in recurrent layers, in bytes; 0 if the model has
            none.
        context_length: longest sequence (or input text of an encoder), in tokens.
        tower_bytes: size of the encoder of images or sounds in memory, in bytes, in addition to
            `loaded_bytes`; None if there is none.
        media: kinds of media that the model accepts besides text.
        refused: reasons why the model can't be used, each naming the part that causes it.
    """

    path: str
    architecture: str | None = None
    runs: Literal["native", "transformers", ""] = ""
    why: str = ""
    serves: tuple[str, ...] = ()
    stored_bytes: int | None = None
    formats: tuple[str, ...] = ()
    loaded_bytes: int | None = None
    products: str = ""
    dtype: str | None = None
    device: str | None = None
    cache_bytes: int | None = None
    window: int | None = None
    window_bytes: int = 0
    state_bytes: int = 0
    context_length: int | None = None
    tower_bytes: int | None = None
    media: tuple[MediaKind, ...] = ()
    refused: tuple[str, ...] = ()

    def as_text(self) -> str:
        """Formats the description as text, one `name value` line per item."""
        stored = _megabytes(self.stored_bytes)
        loaded = _megabytes(self.loaded_bytes)
        formats = f" ({', '.join(self.formats)})" if self.formats else ""
        kind = f" ({self.dtype} on {self.device})" if self.dtype else ""
        keeps = (
            "not known before it is loaded"
            if self.cache_bytes is None
            else f"{self.cache_bytes:,} bytes a token"
        )
        if self.window is not None:
            keeps += f", {self.window_bytes:,} of them for the last {self.window:,} tokens only"
        if self.cache_bytes == 0:
            keeps = "" if self.state_bytes else "none"
        if self.state_bytes:
            keeps += f"{'; ' if keeps else ''}{self.state_bytes:,} bytes a sequence"
        lines = {
            "path": self.path,
            "model": self.architecture or "not named",
            "runs": {
                "native": "by our own code",
                "transformers": "by transformers' code",
                "": "not",
            }[self.runs]
            + (f": {self.why}" if self.why else ""),
            "serves": ", ".join(self.serves) or "nothing",
            "weights": f"{stored} stored{formats}; {loaded} loaded{kind}",
            "cache": keeps,
            "context": "not known"
            if self.context_length is None
            else f"{self.context_length:,} tokens",
        }
        if self.products:
            lines["products"] = self.products
        for kind in self.media if self.tower_bytes is not None else ():
            lines[f"{NAMES[kind]}s"] = (
                f"read by an encoder of {_megabytes(self.tower_bytes)} beside the weights"
            )
        shown = [*lines.items(), *(("refused", reason) for reason in self.refused)]
        return "\n".join(f"{name:8} {text}" for name, text in shown)


def describe(model: str, revision: str | None = None, **settings: str) -> Description:
    """Describes a model from its config and the headers of its weights. Reads no weights, and
    doesn't download those of a hub model.

    Args:
        model, revision: model name or path, and its revision, as for `Engine`.
        **settings: other settings of `Engine`. `dtype` decides how the model would run. Bytes are
            those of the checkpoint's own format, whatever `quantization` is.

    Raises:
        ParameterError: a setting has a value that `Engine` rejects.
        ModelError, DownloadError: the model does not exist, or its files could not be fetched.
    """
    path = resolve(model, revision, weights=False)
    found = _Inspection(path, EngineConfig.make(model=model, revision=revision, **settings))
    refused = []
    # Every step runs even if one fails, since each may reject a different part of the model.
    for step in (
        partial(found.read_headers, model, revision),
        found.read_spec,
        found.read_tokenizer,
        found.check_fit,
    ):
        try:
            step()
        except SglError as error:
            refused.append(str(error))
    return replace(
        found.description,
        refused=tuple(refused),
        serves=() if refused else found.description.serves,
    )


class _Inspection:
    """Fills in the `Description` of one model, step by step.

    Attributes:
        description: description with everything found so far.
    """

    def __init__(self, path: Path, config: EngineConfig) -> None:
        self.path = path
        self._config = config
        self.description = Description(str(path), _architecture(path))
        self._headers: Headers | None = None
        self._spec: ModelSpec | EncoderSpec | TransformersSpec | None = None
        self._media: MediaFormat | None = None

    def _precision_on_device(self, device: torch.device) -> Precision:
        """Returns the numeric formats for the configured dtype on a device. Ignores the setting
        `quantization`.
        """
        return precision(self._config.dtype, device)

    def _update_description(self, **facts: Any) -> None:
        self.description = replace(self.description, **facts)

    def read_headers(self, model: str, revision: str | None) -> None:
        alias = ALIASES.get(model)
        here = Path(model).exists() or isinstance(alias, PackagedModel | HubFile)
        name = alias.hub_id if isinstance(alias, HubModel) else model
        repository = None if here else read_hub_headers(name, revision)
        found = (
            read_headers(self.path)
            if repository is None
            else headers_from_hub_metadata(repository, self.path)
        )
        sizes: Counter[str] = Counter()
        for header in found.values():
            sizes[header.format] += header.size
        self._headers = found
        self._update_description(
            stored_bytes=sizes.total(), formats=tuple(name for name, _ in sizes.most_common())
        )

    def read_spec(self) -> None:
        if is_encoder(self.path):
            spec = encoder_spec(self.path)
            self._spec = spec
            self._update_description(
                architecture=spec.architecture,
                runs="native",
                why="it reads texts and generates none",
                serves=_list_encoder_tasks(spec),
                cache_bytes=0,
                context_length=spec.limit,
            )
            return
        self._spec = found = read_spec(self.path)
        native = isinstance(found, ModelSpec) or found.sound is not None
        why = f"the family {found.architecture}" if native else "there is none of our own for it"
        self._update_description(
            architecture=self.description.architecture or found.architecture,
            why=why,
            runs="native" if native else "transformers",
            serves=("generate", "score"),
            context_length=found.max_positions,
        )

    def read_tokenizer(self) -> None:
        if isinstance(self._spec, EncoderSpec):
            encoder_tokenizer(self.path, self._spec)
        elif self._spec is not None:
            self._media = open_model_files(self.path).media

    def check_fit(self) -> None:
        """Checks that the stored weights match the specification. Computes their size and that of
        the KV cache.
        """
        match self._spec:
            case EncoderSpec():
                self._check_encoder_fit(self._spec)
            case ModelSpec():
                self._check_decoder_fit(self._spec)
            case TransformersSpec(sound=None):
                self._measure_fallback_sizes()
            case TransformersSpec():
                self._measure_whisper_sizes()

    def _open_headers(self) -> HeaderSource | None:
        if self._headers is None:
            return None
        if not self.path.is_dir():
            return HeaderSource(str(self.path), self._headers)
        declared = read_quantisation(self.path)
        if declared.matrices.packings:
            self._update_description(
                formats=(declared.matrices.names[0], *self.description.formats)
            )
        source = HeaderSource(str(self.path), self._headers, declared.matrices.packings)
        declared.check_checkpoint(source)
        return source

    def _check_decoder_fit(self, spec: ModelSpec) -> None:
        device = pick_device(self._config)
        formats = self._precision_on_device(device)
        self._update_description(
            device=str(device),
            dtype=_name(formats.compute),
            cache_bytes=spec.kv_layout.numbers * formats.cache.itemsize,
            window=spec.kv_layout.window,
            window_bytes=spec.kv_layout.window_elements_per_token * formats.cache.itemsize,
            state_bytes=sum(
                planes.count_bytes(formats.compute.itemsize, formats.states.itemsize)
                for planes in spec.states
                if planes is not None
            ),
        )
        if (source := self._open_headers()) is not None:
            if self._media is not None and self._headers is not None:
                tower = [name for name in self._headers if is_encoder_tensor(name)]
                numbers = sum(math.prod(self._headers[name].shape) for name in tower)
                self._update_description(
                    tower_bytes=numbers * formats.compute.itemsize, media=tuple(self._media.kinds)
                )
                for name in tower:
                    source.ignore_tensor(name)
            _check_decoder_tensors(spec, source)
            kept = source.in_8_bits if formats.keep_fp8 else 0
            blocks, bits = self._count_block_weights(formats, device)
            for packing, count in source.packed.items():
                few = (
                    packing.gpu_bits
                    if device.type == "cuda"
                    else packing.cpu_bits
                    if _keeps_only_blocks(formats)
                    else None
                )
                if few is not None:
                    blocks = blocks + count
                    bits = bits + int(count * few)
            numbers = source.elements - kept - blocks
            self._update_description(
                loaded_bytes=numbers * formats.weights.itemsize + kept + bits // 8,
                products=self._describe_products(source, formats, device),
            )

    def _describe_products(
        self, source: HeaderSource, formats: Precision, device: torch.device
    ) -> str:
        """Describes how matrices that are stored in few bits are multiplied, such as "in 8-bit
        floating point". Returns "" if there are no such matrices.
        """
        assert self._headers is not None
        # a GGUF file's blocks
        in_file = any(header.format in READERS for header in self._headers.values())
        if not (in_file or source.packed or source.in_8_bits):
            return ""
        if source.in_8_bits and formats.keep_fp8:
            return "in 8-bit floating point"
        if _multiplies_blocks(formats) and (
            in_file or any(packing.cpu_bits for packing in source.packed)
        ):
            return "as they are stored" + (
                "" if _keeps_only_blocks(formats) else " in steps of few rows, decoded in others"
            )
        if device.type == "cuda":
            bits = {packing.gpu_bits for packing in source.packed}
            if 8.0 in bits:
                return "as 8-bit integers, with rows rounded to such (int8_product)"
            if any(bits) or self._count_block_weights(formats, device)[0]:
                return (
                    "in 4 bits, by rows of 16 (packed_row, packed_products, experts_packed); "
                    "decoded before each of more than 256 rows"
                )
        return "decoded while loading"

    def _count_block_weights(self, formats: Precision, device: torch.device) -> tuple[int, int]:
        """Counts the weights that a loaded model would keep only as the file's quantised blocks.
        Returns their number and their size in bits.
        """
        assert self._headers is not None
        keeps = _keeps_only_blocks(formats)
        kept = list[tuple[int, float]]()
        for name, header in self._headers.items():
            if header.format not in BITS or len(header.shape) != 2:
                continue
            if device.type == "cuda":
                stays = header.format in IN_FOUR_BITS and "embed" not in name
            else:
                stays = keeps and supports_shape(*header.shape) and ".experts." not in name
            if stays:
                kept.append((math.prod(header.shape), BITS[header.format]))
        return sum(count for count, _ in kept), int(sum(count * bits for count, bits in kept))

    def _check_encoder_fit(self, spec: EncoderSpec) -> None:
        device = (
            pick_device(self._config) if isinstance(spec.layers, BertSpec) else torch.device("cpu")
        )
        dtype = encoder_dtype(self._config, device)
        self._update_description(device=str(device), dtype=_name(dtype))
        if (source := self._open_headers()) is None:
            return
        _check_encoder_tensors(spec, source)
        more = sum(layer.outputs * (layer.inputs + layer.bias) for layer in spec.dense)
        self._update_description(loaded_bytes=source.elements * dtype.itemsize + more * 4)

    def _measure_whisper_sizes(self) -> None:
        device = pick_device(self._config)
        config = read_config(self.path)
        formats = self._precision_on_device(device)
        numbers = Counter[bool]()
        item = formats.compute.itemsize
        for name, header in (self._headers or {}).items():
            numbers[is_encoder_tensor(name)] += math.prod(header.shape)
        self._update_description(
            device=str(device),
            dtype=_name(formats.compute),
            loaded_bytes=numbers[False] * item,
            cache_bytes=2 * config["decoder_layers"] * config["d_model"] * item,
            tower_bytes=numbers[True] * item,
            media=() if self._media is None else tuple(self._media.kinds),
        )

    def _measure_fallback_sizes(self) -> None:
        # imports all of transformers' models
        from sglang_lite.runtime.models.load_transformers import read_model_outline

        device = pick_device(self._config)
        formats = self._precision_on_device(device)
        numbers, layout = read_model_outline(self.path, device)
        self._update_description(
            device=str(device),
            dtype=_name(formats.compute),
            loaded_bytes=numbers * formats.compute.itemsize,
            cache_bytes=None if layout is None else layout.numbers * formats.compute.itemsize,
        )


def _architecture(path: Path) -> str | None:
    """Returns the name of the architecture in the model's file or folder, or None if there is none.
    Checks nothing else.
    """
    if path.is_file():
        name = GgufFile(path).metadata.get("general.architecture")
    else:
        names = read_config(path).get("architectures")
        name = names[0] if isinstance(names, list) and names else None
    return name if isinstance(name, str) else None


def _list_encoder_tasks(spec: EncoderSpec) -> tuple[str, ...]:
    if spec.classifier is None:
        return ("embed",)
    return (
        ("score", "classify", "reward")
        if len(spec.classifier.labels) == 1
        else ("classify", "reward")
    )


def _check_decoder_tensors(spec: ModelSpec, source: HeaderSource) -> None:
    """Checks that a source has exactly the tensors of a decoder. Raises ModelError if a tensor is
    missing, superfluous, duplicate or of another shape.
    """
    tensors = ParameterTensors(source)
    source.expect(lambda: tensor_names(spec))
    for parameter in parameters(spec):
        tensors.take_parameter(parameter)
    for name in (f"{head_name(spec)}.weight", "rope_freqs.weight"):  # allowed, but not needed
        source.ignore_tensor(name)
    source.check_all_used()


def _check_encoder_tensors(spec: EncoderSpec, source: HeaderSource) -> None:
    """Checks that a source has exactly the tensors of an encoder. Raises the same errors as
    `_check_decoder_tensors`.
    """
    hidden = spec.layers.hidden_size
    head = spec.classifier
    for name, outputs in (
        () if head is None else ((head.inner, hidden), (head.outer, len(head.labels)))
    ):
        for part, shape in (("weight", (outputs, hidden)), ("bias", (outputs,))):
            if name and (part == "weight" or (head and head.bias)):
                source.take_tensor(f"{name}.{part}", shape)
    if isinstance(spec.layers, BertSpec):
        Bert(spec.layers, source, torch.float32, torch.device("meta"), iter)
    else:
        _check_decoder_tensors(spec.layers, source)


def _multiplies_blocks(formats: Precision) -> bool:
    """Returns True if a CPU multiplies quantised blocks directly."""
    return formats.blocks and load_block_library() is not None


def _keeps_only_blocks(formats: Precision) -> bool:
    """Returns True if a CPU keeps weights only as quantised blocks. With AMX it also keeps decoded
    weights, for steps with many rows.
    """
    return _multiplies_blocks(formats) and (formats.weights == torch.float32 or keeps_only_blocks())


def _megabytes(count: int | None) -> str:
    return "size not known" if count is None else f"{count / 1e6:,.1f} MB"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
