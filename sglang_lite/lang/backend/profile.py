"""Profiles: what each model of a provider takes, read from data that names its sources.

A feature that a profile does not mention is unknown, which is neither yes nor no: `policy="strict"` refuses it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from datetime import date
from functools import lru_cache
from importlib import resources
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias, get_args

from sglang_lite.lang.backend.capabilities import Capabilities
from sglang_lite.protocol import JsonSchema, ParameterError, Regex
from sglang_lite.protocol.sampling import PARAMETERS

ApiName: TypeAlias = Literal["chat", "responses", "completions", "messages", "generate_content"]

# Ways to keep a constraint, in the order in which they are tried: docs/backends.md says what each is.
RUNGS: Final = (
    "json_schema", "strict_tool", "regex_tool", "lark_tool", "structured_outputs", "regex", "ebnf", "grammar",
    "decisions", "logit_bias_steps",
)  # fmt: skip
OTHERS: Final = (
    "images", "prefill", "continue_final_message", "tools", "forced_tools", "reasoning_effort", "cache_control",
    "prompt_cache_key", "temperature_with_top_p", "blank_stops", "continues", "max_completion_tokens",
)  # fmt: skip
LIMITS: Final = ("stop", "top_logprobs_num", "choices")
NAMES: Final = tuple(each.name for each in PARAMETERS)
FEATURES: Final = frozenset({*NAMES, *RUNGS, *OTHERS})


@dataclass(frozen=True, slots=True)
class Feature:
    """A fact about a feature.

    Attributes:
        taken: the model takes it; else it is known not to.
        source: where that was read: a page's address, or a file of an SDK.
        read: the day on which it was.
    """

    taken: bool
    source: str
    read: date


@dataclass(frozen=True, slots=True)
class SchemaRules:
    """JSON Schemas as a provider's strict outputs take them.

    Attributes:
        kept: keywords that are enforced.
        formats: values of `format` that are.
        all_required: each property of an object has to be required.
        type_lists: `type` may be a list.
        recursion: a schema may refer to itself.
        properties, depth, enum_values, optional, unions: the most of these that a schema may have; None: no limit.
        least_items: the largest `minItems` that is enforced; None: any.
        source, read: as of a Feature.
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
    """A profile of a model.

    Attributes:
        provider: name of the data's file: "openai", "anthropic", "vllm" …
        model: the entry that was found; empty for a model that the provider's data does not list.
        api: which of the provider's APIs it is asked by.
        features: what is known, by the names of parameters, rungs and other features.
        limits: the largest numbers of stops, of alternatives a token, of choices in a decision.
        schema: JSON Schemas that strict outputs take; None: as they are.
    """

    provider: str
    model: str
    api: ApiName
    features: Mapping[str, Feature] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)
    schema: SchemaRules | None = None

    def takes(self, feature: str) -> bool:
        """Tells whether the model is known to take it."""
        known = self.features.get(feature)
        return known is not None and known.taken

    def refuses(self, feature: str) -> bool:
        """Tells whether the model is known not to take it."""
        known = self.features.get(feature)
        return known is not None and not known.taken

    @property
    def params(self) -> frozenset[str]:
        """Names of the sampling parameters that it takes."""
        return frozenset(name for name in NAMES if self.takes(name))

    @property
    def name(self) -> str:
        """The name by which a user asks for it: `profile=`."""
        return f"{self.provider}/{self.model}" if self.model else self.provider

    def with_capabilities(self, can: Capabilities) -> Profile:
        """The profile of a model whose user says what it can do: which wins over what is known."""
        taken = {name: can.params is None or name in can.params for name in NAMES}
        taken |= {"images": can.images, "prefill": can.prefill, "continues": can.continues}
        by_pattern = any(self.takes(name) for name in ("structured_outputs", "regex", "grammar"))
        taken["json_schema"] = JsonSchema in can.constraints and not self.takes("structured_outputs")
        taken["regex_tool"] = Regex in can.constraints and not by_pattern
        found = {name: Feature(each, "capabilities=", date.today()) for name, each in taken.items()}
        return replace(self, features=MappingProxyType({**self.features, **found}))

    def asked_on(self, rungs: AbstractSet[str]) -> Profile:
        """The profile for a backend whose requests can ask on these rungs alone (and for "tools")."""
        lost = {name for name in (*RUNGS, "tools") if self.takes(name)} - rungs
        none = Feature(False, "the backend has no such request", date.today())
        features = {**self.features, **dict.fromkeys(lost, none)}
        return replace(self, features=MappingProxyType(features)) if lost else self


def profile_of(provider: str, model: str) -> Profile:
    """The profile of a provider's model; of an unlisted one, what is known of all.

    Raises:
        ParameterError: there is no such provider.
    """
    found, default = _provider(provider)
    base = _base_name(model)
    for name in (base, _SNAPSHOT.sub("", base)):  # a snapshot that is listed may differ from what its name is short for
        if name in found:
            return found[name]
    return default


