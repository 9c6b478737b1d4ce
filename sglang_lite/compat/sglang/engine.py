"""`sgl.Engine`: an engine with the methods and settings of SGLang's offline engine."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import queue
import shutil
import warnings
import weakref
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeAlias, TypeVar, overload

from sglang_lite.compat.sglang import absent_calls
from sglang_lite.compat.sglang.answers import Answer, Classification, Embedding, Generates
from sglang_lite.compat.sglang.launch_hooks import read_server_args, reject_launch_hooks
from sglang_lite.compat.sglang.session_run import CallerSessions, SessionRun
from sglang_lite.engine import embedding, weights
from sglang_lite.engine import engine as base
from sglang_lite.engine.embedding import AdapterNames, Texts
from sglang_lite.engine.given_adapters import write_adapter_folder
from sglang_lite.errors import short_repr
from sglang_lite.lang.media import fetch_medium, load_file, load_image
from sglang_lite.process.random_ids import random_id
from sglang_lite.protocol import ChoiceScore, Media, MediaKind, ParameterError
from sglang_lite.protocol.anything import Json
from sglang_lite.runtime.calls import RecordExperts
from sglang_lite.runtime.config import FIELDS, shows_fields, takes_fields
from sglang_lite.runtime.core.submission import check_field_type
from sglang_lite.server.sessions import OpenSession, Session
from sglang_lite.server.sglang.labels import ScoreResult, parse_score_arguments
from sglang_lite.server.sglang.request import (
    NativeRequest,
    read_request,
    unused_kv_hints,
    unused_logprob_fields,
)
from sglang_lite.server.sglang.run import NativeRun, Post
from sglang_lite.server.sglang.server_args import translate_engine_settings

if TYPE_CHECKING:
    import torch

    from sglang_lite.engine.core import Core
    from sglang_lite.runtime.requests.output_builder import Event

P = ParamSpec("P")
T = TypeVar("T")
_OneText: TypeAlias = str | Sequence[int]
_Several: TypeAlias = list[str] | tuple[str, ...] | Sequence[Sequence[int]]


def _takes(
    reader: Callable[P, object],
) -> Callable[[Callable[..., T]], Callable[Concatenate[Engine, P], T]]:
    """Returns a decorator that gives a method the signature of `reader`, the function that reads
    the method's arguments.
    """

    def with_signature(method: Callable[..., T]) -> Callable[Concatenate[Engine, P], T]:
        this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = inspect.signature(reader).parameters.values()
        method.__dict__["__signature__"] = inspect.Signature(
            [this, *parameters], return_annotation="Any"
        )
        return method

    return with_signature


def _generates(method: Callable[..., object]) -> Generates[Answer, list[Answer], Stream]:
    typed: Any = _takes(read_request)(method)
    return typed  # type: ignore[no-any-return] # a method, which the caller's `self` is bound to


def _generates_async(
    method: Callable[..., object],
) -> Generates[
    Coroutine[Any, Any, Answer], Coroutine[Any, Any, list[Answer]], Coroutine[Any, Any, AsyncStream]
]:
    typed: Any = _takes(read_request)(method)
    return typed  # type: ignore[no-any-return] # as above


def _read_media_fields(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the arguments of `generate` with images, videos and sounds loaded. Blocks while it
    reads files and fetches URLs. Raises the same errors as `_with_bytes`.
    """
    given = {
        name: _with_bytes(fields[name], kind)
        for name, kind in _MEDIA.items()
        if fields.get(name) is not None
    }
    return {**fields, **given}


def _with_bytes(given: object, kind: MediaKind) -> object:
    """Loads images, videos or sounds passed to `generate`: reads files and fetches URLs. Data URLs
    and base64 are returned unchanged.

    Raises:
        ParameterError: a file doesn't exist or can't be read, or an address can't be fetched.
    """
    if isinstance(given, list | tuple):
        return [_with_bytes(each, kind) for each in given]
    url = given.get("url") if isinstance(given, dict) else given
    untold = "" if kind == "image" else f"{kind}/*"
    if isinstance(url, str) and (image := Media(url=url, media_type=untold)).address:
        return fetch_medium(image)
    if (
        given is None
        or isinstance(given, dict | Media)
        or (isinstance(given, str) and not _is_path(given))
    ):
        return given
    return load_image(given) if kind == "image" else load_file(given, kind)


