"""`Engine.encode`, `score_pairs`, `classify` and `reward`: the calls of models that read texts and generate none.

numpy is imported where it is used, as an engine's process is started before that.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from sglang_lite.protocol import CapabilityError, ParameterError
from sglang_lite.protocol.anything import Json
from sglang_lite.random_ids import random_id
from sglang_lite.runtime.embedding.request import Readable, are_ids, reads_no_text, tokenised
from sglang_lite.runtime.embedding.spec import Classifier, EncoderSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from sglang_lite.engine.engine import Engine

_TEXTS = 4096  # that cross to the engine's process at a time
Texts: TypeAlias = str | Sequence[int] | Sequence[str | Sequence[int]]  # one or several, each a text or token ids


def encode(
    self: Engine,
    prompt: Texts,
    *,
    dimensions: int | None = None,
    prompt_name: str | None = None,
    truncate: bool = False,
) -> Any:  # a dictionary, or a list of them: by the shape of the prompt
    """Embeddings of texts, as the model's folder says how they are made (mean, first or last token; normalised).

    Args:
        prompt: a text, or several; token ids in place of a text are read as they are.
        dimensions: the first numbers of each vector alone, normalised again where the model normalises; None for all.
            For models that were trained so ("Matryoshka").
        prompt_name: of the folder's prompts (`config_sentence_transformers.json`): that one goes before each text, an
            instruction mostly. None for its default one, which most folders have not.
        truncate: cut texts that are longer than the model reads, instead of refusing them.

    Returns:
        As SGLang's: a dictionary with `embedding` (a list of floats) and `meta_info`; a list of them for a list.

    Raises:
        CapabilityError: the model gives no embeddings.
        ParameterError: no texts; one is empty or too long; more dimensions than the model has.
        EngineClosedError: the engine is closed.
    """
    return encoded(self, prompt, dimensions, prompt_name=prompt_name, truncate=truncate)


def encoded(
    engine: Engine,
    prompt: Texts,
    dimensions: int | None = None,
    *,
    prompt_name: str | None = None,
    truncate: bool = False,
    field: str = "prompt",
) -> Any:  # as `encode`'s
    """`encode`, where the caller calls its prompt something else."""
    texts, single = _several(prompt)
    started = time.perf_counter()
    found = embeddings(engine, texts, dimensions, prompt_name=prompt_name, truncate=truncate, field=field)
    return _native(*found, time.perf_counter() - started, single=single)


def rewarded(engine: Engine, prompt: Texts, *, truncate: bool = False, field: str = "prompt") -> Any:  # as `encode`'s
    """`reward` in the shape of `encode`, which is SGLang's: a text's numbers stand in place of its vector."""
    texts, single = _several(prompt)
    started = time.perf_counter()
    found = label_numbers(engine, texts, plain=True, truncate=truncate, field=field)
    return _native(*found, time.perf_counter() - started, single=single)


def _native(vectors: NDArray[np.float32], tokens: Sequence[int], seconds: float, *, single: bool) -> Any:
    found = [
        {
            "embedding": vector,
            "meta_info": {
                "id": random_id(), "finish_reason": {"type": "stop"}, "prompt_tokens": count,
                "e2e_latency": seconds,
            },
        }
        for vector, count in zip(vectors.tolist(), tokens)
    ]  # fmt: skip
    return found[0] if single else found


def embeddings(
    engine: Engine,
    texts: Sequence[Readable],
    dimensions: int | None = None,
    *,
    prompt_name: str | None = None,
    truncate: bool = False,
    field: str = "prompt",
) -> tuple[NDArray[np.float32], list[int]]:
    """float32 [N, dimensions] of texts, and the tokens of each.

    Args:
        field: what the caller calls the texts, for messages.

    Raises:
        As `encode`.
    """
    import numpy as np

    spec = _spec(engine)
    if spec.classifier is not None:
        raise CapabilityError(f"{engine.model_name} gives scores or classes.", hint="Use score_pairs or classify.")
    if dimensions is not None and not 1 <= dimensions <= spec.width:
        raise ParameterError("dimensions", f"{dimensions} is not between 1 and {spec.width}, which the model has.")
    if prompt_name is not None and prompt_name not in spec.prompts.named:
        names = ", ".join(map(repr, spec.prompts.named)) or "none"
        raise ParameterError("prompt_name", f"{prompt_name!r:.60} is none of the model's prompts ({names}).")
    prompt = spec.prompts.default if prompt_name is None else spec.prompts.named[prompt_name]
    vectors, tokens = _read(engine, texts, prompt=prompt, truncate=truncate, field=field)
    if dimensions is not None:
        vectors = vectors[:, :dimensions]
    if spec.normalise:
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return vectors, tokens


def score_pairs(self: Engine, pairs: Sequence[tuple[str, str]], *, truncate: bool = False) -> list[float]:
    """Scores of pairs of texts (a query and a document) by a cross-encoder: between 0 and 1, or as the model gives
    them where its config says so.

    Args:
        pairs: at least one.
        truncate: cut pairs that are longer than the model reads, the longer text of each first.

    Raises:
        CapabilityError: the model gives no single score.
        ParameterError: no pairs; a text is empty, or a pair too long.
        EngineClosedError: the engine is closed.
    """
    scores: list[float] = pair_scores(self, pairs, truncate=truncate)[0].tolist()
    return scores


def pair_scores(
    engine: Engine, pairs: Sequence[tuple[str, str]], *, truncate: bool = False, field: str = "pairs"
) -> tuple[NDArray[np.float32], list[int]]:
    """float32 [N] scores of pairs, and the tokens of each. Raises as `score_pairs`."""
    classifier = _classifier(engine)
    _check_several(pairs, field)
    if len(classifier.labels) > 1:
        raise CapabilityError(f"{engine.model_name} has {len(classifier.labels)} labels.", hint="Use classify.")
    for index, pair in enumerate(pairs):
        if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
            raise ParameterError(f"{field}[{index}]", "is no pair of texts.")
    logits, tokens = _read(engine, [(first, second) for first, second in pairs], truncate=truncate, field=field)
    return (logits[:, 0] if classifier.plain else _sigmoid(logits[:, 0])), tokens


def classify(self: Engine, prompt: Texts, *, truncate: bool = False) -> Any:  # as `encode`'s
    """Probabilities of a classifier's labels.

    Args:
        prompt, truncate: as of `encode`.

    Returns:
        A dictionary with `label` (the likeliest) and `probs` (by label); a list of them for a list. Where labels don't
        exclude each other, each probability is its own.

    Raises:
        CapabilityError: the model has no labels.
        ParameterError, EngineClosedError: as `encode`.
    """
    texts, single = _several(prompt)
    found = classes(self, texts, truncate=truncate)[0]
    return found[0] if single else found


def reward(self: Engine, prompt: Texts, *, truncate: bool = False) -> Any:  # as `encode`'s
    """Numbers of a reward model, as it gives them: no sigmoid, no softmax.

    Args:
        prompt: a conversation as the model's chat template writes it, or several. In a text the template's special
            tokens are text like any other: `engine.tokenizer.encode(text)` gives ids in which they are tokens.
        truncate: as of `encode`.

    Returns:
        A number, or for a model of several labels a list of them; a list of those for several conversations.

    Raises:
        CapabilityError: the model gives embeddings.
        ParameterError, EngineClosedError: as `encode`.
    """
    texts, single = _several(prompt)
    found, _ = label_numbers(self, texts, plain=True, truncate=truncate)
    numbers = found[:, 0].tolist() if found.shape[1] == 1 else found.tolist()
    return numbers[0] if single else numbers


def classes(
    engine: Engine, texts: Sequence[Readable], *, truncate: bool = False, field: str = "prompt"
) -> tuple[list[dict[str, Json]], list[int]]:
    """Labels of texts as `classify` gives them, and the tokens of each text."""
    shares, tokens = label_numbers(engine, texts, plain=False, truncate=truncate, field=field)
    labels = _classifier(engine).labels
    return [{"label": labels[int(row.argmax())], "probs": dict(zip(labels, row.tolist()))} for row in shares], tokens


def label_numbers(
    engine: Engine, texts: Sequence[Readable], *, plain: bool, truncate: bool = False, field: str = "prompt"
) -> tuple[NDArray[np.float32], list[int]]:
    """float32 [N, labels]: numbers of texts by label, and the tokens of each text.

    Args:
        plain: as the model gives them (`reward`); else as probabilities (`classify`).

    Raises:
        As `reward`.
    """
    import numpy as np

    classifier = _classifier(engine)
    logits, tokens = _read(engine, texts, truncate=truncate, field=field)
    if plain:
        return logits, tokens
    if classifier.several or logits.shape[1] == 1:
        return _sigmoid(logits), tokens
    exponents = np.exp(logits - logits.max(1, keepdims=True))
    return exponents / exponents.sum(1, keepdims=True), tokens


def _several(prompt: Texts) -> tuple[Any, bool]:
    """The texts of a prompt, each a text or ids, and whether it is one alone."""
    single = isinstance(prompt, str) or are_ids(prompt)
    if not single:
        _check_several(prompt, "prompt")
    return [prompt] if single else prompt, single


def _check_several(given: object, field: str) -> None:
    """Raises ParameterError: neither a list nor anything like it."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise ParameterError(field, f"{type(given).__name__} is no list.")


