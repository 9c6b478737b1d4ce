"""Token ids in answers of OpenAI's protocols, by vLLM's and SGLang's names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_lite.protocol import Generation, ParameterError
from sglang_lite.protocol.anything import Json
from sglang_lite.runtime.core.submission import GenerateRequest
from sglang_lite.server.parameters.sampling import SglangSampling
from sglang_lite.server.sglang.answer import SampleAnswer

if TYPE_CHECKING:
    from sglang_lite.server.service import Service


class TokenIdFields(SglangSampling, kw_only=True, omit_defaults=True):
    """Fields that ask for token ids: vLLM's (`return_token_ids`) and SGLang's."""

    stream: bool | None = None
    return_token_ids: bool | None = None
    return_prompt_token_ids: bool | None = None
    return_meta_info: bool | None = None

    @property
    def asks_for_ids(self) -> bool:
        """True if any ids are asked for. Raises ParameterError for a stream, whose chunks have none."""
        for name in ("return_token_ids", "return_prompt_token_ids", "return_meta_info"):
            if getattr(self, name):
                if self.stream:
                    raise ParameterError(name, "has no place in a stream.", hint="Set stream: false.")
                return True
        return False

    def ids_of(self, service: Service, request: GenerateRequest, generation: Generation) -> dict[str, Json]:
        """Fields of a choice: those that were asked for."""
        found: dict[str, Json] = {}
        if self.return_token_ids or self.return_prompt_token_ids:
            found["prompt_token_ids"] = list(generation.prompt_ids)
        if self.return_token_ids:
            found["token_ids"] = list(generation.token_ids)
        if self.return_meta_info:
            decode = service.engine.tokenizer.decode
            version = service.engine.config.weight_version
            answer = SampleAnswer(request, generation.prompt_ids, None, decode, weight_version=version)
            found["meta_info"] = answer.add_event(generation)["meta_info"]
        return found
