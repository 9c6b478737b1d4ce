"""SGLang's ServerArgs, from the table server_args.json. For each field, the table names the
equivalent setting of this engine, says why none is needed, or suggests an alternative.
"""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, make_dataclass
from functools import lru_cache, wraps
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from sglang_lite.protocol import ParameterError
from sglang_lite.protocol.anything import Json, UserValue
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.host import startup_messages

# Other names of fields: SGLang's older ones, and those of its flags.
OTHER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "tensor_parallel_size": "tp_size",
        "pipeline_parallel_size": "pp_size",
        "data_parallel_size": "dp_size",
        "expert_parallel_size": "ep_size",
        "cuda_graph_max_bs": "cuda_graph_max_bs_decode",
        "cuda_graph_bs": "cuda_graph_bs_decode",
    }
)
_RENAMED_VALUES: Mapping[str, Mapping[str, str]] = {
    "kv_cache_dtype": {"fp8_e4m3": "fp8"},
    # Matrices are always quantised one by one, and read by the page cache, not by a GPU's own reads
    # of files.
    "load_format": {"layered": "auto", "fastsafetensors": "safetensors"},
    "attention_backend": {"torch_native": "torch", "fa4": "flash_attn"},
    "speculative_algorithm": {"NGRAM": "auto"},
}
# Their defaults differ here, and replace SGLang's.
_OWN_DEFAULTS = frozenset({"speculative_ngram_capacity", "speculative_ngram_max_trie_depth"})
_FORMATS = "bitsandbytes expert_pack flash_rl instanttensor presharded private runai_streamer"
_QUANTIZATIONS = (
    "auto-round auto-round-int8 humming mlx_q4 mlx_q8 modelopt_mixed modelslim moe_wna16 mxfp8 mxfp_w4a8 nvfp4_online "
    "petit_nvfp4 quark quark_int4fp8_moe quark_mxfp4 unquant w4afp8"
)
_KERNELS = "fa3 flashmla cutlass_mla trtllm_mla trtllm_mha dual_chunk_flash_attn aiter wave intel_amx ascend"
_ALGORITHMS = "EAGLE EAGLE3 FROZEN_KV_MTP NEXTN STANDALONE DFLASH DSPARK"
# SGLang's values of our settings, and what to use instead
_REFUSED_VALUES: Mapping[str, tuple[frozenset[str], str]] = {
    "load_format": (
        frozenset(_FORMATS.split()),
        'Use "auto", which reads safetensors, .bin and GGUF files of a folder or of the hub, as they are quantised.',
    ),
    "quantization": (
        frozenset(_QUANTIZATIONS.split()),
        'Leave it out: a checkpoint says how it is quantised. "fp8", "int4", "int8" and "nf4" quantise a plain one.',
    ),
    "remote_instance_weight_loader_backend": (
        frozenset(("transfer_engine", "modelexpress")),
        'Use "nccl", or "gloo" for CPUs.',
    ),
    "attention_backend": (
        frozenset(_KERNELS.split()),
        'Use "auto", for kernels of our own, which suit Hopper GPUs, too; "flash_attn" is FlashAttention 4.',
    ),
    "speculative_algorithm": (
        frozenset(_ALGORITHMS.split()),
        'Use "NGRAM", which guesses from earlier text; draft models, heads and trees are not here yet.',
    ),
}


