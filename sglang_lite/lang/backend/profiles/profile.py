"""Profiles: the features that each model of a provider supports, read from data files that name
their sources.

A feature that a profile does not mention is unknown, neither supported nor unsupported:
`policy="strict"` rejects it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from datetime import date
from functools import lru_cache
from importlib import resources
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias, get_args

from sglang_lite.errors import short_repr
from sglang_lite.lang.backend.capabilities import Capabilities
from sglang_lite.lang.tracebacks import user_location
from sglang_lite.protocol import JsonSchema, ParameterError, Regex
from sglang_lite.protocol.sampling import PARAMETERS

ApiName: TypeAlias = Literal["chat", "responses", "completions", "messages", "generate_content"]

# Ways to enforce a constraint, in order of preference; docs/backends.md describes each.
STRATEGIES: Final = (
    "json_schema", "strict_tool", "regex_tool", "lark_tool", "structured_outputs", "regex", "ebnf", "grammar",
    "decisions", "logit_bias_steps",
)  # fmt: skip
OTHER_FEATURES: Final = (
    "images", "prefill", "continue_final_message", "tools", "forced_tools", "reasoning_effort", "cache_control",
    "prompt_cache_key", "temperature_with_top_p", "blank_stops", "continues", "max_completion_tokens",
)  # fmt: skip
LIMITS: Final = ("stop", "top_logprobs_num", "choices")
NAMES: Final = tuple(each.name for each in PARAMETERS)
FEATURES: Final = frozenset({*NAMES, *STRATEGIES, *OTHER_FEATURES})


@dataclass(frozen=True, slots=True)
class Feature:
    """Fact about a feature of a model.

    Attributes:
        supported: True if the model is known to support the feature, False if it is known not to.
        source: source of the fact: address of a page, or a file of an SDK.
        read: day on which the source was read.
    """

    supported: bool
    source: str
    read: date


@dataclass(frozen=True, slots=True)
class SchemaRules:
    """Rules for the JSON Schemas that a provider's strict outputs accept.

    Attributes:
        kept: keywords that are enforced.
        formats: values of `format` that are enforced.
        all_required: True if every property of an object has to be required.
        type_lists: True if `type` may be a list.
        recursion: True if a schema may refer to itself.
        properties, depth, enum_values, optional, unions: maximum number of properties, levels,
            values in enums, optional properties and unions of a schema, or None for no limit.
        least_items: largest `minItems` that is enforced, or None for any.
        source, read: source of the rules and day on which it was read, as in Feature.
    """

    kept: frozenset[str]
    formats: frozenset[str]
    source: str
    read: date
    all_required: bool = True
    type_lists: bool = True
    recursion: bool = True
    properties: int | None = None
    depth: int | None = None
    enum_values: int | None = None
    optional: int | None = None
    unions: int | None = None
    least_items: int | None = None


@dataclass(frozen=True, slots=True)
class Profile:
    """Features of a model.

    Attributes:
        provider: name of the data file: "openai", "anthropic", "vllm" …
        model: name of the model's entry in the file; empty if the file does not list the model.
        api: API of the provider that serves the model.
        features: known facts, by the names of parameters, strategies and other features.
        limits: maximum number of stop strings (`stop`), of alternatives for a token
            (`top_logprobs_num`) and of choices in a decision (`choices`).
        schema: JSON Schemas that strict outputs accept, or None if any schema is sent unchanged.
    """

    provider: str
    model: str
    api: ApiName
    features: Mapping[str, Feature] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)
    schema: SchemaRules | None = None

    def supports(self, feature: str) -> bool:
        """Returns True if the model is known to support the feature."""
        fact = self.features.get(feature)
        return fact is not None and fact.supported

    def lacks(self, feature: str) -> bool:
        """Returns True if the model is known not to support the feature."""
        fact = self.features.get(feature)
        return fact is not None and not fact.supported

    @property
    def params(self) -> frozenset[str]:
        """Names of the sampling parameters that the model supports."""
        return frozenset(name for name in NAMES if self.supports(name))

    @property
    def name(self) -> str:
        """Name by which `profile=` selects this profile."""
        return f"{self.provider}/{self.model}" if self.model else self.provider

    def with_capabilities(self, can: Capabilities) -> Profile:
        """Returns the profile with the capabilities that the user states for the model. The user's
        statements override known facts.
        """
        supported = {name: can.params is None or name in can.params for name in NAMES}
        supported |= {"images": can.images, "prefill": can.prefill, "continues": can.continues}
        by_pattern = any(self.supports(name) for name in ("structured_outputs", "regex", "grammar"))
        supported["json_schema"] = JsonSchema in can.constraints and not self.supports(
            "structured_outputs"
        )
        supported["regex_tool"] = Regex in can.constraints and not by_pattern
        found = {
            name: Feature(each, "capabilities=", date.today()) for name, each in supported.items()
        }
        return replace(self, features=MappingProxyType({**self.features, **found}))

    def restrict_to_strategies(self, strategies: AbstractSet[str]) -> Profile:
        """Returns the profile for a backend that can make requests for only some strategies. All
        other strategies count as unsupported, and so does "tools" if it is not in the set.
        """
        lost = {name for name in (*STRATEGIES, "tools") if self.supports(name)} - strategies
        none = Feature(False, "the backend has no such request", date.today())
        features = {**self.features, **dict.fromkeys(lost, none)}
        return replace(self, features=MappingProxyType(features)) if lost else self


def check_model_name(model: object) -> None:
    if not isinstance(model, str):
        raise ParameterError(
            "model_name", f"{short_repr(model)} is not a string.", where=user_location()
        )


def find_profile(provider: str, model: str) -> Profile:
    """Returns the profile of a provider's model. An unlisted model has only the facts that hold for
    all models of the provider.

    Raises:
        ParameterError: the provider does not exist, or the name is not a string.
    """
    check_model_name(model)
    found, default = _read_provider(provider)
    base = _base_name(model)
    # a listed snapshot may differ from its short name's current model
    for name in (base, _SNAPSHOT.sub("", base)):
        if name in found:
            return found[name]
    return default


def profile_by_name(name: str) -> Profile:
    """Returns a profile by its name: "vllm" or "openai/gpt-5".

    Raises:
        ParameterError: no profile has this name.
    """
    if not isinstance(name, str):
        raise ParameterError(
            "profile",
            f"{name!r:.60} is neither a name nor a Profile.",
            hint='Give one by name, such as "vllm".',
        )
    provider, _, model = name.partition("/")
    if provider not in providers():
        raise ParameterError(
            "profile", f"{name!r} is not known.", hint=f"Known: {', '.join(providers())}."
        )
    found = find_profile(provider, model)
    if model and not found.model:
        raise ParameterError(
            "profile",
            f"{provider!r} has no model {model!r}.",
            hint=f"See profiles/{provider}.toml.",
        )
    return found


def resolve_profile(profile: str | Profile | None, provider: str, model: str) -> Profile:
    """Resolves a profile that a user gives by name or as a Profile. For None, returns the profile
    of the provider's model.
    """
    if profile is None:
        return find_profile(provider, model)
    return profile if isinstance(profile, Profile) else profile_by_name(profile)


@lru_cache(maxsize=1)
def providers() -> tuple[str, ...]:
    """Returns the names of the providers with a data file."""
    files = (each.name for each in _data_folder().iterdir())
    return tuple(
        sorted(
            name.removesuffix(".toml")
            for name in files
            if name.endswith(".toml") and name != "prices.toml"
        )
    )


def profiles(provider: str) -> tuple[Profile, ...]:
    """Returns all profiles of a provider. The last one is for unlisted models."""
    found, default = _read_provider(provider)
    return (*found.values(), default)


def _data_folder() -> Any:
    return resources.files("sglang_lite.lang.backend.profiles")


def _base_name(model: str) -> str:
    """Returns the name of a model without its provider's prefix; for a fine-tuned model, the name
    of its base model.
    """
    name = model.rpartition("/")[2].rpartition("anthropic.")[2]
    return name.removeprefix("ft:").partition(":")[0] if name.startswith("ft:") else name


_SNAPSHOT = re.compile(r"(-\d{8}|-\d{4}-\d{2}-\d{2}|-latest|@\d{8})?(-v\d+(:\d+)?)?$")


@lru_cache
def _read_provider(provider: str) -> tuple[Mapping[str, Profile], Profile]:
    """Reads a provider's data file. Returns the profiles of its models by name, and the profile of
    unlisted models. Tests read all files, so an error in a file is a bug of this package.
    """
    file = _data_folder() / f"{provider}.toml"
    if not file.is_file():
        raise ParameterError(
            "profile",
            f"there is no provider {provider!r}.",
            hint=f"Known: {', '.join(providers())}.",
        )
    data = tomllib.loads(file.read_text(encoding="utf-8"))
    default = data["default"]
    if "like" in data:  # another provider, whose software this one runs
        found, base = _read_provider(data["like"])
        own = {name: replace(each, provider=provider) for name, each in found.items()}
        return own, _build_profile(data, default, replace(base, provider=provider))
    schema = _schema_rules(data) if "schema" in data else None

    def read(entry: Mapping[str, Any], model: str) -> Profile:
        return _build_profile(data, entry, Profile(provider, model, entry["api"], schema=schema))

    listed = {
        name: read(entry, name) for entry in data.get("models", ()) for name in entry["names"]
    }
    return listed, read(default, "")


def _build_profile(data: Mapping[str, Any], entry: Mapping[str, Any], base: Profile) -> Profile:
    """Builds the profile of an entry from the facts of its traits and its own facts. Its own facts
    take precedence.
    """
    assert base.api in get_args(ApiName), f"{base.name}: api = {base.api!r}"
    features = dict(base.features)
    limits = dict(base.limits)
    traits = [fact for trait in entry.get("traits", ()) for fact in data["traits"][trait]]
    for fact in (*traits, *entry.get("facts", ())):
        source = data["sources"][fact["source"]]
        for key, supported in (("takes", True), ("refuses", False)):
            for name in fact.get(key, ()):
                assert name in FEATURES, f"{base.name}: {name!r} is no feature"
                features[name] = Feature(supported, source, data["read"])
        for name, limit in fact.get("limits", {}).items():
            assert name in LIMITS, f"{base.name}: {name!r} is no limit"
            limits[name] = limit
    return replace(base, features=MappingProxyType(features), limits=MappingProxyType(limits))


def _schema_rules(data: Mapping[str, Any]) -> SchemaRules:
    rules = dict(data["schema"])
    rules |= {"kept": frozenset(rules["kept"]), "formats": frozenset(rules["formats"])}
    return SchemaRules(**rules | {"source": data["sources"][rules["source"]], "read": data["read"]})
