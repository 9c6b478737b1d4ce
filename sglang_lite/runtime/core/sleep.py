"""Sleep of an engine: it gives memory back, keeps its requests waiting, and takes the memory again when it wakes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sglang_lite.protocol import CapabilityError, ParameterError
from sglang_lite.runtime.calls import MEMORY_TAGS
from sglang_lite.runtime.core.step_loop import StepLoop
from sglang_lite.runtime.core.weight_update import WeightUpdates
from sglang_lite.runtime.models.decoder import Decoder
from sglang_lite.runtime.models.weight_parts import drop_parts

ASLEEP = "asleep"  # reason for which the loop holds


class Sleep:
    """Memory that an engine gives back while it sleeps. Used on the loop's thread alone.

    Args:
        loop: loop of the engine.
        updates: updates of its weights.
        reload: reads all weights again from the checkpoint that the engine has them of.

    Attributes:
        released: tags of the memory that is given back.
    """

    def __init__(self, loop: StepLoop, updates: WeightUpdates, reload: Callable[[], None]) -> None:
        self._loop, self._updates, self._reload = loop, updates, reload
        self.released: set[str] = set()
        self._kept = False  # whether the weights are kept in the host's memory
        self._graphs_follow = False  # whether graphs return without being named

    @torch.inference_mode()
    def release(self, tags: Sequence[str], *, keep: bool) -> None:
        """Gives memory back. Requests wait; running ones are computed again after it.

        Args:
            tags: of `MEMORY_TAGS`: keys and values, weights, captured graphs; none for all, of which graphs return
                with the last of the others.
            keep: whether the host keeps the weights. If not, they are read again from the checkpoint.

        Raises:
            ParameterError: a tag is unknown.
            CapabilityError: a tag's memory is given back already, or the engine was started without
                `enable_memory_saver` on a GPU.
        """
        chosen = _chosen(tags)
        if again := chosen & self.released:
            raise CapabilityError(f"the engine is asleep: the memory of {_listed(again)} is given back already.")
        loop, runner = self._loop, self._loop.runner
        model = runner.model
        on_device = model.device.type == "cuda"
        if runner.cache_memory is None or not isinstance(model, Decoder) or (on_device and model.weight_memory is None):
            raise CapabilityError("this engine can't give memory back.", hint="Start it with enable_memory_saver=True.")
        if model.features is not None and "weights" in chosen and not keep:
            raise CapabilityError(
                "the weights of a model that reads images can't be read again.", hint="Keep them: sleep(level=1)."
            )
        loop.settle()
        loop.scheduler.retraction.retract_all()
        loop.scheduler.flush()
        loop.holds.add(ASLEEP)
        self._graphs_follow = not tags or (self._graphs_follow and bool(self.released))
        self.released |= chosen
        if "cuda_graph" in chosen:
            runner.drop_graphs()
        if "weights" in chosen:
            self._kept = keep
            if model.weight_memory is not None:
                model.weight_memory.release(keep=keep)
            elif not keep:
                drop_parts(model)
            self._updates.absent = True
        if "kv_cache" in chosen:
            runner.cache_memory.release()
        if on_device:
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def restore(self, tags: Sequence[str]) -> None:
        """Takes memory again. The engine continues once it has all.

        Raises:
            ParameterError: a tag is unknown.
            CapabilityError: a tag's memory is not given back.
            ModelError: weights that were not kept can't be read.
        """
        chosen = _chosen(tags) if tags else set(self.released)
        if self._graphs_follow and chosen == {"cuda_graph"} and not self.released:
            return  # they have returned already
        if self._graphs_follow and self.released - chosen == {"cuda_graph"}:
            chosen.add("cuda_graph")
        if awake := chosen - self.released:
            raise CapabilityError(f"the engine is awake: the memory of {_listed(awake)} is not given back.")
        if not self.released:
            raise CapabilityError("the engine is awake: no memory is given back.")
        runner = self._loop.runner
        model = runner.model
        assert isinstance(model, Decoder)
        assert runner.cache_memory is not None
        if "weights" in chosen:
            self._restore_weights(model)
        if "kv_cache" in chosen:
            runner.cache_memory.restore()
            self.released.discard("kv_cache")
        if "cuda_graph" in chosen:
            runner.capture_graphs()
            self.released.discard("cuda_graph")
        if not self.released:
            self._loop.holds.discard(ASLEEP)

    def _restore_weights(self, model: Decoder) -> None:
        if model.weight_memory is not None and self._updates.absent:  # not if only reading them has failed
            model.weight_memory.restore(kept=self._kept)
        self._updates.absent = False
        if not self._kept:
            self._updates.lose()
            if not self._updates.given:
                self._reload()  # if that fails, they are still to be restored
        self.released.discard("weights")


def _chosen(tags: Sequence[str]) -> set[str]:
    if unknown := sorted(set(tags) - set(MEMORY_TAGS)):
        raise ParameterError("tags", f"{unknown[0]!r} is none of {', '.join(MEMORY_TAGS)}.")
    return set(tags) or set(MEMORY_TAGS)


def _listed(tags: set[str]) -> str:
    return " and ".join(sorted(tags))
