"""Config of an adapter's folder, as peft writes it. Unsupported fields are rejected by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import regex

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.models.config_fields import Json, abbreviate, read_json

ADAPTER_CONFIG = "adapter_config.json"
_RANK = 64  # largest rank if neither a setting nor an adapter determines it
MAX_RANK = 512
_ALL = "all-linear"  # peft's name for all targets
_PATTERN_S = 1.0  # time that a pattern of a file may take
# Fields that change what an adapter computes, with what they stand for. Each must be unset.
_REFUSED: Mapping[str, str] = {
    "use_dora": "DoRA, which scales the base's weights",
    "modules_to_save": "modules that were trained as a whole",
    "trainable_token_indices": "trained embeddings",
    "layer_replication": "repeated layers",
    "megatron_config": "Megatron's layers",
    "loftq_config": "LoftQ, which changes the base's weights",
    "target_parameters": "parameters that are no linear layer's",
    "use_qalora": "QA-LoRA, which pools inputs",
    "use_bdlora": "block-diagonal matrices",
    "arrow_config": "routing among adapters",
    "kasa_config": "KaSA, which changes the base's weights",
    "monteclora_config": "MonteCLoRA's random mixtures",
}
# Kinds that add tokens, or choose by the prompt: they can't be merged into a model's weights.
_UNMERGEABLE = (
    "PROMPT_TUNING",
    "MULTITASK_PROMPT_TUNING",
    "P_TUNING",
    "PREFIX_TUNING",
    "ADAPTION_PROMPT",
    "CPT",
    "CARTRIDGE",
    "POLY",
    "XLORA",
)
# Initialisations of the training that leave the base's weights unchanged.
_INITIAL = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Config of an adapter.

    Attributes:
        folder: its folder, for messages.
        base: name of the model that it was trained on; empty if unknown.
        rank: rank of its matrices, unless `ranks` has another.
        alpha: numerator of its scale, unless `alphas` has another.
        ranks, alphas: exceptions, by pattern of module names.
        targets: names of its modules, or their ends; or a pattern of them. Empty for all.
        excluded: names of modules that it leaves out, or their ends; or a pattern of them.
        layers: numbers of the only layers that it changes; None for all.
        layer_patterns: patterns of what precedes a layer's number in a module's name; empty for
            anything.
        root: whether the scale divides by the root of the rank (rsLoRA).
        invocation: tokens that activate a late adapter (aLoRA); empty for one that is always
            active.
        inputs_first: whether the base stores matrices with inputs before outputs.
    """

    folder: Path
    base: str
    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    targets: tuple[str, ...] | str
    excluded: tuple[str, ...] | str
    layers: frozenset[int] | None
    layer_patterns: tuple[str, ...]
    root: bool
    invocation: tuple[int, ...]
    inputs_first: bool

    def rank_of(self, module: str) -> int:
        """Returns the rank of a module's matrices."""
        return int(self._first_match(self.ranks, module, self.rank))

    def scale_of(self, module: str) -> float:
        """Returns the factor by which the product of a module's A and B is multiplied."""
        rank = self.rank_of(module)
        return self._first_match(self.alphas, module, self.alpha) / (
            math.sqrt(rank) if self.root else rank
        )

    def excludes_module(self, module: str) -> bool:
        """Returns whether the config excludes a module or limits the adapter to other layers. Like
        in peft, the matrices of such a module are not read. `module` is its name in the file.
        """
        if self._is_one_of(self.excluded, module):
            return True
        if self.layers is None or isinstance(self.targets, str) or module in self.targets:
            return False
        return self._layer_of(module) not in self.layers

    def is_target(self, module: str) -> bool:
        """Returns whether a module, by its name in the file, is among the targets."""
        return not self.targets or self.targets == _ALL or self._is_one_of(self.targets, module)

    def _is_one_of(self, names: tuple[str, ...] | str, module: str) -> bool:
        if isinstance(names, str):
            return self._match(f"(?:{names})$", names, module) is not None
        return module in names or module.endswith(tuple(f".{name}" for name in names))

    def _layer_of(self, module: str) -> int | None:
        """Returns the number of a module's layer, if its name has one."""
        for pattern in self.layer_patterns or (r"[^.]*",):
            before = r".*?\." if not self.layer_patterns else r"(?:^|.*?\.)"
            if found := self._match(rf"{before}{pattern}\.(?P<index>\d+)\.", pattern, module):
                return int(found["index"])
        return None

    def _first_match(self, patterns: Mapping[str, float], module: str, default: float) -> float:
        """Returns the value of the first pattern that matches a module's name or its end, following
        peft's rules. Returns `default` if no pattern matches.
        """
        for pattern, value in patterns.items():
            if self._match(rf"(.*\.)?({pattern})$", pattern, module):
                return value
        return default

    def _match(self, expression: str, pattern: str, module: str) -> regex.Match[str] | None:
        """Matches an expression from the beginning of a module's name. `pattern` is the part of the
        expression that comes from the file, and errors quote it.
        """
        try:
            found: regex.Match[str] | None = regex.match(expression, module, timeout=_PATTERN_S)
        except (regex.error, TimeoutError) as error:
            raise ModelError(
                f"{self.folder / ADAPTER_CONFIG}: the pattern {abbreviate(pattern)} can't be matched: {error}",
                hint="Write the names of the modules instead.",
            ) from error
        return found


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Reads the config in an adapter's folder.

    Raises:
        ModelError: there is none, or it requires something that is not supported.
    """
    if not folder.is_dir():
        raise ModelError(
            f"{folder}: no folder, so no adapter.",
            hint="Give the folder that peft's save_pretrained made.",
        )
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        raise ModelError(
            f"{folder}: no adapter, as it has no {ADAPTER_CONFIG}.", hint="Save it with peft."
        )
    content = read_json(path)
    if (kind := content.get("peft_type")) in _UNMERGEABLE:
        raise ModelError(
            f"{path}: `peft_type` is {kind!r}: only LORA is supported.",
            hint="Such an adapter can't be merged into its base model, either: train a LoRA.",
        )
    if kind != "LORA":
        raise unsupported_error(path, "peft_type", kind, "only LORA is supported")
    for name, meaning in _REFUSED.items():
        if content.get(name) not in (None, False, [], {}):
            raise unsupported_error(path, name, content[name], f"{meaning}, is not supported")
    if content.get("lora_bias"):
        raise ModelError(
            f"{path}: `lora_bias` is {abbreviate(content['lora_bias'])}: biases of an adapter are not supported.",
            hint="If its modules have biases in the base, merge it with peft's merge_and_unload(). If not, train it "
            "without.",
        )
    if content.get("bias", "none") != "none":
        raise unsupported_error(path, "bias", content["bias"], "trained biases are not supported")
    if (initial := content.get("init_lora_weights")) not in _INITIAL:
        raise unsupported_error(
            path,
            "init_lora_weights",
            initial,
            "it changes the base's weights; convert it with peft",
        )
    base = content.get("base_model_name_or_path")
    # An empty text is no pattern.
    patterns = _names(path, content, "layers_pattern") or ()
    return AdapterConfig(
        folder,
        base if isinstance(base, str) else "",
        _require_rank(path, "r", content.get("r")),
        _require_number(path, "lora_alpha", content.get("lora_alpha")),
        {
            key: _require_rank(path, "rank_pattern", value)
            for key, value in _require_object(path, content, "rank_pattern").items()
        },
        {
            key: _require_number(path, "alpha_pattern", value)
            for key, value in _require_object(path, content, "alpha_pattern").items()
        },
        _names(path, content, "target_modules"),
        _names(path, content, "exclude_modules"),
        _require_layer_numbers(path, content.get("layers_to_transform")),
        (patterns,) if isinstance(patterns, str) else patterns,
        bool(content.get("use_rslora")),
        _require_token_ids(path, content.get("alora_invocation_tokens")),
        bool(content.get("fan_in_fan_out")),
    )


def _require_object(path: Path, content: Mapping[str, Json], name: str) -> dict[str, Json]:
    value = content.get(name) or {}
    if not isinstance(value, dict):
        raise ModelError(
            f"{path}: `{name}`: {abbreviate(value)} is no object.",
            hint="Correct it, or fetch the file again.",
        )
    return value


def _names(path: Path, content: Mapping[str, Json], name: str) -> tuple[str, ...] | str:
    """Reads a field that holds a list of names or a pattern."""
    value = content.get(name) or ()
    if isinstance(value, str):
        return value
    if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
        raise ModelError(
            f"{path}: `{name}`: {abbreviate(value)} is neither a list of names nor a pattern.",
            hint="Save it with peft.",
        )
    return tuple(value)


def _require_layer_numbers(path: Path, value: Json) -> frozenset[int] | None:
    numbers = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in numbers):
        raise ModelError(
            f"{path}: `layers_to_transform`: {abbreviate(value)} has something else than numbers of layers.",
            hint="Save it with peft.",
        )
    return frozenset(numbers) or None


def _require_rank(path: Path, name: str, value: Json) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_RANK:
        raise ModelError(
            f"{path}: `{name}`: {abbreviate(value)} is no rank (1 to {MAX_RANK}).",
            hint="Correct it, or fetch the file again.",
        )
    return value


def _require_number(path: Path, name: str, value: Json) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ModelError(
            f"{path}: `{name}`: {abbreviate(value)} is no number.",
            hint="Correct it, or fetch the file again.",
        )
    return float(value)


def _require_token_ids(path: Path, value: Json) -> tuple[int, ...]:
    tokens = [] if value is None else value
    if not isinstance(tokens, list):
        raise ModelError(
            f"{path}: `alora_invocation_tokens`: {abbreviate(value)} is no list of token ids.",
            hint="Correct it, or fetch the file again.",
        )
    for token in tokens:
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise ModelError(
                f"{path}: `alora_invocation_tokens`: {abbreviate(token)} is no token id.",
                hint="Correct it, or fetch the file again.",
            )
    return tuple(token for token in tokens if isinstance(token, int))


def unsupported_error(path: Path, name: str, value: Json, why: str) -> ModelError:
    return ModelError(
        f"{path}: `{name}` is {abbreviate(value)}: {why}.",
        hint="Merge the adapter with peft's merge_and_unload(), and serve the merged model.",
    )


def largest_rank(setting: int | None, paths: Sequence[str]) -> int:
    """Returns the maximum rank of an adapter: the setting if given, else the largest rank of the
    adapters in these folders, or 64 if there are none.
    """
    return setting or max(map(_read_largest_rank, paths), default=_RANK)


def _read_largest_rank(path: str) -> int:
    config = read_adapter_config(Path(path).expanduser())
    return min(max([config.rank, *config.ranks.values()]), MAX_RANK)