def named(name: str) -> Profile:
    """A profile by its name, "vllm" or "openai/gpt-5".

    Raises:
        ParameterError: there is none of this name.
    """
    if not isinstance(name, str):
        raise ParameterError(
            "profile", f"{name!r:.60} is neither a name nor a Profile.", hint='Give one by name, such as "vllm".'
        )
    provider, _, model = name.partition("/")
    if provider not in providers():
        raise ParameterError("profile", f"{name!r} is not known.", hint=f"Known: {', '.join(providers())}.")
    found = profile_of(provider, model)
    if model and not found.model:
        raise ParameterError("profile", f"{provider!r} has no model {model!r}.", hint=f"See profiles/{provider}.toml.")
    return found


def chosen(given: str | Profile | None, provider: str, model: str) -> Profile:
    """The profile that a user has given, by name or as it is; None: what is known of a provider's model."""
    if given is None:
        return profile_of(provider, model)
    return given if isinstance(given, Profile) else named(given)


@lru_cache(maxsize=1)
def providers() -> tuple[str, ...]:
    """Names of the providers that there is data of."""
    files = (each.name for each in _data().iterdir())
    return tuple(
        sorted(name.removesuffix(".toml") for name in files if name.endswith(".toml") and name != "prices.toml")
    )


def profiles(provider: str) -> tuple[Profile, ...]:
    """All profiles of a provider, the one of unlisted models last."""
    found, default = _provider(provider)
    return (*found.values(), default)


def _data() -> Any:
    return resources.files("sglang_lite.lang.backend") / "profiles"


def _base_name(model: str) -> str:
    """The name of a model without its provider's prefix, and that of which a fine-tuned one was made."""
    name = model.rpartition("/")[2].rpartition("anthropic.")[2]
    return name.removeprefix("ft:").partition(":")[0] if name.startswith("ft:") else name


_SNAPSHOT = re.compile(r"(-\d{8}|-\d{4}-\d{2}-\d{2}|-latest|@\d{8})?(-v\d+(:\d+)?)?$")


@lru_cache
def _provider(provider: str) -> tuple[Mapping[str, Profile], Profile]:
    """Profiles of a provider by their models' names, and the one of models that are not listed."""
    file = _data() / f"{provider}.toml"
    if not file.is_file():
        raise ParameterError("profile", f"there is no provider {provider!r}.", hint=f"Known: {', '.join(providers())}.")
    data = tomllib.loads(file.read_text(encoding="utf-8"))
    return _Reader(provider, data).read()


class _Reader:
    """Reader of a provider's file. What is wrong in it is a fault of this package: tests read all of them."""

    def __init__(self, provider: str, data: Mapping[str, Any]) -> None:
        self._provider, self._data = provider, data
        self._read: date = data["read"]

    def read(self) -> tuple[Mapping[str, Profile], Profile]:
        like = self._data.get("like")  # a provider that serves another one's software
        if like is not None:
            found, default = _provider(like)
            own = {name: replace(each, provider=self._provider) for name, each in found.items()}
            return own, self._profile(self._data["default"], "", default)
        models = self._data.get("models", ())
        entries = {name: self._profile(entry, name) for entry in models for name in entry["names"]}
        return entries, self._profile(self._data["default"], "")

    def _profile(self, entry: Mapping[str, Any], model: str, onto: Profile | None = None) -> Profile:
        api = entry.get("api", onto.api if onto is not None else None)
        assert api in get_args(ApiName), f"{self._provider}: {model}: api = {api!r}"
        features: dict[str, Feature] = dict(onto.features) if onto is not None else {}
        limits: dict[str, int] = dict(onto.limits) if onto is not None else {}
        for fact in self._facts(entry):
            source = self._data["sources"][fact["source"]]
            for key, taken in (("takes", True), ("refuses", False)):
                for name in fact.get(key, ()):
                    assert name in FEATURES, f"{self._provider}: {model}: {name!r} is no feature"
                    features[name] = Feature(taken, source, self._read)
            for name, most in fact.get("limits", {}).items():
                assert name in LIMITS, f"{self._provider}: {model}: {name!r} is no limit"
                limits[name] = most
        schema = self._schema() if "schema" in self._data else None if onto is None else onto.schema
        return Profile(self._provider, model, api, MappingProxyType(features), MappingProxyType(limits), schema)

    def _facts(self, entry: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """Facts of an entry's traits, and its own: what comes later wins."""
        for trait in entry.get("traits", ()):
            facts: Sequence[Mapping[str, Any]] = self._data["traits"][trait]
            yield from facts
        yield from entry.get("facts", ())

    def _schema(self) -> SchemaRules:
        rules = dict(self._data["schema"])
        rules |= {"kept": frozenset(rules["kept"]), "formats": frozenset(rules["formats"])}
        return SchemaRules(**rules | {"source": self._data["sources"][rules["source"]], "read": self._read})
