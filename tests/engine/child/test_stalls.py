"""Reports of steps that stand still, and the settings that only an engine in a process of its own
has.
"""

import logging
import threading

import pytest

import sglang_lite as sgl
from sglang_lite.protocol import SamplingParams
from tests.engine import processors
from tests.engine.conftest import SETTINGS


def test_a_step_that_stands_still_is_reported_with_where_it_is(folders):
    found, told = [], threading.Event()

    class Handler(logging.Handler):
        def emit(self, record):
            if "stood still" in record.getMessage():
                found.append(record.getMessage())
                told.set()

    handler = Handler()
    logging.getLogger("sglang_lite").addHandler(handler)
    try:
        with sgl.Engine(folders[0], **SETTINGS, stall_timeout_s=0.2) as engine:
            engine.submit(
                "ab", SamplingParams(), logit_processor=processors.hanging, sink=lambda event: None
            )
            assert told.wait(60)
    finally:
        logging.getLogger("sglang_lite").removeHandler(handler)
    assert "in hanging" in found[-1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stall_timeout_s": 0}, "stall_timeout_s: 0 is no number of seconds above 0"),
        ({"stall_timeout_s": "soon"}, "stall_timeout_s: 'soon'"),
        ({"stream_interval_s": -1}, "stream_interval_s: -1 is no number of seconds from 0 to 60"),
        ({"stream_interval_s": float("nan")}, "stream_interval_s: nan"),
        ({"restart": 1.5}, "restart: 1.5 is not one of"),
        ({"in_process": "yes"}, "in_process: 'yes' is not one of"),
        (
            {"in_process": True, "restart": True},
            "restart: is for an engine in its own process, not with in_process=True",
        ),
        ({"in_process": True, "stall_timeout_s": 5.0}, "stall_timeout_s: is for"),
        ({"in_process": True, "stream_interval_s": 0.02}, "stream_interval_s: is for"),
    ],
)
def test_what_has_no_meaning_is_refused_by_name(settings, message):
    with pytest.raises(sgl.ParameterError, match=message):
        sgl.Engine("nowhere", **settings)
