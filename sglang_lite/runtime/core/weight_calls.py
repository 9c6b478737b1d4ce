"""Answers the calls to an engine that concern its weights and its memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from sglang_lite.protocol import CapabilityError, ModelError, OverloadedError, ParameterError
from sglang_lite.runtime.calls import (
    MEMORY_TAGS,
    BeginUpdate,
    CheckWeights,
    ContinueGeneration,
    EndUpdate,
    EngineCall,
    JoinGroup,
    LeaveGroup,
    NameWeights,
    OfferWeights,
    OpenTensors,
    PauseGeneration,
    ReadWeights,
    ReceiveWeights,
    RecordExperts,
    ReleaseMemory,
    ResumeMemory,
    SendWeights,
    UpdateTensors,
    UpdateWeights,
    WriteTensors,
)
from sglang_lite.runtime.config import DIST_TIMEOUT_S, EngineConfig
from sglang_lite.runtime.core.engine_part import EnginePart
from sglang_lite.runtime.core.expert_record import ExpertRecord
from sglang_lite.runtime.core.step_loop import StepLoop
from sglang_lite.runtime.core.weight_update import INCOMPLETE, WeightUpdates
from sglang_lite.runtime.executor import memory_shortage
from sglang_lite.runtime.loading.load_model import LoadedModel
from sglang_lite.runtime.loading.replacement import (
    check_replacement_tensors,
    checkpoint_opener,
    tensors_opener,
)
from sglang_lite.runtime.models.decoder import Decoder
from sglang_lite.runtime.models.resolve import resolve
from sglang_lite.runtime.models.weight_memory import DroppedTensors, storage_bytes
from sglang_lite.runtime.models.weight_parts import drop_parts
from sglang_lite.runtime.models.weights.given import unpack_flattened_bucket, validate_named_tensors
from sglang_lite.runtime.models.weights.groups import UpdateGroups, build_tensor_forms
from sglang_lite.runtime.models.weights.handles import read_flattened_bucket
from sglang_lite.runtime.requests.output_builder import LoadedWeights

ASLEEP = "asleep"  # key in `StepLoop.holds` while the engine sleeps


class Sleep:
    """Memory that an engine releases while it sleeps. Used only on the loop's thread.

    Args:
        loop: loop of the engine.
        updates: updates of its weights.
        reload: reads all weights again from the engine's checkpoint.
        parts: parts of the engine; some have memory that belongs to the weights.
        refuses: whether new requests fail while the engine sleeps, rather than wait.

    Attributes:
        released: tags of the released memory.
    """

    def __init__(
        self,
        loop: StepLoop,
        updates: WeightUpdates,
        reload: Callable[[], None],
        parts: Sequence[EnginePart],
        *,
        refuses: bool,
    ) -> None:
        self._loop = loop
        self._updates = updates
        self._reload = reload
        self._refuses = refuses
        self._parts = parts
        self._dropped: DroppedTensors | None = None  # tensors dropped from a model on a CPU
        self.released: set[str] = set()
        self._kept = False  # whether the weights are kept in the host's memory
        # whether graphs are restored together with the last of the other tags
        self._graphs_follow = False

    @torch.inference_mode()
    def release_tags(self, tags: Sequence[str], *, keep: bool) -> None:
        """Releases memory. Requests wait; running ones are computed again afterwards.

        Args:
            tags: tags of `MEMORY_TAGS`: keys and values, weights, captured graphs. If empty,
                releases all memory; graphs are later restored together with the last of the other
                tags.
            keep: whether the host keeps the weights. If not, they are read again from the
                checkpoint.

        Raises:
            ParameterError: a tag is unknown.
            CapabilityError: a tag's memory is already released, or the engine was started without
                `enable_memory_saver` on a GPU.
            ModelError: the host has no memory for the weights; the engine stays awake.
        """
        chosen = _select_tags(tags)
        if again := chosen & self.released:
            raise CapabilityError(
                f"the engine is asleep: the memory of {_join_tags(again)} is given back already."
            )
        loop = self._loop
        runner = self._loop.runner
        model = runner.model
        on_device = model.device.type == "cuda"
        if not isinstance(model, Decoder):
            raise CapabilityError(
                "transformers' code runs this model: its memory can't be given back."
            )
        if runner.cache_memory is None or (on_device and model.weight_memory is None):
            raise CapabilityError(
                "this engine can't give memory back.",
                hint="Start it with enable_memory_saver=True.",
            )
        if keep and "weights" in chosen and model.weight_memory is not None:
            model.weight_memory.allocate_copies()
        loop.settle_launched_steps()
        loop.scheduler.retraction.retract_all()
        # Cached pages stay valid only for the same weights.
        loop.scheduler.end_pauses_and_flush(
            keep="kv_cache" in chosen and (keep or "weights" not in chosen)
        )
        if on_device:
            torch.cuda.synchronize(model.device)  # waits until copies to the host have ended
        error = OverloadedError("the engine is asleep.", hint="Wake it, or try again later.")
        loop.holds[ASLEEP] = error if self._refuses else None
        self._graphs_follow = not tags or (self._graphs_follow and bool(self.released))
        self.released |= chosen
        if "cuda_graph" in chosen:
            runner.drop_graphs()
        if "weights" in chosen:
            self._kept = keep
            if model.weight_memory is not None:
                model.weight_memory.release_memory(keep=keep)
            elif not keep:
                self._drop_cpu_tensors(model)
            self._updates.absent = True
        if "kv_cache" in chosen:
            runner.cache_memory.release_memory()
        if on_device:
            torch.cuda.empty_cache()

    def _drop_cpu_tensors(self, model: Decoder) -> None:
        """Frees all tensors on a CPU that belong to the weights: weights of decoder and encoder,
        features, and tensors of the engine's parts.
        """
        drop_parts(model)
        features = () if model.features is None else (model.features,)
        self._dropped = DroppedTensors((*model.encoder_weights.values(), *features))
        for part in self._parts:
            part.drop_with_weights()

    def stats(self) -> dict[str, int]:
        """Returns counts for `Engine.stats`: how many bytes of memory the encoder and the engine's
        parts use.
        """
        model = self._loop.runner.model
        found = dict[str, int]()
        if not isinstance(model, Decoder):
            return found
        gone = "weights" in self.released and model.weight_memory is not None
        if model.tower is not None:
            found["encoder_bytes"] = 0 if gone else storage_bytes(model.encoder_weights.values())
        for part in self._parts:
            found |= {name: 0 if gone else size for name, size in part.memory_stats().items()}
        return found

    @torch.inference_mode()
    def restore_tags(self, tags: Sequence[str]) -> None:
        """Allocates released memory again. The engine continues once all is restored.

        Raises:
            ParameterError: a tag is unknown.
            CapabilityError: a tag's memory is not released.
            ModelError: weights that were not kept can't be read.
            OverloadedError: others use the memory; memory that can't be allocated stays released.
        """
        chosen = _select_tags(tags) if tags else set(self.released)
        if self._graphs_follow and chosen == {"cuda_graph"} and not self.released:
            return  # already restored
        if self._graphs_follow and self.released - chosen == {"cuda_graph"}:
            chosen.add("cuda_graph")
        if awake := chosen - self.released:
            raise CapabilityError(
                f"the engine is awake: the memory of {_join_tags(awake)} is not given back."
            )
        if not self.released:
            raise CapabilityError("the engine is awake: no memory is given back.")
        try:
            self._restore_parts(chosen)
        except Exception as error:  # kinds of shortage are recognised by their message
            if not memory_shortage.is_out_of_memory(error):
                raise
            raise OverloadedError(
                f"not enough memory to wake: {str(error).partition(chr(10))[0]}",
                hint="End what else takes the device's, and wake the engine again.",
            ) from None
        if not self.released:
            del self._loop.holds[ASLEEP]

    def _restore_parts(self, chosen: set[str]) -> None:
        runner = self._loop.runner
        model = runner.model
        assert isinstance(model, Decoder)
        assert runner.cache_memory is not None
        if "weights" in chosen:
            self._restore_weights(model)
        if "kv_cache" in chosen:
            runner.cache_memory.restore_memory()
            self.released.discard("kv_cache")
        if "cuda_graph" in chosen:
            runner.capture_graphs()
            self.released.discard("cuda_graph")

    def _restore_weights(self, model: Decoder) -> None:
        # False if memory was allocated before and only reading the weights failed
        if model.weight_memory is not None and self._updates.absent:
            model.weight_memory.restore_memory(kept=self._kept)
            for part in self._parts:
                part.restore_with_weights(dropped=False)
            if self._kept:
                self._loop.renew_preparation()
        if self._dropped is not None:
            for part in self._parts:
                part.restore_with_weights(dropped=True)
            self._dropped.allocate_zeros()
            self._dropped = None
        self._updates.absent = False
        if not self._kept:
            self._updates.reject_until_rewritten()
            if not self._updates.given:
                self._reload()  # if this fails, the weights remain to be restored
        self.released.discard("weights")


def _select_tags(tags: Sequence[str]) -> set[str]:
    if unknown := sorted(set(tags) - set(MEMORY_TAGS)):
        raise ParameterError("tags", f"{unknown[0]!r} is none of {', '.join(MEMORY_TAGS)}.")
    return set(tags) or set(MEMORY_TAGS)


def _join_tags(tags: set[str]) -> str:
    return " and ".join(sorted(tags))


class WeightCalls:
    """Answers the calls listed in `in_groups` and `on_loop`, and `UpdateWeights`.

    Args:
        loop: loop of the engine.
        version: version of the weights, which requests report.
        loaded: the model as it was loaded.
        config: settings that match the weights.
        calls: executor for calls that wait for the loop, or for files.
        parts: parts of the engine; some have memory that belongs to the weights.
        changed: called on the loop's thread after each update, with new settings, and the folder or
            file of the weights; None for weights that came as tensors.

    Attributes:
        in_groups, on_loop: functions that answer calls, by type.
        sleep: memory that the engine releases.
        groups: process groups in which others send weights.
    """

    def __init__(
        self,
        loop: StepLoop,
        version: LoadedWeights,
        loaded: LoadedModel,
        config: EngineConfig,
        calls: Executor,
        parts: Sequence[EnginePart],
        changed: Callable[[EngineConfig, Path | None], None],
    ) -> None:
        self._loop = loop
        self._version = version
        self._path = loaded.path
        self._config = config
        self._calls = calls
        self._changed = changed
        self._updates = WeightUpdates(loop, loaded.tokenizer.bos_id, config)
        self._updates.given = config.load_format == "remote_instance"
        self._experts = ExpertRecord()
        self.sleep = Sleep(
            loop,
            self._updates,
            self._reread_checkpoint,
            parts,
            refuses=config.refuse_while_asleep,
        )
        # by group: number of updates when the weights were offered
        self._offered: dict[str, int] = {}
        self.groups = UpdateGroups(loop.runner.model.device, config.dist_timeout or DIST_TIMEOUT_S)

    def answer_weight_call(
        self, call: EngineCall[Any]
    ) -> Future[Any]:  # each call has its own type of answer
        """Returns a future of the answer to a call."""
        if isinstance(call, UpdateWeights):
            now = self._config.load_format
            formats = call.load_format or ("auto" if now in ("dummy", "remote_instance") else now)
            version = self._config.weight_version if call.version is None else call.version
            changes = {
                "model": call.path,
                "revision": None,
                "weight_version": version,
                "load_format": formats,
            }
            changes["model_checksum"] = None  # it described the files loaded before
            config = EngineConfig.make(**{**asdict(self._config), **changes})
            return self._calls.submit(
                lambda: self._loop.inbox.call_and_wait(
                    partial(self._update_from_disk, config, resolve(call.path, None))
                )
            )
        if answer := self.in_groups.get(type(call)):
            return self.groups.run_in_thread(partial(answer, self, call))
        return self._loop.inbox.post_for_result(partial(self.on_loop[type(call)], self, call))

    def _update_from_disk(self, config: EngineConfig, location: Path) -> str:
        opener = checkpoint_opener(config, location, self._updates.model)
        self._updates.write_weights(opener, whole=True)
        self._apply_settings(config, location)
        return config.model

    def _update_tensors(self, call: UpdateTensors | WriteTensors) -> str:
        tensors = call.tensors if isinstance(call, WriteTensors) else Path(call.file)
        opener = tensors_opener(tensors, self._updates.model, self._path)
        self._updates.write_weights(opener, whole=False, last=call.last)
        return self._rename_version(
            self._config.weight_version if call.version is None else call.version
        )

    def _open_tensors(self, call: OpenTensors) -> str:
        tensors = validate_named_tensors(
            unpack_flattened_bucket(read_flattened_bucket(call.bucket, self._updates.model.device))
        )
        return self._update_tensors(WriteTensors(tensors, call.last, call.version))

    def _rename_version(self, version: str) -> str:
        self._apply_settings(replace(self._config, weight_version=version), None)
        return version

    def _receive_and_write(self, call: ReceiveWeights) -> str:
        """Receives tensors on this thread while requests continue. Then writes them on the loop's
        thread.
        """
        forms = build_tensor_forms(call.names, call.dtypes, call.shapes)
        without = {each.name: each.empty for each in forms}
        self._loop.inbox.call_and_wait(
            lambda: check_replacement_tensors(without, self._updates.model, self._path)
        )
        begun = INCOMPLETE in self._loop.holds
        received = self.groups.receive(call.group, forms, flattened=call.flattened, begun=begun)
        write = WriteTensors(received, call.last, call.version)
        return self._loop.inbox.call_and_wait(partial(self._update_tensors, write))

    def _offer_weights(self, call: OfferWeights) -> dict[str, Any]:  # JSON
        """Creates a group in which another engine can receive these weights, and returns their
        names, dtypes and shapes.
        """
        forms, updates = self._loop.inbox.call_and_wait(self._updates.list_tensor_forms)
        port = self.groups.host_group(call.address, call.port, call.group, call.backend)
        self._offered[call.group] = updates
        return {
            "names": [each.name for each in forms],
            "dtypes": [str(each.dtype) for each in forms],
            "shapes": [list(each.shape) for each in forms],
            "port": port,
            "weight_version": self._config.weight_version,
        }

    def _send_tensors(self, call: SendWeights) -> str:
        """Sends the named tensors, concatenated into one, while requests continue. If no names are
        given, ends the group instead.
        """
        if call.group not in self._offered:
            raise ParameterError(
                "group_name", f"there is no group {call.group!r} of another engine."
            )
        before = self._offered[call.group]
        try:
            if not call.names:
                del self._offered[call.group]
                self.groups.leave_update_group(call.group)
                return self._config.weight_version
            data, updates = self._loop.inbox.call_and_wait(
                lambda: self._updates.concatenate_bytes(call.names)
            )
            if updates != before:
                raise ModelError(
                    "the weights have changed since they were offered.", hint="Start again."
                )
            self.groups.send(call.group, data)
        except BaseException:
            self._offered.pop(call.group, None)
            raise
        return self._config.weight_version

    def _apply_settings(self, config: EngineConfig, path: Path | None) -> None:
        self._config = config
        self._version.version = config.weight_version
        self._changed(config, path)

    def _reread_checkpoint(self) -> None:
        """Reads the weights again from their checkpoint."""
        location = resolve(self._config.model, self._config.revision)
        self._updates.write_weights(
            checkpoint_opener(self._config, location, self._updates.model), whole=True
        )

    # calls that each run on a separate thread
    in_groups: ClassVar[Mapping[type[EngineCall[Any]], Callable[..., object]]] = {
        JoinGroup: lambda self, call: self.groups.join(
            call.address, call.port, call.rank, call.size, call.name, call.backend
        ),
        LeaveGroup: lambda self, call: self.groups.leave_update_group(call.name),
        ReceiveWeights: _receive_and_write,
        OfferWeights: _offer_weights,
        SendWeights: _send_tensors,
    }
    # calls answered on the loop's thread
    on_loop: ClassVar[Mapping[type[EngineCall[Any]], Callable[..., object]]] = {
        UpdateTensors: _update_tensors,
        WriteTensors: _update_tensors,
        OpenTensors: _open_tensors,
        ReadWeights: lambda self, call: self._updates.read_tensor_rows(call.name, call.rows),
        CheckWeights: lambda self, call: self._updates.checksum_tensors(call.action),
        NameWeights: lambda self, call: self._rename_version(call.version),
        PauseGeneration: lambda self, call: self._updates.pause_planning(call.mode),
        ContinueGeneration: lambda self, _: self._updates.resume_planning(),
        BeginUpdate: lambda self, _: self._updates.begin_session(),
        EndUpdate: lambda self, _: self._updates.end_session(),
        ReleaseMemory: lambda self, call: self.sleep.release_tags(call.tags, keep=call.keep),
        ResumeMemory: lambda self, call: self.sleep.restore_tags(call.tags),
        RecordExperts: lambda self, call: self._experts.record_counts(
            call.action, self._loop.runner.model
        ),
    }


CALLS: Sequence[type[EngineCall[Any]]] = (
    UpdateWeights,
    *WeightCalls.in_groups,
    *WeightCalls.on_loop,
)
