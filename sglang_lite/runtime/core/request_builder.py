"""Builds requests: converts prompts to token ids and checks parameters.

Independent of how requests run.
"""

from __future__ import annotations

import itertools
import random
import secrets
import struct
import time
from array import array
from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sglang_lite.constraints.json_schema.repeats import build_repeat_rules
from sglang_lite.errors import short_repr
from sglang_lite.program.nodes import Fork, Gen, Node, Select
from sglang_lite.protocol import Media, ParameterError, Prompt, RecordName, SamplingParams, Span
from sglang_lite.runtime.adapters.absent import reject_adapter_name
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.kv_cache.prefix_space import PrefixSpace
from sglang_lite.runtime.media.placeholders import NAMES, MediaFormat, no_media_error, prompt_spans
from sglang_lite.runtime.requests.bad_words import BadWords
from sglang_lite.runtime.requests.output_builder import (
    DrawnBy,
    Event,
    LoadedWeights,
    OutputBuilder,
    Sink,
)
from sglang_lite.runtime.requests.request import Request, Times
from sglang_lite.runtime.requests.request_media import RequestMedia
from sglang_lite.runtime.requests.resolved_params import ResolvedParams, resolve_params
from sglang_lite.runtime.requests.sample_seed import derive_sample_seed
from sglang_lite.runtime.structured_output.free_text import FreeText
from sglang_lite.runtime.structured_output.thinking import ThoughtFormat, ThoughtLimiter
from sglang_lite.runtime.tokens.image_span import MediaItem
from sglang_lite.runtime.tokens.prompt_end import count_end_tokens
from sglang_lite.runtime.tokens.token_log import TokenLog
from sglang_lite.runtime.tokens.tokenizer import Tokenizer
from sglang_lite.runtime.tokens.virtual_ids import find_virtual_positions, without_virtual_ids

if TYPE_CHECKING:
    from sglang_lite.runtime.core.submission import GenerateRequest
    from sglang_lite.runtime.models.lora.adapter import Adapter  # needs torch


class EncodedPrompt(NamedTuple):
    """Token ids of a prompt.

    Attributes:
        ids: the ids.
        media: images that virtual ids stand for.
        text_tokens: number of the last ids that the tokenizer has made of text; None if the caller
            gave the ids.
    """

    ids: Sequence[int]
    media: tuple[MediaItem, ...]
    text_tokens: int | None

    def put_into(self, request: GenerateRequest) -> GenerateRequest:
        """Returns a copy of a request, with this prompt."""
        return replace(request, prompt=self.ids, media=self.media, text_tokens=self.text_tokens)


