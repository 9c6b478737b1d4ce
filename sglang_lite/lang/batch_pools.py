"""Choice of the pool that runs the items of a batch: bodies, or a cluster."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from sglang_lite.lang.batches.batch import BatchPlan, Item, saving
from sglang_lite.lang.batches.body_pool import AsyncBodyPool, AwaitedPool, BodyPool, Pool, PoolOnLoop, Report
from sglang_lite.lang.body_run import BodyRun
from sglang_lite.lang.state import ProgramState

if TYPE_CHECKING:
    from sglang_lite.lang.function import SglFunction


def pool_of(program: SglFunction, plan: BatchPlan, report: Report, *, until_released: bool) -> Pool:
    """Pool for the items of a batch whose outcomes are not known yet. `report` and `until_released` are as for
    BodyPool."""
    saved = saving(report, plan.file)
    if plan.cluster is not None:
        return plan.cluster.pool(program, plan, saved, until_released=until_released)
    if program.is_async:
        return _async_bodies(program, plan, report, until_released=until_released)

    def call(item: Item) -> BodyRun:
        return program.prepared(item[0], item[1], plan.options, plan.settings)

    return BodyPool(call, plan.pending, plan.window, saved, until_released=until_released)


def async_pool_of(program: SglFunction, plan: BatchPlan, report: Report, *, until_released: bool) -> PoolOnLoop:
    """`pool_of` for a caller that awaits the pool on an event loop."""
    if plan.cluster is None:
        return _async_bodies(program, plan, report, until_released=until_released)
    return AwaitedPool(partial(pool_of, program, plan, until_released=until_released), report)


def _async_bodies(program: SglFunction, plan: BatchPlan, report: Report, *, until_released: bool) -> AsyncBodyPool:
    async def body(item: Item) -> ProgramState:
        call = program.prepared(item[0], item[1], plan.options, plan.settings)
        await call.arun()
        return call.state

    return AsyncBodyPool(body, plan.pending, plan.window, saving(report, plan.file), until_released=until_released)