def _spec(engine: Engine) -> EncoderSpec:
    spec = engine.core.encoder
    if spec is None:
        raise reads_no_text(engine.model_name)
    return spec


def _classifier(engine: Engine) -> Classifier:
    classifier = _spec(engine).classifier
    if classifier is None:
        raise CapabilityError(f"{engine.model_name} gives embeddings.", hint="Use encode.")
    return classifier


def _read(
    engine: Engine, texts: Sequence[Readable], *, truncate: bool, field: str, prompt: str = ""
) -> tuple[NDArray[np.float32], list[int]]:
    """The numbers of texts or pairs: float32 [N, width], and the tokens of each."""
    import numpy as np

    engine.core.check_wait("encode")
    spec = _spec(engine)
    requests = [
        tokenised(
            texts[start : start + _TEXTS], engine.tokenizer, spec, prompt=prompt, truncate=truncate, field=field,
            first=start,
        )
        for start in range(0, max(len(texts), 1), _TEXTS)
    ]  # fmt: skip
    futures = [engine.core.encode(request) for request in requests]
    try:
        found = [future.result() for future in futures]
    except BaseException:
        for future in futures:
            future.cancel()
        raise
    return np.concatenate(found), [length for request in requests for length in request.lengths.tolist()]


def _sigmoid(x: NDArray[np.float32]) -> NDArray[np.float32]:
    import numpy as np

    shares: NDArray[np.float32] = 0.5 * (1 + np.tanh(0.5 * x))
    return shares