def _is_path(text: str) -> bool:
    """Returns True if a text is treated as a file name: the file exists, or the text has a dot and
    is neither an address nor a data URL. Base64 never has a dot.
    """
    return os.path.isfile(text) or (
        "." in text and "://" not in text and not text.startswith("data:")
    )


_MEDIA: dict[str, MediaKind] = {"image_data": "image", "video_data": "video", "audio_data": "audio"}


class Engine(base.Engine):
    __doc__ = f"""Engine with a loaded model: a backend of programs (`sgl.set_default_backend`, `run(backend=…)`), or
    used by itself.

    Args:
{FIELDS}

    SGLang's ServerArgs (`model_path` …) are accepted, too; docs/compatibility.md lists the meaning of each. A record of
    them is `server_args`, and the only argument then.

    Raises:
        ParameterError: a parameter is unknown, or has an invalid value.
        ModelError: the model can't be found, read or run.
    """

    @overload
    @takes_fields
    def __init__(self, model: str = "", **config: Any) -> None: ...  # fields of EngineConfig
    @overload
    def __init__(self, model: os.PathLike[str] | None, **config: Any) -> None: ...  # the same
    @overload
    def __init__(self, *, model_path: str, **server_args: Any) -> None: ...  # SGLang's names
    @overload
    def __init__(self, *, server_args: object) -> None: ...  # a record of these
    @shows_fields
    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        **config: Any,  # fields of EngineConfig, whose types `takes_fields` adds, and ServerArgs
    ) -> None:
        given = config if model is None else {**config, "model": model}
        if "server_args" in given:
            given = read_server_args(given)
        super().__init__(**translate_engine_settings(given))

    def __init_subclass__(cls, **options: Any) -> None:  # of its bases
        super().__init_subclass__(**options)
        reject_launch_hooks(vars(cls))

    def start_expert_distribution_record(self) -> None:
        """Starts counting the token rows that are routed to each expert. Needs
        `expert_distribution_recorder_mode="stat"`.

        Raises:
            CapabilityError: experts are not counted, or the model has none.
            EngineClosedError: the engine is closed.
        """
        self.answer(RecordExperts("start"))

    def stop_expert_distribution_record(self) -> None:
        """Stops the count that `start_expert_distribution_record` began. Raises the same errors as
        `dump_expert_distribution_record`.
        """
        self.answer(RecordExperts("stop"))

    def dump_expert_distribution_record(self) -> dict[str, list[list[int]]]:
        """Returns how many token rows were routed to each expert. Counts from the last
        `start_expert_distribution_record` until the count was stopped, or until now.

        Returns:
            `logical_count`: for each layer, the number of rows of each expert; [] for a layer
            without experts. On a GPU, rows that pad a graph's batch are counted, too. As JSON, the
            result is a value of `init_expert_location`.

        Raises:
            ParameterError: no count has been started.
            CapabilityError: experts are not counted.
            EngineClosedError: the engine is closed.
        """
        return {"logical_count": self.answer(RecordExperts("dump"))}

    # -------------------------------------------------------------------------------------- weights

    def update_weights_from_disk(
        self, model_path: str, load_format: str | None = None, weight_version: str | None = None
    ) -> None:
        """Replaces the weights with those of a checkpoint; see `engine.weights.update_from_disk`."""
        weights.update_from_disk(
            self, model_path, load_format=load_format, weight_version=weight_version
        )

    def update_weights_from_tensor(
        self,
        # mapping or pairs, as of `update_from_tensors`; SGLang's buckets are dicts of other things
        named_tensors: Any,
        load_format: str | None = None,
        flush_cache: bool = True,
        weight_version: str | None = None,
    ) -> None:
        """Replaces some or all weights with tensors; see `engine.weights.update_from_tensors`."""
        weights.update_from_tensors(
            self,
            named_tensors,
            load_format=load_format,
            flush_cache=flush_cache,
            weight_version=weight_version,
        )

    init_weights_update_group = weights.init_update_group
    update_weights_from_distributed = weights.update_from_group
    update_weight_version = weights.update_weight_version
    destroy_weights_update_group = weights.destroy_update_group
    get_weights_by_name = weights.read_weights
    check_weights = weights.check_weights
    sleep = weights.sleep
    wake = weights.wake
    is_sleeping = weights.is_sleeping
    release_memory_occupation = weights.release_memory_occupation
    resume_memory_occupation = weights.resume_memory_occupation
    pause_generation = weights.pause_generation
    continue_generation = weights.continue_generation
    begin_weight_update = weights.begin_update
    end_weight_update = weights.end_update

    # ------------------------------------------------------------------------------------- adapters

    async def async_load_lora_adapter(
        self, lora_name: str, lora_path: str | os.PathLike[str], pinned: bool = False
    ) -> None:
        """Registers an adapter like `load_lora_adapter`, for asyncio."""
        await asyncio.to_thread(self.load_lora_adapter, lora_name, lora_path, pinned=pinned)

    def load_lora_adapter_from_tensors(
        self,
        lora_name: str,
        tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
        config_dict: Mapping[str, Any],  # of peft: JSON, or sets of texts
        load_format: str | None = None,
        *,
        pinned: bool = False,
    ) -> None:
        """Registers an adapter like `load_lora_adapter`, but from tensors instead of a folder. The
        tensors stay in the host's memory until the adapter is unloaded.

        Args:
            lora_name: name of the adapter.
            tensors: matrices of the adapter, by their names in peft's `adapter_model.safetensors`.
            config_dict: content of the adapter's `adapter_config.json`.
            load_format: None, or "flattened_bucket" for SGLang's `flattened_tensor` with its
                `metadata`.
            pinned: whether the adapter is read immediately and stays on the device.

        Raises:
            ParameterError: an argument is invalid; see also `load_lora_adapter`.
            ModelError, EngineClosedError: see `load_lora_adapter`.
        """
        if load_format not in (None, "flattened_bucket"):
            raise ParameterError(
                "load_format",
                f"{load_format!r} is not for tensors.",
                hint='Use "flattened_bucket".',
            )
        if load_format is not None:
            from sglang_lite.runtime.models.weights.given import (  # needs torch
                unpack_flattened_bucket,
            )

            tensors = unpack_flattened_bucket(tensors)
        folder = write_adapter_folder(tensors, config_dict)
        remove = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        try:
            self.load_lora_adapter(lora_name, folder, pinned=pinned)
        except BaseException:
            remove()
            raise
        self._given_adapters[lora_name] = remove

    def unload_lora_adapter(self, lora_name: str) -> None:
        """Forgets an adapter, as `engine.engine.Engine` documents, and frees its tensors if it came
        as tensors.
        """
        super().unload_lora_adapter(lora_name)
        remove = self._given_adapters.pop(lora_name, None)
        if remove is not None:
            remove()

    @cached_property
    def _given_adapters(self) -> dict[str, Callable[[], object]]:
        """Adapters that came as tensors: for each name, a function that removes the adapter's
        folder.
        """
        return {}

    async def async_unload_lora_adapter(self, lora_name: str) -> None:
        """Forgets an adapter like `unload_lora_adapter`, for asyncio."""
        await asyncio.to_thread(self.unload_lora_adapter, lora_name)

    # ------------------------------------------------------------------------------------ processes

    def get_all_child_pids(self) -> list[int]:
        """Returns the ids of the engine's processes on this machine: the process of each replica,
        and those of its other ranks. Empty with `in_process=True`.

        Raises:
            EngineClosedError: the engine is closed.
        """
        beside = [
            each["pid"]
            for each in self.stats().get("ranks", ())
            if each["rank"] and "pid" in each and not each.get("node")
        ]
        return [*self.core.pids, *beside]

    update_weights_from_ipc = absent_calls.update_weights_from_ipc
    save_sharded_model = absent_calls.save_sharded_model
    save_remote_model = absent_calls.save_remote_model
    collective_rpc = absent_calls.collective_rpc
    attach_tokenizer_worker = staticmethod(absent_calls.attach_tokenizer_worker)

    # ----------------------------------------------------------------------------------- generation

    @_generates
    def generate(self, *args: Any, **fields: Any) -> Any:  # `_generates` has the types
        """Generates text like SGLang's offline engine.

        Args:
            prompt, input_ids: exactly one of the two; a list of prompts makes a batch, and so does
                `n` > 1.
            sampling_params: parameters for all prompts, or a list with those of each prompt;
                `read_sampling` of server/sglang/request.py has the keys.
            return_logprob: whether to report log-probabilities of generated tokens. One value for
                all prompts, or a list, like the arguments below.
            logprob_start_len: first position in the prompt whose log-probability is also reported;
                -1 for none.
            top_logprobs_num: number k of most likely tokens to report at each position.
            token_ids_logprob: ids whose log-probabilities are reported at each position.
            return_text_in_logprobs: whether to report the text of each token.
            return_confidence: whether to report the model's own log-probability of each generated
                token, and that of all tokens that its constraint allows, as `output_model_logprobs`
                and `output_allowed_logprobs`.
            return_prompt_token_ids: whether to report the ids of the prompt's tokens, as
                `prompt_token_ids` beside `output_ids`.
            return_routed_experts: whether to report the experts of each token except the last, as
                `routed_experts` in `meta_info`: base64 of int32 [tokens, layers, experts of a
                token]. Needs an engine with `enable_return_routed_experts`.
            return_hidden_states: whether to report the hidden states of tokens after the last norm,
                as `hidden_states` in `meta_info`: a list with one entry for the whole prompt, then
                one for each generated token. Needs an engine with `enable_return_hidden_states`.
            lora_path: name of the adapter (LoRA) to generate with; None for none. One for all
                prompts, or a list.
            custom_logit_processor: function `processor(token_ids, logits) -> logits`, called for
                every token, on the engine's thread, which is slow. SGLang's pickled classes are
                rejected.
            rid: name of the request, for `abort`; in a batch, one name makes name_0, name_1 …
            priority: rank of the request; higher ones run first, if the engine's policy is
                "priority".
            cache_salt: namespace of the prefix cache; requests of different namespaces never share
                cached prefixes.
            image_data: images of the prompts. A prompt's text has the model's placeholder for each
                of its images. An image is a file, bytes, a PIL image, an address, a data URL or
                base64. Several images are given as a list; for a list of prompts, the images of
                each prompt are an entry of a list.
            video_data, audio_data: videos and sounds, in the same forms.
            modalities: kinds of the given media, such as "image". Has no effect, but a kind that
                isn't given is rejected.
            routed_dp_rank: replica that runs the request, if the engine's `dp_size` is above 1;
                `data_parallel_rank` is an alias. None for the replica whose cache has the longest
                prefix of the prompt.
            output_ids: ids that an earlier stream of the same request has delivered, a list for
                each prompt: the output continues after them, as described at `submit`. Set
                `sampling_seed` in both requests.
            session_params: session of the request, and the request that it continues; see
                `open_session`. Only for a single prompt.
            stream: whether to return an iterator.

        Returns:
            A dictionary with `text`, `output_ids` and `meta_info`; a list of dictionaries for a
            list of prompts or `n` > 1; with `stream` an iterator of dictionaries, each with
            everything so far.

        Parameters that have no effect in this call are named in a UserWarning instead of an error,
        because SGLang accepts them.

        Raises:
            ParameterError, OverloadedError, EngineClosedError: see `submit`; nothing was generated.
                Unknown parameters, and those of SGLang's that this engine doesn't support, are
                refused by name.
            BatchError: some requests of a batch failed; the error has the results of the successful
                ones.
        """
        self.core.gate.check_blocking_call("generate")
        request, session = self._request(args, _read_media_fields(fields))
        return run(self.core, request, session)

    @_generates_async
    async def async_generate(self, *args: Any, **fields: Any) -> Any:  # as `generate`
        """Generates text like `generate`, for asyncio. With `stream`, the awaited result is an
        asynchronous iterator.
        """
        self.core.gate.check_open()
        seen = (
            await asyncio.to_thread(_read_media_fields, fields)
            if _MEDIA.keys() & fields.keys()
            else fields
        )
        return await async_run(self.core, *self._request(args, seen))

    def _request(
        self, args: Sequence[Any], fields: Mapping[str, Any]
    ) -> tuple[NativeRequest, Session | None]:
        """Builds the request for a call of `generate`, and returns its session, if it has one.
        Warns of parameters without effect, which are not errors because SGLang ignores them.
        """
        session_params = fields.get("session_params")
        fields = {name: value for name, value in fields.items() if name != "session_params"}
        request = read_request(*args, **fields)
        policy = self.config.policy
        without_priorities = policy != "priority" and any(call.priority for call in request.calls)
        reasons = {
            "no log-probabilities are returned. Set return_logprob=True.": unused_logprob_fields(
                fields
            ),
            "no hint of that kind is known here.": unused_kv_hints(fields.get("kv_hints")),
            f'the engine\'s policy is {policy!r}. Make the engine with policy="priority".': (
                ["priority"] if without_priorities else []
            ),
        }
        for reason, names in reasons.items():
            if names:
                warnings.warn(f"{', '.join(names)}: has no effect, as {reason}", stacklevel=3)
        if without_priorities:
            request = replace(request, calls=[replace(call, priority=0) for call in request.calls])
        if session_params is None:
            return request, None
        session, request = self._sessions.join(request, session_params)
        return request, session

    # ------------------------------------------------------------------------------------- sessions

    def open_session(
        self,
        capacity_of_str_len: int,
        session_id: str | None = None,
        streaming: bool = False,
        timeout: float | None = None,
    ) -> str:
        """Opens a session, in which a request can continue an earlier one. A request of the session
        contains only the new text, and `session_params` (see `SessionParams` in
        server/sessions.py): `id` of the session, and `rid` of the request that it continues.

        Args:
            capacity_of_str_len: maximum number of tokens of a prompt.
            session_id: name of the session; None for a random one.
            streaming: must be False, because a request may continue any earlier one.
            timeout: must be None, because a session stays open until it is closed.

        Returns:
            Name of the session.

        Raises:
            ParameterError: an argument is invalid, or a session of this name is open.
            OverloadedError: too many sessions are open.
        """
        check_field_type("capacity_of_str_len", capacity_of_str_len, int)
        check_field_type("session_id", session_id, str, type(None))
        if streaming:
            raise ParameterError("streaming", "True is not supported.", hint="Leave it out.")
        if timeout is not None:
            raise ParameterError(
                "timeout", f"{short_repr(timeout)} is not supported.", hint="Call close_session."
            )
        given = OpenSession(capacity_of_str_len=capacity_of_str_len, session_id=session_id)
        return self._sessions.open(given)

    def close_session(self, session_id: str) -> None:
        """Closes a session, and aborts its requests.

        Raises:
            ParameterError: no session of this name is open.
            EngineClosedError: the engine is closed.
        """
        self._sessions.close(session_id)

    @cached_property
    def _sessions(self) -> CallerSessions:
        return CallerSessions(self)

    # --------------------------------------------------------------------------------------- scores

    @_takes(parse_score_arguments)
    # `parse_score_arguments` has the types
    def score(self, *args: Any, **fields: Any) -> ScoreResult | tuple[ChoiceScore, ...]:
        """Scores each item. With labels, returns the probabilities of the label tokens after
        `query` and the item. Without labels, scores the item itself as a continuation of the query.

        Args:
            query: prompt, as text or token ids.
            items: texts to append to the query, or token ids if the query is ids; a single text
                counts as a list of one.
            label_token_ids: ids of the labels, or a list of ids for each item; None scores the
                items themselves, like `select`.
            apply_softmax: whether to return shares among the labels, instead of probabilities among
                all tokens.
            item_first: whether to put items before the query.
            temperature: temperature of the softmax of `apply_softmax`.
            return_token_logprobs: whether to return log-probabilities, too.

        Returns:
            A ScoreResult with labels; a tuple with the ChoiceScore of each item without.

        Raises:
            ParameterError, OverloadedError, EngineClosedError: see `submit`.
        """
        self.core.gate.check_blocking_call("score")
        request = parse_score_arguments(*args, **fields)
        if request.labels is None:
            return self.select(request.query, request.items).scores
        calls = request.calls(self.vocab_size)
        return request.result(calls, run(self.core, NativeRequest(calls, is_list=True)))

    @_takes(parse_score_arguments)
    # as `score`
    async def async_score(self, *args: Any, **fields: Any) -> ScoreResult | tuple[ChoiceScore, ...]:
        """Scores items like `score`, for asyncio."""
        self.core.gate.check_open()
        request = parse_score_arguments(*args, **fields)
        if request.labels is None:
            return (await asyncio.to_thread(self.select, request.query, request.items)).scores
        calls = request.calls(self.vocab_size)
        return request.result(calls, await async_run(self.core, NativeRequest(calls, is_list=True)))

    # ----------------------------------------------------------------- embedding and classification

    @overload
    def encode(
        self,
        prompt: _OneText,
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate: bool = False,
        lora_path: AdapterNames = None,
    ) -> Embedding: ...
    @overload
    def encode(
        self,
        prompt: _Several,
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate: bool = False,
        lora_path: AdapterNames = None,
    ) -> list[Embedding]: ...
    def encode(
        self,
        prompt: Texts,
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate: bool = False,
        lora_path: AdapterNames = None,
    ) -> Embedding | list[Embedding]:
        """Returns embeddings of texts, pooled and normalised as the model's folder specifies (mean,
        first or last token).

        Args:
            prompt: a text, or several; token ids in place of a text are used unchanged.
            dimensions: number of leading components of each vector to keep, normalised again if the
                model normalises; None keeps all. For models that were trained for this
                ("Matryoshka").
            prompt_name: name of one of the folder's prompts (`config_sentence_transformers.json`),
                which is put before each text, usually an instruction. None uses the folder's
                default prompt, if any.
            truncate: whether to cut texts that are longer than the model's context, instead of
                rejecting them.
            lora_path: name of the adapter (LoRA) to read with; one for all texts, or a list with
                one or None for each.

        Returns:
            SGLang's form: a dictionary with `embedding` (a list of floats) and `meta_info`; a list
            of dictionaries for a list.

        Raises:
            CapabilityError: the model doesn't compute embeddings.
            ParameterError: the list is empty, a text is empty or too long, `dimensions` exceeds the
                model's, or there is no such adapter.
            EngineClosedError: the engine is closed.
        """
        options: dict[str, Any] = {
            "dimensions": dimensions,
            "prompt_name": prompt_name,
            "truncate": truncate,
            "lora_path": lora_path,
        }
        found: Embedding | list[Embedding] = embedding.encode_in_sglang_form(
            partial(embedding.embeddings, self, **options), prompt
        )
        return found

    async def async_encode(
        self,
        prompt: Texts,
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate: bool = False,
        lora_path: AdapterNames = None,
    ) -> Embedding | list[Embedding]:
        """Returns embeddings like `encode`, for asyncio."""
        encode: Any = self.encode  # whose forms `to_thread` can't tell apart
        found: Embedding | list[Embedding] = await asyncio.to_thread(
            encode,
            prompt,
            dimensions=dimensions,
            prompt_name=prompt_name,
            truncate=truncate,
            lora_path=lora_path,
        )
        return found

    def score_pairs(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        truncate: bool = False,
        lora_path: AdapterNames = None,
    ) -> list[float]:
        """Returns a cross-encoder's scores for pairs of texts (a query and a document): between 0
        and 1, or unbounded if the model's config disables the sigmoid.

        Args:
            pairs: pairs of texts, at least one.
            truncate: whether to cut pairs that are longer than the model's context, the longer text
                of each first.
            lora_path: see `encode`.

        Raises:
            CapabilityError: the model doesn't compute a single score.
            ParameterError: the list is empty, a text is empty, or a pair is too long.
            EngineClosedError: the engine is closed.
        """
        scores, _ = embedding.score_text_pairs(self, pairs, truncate=truncate, lora_path=lora_path)
        numbers: list[float] = scores.tolist()
        return numbers

    def rerank(self, prompt: Sequence[Sequence[str]]) -> list[dict[str, Json]]:
        """Returns a cross-encoder's scores for pairs of texts (`score_pairs`), as SGLang's
        dictionaries.

        Args:
            prompt: pairs of a query and a document.

        Raises:
            CapabilityError, ParameterError, EngineClosedError: see `score_pairs`.
        """
        pairs: list[Any] = [tuple(pair) if isinstance(pair, list) else pair for pair in prompt]
        scores, tokens = embedding.score_text_pairs(self, pairs, field="prompt")
        return [
            {"embedding": score, "meta_info": {"id": random_id(), "prompt_tokens": count}}
            for score, count in zip(scores.tolist(), tokens)
        ]

    @overload
    def classify(
        self, prompt: _OneText, *, truncate: bool = False, lora_path: AdapterNames = None
    ) -> Classification: ...
    @overload
    def classify(
        self, prompt: _Several, *, truncate: bool = False, lora_path: AdapterNames = None
    ) -> list[Classification]: ...
    def classify(
        self, prompt: Texts, *, truncate: bool = False, lora_path: AdapterNames = None
    ) -> Classification | list[Classification]:
        """Returns the probabilities of a classifier's labels.

        Args:
            prompt, truncate, lora_path: see `encode`.

        Returns:
            A dictionary with `label` (the most likely one) and `probs` (probability by label); a
            list of dictionaries for a list. The probabilities of a multi-label classifier are
            independent and need not add up to 1.

        Raises:
            CapabilityError: the model has no labels.
            ParameterError, EngineClosedError: see `encode`.
        """
        texts, single = embedding.prompt_to_texts(prompt)
        found: Any  # the engine's dictionaries have no types
        found, _ = embedding.classify_texts(self, texts, truncate=truncate, lora_path=lora_path)
        return found[0] if single else found  # type: ignore[no-any-return] # as above

    @overload
    def reward(
        self, prompt: _OneText, *, truncate: bool = False, lora_path: AdapterNames = None
    ) -> float | list[float]: ...
    @overload
    def reward(
        self, prompt: _Several, *, truncate: bool = False, lora_path: AdapterNames = None
    ) -> list[float] | list[list[float]]: ...
    def reward(
        self, prompt: Texts, *, truncate: bool = False, lora_path: AdapterNames = None
    ) -> float | list[float] | list[list[float]]:
        """Returns the raw outputs of a reward model, without sigmoid or softmax.

        Args:
            prompt: a conversation rendered by the model's chat template, or several. Special tokens
                that a text spells are encoded as ordinary text; `engine.tokenizer.encode(text)`
                returns ids in which they are tokens.
            truncate, lora_path: see `encode`.

        Returns:
            A number, or a list of numbers if the model has several labels; a list of these for
            several conversations.

        Raises:
            CapabilityError: the model computes embeddings.
            ParameterError, EngineClosedError: see `encode`.
        """
        texts, single = embedding.prompt_to_texts(prompt)
        found, _ = embedding.classifier_outputs(
            self, texts, plain=True, truncate=truncate, lora_path=lora_path
        )
        numbers: list[Any] = found[:, 0].tolist() if found.shape[1] == 1 else found.tolist()
        return numbers[0] if single else numbers

    shutdown = base.Engine.close