@dataclass(frozen=True, slots=True)
class ServerArg:
    """Field of SGLang's ServerArgs, and its meaning for this engine.

    Attributes:
        name: SGLang's name of the field.
        kind: type of its values, as "int"; "object" for any other type.
        default: SGLang's default.
        support: "engine" or "server": a setting of the engine or the server; "always": any value is
            accepted and ignored, because this engine always behaves so; "served": the same for a
            server, and "neutral" for an engine; "neutral": only the default is accepted.
        meaning: name of the setting, "not …" if its values are inverted; otherwise the reason why
            it is always so, or advice on what to use instead.
        required: True if the field has no default.
    """

    name: str
    kind: str
    default: Any
    support: Literal["engine", "server", "always", "served", "neutral"]
    meaning: str
    required: bool = False

    @property
    def inverted_setting(self) -> str | None:
        """Name of the setting that the field turns off, or None if the field isn't the inverse of a
        setting.
        """
        return (
            self.meaning.removeprefix("not ")
            if self.support == "engine" and self.meaning.startswith("not ")
            else None
        )

    def has_no_effect(self, value: object) -> bool:
        """Returns whether a value has no effect because it equals the default. If the default is
        None, False and empty values have no effect either.
        """
        if self.default is None:
            return value is False or (not isinstance(value, int | float) and not value)
        numbers = {type(value), type(self.default)} == {int, float}
        return (numbers or type(value) is type(self.default)) and value == self.default

    def advice(self) -> str:
        """Returns advice on what to use instead of a value that isn't supported."""
        return (
            "It is a setting of `sglang-lite serve`." if self.support == "server" else self.meaning
        )


# of argparse, for the kinds that a command line can express
FLAG_OPTIONS: Mapping[str, dict[str, Any]] = {
    "bool": {"action": argparse.BooleanOptionalAction},
    "int": {"type": int},
    "float": {"type": float},
    "str": {},
    "list": {"nargs": "*"},
}


@lru_cache(maxsize=1)
def _table() -> Mapping[str, Json]:
    table: dict[str, Json] = json.loads(Path(__file__).with_name("server_args.json").read_text())
    return table


def unknown_name_note() -> str:
    """Returns a sentence that says which of SGLang's settings are known, for errors about unknown
    settings.
    """
    return f"Of SGLang's settings, those of version {_table()['version']} are known."


@lru_cache(maxsize=1)
def server_args() -> Mapping[str, ServerArg]:
    """Returns all fields of ServerArgs, by name."""
    table = _table()
    found: dict[str, ServerArg] = {}

    def add(name: str, support: Any, setting: str, kind: str, *default: Any) -> None:
        found[name] = ServerArg(
            name, kind, default[0] if default else None, support, setting, not default
        )

    for support in ("engine", "server"):
        for name, (setting, kind, *default) in table[support].items():
            add(name, support, setting, kind, *default)
    for support in ("always", "served", "neutral"):
        for group in table[support]:
            for name, (kind, *default) in group["fields"].items():
                add(name, support, group["use"], kind, *default)
    return MappingProxyType(found)


def sglang_names_for_setting(setting: str) -> list[str]:
    """Returns SGLang's names for a setting of the engine, if they differ from the setting's own
    name.
    """
    return [
        each.name
        for each in server_args().values()
        if each.support == "engine" and each.meaning == setting and each.name != setting
    ]


def translate_setting_value(name: str, value: UserValue) -> UserValue:
    """Translates a setting's value from SGLang's spelling to this engine's, where they differ.

    Raises:
        ParameterError: the engine has no equivalent.
    """
    if name == "model_loader_extra_config":
        return _parse_load_threads(value)
    if not isinstance(value, str):
        return value
    refused, hint = _REFUSED_VALUES.get(name, (frozenset(), ""))
    if value in refused:
        raise ParameterError(name, f"{value!r} is SGLang's, and not here.", hint=hint)
    return _RENAMED_VALUES.get(name, {}).get(value, value)


def _parse_load_threads(value: UserValue) -> int:
    """Returns the number of threads that `model_loader_extra_config` requests, as JSON, a mapping
    or the number itself.

    Raises:
        ParameterError: the value has another form, or settings that are not supported.
    """
    found: Any = value
    if isinstance(value, str):
        try:
            found = json.loads(value)
        except ValueError:
            found = None
    if isinstance(found, int):
        return found
    if not isinstance(found, Mapping) or found.keys() - {"enable_multithread_load", "num_threads"}:
        raise ParameterError(
            "model_loader_extra_config",
            f"{value!r:.80} is not of enable_multithread_load and num_threads.",
            hint='Use \'{"enable_multithread_load": true, "num_threads": 8}\'.',
        )
    threads: int = found.get("num_threads", 8) if found.get("enable_multithread_load") else 1
    return threads


