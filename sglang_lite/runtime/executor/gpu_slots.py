"""State of slots on the device, updated by the records of steps."""

from __future__ import annotations

import numpy as np
import torch

from sglang_lite.runtime.executor.gpu_adapters import GpuAdapters
from sglang_lite.runtime.executor.sampler import SamplingTable
from sglang_lite.runtime.executor.staging import Staging
from sglang_lite.runtime.executor.step_record import SAMPLING, SlotPages, StepRecord
from sglang_lite.runtime.kernels.attention_metadata import (
    DevicePlan,
    RotaryPositions,
    SharedPrefixes,
)
from sglang_lite.runtime.kernels.page_table import update_pages
from sglang_lite.runtime.kernels.sampling import DeviceSampling
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.models.lora.pool import COLUMN


class GpuSlots:
    """Pages, last token, sampling parameters and adapter of each slot, on the device.

    The last row is the dummy slot: padding rows of a graph read and write its dummy page.

    Args:
        pages: pages of the slots on the host, still empty.
        dummy_page: page of the dummy slot.
        staging: copies to the device.
        device: device of the state.
        window_dummy: the dummy page in the layers with a window, if they have separate pages.
        memory: adapters that slots may have; None if none may.
        axes: `RotaryPositions.axes` of the model; None if its tokens have one position.

    Attributes:
        dummy: index of the dummy slot.
        page_table: int32 [slots + 1, pages].
        window_table: the same for the layers with a window, or None.
        last_tokens: int32 [slots + 1], last drawn token of each slot.
        sampling: sampling parameters by slot, on the device.
        adapters: int32 [slots + 1], adapter of each slot; the number of adapters stands for none.
        axes: the argument.
    """

    def __init__(
        self,
        pages: SlotPages,
        dummy_page: int,
        staging: Staging,
        device: torch.device,
        window_dummy: int = 0,
        memory: GpuAdapters | None = None,
        axes: torch.Tensor | None = None,
    ) -> None:
        self.dummy = slots = len(pages.pages)
        self.axes = axes
        self._pages = pages
        self._sampling = SamplingTable(slots)
        self._staging = staging
        per_slot = pages.pages.shape[1]
        self.page_table = torch.zeros((slots + 1, per_slot), dtype=torch.int32, device=device)
        self.page_table[slots] = dummy_page
        self.window_table = None if pages.windows is None else torch.zeros_like(self.page_table)
        if self.window_table is not None:
            self.window_table[slots] = window_dummy
        self.last_tokens = torch.zeros(slots + 1, dtype=torch.int32, device=device)
        self._no_adapter = 0 if memory is None else memory.slots
        self._adapters = np.full(slots + 1, self._no_adapter, dtype=np.int32)
        self._parameters = torch.zeros((_WORDS + 1) * (slots + 1), dtype=torch.int32, device=device)
        self.adapters = self._parameters[_WORDS * (slots + 1) :]
        self.adapters.fill_(self._no_adapter)
        self.sampling = _view_parameters(self._parameters, slots + 1)

    def plan(
        self,
        ids: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        rotary: torch.Tensor | None,
        *,
        decoding: int,
        blocks: torch.Tensor,
        block_size: int,
        shared: SharedPrefixes | None = None,
    ) -> DevicePlan:
        """Returns the plan of a step's tokens. Takes the arguments of DevicePlan, except for
        `rotary`: positions [3, T], ignored unless the model has `axes`.
        """
        return DevicePlan(
            ids=ids,
            slots=slots,
            positions=positions,
            last_tokens=self.last_tokens,
            page_table=self.page_table,
            window_table=self.window_table,
            page_size=self._pages.page_size,
            decoding=decoding,
            shared=shared,
            blocks=blocks,
            block_size=block_size,
            rotary=None
            if rotary is None or self.axes is None
            else RotaryPositions(rotary, self.axes),
        )

    def any_filtered(self, slots: Ints) -> bool:
        """Returns True if a filter applies to the draws of any of these slots."""
        return bool(
            (self._sampling.has_filter(slots) & self._sampling.mask_of_sampled_slots(slots)).any()
        )

    def apply_record_on_device(self, record: StepRecord) -> None:
        """Applies the changes of a record, on the host and on the device."""
        adapters = record.changes_of(COLUMN)
        if len(record.started) or len(adapters.slots):
            self._sampling.set_parameters(record.started, record.sampling)
            self._adapters[adapters.slots] = np.where(
                adapters.values < 0, self._no_adapter, adapters.values
            )
            self._staging.send(
                np.concatenate((_pack_parameters(self._sampling), self._adapters)), self._parameters
            )
        self._pages.apply_record(record)
        if len(record.pages):
            update_pages(
                self.page_table, *self._staging.send_all(record.page_indices, record.pages)
            )
        if self.window_table is not None and len(record.window_pages):
            update_pages(
                self.window_table,
                *self._staging.send_all(record.window_indices, record.window_pages),
            )


# words of a slot's parameters: two for the seed, and one for each other parameter
_WORDS = SAMPLING.itemsize // 4


def _pack_parameters(sampling: SamplingTable) -> Ints:
    """Returns the sampling parameters of all slots and of the dummy slot as one int32 array, in the
    layout of `_view_parameters`.
    """
    rows: Ints = sampling.rows.view(np.int32).reshape(-1, _WORDS)
    count = len(rows)
    packed = np.zeros((_WORDS, count + 1), dtype=np.int32)
    packed[:2].reshape(-1)[: 2 * count] = rows[:, :2].reshape(-1)
    packed[2:, :count] = rows[:, 2:].T
    return packed.reshape(-1)


def _view_parameters(packed: torch.Tensor, slots: int) -> DeviceSampling:
    """Returns views of the parameters in the packed array. It holds the seeds of all slots first,
    then the other parameters in the order of SAMPLING.
    """
    views = {"seed": packed[: 2 * slots].view(torch.int64)}
    for i, name in enumerate((SAMPLING.names or ())[1:], 2):
        words = packed[i * slots : (i + 1) * slots]
        views[name] = words.view(torch.float32) if SAMPLING[name].kind == "f" else words
    return DeviceSampling(**views)