class Stream(Iterator[Answer]):
    """Iterator over answers. Closing or dropping it aborts the requests, even before the first
    answer is read.
    """

    def __init__(self, running: NativeRun, answers: Generator[Answer, None, None]) -> None:
        self._running = running
        self._answers = answers

    def __next__(self) -> Answer:
        return next(self._answers)

    def close(self) -> None:
        """Aborts the requests."""
        self._answers.close()
        self._running.abort()

    def __del__(self) -> None:
        self._running.abort_soon()


class AsyncStream(AsyncIterator[Answer]):
    """Asynchronous version of `Stream`."""

    def __init__(self, running: NativeRun, answers: AsyncGenerator[Answer, None]) -> None:
        self._running = running
        self._answers = answers

    async def __anext__(self) -> Answer:
        return await anext(self._answers)

    async def aclose(self) -> None:
        """Aborts the requests."""
        await self._answers.aclose()
        self._running.abort()

    def __del__(self) -> None:
        self._running.abort_soon()


def _start_run(
    core: Core, post: Post, request: NativeRequest, session: Session | None
) -> NativeRun:
    if session is None:
        return NativeRun(core, post, request)
    return SessionRun(session, core, post, request)


# as `NativeRun.results`, or a Stream
def run(core: Core, request: NativeRequest, session: Session | None = None) -> Any:
    """Runs a request, and waits for its answers unless it asks for a stream. If the request belongs
    to a session, it must already have begun there.
    """
    events: queue.SimpleQueue[tuple[int, Event] | None] = queue.SimpleQueue()
    running = _start_run(core, events.put, request, session)

    def answers() -> Generator[Answer, None, None]:
        try:
            while running.open:
                yield from running.add_event(events.get())
        finally:
            running.abort()

    if request.stream:
        return Stream(running, answers())
    deque(answers(), maxlen=0)
    return running.results()


# as `NativeRun.results`, or an AsyncStream
async def async_run(core: Core, request: NativeRequest, session: Session | None = None) -> Any:
    """Runs a request like `run`, for asyncio."""
    events: asyncio.Queue[tuple[int, Event] | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def post(item: tuple[int, Event] | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits for events
            loop.call_soon_threadsafe(events.put_nowait, item)

    running = _start_run(core, post, request, session)

    async def answers() -> AsyncGenerator[Answer, None]:
        try:
            while running.open:
                for answer in running.add_event(await events.get()):
                    yield answer
        finally:
            running.abort()

    if request.stream:
        return AsyncStream(running, answers())
    async for _ in answers():
        pass
    return running.results()
