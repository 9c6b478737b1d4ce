"""Programs that are open at a server."""

import threading

import sglang_lite as sgl
from sglang_lite.program.nodes import Gen, Mark, Rollback, Text
from sglang_lite.protocol import Played, ProgramResult, SamplingParams
from tests.engine.conftest import SETTINGS
from tests.server.conftest import serving


def test_a_drop_before_the_first_request_ends_only_what_stands_before_it(folders):
    """The first request is sent a moment later, with all that was added meanwhile."""
    events, ended = [], threading.Event()

    def sink(event):
        events.append(event)
        if not isinstance(event, Played):
            ended.set()

    params = SamplingParams(max_tokens=4, ignore_eos=True)
    with sgl.Engine(folders[0], **SETTINGS, in_process=True) as engine, serving(engine) as url:
        backend = sgl.RuntimeEndpoint(url)
        program = backend.open_program(sink, stream=False)
        program.extend((), (Text("ab"), Mark(), Gen("x", params)))
        program.drop(())
        program.extend((), (Rollback(1), Gen("y", params)))
        program.close()
        assert ended.wait(60)
        backend.shutdown()
    assert isinstance(events[-1], ProgramResult), events
    assert (4,) in [each.path for each in events[:-1]]
