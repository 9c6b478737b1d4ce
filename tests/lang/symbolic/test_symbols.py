"""Limits of a trace."""

from sglang_lite.lang.symbolic.recorder import MAX_NODES
from sglang_lite.runtime.core.submission import MAX_QUEUED


def test_a_trace_has_as_many_steps_as_an_engine_queues():
    assert MAX_NODES == MAX_QUEUED