class RequestBuilder:
    """Builds one engine's requests.

    Args:
        model_name: name of the model, for messages.
        tokenizer: tokenizer of the model.
        vocab_size: size of the model's vocabulary, padding included.
        eos_ids: tokens that end a generation.
        longest: maximum length of a sequence in tokens, prompt and answer.
        seed: base of the seeds of requests that set none; None for fresh randomness.
        all_special: whether every text can name special tokens.
        paced: whether deltas of streams may be sent at intervals instead of at every step.
        weight_version: name of the weights' version.
        media: format of images, videos and sounds in its prompts; None if the model takes none.
        recorded: names of the values that the engine can record for each token.

    Attributes:
        weights: current weights, shared by all requests.
        adapters: returns the adapter for the name in a request, if any. Raises ParameterError for
            an unknown name, or for any name if the engine has no adapters. None if names are not
            checked because the engine is another process.
        adapter_at_hand: returns whether a name's adapter is in memory.
        media: the argument of this name.
        now: clock for time limits on thoughts.
    """

    adapters: Callable[[str | None], Adapter | None] | None = staticmethod(reject_adapter_name)
    adapter_at_hand: Callable[[str | None], bool] | None = None
    # message if `complete_requests` fails unexpectedly
    incomplete: ClassVar[str] = "the adapter can't be read"
    now: Callable[[], float] = staticmethod(time.perf_counter)

    def __init__(
        self,
        model_name: str,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_ids: frozenset[int],
        longest: int,
        seed: int | None,
        *,
        all_special: bool = False,
        paced: bool = False,
        weight_version: str = "default",
        media: MediaFormat | None = None,
        recorded: Container[RecordName] = (),
    ) -> None:
        self._recorded = recorded
        self.weights = LoadedWeights(weight_version)
        self._paced = paced
        self.media = media
        self._model_name = model_name
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._longest = longest
        self._first_seed = seed
        self._all_special = all_special
        # seeded once: each system call would release the GIL
        self._fresh = random.Random(secrets.randbits(256))
        self._thoughts = lru_cache(64)(
            lambda kind: _make_thought_limiter(kind, self, tokenizer, vocab_size)
        )
        self._bad_words = lru_cache(64)(lambda texts: BadWords.of_texts(texts, tokenizer))
        self._ids = itertools.count()
        self._draws = itertools.count()

    def prompt_ids(self, prompt: Prompt | str | Sequence[int]) -> Sequence[int]:
        """Returns the token ids of a prompt.

        Raises:
            ParameterError: the prompt is empty, is neither text nor a list, or contains an image.
        """
        if isinstance(prompt, Prompt) and prompt.images:
            raise ParameterError(
                "prompt", "has images, which only generations, selections and programs read."
            )
        return self._encode_prompt(prompt).ids

    def _encode_prompt(self, prompt: Prompt | str | Sequence[int]) -> EncodedPrompt:
        """Encodes a prompt. Raises ParameterError if it is empty, or neither text nor a list."""
        if isinstance(prompt, str | Prompt):
            log = self.start_token_log(prompt)
            encoded = EncodedPrompt(log.ids(), log.media, log.count_text_tokens())
        elif isinstance(prompt, list | tuple | array):
            encoded = EncodedPrompt(prompt[:], (), None)
        else:
            raise ParameterError(
                "prompt", f"{type(prompt).__name__} is neither text nor a list of token ids."
            )
        _check_not_empty(encoded.ids)
        return encoded

    def encode_request(self, request: GenerateRequest) -> EncodedPrompt:
        """Returns the token ids and images of a request's prompt. Raises ParameterError like
        `start_token_log`.
        """
        encoded = self._encode_prompt(request.prompt)
        if encoded.text_tokens is None:  # the prompt was already encoded, possibly by the caller
            return EncodedPrompt(encoded.ids, request.media, request.text_tokens)
        return encoded

    def build_generation(self, request: GenerateRequest, sink: Sink) -> tuple[list[Request], bool]:
        """Builds the requests of a generation, one per sample. Also returns whether the requests
        are complete. If they are not, `complete_requests` must be called before submission.

        Args:
            request: what is to be generated.
            sink: callback that receives the events.

        Raises:
            ParameterError: the request can't run; see `validate_request`.
        """
        encoded = self.encode_request(request)
        params = self.resolve_with_defaults(request.params)
        build_repeat_rules(request.constraint, params.repeats)  # rejects bad rules now
        complete = self.has_adapter_in_memory(params)
        requests = self.build_requests(
            encoded.ids,
            params,
            sink,
            stream=request.stream,
            namespace=request.namespace,
            output_ids=request.output_ids,
            media=encoded.media,
            text_tokens=encoded.text_tokens,
            adapted=complete,
        )
        return requests, complete

    def complete_requests(self, requests: Sequence[Request], namespace: str) -> None:
        """Reads the adapter of a generation's requests. Not to be called on the loop's thread.

        Raises:
            ParameterError, ModelError: it is missing, or can't be read.
        """
        first = requests[0]
        space = PrefixSpace.in_namespace(namespace, self.find_params_adapter(first.params))
        for request in requests:
            request.space = space.start_at_invocation(first.tokens[: first.prompt_len])

    def validate_request(self, request: GenerateRequest) -> GenerateRequest:
        """Checks that a request can run, and returns it with its prompt as token ids and images.
        Raises ParameterError if it can't.
        """
        encoded = self.encode_request(request)
        params = self.resolve_with_defaults(request.params)
        build_repeat_rules(request.constraint, params.repeats)
        tokens = self.check_prompt_tokens(encoded.ids, params, encoded.media)
        self.check_output_ids(request.output_ids, len(tokens), params)
        if params.heal:
            _check_healing(params, request.output_ids, encoded.text_tokens)
        return encoded.put_into(request)

    def start_token_log(self, prompt: Prompt | str) -> TokenLog:
        """Creates the token log of a prompt, to which more can be appended.

        Raises:
            ParameterError: an image can't be read, the model reads none, or the numbers of images
                and placeholders differ.
        """
        given = prompt if isinstance(prompt, Prompt) else Prompt((Span(prompt),))
        spans = prompt_spans(given, self.media, self._model_name)
        return TokenLog(self._tokenizer, spans, all_special=self._all_special)

    def check_images(self, prompt: Prompt | str) -> None:
        """Raises ParameterError if the prompt contains a medium that the model doesn't take, or too
        many of one kind.
        """
        if isinstance(prompt, Prompt) and prompt.images:
            for kind in {image.kind for image in prompt.images}:
                if self.media is None or kind not in self.media.kinds:
                    raise no_media_error(kind, self._model_name)
            _check_media_counts(prompt.images, self.media)

    def build_requests(
        self,
        ids: Sequence[int],
        params: ResolvedParams,
        sink: Sink,
        *,
        stream: bool = False,
        namespace: str = "",
        score_from: int | None = None,
        output_ids: Sequence[int] = (),
        media: Sequence[MediaItem] = (),
        text_tokens: int | None = None,
        adapted: bool = True,
    ) -> list[Request]:
        """Builds the requests of a generation, one per sample; they are not started.

        Args:
            ids: token ids of the prompt.
            params: resolved parameters.
            sink: callback that receives the events.
            stream: whether to send deltas.
            namespace: namespace in the radix tree.
            score_from: first prompt position to score; None to follow `params`.
            output_ids: ids that the output begins with; if any, `Request.replay_given_output` must be called
                before submission.
            media: images of the virtual ids in the prompt, possibly followed by others.
            text_tokens: number of the prompt's last ids that the tokenizer has made of text; None
                if the caller gave the ids.
            adapted: whether to set their adapter, which may have to be read; if not, it must be set
                before submission.

        Raises:
            ParameterError: the prompt or the given ids are not valid; see `check_prompt_tokens` and
                `check_output_ids`.
        """
        tokens = self.check_prompt_tokens(ids, params, media)
        output = self.check_output_ids(output_ids, len(tokens), params)
        respelled = 0
        if params.heal:
            _check_healing(params, output_ids, text_tokens)
            if params.max_tokens:
                respelled = count_end_tokens(self._tokenizer, ids, text_tokens or 0)
        space = PrefixSpace.in_namespace(
            namespace, self.find_params_adapter(params) if adapted else None
        ).start_at_invocation(tokens)
        start = params.logprob_start_len if params.return_logprob else -1
        scored = score_from if score_from is not None else start if start >= 0 else None
        if (
            scored is not None
            and (find_virtual_positions(tokens, self._vocab_size) >= max(scored, 1)).any()
        ):
            raise ParameterError(
                "logprob_start_len",
                f"{scored:,} is before an image, whose tokens have no probability.",
                hint="Begin behind the last image.",
            )
        seen = RequestMedia.from_tokens(media, tokens, self._vocab_size) if media else None
        if seen is not None:
            _check_media_counts([item.medium for item in seen.items], self.media)
        requests = []
        for index in range(params.n):
            request = self._build_without_prompt(params, space, sink, stream=stream)
            self._set_prompt(request, tokens, index)
            if len(output):
                request.tokens = np.concatenate((tokens, output))
                request.replayed_count = len(output)
            request.score_from = scored
            request.respelled = respelled
            request.media = None if seen is None else replace(seen)
            requests.append(request)
        return requests

    def build_ahead(
        self, params: ResolvedParams, sink: Sink, *, stream: bool, namespace: str
    ) -> Request:
        """Builds a request of one sample without a prompt; `set_prompt_and_begin` supplies it.

        Raises:
            ParameterError: its adapter is missing.
        """
        return self._build_without_prompt(
            params,
            PrefixSpace.in_namespace(namespace, self.find_params_adapter(params)),
            sink,
            stream=stream,
        )

    def build_alike(self, request: Request, params: ResolvedParams, prompt: Ints) -> Request | None:
        """Builds a request with the adapter, the images and the priority of another one. Its sink
        has to be set.

        Args:
            request: the other request.
            params: parameters of the new request.
            prompt: prompt of the new request, which has all images of the other request.

        Returns:
            The new request, or None if its prompt leaves no room for an answer.
        """
        alike = self._build_without_prompt(params, request.space, _ignore_event, stream=False)
        if not self.set_prompt_and_begin(alike, prompt):
            return None
        alike.space = request.space
        alike.media = None if request.media is None else replace(request.media)
        alike.priority = request.priority
        return alike

    def has_adapter_in_memory(self, params: ResolvedParams) -> bool:
        """Returns whether requests with these parameters can be built without reading an adapter."""
        return self.adapter_at_hand is None or self.adapter_at_hand(_adapter_name(params))

    def find_params_adapter(self, params: ResolvedParams) -> Adapter | None:
        """Returns the adapter of requests with these parameters, or None if they name none. May
        read its files, so must not be called on the loop's thread unless the adapter is in memory.

        Raises:
            ParameterError, ModelError: it is missing, or can't be read.
        """
        return None if self.adapters is None else self.adapters(_adapter_name(params))

    def set_prompt_and_begin(self, request: Request, tokens: Ints) -> bool:
        """Sets the prompt of a request built by `build_ahead`. Returns False if that leaves no room
        for an answer.
        """
        if len(tokens) >= self._longest:
            return False
        self._set_prompt(request, tokens, 0)
        request.times, request.space = Times(), request.space.start_at_invocation(tokens)
        return True

    def replace_prompt_end(self, request: Request, tokens: Sequence[int]) -> bool:
        """Replaces the last tokens of a request's prompt by tokens with the same text, the last of
        which may continue after the prompt's text. Returns False if that leaves no room for an
        answer.

        Args:
            request: request that is not submitted yet, with `respelled` tokens.
            tokens: the tokens that replace them.
        """
        kept = request.tokens[: request.prompt_len - request.respelled]
        prompt = np.concatenate((kept, np.array(tokens, dtype=np.int32)))
        if len(prompt) >= self._longest:
            return False
        request.tokens = prompt
        request.prompt_len = len(prompt)
        request.limit = min(len(prompt) + request.params.max_tokens, self._longest)
        return True

    def _build_without_prompt(
        self, params: ResolvedParams, space: PrefixSpace, sink: Sink, *, stream: bool
    ) -> Request:
        number = next(self._ids)
        ends = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else self._eos_ids
        )
        output = OutputBuilder(
            number,
            self._tokenizer,
            params,
            ends,
            sink,
            stream=stream,
            drawn_by=DrawnBy(self.weights),
        )
        output.thoughts = (
            self._thoughts(params.reasoning_format) if params.has_thought_limit else None
        )
        return Request(
            id=number,
            tokens=_NO_TOKENS,
            prompt_len=0,
            limit=0,
            params=params,
            seed=0,
            output=output,
            bad_words=self._bad_words(params.bad_words) if params.bad_words else None,
            space=space,
            paced=stream and self._paced,
        )

    def _set_prompt(self, request: Request, tokens: Ints, sample: int) -> None:
        params = request.params
        count = len(tokens)
        request.tokens = tokens
        request.prompt_len = count
        request.seed = self._seed_of_sample(params, sample)
        request.limit = (
            count + 1 if params.scores_next_token else min(count + params.max_tokens, self._longest)
        )

    def resolve_with_defaults(self, params: SamplingParams) -> ResolvedParams:
        """Resolves parameters with the engine's defaults. Raises ParameterError if a value is
        invalid.
        """
        resolved = resolve_params(params, self._vocab_size)
        if self.adapters is not None and self.has_adapter_in_memory(resolved):
            self.find_params_adapter(resolved)  # raises now if it is missing
        if resolved.has_thought_limit:
            self._thoughts(resolved.reasoning_format)  # raises now if the template has no thoughts
        self._bad_words(resolved.bad_words)  # raises now if they can't be encoded
        for name in resolved.recorded_fields:
            if name not in self._recorded:
                hint = f"Start it with enable_return_{name}=True."
                raise ParameterError(f"return_{name}", "this engine records none.", hint=hint)
        return resolved

    def resolve_node_params(self, node: Gen | Select) -> ResolvedParams:
        """Resolves the parameters of a generation or a selection. A selection's only parameter is
        its adapter. Raises ParameterError like `resolve_with_defaults`.
        """
        return self.resolve_with_defaults(
            node.params if isinstance(node, Gen) else SamplingParams(lora_path=node.lora_path)
        )

    def invalid_node_errors(self, nodes: Sequence[Node]) -> dict[int, ParameterError]:
        """Returns the errors of generations with invalid parameters and of selections with missing
        adapters, by node index. The error of a fork is the first one in its branches.
        """
        errors: dict[int, ParameterError] = {}
        for i, node in enumerate(nodes):
            if isinstance(node, Gen | Select):
                try:
                    self.resolve_node_params(node)
                except ParameterError as error:
                    errors[i] = error
            elif isinstance(node, Fork):
                for branch in node.branches:
                    if inside := self.invalid_node_errors(branch):
                        errors.setdefault(i, next(iter(inside.values())))
        return errors

    def check_prompt_tokens(
        self, ids: Sequence[int], params: ResolvedParams, media: Sequence[MediaItem] = ()
    ) -> Ints:
        """Returns the token ids of a prompt as an int32 array, checked against the vocabulary and
        the maximum length.

        Args:
            ids: token ids.
            params: resolved parameters.
            media: images of virtual ids; without any, no id may be virtual.

        Raises:
            ParameterError: the prompt is empty, an id is not in the vocabulary, or the prompt
                leaves no room for an answer.
        """
        _check_not_empty(ids)
        if media:  # virtual ids come only from the images
            tokens = np.array(ids, dtype=np.int32)
            if real := without_virtual_ids(tokens, self._vocab_size).tolist():
                self._validate_token_ids("input_ids", real)
        else:
            tokens = self._validate_token_ids("input_ids", ids)
        if self.media is not None:
            self.media.check_sound_comes_first(tokens, media)
        room = self._longest - len(ids)
        if room < (1 if params.max_tokens else 0):
            raise ParameterError(
                "prompt",
                f"{len(ids):,} tokens long; {self._model_name} takes {self._longest:,}, the answer included.",
                hint="Shorten it. Where the model itself takes more, raise context_length and max_total_tokens.",
            )
        if params.return_logprob and params.logprob_start_len > len(ids):
            raise ParameterError(
                "logprob_start_len",
                f"{params.logprob_start_len:,} is beyond the prompt's {len(ids):,} tokens.",
            )
        return tokens

    def check_output_ids(
        self, output_ids: Sequence[int], prompt_len: int, params: ResolvedParams
    ) -> Ints:
        """Checks the ids that an output begins with, and returns them as an int32 array.

        Args:
            output_ids: ids given by the caller.
            prompt_len: number of prompt tokens.
            params: resolved parameters.

        Raises:
            ParameterError: an id is not in the vocabulary, there are too many ids, or several
                samples are requested.
        """
        if not isinstance(output_ids, list | tuple | array | np.ndarray):
            raise ParameterError(
                "output_ids", f"{type(output_ids).__name__} is no list of token ids."
            )
        if not len(output_ids):
            return _NO_TOKENS
        if params.n > 1:
            raise ParameterError(
                "output_ids", f"can continue one output only, and n is {params.n}.", hint="Use n=1."
            )
        room = min(params.max_tokens, self._longest - prompt_len)
        if len(output_ids) > room:
            raise ParameterError(
                "output_ids",
                f"{len(output_ids):,} ids; the output has at most {room:,} (max_tokens).",
            )
        return self._validate_token_ids("output_ids", output_ids)

    def _validate_token_ids(self, name: str, ids: Sequence[int]) -> Ints:
        tokens = _to_integer_array(ids)
        vocab_size = self._vocab_size
        # as unsigned integers, negative ids are large
        if tokens is None or int(tokens.view(f"u{tokens.itemsize}").max()) >= vocab_size:
            bad = next((i for i in ids if type(i) is not int or not 0 <= i < vocab_size), ids)
            raise ParameterError(
                name, f"{short_repr(bad)} is no token id (0 to {vocab_size - 1:,})."
            )
        return tokens.astype(np.int32, copy=False)

    def _seed_of_sample(self, params: ResolvedParams, index: int) -> int:
        if params.seed is not None:
            return derive_sample_seed(params.seed, index)
        if self._first_seed is None:
            return self._fresh.getrandbits(64)
        return (self._first_seed << 32) + next(self._draws)


