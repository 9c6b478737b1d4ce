"""Fields that OpenAI's chat and text completions share, including additions by SGLang and vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from sglang_lite.constraints import structural_tag
from sglang_lite.protocol import Choices, Constraint, Ebnf, Generation, ParameterError, Regex
from sglang_lite.protocol.anything import Json
from sglang_lite.runtime.core.submission import GenerateRequest
from sglang_lite.server.parameters import constraints
from sglang_lite.server.parameters.sampling import CompletionSampling
from sglang_lite.server.sglang.answer import SampleAnswer
from sglang_lite.server.sglang.request import replica_rank

if TYPE_CHECKING:
    from sglang_lite.server.service import Service


_UNLIMITED = 2**31 - 1  # most that an engine accepts; the answer then ends where the context does


class EventOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of the events of a stream."""

    # reported: events are not padded to hide their sizes from eavesdroppers
    include_obfuscation: bool = False


class StreamOptions(EventOptions, kw_only=True, forbid_unknown_fields=True):
    """Options of a stream of completions."""

    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: counts so far in each chunk


def check_stream_options(
    stream: bool | None, options: EventOptions | None, unused: list[str]
) -> None:
    """Checks the options of a request's stream.

    Args:
        stream: whether the answer is a stream.
        options: its options, or None.
        unused: list to which the name of an option without effect is appended.

    Raises:
        ParameterError: a request has options of a stream, but its answer is not a stream.
    """
    if options is None:
        return
    if not stream:
        raise ParameterError(
            "stream_options", "needs stream: true.", hint="Leave it out, or set stream."
        )
    if options.include_obfuscation:
        unused.append("stream_options.include_obfuscation")


class CompletionFields(CompletionSampling, kw_only=True, omit_defaults=True):
    """Fields of a request for completions.

    Token ids are requested by vLLM's field (`return_token_ids`) or SGLang's. A replica is named by
    SGLang's current field (`routed_dp_rank`) or its older one. Constraints have vLLM's current
    field (`structured_outputs`) and its older ones (`guided_json` …), and llama.cpp's `grammar`.
    """

    model: str | None = None
    stream: bool | None = None
    response_format: dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_whitespace_pattern: str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    grammar: str | None = None
    include_stop_str_in_output: bool | None = None
    n_predict: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    prompt_logprobs: int | None = None
    return_tokens_as_token_ids: bool | None = None
    lora_path: str | None = None
    request_id: str | None = None
    rid: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    return_prompt_token_ids: bool | None = None
    return_meta_info: bool | None = None
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None

    def __post_init__(self) -> None:
        if self.n_predict == -1:  # llama.cpp's default: until the context is full
            self.n_predict = _UNLIMITED

    @property
    def replica(self) -> int | None:
        """Number of the replica that the request names, or None if it names none. Raises
        ParameterError if `routed_dp_rank` and `data_parallel_rank` differ.
        """
        return replica_rank(self.routed_dp_rank, self.data_parallel_rank)

    @property
    def name(self) -> str | None:
        """Name of the request, in SGLang's field (`rid`) or vLLM's (`request_id`), or None if it
        has none. Raises ParameterError if they differ.
        """
        if None not in (self.rid, self.request_id) and self.rid != self.request_id:
            raise ParameterError("request_id", "and rid differ.", hint="Give one of them.")
        return self.request_id if self.rid is None else self.rid

    @property
    def answering_model(self) -> str | None:
        """Name of the adapter or model that the request asks for; None for the server's model."""
        return self.model if self.lora_path is None else self.lora_path

    def constraint(self, **more: Constraint | None) -> Constraint | None:
        """Returns the only constraint of the answer, or None if it has none.

        Args:
            more: constraints from further fields, by the names of the fields.

        Raises:
            ParameterError: there are two constraints, or one is malformed.
            ConstraintError: the constraint can't be enforced.
        """
        return constraints.require_single_constraint(
            response_format=constraints.response_format(self.response_format),
            **more,
            regex=None if self.regex is None else Regex(self.regex),
            ebnf=None if self.ebnf is None else Ebnf(self.ebnf),
            structural_tag=None
            if self.structural_tag is None
            else structural_tag.parse(self.structural_tag),
            structured_outputs=constraints.structured_outputs(self.structured_outputs),
            guided_json=constraints.guided_schema(self.guided_json, self.guided_whitespace_pattern),
            guided_regex=None if self.guided_regex is None else Regex(self.guided_regex),
            guided_choice=None
            if self.guided_choice is None
            else Choices(tuple(self.guided_choice)),
            guided_grammar=None
            if self.guided_grammar is None
            else constraints.grammar(self.guided_grammar),
            grammar=None if self.grammar is None else Ebnf(self.grammar),
        )

    @property
    def asks_for_ids(self) -> bool:
        """True if the request asks for token ids or metadata. Raises ParameterError if the answer
        is a stream, whose chunks have neither.
        """
        for name in ("return_token_ids", "return_prompt_token_ids", "return_meta_info"):
            if getattr(self, name):
                if self.stream:
                    raise ParameterError(
                        name, "has no place in a stream.", hint="Set stream: false."
                    )
                return True
        return False

    def requested_id_fields(
        self, service: Service, request: GenerateRequest, generation: Generation
    ) -> dict[str, Json]:
        """Returns the fields of a choice with the token ids and metadata that the request asks for."""
        found: dict[str, Json] = {}
        if self.return_token_ids or self.return_prompt_token_ids:
            found["prompt_token_ids"] = list(generation.prompt_ids)
        if self.return_token_ids:
            found["token_ids"] = list(generation.token_ids)
        if self.return_meta_info:
            decode = service.engine.tokenizer.decode
            version = service.engine.config.weight_version
            answer = SampleAnswer(
                request, generation.prompt_ids, None, decode, weight_version=version
            )
            found["meta_info"] = answer.add_event(generation)["meta_info"]
        return found
