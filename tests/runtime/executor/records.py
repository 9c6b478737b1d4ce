"""Records of steps, and the pages that runners know from them."""

import numpy as np

from sglang_lite.runtime.executor.step_record import SlotPages, StepWriter
from sglang_lite.runtime.scheduler.batch import Batch


def step(table, starts, ends, singles=None):
    """A step of rows that compute start … end, one a slot; and the pages of its slots, which are
    those of `table`.
    """
    starts, ends = np.asarray(starts, dtype=np.int32), np.asarray(ends, dtype=np.int32)
    rows = len(starts)
    slots = np.arange(rows, dtype=np.int32)
    table.page_count[slots] = table.pages.shape[1]
    batch = Batch(
        step=0, requests=(), slots=slots, epochs=table.epoch[slots], starts=starts, ends=ends, decoding=0,
        singles=int((ends - starts == 1).sum()) if singles is None else singles, draws=np.ones(rows, dtype=bool),
        pending=np.zeros(rows, dtype=bool), started=(), copies=np.zeros((2, 0), dtype=np.int32),
    )  # fmt: skip
    record = StepWriter(table).write_record(batch)
    pages = SlotPages(len(table.length), table.tokens.shape[1] - 1, table.page_size)
    pages.apply_record(record)
    return record, pages
