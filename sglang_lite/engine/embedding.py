"""Calls for models that embed or classify texts instead of generating them.

numpy is imported inside functions, because an engine's process is started before numpy is loaded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from sglang_lite.errors import short_repr
from sglang_lite.process.random_ids import random_id
from sglang_lite.protocol import CapabilityError, ParameterError
from sglang_lite.protocol.anything import Json
from sglang_lite.runtime.embedding.request import (
    EncodeRequest,
    EncoderInput,
    build_encode_request,
    is_token_id_list,
    not_a_generator_error,
    not_an_encoder_error,
)
from sglang_lite.runtime.embedding.spec import Classifier, EncoderSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from sglang_lite.engine.engine import Engine
    from sglang_lite.runtime.tokens.tokenizer import Tokenizer

_TEXTS = 4096  # maximum number of texts in one message to the engine's process
# of texts [N, width], and the tokens of each text
Numbers: TypeAlias = "tuple[NDArray[np.float32], list[int]]"
# one or several, each a text or token ids
Texts: TypeAlias = str | Sequence[int] | Sequence[str | Sequence[int]]
AdapterNames: TypeAlias = str | Sequence[str | None] | None  # of all texts, or of each


# a dictionary, or a list: by the prompt
def encode_in_sglang_form(compute: Callable[[Any], Numbers], prompt: Texts) -> Any:
    """Computes the vectors of texts and returns them in the form of `sgl.Engine.encode`. For a
    reward model, returns its outputs instead of vectors.

    Args:
        compute: `embeddings` or `classifier_outputs` with all arguments except the texts.
    """
    texts, single = prompt_to_texts(prompt)
    started = time.perf_counter()
    vectors, tokens = compute(texts)
    seconds = time.perf_counter() - started
    found = [
        {
            "embedding": vector,
            "meta_info": {
                "id": random_id(),
                "finish_reason": {"type": "stop"},
                "prompt_tokens": count,
                "e2e_latency": seconds,
            },
        }
        for vector, count in zip(vectors.tolist(), tokens)
    ]
    return found[0] if single else found


def embeddings(
    engine: Engine,
    texts: Sequence[EncoderInput] | Sequence[EncodeRequest],
    dimensions: int | None = None,
    *,
    prompt_name: str | None = None,
    truncate: bool = False,
    lora_path: AdapterNames = None,
    field: str = "prompt",
) -> Numbers:
    """Computes embeddings of texts, float32 [N, dimensions]. Also returns the number of tokens of
    each text.

    Args:
        texts: texts, or the result of `tokenize_texts` for them.
        lora_path: name of the adapter (LoRA) of all texts, or a list with one or None for each.
        field: name of the texts in the caller's request, for error messages.

    Raises:
        CapabilityError, ParameterError, EngineClosedError: see `encode`.
    """
    import numpy as np

    spec = require_encoder_spec(engine)
    if spec.classifier is not None:
        raise CapabilityError(
            f"{engine.model_name} gives scores or classes.", hint="Use score_pairs or classify."
        )
    if dimensions is not None and not 1 <= dimensions <= spec.width:
        raise ParameterError(
            "dimensions", f"{dimensions} is not between 1 and {spec.width}, which the model has."
        )
    prompt = find_prompt(spec, prompt_name)
    vectors, tokens = _compute_outputs(
        engine, texts, lora_path, prompt=prompt, truncate=truncate, field=field
    )
    if dimensions is not None:
        vectors = vectors[:, :dimensions]
    if spec.normalise:
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return vectors, tokens


def find_prompt(spec: EncoderSpec, name: str | None) -> str:
    """Returns the model's prompt with this name, or the default one for None. Raises ParameterError
    if the model has no such prompt.
    """
    if name is not None and name not in spec.prompts.named:
        names = ", ".join(map(repr, spec.prompts.named)) or "none"
        raise ParameterError(
            "prompt_name", f"{name!r:.60} is none of the model's prompts ({names})."
        )
    return spec.prompts.default if name is None else spec.prompts.named[name]


def score_text_pairs(
    engine: Engine,
    pairs: Sequence[tuple[str, str]],
    *,
    truncate: bool = False,
    lora_path: AdapterNames = None,
    field: str = "pairs",
) -> Numbers:
    """Computes a score for each pair of texts, float32 [N]. Also returns the number of tokens of
    each pair. Raises the errors of `score_pairs`.
    """
    classifier = _require_classifier(engine)
    _require_sequence(pairs, field)
    if len(classifier.labels) > 1:
        raise CapabilityError(
            f"{engine.model_name} has {len(classifier.labels)} labels.", hint="Use classify."
        )
    for index, pair in enumerate(pairs):
        if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
            raise ParameterError(
                f"{field}[{index}]", f"{pair!r:.60} is not a pair of texts. Give (query, document)."
            )
    texts = [(first, second) for first, second in pairs]
    logits, tokens = _compute_outputs(engine, texts, lora_path, truncate=truncate, field=field)
    return (logits[:, 0] if classifier.raw_score else _sigmoid(logits[:, 0])), tokens


def classify_texts(
    engine: Engine,
    texts: Sequence[EncoderInput],
    *,
    truncate: bool = False,
    lora_path: AdapterNames = None,
    field: str = "prompt",
) -> tuple[list[dict[str, Json]], list[int]]:
    """Returns the labels and probabilities of each text in the form of `classify`, and the number
    of tokens of each text.
    """
    shares, tokens = classifier_outputs(
        engine, texts, plain=False, truncate=truncate, lora_path=lora_path, field=field
    )
    labels = _require_classifier(engine).labels
    return [
        {"label": labels[int(row.argmax())], "probs": dict(zip(labels, row.tolist()))}
        for row in shares
    ], tokens


def classifier_outputs(
    engine: Engine,
    texts: Sequence[EncoderInput],
    *,
    plain: bool,
    truncate: bool = False,
    lora_path: AdapterNames = None,
    field: str = "prompt",
) -> Numbers:
    """Computes a classifier's outputs for texts, float32 [N, labels]. Also returns the number of
    tokens of each text.

    Args:
        plain: whether to return raw outputs (`reward`) instead of probabilities (`classify`).

    Raises:
        CapabilityError, ParameterError, EngineClosedError: see `reward`.
    """
    import numpy as np

    classifier = _require_classifier(engine)
    logits, tokens = _compute_outputs(engine, texts, lora_path, truncate=truncate, field=field)
    if plain:
        return logits, tokens
    if classifier.multi_label or logits.shape[1] == 1:
        return _sigmoid(logits), tokens
    exponents = np.exp(logits - logits.max(1, keepdims=True))
    return exponents / exponents.sum(1, keepdims=True), tokens


def prompt_to_texts(prompt: Texts) -> tuple[Any, bool]:  # a list of any texts
    """Returns the texts of a prompt, each a string or a list of token ids. Also returns whether the
    prompt is a single text instead of a list.
    """
    single = isinstance(prompt, str) or is_token_id_list(prompt)
    if not single:
        _require_sequence(prompt, "prompt")
    return [prompt] if single else prompt, single


def _require_sequence(given: object, field: str) -> None:
    """Raises ParameterError if a value isn't a sequence of texts."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise ParameterError(field, f"{type(given).__name__} is not a list. Give a list.")