def translate_engine_settings(given: Mapping[str, UserValue]) -> dict[str, UserValue]:
    """Translates the keywords of an engine: each ServerArg of SGLang becomes the equivalent field
    of EngineConfig. Announces arguments that change nothing.

    Raises:
        ParameterError: a ServerArg without equivalent has another value than its default, or a
            setting is given under two names.
    """
    settings: dict[str, Any] = {}
    for name, value in given.items():
        arg = server_args().get(OTHER_NAMES.get(name, name))
        if arg is None:
            ours = name
            EngineConfig.check_names((name,), unknown_name_note())
        elif arg.support == "engine":
            if (value is None or arg.name in _OWN_DEFAULTS) and value == arg.default:
                continue
            ours = arg.inverted_setting or arg.meaning
            value = not value if arg.inverted_setting else translate_setting_value(arg.name, value)
        elif arg.has_no_effect(value):
            continue
        elif arg.support == "always":
            level = given.get("log_level")
            startup_messages.announce_line(
                f"{name} changes nothing. {arg.meaning}", level if isinstance(level, str) else None
            )
            continue
        else:
            message = f"{value!r:.60} is not supported, only {arg.default!r}."
            raise ParameterError(name, message, hint=arg.advice())
        if ours in settings:
            raise ParameterError(
                name,
                f"{ours} is given, too.",
                hint="They are one setting under two names. Give one.",
            )
        settings[ours] = value
    if given.get("quantize_and_serve"):
        settings["quantization"] = _require_quantization_format(settings.get("quantization"))
    return settings


def _require_quantization_format(name: UserValue) -> UserValue:
    """Returns the name of the format in which `quantize_and_serve` quantises. Raises ParameterError
    if none is given.
    """
    if name is None:
        hint = 'Give quantization="fp8", "int4", "int8" or "nf4".'
        raise ParameterError("quantize_and_serve", "no format is named.", hint=hint)
    return "fp8" if name == "modelopt_fp8" else name


class _CommandLine:
    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        """Adds a flag for each field."""
        for arg in server_args().values():
            options = FLAG_OPTIONS.get(arg.kind)
            if options is not None:
                flag = f"--{arg.name.replace('_', '-')}"
                text = arg.meaning.replace("%", "%%")
                parser.add_argument(
                    flag, default=arg.default, required=arg.required, help=text, **options
                )

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Any:
        """Creates a record with the values of a parser that `add_cli_args` has prepared."""
        return cls(**{name: value for name, value in vars(args).items() if name in server_args()})


def _fields() -> list[tuple[str, Any, Any]]:
    found = []
    for arg in sorted(server_args().values(), key=lambda arg: not arg.required):
        given: dict[str, Any] = {} if arg.required else {"kw_only": True, "default": arg.default}
        if isinstance(arg.default, list):
            given = {"kw_only": True, "default_factory": list}
        found.append((arg.name, Any, field(**given)))
    return found


_DOC = """SGLang's settings: `sgl.Engine(**dataclasses.asdict(ServerArgs("model")))`. docs/compatibility.md lists the
meaning of each for this engine."""


def create_server_args_class(module: str) -> Any:  # a class whose fields no type checker can know
    """Creates SGLang's `ServerArgs`, a data class of all fields. Takes 20 ms, so it is only called
    when the name is first imported.

    Args:
        module: module that exports the class, where pickle looks for it.
    """
    made: Any = make_dataclass(
        "ServerArgs", _fields(), bases=(_CommandLine,), namespace={"__doc__": _DOC}
    )
    made.__module__ = module
    made.__init__ = _checks_names(made.__init__)
    return made


def _checks_names(make: Callable[..., None]) -> Callable[..., None]:
    """Wraps the constructor of a record of settings, so that an unknown setting raises one of this
    package's errors.
    """

    @wraps(make)
    def call(self: object, *args: UserValue, **settings: UserValue) -> None:
        for name in settings.keys() - server_args().keys():
            near = difflib.get_close_matches(name, server_args(), n=1)
            hint = f"Did you mean {near[0]}=?" if near else unknown_name_note()
            raise ParameterError(name, "ServerArgs has no such field.", hint=hint)
        make(self, *args, **settings)

    return call