def _make_thought_limiter(
    model_type: tuple[str, ...], builder: RequestBuilder, tokenizer: Tokenizer, vocab_size: int
) -> ThoughtLimiter:
    """Creates the thought limiter for the configured model type or, if `model_type` is empty, for
    the one detected in the chat template. Raises ParameterError like
    `ThoughtFormat.for_model_type`.
    """
    form = ThoughtFormat.for_model_type(model_type[0] if model_type else None, tokenizer)
    return ThoughtLimiter(form, FreeText(vocab_size), lambda: builder.now())


def _ignore_event(event: Event) -> None:
    """Discards an event. A sink for requests whose events nobody reads."""


_NO_TOKENS: Ints = np.empty(0, dtype=np.int32)


def _adapter_name(params: ResolvedParams) -> str | None:
    """Returns the name of the requested adapter, or None if no adapter is requested."""
    return params.lora_path[0] if params.lora_path else None


def _to_integer_array(ids: Sequence[int]) -> NDArray[np.integer] | None:
    """Converts ids to a one-dimensional integer array; returns None if an id is not an integer or
    exceeds 32 bits.
    """
    if isinstance(ids, array | np.ndarray):
        tokens = np.asarray(ids)
        return tokens if tokens.dtype.kind == "i" and tokens.ndim == 1 else None
    tokens = np.empty(len(ids), dtype=np.int32)
    try:
        # five times as fast as numpy's conversion of a list
        struct.pack_into(f"{len(ids)}i", tokens.data, 0, *ids)
    except struct.error:
        return None
    small = np.flatnonzero(tokens < 2).tolist()  # booleans are packed as 0 and 1
    return None if any(isinstance(ids[i], bool) for i in small) else tokens


def _check_healing(
    params: ResolvedParams, output_ids: Sequence[int], text_tokens: int | None
) -> None:
    """Raises ParameterError if a generation can't be healed."""
    if text_tokens is None:
        raise ParameterError(
            "heal", "the prompt is given as token ids, which are kept.", hint="Give it as text."
        )
    other = ""
    if len(output_ids):
        other = "output_ids"
    elif params.confidence:
        other = "confidence"
    elif params.return_logprob and params.logprob_start_len >= 0:
        other = "log-probabilities of the prompt"
    if other:
        raise ParameterError("heal", f"can't be combined with {other}.", hint=f"Leave {other} out.")


def _check_not_empty(ids: Sequence[int]) -> None:
    if not len(ids):
        raise ParameterError(
            "prompt", "is empty.", hint="A model continues text: give it at least one token."
        )


def _check_media_counts(images: Sequence[Media], media: MediaFormat | None) -> None:
    """Raises ParameterError if there are more media of a kind than the limit for that kind."""
    for kind, each in ({} if media is None else media.kinds).items():
        count = sum(image.kind == kind for image in images)
        if each.most is not None and count > each.most:
            raise ParameterError(
                "prompt", f"has {count} {NAMES[kind]}s, and {each.most} is the limit."
            )
