"""Types of the results of `Engine.generate`, `encode` and `classify`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NotRequired, Protocol, TypeAlias, TypedDict, TypeVar, Unpack, overload

from sglang_lite.protocol import Generation
from sglang_lite.protocol.anything import Json
from sglang_lite.protocol.sampling import SglangOptions
from sglang_lite.runtime.requests.logit_processors import LogitProcessor

_One = TypeVar("_One", covariant=True)
_Many = TypeVar("_Many", covariant=True)
_Streamed = TypeVar("_Streamed", covariant=True)
# of a token: nats, id, text if requested
_Logprob: TypeAlias = tuple[float | None, int, str | None]


class _MetaInfo(TypedDict):
    id: str
    weight_version: str
    finish_reason: dict[str, str | int | None] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int


class _ImageCounts(TypedDict, total=False):
    image_tokens: int
    cached_image_tokens: int


class _OfWhole(TypedDict, total=False):
    e2e_latency: float
    queue_time: float
    cached_tokens_details: dict[str, int]


class MetaInfo(_MetaInfo, _ImageCounts, _OfWhole, total=False):
    """Metadata of an answer of `generate`. Entries that don't apply to it are left out."""

    input_token_logprobs: list[_Logprob]
    output_token_logprobs: list[_Logprob]
    output_token_logprobs_length: int
    input_top_logprobs: list[list[_Logprob] | None]
    output_top_logprobs: list[list[_Logprob]]
    input_token_ids_logprobs: list[list[_Logprob] | None]
    output_token_ids_logprobs: list[list[_Logprob]]
    output_model_logprobs: list[float | None]
    output_allowed_logprobs: list[float | None]
    num_retractions: int
    constraint_backend: str
    shortened: bool | str
    repeats: dict[str, int]
    spec_verify_ct: int
    spec_draft_token_num: int
    spec_accept_token_num: int
    spec_accept_rate: float
    spec_accept_length: float
    continued_from: int
    cache_miss: dict[str, str | int]
    forced_text: list[list[int]]
    forced_tokens: list[list[int]]
    older_weight_versions: list[tuple[int, str]]


class Answer(TypedDict):
    """Answer of `generate`."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    prompt_token_ids: NotRequired[list[int]]  # if they were requested
    index: NotRequired[int]  # in a streamed list
    generation: NotRequired[Generation]  # of a prompt as a record


class Embedding(TypedDict):
    """Answer of `encode`: the embedding vector of a text, and metadata."""

    embedding: list[float]
    meta_info: dict[str, Json]


class Classification(TypedDict):
    """Answer of `classify`: the most likely label, and the probability of each label."""

    label: str
    probs: dict[str, float]


class OneSample(SglangOptions, total=False):
    """`sampling_params` without `n`, so that a prompt has a single answer rather than a list."""

    json_schema: str | None
    regex: str | None
    ebnf: str | None
    structural_tag: str | None


class GenerateFields(TypedDict, total=False):
    """Arguments of `generate` that don't affect the type of its result."""

    return_logprob: bool | Sequence[bool]
    logprob_start_len: int | Sequence[int] | None
    top_logprobs_num: int | Sequence[int] | None
    token_ids_logprob: Sequence[int] | Sequence[Sequence[int]] | None
    return_text_in_logprobs: bool
    return_confidence: bool | None
    return_prompt_token_ids: bool | None
    return_routed_experts: bool | None
    return_hidden_states: bool | None
    lora_path: str | Sequence[str | None] | None
    custom_logit_processor: LogitProcessor | Sequence[LogitProcessor | None] | None
    rid: str | Sequence[str] | None
    priority: int | Sequence[int] | None
    cache_salt: str | Sequence[str] | None
    image_data: object
    video_data: object
    audio_data: object
    modalities: Sequence[str] | Sequence[Sequence[str]] | None
    kv_hints: Mapping[str, object] | Sequence[Mapping[str, object] | None] | None
    routed_dp_rank: int | None
    data_parallel_rank: int | None
    output_ids: Sequence[int] | Sequence[Sequence[int] | None] | None


_Params: TypeAlias = Mapping[str, object] | Sequence[Mapping[str, object]] | None
_Ids: TypeAlias = Sequence[int] | Sequence[Sequence[int]] | None


class Generates(Protocol[_One, _Many, _Streamed]):
    """Overloads of `generate`. If the type of the sampling parameters is unknown, a type checker
    can't see whether they ask for several samples. The result may then be one answer or a list.
    """

    # fmt: off
    @overload
    def __call__(
        self, prompt: str, sampling_params: OneSample | None = None, *, stream: Literal[False] = False,
        **fields: Unpack[GenerateFields],
    ) -> _One: ...
    @overload
    def __call__(
        self, prompt: str, sampling_params: _Params = None, *, stream: Literal[False] = False,
        **fields: Unpack[GenerateFields],
    ) -> _One | _Many: ...
    @overload
    def __call__(
        self, prompt: Sequence[str], sampling_params: _Params | Sequence[OneSample] = None, *,
        stream: Literal[False] = False, **fields: Unpack[GenerateFields],
    ) -> _Many: ...
    @overload
    def __call__(
        self, *, input_ids: Sequence[int], sampling_params: OneSample | None = None, stream: Literal[False] = False,
        **fields: Unpack[GenerateFields],
    ) -> _One: ...
    @overload
    def __call__(
        self, *, input_ids: Sequence[Sequence[int]], sampling_params: _Params | Sequence[OneSample] = None,
        stream: Literal[False] = False, **fields: Unpack[GenerateFields],
    ) -> _Many: ...
    @overload
    def __call__(
        self, prompt: str | Sequence[str] | None = None, sampling_params: _Params | OneSample = None,
        input_ids: _Ids = None, *, stream: Literal[True], **fields: Unpack[GenerateFields],
    ) -> _Streamed: ...
    @overload
    def __call__(
        self, prompt: str | Sequence[str] | None = None, sampling_params: _Params | OneSample = None,
        input_ids: _Ids = None, *, stream: Literal[False] = False, **fields: Unpack[GenerateFields],
    ) -> _One | _Many: ...
    @overload
    def __call__(
        self, prompt: str | Sequence[str] | None = None, sampling_params: _Params | OneSample = None,
        input_ids: _Ids = None, *, stream: bool, **fields: Unpack[GenerateFields],
    ) -> _One | _Many | _Streamed: ...
    # fmt: on