def require_encoder_spec(engine: Engine) -> EncoderSpec:
    """Returns the specification of an engine's model. Raises CapabilityError if the model does not
    read texts.
    """
    spec = engine.core.encoder
    if spec is None:
        if engine.config.encoder_only:
            raise not_a_generator_error(engine.model_name, encoder_only=True)
        raise not_an_encoder_error(engine.model_name)
    return spec


def _require_classifier(engine: Engine) -> Classifier:
    classifier = require_encoder_spec(engine).classifier
    if classifier is None:
        raise CapabilityError(f"{engine.model_name} gives embeddings.", hint="Use encode.")
    return classifier


def _compute_outputs(
    engine: Engine,
    texts: Sequence[EncoderInput] | Sequence[EncodeRequest],
    lora_path: AdapterNames,
    *,
    truncate: bool,
    field: str,
    prompt: str = "",
) -> Numbers:
    """Computes the model's outputs for texts or pairs, float32 [N, width]. Also returns the number
    of tokens of each text or pair.
    """
    import numpy as np

    engine.core.gate.check_blocking_call("encode")
    requests = [each for each in texts if isinstance(each, EncodeRequest)]
    if not requests:
        given: Any = texts
        requests = tokenize_texts(
            engine.tokenizer,
            require_encoder_spec(engine),
            given,
            truncate=truncate,
            field=field,
            prompt=prompt,
        )
    if lora_path is not None:
        requests = _set_request_adapters(requests, lora_path)
    futures = [engine.core.submit_call(request) for request in requests]
    try:
        found = [future.result() for future in futures]
    except BaseException:
        for future in futures:
            future.cancel()
        raise
    return np.concatenate(found), [
        length for request in requests for length in request.lengths.tolist()
    ]


def _set_request_adapters(
    requests: Sequence[EncodeRequest], lora_path: str | Sequence[str | None]
) -> list[EncodeRequest]:
    """Adds the adapters with the given names to requests. Raises ParameterError unless there is one
    name per text.
    """
    count = sum(len(each.lengths) for each in requests)
    names = [lora_path] * count if isinstance(lora_path, str) else [*lora_path]
    if wrong := [name for name in names if not isinstance(name, str | None)]:
        raise ParameterError(
            "lora_path", f"{short_repr(wrong[0])} is no name of an adapter.", hint="Give its name."
        )
    if len(names) != count:
        raise ParameterError(
            "lora_path",
            f"has {len(names)} names for {count} texts.",
            hint="Give one for each, or one for all.",
        )
    rest = iter(names)
    return [
        msgspec.structs.replace(each, adapters=tuple(islice(rest, len(each.lengths))))
        for each in requests
    ]


def tokenize_texts(
    tokenizer: Tokenizer,
    spec: EncoderSpec,
    texts: Sequence[EncoderInput],
    *,
    truncate: bool,
    field: str,
    prompt: str,
) -> list[EncodeRequest]:
    """Tokenizes texts or pairs and returns them as requests. Each request is small enough for one
    message to the engine's process: see `build_encode_request`.
    """
    return [
        build_encode_request(
            texts[start : start + _TEXTS],
            tokenizer,
            spec,
            prompt=prompt,
            truncate=truncate,
            field=field,
            first=start,
        )
        for start in range(0, max(len(texts), 1), _TEXTS)
    ]


def _sigmoid(x: NDArray[np.float32]) -> NDArray[np.float32]:
    import numpy as np

    shares: NDArray[np.float32] = 0.5 * (1 + np.tanh(0.5 * x))
    return shares
