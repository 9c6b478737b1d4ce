"""Changes a running engine's weights between two steps, and pauses the engine for such changes.

Each call is staged and checked before the first byte is written (models/new_weights.py). Several
calls may form one update; the engine plans no step until it is complete.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sglang_lite.protocol import BackendError, ModelError, ParameterError
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.core.step_loop import StepLoop
from sglang_lite.runtime.models.decoder import Decoder
from sglang_lite.runtime.models.kv_scales import kv_scales, read_kv_scales
from sglang_lite.runtime.models.new_weights import StagedWeights
from sglang_lite.runtime.models.weight_parts import WeightParts
from sglang_lite.runtime.models.weights.groups import TensorForm
from sglang_lite.runtime.models.weights.source import WeightSource

# keys in `StepLoop.holds`
PAUSED = "paused"
INCOMPLETE = "weights incomplete"
_MODES = ("abort", "retract", "in_place")
_ACTIONS = ("checksum", "snapshot", "compare")

Scales = dict[tuple[int, str], torch.Tensor]


class WeightUpdates:
    """Changes of an engine's weights. Used only on the loop's thread.

    Args:
        loop: loop of the engine.
        bos: token that begins a sequence, or None.
        config: settings of the engine; may name a file with scales of an 8-bit KV cache.

    Attributes:
        absent: True while the engine sleeps without its weights.
        given: True if weights have come as tensors since a checkpoint was read.
    """

    def __init__(self, loop: StepLoop, bos: int | None, config: EngineConfig) -> None:
        self._loop = loop
        self._bos = bos
        self._scales_file = config.quantization_param_path
        self.absent = False
        self.given = False
        self._count = 0  # number of writes so far
        self._in_place = False  # whether running requests keep their slots
        self._in_session = False  # whether `begin_session` was called
        self._missing: set[str] = set()  # names of tensors that a failed write has left undefined
        self._snapshot: dict[str, str] | None = None

    @property
    def model(self) -> Decoder:
        """The running model.

        Raises:
            ModelError: the weights can't be replaced (the model runs with other code, or keeps some
                of them in the host's memory), or the engine is asleep without them.
        """
        if self.absent:
            raise ModelError(
                "the engine is asleep, without its weights.",
                hint="Wake it: resume_memory_occupation.",
            )
        model = self._loop.runner.model
        if not isinstance(model, Decoder):
            raise ModelError("the running model is not one whose weights can be replaced.")
        if model.offload is not None:
            raise ModelError(
                "weights in the host's memory (cpu_offload_gb) can't be replaced or read."
            )
        return model

    # -------------------------------------------------------------------------------------- updates

    @torch.inference_mode()
    def write_weights(
        self, open_source: Callable[[], WeightSource], *, whole: bool, last: bool = True
    ) -> None:
        """Replaces weights with those of a source.

        Args:
            open_source: opens the source from its beginning.
            whole: whether the source must have all tensors of the model.
            last: whether the update is complete now, unless the engine is paused or in a session.

        Raises:
            ModelError: the weights don't fit; the old ones stay.
        """
        model = self.model
        staged = StagedWeights(model, open_source, whole=whole)
        self._begin_update()
        try:
            staged.write_to_model()
            if model.kv_scales is not None:
                self._write_scales(model, staged.kv_scales)
        except BaseException:
            self.reject_until_rewritten()
            raise
        self._missing = set() if whole else self._missing - staged.names
        if not self._missing:
            model.choose_small_batch_step()
        self.given = not whole
        if whole or (last and not self._collects_calls):
            self.complete_update()
        else:
            self._reject_new_requests()

    def reject_until_rewritten(self) -> None:
        """Rejects requests until all tensors have been written again, because their values are
        undefined.
        """
        self._missing = set(WeightParts(self.model).names())
        self.model.release_small_batch_step()
        self._reject_new_requests()

    def complete_update(self) -> None:
        """Ends an update, which may have taken several calls. Does nothing while a failed write has
        left tensors undefined.
        """
        if INCOMPLETE in self._loop.holds and not self._missing:
            del self._loop.holds[INCOMPLETE]
            self._loop.renew_preparation()

    def begin_session(self) -> None:
        """Combines all updates until `end_session` into one. Requests wait from the first of them
        on. Raises ModelError if the weights can't be replaced or a session has begun already.
        """
        if self._in_session:
            raise ModelError("an update of the weights has begun.", hint="Call end_weight_update.")
        _ = self.model  # raises if its weights can't be replaced
        self._in_session = True

    def end_session(self) -> None:
        """Ends a session and, unless the engine is paused, the session's update. If it is paused,
        the update ends with the pause.

        Raises:
            ModelError: no session has begun.
            BackendError: a write has failed, and the undefined tensors have not been written since.
        """
        if not self._in_session:
            raise ModelError(
                "no update of the weights has begun.", hint="Call begin_weight_update first."
            )
        self._in_session = False
        if PAUSED not in self._loop.holds:
            self._complete_or_reject()

    @property
    def _collects_calls(self) -> bool:
        """Whether several calls form one update."""
        return self._in_session or PAUSED in self._loop.holds

    def _complete_or_reject(self) -> None:
        """Completes the update. Raises BackendError if tensors are undefined."""
        self.complete_update()
        if self._missing:
            self._reject_new_requests()
            error = self._loop.holds[INCOMPLETE]
            assert error is not None, "just refused"
            raise error

    def _begin_update(self) -> None:
        """Prepares requests to continue with new weights. Values computed with the old weights are
        not reused, except by requests that were paused in place.
        """
        loop = self._loop
        scheduler = self._loop.scheduler
        loop.settle_launched_steps()
        self._count += 1
        if not self._in_place:
            scheduler.retraction.retract_all()
        scheduler.end_pauses_and_flush()
        if self._in_place:
            self._retire_cached_pages()
        known = scheduler.store.table.known
        for request in scheduler.queues:
            count = len(request.tokens) if request.handle is None else int(known[request.slot])
            request.output.drawn_by.record_weight_replacement(count - request.prompt_len)
        loop.holds.setdefault(INCOMPLETE, None)

    def _retire_cached_pages(self) -> None:
        """Renames all cached pages so that no request can match them. Pages that running requests
        add later get the new names, too.
        """
        suffix = f" {secrets.token_hex(16)}"
        self._loop.scheduler.store.tree.rename_namespaces(suffix)
        for request in self._loop.scheduler.queues.running():
            assert request.handle is not None
            request.space = replace(request.space, namespace=request.space.namespace + suffix)
            request.handle.space = request.space

    def _reject_new_requests(self) -> None:
        """Rejects new requests until the update is complete. During a pause or session, lets them
        wait instead, unless tensors are undefined.
        """
        if not self._collects_calls or self._missing:
            self._loop.holds[INCOMPLETE] = BackendError(
                "weights incomplete: an update has begun, and its last tensors have not arrived.",
                hint="Send the rest with flush_cache=True, or a whole checkpoint: update_weights_from_disk.",
            )

    def _write_scales(self, model: Decoder, stored: Scales) -> None:
        """Computes the scales of the KV cache for new weights, and writes them in place, where
        captured graphs read them.
        """
        if self._scales_file is not None:
            stored = stored | read_kv_scales(Path(self._scales_file), model.kv_layout)
        old = model.kv_scales
        new = kv_scales(model, stored, self._bos)
        assert old is not None
        for one, other in zip((*old.k, *old.v), (*new.k, *new.v)):
            one.copy_(other)

    # --------------------------------------------------------------------------------------- pauses

    def pause_planning(self, mode: str) -> int:
        """Plans no further steps until `resume_planning`. Returns the number of requests that ran
        or waited.

        Args:
            mode: "abort" to end all requests, "retract" to compute them again from their tokens,
                "in_place" to keep the computed values of running ones.

        Raises:
            ParameterError: the mode is unknown.
        """
        if mode not in _MODES:
            raise ParameterError("mode", f"{mode!r} is none of {', '.join(_MODES)}.")
        loop = self._loop
        scheduler = self._loop.scheduler
        loop.settle_launched_steps()
        loop.holds[PAUSED] = None
        requests = [
            each for each in (*scheduler.queues, *(loop.preparation or ())) if not each.ended
        ]
        self._in_place = mode == "in_place"
        if mode == "abort":
            for request in requests:
                loop.abort(request)
        elif mode == "retract":
            scheduler.retraction.retract_all()
        return len(requests)

    def resume_planning(self) -> None:
        """Ends a pause, and any incomplete update that belongs to no session. Does nothing if there
        is neither.

        Raises:
            BackendError: a write has failed meanwhile, and the undefined tensors have not been
                written since.
        """
        self._loop.holds.pop(PAUSED, None)
        self._in_place = False
        if not self._in_session:
            self._complete_or_reject()

    # ------------------------------------------------------------------------------------ questions

    @torch.inference_mode()
    def read_tensor_rows(self, name: str, rows: int) -> list[Any]:  # numbers, or lists of them
        """Returns the first rows of a tensor, as nested lists. Raises ModelError if the tensor is
        missing or can't be read back.
        """
        held = WeightParts(self.model).read_held_tensor(name)
        held = held if held.ndim else held.view(1)
        found: list[Any] = held[:rows].float().cpu().tolist()
        return found

    @torch.inference_mode()
    def list_tensor_forms(self) -> tuple[list[TensorForm], int]:
        """Returns the names, dtypes and shapes of all tensors, and the number of updates so far.
        Raises ModelError if one can't be read back.
        """
        parts = WeightParts(self._require_complete_model)
        values = ((name, parts.read_held_tensor(name)) for name in parts.names())
        return [
            TensorForm(name, each.dtype, tuple(each.shape)) for name, each in values
        ], self._count

    @torch.inference_mode()
    def concatenate_bytes(self, names: Sequence[str]) -> tuple[torch.Tensor, int]:
        """Returns the bytes of tensors, concatenated on the model's device, and the number of
        updates so far.
        """
        parts = WeightParts(self._require_complete_model)
        found = [
            parts.read_held_tensor(name).contiguous().view(-1).view(torch.uint8) for name in names
        ]
        return torch.cat(found), self._count

    @property
    def _require_complete_model(self) -> Decoder:
        """The running model. Raises ModelError like `model`, or if an update is incomplete."""
        if INCOMPLETE in self._loop.holds:
            raise ModelError("the weights are incomplete.", hint="Send the rest of the update.")
        return self.model

    @torch.inference_mode()
    def checksum_tensors(self, action: str) -> dict[str, Any]:  # JSON
        """Returns the checksums of all tensors. "snapshot" also stores them, and "compare" also
        compares them with the stored ones.

        Raises:
            ParameterError: the action is unknown, or nothing was stored.
        """
        if action not in _ACTIONS:
            raise ParameterError("action", f"{action!r} is none of {', '.join(_ACTIONS)}.")
        if action == "compare" and self._snapshot is None:
            raise ParameterError(
                "action", "there is no snapshot to compare with.", hint='Ask for "snapshot" first.'
            )
        parts = WeightParts(self.model)
        found = dict[str, str]()
        unreadable = list[str]()
        for name in parts.names():
            try:
                data = parts.read_held_tensor(name).cpu().contiguous().view(torch.uint8).numpy()
            except ModelError:
                unreadable.append(name)
            else:
                found[name] = hashlib.sha256(data.data).hexdigest()
        answer: dict[str, Any] = {"checksums": found, "unreadable": unreadable}
        if action == "compare" and self._snapshot is not None:
            answer["changed"] = [
                name for name, digest in found.items() if self._snapshot.get(name) != digest
            ]
        if action == "snapshot":
            self._snapshot = found
        return answer
